"""Sampling for policies: uniform, weighted with and without replacement, and top-k with random ties.

Weighted sampling without replacement is *sequential*: draw one client with probability proportional to its weight,
remove it, draw the next. Two exact methods are combined. The first draws from a cumulative distribution and rejects
repeats and unavailable clients: O(k log N), but slow once little weight is left. The second is a race of exponential
clocks: client i rings at time E_i / w_i and the first k win, O(N). After a fixed number of draws the second method
replaces the first. Given the clients already drawn, both continue with the same distribution.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import BoolArray, FloatArray, IntArray

__all__ = ["cumulative", "draw_with_replacement", "sample_uniform", "sample_weighted", "top_k"]

# Draws per place before the race replaces rejection: enough while about a quarter of the weight is eligible.
_DRAWS_PER_PLACE = 4


def top_k(values: FloatArray, k: int, rng: np.random.Generator) -> IntArray:
    """Return the positions of the k largest values, largest first. Ties are random; NaN ranks last.

    >>> top_k(np.array([1.0, np.nan, 3.0, 2.0]), 2, np.random.default_rng(0))
    array([2, 3])
    """
    k = min(k, len(values))
    if k <= 0:
        return np.empty(0, dtype=np.int64)
    ranked = np.where(np.isnan(values), -np.inf, values)
    threshold = np.partition(ranked, len(ranked) - k)[len(ranked) - k]
    above = np.flatnonzero(ranked > threshold)
    missing = k - len(above)
    ties = np.flatnonzero(ranked == threshold)
    if np.isneginf(threshold):
        # A true -inf ranks before NaN: use real values first.
        real = ties[~np.isnan(values[ties])]
        unknown = ties[np.isnan(values[ties])]
        filled = rng.choice(real, size=min(missing, len(real)), replace=False)
        filled = np.concatenate([filled, rng.choice(unknown, size=missing - len(filled), replace=False)])
    else:
        filled = rng.choice(ties, size=missing, replace=False)
    order = above[rng.permutation(len(above))]
    order = order[np.argsort(-ranked[order], kind="stable")]
    return np.concatenate([order, filled]).astype(np.int64)


def sample_uniform(available: BoolArray, count: int, rng: np.random.Generator) -> IntArray:
    """Draw at most `count` available clients. All subsets of that size are equally likely."""
    eligible = np.flatnonzero(available)
    return rng.choice(eligible, size=min(count, len(eligible)), replace=False).astype(np.int64)


def cumulative(weights: FloatArray) -> FloatArray:
    """Return the running sum of the weights. Policies keep it to draw from the same weights in every round."""
    return np.cumsum(weights, dtype=np.float64)


def draw_with_replacement(
    weights: FloatArray, available: BoolArray, count: int, rng: np.random.Generator
) -> tuple[IntArray, IntArray]:
    """Draw `count` available clients with replacement. Return (distinct clients, number of draws of each).

    If all available clients have weight 0, the draws are uniform among them.
    """
    eligible = np.flatnonzero(available)
    if len(eligible) == 0 or count <= 0:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    running = np.cumsum(weights[eligible])
    if running[-1] > 0:
        drawn = eligible[np.searchsorted(running, rng.random(count) * running[-1], side="right")]
    else:
        drawn = rng.choice(eligible, size=count)
    clients, multiplicity = np.unique(drawn, return_counts=True)
    return clients.astype(np.int64), multiplicity.astype(np.int64)


def sample_weighted(
    weights: FloatArray,
    running: FloatArray,
    available: BoolArray,
    count: int,
    rng: np.random.Generator,
) -> IntArray:
    """Draw at most `count` available clients without replacement, by weight, in the order drawn.

    `running` is `cumulative(weights)`. Clients of weight 0 are drawn, uniformly, only after all others.
    """
    if count <= 0 or running[-1] <= 0:
        return sample_uniform(available, count, rng)
    drawn = _reject(running, available, count, rng)
    if len(drawn) == count:
        return drawn
    remaining = available & (weights > 0)
    remaining[drawn] = False
    drawn = np.concatenate([drawn, _race(weights, remaining, count - len(drawn), rng)])
    if len(drawn) < count:
        weightless = available.copy()
        weightless[drawn] = False
        drawn = np.concatenate([drawn, sample_uniform(weightless, count - len(drawn), rng)])
    return drawn


def _reject(running: FloatArray, available: BoolArray, count: int, rng: np.random.Generator) -> IntArray:
    """Return the first `count` distinct available clients among a fixed number of draws with replacement."""
    points = rng.random(_DRAWS_PER_PLACE * count + 16) * running[-1]
    draws = np.searchsorted(running, points, side="right")
    draws = draws[available[draws]]
    _, first = np.unique(draws, return_index=True)
    distinct: IntArray = draws[np.sort(first)[:count]]
    return distinct


def _race(weights: FloatArray, eligible: BoolArray, count: int, rng: np.random.Generator) -> IntArray:
    """Return the `count` earliest of independent exponential clocks with rates `weights`."""
    runners = np.flatnonzero(eligible)
    times: NDArray[Any] = rng.exponential(size=len(runners)) / weights[runners]
    if count < len(runners):
        first = np.argpartition(times, count)[:count]
        runners, times = runners[first], times[first]
    return runners[np.argsort(times)].astype(np.int64)
