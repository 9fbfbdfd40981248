from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fedpick.core.errors import InvalidInput, UnknownName
from fedpick.experiments.spec import Named, PolicySpec
from fedpick.report import analysis, write_figures, write_report
from fedpick.report.charts import sections_of
from fedpick.report.charts.chart import numbers
from fedpick.report.material import read_material
from fedpick.report.tables import difference_table
from tests.report.report_store import make_spec, make_store


def sweep_spec(values=(0.1, 1.0, 10.0), **options):
    lines = [
        PolicySpec(name="ca-fed", label=f"ca-fed {value:g}", parameters={"kappa2": value, "tau": 0.0})
        for value in values
    ]
    return dataclasses.replace(
        make_spec(**{"seeds": 2, "rounds": 6, **options}),
        policies=(PolicySpec(name="uniform", label="uniform", parameters={}), *lines),
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    made = make_store(tmp_path_factory.mktemp("sweep") / "s.sqlite", sweep_spec((10.0, 0.1, 1.0)))
    yield made
    made.close()


def chart(store, key, **options):
    return {each.key: each for section in sections_of(read_material(store), **options) for each in section.charts}[key]


def test_three_values_make_a_sweep_and_other_parameters_must_agree(store, tmp_path):
    (found,) = analysis.sweeps_of(analysis.load_results(store, store.experiment()))
    assert (found.policy, found.parameter, found.values) == ("ca-fed", "kappa2", (0.1, 1.0, 10.0))
    assert [line.label for line in found.lines] == ["ca-fed 0.1", "ca-fed 1", "ca-fed 10"]
    two = make_store(tmp_path / "two.sqlite", sweep_spec((0.1, 1.0)))
    assert analysis.sweeps_of(analysis.load_results(two, two.experiment())) == []
    spec = sweep_spec()
    changed = dataclasses.replace(spec.policies[-1], parameters={"kappa2": 10.0, "tau": 0.5})
    mixed = make_store(tmp_path / "m.sqlite", dataclasses.replace(spec, policies=(*spec.policies[:-1], changed)))
    assert analysis.sweeps_of(analysis.load_results(mixed, mixed.experiment())) == []


def test_the_best_value_by_round_is_that_of_the_highest_mean(store):
    (found,) = analysis.sweeps_of(analysis.load_results(store, store.experiment()))
    rows = {
        0.1: ([0.1, 0.5, 0.7], [0.1, 0.5, np.nan]),
        1.0: ([0.3, 0.5, 0.8], [0.1, 0.5, 0.9]),
        10.0: ([0, 0, 0.9],) * 2,
    }
    for value, line in zip(found.values, found.lines, strict=True):
        for run, accuracy in zip(line.runs, rows[value], strict=True):
            run.rounds["accuracy"][:3], run.rounds["accuracy"][3:] = accuracy, np.nan
    rounds, best = analysis.best_by_round(found)
    # Round 2: two are level, the smaller value counts; round 3: one seed was not evaluated.
    assert (rounds.tolist(), best.tolist()) == ([1, 2], [1.0, 0.1])


def test_the_sweep_on_the_page_is_the_final_accuracy(store):
    drawn = chart(store, "sweep-ca-fed-kappa2").data
    results = analysis.load_results(store, store.experiment())
    wanted = [
        analysis.over_seeds(analysis.policy_named(results, label), analysis.final_accuracy) for label in drawn["labels"]
    ]
    assert drawn["labels"] == ["ca-fed 0.1", "ca-fed 1", "ca-fed 10"]
    assert drawn["mean"] == [numbers(quantity.mean) for quantity in wanted]
    assert drawn["sd"] == [numbers(quantity.sd) for quantity in wanted]
    assert [each["label"] for each in drawn["references"]] == ["uniform"]
    assert drawn["logarithmic"]


def test_two_sweeps_of_one_hyper_parameter_have_keys_of_their_own(tmp_path):
    spec = sweep_spec(seeds=1)
    family = [each for each in spec.policies if "kappa2" in each.parameters]
    other = [
        dataclasses.replace(each, label=f"{each.label}, tau", parameters={**each.parameters, "tau": 0.5})
        for each in family
    ]
    made = make_store(tmp_path / "s.sqlite", dataclasses.replace(spec, policies=(*spec.policies, *other)))
    for key, line in (("sweep-ca-fed-kappa2", family), ("sweep-ca-fed-kappa2-2", other)):
        assert chart(made, key).data["labels"] == [each.label for each in line]
    made.close()


def test_the_forest_is_the_table_of_differences(store, tmp_path):
    results = analysis.load_results(store, store.experiment())
    drawn = chart(store, "differences", against="uniform").data
    assert drawn["measures"][0]["key"] == "final accuracy %"
    table = difference_table(results, "uniform")
    place = [column.heading for column in table.columns].index("final accuracy %")
    for label, quantities in table.lines:
        mean, _, low, high = table.columns[place].numbers(quantities[place])
        cell = drawn["measures"][0]["series"][label]
        assert (cell["mean"], cell["low"], cell["high"]) == (numbers(mean), numbers(low), numbers(high))
        assert cell["text"] == table.columns[place].text(quantities[place])
    with pytest.raises(UnknownName, match="unifrom"):
        write_report(store, tmp_path / "r.html", against="unifrom")
    text = write_report(store, tmp_path / "r.html", against="uniform").read_text(encoding="utf-8")
    assert "<h3>Paired differences to uniform</h3>" in text
    assert "Paired differences" not in write_report(store, tmp_path / "n.html").read_text(encoding="utf-8")


def test_one_seed_has_a_mean_but_no_interval(tmp_path):
    made = make_store(tmp_path / "s.sqlite", sweep_spec(seeds=1))
    cell = chart(made, "differences", against="uniform").data["measures"][0]["series"]["ca-fed 1"]
    assert (cell["low"], cell["high"]) == (None, None)
    assert cell["mean"] is not None
    files = {path.name for path in write_figures(made, tmp_path / "f", formats=("svg",), against="uniform")}
    assert {"differences.svg", "sweep-ca-fed-kappa2.svg", "sweep-ca-fed-kappa2-best.svg"} <= files
    made.close()


def test_one_measure_over_several_experiments(tmp_path):
    def spec(alpha, labels=("uniform", "fedgs")):
        process = Named(name="log-normal", options={"beta": alpha})
        return dataclasses.replace(make_spec(labels, rounds=3, title=f"beta {alpha}"), availability=process)

    made = make_store(tmp_path / "s.sqlite", spec(0.5))
    make_store(tmp_path / "s.sqlite", spec(0.1)).close()
    experiments = made.experiments()
    found = analysis.over_setting(made, experiments, "availability.beta")
    assert {label: [value for value, _ in points] for label, points in found.items()} == {
        "uniform": [0.1, 0.5],
        "fedgs": [0.1, 0.5],
    }
    results = analysis.load_results(made, made.experiment("beta 0.1"))
    assert found["fedgs"][0][1].values == analysis.over_seeds(results.policies[1], analysis.final_accuracy).values
    with pytest.raises(InvalidInput, match=r"twice with availability\.beta = 0\.5"):
        analysis.over_setting(made, [made.experiment("beta 0.5")] * 2, "availability.beta")
    with pytest.raises(InvalidInput, match=r"has a number at 'data\.alpha'"):
        analysis.over_setting(made, experiments, "data.alpha")
    with pytest.raises(InvalidInput, match=r"section\.key"):
        analysis.setting_of(made.runs(1)[0], "beta")
    made.close()
