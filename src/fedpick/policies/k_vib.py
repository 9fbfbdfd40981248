"""K-Vib: learn from past updates with which probability to select each client, without bias (Zeng et al. 2023).

Algorithm, with m = budget, N clients and the state omega_k, 0 at first:

1. y_k proportional to sqrt(omega_k + gamma), at most 1 each, with the sum m;
2. client k is selected with the probability pi_k = (1 - theta) y_k + theta m / N and has the weight p_k / pi_k;
3. for each selected client, omega_k grows by (p_k |update_k|)^2 / pi_k.

omega_k is an unbiased estimate of the sum of all (p_k |update_k|)^2 so far, so that step 1 tends to the probabilities
that would have had the least variance over all rounds. `probabilities_reference` is steps 1 and 2 as printed.

Options: theta = (N / (T m))^(1/3) suits T rounds; the default 0.3 is about that of N = 100, m = 10
and T = 400. gamma=None takes G^2 N / (theta m), where G^2 is the mean of (p_k |update_k|)^2 in the first round with
reports.

Deviations:
- The paper decides independently for each client, so that more than m clients may be selected. Here exactly m are
  drawn, with the same probabilities (systematic sampling in random order).
- Only available clients are drawn: N is their number, and p is scaled to the sum 1 over them. The claim of no bias is
  about them.
- A client that joins later starts with the mean omega of the others: with 0 it would count as one without news.
- A client that did not complete, or reported no usable norm, adds nothing.
- The authors' code takes y proportional to omega + gamma, without the root; theirs is the fixed r = 0.1 in place of
  G^2. The paper's rule is used here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np

from fedpick.core.arrays import FloatArray
from fedpick.core.policy import Policy, Signal
from fedpick.core.state import per_client
from fedpick.core.types import Clients, Outcome, RoundContext, Selection
from fedpick.core.validation import number
from fedpick.policies._rates import draw_by_rates, selection_rates

__all__ = ["KVib", "KVibState", "probabilities_reference"]

_MOST_GAMMA = 1e300
"""A tiny theta would make gamma infinite, and the rates NaN."""


def probabilities_reference(omega: FloatArray, gamma: float, theta: float, budget: int) -> FloatArray:
    """(N,) pi: steps 1 and 2, with the scale of y found by bisection."""
    count = len(omega)
    root = np.sqrt(omega + gamma)
    low, high = 0.0, budget / root.min()
    for _ in range(200):
        scale = (low + high) / 2
        if np.minimum(1.0, scale * root).sum() < min(budget, count):
            low = scale
        else:
            high = scale
    pi: FloatArray = (1 - theta) * np.minimum(1.0, high * root) + theta * min(budget, count) / count
    return pi


@dataclass(frozen=True)
class KVibState:
    """What was learned about the size of every client's updates."""

    gamma: float
    """0 until the first report, if it is not given."""
    omega: FloatArray = per_client()
    """(N,) NaN for a client that joined after the latest selection."""
    importance: FloatArray = per_client()
    """(N,) p at the latest selection."""
    rate: FloatArray = per_client()
    """(N,) pi at the latest selection."""


@final
@dataclass(frozen=True, kw_only=True)
class KVib(Policy[KVibState]):
    """Learn probabilities with little variance from the norms of past updates, and divide by them.

    Args:
        theta: share of the probability that is equal for all clients.
        gamma: added to omega; a large value learns slowly. None: from the first reports.
    """

    theta: float = 0.3
    gamma: float | None = None

    unbiased: ClassVar[bool] = True
    reference: ClassVar[str] = """
        @article{zeng2023enhanced,
          title = {Enhanced Federated Optimization: Adaptive Unbiased Client Sampling with Reduced Variance},
          author = {Zeng, Dun and Xu, Zenglin and Pan, Yu and Luo, Xu and Wang, Qifan and Tang, Xiaoying},
          journal = {arXiv preprint arXiv:2310.02698},
          year = {2023}
        }"""

    def __post_init__(self) -> None:
        number(self, "theta", "(0, 1]")
        if self.gamma is not None:
            number(self, "gamma", "(0, inf)")

    @property
    def needs(self) -> frozenset[Signal]:
        """The norm of every update."""
        return frozenset({Signal.UPDATE_NORM})

    def init(self, clients: Clients, rng: np.random.Generator) -> KVibState:
        """Nothing is learned; the first selection sets omega to 0."""
        nothing = np.zeros(len(clients))
        return KVibState(gamma=self.gamma or 0.0, omega=np.full(len(clients), np.nan), importance=nothing, rate=nothing)

    def select(self, state: KVibState, context: RoundContext, rng: np.random.Generator) -> tuple[Selection, KVibState]:
        """Draw with the learned probabilities among the available clients."""
        started = ~np.isnan(state.omega)
        omega = np.where(started, state.omega, state.omega[started].mean() if started.any() else 0.0)
        clients = np.flatnonzero(context.available & (context.clients.importance > 0))
        importance = context.clients.importance[clients]
        importance = importance / (importance.sum() or 1.0)
        rates = self._rates(omega[clients], state.gamma, context.budget)
        drawn = draw_by_rates(rates, rng)
        weights = importance[drawn] / rates[drawn]
        everyone = np.zeros((2, len(omega)))
        everyone[:, clients] = importance, rates
        state = replace(state, omega=omega, importance=everyone[0], rate=everyone[1])
        return Selection(clients=clients[drawn], weights=weights, renormalize=False), state

    def _rates(self, omega: FloatArray, gamma: float, budget: int) -> FloatArray:
        """(n,) pi."""
        root = np.sqrt(omega + gamma) if gamma > 0 else np.ones(len(omega))
        places = min(budget, len(omega))
        return (1 - self.theta) * selection_rates(root, places) + self.theta * places / max(len(omega), 1)

    def observe(self, state: KVibState, outcome: Outcome) -> KVibState:
        """Add what the completed updates tell."""
        # The rates are those of this round: a stale update was drawn with another one.
        told = outcome.completed & ~outcome.stale & ~np.isnan(outcome.update_norm)
        if not told.any():
            return state
        clients = outcome.clients[told]
        feedback = (state.importance[clients] * outcome.update_norm[told]) ** 2
        omega, gamma = state.omega.copy(), state.gamma
        omega[clients] += feedback / state.rate[clients]
        if gamma == 0.0:
            selected = np.count_nonzero(~outcome.stale)
            with np.errstate(over="ignore"):
                gamma = float(feedback.mean()) * np.count_nonzero(state.rate) / (self.theta * selected)
            gamma = min(float(gamma), _MOST_GAMMA)
        return replace(state, omega=omega, gamma=gamma)
