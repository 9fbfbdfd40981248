"""The examples of all clients in flat arrays, and which rows belong to which client."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.errors import InvalidInput
from fedpick.data.types import Federation, Part
from fedpick.sim.hashing import Key

__all__ = ["Examples", "aligned", "frozen", "segment_means"]

_ALIGNMENT = 64
_ROWS_AT_ONCE = 65536


class Examples:
    """The examples of all clients in one flat array: client k's rows are contiguous, first those it trains on.

    All arrays are aligned and read-only, so that JAX on a CPU uses their memory instead of a copy.
    """

    def __init__(self, federation: Federation) -> None:
        order = federation.indices
        packed = len(order) == len(federation.x) and np.array_equal(order, np.arange(len(order), dtype=order.dtype))
        if len(order) >= 2**31:
            raise InvalidInput(f"The simulator takes fewer than 2**31 examples. Got {len(order)}.")
        self.shape: tuple[int, ...] = federation.x.shape[1:]
        self.num_classes = federation.num_classes
        # Normalised once and kept as float32: normalising uint8 in every batch was measured to be slower.
        self.x = _shareable(_normalized(federation, federation.x, None if packed else order))
        self.y = _shareable(federation.y if packed else frozen(federation.y[order]))
        self.test_x = _shareable(_normalized(federation, federation.test_x, None))
        self.test_y = _shareable(federation.test_y)
        self.ranges: dict[Part, tuple[NDArray[np.int64], NDArray[np.int64]]] = {
            part: federation.ranges(part) for part in ("all", "train", "validation", "test")
        }
        self.starts = self.ranges["train"][0].astype(np.int32)
        self.sizes = federation.train_sizes.astype(np.int64)

    def has(self, part: Part) -> bool:
        """Whether any client has data of this part."""
        first, last = self.ranges[part]
        return bool((last > first).any())

    def noise(self, key: Key, count: int) -> NDArray[np.float32]:
        """Return Gaussian inputs with the mean and spread of the data; its first rows stand for all of it."""
        sample = np.asarray(self.x[:4096], np.float64)
        generator = np.random.Generator(np.random.PCG64([int(key.high[0]), int(key.low[0])]))
        drawn = generator.standard_normal((count, *self.shape))
        return np.asarray(sample.mean() + sample.std() * drawn, np.float32)

    def of(self, clients: NDArray[np.int64], part: Part) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the rows of these clients one after another, and (d + 1,) where each client's begin."""
        first, last = (edge[clients] for edge in self.ranges[part])
        sizes = last - first
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        rows = np.arange(bounds[-1]) + np.repeat(first - bounds[:-1], sizes)
        return rows.astype(np.int32), bounds


def aligned(shape: Sequence[int], dtype: Any) -> NDArray[Any]:
    """Allocate an array aligned as JAX wants it: on a CPU JAX then uses its memory instead of a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    values: NDArray[Any] = memory[first : first + size].view(dtype).reshape(tuple(shape))
    return values


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """Make the memory of an array read-only, so that JAX may share it."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner.flags.writeable = False
        owner = owner.base
    return array


def _is_frozen(array: NDArray[Any]) -> bool:
    """Whether the memory of the array cannot be written through NumPy."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return False
        owner = owner.base
    return owner is None


def _shareable(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array if it is read-only, otherwise an aligned read-only copy: the caller may still write to it."""
    if _is_frozen(array):
        return array
    copy = aligned(array.shape, array.dtype)
    copy[...] = array
    return frozen(copy)


def _normalized(federation: Federation, x: NDArray[Any], order: NDArray[np.integer[Any]] | None) -> NDArray[np.float32]:
    """Normalise and flatten rows of x. Data that need no change are not copied: they may fill most of the memory."""
    as_it_is = federation.scale == 1.0 and not federation.mean.any() and (federation.std == 1.0).all()
    if as_it_is and order is None and x.dtype == np.float32:
        return _flat(x)
    count = len(x) if order is None else len(order)
    values = aligned((count, *x.shape[1:]), np.float32)
    # Some rows at a time: no second copy of everything.
    for first in range(0, count, _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        values[rows] = federation.normalized(x[rows] if order is None else x[order[rows]])
    return frozen(_flat(values))


def _flat(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return x.reshape(len(x), math.prod(x.shape[1:]))


def segment_means(
    values: NDArray[np.floating[Any]], first: NDArray[np.int64], last: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The mean of values[first:last] for every segment, in float64; NaN for an empty one. Segments are in order."""
    if len(first) == 0:
        return np.empty(0)
    edges = np.column_stack([first, last]).ravel()
    # One more value, so that a segment may begin at the very end.
    longer = np.zeros(len(values) + 1)
    longer[:-1] = values
    sums = np.add.reduceat(longer, edges)[::2]
    sizes = last - first
    return np.asarray(np.where(sizes > 0, sums, np.nan) / np.maximum(sizes, 1), np.float64)
