"""Results by time: tables, axes, the chart of one round, the verdict, the command line."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("plotly")

from typer.testing import CliRunner

from fedpick.cli.app import app
from fedpick.experiments.runner import run
from fedpick.experiments.store import Store
from fedpick.report import analysis, tables
from fedpick.report.charts import sections_of
from fedpick.report.html import page_of
from fedpick.report.material import read_material
from fedpick.report.verdict import verdict_of
from fedpick.sim.clock import Status
from tests.experiments.test_time import timed_spec
from tests.experiments.tiny import tiny_spec


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("time") / "a.sqlite")
    spec = timed_spec(8, ("uniform", "pow-d")).override(seeds=2, targets=[0.15, 0.99])
    assert run(spec, store, processes=1).complete
    return store


def test_tables_show_time_to_target_and_work_thrown_away(store):
    results = analysis.load_results(store, store.experiment())
    shown = {table.title: table for table in tables.tables_of(results)}[tables.CLOCK_TITLE]
    assert [column.heading for column in shown.columns] == [
        "seconds to 15 %",
        "seconds to 99 %",
        "seconds per round",
        "work thrown away %",
    ]
    (_, uniform), (_, pow_d) = shown.lines
    first = results.policies[0].runs[0]
    reached = np.flatnonzero(first.rounds["accuracy"] >= 0.15)[0]
    assert uniform[0].values[0] == first.rounds["clock"][reached]
    assert uniform[1].mean is None
    # A question to twice as many clients before every round.
    assert pow_d[2].mean > uniform[2].mean
    wasted = spent = 0.0
    for _, (*parts, status) in store.arrays(first.run.id, "evaluation/times"):
        end = max((sum(each) for *each, state in zip(*parts, status, strict=True) if state == 0), default=0.0)
        for *each, state in zip(*parts, status, strict=True):
            seconds = min(sum(each), end) if state == Status.CANCELLED else sum(each)
            spent += seconds
            wasted += seconds if state != Status.ANSWERED else 0.0
    assert uniform[3].values[0] == pytest.approx(wasted / spent)
    assert 0 < wasted < spent
    assert "seconds to 15 %" in [each.heading for each in tables.difference_table(results, "uniform").columns]


def test_without_a_clock_nothing_is_added(tmp_path):
    store = Store(tmp_path / "a.sqlite")
    run(tiny_spec(("uniform",), rounds=2, seeds=1), store, processes=1)
    results = analysis.load_results(store, store.experiment())
    assert tables.CLOCK_TITLE not in [table.title for table in tables.tables_of(results)]
    with_axes = sections_of(read_material(store, None))
    assert "clock" not in with_axes[0].charts[0].data["axes"]
    assert "time" not in [section.key for section in with_axes]
    assert verdict_of(results, by="time") == verdict_of(results, by="equal-time") == verdict_of(results)
    assert '"axis":"round"' in page_of(read_material(store, None), by="equal-time")


def test_charts_have_a_third_axis_and_one_round(store):
    material = read_material(store, None)
    sections = {section.key: section for section in sections_of(material)}
    accuracy = sections["results"].charts[0].data
    assert accuracy["axes"] == ["round", "bytes", "clock"]
    clock = [each.rounds["clock"] for each in material.results.policies[0].runs]
    assert accuracy["measures"][0]["series"]["uniform"]["clock"] == pytest.approx(np.mean(clock, axis=0), rel=1e-4)
    (chart,) = sections["time"].charts
    view = chart.data["views"][0]
    finish = np.sum([view["receiving"], view["computing"], view["sending"]], axis=0)
    assert (np.diff(finish) >= 0).all() and len(view["status"]) == len(finish)
    assert view["status"].count("in time") >= 1 and 0 < view["end"] <= finish.max() * 1.001
    assert '"axis":"clock"' in page_of(material, by="time")


def test_the_verdict_can_be_by_time(store):
    results = analysis.load_results(store, store.experiment())
    assert "seconds to 15 %" in " ".join(verdict_of(results, by="time").sentences)
    soonest = min(run.clock[-1] for policy in results.policies for run in policy.runs)
    assert f"accuracy after {soonest:.3g} seconds" in " ".join(verdict_of(results, by="equal-time").sentences)


def test_compare_by_time_in_one_command(tmp_path):
    words = "compare --dataset synthetic --policies uniform,md --devices phones --by time --rounds 3 --seeds 2"
    words += f" --targets 0.1 --processes 1 --no-report -q --store {tmp_path / 'a.sqlite'}"
    answer = CliRunner().invoke(app, words.split())
    assert answer.exit_code == 0, answer.output
    assert "seconds to 10 %" in answer.output
    wrong = CliRunner().invoke(app, [*words.split(), "--by", "luck"])
    assert wrong.exit_code != 0
