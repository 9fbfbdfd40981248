"""The contract between a selection policy and its driver: the simulator, Flower, or a user's own loop.

A policy holds hyper-parameters only and never changes. What it learns is in the state that it returns. All methods are
pure: equal arguments give equal results, arguments are not modified, and randomness is an argument.
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
    """Everything that a policy may need from its driver. A driver states which of these it provides."""

    LOSS = "loss"
    """Probe: mean loss of a model on a client's data."""
    TRIAL = "trial"
    """Probe: the driver can train a cohort and discard the model."""
    UPDATE = "update"
    """Probe: the update after local training from the current model, as a vector or a sketch of it."""
    OUTPUTS = "outputs"
    """Probe: mean outputs of the locally trained model on common noise, as a vector."""
    OUTCOME_LOSS = "outcome.loss"
    """`Outcome.loss`: loss of the received model before training."""
    TRAIN_LOSS = "outcome.train_loss"
    """`Outcome.train_loss`: mean loss over the local steps."""
    DURATION = "outcome.duration"
    """`Outcome.duration`: seconds until the update arrived."""
    UPDATE_NORM = "outcome.update_norm"
    """`Outcome.update_norm`: norm of the update."""
    LOSS_RMS = "outcome.loss_rms"
    """`Outcome.loss_rms`: root mean square of the losses of the examples."""
    SKETCH = "outcome.sketch"
    """`Outcome.sketch`: a short description of the update, made by the server."""
    LABEL_HISTOGRAM = "clients.label_histogram"
    """`Clients.label_histogram`: examples per label."""
    FEATURES = "clients.features"
    """`Clients.features`: any description of the clients' data."""
    AVAILABILITY = "clients.availability"
    """`Clients.availability`: the true availability, from an oracle."""
    CORRELATION = "clients.correlation"
    """`Clients.correlation`: the true correlation of availability, from an oracle."""


class Policy(ABC, Generic[StateT]):
    """A rule that selects the clients of each round and their weights.

    Subclasses are final, frozen, keyword-only dataclasses of hyper-parameters, validated in `__post_init__`.
    """

    reference: ClassVar[str] = ""
    """BibTeX of the paper, for `fedpick.cite`."""
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Presets of hyper-parameters by name. `policies.get(name, variant=...)` starts from one of them."""
    unbiased: ClassVar[bool] = False
    """Whether E[sum of weights x updates] equals full participation. The conformance kit checks it."""

    @property
    def needs(self) -> frozenset[Signal]:
        """The signals that this configuration needs."""
        return frozenset()

    @abstractmethod
    def init(self, clients: Clients, rng: np.random.Generator) -> StateT:
        """Return the state before the first round. Newcomers start with their rows of it when the table grows."""

    def probe(self, state: StateT, context: RoundContext, rng: np.random.Generator) -> tuple[Probe, ...]:
        """Return the questions to clients before `select`. `context.measurements` is still empty."""
        return ()

    @abstractmethod
    def select(self, state: StateT, context: RoundContext, rng: np.random.Generator) -> tuple[Selection, StateT]:
        """Return the selection and the new state. Called in every round, even if no client is available."""

    def observe(self, state: StateT, outcome: Outcome) -> StateT:
        """Return the state after the outcome of the round. `completed` may be all False."""
        return state
