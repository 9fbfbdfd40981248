"""Progress of an experiment: live bars on a terminal, plain lines elsewhere, JSON lines, or nothing."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from fedpick.experiments.encoding import to_json

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["JsonLines", "Lines", "LiveBars", "Progress", "RunLine", "make_progress"]

_SHOW_ALL_UP_TO = 24


@dataclass(frozen=True)
class RunLine:
    """One run as people see it."""

    run_id: int
    label: str
    seed: int
    rounds: int
    done: int

    @property
    def name(self) -> str:
        """Policy and seed."""
        return f"{self.label}, seed {self.seed}"


class Progress:
    """Shows nothing; base of the others. Use it as a context manager."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def start(self, runs: list[RunLine]) -> None:
        """These runs start; `done` of their rounds are in the store already."""

    def update(self, run_id: int, done: int, accuracy: float | None) -> None:
        """A run has this many rounds now."""

    def finish(self, run_id: int, status: str, error: str | None = None) -> None:
        """A run has ended: done, stopped or failed."""

    def note(self, text: str) -> None:
        """Show a message."""


class Lines(Progress):
    """A line when a run ends, and every so often in between: for logs."""

    def __init__(self, stream: IO[str] | None = None, every: float = 10.0) -> None:
        self.stream = stream or sys.stderr
        self.every = every
        self._runs: dict[int, RunLine] = {}
        self._latest: dict[int, tuple[float, int, float]] = {}

    def _say(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def start(self, runs: list[RunLine]) -> None:
        """See `Progress`."""
        self._runs = {run.run_id: run for run in runs}
        there = sum(run.done for run in runs)
        self._say(f"{len(runs)} runs, {sum(run.rounds for run in runs)} rounds, {there} of them done before")

    def update(self, run_id: int, done: int, accuracy: float | None) -> None:
        """See `Progress`."""
        now = time.monotonic()
        said, rounds, since = self._latest.setdefault(run_id, (now, self._runs[run_id].done, now))
        if now - said >= self.every:
            run = self._runs[run_id]
            # Resuming drops the rounds beyond the last checkpoint: there may be fewer than before.
            speed = max(done - rounds, 0) / max(now - since, 1e-9)
            left = f", {(run.rounds - done) / speed:.0f} s left" if speed else ""
            self._say(f"{run.name}: {done}/{run.rounds} rounds, {speed:.1f}/s{left}{_percent(accuracy)}")
            self._latest[run_id] = (now, done, now)

    def finish(self, run_id: int, status: str, error: str | None = None) -> None:
        """See `Progress`."""
        self._say(f"{self._runs[run_id].name}: {status}{f' ({error})' if error else ''}")

    def note(self, text: str) -> None:
        """See `Progress`."""
        self._say(text)


class JsonLines(Progress):
    """One JSON object per line on standard output, at most one per second and run. NaN is written as null."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self.stream = stream or sys.stdout
        self._runs: dict[int, RunLine] = {}
        self._said: dict[int, float] = {}

    def _say(self, event: str, **values: Any) -> None:
        print(to_json({"event": event, **values}, sort_keys=False), file=self.stream, flush=True)

    def start(self, runs: list[RunLine]) -> None:
        """See `Progress`."""
        self._runs = {run.run_id: run for run in runs}
        self._say("start", runs=[vars(run) for run in runs])

    def update(self, run_id: int, done: int, accuracy: float | None) -> None:
        """See `Progress`."""
        now = time.monotonic()
        run = self._runs[run_id]
        if done == run.rounds or now - self._said.get(run_id, -1e9) >= 1.0:
            self._said[run_id] = now
            self._say("progress", run_id=run_id, label=run.label, seed=run.seed, done=done, accuracy=accuracy)

    def finish(self, run_id: int, status: str, error: str | None = None) -> None:
        """See `Progress`."""
        self._say("run", run_id=run_id, status=status, error=error)

    def note(self, text: str) -> None:
        """See `Progress`."""
        self._say("note", text=text)


class LiveBars(Progress):
    """A bar per run: rounds, rounds per second, time left, accuracy now; and one for everything."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        self.console = console or Console(stderr=True)
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),  # labels are text: "[/b]" is no markup in them
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}", justify="right"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[accuracy]}", justify="right"),
            console=self.console,
            expand=True,
        )
        self._tasks: dict[int, Any] = {}
        self._runs: dict[int, RunLine] = {}
        self._total: Any = None
        self._began: dict[Any, tuple[float, int]] = {}

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def start(self, runs: list[RunLine]) -> None:
        """See `Progress`."""
        self._runs = {run.run_id: run for run in runs}
        everything = sum(run.rounds for run in runs)
        if len(runs) > 1:
            self._total = self._bars.add_task(
                f"all {len(runs)} runs", total=everything, completed=sum(run.done for run in runs), **_EMPTY
            )
        for run in runs:
            shown = len(runs) <= _SHOW_ALL_UP_TO
            self._tasks[run.run_id] = self._bars.add_task(
                run.name, total=run.rounds, completed=run.done, start=False, visible=shown, **_EMPTY
            )

    def update(self, run_id: int, done: int, accuracy: float | None) -> None:
        """See `Progress`."""
        task = self._tasks[run_id]
        if task not in self._began:
            self._bars.start_task(task)
        self._advance(task, done, accuracy=_percent(accuracy).lstrip(", "), visible=True)
        if self._total is not None:
            self._advance(self._total, sum(int(self._bars.tasks[each].completed) for each in self._tasks.values()))

    def _advance(self, task: Any, done: int, **fields: Any) -> None:
        now = time.monotonic()
        since, first = self._began.setdefault(task, (now, done))
        speed = f"{(done - first) / (now - since):.1f}/s" if now - since > 0.2 else ""
        self._bars.update(task, completed=done, speed=speed, **fields)

    def finish(self, run_id: int, status: str, error: str | None = None) -> None:
        """See `Progress`."""
        task = self._tasks[run_id]
        marks = {"done": "[green]done", "stopped": "[yellow]stopped", "failed": "[red]failed"}
        self._bars.update(task, speed=marks.get(status, status), visible=len(self._tasks) <= _SHOW_ALL_UP_TO)
        if error:
            self.note(f"{self._runs[run_id].name}: {error}")

    def note(self, text: str) -> None:
        """See `Progress`."""
        self.console.print(text, highlight=False, markup=False, emoji=False)


_EMPTY: dict[str, Any] = {"speed": "", "accuracy": ""}


def _percent(accuracy: float | None) -> str:
    return "" if accuracy is None or not math.isfinite(accuracy) else f", accuracy {100 * accuracy:.1f} %"


def make_progress(*, quiet: bool = False, as_json: bool = False) -> Progress:
    """The kind that fits: `quiet` nothing, `as_json` JSON lines, bars on a terminal, lines otherwise."""
    if as_json:
        return JsonLines()
    if quiet:
        return Progress()
    return LiveBars() if sys.stderr.isatty() else Lines()
