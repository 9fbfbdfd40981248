"""Fed-CBS: cohorts whose labels together are balanced (Zhang et al., ICML 2023).

Notation: h_k(b) examples of client k with label b, of L labels; t the round, from 1; T_k how often client k was
selected. The class imbalance of a cohort S is the squared distance of its pooled label shares from equal ones:

    QCID(S) = sum over b of (sum over k in S of h_k(b) / sum over k in S of n_k - 1/L)^2

The cohort is drawn one client after the other, with probabilities

    first client k:     proportional to QCID({k})^(-beta_1) + exploration * sqrt(3 ln t / (2 T_k))
    j-th client k:      proportional to QCID(S + k)^(-beta_j),  S being the j - 1 clients drawn so far

and beta_j = power * j. A draw instead of the best client in every step is the point of the paper: the best first client
need not be in the best cohort. Weights are by size, as in FedAvg.

The cost is O(m n L) for n available clients. From more than 20,000 (or 20 m) available clients the first client is
drawn as above; the others are drawn from that many, chosen uniformly in each round.

Deviations: the authors compute QCID under homomorphic encryption, from all scalar products of two clients, which is
quadratic in N; sums of histograms give the same number. T_k counts as 1 before the first selection, and QCID is at
least 1e-12, where the paper divides by 0. A client without examples has the QCID of a client with a single label. A
client that was selected counts in T_k whether it completed or not. No code of the authors was found; the defaults are
those of independent implementations.

>>> histograms = np.array([[4.0, 0.0], [0.0, 4.0], [3.0, 1.0]])
>>> reference(histograms, [0], np.ones(3), t=1, exploration=10.0, power=1.0).round(6)  # QCID 0 with 1, 0.28 with 2
array([0., 1., 0.])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np

from fedpick.core.arrays import FloatArray, IntArray
from fedpick.core.errors import InvalidInput
from fedpick.core.policy import Policy, Signal
from fedpick.core.sampling import sample_uniform
from fedpick.core.state import derived, per_client
from fedpick.core.types import Clients, RoundContext, Selection
from fedpick.core.validation import number

__all__ = ["CohortCounts", "FedCBS", "reference"]

_LEAST = 1e-12
_SHORTLIST = 20_000


def reference(
    histograms: FloatArray, drawn: Sequence[int], times: FloatArray, t: int, exploration: float, power: float
) -> FloatArray:
    """(n,) the probability of every client to be drawn next, after those in `drawn`."""
    weight = np.zeros(len(histograms))
    for k in set(range(len(histograms))) - set(drawn):
        pooled = histograms[[*drawn, k]].sum(axis=0)
        shares = pooled / pooled.sum() if pooled.sum() else np.eye(len(pooled))[0]
        imbalance = max(((shares - 1 / len(shares)) ** 2).sum(), _LEAST)
        weight[k] = imbalance ** (-power * (len(drawn) + 1))
        if not drawn:
            weight[k] += exploration * math.sqrt(3 * math.log(t) / (2 * max(times[k], 1)))
    probabilities: FloatArray = weight / weight.sum()
    return probabilities


@dataclass(frozen=True)
class CohortCounts:
    """How often each client was selected."""

    alone: FloatArray = derived()
    """(N,) QCID of every client alone."""
    times: IntArray = per_client()
    """(N,) T_k."""


@final
@dataclass(frozen=True, kw_only=True)
class FedCBS(Policy[CohortCounts]):
    """Draw cohorts whose pooled labels are balanced, from the clients' label histograms.

    Args:
        exploration: weight of clients that were selected rarely, in the draw of the first client.
        power: beta_j = power * j; 0 draws uniformly, apart from the exploration; a large one takes the best client.
    """

    exploration: float = 10.0
    power: float = 1.0

    reference: ClassVar[str] = """
        @inproceedings{zhang2023fedcbs,
          title = {{Fed-CBS}: A Heterogeneity-Aware Client Sampling Mechanism for Federated Learning via
                   Class-Imbalance Reduction},
          author = {Zhang, Jianyi and Li, Ang and Tang, Minxue and Sun, Jingwei and Chen, Xiang and Zhang, Fan and
                    Chen, Changyou and Chen, Yiran and Li, Hai},
          booktitle = {International Conference on Machine Learning (ICML)},
          year = {2023}
        }"""

    def __post_init__(self) -> None:
        number(self, "exploration", "[0, inf)")
        number(self, "power", "[0, inf)")

    @property
    def needs(self) -> frozenset[Signal]:
        """The label histograms."""
        return frozenset({Signal.LABEL_HISTOGRAM})

    def init(self, clients: Clients, rng: np.random.Generator) -> CohortCounts:
        """No client was selected yet."""
        histograms = _histograms(clients)
        excess, sizes = _excess(histograms)
        alone = _imbalance(np.einsum("ij,ij->i", excess, excess), sizes, histograms.shape[1])
        return CohortCounts(alone=alone, times=np.zeros(len(clients), dtype=np.int64))

    def select(
        self, state: CohortCounts, context: RoundContext, rng: np.random.Generator
    ) -> tuple[Selection, CohortCounts]:
        """Draw one client after the other."""
        candidates = np.flatnonzero(context.available)
        size = min(context.budget, len(candidates))
        if size == 0:
            return Selection(clients=candidates[:0]), state
        # The largest of (logarithm of the weight + Gumbel noise) is a draw by weight, and cannot overflow.
        first = candidates[
            np.argmax(self._first(state, candidates, context.index + 1) + rng.gumbel(size=len(candidates)))
        ]
        most = max(_SHORTLIST, 20 * context.budget)
        if len(candidates) > most:
            others = context.available.copy()
            others[first] = False
            candidates = np.append(np.sort(sample_uniform(others, most - 1, rng)), first)
        histograms = _histograms(context.clients)
        excess, sizes = _excess(histograms[candidates])
        squares = np.einsum("ij,ij->i", excess, excess)
        free = np.ones(len(candidates), dtype=bool)
        members = [int(np.flatnonzero(candidates == first)[0])]
        pooled, total = np.zeros(excess.shape[1]), 0.0
        while True:
            pooled, total = pooled + excess[members[-1]], total + sizes[members[-1]]
            free[members[-1]] = False
            if len(members) == size:
                break
            joint = squares + 2 * (excess @ pooled) + pooled @ pooled
            weight = -self.power * (len(members) + 1) * np.log(_imbalance(joint, sizes + total, len(pooled)))
            members.append(int(np.argmax(np.where(free, weight + rng.gumbel(size=len(candidates)), -np.inf))))
        chosen = candidates[members]
        times = state.times.copy()
        times[chosen] += 1
        imbalance = _imbalance(np.array([pooled @ pooled]), np.array([total]), len(pooled))[0]
        return Selection(clients=chosen, diagnostics={"imbalance": float(imbalance)}), replace(state, times=times)

    def _first(self, state: CohortCounts, candidates: IntArray, t: int) -> FloatArray:
        """Logarithms of the weights of the first draw."""
        balance = -self.power * np.log(state.alone[candidates])
        bonus = self.exploration * np.sqrt(3 * math.log(t) / (2 * np.maximum(state.times[candidates], 1)))
        return np.logaddexp(balance, np.log(bonus)) if t > 1 and self.exploration > 0 else balance


def _histograms(clients: Clients) -> FloatArray:
    if clients.label_histogram is None:  # a session raises at its start; a direct call ends here
        raise InvalidInput("FedCBS needs Clients.label_histogram. Got None.")
    return clients.label_histogram


def _excess(histograms: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Examples of each label beyond an equal share, and all examples. QCID is |sum of excess|^2 / (all examples)^2."""
    sizes = histograms.sum(axis=1)
    return histograms - sizes[:, None] / max(histograms.shape[1], 1), sizes


def _imbalance(squares: FloatArray, sizes: FloatArray, labels: int) -> FloatArray:
    single = np.full(len(sizes), 1 - 1 / max(labels, 1))
    imbalance: FloatArray = np.divide(squares, sizes**2, out=single, where=sizes > 0)
    return np.maximum(imbalance, _LEAST)
