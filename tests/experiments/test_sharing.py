"""Several processes on one experiment: they share the runs, and one that is killed loses nothing."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax")

from fedpick.experiments.runner import run
from fedpick.experiments.store import Store
from fedpick.experiments.verify import verify
from tests.experiments.store_content import content
from tests.experiments.tiny import slow_spec

# New processes are forked from one that has imported everything: otherwise most kills would hit an import.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["fedpick.experiments.runner", "fedpick.sim", "jax"])


def work(url, log: Path, sleep: float) -> None:
    """Compute the experiment, or what other processes leave of it."""
    os.environ["TINY_SLEEP"] = str(sleep)
    sys.stderr = log.open("a", buffering=1)
    report = run(slow_spec(), Store(url), processes=1)
    sys.exit(0 if report.complete and report.finished == 6 else str(report))


def share(url, log: Path, processes: int, kills: int) -> None:
    """Start processes on one experiment. Kill a random one, and start another, at random moments; then let them end."""
    rng = np.random.default_rng(processes)
    store = Store(url)

    def start(sleep):
        process = SERVER.Process(target=work, args=(url, log, sleep))
        process.start()
        return process

    def done() -> int:
        return sum(each.rounds_done for runs in store.overview().values() for each in runs)

    team = [start(0.02) for _ in range(processes)]
    try:
        for kill in range(kills):
            enough = min(done() + int(rng.integers(1, 10)), 290)
            while done() < enough:
                assert all(each.exitcode in (None, 0) for each in team), log.read_text()
                time.sleep(0.02)
            time.sleep(rng.uniform(0, 0.04))
            victim = int(rng.integers(processes))
            team[victim].kill()
            team[victim].join()
            team[victim] = start(0.02 if kill + 1 < kills else 0)
        for each in team:
            each.join(timeout=1200)
            assert each.exitcode == 0, log.read_text()
    finally:
        for each in team:
            each.kill()
            each.join()
        store.close()


def assert_all_rows_once(url, tmp_path):
    store, whole = Store(url), Store(tmp_path / "whole.sqlite")
    try:
        assert run(slow_spec(), whole, processes=1).complete
        there, expected = content(store), content(whole)
        assert len(there["rounds"]) == 300
        for table in expected:
            assert there[table] == expected[table], f"the table {table} differs"
        assert verify(store).sentences == []
        assert store.holders([each.id for each in store.runs(store.experiment().id)]) == {}
    finally:
        store.close()


@pytest.mark.parametrize(
    ("processes", "kills"),
    [(2, 2), *(pytest.param(size, 20, marks=pytest.mark.slow) for size in (2, 4))],
)
def test_processes_share_an_experiment_in_sqlite(tmp_path, processes, kills):
    share(tmp_path / "a.sqlite", tmp_path / "log", processes, kills)
    assert_all_rows_once(tmp_path / "a.sqlite", tmp_path)


@pytest.mark.parametrize(
    ("processes", "kills"),
    [(2, 2), *(pytest.param(size, 20, marks=pytest.mark.slow) for size in (2, 4))],
)
def test_processes_share_an_experiment_in_postgresql(postgres, tmp_path, processes, kills):
    share(postgres, tmp_path / "log", processes, kills)
    assert_all_rows_once(postgres, tmp_path)
