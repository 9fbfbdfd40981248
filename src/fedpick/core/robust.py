"""Norm clipping, the robust rule that the simulator and the adapters to real frameworks share."""

from __future__ import annotations

import numpy as np

from fedpick.core.arrays import FloatArray

__all__ = ["clip_factors"]


def clip_factors(lengths: FloatArray, multiple: float) -> FloatArray:
    """(k,) what scales each update so that none is longer than `multiple` times the median length."""
    limit = multiple * float(np.median(lengths)) if len(lengths) else 0.0
    cut = lengths > limit
    return np.where(cut, limit / np.where(cut, lengths, 1.0), 1.0)
