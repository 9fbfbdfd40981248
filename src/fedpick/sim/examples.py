"""All clients' examples, flat, on the device; and which rows are whose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.errors import InvalidInput
from fedpick.data.types import Federation, Part
from fedpick.sim.tasks import Task

__all__ = ["Rows", "aligned", "frozen", "segment_means", "shaped"]

Array = Any

_ALIGNMENT = 64
_ROWS_AT_ONCE = 65536


class Rows:
    """Examples in client order: client k's rows are contiguous, first those it trains on."""

    def __init__(self, federation: Federation) -> None:
        order = federation.indices
        packed = len(order) == len(federation.x) and np.array_equal(order, np.arange(len(order), dtype=order.dtype))
        if len(order) >= 2**31:
            raise InvalidInput(f"The simulator takes fewer than 2**31 examples. Got {len(order)}.")
        self.shape: tuple[int, ...] = federation.x.shape[1:]
        # Normalised once and kept as float32: undoing uint8 in every batch was measured to be slower.
        self.x = _on_device(_normalized(federation, federation.x, None if packed else order))
        self.y = _on_device(federation.y if packed else frozen(federation.y[order]))
        self.test_x = _on_device(_normalized(federation, federation.test_x, None))
        self.test_y = _on_device(federation.test_y)
        self.num_rows = len(order)
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


def aligned(shape: Sequence[int], dtype: Any) -> NDArray[Any]:
    """An empty array that begins where JAX wants it to: on a CPU it can then be used as it is, instead of copied."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    values: NDArray[Any] = memory[first : first + size].view(dtype).reshape(tuple(shape))
    return values


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """The array, with its memory made read-only; so JAX may share it."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner.flags.writeable = False
        owner = owner.base
    return array


def _is_frozen(array: NDArray[Any]) -> bool:
    """Whether nobody can write to the memory of the array through numpy."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return False
        owner = owner.base
    return owner is None


def _on_device(array: NDArray[Any]) -> Array:
    """On a CPU the same memory, if it is aligned and frozen; otherwise a copy."""
    import jax

    if not _is_frozen(array):
        # JAX shares whatever is aligned, also what the caller may still write to.
        copy = aligned(array.shape, array.dtype)
        copy[...] = array
        array = frozen(copy)
    return jax.device_put(array)


def _normalized(federation: Federation, x: NDArray[Any], order: NDArray[np.integer[Any]] | None) -> NDArray[np.float32]:
    """Rows of x as a model wants them, flat; what is so already is not copied, for it may fill most of the memory."""
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


def shaped(task: Task, shape: tuple[int, ...]) -> Task:
    """The task for flat rows: they take their shape back on arrival, and its answers must be one per example."""

    def back(x: Array) -> Array:
        return x.reshape(x.shape[0], *shape)

    def loss(params: Array, x: Array, y: Array, key: Array, train: bool) -> Array:
        values = task.per_example_loss(params, back(x), y, key, train)
        _check_answers(task, "per_example_loss", values, len(x), "number", "Do not take their mean or sum.")
        return values

    def correct(params: Array, x: Array, y: Array) -> Array:
        values = task.correct(params, back(x), y)
        _check_answers(task, "correct", values, len(x), "truth value", "Compare the predictions with y.")
        return values

    return replace(task, per_example_loss=loss, correct=correct)


def _check_answers(task: Task, name: str, values: Array, count: int, kind: str, advice: str) -> None:
    """Looks at shape and type alone, which are known when a program is compiled: nothing is done while it runs."""
    import jax.numpy as jnp

    dtype, shape = jnp.result_type(values), jnp.shape(values)
    if shape != (count,) or not jnp.issubdtype(dtype, jnp.floating if kind == "number" else jnp.bool_):
        raise InvalidInput(
            f"{name} of the task {task.name!r} must give one {kind} per example, {count} for {count} of them. "
            f"Got {dtype} of shape {shape}. {advice}"
        )


def segment_means(
    values: NDArray[np.float32], first: NDArray[np.int64], last: NDArray[np.int64]
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
