"""Faults in simulation: clients that drop out, answer late or send NaN.

A fault is a function of (seed, round, client) alone, so that every policy meets the same faults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from fedpick.core.arrays import BoolArray
from fedpick.core.rng import Purpose
from fedpick.core.validation import number
from fedpick.sim import hashing

__all__ = ["FaultDraw", "Faults"]


class FaultDraw(NamedTuple):
    """What happens to the chosen clients of one round, (k,) each."""

    dropped: BoolArray
    """Never answers."""
    late: BoolArray
    """Answers after the deadline: its update is sent but not used."""
    poisoned: BoolArray
    """Answers in time, with NaN."""
    duration: NDArray[np.float64]
    """Seconds until the answer; NaN without one."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What may go wrong.

    A client's duration is (latency + seconds_per_example * examples it processes) * speed * jitter. The speed is
    lognormal with the spread `speed_spread` and fixed for the run; the jitter is drawn anew in every round.
    """

    dropout: float = 0.0
    """Probability that a chosen client never answers."""
    nan: float = 0.0
    """Probability that a client that answers sends NaN."""
    silence: float = 0.0
    """Probability that a probed client does not answer the probe."""
    deadline: float = np.inf
    """Seconds the server waits."""
    latency: float = 1.0
    seconds_per_example: float = 0.0
    speed_spread: float = 0.0
    """Standard deviation of the logarithm of a client's speed."""
    jitter: float = 0.0
    """Standard deviation of the logarithm of the round's disturbance."""

    def __post_init__(self) -> None:
        for name in ("dropout", "nan", "silence"):
            number(self, name, "[0, 1]")
        for name in ("latency", "seconds_per_example", "speed_spread", "jitter"):
            number(self, name, "[0, inf)")
        number(self, "deadline", "(0, inf]")

    def draw(self, seed: int, round: int, clients: NDArray[np.int64], examples: NDArray[np.int64]) -> FaultDraw:
        """Draw the faults of these clients; `examples` is how many each of them processes."""
        identity = clients.astype(np.uint32)
        per_run = hashing.fold(hashing.key_from(seed, int(Purpose.FAULTS)), identity)
        per_round = hashing.fold(hashing.key_from(seed, int(Purpose.FAULTS), round), identity)

        def uniform(key: hashing.Key, which: int) -> NDArray[np.float64]:
            return np.asarray(hashing.uniform_floats(key, np.array([which], np.uint32)))

        dropped = uniform(per_round, 0) < self.dropout
        spread = self.speed_spread * ndtri(uniform(per_run, 1)) + self.jitter * ndtri(uniform(per_round, 2))
        duration = (self.latency + self.seconds_per_example * examples) * np.exp(spread)
        late = ~dropped & (duration > self.deadline)
        poisoned = ~dropped & ~late & (uniform(per_round, 3) < self.nan)
        return FaultDraw(dropped, late, poisoned, np.where(dropped, np.nan, duration))

    def silent(self, seed: int, round: int, clients: NDArray[np.int64]) -> BoolArray:
        """(d,) which probed clients give no answer in this round."""
        key = hashing.fold(hashing.key_from(seed, int(Purpose.FAULTS), round), clients.astype(np.uint32))
        return np.asarray(hashing.uniform_floats(key, np.array([4], np.uint32)) < self.silence)
