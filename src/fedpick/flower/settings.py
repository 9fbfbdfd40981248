"""What `with_policy` was told, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedpick.core.errors import InvalidInput
from fedpick.core.types import whole_number
from fedpick.flower.roster import KeyFunction

__all__ = ["REPORTS", "Settings"]

REPORTS: Mapping[str, str] = {"loss": "loss", "train_loss": "train_loss", "duration": "train-time"}
"""Outcome field -> the key under which a train reply's MetricRecord may report it."""


@dataclass(kw_only=True)
class Settings:
    """The arguments of `with_policy`; explained there."""

    budget: int | None
    seed: int
    path: Path | None
    key: KeyFunction | None
    use_weights: bool
    min_clients: int
    wait: float
    probe_timeout: float
    train_timeout: float
    reports: Mapping[str, str]

    def __post_init__(self) -> None:
        if self.budget is not None and self.budget < 1:
            raise InvalidInput(f"budget must be at least 1, or None for everybody available. Got {self.budget!r}.")
        self.seed = whole_number(self.seed, "seed", 0)
        for name, value in (
            ("wait", self.wait),
            ("probe_timeout", self.probe_timeout),
            ("train_timeout", self.train_timeout),
        ):
            if not value >= 0:
                raise InvalidInput(f"{name} must be a number of seconds of at least 0. Got {value!r}.")
        unknown = set(self.reports) - set(REPORTS)
        if unknown:
            raise InvalidInput(
                f"reports must map {', '.join(map(repr, REPORTS))} to keys of the train replies' metrics. "
                f"Got {', '.join(map(repr, sorted(unknown)))}."
            )
