"""The record of one round: what a driver hands out, the store keeps and the report reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import BoolArray, FloatArray
from fedpick.core.types import Outcome, Selection

if TYPE_CHECKING:
    from fedpick.core.session import Session

__all__ = ["Callback", "Counters", "RoundRecord", "Timings"]


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Communication since the start of the run, probes and trials included.

    A client that received the current model for a probe is not sent it again in the same round.
    """

    models_down: int = 0
    """Models sent to clients."""
    updates_up: int = 0
    """Updates sent by clients, late and NaN ones included."""
    scalars_up: int = 0
    """Single numbers sent by clients: losses, sketches, outputs."""
    bytes_down: int = 0
    """Bytes sent to clients."""
    bytes_up: int = 0
    """Bytes sent by clients."""

    def plus(self, model_bytes: int, models_down: int = 0, updates_up: int = 0, scalars_up: int = 0) -> Counters:
        """Add messages; a scalar takes 4 bytes."""
        return Counters(
            models_down=self.models_down + models_down,
            updates_up=self.updates_up + updates_up,
            scalars_up=self.scalars_up + scalars_up,
            bytes_down=self.bytes_down + models_down * model_bytes,
            bytes_up=self.bytes_up + updates_up * model_bytes + 4 * scalars_up,
        )

    def as_dict(self) -> dict[str, int]:
        """Plain numbers by name."""
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds on this machine; never part of a result."""

    select: float = 0.0
    """The policy's decision."""
    measure: float = 0.0
    """Answering its probes, trials included."""
    train: float = 0.0
    """Local training, the server step and the loss before training, where the policy needs it."""
    evaluate: float = 0.0
    """Test accuracy and the losses of all clients, for the record."""

    def plus(self, more: Timings) -> Timings:
        """Add two readings."""
        return Timings(**{name: value + getattr(more, name) for name, value in self.as_dict().items()})

    def since(self, earlier: Timings) -> Timings:
        """Subtract an earlier reading."""
        return Timings(**{name: value - getattr(earlier, name) for name, value in self.as_dict().items()})

    def as_dict(self) -> dict[str, float]:
        """Plain numbers by name."""
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundRecord:
    """What happened in one round. All but `seconds` is the same on every run of one setting on one machine."""

    index: int
    """The round, from 0."""
    selection: Selection
    """The policy's decision."""
    outcome: Outcome
    """What the policy was told of the selected clients."""
    weights: FloatArray
    """(k,) weight of each update in the new model; 0 for clients that did not complete."""
    available: BoolArray
    """(N,) the clients that could be reached."""
    counters: Counters = field(default_factory=Counters)
    """Communication since the start of the run, this round included."""
    seconds: Timings = field(default_factory=Timings)
    """Seconds spent in this round."""
    test_loss: float | None = None
    """On the central test set after the round; None: not evaluated."""
    test_accuracy: float | None = None
    """On the central test set after the round; None: not evaluated."""
    objective: float | None = None
    """Mean loss of all clients, weighted by importance; None: not measured."""
    local_accuracy: float | None = None
    """Mean accuracy on the clients' own test data, weighted by importance; None: not measured."""
    clock: float | None = None
    """Seconds of virtual time from the start of the run to the end of the round; None: the driver keeps no clock."""
    evaluation: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Arrays measured for the record: "losses" (N,), "validation" (2,); with a clock "times" (4, k), see
    `fedpick.sim.clock`, and "stale" (3, j): client, age in rounds and weight of each late answer that was used."""

    @property
    def losses(self) -> NDArray[Any] | None:
        """(N,) the loss of every client after the round; None: not measured."""
        return self.evaluation.get("losses")

    @property
    def num_available(self) -> int:
        """How many clients could be reached."""
        return int(np.count_nonzero(self.available))

    @property
    def skipped(self) -> bool:
        """Whether nobody was selected."""
        return len(self.selection.clients) == 0


class Callback:
    """What a driver calls while it trains. Override the methods that are needed; the others do nothing."""

    def on_start(self, session: Session) -> None:
        """Called before the first round, or the first one after a resume. `session.round` is its index."""

    def on_round(self, record: RoundRecord) -> None:
        """Called after every round, when the session has been told its outcome and before the session is saved."""

    def on_end(self, error: BaseException | None = None) -> None:
        """Called when training ends; `error` is the exception that ended it, if any."""
