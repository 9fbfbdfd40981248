"""Messages between the adapter and the nodes: send queries, match replies to nodes, and read what replies hold.

Flower's strategies stop the whole run when one reply differs from the others. The wrapped strategy therefore gets only
replies that can be decoded and that fit the model, all with the same metrics.
"""

from __future__ import annotations

import io
import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedpick.adapter.arrays import Arrays, count, difference, in_form_of, is_count
from fedpick.flower.client import ACTION

__all__ = [
    "LOG",
    "CohortGrid",
    "Form",
    "GridView",
    "arrays_of",
    "decoded",
    "exchange",
    "make_consistent",
    "metrics_of",
    "node_infos",
    "queries",
    "reason_of",
    "replies_by_node",
    "usable_replies",
]

LOG = logging.getLogger("flwr.fedpick")
"""Below Flower's logger, so that its lines reach `flwr run --stream`."""


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


def exchange(
    grid: Grid, messages: Sequence[Message], enough: int, timeout: float
) -> tuple[list[Message], dict[int, float], float]:
    """Send messages, and wait for `enough` replies with content, at most `timeout` seconds.

    Flower's grids can do this too, but do not tell when a reply came.

    Returns:
        The replies in the order in which they came, those of one look in the order of the messages; node id -> seconds
        until its reply came; seconds until now.
    """
    started = time.monotonic()
    order = {identity: place for place, identity in enumerate(grid.push_messages(messages))}
    waiting, replies, arrived = set(order), list[Message](), dict[int, float]()
    while True:
        found = {reply.metadata.reply_to_message_id: reply for reply in grid.pull_messages(waiting)} if waiting else {}
        waited = time.monotonic() - started
        replies += [found[identity] for identity in sorted(found, key=lambda name: order.get(name, len(order)))]
        if found:
            arrived |= dict.fromkeys(replies_by_node(messages, found.values()), waited)
            waiting -= set(found)
        if sum(not reply.has_error() for reply in replies) >= enough or not waiting or waited >= timeout:
            return replies, arrived, waited
        # A twentieth of the time until now, so that an exchange takes at most 5 % longer than its last reply.
        time.sleep(max(min(waited / 20, timeout - waited, _PAUSES[1]), _PAUSES[0]))


_PAUSES = (0.01, 1.0)
"""The shortest and the longest pause, in seconds, between two looks for replies."""


def reason_of(reply: Message) -> str:
    """The reason of an error reply; empty for a reply with content."""
    return (reply.error.reason or "") if reply.has_error() else ""


def _records(reply: Message, kind: type[Any]) -> dict[str, Any]:
    """The records of one kind by name. Flower's own views of a reply take ten times as long."""
    return {name: record for name, record in reply.content.items() if isinstance(record, kind)}


def metrics_of(reply: Message | None) -> dict[str, Any]:
    """The metrics of a reply; empty if it has none."""
    if reply is None or reply.has_error():
        return {}
    return next(iter(_records(reply, MetricRecord).values()), {})


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
    records = list(_records(reply, ArrayRecord).items())
    if len(records) != 1 or not set(records[0][1]) <= set(model):
        return None
    name, record = records[0]
    found = {key: _decode(array) for key, array in record.items()}
    new = in_form_of(model, found)
    if new is not None and (list(record) != list(new) or any(new[key] is not found[key] for key in new)):
        tidy = {key: record[key] if array is found.get(key) else Array(array) for key, array in new.items()}
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


def usable_replies(
    replies: Sequence[Message | None],
    model: Arrays,
    *,
    weight: str | None,
    numbers: Collection[str],
    usual: set[Form],
    refuse_zero: bool,
) -> tuple[list[dict[str, NDArray[Any]] | None], dict[int, str]]:
    """The trained models that the strategy can aggregate together, and position -> why a reply is unusable.

    Args:
        replies: one for every chosen client; None if none came.
        model: the model that was sent.
        weight: see `make_consistent`.
        numbers: see `make_consistent`.
        usual: see `make_consistent`.
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
    usable = make_consistent(readable, weight=weight, numbers=numbers, usual=usual)
    for place, (reply, good) in enumerate(zip(readable, usable, strict=True)):
        if reply is not None and not reply.has_error() and not good:
            needed = f", with a finite number of at least 0 for {', '.join(sorted(numbers))}" if numbers else ""
            wrong[place] = f"it must hold one MetricRecord, with a number as its size{needed}"
    return [new if good else None for new, good in zip(trained, usable, strict=True)], wrong


def _has_norm(update: Arrays) -> bool:
    """Whether the norm is positive in the update's own precision, in which Flower computes it."""
    with np.errstate(over="ignore"):
        return any(np.linalg.norm(np.ravel(array)) ** 2 > 0 for array in update.values())


def make_consistent(
    replies: Sequence[Message | None], *, weight: str | None, numbers: Collection[str], usual: set[Form]
) -> list[bool]:
    """Which replies a strategy can aggregate together; they get the same record names and metrics, in place.

    No client's metrics decide about the reply of another. A metric stays if most replies hold it in one form, or if it
    is usual and any reply holds it. A reply without it gets the mean of the others. Other metrics are dropped.

    Args:
        replies: the replies; None and errors are not usable.
        weight: the metric that holds the weight, or None for a strategy that does not read metrics.
        numbers: the metrics for which the strategy needs a finite number of at least 0.
        usual: the metrics that stayed in the round before; replaced by those that stay now.
    """
    if weight is None:
        return [reply is not None and not reply.has_error() for reply in replies]
    usable = [_has_numbers(reply, weight, numbers) for reply in replies]
    good = [reply for reply, use in zip(replies, usable, strict=True) if use and reply is not None]
    # With the weight among the numbers, the strategy divides by the sum of the reported sizes.
    if weight in numbers and not sum(count(metrics_of(reply).get(weight)) for reply in good) > 0:
        return [False] * len(replies)
    held = [{_form(*item): item[1] for item in metrics_of(reply).items() if item[0] != weight} for reply in good]
    times = Counter(form for forms in held for form in forms)
    kept = {name: length for name, length in usual if (name, length) in times}
    for (name, length), holders in times.items():
        if 2 * holders > len(good):
            kept.setdefault(name, length)
    usual.clear()
    usual.update(kept.items())
    for reply, forms in zip(good, held, strict=True):
        metrics = metrics_of(reply)
        if set(forms) != usual:
            (record,) = _records(reply, MetricRecord)
            tidy = {form[0]: forms[form] if form in forms else _mean(held, form) for form in kept.items()}
            own = {weight: metrics[weight]} if weight in metrics else {}
            reply.content[record] = MetricRecord(own | tidy)
    _rename_records(good)
    return usable


Form = tuple[str, int | None]
"""A metric, and the length of its list; None for a number."""


def _form(name: str, value: Any) -> Form:
    return name, len(value) if isinstance(value, list) else None


def _has_numbers(reply: Message | None, weight: str, numbers: Collection[str]) -> bool:
    """Whether a reply has one record of metrics, and in it the numbers that the strategy needs."""
    found = {} if reply is None or reply.has_error() else _records(reply, MetricRecord)
    if len(found) != 1:
        return False
    (metrics,) = found.values()
    return not isinstance(metrics.get(weight), list) and all(is_count(metrics.get(key)) for key in numbers)


def _mean(held: Sequence[Mapping[Form, Any]], form: Form) -> Any:
    """The mean of a metric over the replies that hold it."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.mean([forms[form] for forms in held if form in forms], axis=0, dtype=np.float64).tolist()


def _rename_records(replies: Sequence[Message]) -> None:
    """Give the records of all replies the names that most replies use: Flower's strategies look them up by name."""
    contents = [reply.content for reply in replies]
    for kind in (ArrayRecord, MetricRecord):
        found = [list(_records(reply, kind)) for reply in replies]
        times = Counter(names[0] for names in found if len(names) == 1)
        for content, names in zip(contents, found, strict=True):
            if len(names) == 1 and names[0] != (most := max(times, key=lambda name: times[name])):
                content[most] = content.pop(names[0])
