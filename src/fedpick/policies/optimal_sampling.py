"""Optimal sampling: select clients with large updates more often, without bias (Chen, Horvath and Richtarik 2020).

Algorithm, with m = budget: let u_k = p_k |update_k|. Client k is selected with the probability

    pi_k = 1                              for the clients with the largest u,
    pi_k = (m + l - n) u_k / (u_1 + ... + u_l)   for the other l clients, those with the smallest u,

with l as large as possible so that no pi_k exceeds 1. Its weight is p_k / pi_k, so that the expected step is that of
full participation. Among all unbiased selections of m clients in the mean, this one has the least variance.
`rates_reference` is this formula as printed.

The norms come from the latest update of every client (`norms="reported"`), which costs nothing, or from all available
clients in every round as in the paper (`norms="asked"`), which makes all of them train.

Deviations:
- The paper decides independently for each client, so that more than m clients may be selected. Here exactly m are
  drawn, with the same probabilities (systematic sampling in random order).
- Norms that are not fresh may be wrong, and a client whose last update was zero would never return. The share `explore`
  of u is therefore proportional to p. It also bounds the weights.
- A client without a known norm takes the mean norm of the known ones. A client that did not complete, or reported no
  usable norm, has none until it reports again; otherwise one that died after a large update would be selected for ever.
- The claim of no bias is about the available clients: p is scaled to the sum 1 over them.
- FedLab's sampler is off by one in the set of the l smallest clients (`i <= l`). The tests check that ours sum to m.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import numpy as np

from fedpick.core.arrays import FloatArray
from fedpick.core.policy import Policy, Signal
from fedpick.core.state import per_client
from fedpick.core.types import Clients, Outcome, Probe, RoundContext, Selection
from fedpick.core.validation import choice, number
from fedpick.policies._rates import draw_by_rates, selection_rates

__all__ = ["LatestNorms", "OptimalSampling", "rates_reference"]


def rates_reference(u: FloatArray, budget: int) -> FloatArray:
    """(n,) pi, for u above 0: try every l from the largest on."""
    n = len(u)
    if budget >= n:
        return np.ones(n)
    ascending = np.argsort(u, kind="stable")
    for l in range(n, 0, -1):  # noqa: E741, as in the paper
        smallest = ascending[:l]
        if 0 < budget + l - n <= u[smallest].sum() / u[smallest].max():
            break
    pi = np.ones(n)
    pi[smallest] = (budget + l - n) * u[smallest] / u[smallest].sum()
    return pi


@dataclass(frozen=True)
class LatestNorms:
    """The norm of every client's latest update."""

    norm: FloatArray = per_client()
    """(N,) NaN if not known."""


@final
@dataclass(frozen=True, kw_only=True)
class OptimalSampling(Policy[LatestNorms]):
    """Select clients with probability proportional to the size of their updates, and divide by that probability.

    Args:
        norms: "reported" uses the norm of every client's latest update; "asked" asks all available clients for an
            update before the selection.
        explore: share of the probability that does not depend on the norms.
    """

    norms: Literal["reported", "asked"] = "reported"
    explore: float = 0.1

    unbiased: ClassVar[bool] = True
    reference: ClassVar[str] = """
        @article{chen2020optimal,
          title = {Optimal Client Sampling for Federated Learning},
          author = {Chen, Wenlin and Horvath, Samuel and Richtarik, Peter},
          journal = {arXiv preprint arXiv:2010.13723},
          year = {2020}
        }"""

    def __post_init__(self) -> None:
        choice(self, "norms", ("reported", "asked"))
        number(self, "explore", "(0, 1]")

    @property
    def needs(self) -> frozenset[Signal]:
        """The reported norm, or the answers to a probe."""
        return frozenset({Signal.UPDATE_NORM if self.norms == "reported" else Signal.UPDATE})

    def init(self, clients: Clients, rng: np.random.Generator) -> LatestNorms:
        """No norm is known."""
        return LatestNorms(norm=np.full(len(clients), np.nan))

    def probe(self, state: LatestNorms, context: RoundContext, rng: np.random.Generator) -> tuple[Probe, ...]:
        """With norms="asked": ask all available clients for their update."""
        available = np.flatnonzero(context.available)
        if self.norms == "reported" or len(available) == 0:
            return ()
        return (Probe(clients=available, signal=Signal.UPDATE),)

    def select(
        self, state: LatestNorms, context: RoundContext, rng: np.random.Generator
    ) -> tuple[Selection, LatestNorms]:
        """Draw with the optimal probabilities among the available clients."""
        clients = np.flatnonzero(context.available & (context.clients.importance > 0))
        importance = context.clients.importance[clients]
        importance = importance / (importance.sum() or 1.0)
        norm = state.norm
        if context.measurements:
            norm = np.full(len(context.clients), np.nan)
            norm[context.measurements[0].clients] = np.sqrt((context.measurements[0].values ** 2).sum(axis=1))
        rates = selection_rates(self._sizes(importance, norm[clients]), context.budget)
        drawn = draw_by_rates(rates, rng)
        diagnostics = {"known": int(np.count_nonzero(~np.isnan(norm))), "certain": int(np.count_nonzero(rates >= 1))}
        weights = importance[drawn] / rates[drawn]
        return Selection(clients=clients[drawn], weights=weights, renormalize=False, diagnostics=diagnostics), state

    def _sizes(self, importance: FloatArray, norm: FloatArray) -> FloatArray:
        """(n,) u, scaled to the sum 1 and mixed with the importance."""
        known = ~np.isnan(norm)
        u = importance * np.where(known, norm, norm[known].mean() if known.any() else 1.0)
        total = u.sum()
        return self.explore * importance + (1 - self.explore) * (u / total if total > 0 else importance)

    def observe(self, state: LatestNorms, outcome: Outcome) -> LatestNorms:
        """Remember the norms of the completed updates."""
        norm = state.norm.copy()
        norm[outcome.clients] = np.where(outcome.completed, outcome.update_norm, np.nan)
        return LatestNorms(norm=norm)
