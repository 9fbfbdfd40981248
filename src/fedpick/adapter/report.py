"""Reports of what happened in a round, for the log and for the function in `with_policy(..., progress=function)`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

__all__ = ["RoundProgress", "RoundReport", "Step"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One exchange with clients. It ends with the last reply, at the latest at the deadline."""

    kind: str
    """What was sent: "train", "evaluate", or a query. A "train" before the last one is a trial."""
    asked: int
    """The number of messages sent."""
    answered: int
    """The number of replies, including errors that the server wrote for a dead node."""
    seconds: float
    """How long the exchange took."""
    deadline: float
    """Seconds after which the server would have stopped waiting."""


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """A round, with clients named by their keys; sent when the cohort is chosen and, with `over`, when it ends."""

    round: int
    """From 1, as Flower counts; a resumed run counts on from the saved state."""
    available: list[str]
    """The clients that could be reached."""
    cohort: list[str]
    """The selected clients."""
    over: bool = False
    """Whether the round has ended."""
    completed: list[str] = field(default_factory=list)
    """The selected clients whose update was used."""
    failed: list[str] = field(default_factory=list)
    """The other selected clients."""
    late: list[str] = field(default_factory=list)
    """The failed clients that had not answered when enough others had, or when the deadline passed."""
    steps: list[Step] = field(default_factory=list)
    """The exchanges with clients so far."""
    seconds: float = 0.0
    """From the start of the round until now."""


class RoundProgress:
    """Times the steps of a round and calls the user's function."""

    def __init__(self, function: Callable[[RoundReport], None] | None, log: logging.Logger) -> None:
        self._function = function
        self._log = log
        self.steps: list[Step] = []
        self._started = self._sent = time.monotonic()
        self._report: RoundReport | None = None

    def start(self) -> None:
        """Start a round."""
        self._started, self.steps, self._report = time.monotonic(), [], None

    @property
    def wants_names(self) -> bool:
        """Whether anybody reads the names of the available clients."""
        return self._function is not None

    def chosen(self, round: int, available: Sequence[str], cohort: Sequence[str]) -> None:
        """Report the cohort, before its messages are sent."""
        self._sent = time.monotonic()
        self._report = RoundReport(
            round=round,
            available=list(available),
            cohort=list(cohort),
            steps=list(self.steps),
            seconds=self._sent - self._started,
        )
        self._send()

    def answered(self, asked: int, answered: int, deadline: float) -> None:
        """Note that the replies to the train messages have come, or that the deadline has passed."""
        seconds = time.monotonic() - self._sent
        self.steps.append(Step(kind="train", asked=asked, answered=answered, seconds=seconds, deadline=deadline))

    def finish(self, completed: Sequence[bool], late: Sequence[bool]) -> None:
        """Report the committed round."""
        if self._report is None:
            return
        pairs = list(zip(self._report.cohort, completed, strict=True))
        names = [key for key, missed in zip(self._report.cohort, late, strict=True) if missed]
        self._report = replace(
            self._report,
            over=True,
            completed=[key for key, done in pairs if done],
            failed=[key for key, done in pairs if not done],
            late=names,
            steps=list(self.steps),
            seconds=time.monotonic() - self._started,
        )
        self._log.info(
            "Round %d: %d of %d completed in %.1f s; failed: %s%s",
            *(self._report.round, len(self._report.completed), len(pairs), self._report.seconds),
            ", ".join(key for key in self._report.failed if key not in names) or "none",
            f"; late: {', '.join(names)}" if names else "",
        )
        self._send()

    def _send(self) -> None:
        if self._function is None or self._report is None:
            return
        try:
            self._function(self._report)
        except Exception:  # an observer must not end the run
            self._log.exception("The progress function failed in round %d; the run goes on.", self._report.round)
