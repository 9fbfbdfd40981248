"""Fairness in outcome: what is stored of the final model, and what the report makes of it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from fedpick.experiments import schema
from fedpick.experiments.encoding import array_bytes
from fedpick.experiments.runner import run
from fedpick.experiments.schema import sa
from fedpick.experiments.store import FederationFacts, Store
from fedpick.report import analysis, tables
from fedpick.report.charts import sections_of
from fedpick.report.fairness import Fairness, fairness_of, groups_of_clients, jain_index, tenths
from fedpick.report.material import read_material
from fedpick.report.verdict import verdict_of
from tests.experiments.tiny import tiny_spec
from tests.report.report_store import make_spec, make_store


def facts_of(sizes, histogram=None):
    sizes = np.asarray(sizes, np.float64)
    classes = 0 if histogram is None else np.shape(histogram)[1]
    labels = None if histogram is None else np.asarray(histogram, np.int32)
    return FederationFacts(
        id=1, data="d", partition="p", num_clients=len(sizes), num_classes=classes, num_examples=sizes,
        label_histogram=labels,
    )  # fmt: skip


def fairness(values, **groups):
    return Fairness(part="test", rounds=1, accuracies=np.asarray(values, np.float64), groups=groups)


def test_by_hand():
    made = fairness([*np.arange(1, 20) / 20, np.nan])
    assert made.worst_tenth == pytest.approx((1 + 2) / 2 / 20)  # a tenth of 19 clients, rounded up
    assert made.mean == pytest.approx(0.5)
    assert made.jain == pytest.approx(190**2 / (19 * sum(k * k for k in range(1, 20))))
    assert fairness([0.3]).worst_tenth == 0.3
    assert jain_index(np.zeros(3)) is None
    assert jain_index(np.full(7, 0.2)) == pytest.approx(1)
    np.testing.assert_allclose(tenths(np.arange(20.0)[::-1]), np.arange(10) * 2 + 0.5)


def test_groups_by_hand():
    histogram = [[3, 0], [0, 2], [1, 5], [4, 1], [9, 9], [0, 1]]
    found = groups_of_clients(facts_of([10, 60, 20, 50, 30, 40], histogram), np.array([0, 0.5, 1, 0.25, 0.75, 0.1]))
    assert found["size"][1].tolist() == [0, 2, 0, 2, 1, 1]
    assert found["availability"][1].tolist() == [0, 1, 1, 0, 1, 0]
    assert found["label"][1].tolist() == [0, 1, 1, 0, 0, 1]
    assert groups_of_clients(facts_of([5, 5, 5, 5]), np.ones(4)) == {}  # all alike


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """A real experiment of some milliseconds a round."""
    pytest.importorskip("jax")
    store = Store(tmp_path_factory.mktemp("fairness") / "s.sqlite")
    run(tiny_spec(["uniform", "rpow-d"], rounds=4), store)
    yield store
    store.close()


def test_a_run_ends_with_the_accuracy_of_every_client(computed):
    from fedpick.experiments.run import build

    first = computed.runs(1)[0]
    stored = computed.client_accuracies(first.id, 4)
    again = build(first.settings)
    for _ in again.rounds(4):
        pass
    _, accuracies = again.simulator.evaluate_clients(stored.part)
    assert stored.part == "train"  # there is neither test nor validation data of clients
    np.testing.assert_array_equal(stored.values, accuracies.astype(np.float32))
    rows, bounds = again.simulator.examples.of(np.arange(24), "train")
    correct = again.simulator.engine.measure(again.simulator.params, rows)[1]
    naive = [np.mean(correct[low:high]) for low, high in pairwise(bounds)]
    np.testing.assert_allclose(stored.values, naive, rtol=1e-6)
    assert computed.client_accuracies(first.id, 3) is None


def test_more_rounds_replace_it_and_leave_the_rounds_as_they_are(tmp_path):
    pytest.importorskip("jax")
    from tests.experiments.store_content import content

    step, once = Store(tmp_path / "a.sqlite"), Store(tmp_path / "b.sqlite")
    for rounds in (2, 4):
        run(tiny_spec(["uniform"], rounds=rounds, seeds=1), step)
    run(tiny_spec(["uniform"], rounds=4, seeds=1), once)
    left, right = content(step), content(once)
    for table in ("rounds", "selections", "arrays", "client_accuracies"):
        assert left[table] == right[table]
    assert len(left["client_accuracies"]) == 1
    for store in (step, once):
        store.close()


def test_the_table_the_chart_and_the_verdict(computed):
    results = analysis.load_results(computed, computed.experiment())
    found = fairness_of(computed, results)
    assert set(found) == {run.id for run in computed.runs(1)}
    table = tables.fairness_table(results, found)
    headings = [column.heading for column in table.columns]
    assert headings[:2] == ["mean of clients %", "worst tenth %"]
    assert {"less often available %", "fewest examples %", "Jain's index: accuracy"} <= set(headings)
    mean = np.mean([found[run.id].worst_tenth for run in computed.runs(1) if run.label == "uniform"])
    assert table.lines[0][1][1].mean == pytest.approx(mean)
    assert "training data" in table.note
    section = next(each for each in sections_of(read_material(computed)) if each.key == "outcome")
    keys = [measure["key"] for measure in section.charts[0].data["measures"]]
    assert keys == ["tenths", "size", "availability", "label"]


def test_the_verdict_names_the_worst_off(tmp_path):
    store = make_store(tmp_path / "s.sqlite", make_spec(("uniform", "fedcor"), seeds=3))
    with store.writing() as connection:
        for each in store.runs(1):
            values = np.full(40, 0.9) - 0.4 * (np.arange(40) < 4) * (each.label == "fedcor") - 0.001 * each.seed
            row = {"rounds_done": 30, "part": "test", "accuracies": _packed(values)}
            connection.execute(schema.client_accuracies.insert(), {"run_id": each.id, **row})
        connection.execute(sa.text("update rounds set accuracy = accuracy / 2 where run_id in (1, 3, 5)"))
    results = analysis.load_results(store, store.experiment())
    sentences = verdict_of(results, None, fairness_of(store, results)).sentences
    assert sentences[0].startswith("fedcor is better than uniform")
    assert (
        "For the worst-off tenth of the clients, the final model is 50 % accurate under fedcor, 90 % under uniform."
        in sentences
    )
    store.close()


def _packed(values):
    from fedpick.experiments.encoding import array_bytes

    return array_bytes(values.astype("<f4"))


def test_an_older_store_without_the_table_is_read(tmp_path):
    store = make_store(tmp_path / "s.sqlite", make_spec(("uniform",), seeds=1))
    with store.writing() as connection:
        schema.client_accuracies.drop(connection)
    store.close()
    from fedpick.experiments.store import open_store

    reader = open_store(tmp_path / "s.sqlite")
    assert reader.client_accuracies(1, 30) is None
    assert read_material(reader).fairness == {}
    reader.close()


def test_clients_without_data_do_not_count(tmp_path):
    store = make_store(tmp_path / "s.sqlite", make_spec(("uniform",), seeds=1))
    store.take(1)
    values = np.where(np.arange(40) % 2, np.nan, 0.5)
    row = {"run_id": 1, "rounds_done": 30, "part": "validation", "accuracies": array_bytes(values.astype("<f4"))}
    with store.writing() as connection:
        connection.execute(schema.client_accuracies.insert(), row)
    found = fairness_of(store, analysis.load_results(store, store.experiment()))[1]
    assert (found.mean, found.worst_tenth, found.jain, len(found.known)) == (0.5, 0.5, 1.0, 20)
    store.close()
