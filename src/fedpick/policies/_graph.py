"""The data-distribution-dependency graph (3DG) of FedGS: how far apart the data of any two clients are.

    features -> similarity V_ij (eqs. 10-12) -> edges R_ij -> shortest paths H_ij (Floyd-Warshall or Dijkstra)

`rule.variant` "paper": V is the inner product of the features, scaled to [0, 1] by the smallest and the largest value
of any pair (appendix C), or max(cosine, 0) for vectors that come from models (eqs. 11, 12). An edge has the length
exp(-V / sigma^2) and exists if V >= epsilon. `"code"`: what the authors' program computes. V is the cosine throughout,
scaled with 0 among the values. An edge has the length exp(-V^2 / 0.1) and exists if V > 0.01.

The paper leaves open how distances are scaled. Here they are divided by the largest finite one, and a pair without a
path is at distance 1. If all pairs are equally similar, all are at distance 1.

Clients of one prototype are copies of one node, joined by an edge like any other pair. No shortest path between two
prototypes visits a second copy, so paths among prototypes are exact. The distance of two copies is their edge or a
detour over another node, whichever is shorter.

`distances_reference` is the same on all N clients, without prototypes: the definition that the tests compare with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import shortest_path

from fedpick.core.arrays import FloatArray, IntArray
from fedpick.core.errors import InvalidInput
from fedpick.policies._prototypes import merge

__all__ = [
    "Graph",
    "GraphRule",
    "build_graph",
    "distances_reference",
    "edge_weights",
    "graph_of_similarities",
    "scaled",
    "similarities",
]


_CODE_EPSILON = 0.01
_CODE_SIGMA2 = 0.1


@dataclass(frozen=True, kw_only=True)
class GraphRule:
    """How features become a graph."""

    variant: str = "paper"
    """"paper" or "code"."""
    epsilon: float = 0.1
    sigma2: float = 0.01
    cosine: bool = False
    """The features come from models (eqs. 11, 12): compare directions only."""

    @property
    def uses_directions(self) -> bool:
        """Whether the length of a feature vector is irrelevant."""
        return self.cosine or self.variant == "code"


@dataclass(frozen=True)
class Graph:
    """Distances between clients, by way of their prototypes."""

    prototype: IntArray
    """(N,) the node that stands for each client."""
    distance: FloatArray
    """(P, P) in [0, 1], symmetric; the diagonal is the distance of two clients of the same prototype."""

    def mean_distance(self) -> float:
        """The mean over all pairs of clients; 1 if there is no pair."""
        count = len(self.prototype)
        if count < 2:
            return 1.0
        amounts = np.bincount(self.prototype, minlength=len(self.distance)).astype(np.float64)
        total = amounts @ self.distance @ amounts - amounts @ np.diagonal(self.distance)
        return float(total / (count * (count - 1)))

    def between_clients(self) -> FloatArray:
        """(N, N) distances of all pairs, 0 on the diagonal: for analysis of small federations."""
        dense = self.distance[np.ix_(self.prototype, self.prototype)]
        np.fill_diagonal(dense, 0.0)
        return dense


def build_graph(features: FloatArray, rule: GraphRule, max_prototypes: int) -> Graph:
    """The graph of N clients with the given (N, F) features."""
    if len(features) == 0:
        return Graph(np.empty(0, dtype=np.int64), np.empty((0, 0)))
    prototypes = merge(_directions(features) if rule.uses_directions else features, max_prototypes)
    values = similarities(prototypes.centre, rule)
    return Graph(prototypes.member, _distances(values, prototypes.multiplicity, rule))


def distances_reference(features: FloatArray, rule: GraphRule) -> FloatArray:
    """(N, N) distances by equations 10 to 12, appendix C and Floyd-Warshall. The similarities must not be all equal."""
    similarity = features @ features.T
    if rule.uses_directions:
        length = np.linalg.norm(features, axis=1)
        similarity = similarity / np.where(np.outer(length, length) > 0, np.outer(length, length), 1.0)
    if rule.variant == "paper" and rule.cosine:
        similarity = np.maximum(similarity, 0.0)
    else:
        pairs = similarity[~np.eye(len(features), dtype=bool)]
        low, high = pairs.min(), pairs.max()
        if rule.variant == "code":
            low, high = min(low, 0.0), max(high, 0.0)
        similarity = (similarity - low) / (high - low)
    if rule.variant == "code":
        path = np.where(similarity > _CODE_EPSILON, np.exp(-(similarity**2) / _CODE_SIGMA2), np.inf)
    else:
        path = np.where(similarity >= rule.epsilon, np.exp(-similarity / rule.sigma2), np.inf)
    np.fill_diagonal(path, 0.0)
    for k in range(len(path)):
        path = np.minimum(path, path[:, [k]] + path[[k], :])
    path /= path[np.isfinite(path)].max()
    return np.where(np.isfinite(path), path, 1.0)


def graph_of_similarities(values: FloatArray, rule: GraphRule) -> Graph:
    """The graph of N clients from their (N, N) similarities, for instance from a protocol that hides the features."""
    symmetric = (values + values.T) / 2
    if rule.uses_directions:
        # The product of a client with itself is its squared length, which turns products into cosines.
        lengths = np.sqrt(np.maximum(np.diagonal(symmetric), 0.0))
        unknown = np.flatnonzero((lengths == 0) & (symmetric != 0).any(axis=1))
        if len(unknown):
            raise InvalidInput(
                "Cosines need every client's product with itself on the diagonal of the similarities. "
                f"Got 0 for client {unknown[0]}: give it, or use graph='paper'."
            )
        scale = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)
        symmetric = np.clip(symmetric * np.outer(scale, scale), -1.0, 1.0)
    count = len(symmetric)
    return Graph(np.arange(count), _distances(symmetric, np.ones(count, dtype=np.int64), rule))


def similarities(features: FloatArray, rule: GraphRule) -> FloatArray:
    """V before scaling: inner products or cosines, (N, N)."""
    if not rule.uses_directions:
        return features @ features.T
    unit = _directions(features)
    cosine = np.clip(unit @ unit.T, -1.0, 1.0)
    return np.maximum(cosine, 0.0) if rule.variant == "paper" else cosine


def scaled(values: FloatArray, multiplicity: IntArray, rule: GraphRule) -> FloatArray:
    """V in [0, 1]. A diagonal entry counts only if it is a real pair: two clients of one prototype."""
    if rule.variant == "paper" and rule.cosine:
        return values  # max(cosine, 0) is in [0, 1] already
    pairs = ~np.eye(len(values), dtype=bool) | np.diag(multiplicity > 1)
    low, high = values.min(where=pairs, initial=np.inf), values.max(where=pairs, initial=-np.inf)
    if rule.variant == "code":
        low, high = min(low, 0.0), max(high, 0.0)  # the program takes both with zeros on the diagonal
    if not high > low:
        return np.ones_like(values)
    result: FloatArray = np.clip((values - low) / (high - low), 0.0, 1.0)
    return result


def edge_weights(similarity: FloatArray, rule: GraphRule) -> FloatArray:
    """R off the diagonal, inf for a missing edge. The diagonal is the edge between two copies of a node.

    A common factor of R cancels when distances are scaled, so the longest edge has the weight 1: the short ones then
    underflow later.
    """
    if rule.variant == "code":
        joined, exponent = similarity > _CODE_EPSILON, -(similarity**2) / _CODE_SIGMA2
    else:
        joined, exponent = similarity >= rule.epsilon, -similarity / rule.sigma2
    longest = exponent.max(where=joined, initial=-np.inf)
    weight = np.exp(np.minimum(exponent - longest, 0.0)) if joined.any() else np.ones_like(exponent)
    # A weight must not underflow to 0: an entry of 0 is a missing edge.
    return np.where(joined, np.maximum(weight, np.finfo(np.float64).tiny), np.inf)


def _distances(values: FloatArray, multiplicity: IntArray, rule: GraphRule) -> FloatArray:
    weights = edge_weights(scaled(values, multiplicity, rule), rule)
    between = weights.copy()
    np.fill_diagonal(between, np.inf)
    # A sparse matrix, even if it is full: in a dense graph SciPy treats entries below 1e-8 as missing edges, and
    # exp(-V / sigma^2) is far smaller for similar clients.
    linked = np.nonzero(np.isfinite(between))
    edges = csr_array((between[linked], linked), shape=between.shape)
    distance: FloatArray = shortest_path(edges, method="auto", directed=False)
    copies = np.minimum(np.diagonal(weights), (between + distance).min(axis=1))
    # A single client has no copy: its diagonal entry must not take part in the scaling.
    np.fill_diagonal(distance, np.where(multiplicity > 1, copies, np.inf))
    finite = np.isfinite(distance)
    largest = distance.max(where=finite, initial=0.0)
    if largest > 0:
        distance[finite] /= largest
    distance[~finite] = 1.0
    single = multiplicity == 1
    distance[single, single] = 0.0
    symmetric: FloatArray = (distance + distance.T) / 2
    return symmetric


def _directions(features: FloatArray) -> FloatArray:
    length = np.sqrt((features**2).sum(axis=1, keepdims=True))
    unit: FloatArray = np.divide(features, length, out=np.zeros_like(features), where=length > 0)
    return unit
