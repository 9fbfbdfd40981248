"""Histories read many rounds at a time, against the plain definitions; and a report of a million rounds."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("plotly")

from fedpick.core.record import RoundRecord
from fedpick.core.types import Outcome, Selection
from fedpick.experiments import store as store_module
from fedpick.experiments.store import StoreError
from fedpick.report import analysis, groups
from fedpick.report import material as material_module
from fedpick.report.charts.chart import Measure, column, line_data
from fedpick.report.groups import account_groups, groups_of
from fedpick.report.material import population_of, read_material
from fedpick.theory.ca_fed import total_variation
from tests.report.large_store import make_large_store
from tests.report.report_store import make_spec, make_store

ROUNDS = 53


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Batches of 7 rounds, every sixth round kept; a third of the cohorts are empty, and one run is not finished."""
    monkeypatch.setattr(store_module, "_BATCH_ROUNDS", 7)
    monkeypatch.setattr(analysis, "_MOST_KEPT", 9)
    monkeypatch.setattr(material_module, "_EXACT_ROUNDS", 5)
    made = make_store(tmp_path / "a.sqlite", make_spec(rounds=ROUNDS), done=0, num_clients=17)
    rng = np.random.default_rng(3)
    for run in made.runs(1):
        made.take(run.id)
        for index in range(ROUNDS if run.seed == 0 else 40):
            there = rng.random(17) < 0.7
            size = 0 if index % 3 == 1 else min(4, there.sum())
            chosen = rng.choice(np.flatnonzero(there), size, replace=False)
            record = RoundRecord(
                index=index,
                selection=Selection(clients=chosen, diagnostics={"seen": index} if index % 5 == 2 else {}),
                outcome=Outcome(index=index, clients=chosen, completed=rng.random(size) < 0.7),
                weights=rng.random(size),
                available=there,
            )
            made.write_round(run.id, record, checkpoint=None)
        made.release(run.id)
    yield made
    made.close()


def test_histories_are_those_of_the_plain_definitions(store):
    material = read_material(store)
    for run in material.all_begun():
        history, federation = material.histories[run.run.id], material.federations[run.run.id]
        kept, population = run.kept.tolist(), population_of(federation)
        assert kept == [*range(5, len(run.rounds["round"]), 6), len(run.rounds["round"]) - 1][: len(kept)]
        assert kept[-1] == len(run.rounds["round"]) - 1
        counts, weight, mixes, since = np.zeros(17), np.zeros(17), [], []
        available, chosen, sizes = np.zeros(history.raster.available.shape), np.zeros(history.raster.chosen.shape), []
        columns = available.shape[1]
        for record in store.records(run.run.id):
            clients, weights = record.selection.clients, record.weights
            counts[clients] += 1
            weight[clients] += weights
            mix = federation.label_histogram[clients[record.outcome.completed]].sum(axis=0)
            if mix.sum():
                mixes.append(mix / mix.sum())
                since.append(mix / mix.sum())
            place = record.index * columns // len(run.rounds["round"])
            available[:, place] += record.available
            chosen[clients, place] += 1
            sizes.append(place)
            if record.index not in kept:
                continue
            at = kept.index(record.index)
            assert history.coverage[at] == (counts > 0).mean()
            assert history.variance[at] == pytest.approx(counts.var())
            assert history.jain[at] == pytest.approx(counts.sum() ** 2 / (17 * (counts**2).sum()))
            assert history.weight_sum[at] == pytest.approx(weights.sum())
            assert history.weight_max[at] == max(weights, default=0)
            assert history.effective[at] == pytest.approx(
                weights.sum() ** 2 / (weights**2).sum() if weights.any() else 0
            )
            expected = total_variation(mix / mix.sum(), population) if mix.sum() else np.nan
            assert history.label_distance[at] == pytest.approx(expected, nan_ok=True)
            assert history.label_distance_so_far[at] == pytest.approx(
                total_variation(np.mean(mixes, axis=0), population)
            )
            expected = np.mean(since, axis=0) if since else np.full(len(population), np.nan)
            assert history.labels[at] == pytest.approx(expected, nan_ok=True)
            since = []
        np.testing.assert_allclose(history.weight_per_client, weight)
        np.testing.assert_array_equal(run.counts, counts)
        per_column = np.bincount(sizes)
        np.testing.assert_allclose(history.raster.available, available / per_column, rtol=1e-6)
        np.testing.assert_allclose(history.raster.chosen, chosen / per_column, rtol=1e-6)
        seen = history.diagnostics["seen"]
        assert [index for index in range(len(seen)) if seen[index] == index] == [*range(2, len(seen), 5)]


def test_accounts_are_those_of_the_plain_definitions(store):
    results = analysis.load_results(store, store.experiment())
    for each in (run for policy in results.policies for run in policy.runs):
        run = each.run
        found = groups_of(store, run, "availability")
        assert len(found.names) > 1
        account = groups.accounts_of(store, results, "availability")[run.id]
        whole = account_groups(store, run, found)
        examples = store.federation(run.federation_id).num_examples
        weight, present, chosen, met, passed = np.zeros(17), *np.zeros((4, len(found.names)))
        for record in store.records(run.id):
            weight[record.selection.clients] += record.weights
            there = found.sums(record.available)
            taken = np.bincount(found.member[record.selection.clients], minlength=len(found.names))
            present, chosen, met = present + there, chosen + taken, met + (there > 0)
            passed += (there > 0) & (taken == 0)
            at = record.index
            assert whole.cumulative[at] == pytest.approx(found.sums(weight / weight.sum()))
            assert whole.distance[at] == pytest.approx(
                total_variation(examples / examples.sum(), weight / weight.sum())
            )
        np.testing.assert_allclose(account.cumulative, whole.cumulative[each.kept])
        np.testing.assert_allclose(account.distance, whole.distance[each.kept])
        for place, name in enumerate(found.names):
            expected = (1 - chosen[place] / present[place], passed[place] / met[place])
            assert account.left_out[name] == whole.left_out[name] == pytest.approx(expected)


def test_seconds_are_means_of_the_second_half(store):
    """The first half includes compilation."""
    with store.writing() as connection:
        connection.exec_driver_sql("UPDATE rounds SET train_seconds = 100 - round, measure_seconds = NULL")
    for run in (run for policy in analysis.load_results(store, store.experiment()).policies for run in policy.runs):
        count = len(run.rounds["round"])
        assert run.seconds["train"] == pytest.approx(100 - np.arange(count // 2, count).mean())
        assert run.seconds["measure"] is None


def test_lines_end_where_the_shortest_seed_ends(store):
    material = read_material(store)
    line = line_data(material, [Measure("coverage", "", column("coverage"))])["measures"][0]["series"]["uniform"]
    assert line["round"] == [6, 12, 18, 24, 30, 36]
    means = [np.mean([material.histories[run.id].coverage[at] for run in store.runs(1)[:2]]) for at in range(6)]
    assert line["mean"] == pytest.approx(means, abs=1e-5)


@pytest.mark.parametrize("column", ["clients", "weights", "completed"])
def test_a_row_with_a_column_too_long_is_damage(store, column):
    with store.writing() as connection:
        connection.exec_driver_sql(f"UPDATE selections SET {column} = zeroblob(800) WHERE run_id = 1 AND round = 9")
    with pytest.raises(StoreError, match="damaged or cannot be read"):
        list(store.choices(1))


SCRIPT = """
import resource, sys, time
from fedpick.report import write_report
from plotly.offline import get_plotlyjs
path = write_report(sys.argv[1], sys.argv[2])
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(time.process_time(), memory, (path.stat().st_size - len(get_plotlyjs().encode())) / 1e6)
"""


@pytest.mark.slow
def test_a_report_of_a_million_rounds(tmp_path):
    """At most 200 MB, and 2 MB of HTML beside Plotly. A busy machine took 13 s of CPU time, 155 MB and 1.9 MB."""
    make_large_store(tmp_path / "large.sqlite", 1_000_000)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, tmp_path / "large.sqlite", tmp_path / "report.html"]
    shown = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], check=True, capture_output=True)
    seconds, memory, size = map(float, shown.stdout.split())
    assert seconds < 60  # a slow machine may take long, but not minutes
    assert memory < 200
    assert size < 2.0
