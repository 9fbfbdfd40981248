"""Messages: a view of the grid that shows only some nodes, questions, and what replies hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedpick.flower.client import ACTION

__all__ = ["CohortGrid", "attribute", "metrics_of", "moved", "number", "questions", "sketch", "update_of"]

_SKETCH_SIZE = 512


class CohortGrid(Grid):
    """A grid on which only the chosen nodes exist: whatever a strategy samples from it is the cohort."""

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


def questions(node_ids: Sequence[int], question: Mapping[str, Any], arrays: ArrayRecord | None = None) -> list[Message]:
    """The same question to some nodes."""
    content: dict[str, Any] = {"config": ConfigRecord(dict(question))}
    if arrays is not None:
        content["arrays"] = arrays
    return [Message(RecordDict(content), node_id, f"query.{ACTION}") for node_id in node_ids]


def attribute(messages: Iterable[Message], replies: Iterable[Message]) -> dict[int, Message]:
    """node id -> its reply, matched by message id: an error made by the SuperLink does not carry the node's own id."""
    sent = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
    return {
        sent[reply.metadata.reply_to_message_id]: reply
        for reply in replies
        if reply.metadata.reply_to_message_id in sent
    }


def metrics_of(reply: Message | None) -> Mapping[str, Any]:
    """The metrics of a reply; empty where there are none."""
    if reply is None or reply.has_error():
        return {}
    return next(iter(reply.content.metric_records.values()), {})


def number(value: Any) -> float:
    """A reported value as a number, NaN where it is none."""
    return float(value) if isinstance(value, (int, float)) else float("nan")


def update_of(reply: Message | None, arrays: ArrayRecord) -> dict[str, NDArray[Any]] | None:
    """new - old for every array of a training reply; None for an update that is missing, incomplete or not finite."""
    if reply is None or reply.has_error():
        return None
    records = list(reply.content.array_records.values())
    if len(records) != 1 or set(records[0]) != set(arrays):
        return None
    update = {}
    for name, old in arrays.items():
        new = records[0][name].numpy()
        before = old.numpy()
        if new.shape != before.shape or not np.isfinite(np.asarray(new, dtype=np.float64)).all():
            return None
        update[name] = new - before
    return update


def moved(arrays: ArrayRecord, steps: Iterable[tuple[float, Mapping[str, NDArray[Any]]]]) -> ArrayRecord:
    """arrays + sum of weight x update."""
    new = {name: array.numpy().copy() for name, array in arrays.items()}
    for weight, update in steps:
        for name in new:
            new[name] = new[name] + (weight * update[name]).astype(new[name].dtype)
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in new.items()})


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
