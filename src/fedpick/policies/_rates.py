"""Inclusion probabilities that sum to the budget, and a draw of exactly that many clients with these probabilities."""

from __future__ import annotations

import numpy as np

from fedpick.core.arrays import FloatArray, IntArray

__all__ = ["draw_by_rates", "selection_rates"]


def selection_rates(importance: FloatArray, size: int, most: FloatArray | None = None) -> FloatArray:
    """q: proportional to importance, at most `most` each (default 1), with the sum `size`, or `most` if that is less.

    >>> selection_rates(np.array([0.7, 0.1, 0.1, 0.1]), 2)
    array([1.        , 0.33333333, 0.33333333, 0.33333333])
    >>> selection_rates(np.array([0.4, 0.3, 0.3]), 1, most=np.array([0.2, 1.0, 1.0]))
    array([0.2, 0.4, 0.4])
    """
    highest = np.ones(len(importance)) if most is None else most
    rates = np.zeros(len(importance))
    free = importance > 0
    left = float(size)
    while left > 0 and free.any():
        share = importance * (left / importance[free].sum())
        full = free & (share >= highest)
        if not full.any():
            rates[free] = share[free]
            break
        rates[full] = highest[full]
        left -= float(highest[full].sum())
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
