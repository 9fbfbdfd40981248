"""herd: choose the cohort whose weighted mean matches the whole population, and remember what every client is owed.

Notation: p_k importance; m clients per round; q_k the rate at which client k should be chosen, p_k m cut at 1 and
filled up so that the rates sum to m; h_k = p_k / q_k the weight of a chosen client; z_k a description of the client.

State: two credits per client. In every round p_k arrives, and the weight with which a client was chosen is paid.
    c_k   the debt since the start. It is bounded, so that in the long run client k gets the share p_k of all weight,
          for any availability that lets every client in again and again. A client that was away is owed more.
    b_k   the same with a short memory: its old value fades by the share `fade` per round. It says which part of the
          population the latest cohorts left out.

Decision: among the available clients choose S, |S| = m, that minimises

    J(S) = alpha |Z'b - sum over S of h_k z_k|^2 / kappa  +  (1 - alpha) sum over k of (c_k - [k in S] h_k)^2 / h_k

with kappa the mean of h_k |z_k|^2. The first term makes the cohort stand for the whole population, the second one
balances the debt. The search takes one client after the other, the best one first, and then the best swaps.

Weights: those in [h_k / 4, 3 h_k] that minimise J for the chosen cohort, scaled so that they sum to 1.

z_k comes from the updates that the server receives anyway (`source="updates"`): the sketch of the client's update,
normalised, averaged with the one before it and centred over the known clients. The sketch of a classifier is the update
of the last layer's bias: the client's label mix minus what the model predicts. Other sources are the label shares and
the features in the table. A client that is not known yet has z_k = 0 and is chosen for its debt.

A client that was chosen has paid, whether it completed or not; otherwise a client that never answers would be chosen
for ever.

>>> reference(np.full(4, 0.25), np.full(4, 0.25), np.array([[1.0], [1.0], [-1.0], [-1.0]]), np.full(4, 0.5), 0.95, 2)
(0, 2)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import ClassVar, final

import numpy as np

from fedpick.core.arrays import FloatArray, IntArray
from fedpick.core.policy import Policy, Signal
from fedpick.core.state import per_client
from fedpick.core.types import Clients, Outcome, RoundContext, Selection
from fedpick.core.validation import choice, flag, number
from fedpick.policies._rates import selection_rates

__all__ = ["Herd", "HerdState", "reference"]

_NEEDS = {"updates": Signal.SKETCH, "labels": Signal.LABEL_HISTOGRAM, "features": Signal.FEATURES}
_SHORTLIST = 20_000
"""Candidates that the search compares; of more, those with the largest first gain."""
_MOST_SWAPS = 100
_WEIGHT_PASSES = 10


def reference(
    debt: FloatArray, recent: FloatArray, described: FloatArray, due: FloatArray, alpha: float, size: int
) -> tuple[int, ...]:
    """J(S) as printed above, minimised over all cohorts: debt c, recent b, described (N, s) z, due h."""
    kappa = (due * (described**2).sum(axis=1)).mean() or 1.0

    def objective(cohort: tuple[int, ...]) -> float:
        chosen = np.isin(np.arange(len(debt)), cohort)
        matching = described.T @ recent - described.T @ np.where(chosen, due, 0.0)
        balance = (debt - np.where(chosen, due, 0.0)) ** 2 / due
        return float(alpha * (matching @ matching) / kappa + (1 - alpha) * balance.sum())

    return min(combinations(range(len(debt)), size), key=objective)


@dataclass(frozen=True)
class HerdState:
    """What every client is owed, and how it is described."""

    known: IntArray
    """(K,) the clients whose sketch is known, ascending; clients never change their number."""
    sketches: FloatArray
    """(K, s) running mean of their normalised sketches."""
    debt: FloatArray = per_client()
    """(N,) c, before the importance of the coming round is added."""
    recent: FloatArray = per_client()
    """(N,) b, likewise."""


@final
@dataclass(frozen=True, kw_only=True)
class Herd(Policy[HerdState]):
    """Choose cohorts that stand for the whole population, and balance over time what every client is given.

    Args:
        alpha: weight of matching the population against balancing the debt; 0 only balances.
        fade: share of the recent credit that is forgotten per round; 1 matches every cohort on its own, 0 matches all
            cohorts so far together.
        source: what describes a client: "updates", "labels", "features" or "none" (then alpha has no effect).
        swaps: improve the cohort by swapping members after it was built.
    """

    alpha: float = 0.98
    fade: float = 0.8
    source: str = "updates"
    swaps: bool = True

    reference: ClassVar[str] = """
        @misc{fedpick2026herd,
          title = {herd: matching cohorts with memory},
          author = {{The fedpick authors}},
          year = {2026},
          note = {Combines ideas of FedGS, FedCor and kernel herding}
        }"""

    def __post_init__(self) -> None:
        number(self, "alpha", "[0, 1)")
        number(self, "fade", "[0, 1]")
        choice(self, "source", (*_NEEDS, "none"))
        flag(self, "swaps")

    @property
    def needs(self) -> frozenset[Signal]:
        """What describes a client; nothing without a source."""
        return frozenset({_NEEDS[self.source]}) if self.source in _NEEDS and self.alpha > 0 else frozenset()

    def init(self, clients: Clients, rng: np.random.Generator) -> HerdState:
        """Nobody is owed anything; a newcomer starts like that too."""
        nobody = np.empty(0, dtype=np.int64)
        return HerdState(
            known=nobody, sketches=np.empty((0, 0)), debt=np.zeros(len(clients)), recent=np.zeros(len(clients))
        )

    def select(self, state: HerdState, context: RoundContext, rng: np.random.Generator) -> tuple[Selection, HerdState]:
        """Minimise J over the cohorts of available clients."""
        importance = context.clients.importance
        debt, recent = state.debt + importance, state.recent + importance
        candidates = np.flatnonzero(context.available)
        size = min(context.budget, len(candidates))
        rates = selection_rates(importance, max(size, 1))
        due = np.divide(importance, rates, out=np.zeros_like(importance), where=rates > 0)
        described = self._described(state, context.clients)
        kappa = float((due * np.einsum("ij,ij->i", described, described)).mean()) or 1.0
        chosen, objective = self._search(debt, recent, described, due, candidates, size, rng)
        raw = self._weights(debt[chosen], described[chosen], due[chosen], described.T @ recent, kappa)
        total = raw.sum()
        weights = raw / total if total > 0 else np.full(size, 1 / max(size, 1))
        paid = np.zeros_like(debt)
        paid[chosen] = weights
        diagnostics = {
            "largest_debt": float(np.abs(debt - paid).max()),
            "mismatch": objective,
            "known": int(np.count_nonzero(described.any(axis=1))),
        }
        state = replace(state, debt=debt - paid, recent=(recent - paid) * (1 - self.fade))
        return Selection(clients=chosen, weights=weights, diagnostics=diagnostics), state

    def _weights(
        self, debt: FloatArray, described: FloatArray, due: FloatArray, target: FloatArray, kappa: float
    ) -> FloatArray:
        """(m,) the weights in [h_k / 4, 3 h_k] that minimise J for the chosen cohort, by coordinate descent."""
        weights = np.clip(debt, due / 4, 3 * due)
        scale = self.alpha / kappa
        lengths = np.einsum("ij,ij->i", described, described)
        if not lengths.any():
            return weights
        rest = target - described.T @ weights
        for _ in range(_WEIGHT_PASSES):
            for k in np.flatnonzero(due):
                toward = described[k] @ rest + lengths[k] * weights[k]
                best = (scale * toward + (1 - self.alpha) * debt[k] / due[k]) / (
                    scale * lengths[k] + (1 - self.alpha) / due[k]
                )
                new = min(max(best, due[k] / 4), 3 * due[k])
                rest = rest + described[k] * (weights[k] - new)
                weights[k] = new
        return weights

    def _described(self, state: HerdState, clients: Clients) -> FloatArray:
        """(N, s) z: centred over the known clients, 0 for the others."""
        known, raw = state.known, state.sketches
        if self.source == "labels" and clients.label_histogram is not None:
            known = np.flatnonzero(clients.label_histogram.any(axis=1))
            raw = clients.label_histogram[known] / clients.label_histogram[known].sum(axis=1, keepdims=True)
        elif self.source == "features" and clients.features is not None:
            known, raw = np.arange(len(clients)), clients.features
        if self.alpha == 0 or self.source == "none" or len(known) == 0:
            return np.zeros((len(clients), 1))
        described = np.zeros((len(clients), raw.shape[1]))
        described[known] = raw - raw.mean(axis=0)
        return described

    def _search(
        self,
        debt: FloatArray,
        recent: FloatArray,
        described: FloatArray,
        due: FloatArray,
        candidates: IntArray,
        size: int,
        rng: np.random.Generator,
    ) -> tuple[IntArray, float]:
        """Greedy construction and best swaps. The fall of J for one more client k, with the mismatch r left so far, is

        alpha (2 h_k z_k.r - h_k^2 |z_k|^2) / kappa + (1 - alpha) (2 c_k - h_k).
        """
        target = described.T @ recent
        kappa = float((due * np.einsum("ij,ij->i", described, described)).mean()) or 1.0
        if size == len(candidates):
            rest = target - described[candidates].T @ due[candidates]
            return candidates, float(rest @ rest) / kappa
        candidates = rng.permutation(candidates)  # the first of equal candidates wins
        scaled = described[candidates] * due[candidates][:, None]
        scale = self.alpha / kappa
        own = (1 - self.alpha) * (2 * debt[candidates] - due[candidates])
        own -= scale * np.einsum("ij,ij->i", scaled, scaled)
        if len(candidates) > max(_SHORTLIST, 20 * size):
            first = own + 2 * scale * (scaled @ target)
            kept = np.sort(np.argpartition(-first, max(_SHORTLIST, 20 * size))[: max(_SHORTLIST, 20 * size)])
            candidates, scaled, own = candidates[kept], scaled[kept], own[kept]
        members: list[int] = []
        rest = target.copy()
        free = np.ones(len(candidates), dtype=bool)
        for _ in range(size):
            gain = np.where(free, own + 2 * scale * (scaled @ rest), -np.inf)
            best = int(gain.argmax())
            members.append(best)
            free[best] = False
            rest = rest - scaled[best]
        if self.swaps and scale > 0 and members:
            rest = _swap(members, free, own, scaled, scale, rest)
        return np.sort(candidates[members]), float(rest @ rest) / kappa

    def observe(self, state: HerdState, outcome: Outcome) -> HerdState:
        """Average the normalised sketch of every completed update with the one before it."""
        if self.source != "updates" or outcome.sketch.shape[1] == 0:
            return state
        length = np.sqrt((outcome.sketch**2).sum(axis=1))
        told = outcome.completed & (length > 0)  # NaN is not larger than 0
        if not told.any():
            return state
        clients, new = outcome.clients[told], outcome.sketch[told] / length[told][:, None]
        if state.sketches.shape[1] != new.shape[1]:  # nothing known yet, or another model
            state = replace(state, known=np.empty(0, dtype=np.int64), sketches=np.empty((0, new.shape[1])))
        order = np.argsort(clients)
        clients, new = clients[order], new[order]
        places = np.searchsorted(state.known, clients)
        seen = np.isin(clients, state.known[places[places < len(state.known)]])
        sketches = state.sketches.copy()
        sketches[places[seen]] = 0.5 * (sketches[places[seen]] + new[seen])
        return replace(
            state,
            known=np.insert(state.known, places[~seen], clients[~seen]),
            sketches=np.insert(sketches, places[~seen], new[~seen], axis=0),
        )


def _swap(
    members: list[int], free: np.ndarray, own: FloatArray, scaled: FloatArray, scale: float, rest: FloatArray
) -> FloatArray:
    """Make the best swap of one member until none lowers J; returns the mismatch that is left."""
    for _ in range(_MOST_SWAPS):
        inside = np.array(members)
        # Removing member i and adding j: the gain of j at the mismatch without i, minus that of i there.
        base = own + 2 * scale * (scaled @ rest)
        cross = 2 * scale * (scaled[inside] @ scaled.T)
        leaving = base[inside] + 2 * scale * np.einsum("ij,ij->i", scaled[inside], scaled[inside])
        change = np.where(free, base + cross, -np.inf) - leaving[:, None]
        place, new = np.unravel_index(int(change.argmax()), change.shape)
        if change[place, new] <= 1e-12 * (np.abs(own).max() + 1e-300):
            break
        old = members[place]
        rest = rest + scaled[old] - scaled[new]
        members[place] = int(new)
        free[old], free[new] = True, False
    return rest
