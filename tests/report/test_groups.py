from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fedpick import availability
from fedpick.core.errors import InvalidInput
from fedpick.core.record import RoundRecord
from fedpick.core.types import Clients, Outcome, Selection
from fedpick.experiments.spec import Named
from fedpick.experiments.store import Store
from fedpick.report import analysis, groups, tables
from fedpick.report.charts import sections_of
from fedpick.report.material import ABSENT as NO
from fedpick.report.material import AVAILABLE as YES
from fedpick.report.material import CHOSEN as IN
from fedpick.report.material import EXCLUDED as OUT
from fedpick.report.material import SHUT_OUT as OFF
from fedpick.report.material import read_material
from fedpick.theory.ca_fed import cumulative_importance
from tests.report.report_store import make_spec, make_store

SIZES = np.array([1.0, 2.0, 3.0, 4.0])
ROUNDS = [([0, 1], [0.5, 0.5]), ([], []), ([1], [2.0]), ([0, 3], [0.0, 1.0])]
AVAILABLE = [[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]]
EXCLUDED = [[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 1]]


def made_record(index, available, clients, weights, diagnostics=None):
    """A round in which all selected clients completed."""
    chosen = np.array(clients, np.int64)
    return RoundRecord(
        index=index,
        selection=Selection(clients=chosen, diagnostics=diagnostics or {}),
        outcome=Outcome(index=index, clients=chosen, completed=np.ones(len(chosen), bool)),
        weights=np.array(weights, float),
        available=np.array(available, bool),
    )


@pytest.fixture
def store(tmp_path) -> Store:
    """Two clusters of two clients, four rounds written by hand."""
    process = Named(name="clustered", options={"num_clusters": 2, "history": 3})
    spec = dataclasses.replace(make_spec(("uniform", "ca-fed"), seeds=1, rounds=4), availability=process)
    made = Store(tmp_path / "a.sqlite")
    for run in made.runs(made.register(spec)):
        made.update_run(
            run.id,
            federation_id=made.put_federation(
                "f", data="toy", partition="toy", num_clients=4, num_classes=0,
                num_examples=SIZES.astype("<f8").tobytes(), label_histogram=None,
            ),
        )  # fmt: skip
        made.take(run.id)
        for index, (clients, weights) in enumerate(ROUNDS):
            told = {"excluded_mask": np.array(EXCLUDED[index], bool)} if run.policy == "ca-fed" else {}
            record = made_record(index, AVAILABLE[index], clients, weights, told)
            made.write_round(run.id, record, checkpoint=None)
    return made


def names(found: groups.Groups) -> np.ndarray:
    """(N,) the name of every client's group."""
    return np.array(found.names)[found.member]


def test_groups_are_those_of_the_availability_process(store):
    run = store.runs(1)[0]
    found = names(groups.groups_of(store, run, "cluster")).tolist()
    assert found == ["cluster 0"] * 2 + ["cluster 1"] * 2
    # The default clusters: the first half is there in 0.9 of the rounds, the second in 0.1 with lambda = 1/2.
    found = names(groups.groups_of(store, run, "availability")).tolist()
    assert found == ["more available, weakly correlated"] * 2 + ["less available, correlated"] * 2
    with pytest.raises(InvalidInput, match="availability or cluster"):
        groups.groups_of(store, run, "size")


def test_a_random_population_is_rebuilt_as_the_run_saw_it(tmp_path):
    options = {"variant": "authors", "split": "random"}
    process = Named(name="correlated-population", options=options)
    made = make_store(tmp_path / "a.sqlite", dataclasses.replace(make_spec(rounds=1), availability=process))
    for run in made.runs(1):
        facts = made.federation(run.federation_id)
        clients = Clients(num_examples=facts.num_examples, label_histogram=facts.label_histogram.astype(float))
        trace = availability.get("correlated-population", **options).start(clients, run.seed)
        found = names(groups.groups_of(made, run, "availability"))
        assert np.array_equal(np.char.startswith(found, "more"), trace.availability > 0.5)
    with pytest.raises(InvalidInput, match="has no clusters"):
        groups.groups_of(made, made.runs(1)[0], "cluster")


def test_logs_that_are_read_at_the_time_of_the_clock_have_groups(tmp_path):
    log = tmp_path / "log.csv"
    lines = [
        f"{client},{time},{state}"
        for client in range(40)
        for time, state in ((0, "on"), (client + 1, "off"), (60, "on"))
    ]
    log.write_text("\n".join(["client,time,state", *lines]) + "\n")
    options = {"path": str(log), "round_seconds": 1.0, "clock": True}
    spec = dataclasses.replace(make_spec(seeds=1), availability=Named(name="trace", options=options))
    made = make_store(tmp_path / "a.sqlite", spec, done=1)
    found = groups.find_groups(made, made.runs(1)[0])
    assert found is not None and found.by == "availability"


def test_importance_adds_up_as_by_hand(store):
    run = store.runs(1)[0]
    by_cluster = groups.groups_of(store, run, "cluster")
    account = groups.account_groups(store, run, by_cluster)
    assert account.groups.names == ("cluster 0", "cluster 1")
    assert account.target == pytest.approx({"cluster 0": 0.3, "cluster 1": 0.7})
    assert account.cumulative == pytest.approx(np.array([[1, 0], [1, 0], [1, 0], [0.75, 0.25]]))
    # Weights so far: (0.5, 0.5, 0, 0); the same; (0.5, 2.5, 0, 0); (0.5, 2.5, 0, 1). Target: (0.1, 0.2, 0.3, 0.4).
    assert account.distance == pytest.approx([0.7, 0.7, 0.7, 0.5 * (0.025 + 0.425 + 0.3 + 0.15)])
    rounds = ((record.selection.clients, record.weights) for record in store.records(run.id))
    realized = cumulative_importance(rounds, 4)
    assert realized == pytest.approx([0.125, 0.625, 0, 0.25])
    assert groups.account_groups(store, run, by_cluster, kept=np.array([0])).realized == {
        "cluster 0": 1.0,
        "cluster 1": 0.0,
    }
    assert account.total_variation == pytest.approx(0.45)
    assert account.realized == pytest.approx({"cluster 0": 0.75, "cluster 1": 0.25})
    assert account.target == pytest.approx({"cluster 0": 0.3, "cluster 1": 0.7})
    assert account.excluded == {}
    # The third client never entered the model.
    assert account.chi_square == np.inf


def test_exclusion_counts_clients_and_whole_groups(store):
    run = store.runs(1)[1]
    by_cluster = groups.groups_of(store, run, "cluster")
    found = groups.account_groups(store, run, by_cluster).excluded
    assert found == {"cluster 0": (pytest.approx(5 / 8), 0.5), "cluster 1": (pytest.approx(1 / 8), 0.0)}
    assert groups.account_groups(store, run, by_cluster, kept=np.array([0])).excluded["cluster 0"] == (1.0, 1.0)


def test_left_out_counts_only_those_who_were_there(store):
    run = store.runs(1)[0]
    by_cluster = groups.groups_of(store, run, "cluster")
    found = groups.account_groups(store, run, by_cluster).left_out
    # cluster 0: there 2 + 0 + 2 + 2, chosen 2 + 0 + 1 + 1; cluster 1: there 0 + 2 + 0 + 2, chosen 0 + 0 + 0 + 1.
    assert found == {"cluster 0": (pytest.approx(1 / 3), 0.0), "cluster 1": (0.75, 0.5)}
    assert groups.account_groups(store, run, by_cluster, kept=np.array([0])).left_out == {"cluster 0": (0.0, 0.0)}


def test_the_grouping_that_tells_most_is_found(store, tmp_path):
    best = groups.find_groups(store, store.runs(1)[0])
    assert (best.by, best.names, best.sizes.tolist()) == ("cluster", ("cluster 0", "cluster 1"), [2, 2])
    assert groups.find_groups(store, store.runs(1)[0], most=1) is None
    cases = {
        "correlated-population": ({"variant": "authors"}, "availability"),
        "ideal": ({}, None),
        "trace": ({"path": str(tmp_path / "missing.npz")}, None),
    }
    for name, (options, wanted) in cases.items():
        spec = dataclasses.replace(make_spec(rounds=1, seeds=1), availability=Named(name=name, options=options))
        made = make_store(tmp_path / f"{name}.sqlite", spec)
        found = groups.find_groups(made, made.runs(1)[0])
        assert (None if found is None else found.by) == wanted, name
        assert bool(read_material(made).accounts) == (wanted is not None)
        assert ("groups" in {section.key for section in sections_of(read_material(made))}) == (wanted is not None)
        made.close()


def test_clients_are_ordered_by_group_then_by_correlation():
    made = groups.Groups("availability", ("a", "b"), np.array([1, 0, 1, 0]), np.array([-0.9, 0.5, 0.1, 0.5]))
    assert made.order.tolist() == [1, 3, 2, 0]


def test_the_raster_tells_excluded_from_not_chosen(store):
    material = read_material(store)
    uniform, careful = (material.histories[run.id].raster.exact for run in store.runs(1))
    expected = [[IN, NO, YES, IN], [IN, NO, IN, YES], [NO, YES, NO, YES], [NO, YES, NO, IN]]
    assert uniform.tolist() == expected
    # ca-fed: client 0 in round 2, when it was away; client 1 in round 4. Those chosen all the same stay chosen.
    expected[0][1], expected[1][3] = OFF, OUT
    assert careful.tolist() == expected


def test_the_charts_of_groups_are_the_accounts(store):
    section = next(each for each in sections_of(read_material(store)) if each.key == "groups")
    bars, lines = section.charts
    assert bars.data["groups"] == ["cluster 0", "cluster 1"]
    measures = {measure["key"]: measure for measure in bars.data["measures"]}
    assert measures["importance"]["target"] == [0.3, 0.7]
    assert [cell["mean"] for cell in measures["importance"]["series"]["ca-fed"]] == [0.75, 0.25]
    assert [cell["mean"] for cell in measures["left-out"]["series"]["uniform"]] == [0.33333, 0.75]
    assert [cell["mean"] for cell in measures["wholly-left-out"]["series"]["uniform"]] == [0, 0.5]
    assert list(measures["excluded"]["series"]) == ["ca-fed"]
    drawn = {measure["key"]: measure for measure in lines.data["measures"]}
    assert drawn["distance"]["series"]["uniform"]["mean"] == [0.7, 0.7, 0.7, 0.45]
    assert drawn["cluster 1"]["reference"] == {"name": "target", "value": 0.7}
    assert drawn["cluster 1"]["series"]["uniform"]["mean"] == [0, 0, 0, 0.25]


def test_the_table_has_a_line_per_policy_and_group(store):
    results = analysis.load_results(store, store.experiment())
    accounts = groups.accounts_of(store, results, "cluster")
    table = tables.group_table(results, accounts)
    assert table.title == "Importance by cluster"
    assert table.cells() == [
        ["uniform: cluster 0", "2", "30.0", "75.0", "33.3", "0.0", "", ""],
        ["uniform: cluster 1", "2", "70.0", "25.0", "75.0", "50.0", "", ""],
        ["ca-fed: cluster 0", "2", "30.0", "75.0", "33.3", "0.0", "62.5", "50.0"],
        ["ca-fed: cluster 1", "2", "70.0", "25.0", "75.0", "50.0", "12.5", "0.0"],
    ]
    assert table.policies == ("uniform", "uniform", "ca-fed", "ca-fed")
    assert tables.group_table(results, read_material(store).accounts).cells() == table.cells()
    assert "policy: group,seeds" in tables.to_csv(table)
    assert r"\%" in tables.to_latex(table)


def test_the_distance_from_the_target_has_a_line_per_policy(store):
    results = analysis.load_results(store, store.experiment())
    accounts = groups.accounts_of(store, results, "cluster")
    far = tables.distance_table(results, accounts)
    # 4 * 0.45^2 = 0.81; the third client never entered the model.
    assert far.cells() == [["uniform", "0.450", "0.810", "N/A"], ["ca-fed", "0.450", "0.810", "N/A"]]


def test_the_chi_square_divergence_is_finite_once_every_client_entered_the_model(store):
    everybody = made_record(4, [True] * 4, np.arange(4), [3.5, 1.5, 4.0, 3.0])
    run = store.runs(1)[0]
    store.write_round(run.id, everybody, checkpoint=None)
    run = store.runs(1)[0]
    account = groups.account_groups(store, run, groups.groups_of(store, run, "cluster"))
    # All four clients have a quarter of the weight now; their targets are 0.1, 0.2, 0.3 and 0.4.
    # (0.1 - 0.25)^2 / 0.25 + (0.2 - 0.25)^2 / 0.25 + (0.3 - 0.25)^2 / 0.25 + (0.4 - 0.25)^2 / 0.25 = 0.2.
    assert account.chi_square == pytest.approx(0.2)
    results = analysis.load_results(store, store.experiment())
    far = tables.distance_table(results, {run.id: account})
    assert far.cells() == [["uniform", "0.200", "0.160", "0.200"]]


def test_settings_without_a_name_of_the_availability_are_told_in_a_sentence(tmp_path):
    store = make_store(tmp_path / "a.sqlite", make_spec(("uniform",), seeds=1))
    (run,) = store.runs(store.experiment().id)
    damaged = dataclasses.replace(run, settings={**run.settings, "availability": {"history": 3}})
    with pytest.raises(InvalidInput, match="name no availability"):
        groups._rebuilt_trace(store, damaged)
