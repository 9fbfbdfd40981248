"""What replies hold, and which of them a strategy can aggregate.

Flower's strategies stop the whole run when one reply does not look like the others. So they are handed only replies
that can be read, that fit the model, and whose metrics look like those of most others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedpick.flower.introduction import usable_size
from fedpick.flower.wrapped import divides_by_norm, needed_numbers, weight_key

__all__ = ["Updates", "metrics_of", "number", "squared_norm", "update_of", "usable_together", "usable_updates"]

Updates = Sequence[Mapping[str, NDArray[Any]] | None]
"""One update for every chosen client, None for those that did not complete."""

_REAL = "biuf"
"""NumPy's kinds of real numbers: bool, int, unsigned, float."""


def usable_updates(
    replies: Sequence[Message | None],
    arrays: ArrayRecord,
    strategy: Strategy,
    *,
    use_weights: bool,
    scalars: Collection[str],
) -> tuple[Updates, dict[int, str]]:
    """The updates that the strategy can aggregate together, and place -> what is wrong with a reply that it cannot."""
    updates = [update_of(reply, arrays) for reply in replies]
    wrong: dict[int, str] = {}
    for place, (reply, update) in enumerate(zip(replies, updates, strict=True)):
        if update is None and reply is not None and not reply.has_error():
            wrong[place] = (
                "it must hold one ArrayRecord with the names and shapes of the model, and finite real numbers"
            )
        elif update is not None and divides_by_norm(strategy) and not _has_length(update):
            wrong[place] = f"its update is zero, and {type(strategy).__name__} divides by the length of updates"
    readable = [None if place in wrong else reply for place, reply in enumerate(replies)]
    numbers = needed_numbers(strategy, use_weights=use_weights)
    usable = usable_together(readable, weight=weight_key(strategy), numbers=numbers, scalars=scalars)
    for place, (reply, good) in enumerate(zip(readable, usable, strict=True)):
        if reply is not None and not reply.has_error() and not good:
            needed = f", and a finite number of at least 0 for {', '.join(sorted(numbers))}" if numbers else ""
            wrong[place] = (
                f"it must hold one MetricRecord with the others' keys, one number where they have one{needed}"
            )
    return [update if good else None for update, good in zip(updates, usable, strict=True)], wrong


def _has_length(update: Mapping[str, NDArray[Any]]) -> bool:
    """In the update's own precision, in which Flower takes the norm: small numbers may have no square there."""
    with np.errstate(over="ignore"):
        return any(np.linalg.norm(np.ravel(array)) ** 2 > 0 for array in update.values())


def metrics_of(reply: Message | None) -> Mapping[str, Any]:
    """The metrics of a reply; empty where there are none."""
    if reply is None or reply.has_error():
        return {}
    return next(iter(reply.content.metric_records.values()), {})


def number(value: Any) -> float:
    """A reported value as a number, NaN where it is none."""
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:  # a whole number beyond all floats
        return math.nan


def update_of(reply: Message | None, arrays: ArrayRecord) -> dict[str, NDArray[Any]] | None:
    """new - old for every array of a training reply; None for what is missing, unreadable or not real and finite.

    In passing, a reply whose arrays came in another order, or as whole numbers for a model of fractions, is put into
    the model's form: Flower's strategies pair arrays by their place, and some compute in the arrays they get.
    """
    if reply is None or reply.has_error():
        return None
    records = list(reply.content.array_records.items())
    if len(records) != 1 or set(records[0][1]) != set(arrays):
        return None
    name, record = records[0]
    update, tidy = {}, {}
    for key, old in arrays.items():
        new, before = _decoded(record[key]), old.numpy()
        if new is None or (difference := _difference(new, before)) is None:
            return None
        update[key] = difference
        whole = new.dtype.kind != "f" and before.dtype.kind == "f"
        tidy[key] = Array(new.astype(before.dtype)) if whole else record[key]
    if list(record) != list(tidy) or any(tidy[key] is not record[key] for key in tidy):
        reply.content[name] = ArrayRecord(tidy)
    return update


def _decoded(array: Array) -> NDArray[Any] | None:
    try:
        decoded = array.numpy()
    except Exception:  # a stranger's bytes may fail in any way
        return None
    return decoded if isinstance(decoded, np.ndarray) else None


def _difference(new: NDArray[Any], before: NDArray[Any]) -> NDArray[Any] | None:
    """new - before; None unless both are real, of one shape, and all of it is finite in the model's precision."""
    if new.shape != before.shape or new.dtype.kind not in _REAL or before.dtype.kind not in _REAL:
        return None
    fractions = new.dtype.kind == before.dtype.kind == "f"
    with np.errstate(over="ignore", invalid="ignore"):
        if before.dtype.kind == "f" and not np.isfinite(new.astype(before.dtype, copy=False)).all():
            return None
        # Whole numbers and booleans are subtracted as fractions: unsigned ones would wrap around.
        difference: NDArray[Any] = new - before if fractions else np.subtract(new, before, dtype=np.float64)
    return difference if np.isfinite(difference).all() else None


def squared_norm(update: Mapping[str, NDArray[Any]]) -> float:
    """The squared Euclidean length of an update; infinite where it is too large for a float."""
    with np.errstate(over="ignore"):
        return sum(float(np.sum(np.square(array, dtype=np.float64))) for array in update.values())


def usable_together(
    replies: Sequence[Message | None], *, weight: str | None, numbers: Collection[str], scalars: Collection[str] = ()
) -> list[bool]:
    """Which replies a strategy can aggregate together: those whose records look like most of them do.

    Args:
        replies: the replies; None and errors are not usable.
        weight: the key of the weight, or None for a strategy that has no use for metrics.
        numbers: the keys under which the strategy needs a finite number of at least 0.
        scalars: keys that should hold one number: where two forms are equally frequent, that with fewer lists wins.
    """
    present = [reply is not None and not reply.has_error() for reply in replies]
    if weight is None:
        return present
    forms = [
        _form(reply, weight, numbers) if there and reply is not None else None
        for reply, there in zip(replies, present, strict=True)
    ]
    counts = Counter(form for form in forms if form is not None)
    if not counts:
        return [False] * len(replies)
    lists = {form: sum(key in scalars and length is not None for key, length in form[-1]) for form in counts}
    # The first of equals, in the order of the cohort: Counter keeps it, and max takes it.
    most = max(counts, key=lambda form: (counts[form], -lists[form]))
    usable = [form == most for form in forms]
    sizes = [usable_size(metrics_of(reply).get(weight)) for reply, good in zip(replies, usable, strict=True) if good]
    if weight in numbers and not sum(sizes) > 0:  # nobody has examples: the strategy would divide by zero
        return [False] * len(replies)
    return usable


def _form(reply: Message, weight: str, numbers: Collection[str]) -> tuple[Any, ...] | None:
    """What must be the same in all replies: names of records, keys of metrics, lengths of lists. None: unusable."""
    metrics = metrics_of(reply)
    if len(reply.content.metric_records) != 1 or isinstance(metrics.get(weight), list):
        return None
    if any(math.isnan(usable_size(metrics.get(key))) for key in numbers):
        return None
    keys = frozenset((key, len(value) if isinstance(value, list) else None) for key, value in metrics.items())
    names: Hashable = (*reply.content.array_records, *reply.content.metric_records)
    return names, frozenset(item for item in keys if item[0] != weight)
