"""Models and updates as named NumPy arrays: check replies, take differences, apply weights, make sketches.

What comes from a client is never trusted: a number may be missing, absurd or infinite, an array of the wrong shape.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.sketches import Arrays, SketchFunction, count_sketch

__all__ = [
    "Arrays",
    "all_finite",
    "apply_updates",
    "clipped",
    "count",
    "difference",
    "head",
    "in_form_of",
    "is_count",
    "number",
    "scaled",
    "sketches",
    "update_norm",
]

_LOG = logging.getLogger("fedpick")
_LARGEST_COUNT = 2.0**53
"""A larger count is absurd. Sums of millions of counts below it are finite."""
_BLOCK = 2**13
"""Numbers of a norm that are added at once: they stay in the cache, and BLAS starts no threads for so few."""
_REAL = "biuf"
"""NumPy's kinds of real numbers: bool, int, unsigned, float."""
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""Ends of the names that PyTorch gives to the statistics of batch normalisation."""


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


def in_form_of(model: Arrays, found: Mapping[str, NDArray[Any] | None]) -> dict[str, NDArray[Any]] | None:
    """A reply's arrays in the model's order and kinds; None if they do not fit, or are not real and finite.

    A reply may hold a part of the model's arrays; the others stay as the model has them. Integers in the place of
    floats become floats. An array of None could not be decoded.
    """
    if not found or not set(found) <= set(model):
        return None
    new = {}
    for name, before in model.items():
        array = found.get(name, before)
        if array is None or not _fits(array, before):
            return None
        new[name] = array.astype(before.dtype) if array.dtype.kind != "f" and before.dtype.kind == "f" else array
    return new


def _fits(new: NDArray[Any], before: NDArray[Any]) -> bool:
    """Whether both are real, of one shape, and the new one is finite, if need be in the model's precision."""
    if new.shape != before.shape or new.dtype.kind not in _REAL or before.dtype.kind not in _REAL:
        return False
    kind = before.dtype if before.dtype.kind == "f" else new.dtype
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(new.astype(kind, copy=False)).all())


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


def _is_buffer(name: str, array: NDArray[Any], users: Callable[[str], bool] | None) -> bool:
    """Whether the array holds statistics, not parameters: the weights of an average of statistics must sum to 1."""
    return name.endswith(_BUFFERS) or array.dtype.kind != "f" or (users is not None and bool(users(name)))


def scaled(new: Arrays, model: Arrays, factor: float, buffers: Callable[[str], bool] | None) -> Arrays | None:
    """model + factor x (new - model), with buffers as in `new`; None if it is not finite."""
    result = {}
    for name, before in model.items():
        if _is_buffer(name, before, buffers):
            result[name] = new[name]
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            step = np.asarray(_subtract(new[name], before) * factor).astype(before.dtype, copy=False)
            step += before
        if not np.isfinite(step).all():
            return None
        result[name] = step
    return result


def apply_updates(
    model: Arrays, updates: Sequence[Arrays], weights: NDArray[np.float64], buffers: Callable[[str], bool] | None
) -> dict[str, NDArray[Any]]:
    """model + sum of weight x update; for buffers the weights are scaled to sum to 1. Sums of integers are rounded."""
    total = float(weights.sum())
    result = {}
    for name, before in model.items():
        factor = 1.0 / total if _is_buffer(name, before, buffers) and total > 0 else 1.0
        floats = before.dtype.kind == "f"
        new = before if floats else before.astype(np.float64)
        for update, weight in zip(updates, weights, strict=True):
            with np.errstate(over="ignore", invalid="ignore"):
                new = new + (float(weight) * factor * update[name]).astype(new.dtype)
        result[name] = np.asarray(new if floats else np.rint(new).astype(before.dtype))
    return result


def update_norm(new: Arrays, model: Arrays) -> float:
    """The length of the update new - model, without counts and other integers; infinite where it overflows."""
    square = 0.0
    for name in [name for name, array in model.items() if array.dtype.kind == "f"] or list(model):
        one, other = new[name].ravel(), model[name].ravel()
        for start in range(0, len(one), _BLOCK):
            with np.errstate(over="ignore"):
                step = np.subtract(one[start : start + _BLOCK], other[start : start + _BLOCK], dtype=np.float64)
                square += float(step @ step)
    return math.sqrt(square)


def clipped(new: Arrays, model: Arrays, factor: float) -> Arrays:
    """model + factor x (new - model) for a factor from 0 to 1, between the two in every array; integers as in `new`.

    Statistics are scaled too: a part of the way to a valid variance is a valid variance.
    """
    return {
        name: ((1 - factor) * before + factor * new[name]).astype(before.dtype)
        if before.dtype.kind == "f"
        else new[name]
        for name, before in model.items()
    }


def sketches(
    updates: Iterable[Arrays | None], how: str | SketchFunction, seed: int, log: logging.Logger = _LOG
) -> NDArray[np.float64]:
    """(k, s) short descriptions of the updates; NaN for a client without one, and s = 0 if no client has one.

    Args:
        updates: one for every client; with "head", updates of the array that `head` returns.
        how: "head", "count-sketch" or a function of the user's.
        seed: of the count sketch.
        log: where a function that fails is reported.
    """
    ours: dict[str, SketchFunction] = {"head": _mean_over_inputs, "count-sketch": count_sketch(seed)}
    describe = ours[how] if isinstance(how, str) else how
    rows = [None if update is None else _described(describe, update, log) for update in updates]
    width = next((len(row) for row in rows if row is not None), 0)
    filled = [np.full(width, np.nan) if row is None or len(row) != width else row for row in rows]
    return np.array(filled).reshape(len(rows), width)


def _described(describe: SketchFunction, update: Arrays, log: logging.Logger) -> NDArray[np.float64] | None:
    try:
        row = np.asarray(describe(update), dtype=np.float64)
        if row.ndim == 1:
            return row
        log.warning("sketch must return a vector. Got an array of shape %s, which counts as no sketch.", row.shape)
    except Exception:  # its input comes from clients: one of them must not end the federation
        log.exception("The sketch of an update failed, and counts as no sketch.")
    return None


def head(model: Arrays, buffers: Callable[[str], bool] | None) -> Arrays:
    """The last one-dimensional array of parameters, that is, the last layer's bias; without one the last array."""
    names = [name for name, array in model.items() if not _is_buffer(name, array, buffers)]
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
