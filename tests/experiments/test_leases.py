"""One process computes a run: who owns it, who may take it over, and what an owner that lost it can still do."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("jax")

from fedpick.experiments import leases, store
from fedpick.experiments import schema as tables
from fedpick.experiments.integrity import Damage
from fedpick.experiments.leases import RunLeased
from fedpick.experiments.progress import Progress
from fedpick.experiments.run import compute
from fedpick.experiments.runner import run
from fedpick.experiments.store import Store, StoreLocked
from tests.experiments.store_content import content
from tests.experiments.tiny import empty_round, tiny_spec


@pytest.fixture
def two(tmp_path):
    """Two processes, as far as the store can tell, and a run with five rounds."""
    mine, other = Store(tmp_path / "a.sqlite"), Store(tmp_path / "a.sqlite")
    spec = tiny_spec(["uniform"], rounds=5, seeds=1)
    report = run(spec, mine, processes=1)
    assert report.complete
    return mine, other


def rows(opened):
    return content(opened)["rounds"]


def set_lease(opened, **values):
    with opened.writing() as connection:
        connection.execute(tables.leases.update(), values)


def test_a_run_of_a_living_owner_is_left_alone(two):
    mine, other = two
    mine.take(1)
    before = content(mine)
    assert compute(other, 1, 9) == "busy"
    for forbidden in (other.take, other.resume, other.restart):
        with pytest.raises(RunLeased):
            forbidden(1)
    with pytest.raises(RunLeased, match="does not hold the lease"):
        other.write_round(1, empty_round(5), checkpoint=None)
    assert content(mine) == before
    assert other.holders([1]) == {1: leases.describe(leases.new_owner())}
    mine.release(1)
    assert compute(other, 1, 9) == "done"


def test_an_owner_that_does_not_answer_loses_the_run_and_can_write_no_more(two):
    mine, other = two
    mine.take(1)
    mine.resume(1)
    set_lease(mine, beat=time.time() - leases.STALE_SECONDS - 1)
    assert compute(other, 1, 7) == "done"
    before = content(mine)
    other.take(1)
    with pytest.raises(RunLeased):
        mine.write_round(1, empty_round(7), checkpoint=b"wrong")
    with pytest.raises(RunLeased):
        mine.resume(1)
    mine.release(1, status="failed", error="of the old owner")
    assert content(mine) == before
    assert list(other.holders([1])) == []
    assert list(mine.holders([1])) == [1]


def test_a_run_that_is_taken_over_while_it_is_computed_is_left_to_the_new_owner(two):
    mine, other = two

    def taken_over(done, accuracy):
        if done == 7:
            set_lease(mine, beat=0.0)
            other.take(1)

    assert compute(mine, 1, 20, on_round=taken_over) == "busy"
    assert len(rows(mine)) == 7
    other.release(1)
    assert compute(mine, 1, 20) == "done"


def test_a_process_of_this_machine_that_ended_is_replaced_at_once(two):
    mine, other = two
    program = "from fedpick.experiments.leases import new_owner; print(new_owner())"
    ended = subprocess.check_output([sys.executable, "-c", program], text=True).strip()
    mine.take(1)
    set_lease(mine, owner=ended)
    assert leases.has_ended(ended)
    other.take(1)
    host, pid, process, number = ended.split(" ")
    elsewhere = f"{host} {pid} other-{process} {number}"
    set_lease(mine, owner=elsewhere, beat=time.time())
    assert not leases.has_ended(elsewhere)
    with pytest.raises(RunLeased, match=f"process {pid} on {host}"):
        other.take(1)
    assert not leases.has_ended(leases.new_owner())


def test_a_lease_is_renewed_while_a_round_takes_long(two, monkeypatch):
    mine, other = two
    monkeypatch.setattr(leases, "_BEAT_SECONDS", 0.02)
    monkeypatch.setattr(leases, "STALE_SECONDS", 1.0)
    with mine.computing(1):
        time.sleep(2.0)
        with pytest.raises(RunLeased):
            other.take(1)
    other.take(1)


def test_restart_forgets_nothing_while_a_process_computes(two):
    mine, other = two
    wider = tiny_spec(["md", "uniform"], rounds=5, seeds=1)
    run(wider, mine, processes=1)
    mine.take(1)
    before = content(mine)
    with pytest.raises(RunLeased):
        run(wider, other, processes=1, restart=True)
    assert content(mine) == before


def test_a_run_that_lost_rows_is_not_done(two):
    mine, _ = two
    with mine.writing() as connection:
        connection.execute(tables.rounds.delete().where(tables.rounds.c.round == 2))
    assert mine.torn([1]) == {1}
    report = run(tiny_spec(["uniform"], rounds=5, seeds=1), mine, processes=1)
    assert "round 2 is missing" in report.failures["uniform, seed 0"]
    assert "fedpick verify --repair" in report.failures["uniform, seed 0"]
    with pytest.raises(Damage), mine.computing(1):
        mine.resume(1)


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("UPDATE rounds SET loss = 7 WHERE round = 2", "round 2 was changed.*fedpick verify --repair"),
        ("UPDATE checkpoints SET content = substr(content, 1, 900)", "damaged.*Start this run over with --restart"),
    ],
)
def test_a_damaged_run_is_not_resumed(two, statement, says):
    mine, _ = two
    with mine.writing() as connection:
        connection.exec_driver_sql(statement)
    report = run(tiny_spec(["uniform"], rounds=6, seeds=1), mine, processes=1)
    assert re.search(says, report.failures["uniform, seed 0"])
    assert len(rows(mine)) == 5


@pytest.mark.parametrize("status", ["failed", "running"])
def test_a_complete_run_with_another_status_is_mended(two, status):
    mine, _ = two
    before = content(mine)
    mine.update_run(1, status=status, error="an accident")
    assert run(tiny_spec(["uniform"], rounds=5, seeds=1), mine, processes=1).complete
    assert content(mine) == before


def test_the_runner_waits_for_another_process_and_takes_over_what_it_leaves(two):
    """The other owner ends after the first wait; its run has two rounds to go."""
    mine, other = two
    other.take(1)

    class Other(Progress):
        notes: list[str] = []

        def note(self, text):
            self.notes.append(text)
            other.release(1)

    report = run(tiny_spec(["uniform"], rounds=7, seeds=1), mine, processes=1, progress=Other())
    assert report.complete
    assert len(rows(mine)) == 7
    assert "Waiting for 1 runs that other processes compute: process" in Other.notes[0]


def test_a_locked_store_is_told_once_and_soon(two, monkeypatch, tmp_path):
    mine, _ = two
    mine.close()
    monkeypatch.setattr(store, "_LOCK_SECONDS", 1)
    opened = Store(tmp_path / "a.sqlite")
    other = sqlite3.connect(Path(tmp_path / "a.sqlite"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        for call in (lambda: compute(opened, 1, 7), lambda: opened.register(tiny_spec())):
            started = time.monotonic()
            with pytest.raises(StoreLocked, match=r"locked for 1 s\. Close it"):
                call()
            assert time.monotonic() - started < 5
    finally:
        other.close()


def test_a_store_that_becomes_locked_ends_all_runs_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_LOCK_SECONDS", 1)
    file = tmp_path / "a.sqlite"
    opened = Store(file)
    other = sqlite3.connect(file, isolation_level=None, check_same_thread=False)

    class Locks(Progress):
        def update(self, run_id, done, accuracy):
            if not other.in_transaction:
                other.execute("BEGIN IMMEDIATE")
                self.started = time.monotonic()

    locks = Locks()
    with pytest.raises(StoreLocked):
        run(tiny_spec(rounds=5), opened, processes=1, progress=locks)
    assert time.monotonic() - locks.started < 5
    other.close()
