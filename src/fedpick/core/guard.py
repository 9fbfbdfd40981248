"""The one place that decides which reported numbers are usable.

Clients fail, diverge and lie. A report that is infinite, negative where that is impossible, or larger than a stated
limit becomes NaN, "no answer", before any policy sees it: it can never win a selection or enter a state.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import read_only
from fedpick.core.types import Outcome
from fedpick.core.validation import assign

__all__ = ["REPORT_LIMIT", "clean_answers", "clean_outcome"]

REPORT_LIMIT = 1e9
"""Reports beyond this are absurd by default: no sane loss, norm or number of seconds comes near it."""


def clean_answers(values: NDArray[np.float64], limit: float, negative: bool = True) -> tuple[NDArray[np.float64], int]:
    """The answers with unusable rows as NaN, and how many answers were rejected (silence is not a rejection)."""
    lowest = -limit if negative else 0.0
    usable = np.asarray((values >= lowest) & (values <= limit) & np.isfinite(values), dtype=bool)
    if values.ndim == 2:
        # One bad entry makes the whole vector worthless.
        rows = np.asarray(usable.all(axis=1))
        silent = np.isnan(values).all(axis=1)
        return np.where(rows[:, None], values, np.nan), int((~rows & ~silent).sum())
    return np.where(usable, values, np.nan), int((~usable & ~np.isnan(values)).sum())


def clean_outcome(outcome: Outcome, limit: float) -> tuple[Outcome, int]:
    """The outcome with unusable reports as NaN, and how many were rejected."""
    cleaned: dict[str, Any] = {}
    rejected = 0
    # A loss may be negative (log densities, quadratics without their constant); a duration and a norm may not.
    for name, negative in (("loss", True), ("train_loss", True), ("duration", False), ("update_norm", False)):
        cleaned[name], count = clean_answers(getattr(outcome, name), limit, negative)
        rejected += count
    # Not `replace`: what was checked once keeps its shape.
    usable = copy(outcome)
    assign(usable, **{name: read_only(values) for name, values in cleaned.items()})
    return usable, rejected
