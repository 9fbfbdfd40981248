"""herd: choose the cohort whose weighted mean matches the whole population, and remember what every client is owed.

Notation: p_k importance; m clients per round; a_k how often client k was available so far; z_k a description of it.
    q_k = p_k m, cut at a_k and filled up so that the rates sum to m: how often client k can and should be chosen;
    h_k = p_k / q_k, the weight that gives a client chosen so often the share p_k of all weight;
    g_k = the same if all clients were always available (a_k = 1).

State: two credits per client. In every round p_k arrives, and the weight with which a client was chosen is paid.
    c_k   the debt since the start. A client that was away is owed more. In the long run client k is selected with the
          share p_k of all weight, if the availability allows it (docs/policies/herd.md has the condition and the
          proof). A client is owed at most 30 h_k: one that is owed more has probably left. A newcomer starts at the
          mean of the available clients.
    b_k   the same with a short memory: its old value fades by the share `fade` per round. It says which part of the
          population the latest cohorts left out.

Decision: among the available clients choose S, |S| = m, that minimises

    J(S) = alpha (|Z'b - sum over S of g_k z_k|^2 + sum over S of g_k^2 v_k) / kappa
           + (1 - alpha) sum over k of (c_k - [k in S] h_k)^2 / h_k

with kappa the mean of g_k |z_k|^2 and v_k the uncertainty of z_k (below). Few clients cannot match a population, so
alpha is at most 4 m / (4 m + 1). The first term makes the cohort stand for the whole population, the second one
balances the debt. The search takes one client after the other, the best one first, and then the best swaps.

Weights: those w_k in [h_k / 2, 2 h_k] that minimise J for the chosen cohort, with w_k for g_k and h_k; scaled so that
they sum to 1.

z_k comes from the updates that the server receives anyway (`source="updates"`): the sketch of the client's update,
normalised, averaged with the one before it and centred over the known clients. The sketch of a classifier is the update
of the last layer's bias: the client's label mix minus what the model predicts. Other sources are the label shares and
the features in the table. A client that is not known yet has z_k = 0, which fits into every cohort: herd tries it soon.
That must not be a way to buy places. So v_k is the mean of |z|^2 over the known clients, the expected square of what an
unknown client would add, for a client that is still unknown after three attempts and for an unknown client that joined
later than the first ones. These are chosen for their debt. v_k is 0 for all others.

A client that was chosen has paid, whether it completed or not; otherwise a client that never answers would be chosen
for ever.

>>> half, none = np.full(4, 0.5), np.zeros(4)
>>> reference(half / 2, half / 2, np.array([[1.0], [1.0], [-1.0], [-1.0]]), none, half, half, 0.95, 2)
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
_MOST_OWED = 30.0
"""Places that a client is owed at most, in units of h_k. A client that is owed more has probably left."""
_TRIES = 3
"""A client that was chosen this often and is still unknown counts as silent: two failures may be chance."""
_LOWEST, _HIGHEST = 0.5, 2.0
"""Bounds of a weight, in units of h_k."""
_WEIGHT_PASSES = 10


def reference(
    debt: FloatArray,
    recent: FloatArray,
    described: FloatArray,
    uncertain: FloatArray,
    share: FloatArray,
    due: FloatArray,
    alpha: float,
    size: int,
) -> tuple[int, ...]:
    """J(S) as printed above, minimised over all cohorts: c, b, z (N, s), v, g, h."""
    kappa = (share * (described**2).sum(axis=1)).mean() or 1.0

    def objective(cohort: tuple[int, ...]) -> float:
        chosen = np.isin(np.arange(len(debt)), cohort)
        matching = described.T @ recent - described.T @ np.where(chosen, share, 0.0)
        doubt = (np.where(chosen, share, 0.0) ** 2 * uncertain).sum()
        balance = (debt - np.where(chosen, due, 0.0)) ** 2 / due
        return float(alpha * (matching @ matching + doubt) / kappa + (1 - alpha) * balance.sum())

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
    present: FloatArray = per_client()
    """(N,) rounds in which the client was available."""
    age: FloatArray = per_client()
    """(N,) rounds since the client joined."""
    silent: IntArray = per_client()
    """(N,) how often the client was chosen, if it has sent no sketch yet; 0 for a known client."""


@final
@dataclass(frozen=True, kw_only=True)
class Herd(Policy[HerdState]):
    """Choose cohorts that stand for the whole population, and balance over time what every client is given.

    Args:
        alpha: weight of matching the population against balancing the debt; 0 only balances. A cohort of m clients uses
            at most 4 m / (4 m + 1).
        fade: share of the recent credit that is forgotten per round; 1 matches every cohort on its own, 0 matches all
            cohorts so far together.
        source: what describes a client: "updates", "labels", "features" or "none" (then alpha has no effect).
        swaps: improve the cohort by swapping members after it was built.
    """

    alpha: float = 0.95
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
        """Return a state in which no client is owed anything; a newcomer starts like that too."""
        nothing = np.zeros(len(clients))
        return HerdState(
            known=np.empty(0, dtype=np.int64),
            sketches=np.empty((0, 0)),
            debt=nothing,
            recent=nothing,
            present=nothing,
            age=nothing,
            silent=np.zeros(len(clients), dtype=np.int64),
        )

    def select(self, state: HerdState, context: RoundContext, rng: np.random.Generator) -> tuple[Selection, HerdState]:
        """Minimise J over the cohorts of available clients."""
        importance = context.clients.importance
        candidates = np.flatnonzero(context.available)
        debt, recent = _joined(state, candidates) + importance, state.recent + importance
        present, age = state.present + context.available, state.age + 1
        size = min(context.budget, len(candidates))
        share = _over(importance, selection_rates(importance, max(size, 1)))
        # One more round of presence than was seen: an estimate of 0 would make the weight infinite.
        due = _over(importance, selection_rates(importance, max(size, 1), most=(present + 1) / (age + 1)))
        debt = _limited(debt, importance, due)
        described = self._described(state, context.clients)
        lengths = np.einsum("ij,ij->i", described, described)
        kappa = float((share * lengths).mean()) or 1.0
        target = described.T @ recent
        doubtful = (state.silent >= _TRIES) | ((lengths == 0) & (age < age.max(initial=0)))
        uncertain = np.where(doubtful, lengths.sum() / max(np.count_nonzero(lengths), 1), 0.0)
        chosen, mismatch = self._search(debt, target, described, uncertain, share, due, kappa, candidates, size, rng)
        raw = self._weights(debt[chosen], described[chosen], uncertain[chosen], due[chosen], target, kappa)
        total = raw.sum()
        weights = raw / total if total > 0 else np.full(size, 1 / max(size, 1))
        paid = np.zeros_like(debt)
        paid[chosen] = weights
        diagnostics = {
            "largest_debt": float(np.abs(debt - paid).max()),
            "mismatch": mismatch,
            "known": int(np.count_nonzero(lengths)),
            "silent": int(np.count_nonzero(state.silent >= _TRIES)),
        }
        state = replace(state, debt=debt - paid, recent=(recent - paid) * (1 - self.fade), present=present, age=age)
        return Selection(clients=chosen, weights=weights, diagnostics=diagnostics), state

    def _alpha(self, size: int) -> float:
        """The weight of matching for a cohort of this size."""
        return min(self.alpha, 4 * size / (4 * size + 1))

    def _weights(
        self,
        debt: FloatArray,
        described: FloatArray,
        uncertain: FloatArray,
        due: FloatArray,
        target: FloatArray,
        kappa: float,
    ) -> FloatArray:
        """(m,) the weights in [h_k / 2, 2 h_k] that minimise J for the chosen cohort, by coordinate descent."""
        lowest, highest = _LOWEST * due, _HIGHEST * due
        weights = np.clip(debt, lowest, highest)
        alpha = self._alpha(len(due))
        scale = alpha / kappa
        lengths = np.einsum("ij,ij->i", described, described)
        if not lengths.any():
            return weights
        rest = target - described.T @ weights
        for _ in range(_WEIGHT_PASSES):
            for k in np.flatnonzero(due):
                toward = described[k] @ rest + lengths[k] * weights[k]
                curvature = scale * (lengths[k] + uncertain[k]) + (1 - alpha) / due[k]
                best = (scale * toward + (1 - alpha) * debt[k] / due[k]) / curvature
                new = min(max(best, lowest[k]), highest[k])
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
        target: FloatArray,
        described: FloatArray,
        uncertain: FloatArray,
        share: FloatArray,
        due: FloatArray,
        kappa: float,
        candidates: IntArray,
        size: int,
        rng: np.random.Generator,
    ) -> tuple[IntArray, float]:
        """Greedy construction and best swaps. The fall of J for one more client k, with the mismatch r left so far, is

        alpha (2 g_k z_k.r - g_k^2 (|z_k|^2 + v_k)) / kappa + (1 - alpha) (2 c_k - h_k).
        """
        if size == len(candidates):
            rest = target - described[candidates].T @ share[candidates]
            return candidates, float(rest @ rest) / kappa
        candidates = rng.permutation(candidates)  # the first of equal candidates wins
        alpha = self._alpha(size)
        scale = alpha / kappa
        if len(candidates) > (most := max(_SHORTLIST, 20 * size)):
            square = np.einsum("ij,ij->i", described, described) + uncertain
            gain = (1 - alpha) * (2 * debt - due) + scale * share * (2 * (described @ target) - share * square)
            candidates = candidates[np.sort(np.argpartition(-gain[candidates], most)[:most])]
        scaled = described[candidates] * share[candidates][:, None]
        own = (1 - alpha) * (2 * debt[candidates] - due[candidates])
        own -= scale * (np.einsum("ij,ij->i", scaled, scaled) + share[candidates] ** 2 * uncertain[candidates])
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
        """Average the normalised sketch of every completed update with the one before it; note who sent none."""
        if self.source != "updates":
            return state
        length = np.sqrt((outcome.sketch**2).sum(axis=1))
        told = outcome.completed & (length > 0)  # NaN is not larger than 0
        silent = state.silent.copy()
        unknown = ~told & ~np.isin(outcome.clients, state.known)
        silent[outcome.clients] = np.where(unknown, silent[outcome.clients] + 1, 0)
        state = replace(state, silent=silent)
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


def _joined(state: HerdState, candidates: IntArray) -> FloatArray:
    """(N,) the debt; a newcomer is owed as much as the available clients on average."""
    new = state.age == 0
    old = candidates[~new[candidates]]
    return np.where(new, state.debt[old].mean(), state.debt) if len(old) and new.any() else state.debt


def _limited(debt: FloatArray, importance: FloatArray, due: FloatArray) -> FloatArray:
    """(N,) at most `_MOST_OWED` places per client. After a cut, the others' mean debt is their mean importance."""
    gone = debt > _MOST_OWED * due
    if not gone.any() or gone.all():
        return debt
    others = debt + (importance[~gone].mean() - debt[~gone].mean())
    return np.where(gone, _MOST_OWED * due, others)


def _over(importance: FloatArray, rates: FloatArray) -> FloatArray:
    """p / q, and 0 for a client without importance."""
    return np.divide(importance, rates, out=np.zeros_like(importance), where=rates > 0)


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
