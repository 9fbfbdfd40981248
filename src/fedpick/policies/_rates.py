"""Inclusion probabilities that sum to the budget, and a draw of exactly that many clients with these probabilities."""

from __future__ import annotations

import numpy as np

from fedpick.core.arrays import FloatArray, IntArray

__all__ = ["draw_by_rates", "selection_rates"]


def selection_rates(importance: FloatArray, size: int) -> FloatArray:
    """q: proportional to importance, at most 1 each, with the sum `size`, or 1 for all if there are too few clients."""
    rates = np.zeros(len(importance))
    free = importance > 0
    left = min(size, int(np.count_nonzero(free)))
    while left > 0:
        share = importance * (left / importance[free].sum())
        full = free & (share >= 1)
        if not full.any():
            rates[free] = share[free]
            break
        rates[full] = 1.0
        left -= int(np.count_nonzero(full))
        free &= ~full
    return rates


def draw_by_rates(rates: FloatArray, rng: np.random.Generator) -> IntArray:
    """Draw clients so that client k is among them with probability `rates[k]`; their number is the sum of the rates.

    Systematic sampling in random order: the clients lie on a line, each as long as its rate. A comb with distance 1
    between its teeth falls on the line at random and picks the clients that it hits. The sum of the rates must be
    a whole number, up to rounding.
    """
    certain = np.flatnonzero(rates >= 1)
    order = rng.permutation(np.flatnonzero((rates > 0) & (rates < 1)))
    line = np.cumsum(rates[order])
    count = round(float(line[-1])) if len(line) else 0
    if count == 0:
        return certain
    teeth = (rng.random() + np.arange(count)) * (line[-1] / count)
    hit = np.minimum(np.searchsorted(line, teeth, side="right"), len(line) - 1)
    return np.sort(np.concatenate([certain, order[np.unique(hit)]]))
