"""The whole contract between a selection policy and whatever drives it: simulator, Flower, your own loop.

A policy holds hyper-parameters only and never changes. Everything it learns is in the state it returns. All methods
are pure: the same arguments give the same result, arguments are never modified, randomness is an argument.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

if TYPE_CHECKING:
    import numpy as np

    from fedpick.core.types import Clients, Outcome, Probe, RoundContext, Selection

__all__ = ["Policy", "Signal", "StateT"]

StateT = TypeVar("StateT")


class Signal(StrEnum):
    """What a policy may need from outside: a closed vocabulary on which policies and drivers negotiate."""

    LOSS = "loss"
    """Probe: mean loss of a model on local data."""
    TRIAL = "trial"
    """Probe: the driver can train a cohort whose model is thrown away."""
    UPDATE = "update"
    """Probe: the local update after training from the current model, a vector (a sketch of it is fine)."""
    OUTPUTS = "outputs"
    """Probe: mean outputs of the locally trained model on common noise, a vector."""
    OUTCOME_LOSS = "outcome.loss"
    TRAIN_LOSS = "outcome.train_loss"
    DURATION = "outcome.duration"
    UPDATE_NORM = "outcome.update_norm"
    LABEL_HISTOGRAM = "clients.label_histogram"
    FEATURES = "clients.features"
    AVAILABILITY = "clients.availability"
    CORRELATION = "clients.correlation"


class Policy(ABC, Generic[StateT]):
    """Chooses which clients train in each round, and with what weight.

    Subclasses are final, frozen, keyword-only dataclasses of hyper-parameters, validated in `__post_init__`.
    """

    reference: ClassVar[str] = ""
    """BibTeX of the paper, for `fedpick.cite`."""
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Presets of hyper-parameters by name. `policies.get(name, variant=...)` starts from one of them."""
    unbiased: ClassVar[bool] = False
    """Claims that E[sum of weights x update] equals full participation; the conformance kit checks the claim."""

    @property
    def needs(self) -> frozenset[Signal]:
        """What this configuration needs from outside."""
        return frozenset()

    @abstractmethod
    def init(self, clients: Clients, rng: np.random.Generator) -> StateT:
        """The state before the first round, and what a newcomer starts with when the table grows."""

    def probe(self, state: StateT, context: RoundContext, rng: np.random.Generator) -> tuple[Probe, ...]:
        """What to ask, and whom, before choosing. `context.measurements` is empty here."""
        return ()

    @abstractmethod
    def select(self, state: StateT, context: RoundContext, rng: np.random.Generator) -> tuple[Selection, StateT]:
        """Who trains now. Called in every round, also when nobody is available."""

    def observe(self, state: StateT, outcome: Outcome) -> StateT:
        """Learn from how the round ended; nobody may have completed."""
        return state
