from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from fedpick.core.errors import InvalidInput, StateFileError
from fedpick.experiments import schema as tables
from fedpick.experiments.encoding import (
    array_bytes,
    bytes_array,
    mask_bytes,
    mask_from,
    split_diagnostics,
)
from fedpick.experiments.run import build
from fedpick.experiments.runner import run
from fedpick.experiments.store import Store, StoreError, in_a_sentence, open_store
from tests.experiments.conftest import free_port
from tests.experiments.store_content import content
from tests.experiments.tiny import NUM_CLASSES, NUM_CLIENTS, SLOW, empty_round, tiny_spec

POLICIES = ({"name": SLOW, "label": "slow"}, "uniform", "afl")


@pytest.fixture
def filled(tmp_path):
    store = Store(tmp_path / "results" / "deep" / "a.sqlite")
    report = run(tiny_spec((*POLICIES,), rounds=12, seeds=2, every=3), store, processes=1)
    return store, report.experiment


def test_rounds_read_back_as_columns(filled):
    store, experiment = filled
    first = store.runs(experiment.id)[0]
    columns = store.rounds(first.id)
    assert columns["round"].tolist() == list(range(12))
    assert np.flatnonzero(~np.isnan(columns["accuracy"])).tolist() == [2, 5, 8, 11]
    assert (np.diff(columns["bytes_up"]) >= 0).all()
    assert (columns["select_seconds"] > 0).all()
    assert [told["norm"] for told in columns["diagnostics"]] == list(range(1, 13))
    assert len(store.rounds(first.id, limit=5)["round"]) == 5


def test_a_round_without_evaluation_leaves_the_latest_accuracy(tmp_path):
    store = Store(tmp_path / "a.sqlite")
    run_id = store.runs(store.register(tiny_spec(rounds=3)))[0].id
    store.take(run_id)
    for index, accuracy in enumerate((None, 0.5, None)):
        store.write_round(run_id, empty_round(index, test_accuracy=accuracy), checkpoint=None, wall_seconds=2.0)
    run = store.run(run_id)
    assert (run.rounds_done, run.accuracy, run.wall_seconds) == (3, 0.5, 6.0)


def test_records_read_back_as_they_were(filled):
    store, experiment = filled
    for each in store.runs(experiment.id):
        records = list(store.records(each.id))
        columns = store.rounds(each.id)
        computed = list(build(each.settings).rounds(12))
        counts = np.zeros(NUM_CLIENTS, int)
        for index, (record, original) in enumerate(zip(records, computed, strict=True)):
            chosen, outcome = record.selection.clients, record.outcome
            assert record.index == outcome.index == index
            assert record.available[chosen].all()
            assert record.num_available == columns["num_available"][index]
            assert record.counters == original.counters
            assert record.test_accuracy == original.test_accuracy
            assert (record.selection.weights is None) == (original.selection.weights is None)
            for name in ("clients", "completed", "loss", "train_loss", "duration", "update_norm"):
                assert np.array_equal(
                    getattr(outcome, name),
                    getattr(original.outcome, name),
                    equal_nan=name not in ("clients", "completed"),
                )
            assert np.array_equal(record.weights, original.weights)
            assert np.array_equal(record.available, original.available)
            assert (record.weights[~outcome.completed] == 0).all()
            counts[chosen] += 1
        assert np.array_equal(store.selection_counts(each.id), counts)
        assert np.array_equal(store.selection_counts(each.id, limit=0), np.zeros(NUM_CLIENTS))
        assert [record.index for record in store.records(each.id, limit=5)] == list(range(5))


def test_arrays_federations_states_and_manifests_read_back(filled):
    store, experiment = filled
    runs = store.runs(experiment.id)
    assert store.array_names(runs[0].id) == {"policy/squares": list(range(12))}
    assert store.array(runs[0].id, 3, "policy/squares").ndim == 1
    with pytest.raises(InvalidInput, match="no array"):
        store.array(runs[0].id, 3, "policy/nothing")
    facts = store.federation(runs[0].federation_id)
    assert facts.label_histogram.shape == (NUM_CLIENTS, NUM_CLASSES)
    assert len(facts.num_examples) == NUM_CLIENTS
    assert {run.federation_id for run in runs} == {runs[0].federation_id, runs[1].federation_id}
    afl = next(run for run in runs if run.policy == "afl")
    assert all(len(value) == NUM_CLIENTS for value in store.policy_state(afl.id).values())
    assert store.policy_state(afl.id)
    assert afl.manifest["versions"]["fedpick"]
    assert afl.manifest["host"]["cores"]
    assert afl.parameters["alpha1"] == 0.75
    assert "@" in afl.reference


def test_experiments_are_found_by_id_title_or_hash_and_the_latest_is_the_default(filled):
    store, first = filled
    second = run(tiny_spec(["md"], rounds=3), store, processes=1).experiment
    assert store.experiment().hash == second.hash
    assert store.experiment(first.id).hash == first.hash
    assert store.experiment(first.hash[:10]).hash == first.hash
    assert store.experiment("tiny").title == "tiny"
    with pytest.raises(InvalidInput, match="no experiment 'zzz'"):
        store.experiment("zzz")
    store.register(tiny_spec(POLICIES, rounds=12, seeds=2, every=3))
    assert store.experiment().hash == first.hash
    assert (first.rounds, first.targets) == (12, (0.5,))


def test_a_title_that_is_a_number_hides_no_id(tmp_path):
    store = Store(tmp_path / "a.sqlite")
    first = store.register(replace(tiny_spec(rounds=1), title="2"))
    second = store.register(replace(tiny_spec(rounds=2), title="1"))
    assert [store.experiment(each).id for each in (first, second)] == [first, second] == [1, 2]


def test_a_seed_that_no_database_holds_is_refused(tmp_path):
    store = Store(tmp_path / "a.sqlite")
    store.register(tiny_spec(rounds=1).override(seeds=[2**63 - 1]))
    with pytest.raises(InvalidInput, match="takes seeds up to 9,223,372,036,854,775,807"):
        store.register(tiny_spec(rounds=1).override(seeds=[0, 2**63]))
    assert len(store.experiments()) == 1


def test_experiments_share_runs(filled):
    store, first = filled
    wider = run(tiny_spec(("uniform", "md"), rounds=12, seeds=2, every=3), store, processes=1).experiment
    ids = {run.id for run in store.runs(first.id)}
    assert {run.id for run in store.runs(wider.id) if run.policy == "uniform"} < ids


def test_a_newer_schema_is_refused(filled):
    store, _ = filled
    with store.writing() as connection:
        connection.execute(tables.schema.update(), {"version": 99, "written_by": "fedpick 9.9"})
    with pytest.raises(StoreError, match=r"schema 99 \(written by fedpick 9\.9\)"):
        Store(Path(store.engine.url.database))


def test_what_is_no_store_is_refused(tmp_path):
    with pytest.raises(StoreError, match="no results at"):
        open_store(tmp_path / "absent.sqlite")
    foreign = tmp_path / "text.sqlite"
    foreign.write_text("not a database at all, but long enough to be one")
    with pytest.raises(StoreError, match="cannot be opened"):
        Store(foreign)
    with sa.create_engine(f"sqlite:///{tmp_path / 'other.sqlite'}").begin() as connection:
        connection.exec_driver_sql("CREATE TABLE something (a INTEGER)")
    with pytest.raises(StoreError, match="holds no fedpick results"):
        open_store(tmp_path / "other.sqlite")
    with pytest.raises(StoreError, match="not a database URL"):
        Store("nonsense://///::")


@contextmanager
def read_only_medium(store):
    """A copy of the store in a directory that cannot be written to, not even by root, who becomes somebody else."""
    store.close()
    directory = Path(tempfile.mkdtemp(prefix="fedpick-read-only-"))
    file = directory / "a.sqlite"
    shutil.copyfile(Path(store.engine.url.database), file)
    file.chmod(0o444)
    directory.chmod(0o555)
    try:
        if os.getuid() == 0:
            os.seteuid(65534)
        yield file
    finally:
        os.seteuid(os.getuid())
        directory.chmod(0o755)
        shutil.rmtree(directory)


def test_a_store_on_a_read_only_medium_can_be_read(filled):
    store, experiment = filled
    with read_only_medium(store) as file:
        with pytest.raises(StoreError, match="cannot be opened"):
            Store(file)
        opened = open_store(file)
        assert opened.experiment().hash == experiment.hash
        assert len(opened.rounds(opened.runs(experiment.id)[0].id)["round"]) == 12
        assert [each.name for each in file.parent.iterdir()] == ["a.sqlite"]
        opened.close()


def test_reading_writes_nothing_and_sees_what_is_being_written(filled):
    store, experiment = filled
    file = Path(store.engine.url.database)
    store.close()
    before = {each: each.read_bytes() for each in file.parent.iterdir()}
    reader = open_store(file)
    with reader.engine.connect() as connection, pytest.raises(sa.exc.OperationalError, match="readonly"):
        connection.exec_driver_sql("DELETE FROM rounds")
    reader.close()
    assert {each: each.read_bytes() for each in file.parent.iterdir()} == before
    reader = open_store(file)
    with pytest.raises(StoreError, match="opened for reading"):
        reader.restart(1)
    first = store.runs(experiment.id)[0].id
    assert len(reader.rounds(first)["round"]) == 12  # while the writer has it open
    store.restart(first)
    assert len(reader.rounds(first)["round"]) == 0
    reader.close()


def test_damage_is_said_in_a_sentence(filled):
    store, experiment = filled
    first = store.runs(experiment.id)[0].id
    with store.writing() as connection:
        connection.execute(tables.arrays.update(), {"value": b"nothing"})
        connection.execute(tables.rounds.update(), {"diagnostics": "{"})
    with pytest.raises(StateFileError, match="The store is damaged"):
        store.array(first, 0, "policy/squares")
    with pytest.raises(StateFileError, match="The store is damaged"):
        store.rounds(first)


def test_errors_of_the_database_are_told_without_their_sql(tmp_path):
    store = Store(tmp_path / "a.sqlite")
    with pytest.raises(sa.exc.OperationalError) as caught, store.engine.connect() as connection:
        connection.exec_driver_sql("SELECT * FROM missing")
    assert in_a_sentence(caught.value) == "The database failed: no such table: missing."
    assert in_a_sentence(ZeroDivisionError("why")) == "ZeroDivisionError: why"


def test_an_empty_store_says_what_to_do(tmp_path):
    with pytest.raises(InvalidInput, match="no experiment in this store yet"):
        Store(tmp_path / "new.sqlite").experiment()


def test_masks_arrays_and_diagnostics_as_bytes():
    rng = np.random.default_rng(0)
    for size in (1, 8, 13, 1000):
        mask = rng.random(size) < 0.5
        assert np.array_equal(mask_from(mask_bytes(mask), size), mask)
    assert mask_bytes(np.ones(9, bool)) is None
    assert mask_from(None, 3).all()
    assert len(mask_bytes(rng.random(1_000_000) < 0.5)) < 130_000
    array = rng.normal(size=(3, 4)).astype(np.float32)
    assert np.array_equal(bytes_array(array_bytes(array)), array)
    text, found = split_diagnostics(
        {"a": np.float64("nan"), "b": np.arange(3), "c": [1, np.int64(2)], "d": np.empty(10**6), "e": {"f": None}}
    )
    assert (
        text == '{"a": null, "c": [1, 2], "d": "not stored: array of float64 with shape (1000000,)", "e": {"f": null}}'
    )
    assert list(found) == ["b"]


def test_postgresql_holds_the_same_rows_as_sqlite(postgres, tmp_path):
    spec = tiny_spec(rounds=12, every=3)
    local = Store(tmp_path / "a.sqlite")
    run(spec, local, processes=1)
    shared = Store(postgres)
    try:
        run(tiny_spec(rounds=7, every=3), shared, processes=1)
        report = run(spec, shared, processes=2)  # goes on, and from two processes
        assert report.complete
        there, here = content(shared), content(local)
        for table in ("runs", "federations", "rounds", "selections", "arrays", "checkpoints"):
            assert there[table] == here[table]
        first = shared.runs(report.experiment.id)[0]
        assert len(list(shared.records(first.id))) == 12
        assert shared.experiment().hash == spec.hash
    finally:
        shared.close()


def test_a_database_that_does_not_answer_is_told(postgres):
    with pytest.raises(StoreError, match="cannot be opened"):
        Store(f"postgresql://fedpick:secret@127.0.0.1:{free_port()}/postgres")


def test_a_round_that_cannot_be_written_leaves_nothing(tmp_path):
    store = Store(tmp_path / "a.sqlite")
    run_id = store.runs(store.register(tiny_spec(rounds=3)))[0].id
    store.take(run_id)
    store.write_round(run_id, empty_round(0), checkpoint=b"0")
    with store.writing() as connection:
        connection.exec_driver_sql("INSERT INTO arrays VALUES (1, 1, 'evaluation/losses', x'00')")
    before = content(store)
    with pytest.raises(sa.exc.DBAPIError, match="UNIQUE"):
        store.write_round(run_id, empty_round(1, evaluation={"losses": np.ones(2)}), checkpoint=b"1")
    assert content(store) == before
    store.write_round(run_id, empty_round(1), checkpoint=b"1")
    assert store.run(run_id).rounds_done == 2


def test_a_lost_connection_is_told_and_the_next_one_goes_on(postgres, caplog):
    store = Store(postgres)
    run_id = store.runs(store.register(tiny_spec(rounds=3)))[0].id
    store.take(run_id)
    store.write_round(run_id, empty_round(0), checkpoint=b"0")
    other = Store(postgres)
    with other.engine.connect() as connection:
        others = "FROM pg_stat_activity WHERE datname = current_database() AND pid != pg_backend_pid()"
        connection.exec_driver_sql(f"SELECT pg_terminate_backend(pid) {others}")
    with pytest.raises(sa.exc.DBAPIError) as lost:
        store.write_round(run_id, empty_round(1), checkpoint=b"1")
    assert in_a_sentence(lost.value).startswith("The database failed")
    store.write_round(run_id, empty_round(1), checkpoint=b"1")
    assert store.run(run_id).rounds_done == 2
    assert caplog.records == []
    for each in (store, other):
        each.close()
