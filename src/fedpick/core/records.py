"""What frozen records need while they are made."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["assign", "read_only"]


def assign(record: object, **values: object) -> None:
    """Set fields of a frozen dataclass while it is made."""
    for name, value in values.items():
        object.__setattr__(record, name, value)


def read_only(array: ArrayLike, dtype: Any = None) -> NDArray[Any]:
    """A view that cannot be written through; the memory is the caller's."""
    view = np.asarray(array, dtype=dtype).view()
    view.flags.writeable = False
    return view
