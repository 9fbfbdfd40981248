"""Ward's hierarchical clustering of clients, for any number of them.

The tree is exact for up to `EXACT` clients. It takes quadratic time, so more clients are merged into at most
`PROTOTYPES` groups of similar ones first, and the tree joins these groups.

`linkage` takes its distances as one row of pairs (condensed). A square matrix of distances would be read as points.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from fedpick.core.arrays import FloatArray, IntArray
from fedpick.policies._prototypes import merge

__all__ = ["EXACT", "PROTOTYPES", "Distance", "angles", "merges_reference", "unit_rows", "ward_tree"]

EXACT = 1000
PROTOTYPES = 128

Distance = Callable[[FloatArray], FloatArray]
"""(n, s) rows -> (n, n) distances between them."""


def unit_rows(rows: FloatArray) -> FloatArray:
    """Return the rows scaled to length 1."""
    scaled: FloatArray = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return scaled


def angles(rows: FloatArray) -> FloatArray:
    """Return the angles between rows: arccos of the cosine, which rounding may move out of [-1, 1]."""
    unit = unit_rows(rows)
    angle: FloatArray = np.arccos(np.clip(unit @ unit.T, -1.0, 1.0))
    return angle


def ward_tree(rows: FloatArray, distance: Distance) -> tuple[IntArray, FloatArray]:
    """Return the leaf of every row, and the tree over the leaves as SciPy's linkage matrix."""
    leaf = np.arange(len(rows))
    if len(rows) > EXACT:
        prototypes = merge(rows, PROTOTYPES)
        leaf, rows = prototypes.member, prototypes.centre
    if len(rows) < 2:
        return leaf, np.empty((0, 4))
    return leaf, linkage(squareform(distance(rows), checks=False), method="ward")


def merges_reference(distances: FloatArray) -> list[tuple[frozenset[int], frozenset[int]]]:
    """Ward's merges, the nearest pair first: (n, n) distances, updated by the formula of Lance and Williams."""
    clusters = [frozenset({leaf}) for leaf in range(len(distances))]
    squared = {frozenset({a, b}): distances[min(a), min(b)] ** 2 for a in clusters for b in clusters if a != b}
    merges = []
    while len(clusters) > 1:
        pairs = [(squared[frozenset({a, b})], a, b) for i, a in enumerate(clusters) for b in clusters[:i]]
        nearest, a, b = min(pairs, key=lambda pair: pair[0])
        merges.append((a, b))
        clusters = [cluster for cluster in clusters if cluster not in (a, b)]
        for c in clusters:
            to_a, to_b = squared[frozenset({a, c})], squared[frozenset({b, c})]
            weighted = (len(a) + len(c)) * to_a + (len(b) + len(c)) * to_b - len(c) * nearest
            squared[frozenset({a | b, c})] = weighted / (len(a) + len(b) + len(c))
        clusters.append(a | b)
    return merges
