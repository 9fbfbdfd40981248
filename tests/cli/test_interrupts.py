"""Ctrl-C in a real terminal: the key reaches every process of the foreground group, workers included."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("jax")

from tests.cli.conftest import SPEC
from tests.experiments.test_runner import rounds_there

ROOT = Path(__file__).parents[2]
# Make the terminal the controlling one, then become the program.
LAUNCH = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
SLOW_SPEC = SPEC.split("[[policies]]")[0].replace("rounds = 4", "rounds = 1000\nseeds = 2") + (
    '[[policies]]\nname = "tests.experiments.tiny:Slow"\nlabel = "slow"\n'
)


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, *command: str, directory: Path, **environment: str) -> None:
        self.keyboard, inside = pty.openpty()
        path = os.pathsep.join([str(ROOT), *sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *command], stdin=inside, stdout=inside, stderr=inside, cwd=directory,
            env={**os.environ, "PYTHONPATH": path, "COLUMNS": "150", **environment},
        )  # fmt: skip
        os.close(inside)
        os.set_blocking(self.keyboard, False)
        self.shown = ""

    def read(self) -> str:
        try:
            while received := os.read(self.keyboard, 65536):
                self.shown += received.decode(errors="replace")
        except OSError:  # nothing now, or nothing more
            pass
        return self.shown

    def wait_for(self, condition, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.read()
            assert time.monotonic() < end, self.read()
            self.read()
            time.sleep(0.01)

    def press_ctrl_c(self) -> None:
        os.write(self.keyboard, b"\x03")

    def code(self, seconds: float) -> int:
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            self.read()
            time.sleep(0.01)
        self.read()
        return self.process.wait(timeout=0.1)

    def still_running(self) -> list[int]:
        """Processes of the terminal's session, zombies aside."""
        found = []
        for each in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, *fields = each.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == self.process.pid and state not in "ZX":
                found.append(int(each.parent.name))
        return found

    def close(self) -> None:
        for pid in self.still_running():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.keyboard)


@pytest.fixture
def terminal(tmp_path):
    (tmp_path / "spec.toml").write_text(SLOW_SPEC)
    opened = []

    def open_terminal(*command, **environment):
        opened.append(Terminal(*command, directory=tmp_path, **environment))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.close()


def run_slowly(terminal, processes, sleep):
    command = ("-m", "fedpick", "run", "spec.toml", "--no-report", "-p", str(processes), "--store", "a.sqlite")
    return terminal(*command, TINY_SLEEP=str(sleep))


def assert_all_ended(shown):
    end = time.monotonic() + 5
    while (left := shown.still_running()) and time.monotonic() < end:
        time.sleep(0.05)
    assert left == []


@pytest.mark.parametrize("processes", [1, 2])
def test_one_ctrl_c_finishes_the_round(terminal, tmp_path, processes):
    shown = run_slowly(terminal, processes, 0.05)
    shown.wait_for(lambda: rounds_there(tmp_path / "a.sqlite") >= 3)
    shown.press_ctrl_c()
    assert shown.code(60) == 3, shown.shown
    assert "Stopping after the current rounds" in shown.shown
    assert "2 runs are not finished. Go on with: fedpick run spec.toml" in shown.shown
    assert "Traceback" not in shown.shown
    assert_all_ended(shown)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_second_ctrl_c_leaves_at_once(terminal, tmp_path, processes):
    """The first round takes 100 s; the workers must not go on either."""
    shown = run_slowly(terminal, processes, 100)
    shown.wait_for(lambda: statuses(tmp_path / "a.sqlite").count("running") == processes)
    shown.press_ctrl_c()
    shown.wait_for(lambda: "Ctrl-C again leaves at once" in shown.shown, 10)
    shown.press_ctrl_c()
    assert shown.code(5) == 130, shown.shown
    assert "Traceback" not in shown.shown
    assert_all_ended(shown)


def statuses(file):
    import sqlite3

    if not file.exists():
        return []
    connection = sqlite3.connect(file)
    try:
        return [status for (status,) in connection.execute("SELECT status FROM runs")]
    except sqlite3.OperationalError:
        return []
    finally:
        connection.close()


@pytest.mark.parametrize("presses", [1, 2])
@pytest.mark.parametrize("module", ["numpy", "jax"])
def test_ctrl_c_during_imports_is_no_traceback(terminal, tmp_path, module, presses):
    """NumPy comes first, JAX last. The stand-in hangs: in Python, or in compiled code, which knows no Ctrl-C."""
    hang = "lock = ctypes.create_string_buffer(64)\nwhile True: ctypes.CDLL(None).pthread_mutex_lock(lock)\n"
    (tmp_path / f"{module}.py").write_text(
        "import ctypes, time\nprint('importing', flush=True)\n" + ("time.sleep(100)\n" if presses == 1 else hang)
    )
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom fedpick.cli import main; main()"
    shown = terminal("-c", script, "run", "spec.toml", "-p", "1")
    shown.wait_for(lambda: "importing" in shown.shown)
    time.sleep(0.2)
    for _ in range(presses):
        shown.press_ctrl_c()
        time.sleep(0.3)
    assert shown.code(5) == (3 if presses == 1 else 130), shown.shown
    assert "Traceback" not in shown.shown
    if presses == 1:
        assert "Interrupted. The same command resumes" in shown.shown
