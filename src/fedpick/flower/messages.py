"""Messages between the adapter and the nodes: send queries, match replies to nodes, and read what replies hold.

Flower's strategies stop the whole run when one reply differs from the others. The wrapped strategy therefore gets only
replies that can be decoded, that fit the model, and that have the metrics of most replies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedpick.flower.client import ACTION

__all__ = [
    "CohortGrid",
    "Updates",
    "apply_updates",
    "consistent_replies",
    "count",
    "is_count",
    "metrics_of",
    "number",
    "queries",
    "replies_by_node",
    "sketch",
    "squared_norm",
    "update_of",
    "usable_updates",
]

Updates = Sequence[Mapping[str, NDArray[Any]] | None]
"""One update for every chosen client; None for a client that did not complete."""

_LARGEST_COUNT = 2.0**53
"""A larger count is absurd. Sums of millions of counts below it are finite."""
_SKETCH_SIZE = 512
_REAL = "biuf"
"""NumPy's kinds of real numbers: bool, int, unsigned, float."""


class CohortGrid(Grid):
    """A grid that shows only the chosen nodes, so that a strategy can sample nothing but the cohort."""

    def __init__(self, grid: Grid, node_ids: Sequence[int]) -> None:
        self._grid = grid
        self._node_ids = list(node_ids)

    def get_node_ids(self) -> Iterable[int]:
        """The chosen nodes."""
        return list(self._node_ids)

    def get_nodes(self) -> Iterable[Any]:
        """The chosen nodes, with what the SuperLink knows of them."""
        chosen = set(self._node_ids)
        return [node for node in self._grid.get_nodes() if node.node_id in chosen]

    def set_run(self, run: Any) -> None:
        """Passed through."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """Passed through."""
        return self._grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Passed through."""
        return self._grid.create_message(*args, **kwargs)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Passed through."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Passed through."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Passed through."""
        return self._grid.send_and_receive(messages, timeout=timeout)


def queries(node_ids: Sequence[int], config: Mapping[str, Any], arrays: ArrayRecord | None = None) -> list[Message]:
    """The same query for each of these nodes; `answer_probes` answers it."""
    content: dict[str, Any] = {"config": ConfigRecord(dict(config))}
    if arrays is not None:
        content["arrays"] = arrays
    return [Message(RecordDict(content), node_id, f"query.{ACTION}") for node_id in node_ids]


def replies_by_node(messages: Iterable[Message], replies: Iterable[Message]) -> dict[int, Message]:
    """Node id -> its reply, matched by message id: an error written by the SuperLink does not carry the node's id."""
    sent = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
    return {
        sent[reply.metadata.reply_to_message_id]: reply
        for reply in replies
        if reply.metadata.reply_to_message_id in sent
    }


def metrics_of(reply: Message | None) -> Mapping[str, Any]:
    """The metrics of a reply; empty if it has none."""
    if reply is None or reply.has_error():
        return {}
    return next(iter(reply.content.metric_records.values()), {})


def number(value: Any) -> float:
    """A reported value as a float; NaN for anything but a number."""
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:  # an int larger than every float
        return math.nan


def is_count(value: Any) -> bool:
    """Whether a reported value is a usable count: a number from 0 to 2^53."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= _LARGEST_COUNT


def count(value: Any) -> float:
    """A reported count as a float; NaN for an unusable one."""
    return float(value) if is_count(value) else math.nan


def update_of(reply: Message | None, arrays: ArrayRecord) -> dict[str, NDArray[Any]] | None:
    """new - old for every array of a train reply; None if the reply is missing, unreadable, or not real and finite.

    A reply whose arrays came in another order, or as integers for a model of floats, is put into the model's form in
    place: Flower's strategies pair arrays by position, and some compute in the arrays they get.
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
    except Exception:  # bytes from a client may fail in any way
        return None
    return decoded if isinstance(decoded, np.ndarray) else None


def _difference(new: NDArray[Any], before: NDArray[Any]) -> NDArray[Any] | None:
    """new - before; None unless both are real, of one shape, and finite in the model's precision."""
    if new.shape != before.shape or new.dtype.kind not in _REAL or before.dtype.kind not in _REAL:
        return None
    floats = new.dtype.kind == before.dtype.kind == "f"
    with np.errstate(over="ignore", invalid="ignore"):
        if before.dtype.kind == "f" and not np.isfinite(new.astype(before.dtype, copy=False)).all():
            return None
        # Integers and booleans are subtracted as floats: unsigned ones would wrap around.
        difference: NDArray[Any] = new - before if floats else np.subtract(new, before, dtype=np.float64)
    return difference if np.isfinite(difference).all() else None


def apply_updates(arrays: ArrayRecord, steps: Iterable[tuple[float, Mapping[str, NDArray[Any]]]]) -> ArrayRecord:
    """arrays + sum of weight x update."""
    new = {name: array.numpy().copy() for name, array in arrays.items()}
    for weight, update in steps:
        for name in new:
            new[name] = new[name] + (weight * update[name]).astype(new[name].dtype)
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in new.items()})


def squared_norm(update: Mapping[str, NDArray[Any]]) -> float:
    """The squared Euclidean norm of an update; infinite where it overflows."""
    with np.errstate(over="ignore"):
        return sum(float(np.sum(np.square(array, dtype=np.float64))) for array in update.values())


def sketch(update: Mapping[str, NDArray[Any]], seed: int) -> NDArray[np.float64]:
    """The update as at most 512 numbers that keep inner products on average: random signs, summed in random buckets."""
    flat = np.concatenate([np.ravel(array).astype(np.float64) for array in update.values()])
    if len(flat) <= _SKETCH_SIZE:
        return flat
    rng = np.random.Generator(np.random.PCG64(seed))
    signs = rng.integers(0, 2, len(flat)) * 2.0 - 1.0
    buckets: NDArray[np.float64] = np.bincount(
        rng.integers(0, _SKETCH_SIZE, len(flat)), weights=flat * signs, minlength=_SKETCH_SIZE
    ).astype(np.float64)
    return buckets


def usable_updates(
    replies: Sequence[Message | None],
    arrays: ArrayRecord,
    *,
    weight: str | None,
    numbers: Collection[str],
    scalars: Collection[str],
    refuse_zero: bool,
) -> tuple[Updates, dict[int, str]]:
    """The updates that the strategy can aggregate together, and position -> what is wrong with an unusable reply.

    Args:
        replies: one for every chosen client; None if none came.
        arrays: the model that was sent.
        weight: see `consistent_replies`.
        numbers: see `consistent_replies`.
        scalars: see `consistent_replies`.
        refuse_zero: refuse an update of zero, by whose norm the strategy would divide.
    """
    updates = [update_of(reply, arrays) for reply in replies]
    wrong: dict[int, str] = {}
    for place, (reply, update) in enumerate(zip(replies, updates, strict=True)):
        if update is None and reply is not None and not reply.has_error():
            wrong[place] = (
                "it must hold one ArrayRecord with the names and shapes of the model, and finite real numbers"
            )
        elif update is not None and refuse_zero and not _has_norm(update):
            wrong[place] = "its update is zero, and the strategy divides by the norm of updates"
    readable = [None if place in wrong else reply for place, reply in enumerate(replies)]
    usable = consistent_replies(readable, weight=weight, numbers=numbers, scalars=scalars)
    for place, (reply, good) in enumerate(zip(readable, usable, strict=True)):
        if reply is not None and not reply.has_error() and not good:
            needed = f", and a finite number of at least 0 for {', '.join(sorted(numbers))}" if numbers else ""
            wrong[place] = (
                f"it must hold one MetricRecord with the others' keys, one number where they have one{needed}"
            )
    return [update if good else None for update, good in zip(updates, usable, strict=True)], wrong


def _has_norm(update: Mapping[str, NDArray[Any]]) -> bool:
    """Whether the norm is positive in the update's own precision, in which Flower computes it."""
    with np.errstate(over="ignore"):
        return any(np.linalg.norm(np.ravel(array)) ** 2 > 0 for array in update.values())


def consistent_replies(
    replies: Sequence[Message | None], *, weight: str | None, numbers: Collection[str], scalars: Collection[str] = ()
) -> list[bool]:
    """Which replies a strategy can aggregate together: those whose records have the form of most.

    Args:
        replies: the replies; None and errors are not usable.
        weight: the metric that holds the weight, or None for a strategy that does not read metrics.
        numbers: the metrics for which the strategy needs a finite number of at least 0.
        scalars: metrics that should be one number: of two equally frequent forms, the one with fewer lists wins.
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
    sizes = [count(metrics_of(reply).get(weight)) for reply, good in zip(replies, usable, strict=True) if good]
    if weight in numbers and not sum(sizes) > 0:  # the strategy would divide by zero
        return [False] * len(replies)
    return usable


def _form(reply: Message, weight: str, numbers: Collection[str]) -> tuple[Any, ...] | None:
    """What must be equal in all replies: names of records, keys of metrics, lengths of lists. None: unusable."""
    metrics = metrics_of(reply)
    if len(reply.content.metric_records) != 1 or isinstance(metrics.get(weight), list):
        return None
    if any(not is_count(metrics.get(key)) for key in numbers):
        return None
    keys = frozenset((key, len(value) if isinstance(value, list) else None) for key, value in metrics.items())
    names: Hashable = (*reply.content.array_records, *reply.content.metric_records)
    return names, frozenset(item for item in keys if item[0] != weight)
