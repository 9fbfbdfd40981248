"""Prototypes: clients with (nearly) equal features share one node of the graph, so that memory is O(N + prototypes^2).

With up to `limit` distinct rows every distinct row is a prototype, and the graph is exact. With more, farthest-first
traversal spreads centres over an evenly spaced sample of the rows, a few k-means steps move them, and every client
joins the nearest centre. The result depends only on the rows, without random numbers: the prototypes are the same after
a state is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedpick.core.arrays import FloatArray, IntArray

__all__ = ["Prototypes", "merge", "nearest_centre"]


_SAMPLE_PER_PROTOTYPE = 16
_SAMPLE_NUMBERS = 4_000_000
_REFINEMENTS = 3
# Multiplications per block of rows. Small blocks stay in the cache, and below this size the usual linear algebra
# libraries do not start threads, which on a busy machine wait longer than they compute. With many centres a block has
# more work than that in any case: then NumPy's own cost per block counts.
_BLOCK_WORK, _FEWEST_ROWS = 2**18, 128
_HASHED_ROWS = 4096


@dataclass(frozen=True)
class Prototypes:
    """The prototype of every client, and the features of every prototype."""

    member: IntArray
    """(N,) the prototype of each client; if all rows are distinct and nothing is merged, client k is prototype k."""
    centre: FloatArray
    """(P, F)"""
    multiplicity: IntArray
    """(P,) number of clients of each prototype."""


def merge(rows: FloatArray, limit: int) -> Prototypes:
    """At most `limit` prototypes for N rows, in the order in which their first members appear.

    >>> merge(np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), 10).member
    array([0, 1, 0])
    """
    first, member = _distinct(rows)
    multiplicity = np.bincount(member, minlength=len(first))
    if len(first) <= limit:
        return Prototypes(member=member, centre=rows[first], multiplicity=multiplicity)
    distinct = rows[first]
    centres = _spread(distinct, limit)
    nearest = nearest_centre(distinct, centres)
    centres, nearest = _means(distinct, nearest, multiplicity.astype(np.float64))
    member = nearest[member]
    return Prototypes(member=member, centre=centres, multiplicity=np.bincount(member, minlength=len(centres)))


def _distinct(rows: FloatArray) -> tuple[IntArray, IntArray]:
    """(first row of each distinct value, in order of appearance; for every row, which of them it equals)."""
    bits = np.ascontiguousarray(rows + 0.0).view(np.uint64)  # + 0.0: -0.0 and 0.0 are equal
    keys = np.zeros(len(rows), dtype=np.uint64)
    for begin in range(0, len(rows), _HASHED_ROWS):  # a block stays in the cache while its columns are read
        key = keys[begin : begin + _HASHED_ROWS]
        for column in bits[begin : begin + _HASHED_ROWS].T:
            key ^= column
            key *= np.uint64(0x9E3779B97F4A7C15)
            key ^= key >> np.uint64(29)
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    if not np.array_equal(rows[first[inverse]], rows):  # two rows share a key: compare them in full
        _, first, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty(len(first), dtype=np.int64)
    rank[order] = np.arange(len(first))
    return first[order].astype(np.int64), rank[inverse.reshape(-1)]


def _spread(rows: FloatArray, count: int) -> FloatArray:
    """`count` centres among the rows."""
    size = max(min(_SAMPLE_PER_PROTOTYPE * count, _SAMPLE_NUMBERS // max(rows.shape[1], 1)), 2 * count)
    size = min(size, len(rows))
    sample = rows[np.linspace(0, len(rows) - 1, size).astype(np.int64)]
    squares = (sample**2).sum(axis=1)
    chosen = np.empty(count, dtype=np.int64)
    # The row farthest from the mean first, then always the one farthest from all those chosen.
    distance = ((sample - sample.mean(axis=0)) ** 2).sum(axis=1)
    chosen[0] = np.argmax(distance)
    distance = np.full(size, np.inf)
    for place in range(1, count):
        last = sample[chosen[place - 1]]
        np.minimum(distance, squares - 2 * np.einsum("ij,j->i", sample, last) + last @ last, out=distance)
        chosen[place] = np.argmax(distance)
    centres = sample[np.unique(chosen)]
    for _ in range(_REFINEMENTS):
        centres, _ = _means(sample, nearest_centre(sample, centres), np.ones(size))
    return centres


def nearest_centre(rows: FloatArray, centres: FloatArray) -> IntArray:
    """Return the position of the nearest centre for every row."""
    nearest = np.empty(len(rows), dtype=np.int64)
    half_squares = (centres**2).sum(axis=1) / 2
    transposed = np.ascontiguousarray(centres.T)
    size = max(_BLOCK_WORK // max(centres.size, 1), _FEWEST_ROWS)
    products = np.empty((min(size, len(rows)), len(centres)))
    for begin in range(0, len(rows), size):
        block = rows[begin : begin + size]
        score = np.matmul(block, transposed, out=products[: len(block)])
        score -= half_squares
        score.argmax(axis=1, out=nearest[begin : begin + size])
    return nearest


def _means(rows: FloatArray, nearest: IntArray, weights: FloatArray) -> tuple[FloatArray, IntArray]:
    """The weighted mean of each group's rows, groups without rows left out; and the groups, renumbered to match."""
    used, first, group = np.unique(nearest, return_index=True, return_inverse=True)
    rank = np.empty(len(used), dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(used))
    group = rank[group]
    total = np.bincount(group, weights=weights)
    sums = [np.bincount(group, weights=weights * column) for column in rows.T]
    return np.stack(sums, axis=1) / total[:, None], group
