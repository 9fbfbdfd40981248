"""DivFL: select the clients whose updates stand best for the updates of all clients (Balakrishnan et al. 2022).

Algorithm, with m = budget: let d_ki be the distance between the latest updates of clients k and i. Starting with no
client, add m times the client i that lowers

    G(S) = sum over all clients k of min over i in S of d_ki

most (the greedy algorithm for facility location). Every client k belongs to the nearest selected client. The weight of
a selected client is the importance of the clients that belong to it. `greedy_reference` is this loop as printed.

Deviations:
- The paper asks all clients for an update before the first round. Here clients whose update is not known get their
  share of the places, at random: m times their share of the available clients, rounded up or down at random. They take
  the share of the weight that all unknown clients have by importance.
- A client that did not complete, or sent no usable update, counts as unknown until it sends one again. The greedy
  choice is deterministic, so that a client that died would be selected for ever.
- Public code has the weights by cluster commented out and takes the plain mean: `weights="equal"`.
- Only available clients are selected; all clients with a known update are represented.
- The greedy choice is exact for up to 1000 clients with known updates. More are merged into 128 groups of similar ones
  first. A group is represented by one of its available clients, at random.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import numpy as np
from scipy.spatial.distance import cdist

from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.core.policy import Policy, Signal
from fedpick.core.sampling import sample_uniform
from fedpick.core.types import Clients, Outcome, RoundContext, Selection
from fedpick.core.validation import choice
from fedpick.policies._sketches import LatestSketches, no_sketches, places_for_unknown, remember
from fedpick.policies._ward import group_similar

__all__ = ["DivFL", "greedy", "greedy_reference"]

_ROUNDING = 1e-12


def greedy_reference(distances: FloatArray, allowed: list[int], size: int) -> list[int]:
    """Add the client that gives the smallest G, `size` times."""
    chosen: list[int] = []
    for _ in range(size):
        left = [client for client in allowed if client not in chosen]
        value = {new: sum(min(row[i] for i in [*chosen, new]) for row in distances) for new in left}
        chosen.append(next(new for new in left if value[new] <= min(value.values()) + 1e-9))  # up to rounding
    return chosen


def greedy(distances: FloatArray, count: FloatArray, size: int) -> IntArray:
    """Return at most `size` columns of the (n, c) distances, row k counted `count[k]` times, in the order chosen.

    The first of equal columns wins. Two clients that are nearest to each other are equal up to rounding.
    """
    size = min(size, distances.shape[1])
    chosen = np.empty(size, dtype=np.int64)
    nearest = np.full(len(distances), distances.max(initial=0.0))
    largest = float(count @ nearest)
    free = np.ones(distances.shape[1], dtype=bool)
    for place in range(size):
        gain = count @ np.maximum(nearest[:, None] - distances, 0.0)
        gain[~free] = -np.inf
        chosen[place] = np.argmax(gain >= gain.max() - _ROUNDING * largest)
        free[chosen[place]] = False
        np.minimum(nearest, distances[:, chosen[place]], out=nearest)
    return chosen


@final
@dataclass(frozen=True, kw_only=True)
class DivFL(Policy[LatestSketches]):
    """Select the clients whose updates stand best for all others, by greedy facility location.

    Args:
        weights: "clusters" weighs a client by the clients that it represents; "equal" takes the plain mean.
    """

    weights: Literal["clusters", "equal"] = "clusters"

    reference: ClassVar[str] = """
        @inproceedings{balakrishnan2022diverse,
          title = {Diverse Client Selection for Federated Learning via Submodular Maximization},
          author = {Balakrishnan, Ravikumar and Li, Tian and Zhou, Tianyi and Himayat, Nageen and Smith, Virginia and
                    Bilmes, Jeff},
          booktitle = {International Conference on Learning Representations (ICLR)},
          year = {2022}
        }"""

    def __post_init__(self) -> None:
        choice(self, "weights", ("clusters", "equal"))

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
        """Fill one share of the places with unknown clients, the other by the greedy choice."""
        importance = context.clients.importance
        unknown = np.ones(len(importance), dtype=bool)
        unknown[state.known] = False
        for_unknown = places_for_unknown(unknown, context, rng)
        strangers = sample_uniform(context.available & unknown, for_unknown, rng)
        size = min(context.budget - for_unknown, int(context.available[state.known].sum()))
        chosen, mass = self._represent(state, context.available, importance, size, rng)
        clients = np.concatenate([chosen, strangers])
        weights = np.ones(len(clients))
        if self.weights == "clusters":
            of_strangers = importance[unknown].sum() / max(len(strangers), 1)
            weights = np.concatenate([mass, np.full(len(strangers), of_strangers)])
        total = weights.sum()
        weights = weights / total if total > 0 else np.full(len(clients), 1 / max(len(clients), 1))
        diagnostics = {"known": len(state.known), "unknown_selected": len(strangers)}
        return Selection(clients=clients, weights=weights, diagnostics=diagnostics), state

    def _represent(
        self,
        state: LatestSketches,
        available: BoolArray,
        importance: FloatArray,
        size: int,
        rng: np.random.Generator,
    ) -> tuple[IntArray, FloatArray]:
        """(m,) the selected clients, and the importance of the clients that they represent."""
        if size == 0:
            return np.empty(0, dtype=np.int64), np.empty(0)
        group, centres = group_similar(state.vectors)
        groups = len(centres)
        # One available client for each group, at random: the last one written stays.
        member = np.full(groups, -1)
        reachable = rng.permutation(np.flatnonzero(available[state.known]))
        member[group[reachable]] = reachable
        allowed = rng.permutation(np.flatnonzero(member >= 0))  # ties are random
        distances = cdist(centres, centres[allowed])
        picked = greedy(distances, np.bincount(group, minlength=groups).astype(np.float64), size)
        owner = np.argmin(distances[:, picked], axis=1)
        of_groups = np.bincount(group, weights=importance[state.known], minlength=groups)
        mass = np.bincount(owner, weights=of_groups, minlength=len(picked)).astype(np.float64)
        chosen = state.known[member[allowed[picked]]]
        if len(chosen) == size:
            return chosen, mass
        # More places than groups: others at random. They share the weight of the client that stands for their group.
        first = reachable[:size]  # in random order
        extra = first[~np.isin(first, member[allowed[picked]])][: size - len(chosen)]
        owners = np.concatenate([np.arange(len(picked)), owner[group[extra]]])
        share = mass / np.bincount(owners, minlength=len(picked))
        return np.concatenate([chosen, state.known[extra]]), share[owners]

    def observe(self, state: LatestSketches, outcome: Outcome) -> LatestSketches:
        """Remember the latest updates."""
        return remember(state, outcome)
