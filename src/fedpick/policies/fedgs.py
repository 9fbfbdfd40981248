"""FedGS: graph-based sampling under arbitrary availability (Wang et al., AAAI 2023).

Two goals, weighted by alpha: choose the clients that were chosen least often so far, so that rarely available data is
not overlooked; and choose clients with different data, so that a cohort resembles the population.

Algorithm, with N clients, m = min(budget, number available), v_k how often client k was selected, h_ij the shortest
path between i and j in the data-distribution-dependency graph (3DG, eqs. 10-12):

    maximise over cohorts S of m available clients
        alpha * diversity(S) - 1/(N-1) * sum over k in S of z_k,    z_k = 2 (v_k - mean v - m/N) + 1     (eq. 14)

    objective="mean-distance":  diversity(S) = mean of h_ij over the pairs of S: the scale of the authors' program,
                                which produced the published results
    objective="paper":          diversity(S) = s'Hs / (N(N-1)), as printed: N(N-1) / (m(m-1)) times weaker, so that
                                the distances do little more than break ties between counts

Weights: by num_examples over the clients that complete (eq. 18). alpha = 0 is pure count balancing, the m smallest
counts. `cohort_reference` solves equation 14 by enumeration; `_cohort_search` solves it for many clients.

The graph comes from the table of clients ("labels": shares of the labels; "features": any description; "products": row
k of Clients.features holds the similarities of client k to all N clients, for instance scalar products computed without
revealing the features, see `fedpick.private`) or from the clients' models ("updates", "outputs"). In the latter case
each client is probed once, the first time it is available, and the graph grows.

Deviations: the solver is greedy construction and best-improvement swaps from many starts with a limit on work, instead
of a commercial solver with a limit on time. Counts count selections, and a newcomer starts at the mean count of the
clients that are available with it. The paper assumes that all clients are available before the first round; here a
client whose update or output is not known yet is at the mean distance from all others. Distances are scaled to [0, 1],
pairs without a path are at distance 1. More than `max_prototypes` different feature vectors are merged. Ties are broken
at random.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import ClassVar, final

import numpy as np

from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.core.errors import InvalidInput
from fedpick.core.policy import Policy, Signal
from fedpick.core.state import derived, per_client
from fedpick.core.types import Clients, Measurement, Probe, RoundContext, Selection
from fedpick.core.validation import choice, number, whole
from fedpick.policies._cohort_search import best_cohort
from fedpick.policies._graph import Graph, GraphRule, build_graph, graph_of_similarities

__all__ = ["FedGS", "FedGSState", "cohort_reference"]


_NEEDS = {
    "labels": Signal.LABEL_HISTOGRAM,
    "features": Signal.FEATURES,
    "products": Signal.FEATURES,
    "updates": Signal.UPDATE,
    "outputs": Signal.OUTPUTS,
}
_PROBED = ("updates", "outputs")


@dataclass(frozen=True)
class FedGSState:
    """How often each client was selected, and the graph.

    A graph from the table is computed from it again; one from probes is kept, with the vectors it was built from.
    """

    known: IntArray
    """(K,) the clients whose vectors are known, ascending."""
    vectors: FloatArray
    """(K, s) their answers."""
    known_prototype: IntArray
    """(K,) the prototype of each of them."""
    known_distance: FloatArray
    """(P, P) among the prototypes of the known clients."""
    counts: FloatArray = per_client()
    """(N,) selections, plus the mean at which a newcomer starts; NaN: joined after the last round."""
    prototype: IntArray = derived()
    """(N,) from the table, empty for a graph from probes."""
    distance: FloatArray = derived()
    """(P, P) from the table."""


@final
@dataclass(frozen=True, kw_only=True)
class FedGS(Policy[FedGSState]):
    """Graph-based sampling: balances how often clients are chosen and keeps the cohort's data diverse.

    Args:
        alpha: weight of diversity against balance; 0 balances only.
        epsilon: similarities (in [0, 1]) below it make no edge.
        sigma2: small values let the edges of similar and dissimilar pairs differ more.
        similarity: what the graph is built from: "labels", "features", "updates", "outputs" or "products".
        objective: "mean-distance" or "paper", the scale of the diversity term.
        graph: "paper", or "code" for what the authors' program computes: cosines, edges exp(-V^2 / 0.1), V > 0.01.
        max_prototypes: more different feature vectors than this are merged.
    """

    alpha: float = 1.0
    epsilon: float = 0.1
    sigma2: float = 0.01
    similarity: str = "labels"
    objective: str = "mean-distance"
    graph: str = "paper"
    max_prototypes: int = 1000

    reference: ClassVar[str] = """
        @inproceedings{wang2023fedgs,
          title = {FedGS: Federated Graph-Based Sampling with Arbitrary Client Availability},
          author = {Wang, Zheng and Fan, Xiaoliang and Qi, Jianzhong and Jin, Haibing and Yang, Peizhen and
                    Shen, Siqi and Wang, Cheng},
          booktitle = {AAAI Conference on Artificial Intelligence},
          year = {2023}
        }"""

    def __post_init__(self) -> None:
        number(self, "alpha", "[0, 1e100]")  # products with a larger one overflow
        number(self, "epsilon", "[0, 1]")
        number(self, "sigma2", "(0, inf)")
        choice(self, "similarity", _NEEDS)
        choice(self, "objective", ("mean-distance", "paper"))
        choice(self, "graph", ("paper", "code"))
        whole(self, "max_prototypes", 1)
        if self.graph == "code" and (self.epsilon, self.sigma2) != (0.1, 0.01):
            raise InvalidInput(
                "graph='code' has its own constants (0.01 and 0.1) and reads neither epsilon nor sigma2. "
                f"Got epsilon={self.epsilon!r}, sigma2={self.sigma2!r}: leave them out, or use graph='paper'."
            )

    @property
    def needs(self) -> frozenset[Signal]:
        """The field of the table, or the probe, that the graph is built from; nothing for alpha = 0."""
        return frozenset({_NEEDS[self.similarity]}) if self.alpha > 0 else frozenset()

    @property
    def _probes(self) -> bool:
        return self.alpha > 0 and self.similarity in _PROBED

    @property
    def _rule(self) -> GraphRule:
        cosine = self.similarity in _PROBED
        return GraphRule(variant=self.graph, epsilon=self.epsilon, sigma2=self.sigma2, cosine=cosine)

    def init(self, clients: Clients, rng: np.random.Generator) -> FedGSState:
        """No client is selected yet. A graph from the table is built here."""
        graph = self._table_graph(clients)
        return FedGSState(
            counts=np.full(len(clients), np.nan),
            prototype=graph.prototype,
            distance=graph.distance,
            known=np.empty(0, dtype=np.int64),
            vectors=np.empty((0, 0)),
            known_prototype=np.empty(0, dtype=np.int64),
            known_distance=np.empty((0, 0)),
        )

    def _table_graph(self, clients: Clients) -> Graph:
        if self._probes:
            return Graph(np.empty(0, dtype=np.int64), np.empty((0, 0)))
        if self.alpha == 0:
            # One prototype for all: the solver takes its best candidates, those with the smallest counts.
            return Graph(np.zeros(len(clients), dtype=np.int64), np.zeros((1, 1)))
        if self.similarity == "labels":
            return build_graph(_shares(_given(clients.label_histogram)), self._rule, self.max_prototypes)
        features = _given(clients.features)
        if self.similarity == "features":
            return build_graph(features, self._rule, self.max_prototypes)
        if features.shape != (len(clients), len(clients)):
            raise InvalidInput(
                "similarity='products' needs Clients.features to hold the similarity of every client to every client, "
                f"shape ({len(clients)}, {len(clients)}). Got {features.shape}."
            )
        return graph_of_similarities(features, self._rule)

    def probe(self, state: FedGSState, context: RoundContext, rng: np.random.Generator) -> tuple[Probe, ...]:
        """Ask the available clients whose vector is not known. A client that does not answer is asked again."""
        if not self._probes:
            return ()
        unknown = context.available.copy()
        unknown[state.known] = False
        asked = np.flatnonzero(unknown)
        return (Probe(clients=asked, signal=_NEEDS[self.similarity]),) if len(asked) else ()

    def select(
        self, state: FedGSState, context: RoundContext, rng: np.random.Generator
    ) -> tuple[Selection, FedGSState]:
        """Solve eq. 14 among the available clients."""
        for measurement in context.measurements:
            state = self._with_answers(state, measurement)
        counts = _started(state.counts, context.available)
        graph = self._graph_of(state, len(counts))
        eligible = np.flatnonzero(context.available)
        size = min(context.budget, len(eligible))
        total = len(counts)
        balance = -(2 * (counts[eligible] - counts.mean() - size / total) + 1) / max(total - 1, 1)
        pair = graph.distance * self._pair_weight(size, total)
        cohort = best_cohort(balance, graph.prototype[eligible], pair, size, rng)
        chosen = eligible[cohort.positions]
        counts[chosen] += 1
        diagnostics = {
            "objective": cohort.objective,
            "mean_distance": _mean_distance(graph, chosen),
            "count_variance": float(counts.var(ddof=1)) if total > 1 else 0.0,
            "swaps": cohort.swaps,
        }
        if self._probes:
            diagnostics["known_clients"] = len(state.known)
        return Selection(clients=chosen, diagnostics=diagnostics), replace(state, counts=counts)

    def _pair_weight(self, size: int, total: int) -> float:
        """The factor of one unordered pair's distance in the objective."""
        pairs = size * (size - 1) if self.objective == "mean-distance" else total * (total - 1)
        return 2 * self.alpha / pairs if pairs else 0.0

    def _graph_of(self, state: FedGSState, total: int) -> Graph:
        """The graph of all clients. Those not known yet share one more node, at the mean distance from all others."""
        if not self._probes:
            return Graph(state.prototype, state.distance)
        known = Graph(state.known_prototype, state.known_distance)
        distance = np.pad(known.distance, (0, 1), constant_values=known.mean_distance())
        prototype = np.full(total, len(known.distance), dtype=np.int64)
        prototype[state.known] = known.prototype
        return Graph(prototype, distance)

    def _with_answers(self, state: FedGSState, measurement: Measurement) -> FedGSState:
        """Build the graph again with the new vectors."""
        values = measurement.values.reshape(len(measurement.clients), -1)
        answered = ~np.isnan(values).any(axis=1)
        if not answered.any():
            return state
        known, vectors = state.known, state.vectors
        if len(known) == 0:
            vectors = np.empty((0, values.shape[1]))
        if values.shape[1] != vectors.shape[1]:
            raise InvalidInput(
                f"The probe {_NEEDS[self.similarity].value!r} must give vectors of the same length in every round: "
                f"{vectors.shape[1]} numbers so far, now {values.shape[1]}."
            )
        known = np.concatenate([known, measurement.clients[answered]])
        vectors = np.concatenate([vectors, values[answered]])
        order = np.argsort(known, kind="stable")
        known, vectors = known[order], vectors[order]
        graph = build_graph(vectors, self._rule, self.max_prototypes)
        return replace(
            state, known=known, vectors=vectors, known_prototype=graph.prototype, known_distance=graph.distance
        )


def cohort_reference(
    counts: FloatArray, distance: FloatArray, available: BoolArray, budget: int, *, alpha: float, objective: str
) -> tuple[IntArray, float]:
    """Equation 14 by enumeration: the best cohort of available clients and its value, for (N, N) distances."""
    total, size = len(counts), min(budget, int(available.sum()))
    best: tuple[float, tuple[int, ...]] = (-np.inf, ())
    for cohort in combinations(np.flatnonzero(available).tolist(), size):
        chosen = np.isin(np.arange(total), cohort).astype(np.float64)  # s
        imbalance = 2 * (counts - counts.mean() - size / total) + 1  # z
        pairs = size * (size - 1) if objective == "mean-distance" else total * (total - 1)
        diversity = float(chosen @ distance @ chosen) / pairs
        best = max(best, (alpha * diversity - float(imbalance @ chosen) / (total - 1), cohort))
    return np.array(best[1], dtype=np.int64), best[0]


def _given(field: FloatArray | None) -> FloatArray:
    if field is None:  # a session raises at its start; a direct call of init ends here
        raise InvalidInput("FedGS needs the field of Clients that its `needs` names. Got None.")
    return field


def _shares(histogram: FloatArray) -> FloatArray:
    """The share of each label; all 0 for a client without examples."""
    total = histogram.sum(axis=1, keepdims=True)
    shares: FloatArray = np.divide(histogram, total, out=np.zeros_like(histogram), where=total > 0)
    return shares


def _started(counts: FloatArray, available: BoolArray) -> FloatArray:
    """Counts with newcomers at the mean of the others that are available now, or of all others, or at 0.

    Clients that left for good keep their rows and their small counts. They must not pull newcomers below those
    who stay.
    """
    fresh = np.isnan(counts)
    if not fresh.any():
        return counts.copy()
    others = counts[~fresh & available] if (~fresh & available).any() else counts[~fresh]
    return np.where(fresh, float(others.mean()) if len(others) else 0.0, counts)


def _mean_distance(graph: Graph, chosen: IntArray) -> float:
    """The mean distance within the cohort; 0 if there is no pair."""
    if len(chosen) < 2:
        return 0.0
    return Graph(graph.prototype[chosen], graph.distance).mean_distance()
