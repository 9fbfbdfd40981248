"""Sketches that the host makes of whole updates: count sketches, and those of a user's function.

The engines make the default sketch, "head", themselves: it is a small part of the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import FloatArray
from fedpick.core.errors import InvalidInput
from fedpick.core.sketches import SketchFunction, count_sketch

__all__ = ["Sketcher", "sketcher_of"]


class Sketcher:
    """Describes updates with a function of their arrays by name.

    Args:
        function: arrays of an update -> (s,). An update of zeros is described first, which tells s.
        names: of the model's arrays, in the order of a row.
        shapes: of the model's arrays.
    """

    def __init__(self, function: SketchFunction, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> None:
        self._function, self._names, self._shapes = function, names, shapes
        sizes = [int(np.prod(shape)) for shape in shapes]
        self._cuts = np.cumsum(sizes)[:-1]
        with np.errstate(all="ignore"):
            zero = self._described(np.zeros(sum(sizes), np.float32))
        if zero.ndim != 1:
            raise InvalidInput(f"sketch must return a vector. Got an array of shape {zero.shape}.")
        self._length = len(zero)

    def _described(self, row: NDArray[Any]) -> FloatArray:
        row = row.view()
        row.flags.writeable = False  # the engine still needs it
        parts = zip(self._names, np.split(row, self._cuts), self._shapes, strict=True)
        return np.asarray(self._function({name: part.reshape(shape) for name, part, shape in parts}), np.float64)

    def __call__(self, rows: NDArray[Any], usable: NDArray[np.bool_]) -> FloatArray:
        """(k, s) sketches of the updates (k, P); NaN for an update that is not usable."""
        found = np.full((len(rows), self._length), np.nan)
        for place in np.flatnonzero(usable):
            sketch = self._described(rows[place])
            if sketch.shape != (self._length,):
                raise InvalidInput(
                    f"sketch must return a vector of one length, {self._length} for an update of zeros. "
                    f"Got an array of shape {sketch.shape}."
                )
            found[place] = sketch
        return found


def sketcher_of(
    how: str | SketchFunction, seed: int, names: Sequence[str], shapes: Sequence[tuple[int, ...]]
) -> Sketcher | None:
    """Return the sketcher for a choice of `fedpick.core.sketches`; None for "head"."""
    if how == "head":
        return None
    return Sketcher(count_sketch(seed) if isinstance(how, str) else how, names, shapes)
