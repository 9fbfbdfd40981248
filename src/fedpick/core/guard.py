"""The one place that rejects unusable reports.

Clients fail, diverge and lie. A report that is infinite, impossibly negative or larger than a limit becomes NaN, "no
answer", before a policy sees it. It can neither win a selection nor enter a state.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np

from fedpick.core.arrays import FloatArray, read_only
from fedpick.core.types import Outcome
from fedpick.core.validation import assign

__all__ = ["REPORT_LIMIT", "clean_answers", "clean_outcome"]

REPORT_LIMIT = 1e9
"""Default limit: no plausible loss, norm or duration comes near it."""


_MAY_BE_NEGATIVE = {
    "loss": True,  # log densities, quadratics without their constant
    "train_loss": True,
    "sketch": True,
    "duration": False,
    "update_norm": False,
    "loss_rms": False,
}


def clean_answers(values: FloatArray, limit: float, negative: bool = True) -> tuple[FloatArray, int]:
    """Return the answers with unusable rows as NaN, and the number of rejected answers. NaN is not rejected."""
    lowest = -limit if negative else 0.0
    usable = np.asarray((values >= lowest) & (values <= limit) & np.isfinite(values), dtype=bool)
    if values.ndim == 2:
        # One unusable entry makes the whole vector unusable.
        rows = np.asarray(usable.all(axis=1))
        silent = np.isnan(values).all(axis=1)
        return np.where(rows[:, None], values, np.nan), int((~rows & ~silent).sum())
    return np.where(usable, values, np.nan), int((~usable & ~np.isnan(values)).sum())


def clean_outcome(outcome: Outcome, limit: float) -> tuple[Outcome, int]:
    """Return the outcome with unusable reports as NaN, and the number of rejected reports."""
    cleaned: dict[str, Any] = {}
    rejected = 0
    for name, negative in _MAY_BE_NEGATIVE.items():
        values = getattr(outcome, name)
        if values.size:
            cleaned[name], count = clean_answers(values, limit, negative)
            rejected += count
    # Not `replace`, which would validate the shapes again.
    usable = copy(outcome)
    assign(usable, **{name: read_only(values) for name, values in cleaned.items()})
    return usable, rejected
