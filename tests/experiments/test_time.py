"""Experiments with devices: identities, the clock in the store, resuming, older stores."""

import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax")

from fedpick.experiments.runner import run
from fedpick.experiments.spec import parse_spec
from fedpick.experiments.store import Store, open_store
from fedpick.experiments.verify import verify
from tests.experiments.store_content import content
from tests.experiments.test_runner import rounds_there
from tests.experiments.tiny import SLOW, tiny_spec


def timed_spec(rounds=6, policies=("uniform", "oort"), **waiting):
    given = {**tiny_spec(policies, rounds=rounds, seeds=1).to_dict()}
    given["devices"] = {"name": "phones", "jitter": 0.1}
    given["waiting"] = {"overcommit": 1.5, **waiting}
    return parse_spec(given)


def test_sections_about_time_are_part_of_the_identity_only_if_given():
    plain, timed = tiny_spec(("uniform",)), timed_spec(policies=("uniform",))
    assert "devices" not in plain.to_dict() and "waiting" not in plain.settings_of(plain.policies[0], 0)
    assert plain.run_key(plain.policies[0], 0) != timed.run_key(timed.policies[0], 0)
    assert parse_spec(timed.to_dict()).hash == timed.hash


def test_the_store_keeps_the_clock_and_the_times(tmp_path):
    store = Store(tmp_path / "a.sqlite")
    report = run(timed_spec(), store, processes=1)
    assert report.complete, report.failures
    for each in store.runs(report.experiment.id):
        clock = store.rounds(each.id)["clock"]
        assert (np.diff(clock) > 0).all() and clock[0] > 0
        assert [record.clock for record in store.records(each.id)] == clock.tolist()
        for index, times in store.arrays(each.id, "evaluation/times"):
            assert times.shape[0] == 4 and len(store.array_names(each.id)["evaluation/times"]) == 6, index
    assert not verify(store).sentences


def test_a_resumed_run_ends_in_the_same_bytes(tmp_path):
    whole, parts = Store(tmp_path / "whole.sqlite"), Store(tmp_path / "parts.sqlite")
    run(timed_spec(6), whole, processes=1)
    run(timed_spec(3), parts, processes=1)
    run(timed_spec(6), parts, processes=1)
    for name in ("rounds", "selections", "arrays", "checkpoints"):
        assert content(whole)[name] == content(parts)[name]


def test_a_store_without_the_column_is_read_and_extended(tmp_path):
    file = tmp_path / "a.sqlite"
    store = Store(file)
    spec = tiny_spec(("uniform",), rounds=3, seeds=1)
    run(spec, store, processes=1)
    store.close()
    with sqlite3.connect(file) as connection:
        connection.execute("ALTER TABLE rounds DROP COLUMN clock")
    connection.close()
    older = open_store(file)
    (each,) = older.runs(older.experiment().id)
    assert [record.clock for record in older.records(each.id)] == [None] * 3
    assert np.isnan(older.rounds(each.id)["clock"]).all() and not verify(older).sentences
    older.close()
    newer = Store(file)
    assert run(spec.override(rounds=5), newer, processes=1).complete
    assert len(list(newer.records(each.id))) == 5 and not verify(newer).sentences


def test_logs_are_read_at_the_time_of_the_clock(tmp_path):
    """With a log in which all clients are on for 1,000 s and off for 9,000 s, idle rounds pass the time."""
    lines = [f"{client},{moment},{state}" for client in range(24) for moment, state in ((0, 2), (1000, 0), (10_000, 2))]
    log = tmp_path / "log.csv"
    log.write_text("client,time,state\n" + "\n".join(lines) + "\n")
    given = timed_spec(40, ("uniform",), idle=500.0).to_dict()
    given["availability"] = {"name": "trace", "path": str(log), "clock": True, "round_seconds": 1e6}
    given["devices"] = {"name": "phones", "seconds_per_example": 10.0}
    store = Store(tmp_path / "a.sqlite")
    report = run(parse_spec(given), store, processes=1)
    assert report.complete, report.failures
    (each,) = store.runs(report.experiment.id)
    rounds = store.rounds(each.id)
    starts = np.concatenate([[0.0], rounds["clock"][:-1]])
    assert np.array_equal(rounds["num_available"] > 0, starts % 10_000 < 1000)  # the log starts again
    assert (rounds["num_available"] == 0).any() and (starts > 10_000).any()


SCRIPT = """
import sys
from fedpick.experiments.runner import run
from fedpick.experiments.store import Store
from tests.experiments.test_time import late_spec

run(late_spec(sys.argv[2]), Store(sys.argv[1]), processes=1)
"""


def late_spec(late):
    """A run that TINY_SLEEP makes slow, with answers under way in most rounds."""
    waiting = {"overcommit": 2.0} if late == "stale" else {"overcommit": 1.0, "buffer": 2}
    given = timed_spec(16, ({"name": SLOW, "label": "slow"},), late=late, **waiting).to_dict()
    given["devices"] = {"name": "lognormal", "spread": 1.0}
    return parse_spec(given)


@pytest.mark.parametrize("late", ["stale", "buffer"])
def test_killed_with_answers_under_way_it_ends_in_the_same_rows(late, tmp_path):
    script, file = tmp_path / "script.py", tmp_path / "killed.sqlite"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    process = subprocess.Popen([sys.executable, str(script), str(file), late], env={**environment, "TINY_SLEEP": "0.2"})
    started = time.monotonic()
    while rounds_there(file) < 5 and process.poll() is None and time.monotonic() - started < 120:
        time.sleep(0.01)
    assert process.poll() is None, "the run ended before it could be killed"
    process.kill()
    process.wait()
    assert 5 <= rounds_there(file) < 16
    killed, whole = Store(file), Store(tmp_path / "whole.sqlite")
    run(late_spec(late), killed, processes=1)
    run(late_spec(late), whole, processes=1)
    for name in ("rounds", "selections", "arrays", "checkpoints"):
        assert content(whole)[name] == content(killed)[name]
    (each,) = whole.runs(whole.experiment().id)
    assert len(whole.array_names(each.id)["evaluation/stale"]) > 5
