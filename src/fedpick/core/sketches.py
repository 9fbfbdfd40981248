"""Sketches: short descriptions of updates, `Outcome.sketch`, for policies that compare clients by their updates.

The simulator and the adapters to real frameworks offer the same choice: "head" (the update of the last layer's bias),
"count-sketch", or a function of the user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["CHOICES", "Arrays", "SketchFunction", "count_sketch", "is_sketch"]

Arrays = Mapping[str, NDArray[Any]]
"""The arrays of a model, or of an update, by name."""

SketchFunction = Callable[[Arrays], ArrayLike]
"""Arrays of an update -> a short vector that describes it."""

CHOICES = "'head', 'count-sketch' or a function, sketch(update)"
_SIZE = 512


def is_sketch(how: Any) -> bool:
    """Whether this is one of the `CHOICES`."""
    return callable(how) or (isinstance(how, str) and how in ("head", "count-sketch"))


def count_sketch(seed: int) -> SketchFunction:
    """Return the function that makes the count sketches of this seed.

    A count sketch has at most 512 numbers and keeps inner products on average: random signs, summed in random buckets.
    """
    return partial(_count_sketch, places=cache(partial(_places, seed=seed)))  # drawn once for all updates


def _count_sketch(update: Arrays, places: Callable[[int], tuple[NDArray[Any], NDArray[Any]]]) -> NDArray[np.float64]:
    flat = np.concatenate([np.ravel(array).astype(np.float64) for array in update.values()])
    if len(flat) <= _SIZE:
        return flat
    signs, buckets = places(len(flat))
    flat *= signs
    return np.bincount(buckets, weights=flat, minlength=_SIZE).astype(np.float64, copy=False)


def _places(length: int, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The sign and the bucket of every number of an update."""
    rng = np.random.Generator(np.random.PCG64(seed))
    signs = (rng.integers(0, 2, length) * 2 - 1).astype(np.int8)
    return signs, rng.integers(0, _SIZE, length)
