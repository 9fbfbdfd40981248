from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

import fedpick
from fedpick.core.errors import InvalidInput
from fedpick.experiments import schema as tables
from fedpick.experiments.executors import Inline, Processes, StopFlag
from fedpick.experiments.progress import Progress
from fedpick.experiments.runner import default_processes, make_executor, run
from fedpick.experiments.store import Store
from fedpick.experiments.toml import toml_text
from tests.experiments.store_content import content
from tests.experiments.tiny import SLOW, slow_spec, tiny_spec

ROOT = Path(__file__).parents[2]


def complete(tmp_path, name="whole", spec=None, **options):
    store = Store(tmp_path / f"{name}.sqlite")
    report = run(spec or tiny_spec(), store, processes=options.pop("processes", 1), **options)
    return store, report


def assert_same(left, right):
    first, second = content(left), content(right)
    assert first.keys() == second.keys()
    for table in first:
        assert first[table] == second[table], f"the table {table} differs"


def test_a_grid_runs_and_is_not_computed_twice(tmp_path):
    store, report = complete(tmp_path)
    assert report.complete
    assert report.finished == 6
    runs = store.runs(report.experiment.id)
    assert [(run.label, run.seed) for run in runs] == [
        (label, seed) for label in ("uniform", "rpow-d", "afl") for seed in (0, 1)
    ]
    assert all(run.status == "done" and run.rounds_done == 50 for run in runs)
    before = content(store)
    store, again = complete(tmp_path)
    assert again.complete
    assert content(store) == before


def test_all_policies_of_a_seed_face_the_same_availability(tmp_path):
    store, report = complete(tmp_path, spec=tiny_spec(rounds=8))
    masks = {}
    for each in store.runs(report.experiment.id):
        masks.setdefault(each.seed, []).append([record.available for record in store.records(each.id)])
    for same_seed in masks.values():
        assert all(np.array_equal(same_seed[0], other) for other in same_seed[1:])
    assert not np.array_equal(masks[0][0], masks[1][0])


def test_several_processes_give_the_same_rows_as_one(tmp_path):
    one, _ = complete(tmp_path, "one")
    two, report = complete(tmp_path, "two", processes=2)
    assert report.complete
    assert_same(one, two)


def test_more_rounds_and_seeds_continue_what_is_there(tmp_path):
    short, _ = complete(tmp_path, "grown", spec=tiny_spec(rounds=20, seeds=1))
    rows_before = content(short)["rounds"]
    grown, report = complete(tmp_path, "grown", spec=tiny_spec(rounds=50, seeds=2))
    assert report.complete
    assert set(rows_before) < set(content(grown)["rounds"])
    whole, _ = complete(tmp_path)
    for table in ("rounds", "selections", "arrays", "checkpoints"):
        assert content(whole)[table] == content(grown)[table]


class StopAfter(Progress):
    def __init__(self, flag, updates):
        self.flag, self.left = flag, updates

    def update(self, run_id, done, accuracy):
        self.left -= 1
        if self.left == 0:
            self.flag.set()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_stop_comes_after_the_round_and_can_be_gone_on_from(tmp_path, processes, monkeypatch):
    monkeypatch.setenv("TINY_SLEEP", "0.01" if processes > 1 else "0")
    flag = StopFlag()
    updates = 70 if processes == 1 else 2
    spec = slow_spec()
    store, report = complete(tmp_path, "cut", spec, processes=processes, stop=flag, progress=StopAfter(flag, updates))
    assert report.stopped > 0
    assert not report.complete
    monkeypatch.setenv("TINY_SLEEP", "0")
    store, report = complete(tmp_path, "cut", spec)
    assert report.complete
    whole, _ = complete(tmp_path, spec=spec)
    assert_same(whole, store)


def test_a_failing_run_is_told_and_the_others_go_on(tmp_path):
    spec = tiny_spec([{"name": "uniform"}, {"name": SLOW, "label": "bad", "fail_at": 7}], seeds=1)
    store, report = complete(tmp_path, spec=spec)
    assert report.failures == {"bad, seed 0": "RuntimeError: made to fail"}
    assert report.finished == 1
    failed = next(run for run in store.runs(report.experiment.id) if run.label == "bad")
    assert (failed.status, failed.rounds_done, failed.error) == ("failed", 7, "RuntimeError: made to fail")


def test_a_store_that_fails_is_told_and_not_hidden_by_its_next_failure(tmp_path, monkeypatch):
    def full(self, *_, **__):
        raise sa.exc.OperationalError("INSERT INTO rounds ...", {}, Exception("database or disk is full"))

    monkeypatch.setattr(Store, "write_round", full)

    def fails_too(self, run_id, **values):
        raise sa.exc.OperationalError("UPDATE runs ...", {}, Exception("another one"))

    monkeypatch.setattr(Store, "release", fails_too)
    _, report = complete(tmp_path, spec=tiny_spec(("uniform",), seeds=1))
    assert report.failures == {"uniform, seed 0": "The database failed: database or disk is full."}


def test_restart_forgets_everything(tmp_path):
    store, _ = complete(tmp_path, spec=tiny_spec(rounds=10))
    store, report = complete(tmp_path, spec=tiny_spec(rounds=5), restart=True)
    assert all(run.rounds_done == 5 for run in store.runs(report.experiment.id))


def test_wrong_options_are_refused_before_a_restart_discards_rounds(tmp_path):
    store, _ = complete(tmp_path, spec=tiny_spec(rounds=2))
    before = content(store)
    cluster = {"executor": "ray", "address": "auto", "processes": 2}
    for options in ({"processes": 0}, {"executor": "threads"}, {"address": "auto"}, cluster):
        with pytest.raises(InvalidInput):
            complete(tmp_path, spec=tiny_spec(rounds=2), restart=True, **options)
    assert content(store) == before


def test_a_run_begun_by_another_version_is_not_mixed(tmp_path, monkeypatch):
    complete(tmp_path, spec=tiny_spec(rounds=5))
    monkeypatch.setattr(fedpick, "__version__", "99.0")
    _, report = complete(tmp_path, spec=tiny_spec(rounds=6))
    assert len(report.failures) == 6
    assert "begun with fedpick" in next(iter(report.failures.values()))


def test_a_run_begun_with_another_split_of_the_work_is_not_mixed(tmp_path):
    store, _ = complete(tmp_path, spec=tiny_spec(["md"], rounds=5, seeds=1))
    with store.writing() as connection:
        manifest = connection.scalar(sa.select(tables.runs.c.manifest))
        connection.execute(tables.runs.update(), {"manifest": manifest.replace('"shards": 1', '"shards": 4')})
    _, report = complete(tmp_path, spec=tiny_spec(["md"], rounds=6, seeds=1))
    assert "begun with the simulator" in report.failures["md, seed 0"]


def test_rows_beyond_a_checkpoint_are_computed_again(tmp_path):
    whole, _ = complete(tmp_path)
    store, report = complete(tmp_path, "rare", spec=tiny_spec(rounds=20))
    first = store.runs(report.experiment.id)[0].id
    early = Store(tmp_path / "early.sqlite")
    run(tiny_spec(rounds=12), early, processes=1)
    with early.engine.connect() as connection:
        old = connection.scalar(sa.select(tables.checkpoints.c.content).where(tables.checkpoints.c.run_id == 1))
    with store.writing() as connection:
        connection.execute(
            tables.checkpoints.update().where(tables.checkpoints.c.run_id == first), {"rounds_done": 12, "content": old}
        )
    store, _ = complete(tmp_path, "rare")
    assert_same_rows(whole, store)


def assert_same_rows(left, right):
    for table in ("rounds", "selections", "arrays", "checkpoints"):
        assert content(left)[table] == content(right)[table]


def test_short_grids_stay_in_one_process(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert default_processes(10, 100) == 1
    assert default_processes(10, 100_000) == 4
    assert default_processes(2, 100_000) == 2
    assert make_executor("processes", processes=3, address=None, num_runs=5) == Processes(3)
    assert make_executor("processes", processes=None, address=None, num_runs=5, rounds_left=10) == Inline()


def test_engines_are_refused_by_name():
    with pytest.raises(InvalidInput, match="'processes' or 'ray'"):
        make_executor("threads", processes=None, address=None, num_runs=2)
    with pytest.raises(InvalidInput, match="at least 1"):
        make_executor("processes", processes=0, address=None, num_runs=2)
    with pytest.raises(InvalidInput, match="--executor ray"):
        make_executor("processes", processes=1, address="auto", num_runs=2)
    with pytest.raises(InvalidInput, match="Got 2 processes for 'auto'"):
        make_executor("ray", processes=2, address="auto", num_runs=2)


SCRIPT = """
import sys
from fedpick.experiments.runner import run
from fedpick.experiments.store import Store
from fedpick.experiments.toml import toml_text
from tests.experiments.tiny import slow_spec
if __name__ == "__main__":
    report = run(slow_spec(), Store(sys.argv[1]), processes=int(sys.argv[2]))
    sys.exit(0 if report.complete else 3)
"""


def rounds_there(file: Path) -> int:
    if not file.exists():
        return 0
    engine = sa.create_engine(f"sqlite:///{file}")
    try:
        with engine.connect() as connection:
            return int(connection.scalar(sa.select(sa.func.count()).select_from(tables.rounds)) or 0)
    except sa.exc.OperationalError:
        return 0
    finally:
        engine.dispose()


def kill_and_resume(tmp_path: Path, kills: int, processes: int) -> Store:
    """Kill -9 `fedpick run` at random moments, from start-up to the middle of the work; then run it to the end."""
    spec, file = tmp_path / "slow.toml", tmp_path / "killed.sqlite"
    spec.write_text(toml_text(slow_spec().to_dict()))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment["TINY_SLEEP"] = str(0.02 * max(1, kills / 12))  # the run must not end before the last kill
    options = ["--store", str(file), "--processes", str(processes), "--no-report", "--quiet"]
    command = [sys.executable, "-m", "fedpick", "run", str(spec), *options]
    rng = np.random.default_rng(0)
    in_the_middle = 0
    for kill in range(kills):
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        before, started = rounds_there(file), time.monotonic()
        if kill % 4:  # most of them while rounds are being written
            while rounds_there(file) == before and process.poll() is None and time.monotonic() - started < 60:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.15))
        else:
            time.sleep(rng.uniform(0, 3.0))
        assert process.poll() is None, "the run ended before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(0.2 if processes > 1 else 0)  # the workers see that their parent is gone
        in_the_middle += 0 < rounds_there(file) < 300
    assert in_the_middle >= kills // 2, "too few kills hit a run at work"
    environment["TINY_SLEEP"] = "0"
    subprocess.run(command, env=environment, check=True)
    return Store(file)


def test_killed_at_random_moments_it_ends_in_the_same_rows(tmp_path):
    killed = kill_and_resume(tmp_path, 5, 1)
    whole, _ = complete(tmp_path, spec=slow_spec())
    assert_same(whole, killed)


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "processes"), [(180, 1), (20, 2)])
def test_killed_many_times_it_ends_in_the_same_rows(tmp_path, kills, processes):
    killed = kill_and_resume(tmp_path, kills, processes)
    whole, _ = complete(tmp_path, spec=slow_spec())
    assert_same(whole, killed)


def test_ctrl_c_stops_after_the_round(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    file = tmp_path / "cut.sqlite"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "TINY_SLEEP": "0.02"}
    process = subprocess.Popen([sys.executable, str(script), str(file), "1"], env=environment, start_new_session=True)
    while rounds_there(file) < 5:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 3
    store = Store(file)
    cut = store.runs(store.experiment().id)
    assert any(run.status == "stopped" and 0 < run.rounds_done < 50 for run in cut)
    complete(tmp_path, "cut", slow_spec())
    whole, _ = complete(tmp_path, spec=slow_spec())
    assert_same(whole, store)
