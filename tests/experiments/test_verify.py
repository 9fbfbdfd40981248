"""Damage in a store is found, named and repaired."""

from __future__ import annotations

import gzip
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax")

from fedpick.core.errors import FedpickError
from fedpick.experiments import schema as tables
from fedpick.experiments.leases import RunLeased
from fedpick.experiments.runner import run
from fedpick.experiments.spec import load_spec
from fedpick.experiments.store import Store, StoreError, open_store
from fedpick.experiments.verify import repair, verify
from tests.experiments.store_content import content
from tests.experiments.test_older_store import FIXTURES
from tests.experiments.tiny import SLOW, tiny_spec

SPEC = tiny_spec([{"name": SLOW, "label": "slow"}, "afl"], rounds=6, seeds=1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("whole") / "a.sqlite")
    assert run(SPEC, store, processes=1).complete
    store.close()
    return store


@pytest.fixture
def store(undisturbed, tmp_path):
    shutil.copyfile(undisturbed.name, tmp_path / "a.sqlite")
    return Store(tmp_path / "a.sqlite")


def damage(store, statement):
    with store.writing() as connection:
        assert connection.exec_driver_sql(statement).rowcount > 0


def test_a_whole_store_has_no_problems(store):
    found = verify(store)
    assert (found.runs, found.rounds, found.unverified, found.sentences) == (2, 12, 0, [])
    reader = open_store(store.name)
    assert verify(reader).sentences == []
    reader.close()


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("UPDATE rounds SET loss = loss + 1e-15 WHERE run_id = 1 AND round = 3", "round 3 was changed"),
        ("UPDATE rounds SET train_seconds = 0 WHERE run_id = 1 AND round = 3", "round 3 was changed"),
        ("UPDATE selections SET clients = weights WHERE run_id = 1 AND round = 2", "round 2 was changed"),
        ("UPDATE arrays SET value = x'00' WHERE run_id = 1 AND round = 4", "round 4 was changed"),
        ("DELETE FROM arrays WHERE run_id = 1 AND round = 4", "round 4 was changed"),
        ("DELETE FROM rounds WHERE run_id = 1 AND round = 0", "round 0 is missing"),
        ("DELETE FROM rounds WHERE run_id = 1 AND round = 5", "round 5 is missing"),
        ("DELETE FROM selections WHERE run_id = 1 AND round = 1", "round 1 is missing"),
        ("DELETE FROM checksums WHERE run_id = 1 AND round = 1", "the checksum of round 1 is missing"),
        ("DELETE FROM checksums WHERE run_id = 1 AND round < 3", "round 3 was changed, or the rounds before it"),
        ("UPDATE runs SET rounds_done = 5 WHERE id = 1", "beyond its 5 rounds"),
        ("UPDATE runs SET accuracy = 0.999 WHERE id = 1", "its latest accuracy"),
        ("UPDATE runs SET settings = replace(settings, '0.05', '0.06') WHERE id = 1", "its settings was changed"),
        ("UPDATE runs SET manifest = '{' WHERE id = 1", "not JSON"),
        ("UPDATE federations SET num_examples = x'00' WHERE id = 1", "round 0 was changed"),
        ("DELETE FROM checkpoints WHERE run_id = 1", "its checkpoint is missing"),
        ("UPDATE checkpoints SET content = substr(content, 1, 900) WHERE run_id = 1", "its checkpoint is"),
        ("UPDATE checkpoints SET rounds_done = 4 WHERE run_id = 1", "its checkpoint is for round 6, not 4 of 6"),
    ],
)
def test_damage_is_named_and_repaired(store, undisturbed, statement, says):
    damage(store, statement)
    found = verify(store)
    assert f"Run 1 ({SLOW}, seed 0): " in found.sentences[0]
    assert says in found.sentences[0]
    if "federations" in statement:
        return  # the clients' row belongs to both runs, and stays
    assert [report.complete for report in repair(store, found, processes=1)] == [True]
    assert verify(store).sentences == []
    assert content(store) == content(undisturbed)


def test_a_repair_leaves_the_latest_experiment_the_latest(store):
    later = run(tiny_spec(["md"], rounds=2, seeds=1), store, processes=1).experiment
    damage(store, "DELETE FROM rounds WHERE run_id = 1 AND round = 0")
    repair(store, verify(store), processes=1)
    assert store.experiment().hash == later.hash


def test_a_status_that_lags_behind_is_named_and_mended(store, undisturbed):
    damage(store, "UPDATE runs SET status = 'failed', error = 'an accident' WHERE id = 2")
    found = verify(store)
    assert found.sentences == ["Run 2 (afl, seed 0): it has all its rounds, but its status is 'failed'."]
    repair(store, found, processes=1)
    assert content(store) == content(undisturbed)


def test_rows_of_missing_runs_are_named_and_dropped(store, undisturbed):
    connection = sqlite3.connect(store.name)
    connection.execute("INSERT INTO arrays VALUES (77, 0, 'a', x'00')")
    connection.commit()
    connection.close()
    found = verify(store)
    assert found.sentences == ["The table arrays has 1 rows that refer to missing runs."]
    repair(store, found, processes=1)
    assert content(store) == content(undisturbed)


def test_a_changed_spec_is_named(store):
    damage(store, """UPDATE experiments SET spec = replace(spec, '"budget": 4', '"budget": 5')""")
    assert verify(store).sentences == ["Experiment 1: its spec was changed. Run its TOML file again."]


def test_a_damaged_schema_is_named(store):
    with store.writing() as connection:
        connection.exec_driver_sql("ALTER TABLE fedpick_schema RENAME COLUMN written_by TO writteN_bz")
    with pytest.raises(StoreError, match="is damaged or cannot be read"):
        verify(store)


def test_a_run_that_is_being_computed_is_not_dropped(store):
    damage(store, "DELETE FROM rounds WHERE run_id = 1 AND round = 0")
    before = content(store)
    other = Store(store.name)
    other.take(1)
    with pytest.raises(RunLeased, match="being computed by process"):
        repair(store, verify(store), processes=1)
    assert content(store) == before


def test_an_older_store_is_unverified_and_verified_from_here_on(tmp_path):
    file = tmp_path / "older.sqlite"
    file.write_bytes(gzip.decompress((FIXTURES / "store-0.1.0.sqlite.gz").read_bytes()))
    reader = open_store(file)
    found = verify(reader)
    reader.close()
    assert (found.runs, found.unverified, found.sentences) == (6, 72, [])
    spec = load_spec(FIXTURES / "store-0.1.0.toml").override(seeds=1, only=["uniform"])
    store = Store(file)
    assert run(spec, store, processes=1).complete
    found = verify(store)
    assert (found.rounds, found.unverified, found.sentences) == (84, 72, [])
    run_id = store.runs(store.experiment().id)[0].id
    with store.writing() as connection:
        late = (tables.rounds.c.run_id == run_id) & (tables.rounds.c.round == 20)
        connection.execute(tables.rounds.update().where(late), {"loss": 0.125})
    assert "round 20 was changed" in verify(store).sentences[0]


def results(store):
    found = content(store)
    described = {"parameters", "reference", "model_bytes", "error", "status", "manifest"}
    runs = [[item for item in row if item[0] not in described] for row in found["runs"]]
    return runs, [found[name] for name in ("federations", "rounds", "selections", "arrays", "checkpoints")]


@pytest.mark.parametrize("flips", [30, pytest.param(600, marks=pytest.mark.slow)])
def test_no_flipped_bit_changes_rows_unnoticed(undisturbed, tmp_path, flips):
    """Single flipped bits anywhere in the file: found, or the results are unchanged. Descriptions are not covered."""
    whole = np.frombuffer(Path(undisturbed.name).read_bytes(), np.uint8)
    used = np.flatnonzero(whole)
    expected = results(undisturbed)
    rng = np.random.default_rng(0)
    noticed = 0
    for flip in range(flips):
        changed = whole.copy()
        changed[rng.choice(used)] ^= 1 << int(rng.integers(8))
        file = tmp_path / f"{flip}.sqlite"
        file.write_bytes(changed.tobytes())
        try:
            store = open_store(file)
            try:
                problems = verify(store).sentences
                unchanged = not problems and results(store) == expected
            finally:
                store.close()
        except FedpickError:
            problems, unchanged = ["it could not be read"], False
        noticed += bool(problems)
        assert problems or unchanged, f"flip {flip} changed the content unnoticed"
        file.unlink()
    assert noticed > flips // 2
