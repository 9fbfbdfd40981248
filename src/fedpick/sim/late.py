"""Answers under way: updates of clients that train longer than their round, and how much they count when they come.

A client whose answer is under way is busy: it is not available until the answer has come. The answer enters the round
in which it comes, `age` rounds after it was asked for. Its weight is the one it would have had in its own round, times

    equal    1                                                        FedAvg's rule
    age      1 / (age + 1)
    sqrt     1 / sqrt(age + 1)                                        FedBuff's rule
    refl     0.65 / (age + 1) + 0.35 (1 - exp(-L / max L) / 10)       REFL's rule, as in the authors' code

L is the squared distance between the update and the mean fresh update of the round; without a fresh update, all L count
as equal. Fresh and stale weights are then scaled together to the sum that the policy gave, unless the policy forbids it
(`Selection.renormalize`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import BoolArray, FloatArray, IntArray

__all__ = ["StaleRule", "UnderWay", "stale_factors"]

StaleRule = Literal["refl", "age", "sqrt", "equal"]
_BETA = 0.35


def stale_factors(rule: StaleRule, age: IntArray, updates: NDArray[Any], fresh: FloatArray | None) -> FloatArray:
    """(j,) the factor of every stale weight. `fresh` is the mean fresh update (P,); None: there is none."""
    by_age: FloatArray = np.asarray(1.0 / (age + 1.0), np.float64)
    if rule == "equal":
        return np.ones(len(age))
    if rule == "age":
        return by_age
    if rule == "sqrt":
        return np.asarray(np.sqrt(by_age), np.float64)
    distance = np.ones(len(age)) if fresh is None else ((updates - fresh) ** 2).sum(axis=1)
    largest = distance.max(initial=0.0)
    share = distance / largest if largest > 0 else np.ones(len(age))
    factors: FloatArray = (1 - _BETA) * by_age + _BETA * (1 - np.exp(-share) / 10)
    return factors


@dataclass(frozen=True, kw_only=True, eq=False)
class UnderWay:
    """The answers under way, j of them."""

    clients: IntArray
    """(j,)"""
    started: IntArray
    """(j,) the round in which each was asked for."""
    due: FloatArray
    """(j,) when it comes, on the simulator's clock."""
    weights: FloatArray
    """(j,) of each update in its own round, had all clients completed."""
    updates: NDArray[np.float32]
    """(j, P)"""

    @classmethod
    def none(cls) -> UnderWay:
        """No answer."""
        nobody, nothing = np.empty(0, np.int64), np.empty(0)
        return cls(clients=nobody, started=nobody, due=nothing, weights=nothing, updates=np.empty((0, 0), np.float32))

    def __len__(self) -> int:
        return len(self.clients)

    def where(self, kept: BoolArray) -> UnderWay:
        """Some of them."""
        return UnderWay(**{item.name: getattr(self, item.name)[kept] for item in fields(self)})

    def and_also(self, more: UnderWay) -> UnderWay:
        """Return both, in order."""
        if not len(self) or not len(more):
            return self if len(self) else more
        both = {item.name: (getattr(self, item.name), getattr(more, item.name)) for item in fields(self)}
        return UnderWay(**{name: np.concatenate(arrays) for name, arrays in both.items()})

    def arrays(self) -> dict[str, NDArray[Any]]:
        """By name, for a checkpoint."""
        return {f"late/{item.name}": getattr(self, item.name) for item in fields(self)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> UnderWay:
        """The inverse of `arrays`."""
        return cls(**{item.name: arrays[f"late/{item.name}"] for item in fields(cls)})
