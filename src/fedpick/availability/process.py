"""The base classes: a process holds hyper-parameters; started on a table of clients, it returns a trace of masks.

Any round of a trace can be computed directly, and its mask does not depend on the rounds computed before: round t has
its own random stream. Draws that hold for a whole trace (a client's rate, its cluster) use the stream of "round 0",
those of round t the stream of "round t + 1", so the two never share numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from fedpick.core.arrays import BoolArray, FloatArray, read_only
from fedpick.core.errors import InvalidInput
from fedpick.core.rng import Purpose, stream
from fedpick.core.types import Clients
from fedpick.core.validation import require, whole

__all__ = ["AvailabilityProcess", "Trace"]


class Trace(ABC):
    """The clients that can be reached in each round: one process on one table of clients with one seed.

    A trace keeps its latest mask to step forward cheaply. The masks do not depend on it.
    """

    def __init__(self, num_clients: int, seed: int) -> None:
        self.num_clients = num_clients
        self.seed = seed
        self._latest: tuple[int, BoolArray] | None = None
        self._known_truth: tuple[FloatArray, FloatArray] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_clients:,} clients, seed={self.seed})"

    @property
    def availability(self) -> FloatArray:
        """(N,) true long-run probability pi_k of being available."""
        return self._truth_once()[0]

    @property
    def correlation(self) -> FloatArray:
        """(N,) true lag-one correlation lambda_k of availability over a long run; 0 for clients that never change."""
        return self._truth_once()[1]

    def mask(self, round: int) -> BoolArray:
        """(N,) the available clients of this round, counted from 0; read-only. It may be all False."""
        index = whole("Trace.mask", "round", 0, value=round)
        latest = self._latest
        if latest is not None and latest[0] == index:
            return latest[1]
        mask = self._mask(index)
        mask.flags.writeable = False
        self._latest = (index, mask)
        return mask

    @abstractmethod
    def _mask(self, round: int) -> BoolArray:
        """Compute the mask of one round as a new array."""

    @abstractmethod
    def _truth(self) -> tuple[FloatArray, FloatArray]:
        """Compute (N,) availability and (N,) correlation. Called once, on first use."""

    def _truth_once(self) -> tuple[FloatArray, FloatArray]:
        if self._known_truth is None:
            availability, correlation = self._truth()
            self._known_truth = read_only(availability), read_only(correlation)
        return self._known_truth

    def oracle(self, clients: Clients) -> Clients:
        """Return the table with the true availability and correlation, for policies that use them."""
        return replace(clients, availability=self.availability, correlation=self.correlation)

    def _round_stream(self, round: int) -> np.random.Generator:
        return stream(self.seed, round + 1, Purpose.AVAILABILITY)


class AvailabilityProcess(ABC):
    """A seeded model of availability. Subclasses are final, frozen, keyword-only dataclasses of plain values."""

    reference: ClassVar[str] = ""
    """BibTeX of the source."""

    @abstractmethod
    def start(self, clients: Clients, seed: int) -> Trace:
        """Return the trace for these clients. Equal arguments give equal traces on every machine."""


def trace_stream(seed: int) -> np.random.Generator:
    """Return the random stream for draws that hold for a whole trace."""
    return stream(seed, 0, Purpose.AVAILABILITY)


def numbers(process: object, name: str, low: float, high: float) -> float | FloatArray:
    """Return a parameter as one float for all, or as a read-only array with one value each, all in [low, high]."""
    value: Any = getattr(process, name)
    expected = f"a number in [{low:g}, {high:g}], or a list of such numbers with one per client or cluster"
    try:
        array: FloatArray = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.empty(0)
    usable = not isinstance(value, (bool, str)) and array.ndim <= 1 and array.size > 0
    # A comparison with NaN is false.
    require(usable and bool(array.min() >= low and array.max() <= high), process, name, expected)
    if array.ndim == 0:
        return float(array)
    array.flags.writeable = False
    return array


def one_each(value: ArrayLike, count: int, name: str, what: str) -> FloatArray:
    """Return one value for each of `count` clients or clusters."""
    values = np.asarray(value, dtype=np.float64)
    if values.ndim == 0:
        return np.full(count, float(values))
    if len(values) != count:
        raise InvalidInput(f"{name} has {len(values)} values, but there are {count} {what}. Pass one or {count}.")
    return values
