"""Clustered sampling: one draw from each of m different groups of clients, without bias (Fraboni et al. 2021).

Multinomial sampling (`md`) draws m times from the same distribution p. Here each draw has a distribution of its own, a
*bin*. Client i has m p_i units to give, and every bin holds one unit. Bins with similar clients make cohorts diverse;
since client i gives m p_i units in all, its expected weight is still p_i.

Algorithm 1, `clustered-size`: sort the clients by p, largest first, and fill one bin after the other.
Algorithm 2, `clustered-updates`:

1. join clients with similar updates by Ward's method; cut the tree into the largest groups with at most one unit each;
2. order the groups by their units; the first m groups start one bin each;
3. the clients of the other groups fill the room that is left, bin after bin.

A client with more than one unit fills bins of its own. Both: one draw per bin, weight 1/m per draw. `bins_reference`
and `groups_reference` are these steps as printed.

Deviations:
- A client drawn from two bins trains once with twice the weight, as in `md`.
- The claim of no bias is about the available clients: p is scaled to the sum 1 over them.
- Clients whose update is not known form a group of their own, which is split as in algorithm 1. So algorithm 2 equals
  algorithm 1 before the first report. The paper gives such clients the update zero; for the angle, public code then
  has the distance zero to every client.
- Public code passes the square matrix of distances to SciPy's `linkage`, which reads it as points, and takes arccos of
  cosines above 1, which is NaN. Neither happens here.
- Ward's tree is exact for up to 1000 clients with known updates. More are merged into 128 groups of similar ones first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import numpy as np
from scipy.spatial.distance import pdist, squareform

from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.core.policy import Policy, Signal
from fedpick.core.state import Stateless
from fedpick.core.types import Clients, Outcome, RoundContext, Selection
from fedpick.core.validation import choice
from fedpick.policies._sketches import LatestSketches, no_sketches, remember
from fedpick.policies._ward import angles, merges_reference, unit_rows, ward_tree

__all__ = ["ClusteredSize", "ClusteredUpdates", "bins_reference", "draw_from_bins", "groups_reference"]

_FRABONI = """
        @inproceedings{fraboni2021clustered,
          title = {Clustered Sampling: Low-Variance and Improved Representativity for Clients Selection in Federated
                   Learning},
          author = {Fraboni, Yann and Vidal, Richard and Kameni, Laetitia and Lorenzi, Marco},
          booktitle = {International Conference on Machine Learning (ICML)},
          year = {2021}
        }"""
_ROUNDING = 1e-9
"""Units that may be rounding errors."""


def bins_reference(sizes: Sequence[int], groups: Sequence[Sequence[int]], count: int) -> IntArray:
    """(m, n) what each client gives to each bin: a client gives m n_i in all, and a bin holds the sum of all n_i."""
    capacity = sum(sizes)

    def fill(bins: list[dict[int, int]], pieces: list[tuple[int, int]]) -> list[dict[int, int]]:
        for client, left in pieces:
            for bin_ in bins:
                put = min(left, capacity - sum(bin_.values()))
                bin_[client] = bin_.get(client, 0) + put
                left -= put
        return bins

    started: list[dict[int, int]] = []
    for group in groups:
        largest_first = sorted(group, key=lambda client: -sizes[client])
        started += fill([{} for _ in range(count)], [(client, count * sizes[client]) for client in largest_first])
    started.sort(key=lambda bin_: -sum(bin_.values()))
    left = [piece for bin_ in started[count:] for piece in bin_.items()]
    bins = fill(started[:count], left)
    return np.array([[bin_.get(client, 0) for client in range(len(sizes))] for bin_ in bins])


def groups_reference(sizes: Sequence[int], distances: FloatArray, count: int) -> list[list[int]]:
    """Step 1: the largest subtrees of Ward's tree whose clients have at most one unit together."""
    groups = [frozenset({client}) for client in range(len(sizes))]
    for a, b in merges_reference(distances):
        if count * sum(sizes[client] for client in a | b) <= sum(sizes):
            groups = [group for group in groups if group not in (a, b)] + [a | b]
    return sorted(sorted(group) for group in groups)


def draw_from_bins(importance: FloatArray, group: IntArray, count: int, points: FloatArray) -> IntArray:
    """Draw one client from each of `count` bins, by a point in [0, 1) for each bin.

    All clients lie on a line, group after group, the largest first, each as long as its units. A bin is one or more
    pieces of that line: a whole unit of a group, or the rest of a group and pieces of the groups that start no bin.
    """
    order = np.argsort(-importance, kind="stable")
    if np.ptp(group) > 0:
        order = order[np.argsort(group[order].astype(np.int32), kind="stable")]
    line = np.cumsum(importance[order])
    line *= count / line[-1]
    first = np.flatnonzero(np.diff(group[order], prepend=group[order[0]] - 1))
    begin = np.where(first > 0, line[first - 1], 0.0)
    length = np.diff(np.append(begin, line[-1]))
    whole = np.floor(length + _ROUNDING).astype(np.int64)
    rest = np.maximum(length - whole, 0.0)
    within = np.arange(whole.sum()) - np.repeat(np.cumsum(whole) - whole, whole)
    by_rest = np.argsort(-rest.round(9), kind="stable")
    starting, left = by_rest[: count - len(within)], by_rest[count - len(within) :]
    start = np.concatenate([np.repeat(begin, whole) + within, (begin + whole)[starting]])
    own = np.concatenate([np.ones(len(within)), rest[starting]])
    position = start + points
    ends = np.cumsum(rest[left])
    filled = points >= own
    if len(left) and filled.any():
        room = np.cumsum(1 - own) - (1 - own)
        offset = (room + points - own)[filled]
        piece = np.minimum(np.searchsorted(ends, offset, side="right"), len(left) - 1)
        position[filled] = (begin + whole + rest)[left][piece] - np.maximum(ends[piece] - offset, 0.0)
    picked: IntArray = order[np.minimum(np.searchsorted(line, position, side="right"), len(order) - 1)]
    return picked


def _candidates(context: RoundContext) -> BoolArray:
    """(N,) the available clients with importance, or all available ones if none has any."""
    candidates = context.available & (context.clients.importance > 0)
    return candidates if candidates.any() else context.available


def _selection(
    context: RoundContext, candidates: BoolArray, group: IntArray, rng: np.random.Generator, **diagnostics: int
) -> Selection:
    """Draw from the bins of the candidates, a mask (N,), with the groups (N,)."""
    clients = np.flatnonzero(candidates)
    if len(clients) == 0 or context.budget == 0:
        return Selection(clients=np.empty(0, dtype=np.int64), weights=np.empty(0))
    importance = context.clients.importance[clients]
    if not importance.any():
        importance = np.ones(len(clients))
    drawn = clients[draw_from_bins(importance, group[clients], context.budget, rng.random(context.budget))]
    distinct, draws = np.unique(drawn, return_counts=True)
    return Selection(clients=distinct, weights=draws / context.budget, diagnostics=diagnostics)


@final
@dataclass(frozen=True, kw_only=True)
class ClusteredSize(Policy[Stateless]):
    """Draw one client from each of m bins, filled with the clients in order of their size."""

    unbiased: ClassVar[bool] = True
    reference: ClassVar[str] = _FRABONI

    def init(self, clients: Clients, rng: np.random.Generator) -> Stateless:
        """Nothing to remember."""
        return Stateless()

    def select(self, state: Stateless, context: RoundContext, rng: np.random.Generator) -> tuple[Selection, Stateless]:
        """Make one draw per bin: `budget` draws, even if fewer clients are available."""
        candidates = _candidates(context)
        return _selection(context, candidates, np.zeros(len(candidates), dtype=np.int64), rng), state


@final
@dataclass(frozen=True, kw_only=True)
class ClusteredUpdates(Policy[LatestSketches]):
    """Draw one client from each of m bins, filled with clients that sent similar updates.

    Args:
        distance: "angle" between two updates, as in the paper's experiments, or "euclidean".
    """

    distance: Literal["angle", "euclidean"] = "angle"

    unbiased: ClassVar[bool] = True
    reference: ClassVar[str] = _FRABONI

    def __post_init__(self) -> None:
        choice(self, "distance", ("angle", "euclidean"))

    @property
    def needs(self) -> frozenset[Signal]:
        """The sketch of every update."""
        return frozenset({Signal.SKETCH})

    def init(self, clients: Clients, rng: np.random.Generator) -> LatestSketches:
        """No update is known."""
        return no_sketches()

    def select(
        self, state: LatestSketches, context: RoundContext, rng: np.random.Generator
    ) -> tuple[Selection, LatestSketches]:
        """Group the available clients by their updates and make one draw per bin."""
        candidates = _candidates(context)
        known, sketches = state.among(candidates)
        group = np.zeros(len(candidates), dtype=np.int64)
        if len(known) and context.budget:
            importance = context.clients.importance
            units = context.budget * importance[known] / (importance[candidates].sum() or 1.0)
            group[known] = 1 + self._groups(sketches, units)
        return _selection(context, candidates, group, rng, known=len(known)), state

    def _groups(self, sketches: FloatArray, units: FloatArray) -> IntArray:
        """(n,) step 1: the highest node of Ward's tree above each client with at most one unit."""
        angle = self.distance == "angle"
        leaf, tree = ward_tree(unit_rows(sketches) if angle else sketches, angles if angle else _euclidean)
        leaves = len(tree) + 1
        total = np.concatenate([np.bincount(leaf, weights=units, minlength=leaves), np.zeros(len(tree))])
        top = np.arange(len(total))
        children = tree[:, :2].astype(np.int64)
        for node, pair in enumerate(children, start=leaves):
            total[node] = total[pair].sum()
        for node in range(len(total) - 1, leaves - 1, -1):  # from the root down
            if total[node] <= 1 + _ROUNDING:
                top[children[node - leaves]] = top[node]
        highest: IntArray = top[leaf]
        return highest

    def observe(self, state: LatestSketches, outcome: Outcome) -> LatestSketches:
        """Remember the latest updates."""
        return remember(state, outcome)


def _euclidean(rows: FloatArray) -> FloatArray:
    distances: FloatArray = squareform(pdist(rows))
    return distances
