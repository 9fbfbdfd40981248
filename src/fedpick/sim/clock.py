"""The clock of a round: for whom the server waits, and when the round ends.

A round ends with the first of three events: enough answers have arrived, every selected client has answered or failed,
or the deadline passes. A client that fails is noticed at the moment at which its answer would have come.

A record of the round holds "times" (4, k): the seconds in which each client receives, computes and sends, as if the
round did not end before, and a `Status`. `reference` is the definition; `round_clock` computes the same with arrays.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

import numpy as np

from fedpick.core.arrays import BoolArray, FloatArray
from fedpick.core.validation import choice, number, require, whole
from fedpick.sim.late import StaleRule

__all__ = ["Ending", "Status", "Waiting", "reference", "round_clock"]


class Status(IntEnum):
    """What became of a selected client. The store keeps these numbers: add new ones, never renumber."""

    ANSWERED = 0
    FAILED = 1
    """Dropped out, or its update was not finite."""
    LATE = 2
    """Had not answered at the deadline."""
    CANCELLED = 3
    """Was stopped because enough others had answered."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """For whom the server waits, and what becomes of later answers."""

    overcommit: float = 1.0
    """Select this many times the budget and take the first `budget` answers; Oort and FedScale use 1.3."""
    quorum: float = 1.0
    """End the round when this share of the budget has answered."""
    deadline: float = math.inf
    """Seconds after which a round ends; those of the questions before it are not counted."""
    probe_timeout: float = math.inf
    """Seconds after which a probed client counts as silent."""
    idle: float = 60.0
    """Seconds until the server asks again after a round in which it could select no client."""
    late: Literal["drop", "stale", "buffer"] = "drop"
    """"drop": answers that come after the end of their round are lost; "stale": they enter the round in which they
    come, and the client is busy until then; "buffer": likewise, and a round ends with the first `buffer` answers of any
    age, while the policy fills up to `budget` running clients (FedBuff)."""
    buffer: int = 10
    """Answers that end a round with late = "buffer"."""
    stale_weight: StaleRule = "refl"
    """Factor of a stale answer's weight; see `fedpick.sim.late`."""

    def __post_init__(self) -> None:
        number(self, "overcommit", "[1, inf)")
        number(self, "quorum", "(0, 1]")
        for name in ("deadline", "probe_timeout"):
            number(self, name, "(0, inf]")
        number(self, "idle", "(0, inf)")
        choice(self, "late", ("drop", "stale", "buffer"))
        choice(self, "stale_weight", ("refl", "age", "sqrt", "equal"))
        whole(self, "buffer", 1)
        alone = self.late != "buffer" or (self.overcommit, self.quorum) == (1.0, 1.0)
        require(alone, self, "late", "'drop' or 'stale' with overcommit or quorum: a buffer has its own number")

    def asked(self, budget: int | None, running: int = 0) -> int | None:
        """How many clients the policy may select while `running` others train."""
        if budget is None:
            return None
        if self.late == "buffer":
            return max(budget - running, 0)
        return math.ceil(self.overcommit * budget - 1e-9)

    def wanted(self, budget: int | None, selected: int) -> int:
        """How many answers end a round with this many selected clients; in a buffered round, running ones."""
        if self.late == "buffer":
            return min(self.buffer, selected)
        most = selected if budget is None else min(budget, selected)
        return math.ceil(self.quorum * most - 1e-9)


class Ending(NamedTuple):
    """How a round ended for its k clients."""

    seconds: float
    """From the request to the end."""
    in_time: BoolArray
    """(k,) answered before the end; the first `wanted` answers."""
    cut_off: BoolArray
    """(k,) neither answered nor failed before the end."""


def round_clock(finish: FloatArray, failed: BoolArray, wanted: int, deadline: float = math.inf) -> Ending:
    """Compute the end of a round from the moments at which clients answer or fail, (k,) each.

    Of equal moments the first in the cohort counts first.
    """
    in_time = ~failed & (finish <= deadline)
    answers = int(np.count_nonzero(in_time))
    if answers < wanted:
        seconds = min(float(finish.max(initial=0.0)), deadline)
    elif answers == wanted or wanted == 0:
        in_time &= wanted > 0
        seconds = float(finish[in_time].max(initial=0.0))
    else:
        moments = np.where(in_time, finish, np.inf)
        seconds = _smallest(moments, wanted)
        in_time = moments < seconds
        in_time[np.flatnonzero(moments == seconds)[: wanted - np.count_nonzero(in_time)]] = True
    return Ending(seconds, in_time, ~in_time & ~(failed & (finish <= seconds)))


def _smallest(moments: FloatArray, count: int) -> float:
    """The `count`-th smallest, from 1. In large arrays a sample tells between which values it lies: 18 to 6 ms."""
    below = 0
    if len(moments) > 100_000:
        sample = np.sort(moments[:: len(moments) // 2000])
        place = count * len(sample) // len(moments)
        low, high = sample[max(place - 100, 0)], sample[min(place + 100, len(sample) - 1)]
        before, near = int(np.count_nonzero(moments < low)), moments[(moments >= low) & (moments <= high)]
        if before < count <= before + len(near):
            moments, below = near, before
    return float(np.partition(moments, count - below - 1)[count - below - 1])


def reference(
    finish: Sequence[float], failed: Sequence[bool], wanted: int, deadline: float = math.inf
) -> tuple[float, list[int]]:
    """Run the events of a round one by one: -> (seconds, the clients that answered in time, in order)."""
    over = len(finish)  # the deadline: comes after the answers of the same moment
    events = [(moment, client) for client, moment in enumerate(finish)] + [(deadline, over)]
    heapq.heapify(events)
    answered: list[int] = []
    now, working = 0.0, len(finish)
    while working and len(answered) < wanted:
        now, client = heapq.heappop(events)
        if client == over:
            break
        working -= 1
        if not failed[client]:
            answered.append(client)
    return now, answered
