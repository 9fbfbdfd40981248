"""Names for the arrays that the package works with, and read-only views of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["BoolArray", "FloatArray", "IntArray", "read_only", "stack_rows"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


def read_only(array: ArrayLike, dtype: Any = None) -> NDArray[Any]:
    """Return a view that cannot be written to. The memory stays the caller's."""
    view = np.asarray(array, dtype=dtype).view()
    view.flags.writeable = False
    return view


def stack_rows(upper: FloatArray, lower: FloatArray) -> FloatArray:
    """Put the rows of two tables together; the narrower one gets columns of NaN."""
    width = max(upper.shape[1], lower.shape[1])
    tables = [np.pad(each, ((0, 0), (0, width - each.shape[1])), constant_values=np.nan) for each in (upper, lower)]
    return np.concatenate(tables)
