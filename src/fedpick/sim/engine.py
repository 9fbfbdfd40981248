"""The seam between the simulator and the numerical library that trains.

The simulator knows clients, rounds, faults and communication. An engine knows models: it trains a cohort, measures
losses and describes updates. A model is whatever tree of arrays the engine makes; the simulator passes it on unopened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.core.sketches import SketchFunction
from fedpick.sim.examples import Examples
from fedpick.sim.hashing import Key
from fedpick.sim.settings import LocalTraining, ServerStep

__all__ = ["Combine", "Engine", "EngineMaker", "Params", "Rounds", "Trainable", "Trained", "Work"]

Params = Any
Float32Array = NDArray[np.float32]
Combine = Callable[[NDArray[Any], FloatArray], FloatArray | None]
"""(updates (k, P), weights (k,)) -> (P,): what takes the place of `weights @ updates`; None: there is no step. An
update that is not finite has the weight 0."""


class Work(NamedTuple):
    """The local training of one round: who trains, and how much each update counts."""

    key: Key
    """Of the round's mini-batches; folded with a client's number it gives the client's own."""
    clients: IntArray
    """(k,) the clients that answer in time."""
    weights: FloatArray
    """(k,) of their updates."""
    poisoned: BoolArray
    """(k,) the clients that return NaN."""
    lr: float
    server_lr: float
    sketch: bool = False
    """Also describe every update, for a policy that needs it."""
    factors: FloatArray | None = None
    """(k,) what each client multiplies its update by before it sends it; None: 1 for all."""
    combine: Combine | None = None
    """How the updates become one; None: as the server step says."""

    @property
    def multipliers(self) -> FloatArray:
        """(k,) by what every update is multiplied on its way to the server: `factors`, and NaN for the poisoned."""
        return np.where(self.poisoned, np.nan, 1.0 if self.factors is None else self.factors)


class Trained(NamedTuple):
    """The result of a `Work`."""

    params: Params
    velocity: Params
    """The server's momentum; () without momentum."""
    losses: Float32Array
    """(k,) mean training loss of each client."""
    norms: Float32Array
    """(k,) Euclidean norm of each update; not finite where the update did not enter the model."""
    sketches: NDArray[np.floating[Any]]
    """(k, s) a short description of each update; s = 0 unless the work asked for it."""
    evaluation: tuple[float, float] | None = None
    """(loss, accuracy) on the test set, where it was asked for."""


class Rounds(Protocol):
    """Consecutive rounds that were started together."""

    params: Params
    """After the last of them."""
    velocity: Params

    def result(self, step: int) -> Trained:
        """Wait for the result of one of the rounds, counted from 0."""
        ...


class Engine(Protocol):
    """What the simulator needs of a numerical library."""

    num_parameters: int
    model_bytes: int
    rounds_at_once: int
    """How many rounds `start_rounds` takes in one program; 1: no gain over `train`."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What else decides the last bits: shards, group, backend."""
        ...

    def init(self) -> tuple[Params, Params]:
        """Return the initial (params, velocity) of this seed."""
        ...

    def train(self, params: Params, velocity: Params, work: Work) -> Trained:
        """Train the clients of `work` from `params`, combine their updates, and take the server step.

        An update that is not finite is left out of the sum. Without any weight left, the model stays as it is. It also
        stays if the step would make it infinite or NaN; then all losses, norms and sketches are NaN.
        """
        ...

    def start_rounds(self, params: Params, velocity: Params, works: Sequence[Work], evaluate: Sequence[bool]) -> Rounds:
        """Start `train` for consecutive rounds, and evaluate the model after the rounds marked in `evaluate`.

        The call does not wait for the results. The numbers do not depend on which rounds share a call.
        """
        ...

    def measure(self, params: Params, rows: NDArray[np.int32] | None = None) -> tuple[Float32Array, Float32Array]:
        """Return the loss and the correctness (0 or 1) of these rows of the clients' examples; None: of all."""
        ...

    def evaluate(self, params: Params) -> tuple[float, float]:
        """Return (loss, accuracy) on the central test set."""
        ...

    def updates(self, params: Params, work: Work, length: int | None) -> FloatArray:
        """(k, s): the update of each client trained from `params`, or a count sketch of this length."""
        ...

    def outputs(self, params: Params, work: Work, noise_examples: int) -> FloatArray:
        """(k, s): the mean output, on common noise, of each client's model after training from `params`."""
        ...

    def leaves(self, params: Params, velocity: Params) -> list[Any]:
        """Return the arrays of a model, in a fixed order."""
        ...

    def rebuild(self, leaves: Sequence[NDArray[Any]]) -> tuple[Params, Params]:
        """Return the (params, velocity) made of these arrays; the inverse of `leaves`."""
        ...


class EngineMaker(Protocol):
    """Makes the engine of a task for the clients' examples."""

    def __call__(
        self,
        examples: Examples,
        local: LocalTraining,
        server: ServerStep,
        *,
        seed: int,
        shards: int | None = None,
        group: int | None = None,
        sketch: str | SketchFunction = "head",
    ) -> Engine:
        """See the arguments of `Simulator`."""
        ...


class Trainable(Protocol):
    """A task: a model, its loss, and the engine that trains it."""

    @property
    def name(self) -> str:
        """What messages and stores call it."""
        ...

    @property
    def outputs(self) -> Any:
        """Whether the model has outputs that policies can compare; false: none."""
        ...

    @property
    def engine(self) -> EngineMaker:
        """Makes the engine that trains this task; raises if its library is not installed."""
        ...
