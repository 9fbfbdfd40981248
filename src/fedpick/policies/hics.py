"""HiCS-FL: select from groups of similar clients, those with balanced labels more often (Chen and Vikalo 2023).

Algorithm, with m = budget, s_k the latest update of client k's output layer, one number per class, and round t:

1. H_k = entropy of softmax(s_k / temperature) estimates how balanced the labels of client k are;
2. the distance of two clients is the angle between s_k and s_i, plus entropy_weight |H_k - H_i|;
3. Ward's method joins the clients into `clusters` groups; let H_c be the mean entropy of group c;
4. m times: draw a group with probability proportional to exp(focus (1 - t / rounds) H_c), among the groups with
   clients left, and a client of it, uniformly and without replacement.

Early rounds prefer balanced clients; from round `rounds` on all groups are equally likely. The model moves by the plain
mean, 1/m. `groups_reference` is steps 1 to 3 and `inclusion_reference` step 4 as printed.

Deviations:
- s_k is the sketch of the update. The drivers of fedpick take the update of the output layer's bias; the authors' code
  takes the mean of each row of that layer's weights.
- The authors' code trains every client once before it compares them. Here clients whose update is not known get their
  share of the places, at random: m times their share of the available clients, rounded up or down at random.
- A client that did not complete, or sent no usable update, counts as unknown until it sends one again.
- The authors' code counts the draws of the groups in a list as long as the cohort, so that it fails if there are more
  groups than places; it passes the square matrix of distances to `linkage`, which reads it as points; exp(s / T)
  overflows there. None of these happens here.
- The authors' code uses algorithm 2 of clustered sampling instead, if the variance of H_k is at least 0.1. Use
  `clustered-updates` for that.
- Ward's tree is exact for up to 1000 clients with known updates. More are merged into 128 groups of similar ones first.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import ClassVar, final

import numpy as np
from scipy.cluster.hierarchy import cut_tree
from scipy.special import softmax

from fedpick.core.arrays import FloatArray, IntArray
from fedpick.core.policy import Policy, Signal
from fedpick.core.sampling import sample_uniform
from fedpick.core.types import Clients, Outcome, RoundContext, Selection
from fedpick.core.validation import number, whole
from fedpick.policies._sketches import LatestSketches, no_sketches, places_for_unknown, remember
from fedpick.policies._ward import angles, merges_reference, unit_rows, ward_tree

__all__ = ["HiCS", "entropies", "groups_reference", "inclusion_reference"]

_BLOCK = 4096


def groups_reference(updates: FloatArray, temperature: float, entropy_weight: float, clusters: int) -> list[list[int]]:
    """Steps 1 to 3: the groups that are left when Ward's method has `clusters` of them."""
    shares = [np.exp((row - row.max()) / temperature) for row in updates]
    entropy = [-sum(p * np.log(p) for p in share / share.sum() if p > 0) for share in shares]
    units = [row / np.sqrt(row @ row) for row in updates]
    distances = np.array(
        [
            [
                np.arccos(np.clip(a @ b, -1, 1)) + entropy_weight * abs(h - g)
                for b, g in zip(units, entropy, strict=True)
            ]
            for a, h in zip(units, entropy, strict=True)
        ]
    )
    groups = [frozenset({client}) for client in range(len(updates))]
    for a, b in merges_reference(distances)[: max(len(updates) - clusters, 0)]:
        groups = [group for group in groups if group not in (a, b)] + [a | b]
    return sorted(sorted(group) for group in groups)


def inclusion_reference(group: IntArray, weight: FloatArray, size: int) -> FloatArray:
    """(n,) the probability that step 4 draws each of n clients, over all ordered draws; weight (C,) of the groups."""
    inclusion = np.zeros(len(group))
    for drawn in permutations(range(len(group)), size):
        probability, left = 1.0, set(range(len(group)))
        for client in drawn:
            open_groups = sorted({int(group[other]) for other in left})
            members = sum(1 for other in left if group[other] == group[client])
            probability *= weight[group[client]] / weight[open_groups].sum() / members
            left.remove(client)
        inclusion[list(drawn)] += probability
    return inclusion


def entropies(updates: FloatArray, temperature: float) -> FloatArray:
    """(n,) step 1: with x = s / temperature - its maximum and Z the sum of exp(x), H = log Z - sum of x exp(x) / Z."""
    entropy = np.empty(len(updates))
    for begin in range(0, len(updates), _BLOCK):  # a block stays in the cache: twice as fast for a million clients
        x = updates[begin : begin + _BLOCK].T.copy()
        x -= x.max(axis=0)
        with np.errstate(over="ignore"):
            x /= temperature
        np.maximum(x, -1e300, out=x)  # an infinite x would make x exp(x) NaN
        share = np.exp(x)
        total = share.sum(axis=0)
        entropy[begin : begin + _BLOCK] = np.log(total) - (x * share).sum(axis=0) / total
    return entropy


@final
@dataclass(frozen=True, kw_only=True)
class HiCS(Policy[LatestSketches]):
    """Select from clusters of similar clients, in early rounds more often from those with balanced labels.

    Args:
        clusters: number of groups.
        temperature: divides the updates in the softmax; about as large as their smallest entries.
        entropy_weight: weight of the difference of entropies in the distance of two clients.
        focus: how much balanced groups are preferred in the first round.
        rounds: the round from which on all groups are equally likely.
    """

    clusters: int = 10
    temperature: float = 0.001
    entropy_weight: float = 10.0
    focus: float = 4.0
    rounds: int = 200

    reference: ClassVar[str] = """
        @article{chen2023accelerating,
          title = {Accelerating Non-IID Federated Learning via Heterogeneity-Guided Client Sampling},
          author = {Chen, Huancheng and Vikalo, Haris},
          journal = {arXiv preprint arXiv:2310.00198},
          year = {2023}
        }"""

    def __post_init__(self) -> None:
        whole(self, "clusters", 1)
        number(self, "temperature", "(0, inf)")
        number(self, "entropy_weight", "[0, inf)")
        number(self, "focus", "[0, inf)")
        whole(self, "rounds", 1)

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
        """Fill one share of the places with unknown clients, the other from the groups."""
        unknown = np.ones(len(context.clients), dtype=bool)
        unknown[state.known] = False
        for_unknown = places_for_unknown(unknown, context, rng)
        strangers = sample_uniform(context.available & unknown, for_unknown, rng)
        known, updates = state.among(context.available)
        size = min(context.budget - for_unknown, len(known))
        chosen = np.empty(0, dtype=np.int64)
        if size > 0:
            entropy = entropies(updates, self.temperature)
            group = self._groups(updates, entropy)
            mean = np.bincount(group, weights=entropy) / np.maximum(np.bincount(group), 1)
            chosen = known[draw_from_groups(group, self._weight(mean, context.index), size, rng)]
        clients = np.concatenate([chosen, strangers])
        diagnostics = {"known": len(state.known), "unknown_selected": len(strangers)}
        weights = np.full(len(clients), 1 / max(len(clients), 1))
        return Selection(clients=clients, weights=weights, diagnostics=diagnostics), state

    def _groups(self, updates: FloatArray, entropy: FloatArray) -> IntArray:
        """(n,) steps 2 and 3, numbered from 0. A group of merged clients may be empty."""
        leaf, tree = ward_tree(np.column_stack([unit_rows(updates), self.entropy_weight * entropy]), _distances)
        if len(tree) == 0:
            return leaf
        group = cut_tree(tree, n_clusters=min(self.clusters, len(tree) + 1))[:, 0].astype(np.int64)
        of_client: IntArray = group[leaf]
        return of_client

    def _weight(self, entropy: FloatArray, index: int) -> FloatArray:
        """(C,) the probability of each group in round `index`, from the mean entropies."""
        weight: FloatArray = softmax(self.focus * max(1 - index / self.rounds, 0.0) * entropy)
        return weight

    def observe(self, state: LatestSketches, outcome: Outcome) -> LatestSketches:
        """Remember the latest updates."""
        return remember(state, outcome)


def _distances(rows: FloatArray) -> FloatArray:
    """(n, n) step 2; the last column is the weighted entropy."""
    distances: FloatArray = angles(rows[:, :-1]) + np.abs(rows[:, -1:] - rows[:, -1])
    return distances


def draw_from_groups(group: IntArray, weight: FloatArray, size: int, rng: np.random.Generator) -> IntArray:
    """Draw `size` positions: step 4. Draws of one group are uniform, so only their number matters."""
    left = np.bincount(group, minlength=len(weight))
    drawn = np.zeros(len(weight), dtype=np.int64)
    for _ in range(size):
        running = np.cumsum(np.where(left > 0, weight, 0.0))
        if running[-1] <= 0:  # the weights of the groups with clients left vanish in floating point
            running = np.cumsum(left > 0).astype(np.float64)
        drawn_group = int(np.searchsorted(running, rng.random() * running[-1], side="right"))
        left[drawn_group] -= 1
        drawn[drawn_group] += 1
    members = [sample_uniform(group == each, int(drawn[each]), rng) for each in np.flatnonzero(drawn)]
    return np.concatenate(members) if members else np.empty(0, dtype=np.int64)
