"""Several processes on one experiment: they share the runs, and one that is killed loses nothing."""

from __future__ import annotations

import os
import subprocess
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

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from fedpick.experiments.runner import run
from fedpick.experiments.store import Store
from tests.experiments.tiny import slow_spec
report = run(slow_spec(), Store(sys.argv[1]), processes=1)
sys.exit(0 if report.complete and report.finished == 6 else 3)
"""


def share(url, directory: Path, processes: int, kills: int) -> None:
    """Start processes on one experiment. Kill a random one, and start another, at random moments; then let them end."""
    script = directory / "script.py"
    script.write_text(SCRIPT)
    log = (directory / "log").open("ab")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment |= {"TINY_SLEEP": str(0.02 * (1 + kills / 4)), "OMP_NUM_THREADS": "1"}

    def start():
        return subprocess.Popen([sys.executable, str(script), str(url)], env=environment, stdout=log, stderr=log)

    rng = np.random.default_rng(processes)
    team = [start() for _ in range(processes)]
    try:
        while not rounds_there(url):
            assert all(each.poll() is None for each in team), (directory / "log").read_text()
            time.sleep(0.05)
        for kill in range(kills):
            time.sleep(rng.uniform(0, 1.0))
            victim = int(rng.integers(processes))
            assert team[victim].poll() in (None, 0), (directory / "log").read_text()
            team[victim].kill()
            team[victim].wait()
            if kill + 1 == kills:
                environment["TINY_SLEEP"] = "0"
            team[victim] = start()
        for each in team:
            assert each.wait(timeout=300) == 0, (directory / "log").read_text()
    finally:
        for each in team:
            each.kill()
            each.wait()
        log.close()


def rounds_there(url) -> int:
    try:
        store = Store(url)
        try:
            return sum(member.rounds_done for member in store.runs(store.experiment().id))
        finally:
            store.close()
    except Exception:  # it is being created
        return 0


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
    share(tmp_path / "a.sqlite", tmp_path, processes, kills)
    assert_all_rows_once(tmp_path / "a.sqlite", tmp_path)


@pytest.mark.parametrize(
    ("processes", "kills"),
    [(2, 2), *(pytest.param(size, 20, marks=pytest.mark.slow) for size in (2, 4))],
)
def test_processes_share_an_experiment_in_postgresql(postgres, tmp_path, processes, kills):
    share(postgres, tmp_path, processes, kills)
    assert_all_rows_once(postgres, tmp_path)
