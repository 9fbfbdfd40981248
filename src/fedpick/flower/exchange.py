"""Messages: a view of the grid that shows only some nodes, questions, whose reply is whose, and sums of updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedpick.flower.client import ACTION

__all__ = ["CohortGrid", "attribute", "moved", "questions", "sketch"]

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
