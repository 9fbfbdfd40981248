"""Reports of what happened in a round, for the function in `with_policy(..., progress=function)`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import Message
from flwr.serverapp import Grid

from fedpick.flower.messages import LOG, GridView

__all__ = ["RoundProgress", "RoundReport", "Step"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One exchange with clients. It ends with the last reply, at the latest at the deadline."""

    kind: str
    """The message type: "train", "query.fedpick" or "evaluate". A "train" before the last one is a trial."""
    asked: int
    answered: int
    """The number of replies, including errors that the SuperLink wrote for a dead node."""
    seconds: float
    deadline: float


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """A round, with clients named by their keys; sent when the cohort is chosen and, with `over`, when it ends."""

    round: int
    """From 1, as Flower counts; a resumed run counts on from the saved state."""
    available: list[str]
    cohort: list[str]
    over: bool = False
    completed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0
    """From the start of the round until now."""


class RoundProgress:
    """Times the steps of a round and calls the user's function."""

    def __init__(self, function: Callable[[RoundReport], None] | None) -> None:
        self._function = function
        self._steps: list[Step] = []
        self._started = self._sent = time.monotonic()
        self._report: RoundReport | None = None

    def start(self, grid: Grid) -> Grid:
        """Start a round; returns the grid whose exchanges are timed."""
        self._started, self._steps, self._report = time.monotonic(), [], None
        return _TimedGrid(grid, self._steps)

    def chosen(self, round: int, available: Iterable[str], cohort: Iterable[str]) -> None:
        """Report the cohort, before its messages are sent."""
        self._sent = time.monotonic()
        self._report = RoundReport(
            round=round,
            available=list(available) if self._function is not None else [],
            cohort=list(cohort),
            steps=list(self._steps),
            seconds=self._sent - self._started,
        )
        self._send()

    def answered(self, asked: int, answered: int, deadline: float) -> None:
        """Note that the replies to the train messages have come, or that the deadline has passed."""
        seconds = time.monotonic() - self._sent
        self._steps.append(Step(kind="train", asked=asked, answered=answered, seconds=seconds, deadline=deadline))

    def finish(self, completed: Sequence[bool]) -> None:
        """Report the committed round."""
        if self._report is None:
            return
        pairs = list(zip(self._report.cohort, completed, strict=True))
        self._report = replace(
            self._report,
            over=True,
            completed=[key for key, done in pairs if done],
            failed=[key for key, done in pairs if not done],
            steps=list(self._steps),
            seconds=time.monotonic() - self._started,
        )
        LOG.info(
            "Round %d: %d of %d completed in %.1f s; failed: %s",
            *(self._report.round, len(self._report.completed), len(pairs), self._report.seconds),
            ", ".join(self._report.failed) or "none",
        )
        self._send()

    def _send(self) -> None:
        if self._function is None or self._report is None:
            return
        try:
            self._function(self._report)
        except Exception:  # an observer must not end the run
            LOG.exception("The progress function failed in round %d; the run goes on.", self._report.round)


class _TimedGrid(GridView):
    """The whole grid; measures how long each exchange took."""

    def __init__(self, grid: Grid, steps: list[Step]) -> None:
        super().__init__(grid)
        self._steps = steps

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Passed through and timed."""
        sent, started = list(messages), time.monotonic()
        replies = list(self._grid.send_and_receive(sent, timeout=timeout))
        self._steps.append(
            Step(
                kind=sent[0].metadata.message_type if sent else "",
                asked=len(sent),
                answered=len(replies),
                seconds=time.monotonic() - started,
                deadline=float("inf") if timeout is None else timeout,
            )
        )
        return replies
