"""Robust aggregation: one update that stands for a cohort, although some of its members may send anything.

All rules take the stacked updates as one array (k, P), so that every engine can call them. They return a *location*: a
vector of the size of one update. The weights of `fedpick.aggregation_weights` count wherever a rule has weights: a
client with twice the weight counts as two clients. Their sum scales the result, so that the rule "mean" is the plain
weighted sum.

| rule | location | breaks down at |
|---|---|---|
| mean | the weighted mean | one client |
| median | the weighted median of every coordinate | half of the weight |
| trimmed-mean | the mean of every coordinate without the `attackers` share of the weight at each end | that share |
| krum | the update with the smallest sum of distances to its nearest neighbours | `attackers`, below half |
| multi-krum | the weighted mean of the k - f best updates by that sum, f = `attackers` k | the same |
| geometric-median | the point with the smallest weighted sum of distances to all updates | half of the weight |

The references are plain loops over coordinates and clients; the tests compare the two, and both with Flower's.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import FloatArray
from fedpick.core.errors import InvalidInput
from fedpick.core.robust import clip_factors

__all__ = ["RULES", "clip_norms", "combine", "combine_reference"]

RULES = ("mean", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median")
_ITERATIONS = 100
_TOLERANCE = 1e-10
Stack = NDArray[Any]


def combine(updates: Stack, weights: FloatArray, rule: str, attackers: float) -> FloatArray:
    """(P,) the sum of the weights times the location of the updates with a positive weight; 0 without any."""
    counted = weights > 0
    rows, given = np.asarray(updates[counted], dtype=np.float64), weights[counted]
    if len(rows) == 0:
        return np.zeros(updates.shape[1])
    return float(given.sum()) * _location(rows, given / given.sum(), rule, attackers)


def _location(rows: FloatArray, weights: FloatArray, rule: str, attackers: float) -> FloatArray:
    if rule == "median":
        return _weighted_median(rows, weights)
    if rule == "trimmed-mean":
        return _trimmed_mean(rows, weights, attackers)
    if rule in ("krum", "multi-krum"):
        bad = math.floor(attackers * len(rows) + 1e-9)
        best = np.argsort(_krum_scores(rows, bad), kind="stable")[: 1 if rule == "krum" else len(rows) - bad]
        return np.asarray(np.average(rows[best], axis=0, weights=weights[best]))
    if rule == "geometric-median":
        return _geometric_median(rows, weights)
    return weights @ rows


def clip_norms(updates: Stack, multiple: float) -> tuple[Stack, NDArray[np.bool_]]:
    """Scale down the updates longer than `multiple` times the median length: -> (updates, which were cut)."""
    factor = clip_factors(np.linalg.norm(updates, axis=1), multiple)
    return updates * factor[:, None].astype(updates.dtype), factor < 1


def _weighted_median(rows: FloatArray, weights: FloatArray) -> FloatArray:
    """Where the running weight passes one half; the middle of two values if it hits one half exactly."""
    order = np.argsort(rows, axis=0, kind="stable")
    values = np.take_along_axis(rows, order, axis=0)
    running = np.cumsum(weights[order], axis=0)
    lower = np.argmax(running >= 0.5 - 1e-12, axis=0)
    upper = np.argmax(running > 0.5 + 1e-12, axis=0)
    columns = np.arange(rows.shape[1])
    return np.asarray((values[lower, columns] + values[upper, columns]) / 2)


def _trimmed_mean(rows: FloatArray, weights: FloatArray, trim: float) -> FloatArray:
    """The weight between the quantiles trim and 1 - trim; a client on the border counts with the part inside."""
    order = np.argsort(rows, axis=0, kind="stable")
    values = np.take_along_axis(rows, order, axis=0)
    ends = np.cumsum(weights[order], axis=0)
    starts = np.concatenate([np.zeros((1, rows.shape[1])), ends[:-1]])
    inside = np.clip(np.minimum(ends, 1 - trim) - np.maximum(starts, trim), 0.0, None)
    return np.asarray((inside * values).sum(axis=0) / inside.sum(axis=0))


def _krum_scores(rows: FloatArray, bad: int) -> FloatArray:
    """(k,) sum of the squared distances to the k - bad - 2 nearest others, at least one of them."""
    lengths = np.einsum("ij,ij->i", rows, rows)
    squares = np.maximum(lengths[:, None] + lengths[None, :] - 2 * (rows @ rows.T), 0.0)
    np.fill_diagonal(squares, np.inf)
    nearest = max(1, len(rows) - bad - 2)
    return np.asarray(np.sort(squares, axis=1)[:, : min(nearest, max(len(rows) - 1, 0))].sum(axis=1))


def _geometric_median(rows: FloatArray, weights: FloatArray) -> FloatArray:
    """Weiszfeld's iteration: the mean with weights over the distances to the point before."""
    point = weights @ rows
    small = 1e-12 * (1.0 + float(np.abs(rows).max()))
    for _ in range(_ITERATIONS):
        distance = np.maximum(np.linalg.norm(rows - point, axis=1), small)
        pull = weights / distance
        new = pull @ rows / pull.sum()
        moved = float(np.linalg.norm(new - point))
        point = new
        if moved <= _TOLERANCE * (1.0 + float(np.linalg.norm(point))):
            break
    return point


def combine_reference(updates: Stack, weights: FloatArray, rule: str, attackers: float) -> FloatArray:
    """`combine`, one coordinate and one client at a time, for whole weights: a weight of 2 is a client twice."""
    rows = [row for row, weight in zip(updates, weights, strict=True) for _ in range(int(weight))]
    count, size = len(rows), len(updates[0])
    bad = math.floor(attackers * count + 1e-9)
    if rule in ("mean", "median", "trimmed-mean"):
        location = []
        for coordinate in range(size):
            values = sorted(float(row[coordinate]) for row in rows)
            if rule == "median":
                values = values[(count - 1) // 2 : count // 2 + 1]
            elif rule == "trimmed-mean":
                values = values[bad : count - bad]
            location.append(sum(values) / len(values))
        return count * np.array(location)
    if rule in ("krum", "multi-krum"):
        scores = []
        for here, row in enumerate(rows):
            others = sorted(float(((row - other) ** 2).sum()) for there, other in enumerate(rows) if there != here)
            scores.append(sum(others[: max(1, count - bad - 2)]))
        order = sorted(range(count), key=lambda place: scores[place])
        kept = order[: 1 if rule == "krum" else count - bad]
        return count * np.asarray(sum(rows[place] for place in kept) / len(kept))
    raise InvalidInput(f"There is no plain form of {rule!r}.")
