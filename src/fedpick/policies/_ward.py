"""Ward's hierarchical clustering of clients, for any number of them.

The tree is exact for up to `EXACT` clients. It takes quadratic time, so more clients are merged into at most
`PROTOTYPES` groups of similar ones first, and the tree joins these groups. `group_similar` does this in linear time: it
places the centres by an evenly spaced sample of the clients, and every client joins the nearest centre.

`linkage` takes its distances as one row of pairs (condensed). A square matrix of distances would be read as points.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from fedpick.core.arrays import FloatArray, IntArray
from fedpick.policies._prototypes import merge, nearest_centre

__all__ = ["EXACT", "PROTOTYPES", "Distance", "angles", "group_similar", "merges_reference", "unit_rows", "ward_tree"]

EXACT = 1000
PROTOTYPES = 128
_SAMPLE = 20_000
_LARGEST = 1e100

Distance = Callable[[FloatArray], FloatArray]
"""(n, s) rows -> (n, n) distances between them."""


def unit_rows(rows: FloatArray) -> FloatArray:
    """Return the rows scaled to length 1."""
    scaled: FloatArray = rows / np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None]
    return scaled


def angles(rows: FloatArray) -> FloatArray:
    """Return the angles between rows: arccos of the cosine, which rounding may move out of [-1, 1]."""
    unit = unit_rows(rows)
    angle: FloatArray = np.arccos(np.clip(unit @ unit.T, -1.0, 1.0))
    return angle


def group_similar(rows: FloatArray) -> tuple[IntArray, FloatArray]:
    """Return the group of every row, and the (P, s) rows that stand for the groups: the rows if there are few."""
    if len(rows) <= EXACT:
        return np.arange(len(rows)), rows
    sample = rows[np.linspace(0, len(rows) - 1, min(len(rows), _SAMPLE)).astype(np.int64)]
    centres = merge(sample, PROTOTYPES).centre
    return nearest_centre(rows, centres), centres


def ward_tree(rows: FloatArray, distance: Distance) -> tuple[IntArray, FloatArray]:
    """Return the leaf of every row, and the tree over the leaves as SciPy's linkage matrix."""
    leaf, centres = group_similar(rows)
    if len(centres) < 2:
        return leaf, np.empty((0, 4))
    pairs = squareform(distance(centres), checks=False)
    # Ward squares distances. Far larger ones than any angle come from odd options; only their order counts.
    return leaf, linkage(pairs if pairs.max() < _LARGEST else pairs / pairs.max(), method="ward")


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
