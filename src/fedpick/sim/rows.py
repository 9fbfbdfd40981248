"""All clients' examples, flat, on the device; and which rows are whose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.errors import InvalidInput
from fedpick.data.types import Federation, Part
from fedpick.sim.tasks import Task

__all__ = ["Rows", "segment_means", "shaped"]

Array = Any


class Rows:
    """Examples in client order: client k's rows are contiguous, first those it trains on."""

    def __init__(self, federation: Federation) -> None:
        import jax

        order = federation.indices
        packed = len(order) == len(federation.x) and np.array_equal(order, np.arange(len(order)))
        if len(order) >= 2**31:
            raise InvalidInput(f"The simulator takes fewer than 2**31 examples. Got {len(order)}.")
        x = federation.x if packed else federation.x[order]
        y = federation.y if packed else federation.y[order]
        self.shape: tuple[int, ...] = federation.x.shape[1:]
        # Normalised once and kept as float32: undoing uint8 in every batch was measured to be slower.
        self.x = jax.device_put(_flat(_normalized(federation, x)))
        self.y = jax.device_put(y)
        self.test_x = jax.device_put(_flat(_normalized(federation, federation.test_x)))
        self.test_y = jax.device_put(federation.test_y)
        self.num_rows = len(y)
        self.ranges: dict[Part, tuple[NDArray[np.int64], NDArray[np.int64]]] = {
            part: federation.ranges(part) for part in ("all", "train", "validation", "test")
        }
        self.starts = self.ranges["train"][0].astype(np.int32)
        self.sizes = federation.train_sizes.astype(np.int64)

    def of(self, clients: NDArray[np.int64], part: Part) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The rows of some clients one after another, and (d + 1,) where each client's begin."""
        first, last = (edge[clients] for edge in self.ranges[part])
        sizes = last - first
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        rows = np.arange(bounds[-1]) + np.repeat(first - bounds[:-1], sizes)
        return rows.astype(np.int32), bounds


def _normalized(federation: Federation, x: NDArray[Any]) -> NDArray[np.float32]:
    """As a model wants them; data that are so already are not copied, for they may fill most of the memory."""
    as_it_is = federation.scale == 1.0 and not federation.mean.any() and (federation.std == 1.0).all()
    return x if as_it_is and x.dtype == np.float32 else federation.normalized(x)


def _flat(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return x.reshape(len(x), int(np.prod(x.shape[1:])))


def shaped(task: Task, shape: tuple[int, ...]) -> Task:
    """The task for flat rows: they take their shape back on arrival."""

    def back(x: Array) -> Array:
        return x.reshape(x.shape[0], *shape)

    return replace(
        task,
        per_example_loss=lambda params, x, y, key, train: task.per_example_loss(params, back(x), y, key, train),
        correct=lambda params, x, y: task.correct(params, back(x), y),
    )


def segment_means(
    values: NDArray[np.float32], first: NDArray[np.int64], last: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The mean of values[first:last] for every segment, in float64; NaN for an empty one. Segments are in order."""
    if len(first) == 0:
        return np.empty(0)
    edges = np.column_stack([first, last]).ravel()
    # One more value, so that a segment may begin at the very end.
    sums = np.add.reduceat(np.append(values.astype(np.float64), 0.0), edges)[::2]
    sizes = last - first
    return np.asarray(np.where(sizes > 0, sums, np.nan) / np.maximum(sizes, 1), np.float64)
