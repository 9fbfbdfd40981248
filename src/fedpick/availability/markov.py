"""Two-state Markov chains: availability with memory (CA-Fed, sections III-D and V-A).

Client k is described by pi_k, its stationary probability of being available, and lambda_k, its lag-one correlation
(the second eigenvalue of its chain): P(on | on) = lambda + (1 - lambda) pi, P(on | off) = (1 - lambda) pi. The chain
starts in its stationary law. lambda may be negative, down to -min(pi, 1 - pi) / max(pi, 1 - pi), where a probability
reaches 0 or 1.

How any round is computed directly. One uniform number u_t per client and round drives the chain: on if
u_t < P(on | state before). With low and high the smaller and the larger of the two probabilities, u_t < low means on
and u_t >= high means off *whatever the state before was*; only in between, with probability |lambda|, does the past
matter: the state is kept (lambda > 0) or flipped (lambda < 0). So the state in round t follows from walking back from t
until every client has a round that sets its state. This gives the same masks as stepping forward from round 0. The walk
takes about log(N) / (1 - |lambda|) rounds, one round if the previous round was the latest computed, and at most t.

Populations. `correlated-population` is that of section V-A: half of the clients "more available" (1/2 + g), half "less
available" (1/2 - g); in each half, half are correlated (lambda = nu), half weakly correlated (lambda ~ N(0,
epsilon^2)). `variant="authors"` is what their public code draws: 1/2 more available and weakly correlated, 1/4 less
available and correlated, 1/4 less available and weakly correlated, with weak lambda = (N(0, epsilon^2) + epsilon) / 2;
it draws the size of each class at random (`split="random"`). `clustered` is section V-B e: clients in a cluster share
one chain.

Deviations. A weak lambda outside the feasible range is clipped to it. The paper does not say which clients are in which
class: `order="shuffled"` assigns the classes at random, so that they do not follow the order of the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import ArrayLike

from fedpick.availability.process import (
    AvailabilityProcess,
    Trace,
    numbers,
    one_each,
    trace_stream,
)
from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.core.errors import InvalidInput
from fedpick.core.types import Clients
from fedpick.core.validation import assign, choice, number, whole

__all__ = [
    "Clustered",
    "CorrelatedPopulation",
    "Markov",
    "MarkovTrace",
    "cluster_of_clients",
    "smallest_correlation",
]

CA_FED = """@article{rodio2024federated,
  title={Federated Learning Under Heterogeneous and Correlated Client Availability},
  author={Rodio, Angelo and Faticanti, Francescomaria and Marfoq, Othmane and Neglia, Giovanni and Leonardi, Emilio},
  journal={IEEE/ACM Transactions on Networking},
  volume={32},
  number={2},
  pages={1451--1460},
  year={2024}
}"""


def smallest_correlation(availability: FloatArray) -> FloatArray:
    """The most negative lambda that a two-state chain with this stationary probability can have."""
    rarer = np.minimum(availability, 1.0 - availability)
    return -rarer / (1.0 - rarer)


@final
class MarkovTrace(Trace):
    """Independent stationary chains, one per client or one per cluster of clients."""

    def __init__(
        self,
        num_clients: int,
        seed: int,
        *,
        availability: FloatArray,
        correlation: FloatArray,
        cluster: IntArray | None = None,
    ) -> None:
        super().__init__(num_clients, seed)
        # Tolerate rounding below the bound.
        lowest = smallest_correlation(availability)
        if (wrong := correlation < lowest - 1e-12).any():
            first = int(wrong.argmax())
            raise InvalidInput(
                f"A chain that is available with probability {availability[first]:g} cannot have a correlation of "
                f"{correlation[first]:g}: it must be at least {lowest[first]:.4g}. "
                f"({int(wrong.sum())} of {len(wrong)} chains.)"
            )
        self.cluster = cluster
        """(N,) the cluster of every client, None if every client has its own chain."""
        self._pi = availability
        self._correlation = np.maximum(correlation, lowest)
        after_on = self._correlation + (1.0 - self._correlation) * self._pi
        after_off = (1.0 - self._correlation) * self._pi
        self._after_on, self._after_off = after_on, after_off
        self._low, self._high = np.minimum(after_on, after_off), np.maximum(after_on, after_off)
        self._flips = self._correlation < 0
        self._frozen = np.abs(self._correlation) == 1
        self._latest_state: tuple[int, BoolArray] | None = None

    def _truth(self) -> tuple[FloatArray, FloatArray]:
        # The state of a client with pi = 0 or 1 never changes, whatever its lambda.
        correlation = np.where((self._pi > 0) & (self._pi < 1), self._correlation, 0.0)
        if self.cluster is None:
            return self._pi, correlation
        return self._pi[self.cluster], correlation[self.cluster]

    def _mask(self, round: int) -> BoolArray:
        state = self._state(round)
        self._latest_state = (round, state)
        # A copy: the caller's mask must not be able to change what the next round starts from.
        return state.copy() if self.cluster is None else state[self.cluster]

    def _state(self, round: int) -> BoolArray:
        """Walk back until every chain has a round whose state does not depend on the past."""
        known = self._latest_state
        if known is not None and known[0] == round - 1:  # the usual case: one step forward
            return self._round_stream(round).random(len(self._pi)) < np.where(known[1], self._after_on, self._after_off)
        state = np.zeros(len(self._pi), dtype=np.bool_)
        pending = np.arange(len(self._pi))
        flipped = np.zeros(len(self._pi), dtype=np.bool_)
        while len(pending):
            if known is not None and known[0] == round:
                state[pending] = known[1][pending] ^ flipped[pending]
                break
            draws = self._round_stream(round).random(int(pending[-1]) + 1)[pending]
            if round == 0:
                state[pending] = (draws < self._pi[pending]) ^ flipped[pending]
                break
            low, high = self._low[pending], self._high[pending]
            open_ = (draws >= low) & (draws < high)
            state[pending] = (draws < low) ^ flipped[pending]
            pending = pending[open_]
            flipped[pending] ^= self._flips[pending]
            round -= 1
            if self._frozen[pending].all():  # |lambda| = 1 always depends on the past: jump to round 0
                flipped[pending] ^= self._flips[pending] & (round % 2 == 1)
                round = 0
        return state


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Markov(AvailabilityProcess):
    """One two-state Markov chain per client, given its availability pi and its correlation lambda."""

    availability: ArrayLike = 0.5
    """pi: one number for all clients, or one per client."""
    correlation: ArrayLike = 0.9
    """lambda: one number for all clients, or one per client."""
    reference: ClassVar[str] = CA_FED

    def __post_init__(self) -> None:
        assign(
            self,
            availability=numbers(self, "availability", 0, 1),
            correlation=numbers(self, "correlation", -1, 1),
        )

    def start(self, clients: Clients, seed: int) -> MarkovTrace:
        """See `AvailabilityProcess.start`."""
        count = len(clients)
        availability = one_each(self.availability, count, "Markov.availability", "clients")
        correlation = one_each(self.correlation, count, "Markov.correlation", "clients")
        return MarkovTrace(count, seed, availability=availability, correlation=correlation)


@final
@dataclass(frozen=True, kw_only=True)
class CorrelatedPopulation(AvailabilityProcess):
    """CA-Fed's population: more and less available clients, correlated and weakly correlated ones."""

    heterogeneity: float = 0.4
    """g: clients are available with probability 1/2 + g or 1/2 - g."""
    correlation: float = 0.9
    """nu: lambda of the correlated clients."""
    noise: float = 0.01
    """epsilon: standard deviation of lambda around 0 for the weakly correlated clients."""
    variant: str = "paper"
    """"paper" (four classes of equal size) or "authors" (three classes: none is more available *and* correlated)."""
    split: str = "equal"
    """"equal" class sizes (up to rounding), or "random": each client's class is drawn independently."""
    order: str = "shuffled"
    """"shuffled", or "blocks": the classes one after the other, more available first, correlated before weak."""
    reference: ClassVar[str] = CA_FED

    def __post_init__(self) -> None:
        assign(
            self,
            heterogeneity=number(self, "heterogeneity", "[0, 0.5]"),
            correlation=number(self, "correlation", "[-1, 1]"),
            noise=number(self, "noise", "[0, 1]"),
        )
        choice(self, "variant", ("paper", "authors"))
        choice(self, "split", ("equal", "random"))
        choice(self, "order", ("shuffled", "blocks"))

    def start(self, clients: Clients, seed: int) -> MarkovTrace:
        """See `AvailabilityProcess.start`."""
        count = len(clients)
        generator = trace_stream(seed)
        group = self._classes(count, generator)
        availability = np.where(group < 2, 0.5 + self.heterogeneity, 0.5 - self.heterogeneity)
        weak = generator.normal(0.0, self.noise, count)
        if self.variant == "authors":
            weak = 0.5 * (weak + self.noise)
        weak = np.clip(weak, smallest_correlation(availability), 1.0)
        correlation = np.where(group % 2 == 0, self.correlation, weak)
        return MarkovTrace(count, seed, availability=availability, correlation=correlation)

    def _classes(self, count: int, generator: np.random.Generator) -> IntArray:
        """(N,) 0 more available, correlated; 1 more, weakly; 2 less available, correlated; 3 less, weakly."""
        shares = np.array([0.25, 0.25, 0.25, 0.25] if self.variant == "paper" else [0.0, 0.5, 0.25, 0.25])
        borders = np.cumsum(shares)
        positions = generator.random(count) if self.split == "random" else (np.arange(count) + 0.5) / count
        group = np.searchsorted(borders, positions, side="right")
        if self.order == "blocks":
            return np.sort(group)
        # A random split is already in random order.
        return group if self.split == "random" else generator.permutation(group)


def cluster_of_clients(num_clients: int, num_clusters: int, assignment: str = "blocks") -> IntArray:
    """(N,) the cluster of every client: neighbours together ("blocks"), or client k in cluster k mod C ("round-robin").

    The partition `clustered` deals by the same rule, so that data and availability have the same clusters.

    >>> cluster_of_clients(6, 3), cluster_of_clients(6, 3, "round-robin")
    (array([0, 0, 1, 1, 2, 2]), array([0, 1, 2, 0, 1, 2]))
    """
    rows = np.arange(num_clients)
    return rows * num_clusters // num_clients if assignment == "blocks" else rows % num_clusters


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Clustered(AvailabilityProcess):
    """Spatial correlation: the clients of a cluster share one Markov chain, so they come and go together."""

    num_clusters: int = 10
    availability: ArrayLike | None = None
    """One number for all clusters or one per cluster; None: 0.9 for the first half, 0.1 for the second."""
    correlation: ArrayLike | None = None
    """One number for all clusters or one per cluster; None: 0 for the first half, c / C for cluster c of the second."""
    assignment: str = "blocks"
    """"blocks": neighbouring clients share a cluster; "round-robin": client k is in cluster k mod C."""
    reference: ClassVar[str] = CA_FED

    def __post_init__(self) -> None:
        assign(self, num_clusters=whole(self, "num_clusters", 1))
        if self.availability is not None:
            assign(self, availability=numbers(self, "availability", 0, 1))
        if self.correlation is not None:
            assign(self, correlation=numbers(self, "correlation", -1, 1))
        choice(self, "assignment", ("blocks", "round-robin"))

    def start(self, clients: Clients, seed: int) -> MarkovTrace:
        """See `AvailabilityProcess.start`."""
        count, clusters = len(clients), self.num_clusters
        if clusters > count:
            raise InvalidInput(f"Clustered has {clusters} clusters, but there are only {count} clients.")
        index = np.arange(clusters)
        second_half = index >= clusters // 2 if clusters > 1 else np.zeros(1, dtype=np.bool_)
        availability = np.where(second_half, 0.1, 0.9)
        correlation = np.where(second_half, index / clusters, 0.0)
        if self.availability is not None:
            availability = one_each(self.availability, clusters, "Clustered.availability", "clusters")
        if self.correlation is not None:
            correlation = one_each(self.correlation, clusters, "Clustered.correlation", "clusters")
        cluster = cluster_of_clients(count, clusters, self.assignment)
        return MarkovTrace(count, seed, availability=availability, correlation=correlation, cluster=cluster)
