"""What happened in a round, for whoever wants to be told: `with_policy(..., progress=function)`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedpick.flower.exchange import CohortGrid

__all__ = ["Diary", "RoundReport", "Step"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One exchange with clients. It ends with the last answer, at the latest at the deadline."""

    kind: str
    """"train", or "query.fedpick" for questions; a "train" before the last one is a trial on the side."""
    asked: int
    answered: int
    """How many replies came; those that the SuperLink wrote in a dead node's name included."""
    seconds: float
    deadline: float


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """A round, by the clients' keys: told when the cohort is chosen (`over` is False) and when the round has ended."""

    index: int
    available: list[str]
    cohort: list[str]
    over: bool = False
    completed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0
    """From the start of the round until now."""


class Diary:
    """Times the steps of a round and tells the listener."""

    def __init__(self, listener: Callable[[RoundReport], None] | None) -> None:
        self._listener = listener
        self._steps: list[Step] = []
        self._started = self._sent = time.monotonic()
        self._report: RoundReport | None = None

    def open(self, grid: Grid) -> Grid:
        """A new round; returns the grid whose exchanges are timed."""
        self._started, self._steps, self._report = time.monotonic(), [], None
        return _TimedGrid(grid, self._steps)

    def chosen(self, index: int, available: Iterable[str], cohort: Iterable[str]) -> None:
        """The cohort is chosen; its messages are about to be sent."""
        self._sent = time.monotonic()
        self._report = RoundReport(
            index=index,
            available=list(available) if self._listener is not None else [],
            cohort=list(cohort),
            steps=list(self._steps),
            seconds=self._sent - self._started,
        )
        self._tell()

    def answered(self, asked: int, answered: int, deadline: float) -> None:
        """The replies to the training messages are there, or the deadline has passed."""
        seconds = time.monotonic() - self._sent
        self._steps.append(Step(kind="train", asked=asked, answered=answered, seconds=seconds, deadline=deadline))

    def over(self, completed: Sequence[bool]) -> None:
        """The round is committed."""
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
        _LOG.info(
            "Round %d: %d of %d completed in %.1f s; failed: %s",
            *(self._report.index, len(self._report.completed), len(pairs), self._report.seconds),
            ", ".join(self._report.failed) or "none",
        )
        self._tell()

    def _tell(self) -> None:
        if self._listener is None or self._report is None:
            return
        try:
            self._listener(self._report)
        except Exception:  # whoever watches must not end what is watched
            _LOG.exception("The progress function failed in round %d; the federation goes on.", self._report.index)


class _TimedGrid(CohortGrid):
    """The whole grid, with a note of how long each exchange took."""

    def __init__(self, grid: Grid, steps: list[Step]) -> None:
        super().__init__(grid, [])
        self._steps = steps

    def get_node_ids(self) -> Iterable[int]:
        """Passed through."""
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """Passed through."""
        return self._grid.get_nodes()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Passed through, and timed."""
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
