"""The records that pass between policies and drivers: frozen, made of read-only arrays, validated when built.

N clients in the table, k selected, d probed. A record holds read-only views, so a policy cannot change a driver's data.
An input is copied only if it is not an array of the right type: copying a million rows at every step is too slow. A
driver must therefore not write to an array after it has passed it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpick.core.arrays import BoolArray, FloatArray, IntArray, read_only, stack_rows
from fedpick.core.errors import InvalidInput
from fedpick.core.policy import Signal
from fedpick.core.validation import assign, is_whole, require, whole

__all__ = ["Clients", "Measurement", "Outcome", "Probe", "RoundContext", "Selection", "aggregation_weights"]

_ABSENT: Any = None
"""Default of a field that `__post_init__` fills with an array."""
_MOST_GROUPS = 1_000_000


def as_floats(values: ArrayLike, name: str) -> FloatArray:
    """Return an array of real numbers. Raise for strings, objects and complex numbers."""
    if isinstance(values, np.ndarray) and values.dtype == np.float64:
        return values
    try:
        given = np.asarray(values)
        if given.dtype.kind in "cSUV":
            raise TypeError(f"it has the type {given.dtype}")
        return given.astype(np.float64, copy=False)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidInput(f"{name} must be an array of numbers. Got {type(values).__name__}: {error}.") from error


def _floats(values: ArrayLike, name: str, shape: tuple[int | None, ...]) -> FloatArray:
    return read_only(_shaped(as_floats(values, name), name, shape))


def _shaped(array: NDArray[Any], name: str, shape: tuple[int | None, ...]) -> NDArray[Any]:
    fits = array.ndim == len(shape) and all(want in (None, got) for want, got in zip(shape, array.shape, strict=True))
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise InvalidInput(f"{name} must have the shape ({wanted}). Got {array.shape}.")
    return array


def _booleans(values: ArrayLike, name: str, size: int | None) -> BoolArray:
    array = np.asarray(values)
    # The usual mistake is an array of indices instead of a mask.
    if array.dtype != np.bool_ and array.size:
        raise InvalidInput(f"{name} must be a boolean mask, one entry per client. Got an array of {array.dtype}.")
    return read_only(_shaped(array.astype(np.bool_, copy=False), name, (size,)))


def _indices(values: ArrayLike, name: str) -> IntArray:
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise InvalidInput(f"{name} must be client indices (whole numbers). Got an array of {array.dtype}.")
    array = _shaped(array.astype(np.int64, copy=False), name, (None,))
    if array.size and array.min() < 0:
        raise InvalidInput(f"{name} must be client indices of at least 0. Got {array.min()}.")
    if len(array) > 1 and not np.diff(np.sort(array)).all():
        values_, counts = np.unique(array, return_counts=True)
        raise InvalidInput(f"{name} must be unique. Client {values_[counts > 1][0]} appears {counts.max()} times.")
    return read_only(array)


@dataclass(frozen=True, kw_only=True, eq=False)
class Clients:
    """The table of clients: row k is client k. Adapters keep the map from real identities to rows."""

    num_examples: FloatArray
    """(N,) number of examples of each client."""
    importance: FloatArray = _ABSENT
    """(N,) target weight alpha_k in the objective; sums to 1. Default: proportional to num_examples."""
    label_histogram: FloatArray | None = None
    """(N, L) examples per label."""
    features: FloatArray | None = None
    """(N, F) any description of each client's data."""
    availability: FloatArray | None = None
    """(N,) true probability of being available, if an oracle knows it."""
    correlation: FloatArray | None = None
    """(N,) true lag-one correlation of availability, if an oracle knows it."""
    group: IntArray | None = None
    """(N,) the number of the client's group, such as its region or owner, from 0; see `Guard.most_places`."""

    def __post_init__(self) -> None:
        sizes = _floats(self.num_examples, "Clients.num_examples", (None,))
        count = len(sizes)
        if count == 0:
            raise InvalidInput("Clients.num_examples must have at least one entry. Got an empty array.")
        if not (np.isfinite(sizes).all() and sizes.min() >= 0 and sizes.sum() > 0):
            raise InvalidInput("Clients.num_examples must be finite, at least 0 and not all 0.")
        assign(self, num_examples=sizes, importance=self._checked_importance(sizes))
        for name, low, high in (("availability", 0.0, 1.0), ("correlation", -1.0, 1.0)):
            if (value := getattr(self, name)) is not None:
                array = _floats(value, f"Clients.{name}", (count,))
                if not (array.min() >= low and array.max() <= high):  # also catches NaN
                    raise InvalidInput(f"Clients.{name} must lie in [{low:g}, {high:g}].")
                assign(self, **{name: array})
        for name in ("label_histogram", "features"):
            if (value := getattr(self, name)) is not None:
                array = _floats(value, f"Clients.{name}", (count, None))
                if not np.isfinite(array).all():
                    raise InvalidInput(f"Clients.{name} must be finite.")
                assign(self, **{name: array})
        if self.label_histogram is not None and self.label_histogram.size and self.label_histogram.min() < 0:
            raise InvalidInput("Clients.label_histogram must be at least 0.")
        if self.group is not None:
            group = _shaped(np.asarray(self.group), "Clients.group", (count,))
            if not np.issubdtype(group.dtype, np.integer) or group.min() < 0 or group.max() >= _MOST_GROUPS:
                raise InvalidInput(f"Clients.group must be whole numbers from 0 to {_MOST_GROUPS - 1:,}.")
            assign(self, group=read_only(group.astype(np.int64, copy=False)))

    def _checked_importance(self, sizes: FloatArray) -> FloatArray:
        if self.importance is None:
            return _floats(sizes / sizes.sum(), "Clients.importance", (len(sizes),))
        importance = _floats(self.importance, "Clients.importance", (len(sizes),))
        total = importance.sum()
        if not (np.isfinite(total) and importance.min() >= 0 and abs(total - 1) < 1e-6):
            raise InvalidInput(f"Clients.importance must be at least 0 and sum to 1. Got a sum of {total}.")
        return importance

    def __len__(self) -> int:
        return len(self.num_examples)


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """The clients that train in this round, and the weights of their updates in the new model."""

    clients: IntArray
    """(k,) unique and available."""
    weights: FloatArray | None = None
    """(k,) finite and at least 0. None: proportional to num_examples."""
    renormalize: bool = True
    """Scale the weights of the completed clients to the sum given here. False: use the weights as they are."""
    diagnostics: Mapping[str, Any] = field(default_factory=dict)
    """Notes of the policy on its choice. They are logged and never read back."""

    def __post_init__(self) -> None:
        clients = _indices(self.clients, "Selection.clients")
        assign(self, clients=clients, diagnostics=MappingProxyType(dict(self.diagnostics)))
        if self.weights is not None:
            weights = _floats(self.weights, "Selection.weights", (len(clients),))
            if not (np.isfinite(weights).all() and (len(weights) == 0 or weights.min() >= 0)):
                raise InvalidInput("Selection.weights must be finite and at least 0.")
            assign(self, weights=weights)


@dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
    """A question to some clients before the policy selects. Probed and trial clients must be available."""

    clients: IntArray
    """(d,) the clients to ask."""
    signal: Signal = Signal.LOSS
    """What to measure."""
    trial: Selection | None = None
    """Measure on the model that this cohort, with these weights, *would* give. The model is not kept."""
    batch_size: int | None = None
    """Estimate from one mini-batch of this size. None: use the whole local data set."""

    def __post_init__(self) -> None:
        assign(
            self,
            clients=_indices(self.clients, "Probe.clients"),
            signal=Signal(self.signal),
            batch_size=whole(self, "batch_size", 1, optional=True),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Measurement:
    """The answers to one probe."""

    clients: IntArray
    """(d,) the clients that were asked."""
    values: FloatArray
    """(d,), or (d, s) for a vector signal. NaN: no answer."""

    def __post_init__(self) -> None:
        clients = _indices(self.clients, "Measurement.clients")
        ndim = np.ndim(self.values)
        shape = (len(clients), None) if ndim == 2 else (len(clients),)
        assign(self, clients=clients, values=_floats(self.values, "Measurement.values", shape))


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundContext:
    """What a policy knows when it decides."""

    index: int
    """The round, from 0."""
    budget: int
    """Most clients that may be selected. A driver's None becomes the number of available clients."""
    available: BoolArray
    """(N,) mask of the clients that can be reached."""
    clients: Clients
    """The current table."""
    measurements: tuple[Measurement, ...] = ()
    """One per probe, in the order of the probes."""

    def __post_init__(self) -> None:
        # Policies that draw with replacement draw `budget` times, so an absurd budget would fill the memory.
        most = max(1_000_000, 10 * len(self.clients))
        require(not is_whole(self.budget, most + 1), self, "budget", f"at most {most:,}")
        assign(
            self,
            index=whole(self, "index", 0),
            budget=whole(self, "budget", 0),
            available=_booleans(self.available, "RoundContext.available", len(self.clients)),
            measurements=tuple(self.measurements),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """How a round ended for the selected clients. A report that is missing is NaN."""

    index: int
    """The round, from 0."""
    clients: IntArray
    """(k,) the clients that were selected, then the `stale` ones."""
    completed: BoolArray
    """(k,) mask of the clients whose update entered the model."""
    loss: FloatArray = _ABSENT
    """(k,) loss of the *received* model on local data, before training."""
    train_loss: FloatArray = _ABSENT
    """(k,) mean training loss over the local steps."""
    duration: FloatArray = _ABSENT
    """(k,) seconds from sending the model to receiving the update."""
    update_norm: FloatArray = _ABSENT
    """(k,) Euclidean norm of the local update."""
    loss_rms: FloatArray = _ABSENT
    """(k,) root mean square of the per-example losses of the received model."""
    sketch: FloatArray = _ABSENT
    """(k, s) short description of each received update. s = 0: the driver makes none."""
    late: BoolArray = _ABSENT
    """(k,) mask of the clients that had not answered at the deadline; their `duration` is the time waited."""
    cancelled: BoolArray = _ABSENT
    """(k,) mask of the clients that were stopped because enough others had answered; `duration` likewise."""
    stale: BoolArray = _ABSENT
    """(k,) mask of clients that were selected in an earlier round, were `late` there, and answered in this one. Their
    reports are about the model that they received."""

    def __post_init__(self) -> None:
        clients = _indices(self.clients, "Outcome.clients")
        completed = _booleans(self.completed, "Outcome.completed", len(clients))
        assign(self, index=whole(self, "index", 0), clients=clients, completed=completed)
        missing = read_only(np.full(len(clients), np.nan))
        for name in ("loss", "train_loss", "duration", "update_norm", "loss_rms"):
            value = getattr(self, name)
            checked = missing if value is None else _floats(value, f"Outcome.{name}", (len(clients),))
            assign(self, **{name: checked})
        nowhere = read_only(np.zeros(len(clients), bool))
        for name in ("late", "cancelled", "stale"):
            mask = getattr(self, name)
            assign(self, **{name: nowhere if mask is None else _booleans(mask, f"Outcome.{name}", len(clients))})
        sketch = np.empty((len(clients), 0)) if self.sketch is None else self.sketch
        assign(self, sketch=_floats(sketch, "Outcome.sketch", (len(clients), None)))

    def take(self, rows: IntArray) -> Outcome:
        """Return these rows, in this order."""
        return replace(
            self, **{item.name: getattr(self, item.name)[rows] for item in fields(self) if item.name != "index"}
        )

    def with_stale(self, answers: Outcome) -> Outcome:
        """Add the rows of late answers that came in this round."""
        if len(answers.clients) == 0:
            return self
        kept = [item.name for item in fields(self) if item.name not in ("index", "sketch", "stale")]
        joined: dict[str, Any] = {name: np.concatenate([getattr(self, name), getattr(answers, name)]) for name in kept}
        stale = np.arange(len(joined["clients"])) >= len(self.clients)
        return replace(self, sketch=stack_rows(self.sketch, answers.sketch), stale=stale, **joined)

    def of_selected(self) -> Outcome:
        """Return the rows of the clients that were selected in this round."""
        return self.take(np.flatnonzero(~self.stale)) if self.stale.any() else self


def aggregation_weights(selection: Selection, completed: ArrayLike, clients: Clients) -> FloatArray:
    """Compute the weight of every selected client's update in the new model, (k,): 0 if it did not complete.

    The new model is `model + server_lr * sum_i w_i * delta_i`. With `renormalize`, the weights of the completed clients
    are scaled to the sum that the policy gave. Without it they are used as they are. If all are zero, there is no step.

    >>> import numpy as np
    >>> clients = Clients(num_examples=np.array([1.0, 2.0, 3.0, 4.0]))
    >>> aggregation_weights(Selection(clients=[1, 2, 3]), np.array([True, False, True]), clients).round(3)
    array([0.333, 0.   , 0.667])
    """
    answered = _booleans(completed, "completed", len(selection.clients))
    if selection.weights is None:
        given = clients.num_examples[selection.clients]
        target = 1.0
    else:
        given = selection.weights
        target = float(given.sum())
    kept = np.where(answered, given, 0.0)
    if selection.weights is not None and (not selection.renormalize or answered.all()):
        return kept
    total = kept.sum()
    return kept * (target / total) if total > 0 else np.zeros_like(kept)
