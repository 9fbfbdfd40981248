"""Messages between the adapter and the nodes: send queries, match replies to nodes, and read what replies hold.

Flower's strategies stop the whole run when one reply differs from the others. The wrapped strategy therefore gets only
replies that can be decoded, that fit the model, and that have the metrics of most replies.
"""

from __future__ import annotations

import io
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import ArrayLike, NDArray

from fedpick.flower.client import ACTION

__all__ = [
    "LOG",
    "Arrays",
    "CohortGrid",
    "GridView",
    "SketchFunction",
    "all_finite",
    "apply_updates",
    "arrays_of",
    "count",
    "decoded",
    "difference",
    "head",
    "is_buffer",
    "is_count",
    "make_consistent",
    "metrics_of",
    "node_infos",
    "number",
    "queries",
    "reason_of",
    "replies_by_node",
    "scaled",
    "sketches",
    "squared_norm",
    "usable_replies",
]

LOG = logging.getLogger("flwr.fedpick")
"""Below Flower's logger, so that its lines reach `flwr run --stream`."""

Arrays = Mapping[str, NDArray[Any]]
"""The arrays of a model, or of an update, by name."""

SketchFunction = Callable[[Arrays], ArrayLike]
"""Arrays of an update -> a short vector that describes it."""

_LARGEST_COUNT = 2.0**53
"""A larger count is absurd. Sums of millions of counts below it are finite."""
_SKETCH_SIZE = 512
_REAL = "biuf"
"""NumPy's kinds of real numbers: bool, int, unsigned, float."""
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""Ends of the names that PyTorch gives to the statistics of batch normalisation."""


class GridView(Grid):
    """A grid that passes every call to another grid."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def get_node_ids(self) -> Iterable[int]:
        """Passed through."""
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """Passed through."""
        return node_infos(self._grid)

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


class CohortGrid(GridView):
    """A grid that shows only the chosen nodes, so that a strategy can sample nothing but the cohort."""

    def __init__(self, grid: Grid, node_ids: Sequence[int]) -> None:
        super().__init__(grid)
        self._node_ids = list(node_ids)

    def get_node_ids(self) -> Iterable[int]:
        """The chosen nodes."""
        return list(self._node_ids)

    def get_nodes(self) -> Iterable[Any]:
        """The chosen nodes, with what the SuperLink knows of them."""
        chosen = set(self._node_ids)
        return [node for node in node_infos(self._grid) if node.node_id in chosen]


def node_infos(grid: Grid) -> list[Any]:
    """What the SuperLink knows of the online nodes; empty before Flower 1.40, which cannot list it."""
    return list(grid.get_nodes()) if hasattr(grid, "get_nodes") else []


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


def reason_of(reply: Message) -> str:
    """The reason of an error reply; empty for a reply with content."""
    return (reply.error.reason or "") if reply.has_error() else ""


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


def decoded(arrays: ArrayRecord) -> dict[str, NDArray[Any]]:
    """The arrays of the server's own model."""
    return {name: array.numpy() for name, array in arrays.items()}


def arrays_of(reply: Message | None, model: Arrays) -> dict[str, NDArray[Any]] | None:
    """The trained model in a reply; None if it is missing, unreadable, or not of real and finite numbers.

    A reply may hold a part of the model's arrays; the others stay as the model has them. The reply is put into the
    model's form in place, that is, all arrays, in the model's order, floats where the model has floats: Flower's
    strategies pair arrays by position, and some compute in the arrays they get.
    """
    if reply is None or reply.has_error():
        return None
    records = list(reply.content.array_records.items())
    if len(records) != 1 or not records[0][1] or not set(records[0][1]) <= set(model):
        return None
    name, record = records[0]
    new, tidy = {}, {}
    for key, before in model.items():
        array = _decode(record[key]) if key in record else before
        if array is None or not _fits(array, before):
            return None
        integers = array.dtype.kind != "f" and before.dtype.kind == "f"
        new[key] = array.astype(before.dtype) if integers else array
        tidy[key] = Array(new[key]) if integers or key not in record else record[key]
    if list(record) != list(tidy) or any(tidy[key] is not record[key] for key in tidy):
        reply.content[name] = ArrayRecord(tidy)
    return new


def _decode(array: Array) -> NDArray[Any] | None:
    """The array, as a view of the reply's bytes where possible; None for bytes that cannot be decoded."""
    try:
        if array.stype == "numpy.ndarray" and array.data.startswith(b"\x93NUMPY\x01\x00"):
            stream = io.BytesIO(array.data)
            np.lib.format.read_magic(stream)
            shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(stream)
            if not fortran_order and not dtype.hasobject:
                flat = np.frombuffer(array.data, dtype, count=math.prod(shape), offset=stream.tell())
                return flat.reshape(shape)
        found = array.numpy()
    except Exception:  # bytes from a client may fail in any way
        return None
    return found if isinstance(found, np.ndarray) else None


def _fits(new: NDArray[Any], before: NDArray[Any]) -> bool:
    """Whether both are real, of one shape, and the new one is finite in the model's precision."""
    if new.shape != before.shape or new.dtype.kind not in _REAL or before.dtype.kind not in _REAL:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        return before.dtype.kind != "f" or bool(np.isfinite(new.astype(before.dtype, copy=False)).all())


def all_finite(arrays: Arrays) -> bool:
    """Whether every float in the arrays is finite."""
    return all(array.dtype.kind not in "fc" or bool(np.isfinite(array).all()) for array in arrays.values())


def difference(new: Arrays, model: Arrays) -> dict[str, NDArray[Any]]:
    """The update new - model."""
    return {name: _subtract(new[name], before) for name, before in model.items()}


def _subtract(new: NDArray[Any], before: NDArray[Any]) -> NDArray[Any]:
    """The difference; that of integers as floats, because unsigned integers would wrap around."""
    floats = new.dtype.kind == before.dtype.kind == "f"
    with np.errstate(over="ignore"):
        result: NDArray[Any] = np.subtract(new, before) if floats else np.subtract(new, before, dtype=np.float64)
    return result


def is_buffer(name: str, array: NDArray[Any], users: Callable[[str], bool] | None) -> bool:
    """Whether the array holds statistics, not parameters: the weights of an average of statistics must sum to 1."""
    return name.endswith(_BUFFERS) or array.dtype.kind != "f" or (users is not None and bool(users(name)))


def scaled(new: Arrays, model: Arrays, factor: float, buffers: Callable[[str], bool] | None) -> ArrayRecord | None:
    """model + factor x (new - model), with buffers as in `new`; None if it is not finite."""
    result = {}
    for name, before in model.items():
        if is_buffer(name, before, buffers):
            result[name] = Array(new[name])
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            step = np.asarray(_subtract(new[name], before) * factor).astype(before.dtype, copy=False)
            step += before
        if not np.isfinite(step).all():
            return None
        result[name] = Array(step)
    return ArrayRecord(result)


def apply_updates(
    model: Arrays, updates: Sequence[Arrays], weights: NDArray[np.float64], buffers: Callable[[str], bool] | None
) -> ArrayRecord:
    """model + sum of weight x update; for buffers the weights are scaled to sum to 1."""
    total = float(weights.sum())
    result = {}
    for name, before in model.items():
        factor = 1.0 / total if is_buffer(name, before, buffers) and total > 0 else 1.0
        new = before
        for update, weight in zip(updates, weights, strict=True):
            new = new + (float(weight) * factor * update[name]).astype(before.dtype)
        result[name] = Array(np.asarray(new))
    return ArrayRecord(result)


def squared_norm(update: Arrays) -> float:
    """The squared Euclidean norm of an update; infinite where it overflows."""
    with np.errstate(over="ignore"):
        return sum(float(np.sum(np.square(array, dtype=np.float64))) for array in update.values())


def sketches(updates: Iterable[Arrays | None], how: str | SketchFunction, seed: int) -> NDArray[np.float64]:
    """(k, s) short descriptions of the updates; NaN for a client without one.

    Args:
        updates: one for every client; with "head", updates of the array that `head` returns.
        how: "head", "count-sketch" or a function of the user's.
        seed: of the count sketch.
    """
    ours: dict[str, SketchFunction] = {
        "head": _mean_over_inputs,
        "count-sketch": partial(_count_sketch, places=cache(partial(_places, seed=seed))),  # drawn once for all
    }
    describe = ours[how] if isinstance(how, str) else how
    rows = [None if update is None else _described(describe, update) for update in updates]
    width = next((len(row) for row in rows if row is not None), 1)
    filled = [np.full(width, np.nan) if row is None or len(row) != width else row for row in rows]
    return np.array(filled).reshape(len(rows), width)


def _described(describe: SketchFunction, update: Arrays) -> NDArray[np.float64] | None:
    try:
        row = np.asarray(describe(update), dtype=np.float64)
        if row.ndim == 1:
            return row
        LOG.warning("sketch must return a vector. Got an array of shape %s, which counts as no sketch.", row.shape)
    except Exception:  # its input comes from clients: one of them must not end the federation
        LOG.exception("The sketch of an update failed, and counts as no sketch.")
    return None


def head(model: Arrays, buffers: Callable[[str], bool] | None) -> Arrays:
    """The last one-dimensional array of parameters, that is, the last layer's bias; without one the last array."""
    names = [name for name, array in model.items() if not is_buffer(name, array, buffers)]
    biases = [name for name in names if model[name].ndim == 1]
    return {name: model[name] for name in (biases or names or list(model))[-1:]}


def _mean_over_inputs(head_update: Arrays) -> NDArray[Any]:
    """One number for every output. PyTorch puts the outputs of a `weight` first, other libraries put them last."""
    ((name, update),) = head_update.items()
    if update.ndim < 2:
        return update.ravel()
    outputs_last = np.moveaxis(update, 0, -1) if name.endswith("weight") else update
    mean: NDArray[Any] = outputs_last.reshape(-1, outputs_last.shape[-1]).mean(axis=0)
    return mean


def _count_sketch(update: Arrays, places: Callable[[int], tuple[NDArray[Any], NDArray[Any]]]) -> NDArray[np.float64]:
    """The update as at most 512 numbers that keep inner products on average: random signs, summed in random buckets."""
    flat = np.concatenate([np.ravel(array).astype(np.float64) for array in update.values()])
    if len(flat) <= _SKETCH_SIZE:
        return flat
    signs, buckets = places(len(flat))
    flat *= signs
    return np.bincount(buckets, weights=flat, minlength=_SKETCH_SIZE).astype(np.float64, copy=False)


def _places(length: int, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The sign and the bucket of every number of an update."""
    rng = np.random.Generator(np.random.PCG64(seed))
    signs = (rng.integers(0, 2, length) * 2 - 1).astype(np.int8)
    return signs, rng.integers(0, _SKETCH_SIZE, length)


def usable_replies(
    replies: Sequence[Message | None],
    model: Arrays,
    *,
    weight: str | None,
    numbers: Collection[str],
    refuse_zero: bool,
) -> tuple[list[dict[str, NDArray[Any]] | None], dict[int, str]]:
    """The trained models that the strategy can aggregate together, and position -> why a reply is unusable.

    Args:
        replies: one for every chosen client; None if none came.
        model: the model that was sent.
        weight: see `make_consistent`.
        numbers: see `make_consistent`.
        refuse_zero: refuse an update of zero, by whose norm the strategy would divide.
    """
    trained = [arrays_of(reply, model) for reply in replies]
    wrong: dict[int, str] = {}
    for place, (reply, new) in enumerate(zip(replies, trained, strict=True)):
        if new is None and reply is not None and not reply.has_error():
            wrong[place] = (
                "it must hold one ArrayRecord with names and shapes of the model's arrays, and finite real numbers"
            )
        elif new is not None and refuse_zero and not _has_norm(difference(new, model)):
            wrong[place] = "its update is zero, and the strategy divides by the norm of updates"
    readable = [None if place in wrong else reply for place, reply in enumerate(replies)]
    usable = make_consistent(readable, weight=weight, numbers=numbers)
    for place, (reply, good) in enumerate(zip(readable, usable, strict=True)):
        if reply is not None and not reply.has_error() and not good:
            needed = f", and a finite number of at least 0 for {', '.join(sorted(numbers))}" if numbers else ""
            wrong[place] = (
                "it must hold one MetricRecord with every metric that most replies have, in the same form"
                f" (a number, or a list of one length){needed}"
            )
    return [new if good else None for new, good in zip(trained, usable, strict=True)], wrong


def _has_norm(update: Arrays) -> bool:
    """Whether the norm is positive in the update's own precision, in which Flower computes it."""
    with np.errstate(over="ignore"):
        return any(np.linalg.norm(np.ravel(array)) ** 2 > 0 for array in update.values())


def make_consistent(replies: Sequence[Message | None], *, weight: str | None, numbers: Collection[str]) -> list[bool]:
    """Which replies a strategy can aggregate together; they get the same record names and metrics, in place.

    Metrics that more than half of the replies hold in one form must be in every reply. Other metrics are dropped, so
    that a client cannot make the replies of others unusable.

    Args:
        replies: the replies; None and errors are not usable.
        weight: the metric that holds the weight, or None for a strategy that does not read metrics.
        numbers: the metrics for which the strategy needs a finite number of at least 0.
    """
    if weight is None:
        return [reply is not None and not reply.has_error() for reply in replies]
    forms = [_forms(reply, weight, numbers) for reply in replies]
    readable = [form for form in forms if form is not None]
    times = Counter(item for form in readable for item in form)
    kept = {item for item, holders in times.items() if 2 * holders > len(readable)}
    usable = [form is not None and kept <= form for form in forms]
    good = [reply for reply, use in zip(replies, usable, strict=True) if use and reply is not None]
    # With the weight among the numbers, the strategy divides by the sum of the reported sizes.
    if weight in numbers and not sum(count(metrics_of(reply).get(weight)) for reply in good) > 0:
        return [False] * len(replies)
    names = {weight, *(key for key, _ in kept)}
    for reply in good:
        metrics = metrics_of(reply)
        if not set(metrics) <= names:
            (record,) = reply.content.metric_records
            reply.content[record] = MetricRecord({key: value for key, value in metrics.items() if key in names})
    _rename_records(good)
    return usable


def _forms(reply: Message | None, weight: str, numbers: Collection[str]) -> set[tuple[str, int | None]] | None:
    """(metric, length of its list, None for a number) for every metric but the weight; None for an unusable reply."""
    if reply is None or reply.has_error() or len(reply.content.metric_records) != 1:
        return None
    metrics = metrics_of(reply)
    if isinstance(metrics.get(weight), list) or any(not is_count(metrics.get(key)) for key in numbers):
        return None
    return {(key, len(value) if isinstance(value, list) else None) for key, value in metrics.items() if key != weight}


def _rename_records(replies: Sequence[Message]) -> None:
    """Give the records of all replies the names that most replies use: Flower's strategies look them up by name."""
    contents = [reply.content for reply in replies]
    for found in ([list(c.array_records) for c in contents], [list(c.metric_records) for c in contents]):
        times = Counter(names[0] for names in found if len(names) == 1)
        for content, names in zip(contents, found, strict=True):
            if len(names) == 1 and names[0] != (most := max(times, key=lambda name: times[name])):
                content[most] = content.pop(names[0])
