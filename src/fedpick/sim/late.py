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

from fedpick.core.arrays import BoolArray, FloatArray, IntArray, stack_rows
from fedpick.core.types import Outcome

__all__ = ["REPORTS", "StaleRule", "UnderWay", "stale_factors"]

StaleRule = Literal["refl", "age", "sqrt", "equal"]
REPORTS = ("loss", "loss_rms", "train_loss", "duration", "update_norm")
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
    """(j, P); NaN where the client sends NaN."""
    reports: FloatArray
    """(j, 5 + s) the fields `REPORTS` of an `Outcome`, then the sketch."""

    @classmethod
    def none(cls, num_parameters: int) -> UnderWay:
        """No answer."""
        nobody, nothing, updates = np.empty(0, np.int64), np.empty(0), np.empty((0, num_parameters), np.float32)
        reports = np.empty((0, len(REPORTS)))
        return cls(clients=nobody, started=nobody, due=nothing, weights=nothing, updates=updates, reports=reports)

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
        joined = {name: np.concatenate(arrays) for name, arrays in both.items() if name != "reports"}
        return UnderWay(reports=stack_rows(self.reports, more.reports), **joined)

    def outcome(self, index: int, used: BoolArray) -> Outcome:
        """What the policy is told of these answers when they come in round `index`; (j,) `used` entered the model."""
        count = len(REPORTS)
        reports = dict(zip(REPORTS, self.reports.T[:count], strict=True))
        return Outcome(index=index, clients=self.clients, completed=used, sketch=self.reports[:, count:], **reports)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """By name, for a checkpoint."""
        return {f"late/{item.name}": getattr(self, item.name) for item in fields(self)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> UnderWay:
        """The inverse of `arrays`. Answers that were saved before they had reports have none."""
        none = np.full((len(arrays["late/clients"]), len(REPORTS)), np.nan)
        arrays = {"late/reports": none, **arrays}
        return cls(**{item.name: arrays[f"late/{item.name}"] for item in fields(cls)})
