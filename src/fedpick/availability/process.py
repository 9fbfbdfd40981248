"""What every availability process is: hyper-parameters that, started on a table of clients, give one mask per round.

Every round of a trace is reachable directly, and its mask is the same whichever rounds were asked before: the random
numbers of round t come from their own stream. Draws that hold for a whole trace (a client's rate, its cluster) come
from the stream of "round 0", those of round t from that of "round t + 1", so that the two never meet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedpick.core.errors import InvalidInput, is_number
from fedpick.core.rng import Purpose, stream
from fedpick.core.types import BoolArray, Clients, FloatArray

__all__ = ["AvailabilityProcess", "Trace"]


class Trace(ABC):
    """Who can be reached in each round: one process on one table of clients with one seed.

    It remembers the latest mask, to step forward cheaply; what it answers never depends on that.
    """

    def __init__(self, num_clients: int, seed: int) -> None:
        self.num_clients = num_clients
        self.seed = seed
        self._latest: tuple[int, BoolArray] | None = None
        self._known_truth: tuple[FloatArray, FloatArray] | None = None

    @property
    def availability(self) -> FloatArray:
        """(N,) true long-run probability pi_k of being available."""
        return self._truth_once()[0]

    @property
    def correlation(self) -> FloatArray:
        """(N,) true lag-one correlation lambda_k of availability over a long run; 0 for clients that never change."""
        return self._truth_once()[1]

    def mask(self, round: int) -> BoolArray:
        """(N,) who is available in this round, counted from 0; read-only. Nobody at all is a possible answer."""
        if isinstance(round, bool) or not isinstance(round, (int, np.integer)) or round < 0:
            raise InvalidInput(f"A round must be a whole number of at least 0. Got {round!r}.")
        latest = self._latest
        if latest is not None and latest[0] == round:
            return latest[1]
        mask = self._mask(int(round))
        mask.flags.writeable = False
        self._latest = (int(round), mask)
        return mask

    @abstractmethod
    def _mask(self, round: int) -> BoolArray:
        """A new array."""

    @abstractmethod
    def _truth(self) -> tuple[FloatArray, FloatArray]:
        """(N,) availability and (N,) correlation; asked for once, and only if somebody wants to know."""

    def _truth_once(self) -> tuple[FloatArray, FloatArray]:
        if self._known_truth is None:
            availability, correlation = self._truth()
            self._known_truth = read_only(availability), read_only(correlation)
        return self._known_truth

    def oracle(self, clients: Clients) -> Clients:
        """The table with the true availability and correlation filled in, for policies that are told them."""
        return replace(clients, availability=self.availability, correlation=self.correlation)

    def _round_stream(self, round: int) -> np.random.Generator:
        return stream(self.seed, round + 1, Purpose.AVAILABILITY)


class AvailabilityProcess(ABC):
    """A seeded model of who is reachable. Subclasses are final, frozen, keyword-only dataclasses of plain values."""

    reference: ClassVar[str] = ""
    """BibTeX of where it comes from."""

    @abstractmethod
    def start(self, clients: Clients, seed: int) -> Trace:
        """The trace for these clients; equal arguments give equal traces on every machine."""


def read_only(array: FloatArray) -> FloatArray:
    """A view that cannot be written to."""
    view = array.view()
    view.flags.writeable = False
    return view


def trace_stream(seed: int) -> np.random.Generator:
    """The stream for draws that hold for a whole trace."""
    return stream(seed, 0, Purpose.AVAILABILITY)


def checked_number(process: object, name: str, low: float, high: float, *, below: bool = False) -> float:
    """The parameter as a float in [low, high], or [low, high) with `below`."""
    value = getattr(process, name)
    if not (is_number(value) and low <= value <= high and not (below and value == high)):
        closing = ")" if below or high == np.inf else "]"
        raise InvalidInput(
            f"The parameter {name!r} of {type(process).__name__} must be a number in [{low:g}, {high:g}{closing}. "
            f"Got {value!r}."
        )
    return float(value)


def checked_whole(process: object, name: str, least: int) -> int:
    """The parameter as an int of at least `least`."""
    value = getattr(process, name)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise InvalidInput(
            f"The parameter {name!r} of {type(process).__name__} must be a whole number of at least {least}. "
            f"Got {value!r}."
        )
    return int(value)


def checked_choice(process: object, name: str, choices: Sequence[str]) -> None:
    """Refuse a parameter that is none of the named options."""
    value = getattr(process, name)
    if value not in choices:
        raise InvalidInput(
            f"The parameter {name!r} of {type(process).__name__} must be one of "
            f"{', '.join(map(repr, choices))}. Got {value!r}."
        )


def checked_flag(process: object, name: str) -> None:
    """Refuse a parameter that is neither True nor False."""
    value = getattr(process, name)
    if not isinstance(value, bool):
        raise InvalidInput(f"The parameter {name!r} of {type(process).__name__} must be true or false. Got {value!r}.")


def checked_values(process: object, name: str, low: float, high: float) -> float | FloatArray:
    """The parameter as one float for all, or a read-only array with one value each, all in [low, high]."""
    value: Any = getattr(process, name)
    problem = f"The parameter {name!r} of {type(process).__name__} must be a number or a list of numbers"
    try:
        array: NDArray[np.float64] = np.array(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{problem}. Got {value!r}.") from error
    if isinstance(value, (bool, str)) or array.ndim > 1 or array.size == 0:
        raise InvalidInput(f"{problem}, one per client or cluster. Got {value!r}.")
    if not (array.min() >= low and array.max() <= high):  # also catches NaN
        raise InvalidInput(f"{problem} in [{low:g}, {high:g}]. Got values from {array.min():g} to {array.max():g}.")
    if array.ndim == 0:
        return float(array)
    array.flags.writeable = False
    return array


def spread(value: float | FloatArray, count: int, name: str, what: str) -> FloatArray:
    """One value for each of `count` clients or clusters."""
    if isinstance(value, float):
        return np.full(count, value)
    if len(value) != count:
        raise InvalidInput(f"{name} has {len(value)} values, but there are {count} {what}. Give one number or {count}.")
    return value
