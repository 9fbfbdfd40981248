"""Settings of the simulator: what a chosen client does, and what the server does with the updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import FloatArray, IntArray
from fedpick.core.errors import InvalidInput
from fedpick.core.sketches import CHOICES, SketchFunction, is_sketch
from fedpick.core.validation import assign, choice, is_whole, number, require, whole
from fedpick.data.types import Part
from fedpick.sim.robust import RULES, clip_norms, combine

__all__ = ["EngineName", "LearningRate", "LocalTraining", "ServerStep", "SimulatorSettings"]

EngineName = Literal["jax", "torch"]
Sampling = Literal["epoch", "batch", "replacement"]


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """initial * factor^(milestones reached) * per_round^t / (1 + decay * t), for round t = 0, 1, ...

    >>> schedule = LearningRate(initial=0.1, milestones=(150, 300))
    >>> [schedule.at(t) for t in (0, 149, 150, 300)]
    [0.1, 0.1, 0.05, 0.025]
    """

    initial: float
    milestones: Sequence[int] = ()
    """Rounds, from 0, at which the rate is multiplied by `factor` once more."""
    factor: float = 0.5
    per_round: float = 1.0
    decay: float = 0.0

    def __post_init__(self) -> None:
        for name in ("initial", "factor", "per_round"):
            number(self, name, "(0, inf)")
        number(self, "decay", "[0, inf)")
        assign(self, milestones=tuple(int(milestone) for milestone in self.milestones))

    def at(self, round: int) -> float:
        """Return the rate of one round."""
        reached = sum(milestone <= round for milestone in self.milestones)
        return self.initial * self.factor**reached * self.per_round**round / (1.0 + self.decay * round)


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """Mini-batch SGD on a client. Give `steps` (batches) or `epochs`, not both.

    The optimiser starts fresh in every round: its momentum is not kept. (CA-Fed's authors keep it in their code; their
    paper does not mention it.)
    """

    lr: float | LearningRate
    """The learning rate, constant or a schedule."""
    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = 64
    """None: the client's whole training data in every step (gradient descent)."""
    sampling: Sampling = "epoch"
    """"epoch": pass over a fresh permutation, then the next one; "batch": every batch draws min(batch_size, n)
    distinct examples anew; "replacement": every batch draws batch_size examples independently."""
    momentum: float = 0.0
    """Of SGD."""
    weight_decay: float = 0.0
    """Adds weight_decay * w to the gradient, as PyTorch's SGD does."""
    proximal: float = 0.0
    """FedProx's mu: adds mu * (w - received w) to the gradient."""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise InvalidInput(
                f"LocalTraining needs either steps or epochs. Got steps={self.steps}, epochs={self.epochs}."
            )
        for name in ("steps", "epochs", "batch_size"):
            whole(self, name, 1, optional=True)
        choice(self, "sampling", ("epoch", "batch", "replacement"))
        if not isinstance(self.lr, LearningRate):
            assign(self, lr=LearningRate(initial=self.lr))
        for name in ("momentum", "weight_decay", "proximal"):
            number(self, name, "[0, inf)")

    def lr_at(self, round: int) -> float:
        """Return the learning rate of one round."""
        assert isinstance(self.lr, LearningRate)
        return self.lr.at(round)

    def num_steps(self, sizes: IntArray) -> IntArray:
        """(k,) steps of clients with these numbers of training examples; a client without data takes none."""
        if self.steps is not None:
            return np.where(sizes > 0, self.steps, 0)
        assert self.epochs is not None
        return self.epochs * self.batches_per_epoch(sizes)

    def batches_per_epoch(self, sizes: IntArray) -> IntArray:
        """(k,) batches in one pass."""
        return (sizes > 0).astype(np.int64) if self.batch_size is None else -(-sizes // self.batch_size)


@dataclass(frozen=True, kw_only=True)
class ServerStep:
    """How the server uses the weighted sum of updates.

        model <- model + lr * sum_i w_i update_i                                                (plain)
        v <- momentum v + (weight_decay model - sum_i w_i update_i); model <- model - lr v      (SGD with momentum)

    The weights w_i are those of `fedpick.aggregation_weights`. If they are all 0, neither model nor momentum changes.
    CA-Fed's authors use momentum=0.9, weight_decay=0.01.
    """

    lr: float | LearningRate = 1.0
    """The server's learning rate, constant or a schedule."""
    momentum: float = 0.0
    weight_decay: float = 0.0
    radius: float | None = None
    """Project the model onto the ball of this radius (Euclidean norm of all parameters) after the step."""
    aggregation: str = "mean"
    """What takes the place of the weighted mean of the updates: a rule of `fedpick.sim.robust`, against updates that
    were made to do harm."""
    attackers: float = 0.2
    """The share of the cohort that "trimmed-mean", "krum" and "multi-krum" expect to be such updates."""
    clip_norms: float | None = None
    """Scale down updates that are longer than this many times the median length in the cohort; None: never."""

    def __post_init__(self) -> None:
        if not isinstance(self.lr, LearningRate):
            assign(self, lr=LearningRate(initial=self.lr))
        for name in ("momentum", "weight_decay"):
            number(self, name, "[0, inf)")
        for name in ("radius", "clip_norms"):
            if getattr(self, name) is not None:
                number(self, name, "(0, inf)")
        choice(self, "aggregation", RULES)
        number(self, "attackers", "[0, 0.5)")

    @property
    def robust(self) -> bool:
        """Whether the step needs the single updates, not only their weighted sum."""
        return self.aggregation != "mean" or self.clip_norms is not None

    def combine(self, updates: NDArray[Any], weights: FloatArray) -> FloatArray | None:
        """(P,) what takes the place of `weights @ updates`; see `fedpick.sim.engine.Combine`."""
        if not (weights > 0).any():
            return None
        if self.clip_norms is not None:
            updates = updates.copy()
            updates[weights > 0] = clip_norms(updates[weights > 0], self.clip_norms)[0]
        return combine(updates, weights, self.aggregation, self.attackers)

    def settings(self) -> dict[str, Any]:
        """Everything that decides the numbers, as plain values. A robust rule is named only where there is one."""
        younger = ("aggregation", "attackers", "clip_norms")
        return {name: value for name, value in asdict(self).items() if self.robust or name not in younger}

    def lr_at(self, round: int) -> float:
        """Return the server's learning rate of one round."""
        assert isinstance(self.lr, LearningRate)
        return self.lr.at(round)


@dataclass(frozen=True, kw_only=True)
class SimulatorSettings:
    """How a `Simulator` measures and computes; see its arguments of the same names."""

    losses_on: Part = "train"
    shards: int | None = None
    group: int | None = None
    sketch: str | SketchFunction = field(default="head", metadata={"toml": str | int})
    update_length: int | None = None
    noise_examples: int = 128
    engine: EngineName | None = None
    """The library that trains one of fedpick's own tasks; None: JAX. A task of the user brings its own."""

    def __post_init__(self) -> None:
        choice(self, "losses_on", ("train", "validation", "test", "all"))
        if is_whole(self.sketch, 1):  # the older way to write update_length, in specs of stored runs
            assign(self, update_length=self.sketch, sketch="head")
        require(is_sketch(self.sketch), self, "sketch", CHOICES)
        for name in ("shards", "group", "update_length"):
            whole(self, name, 1, optional=True)
        whole(self, "noise_examples", 1)
        if self.engine is not None:
            choice(self, "engine", get_args(EngineName))
