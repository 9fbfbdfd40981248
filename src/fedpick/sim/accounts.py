"""What a run has cost: messages, bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["Counters", "Timings"]


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Communication since the start. Probes and trials are included.

    A client that was sent the current model for a probe is not sent it again in the same round.
    """

    models_down: int = 0
    """Models sent to clients."""
    updates_up: int = 0
    """Updates sent by clients, late and NaN ones included."""
    scalars_up: int = 0
    """Single numbers sent by clients: losses, sketches, outputs."""
    bytes_down: int = 0
    bytes_up: int = 0

    def plus(self, model_bytes: int, models_down: int = 0, updates_up: int = 0, scalars_up: int = 0) -> Counters:
        """With some more messages; a number takes 4 bytes."""
        return Counters(
            models_down=self.models_down + models_down,
            updates_up=self.updates_up + updates_up,
            scalars_up=self.scalars_up + scalars_up,
            bytes_down=self.bytes_down + models_down * model_bytes,
            bytes_up=self.bytes_up + updates_up * model_bytes + 4 * scalars_up,
        )

    def as_dict(self) -> dict[str, int]:
        """Plain numbers, for a store."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds on this machine; never part of a result.

    Of rounds that are computed ahead of their records, training and evaluation count as far as they are waited for:
    the rest of them went on beside something else.
    """

    select: float = 0.0
    """The policy's own thinking."""
    measure: float = 0.0
    """Answering its probes, trials included."""
    train: float = 0.0
    """Local training, the server step and the report of the loss before training."""
    evaluate: float = 0.0
    """Test accuracy and the losses of everybody, for the record."""

    def plus(self, more: Timings) -> Timings:
        """Both together."""
        return Timings(**{item.name: getattr(self, item.name) + getattr(more, item.name) for item in fields(self)})

    def since(self, earlier: Timings) -> Timings:
        """The seconds between two readings."""
        return Timings(**{item.name: getattr(self, item.name) - getattr(earlier, item.name) for item in fields(self)})

    def as_dict(self) -> dict[str, float]:
        """Plain numbers, for a store."""
        return {item.name: getattr(self, item.name) for item in fields(self)}
