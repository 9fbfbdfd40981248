"""REFL: the available clients that will most likely be gone in the next round (Abdelmoniem et al., EuroSys 2023).

Algorithm (the paper's intelligent participant selection), with m = budget and t the round, from 1:

1. For every available client, forecast the probability that it is available in the next round too.
2. A client that was selected in one of the last `rest` rounds rests.
3. Of the clients that do not rest, the m with the smallest forecasts train, ties broken at random. Who will stay can
   train later, who leaves cannot.

The model moves by the plain mean, 1/m, as the paper weights updates that are not late.

The forecast is P(available | available now) of a two-state Markov chain per client, from the masks seen so far: of the
c transitions from an available round that the client has made, s ended in an available one; the forecast is
(s + 2 prior * mean) / (c + 2 prior), with the mean of s / c over all transitions of all clients. A newcomer therefore
counts as an average client.

Deviations. The authors' simulation reads the next slot from the true trace of each device; here nothing but past masks
is used. A slot is a round, so durations are not needed. Places that too few clients are left for go to those that have
rested longest, instead of staying empty. A client rests after it was selected, whether it completed or not, so that one
that never completes is not selected for ever. Weights of late updates, and fewer clients while late updates are
expected, need a driver that accepts late updates.

>>> reference(np.array([[1, 1, 1], [1, 0, 1], [1, 1, 1]]), last=[0, 0, 2], prior=1.0, rest=5, budget=2)   # 2 rests
[1, 0]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np
from numpy.typing import ArrayLike

from fedpick.availability.estimators import AvailabilityCounts, no_counts, update_counts
from fedpick.core.arrays import FloatArray, IntArray
from fedpick.core.policy import Policy
from fedpick.core.sampling import top_k
from fedpick.core.state import per_client
from fedpick.core.types import Clients, RoundContext, Selection
from fedpick.core.validation import number, whole

__all__ = ["REFL", "RestState", "reference"]


def reference(masks: ArrayLike, last: Sequence[int], prior: float, rest: int, budget: int) -> list[int]:
    """Steps 1 to 3 for round t, given the masks of rounds 1 to t. Ties: the smaller index first."""
    seen = np.asarray(masks, dtype=bool).tolist()
    t, count = len(seen), len(last)
    began = [sum(seen[i][k] for i in range(t - 1)) for k in range(count)]
    stayed = [sum(seen[i][k] and seen[i + 1][k] for i in range(t - 1)) for k in range(count)]
    mean = sum(stayed) / sum(began) if sum(began) else 0.5

    def urgency(k: int) -> tuple[int, float]:
        rounds_of_rest_left = max(last[k] + rest + 1 - t, 0) if last[k] else 0
        return rounds_of_rest_left, (stayed[k] + 2 * prior * mean) / (began[k] + 2 * prior)

    return sorted((k for k in range(count) if seen[-1][k]), key=urgency)[:budget]


@dataclass(frozen=True, kw_only=True, eq=False)
class RestState(AvailabilityCounts):
    """The masks seen so far, counted, and the round of each client's last selection."""

    last: IntArray = per_client()
    """(N,) from 1; 0: never selected."""


@final
@dataclass(frozen=True, kw_only=True)
class REFL(Policy[RestState]):
    """Select the available clients that will most likely be gone in the next round.

    Args:
        rest: rounds in which a client is not selected again.
        prior: pseudo-counts, for either outcome, that draw a forecast to the mean of all clients.
    """

    rest: int = 5
    prior: float = 1.0

    reference: ClassVar[str] = """
        @inproceedings{abdelmoniem2023refl,
          title = {{REFL}: Resource-Efficient Federated Learning},
          author = {Abdelmoniem, Ahmed M. and Sahu, Atal Narayan and Canini, Marco and Fahmy, Suhaib A.},
          booktitle = {European Conference on Computer Systems (EuroSys)},
          year = {2023}
        }"""

    def __post_init__(self) -> None:
        whole(self, "rest", 0)
        number(self, "prior", "(0, inf)")

    def init(self, clients: Clients, rng: np.random.Generator) -> RestState:
        """No mask is counted yet."""
        return RestState(**no_counts(len(clients)), last=np.zeros(len(clients), dtype=np.int64))

    def select(self, state: RestState, context: RoundContext, rng: np.random.Generator) -> tuple[Selection, RestState]:
        """The smallest forecasts among the clients that do not rest."""
        state = update_counts(state, context.available)
        candidates = np.flatnonzero(context.available)
        last = state.last[candidates]
        rest_left = np.where(last > 0, np.maximum(last + self.rest - context.index, 0), 0)
        # A forecast is below 1, so one more round of rest outweighs it.
        order = top_k(-(rest_left + self._forecast(state, candidates)), context.budget, rng)
        chosen = candidates[order]
        seen_last = state.last.copy()
        seen_last[chosen] = context.index + 1
        weights = np.full(len(chosen), 1 / max(len(chosen), 1))
        diagnostics = {"resting": int(np.count_nonzero(rest_left)), "unrested": int(np.count_nonzero(rest_left[order]))}
        return Selection(clients=chosen, weights=weights, diagnostics=diagnostics), replace(state, last=seen_last)

    def _forecast(self, state: RestState, candidates: IntArray) -> FloatArray:
        """Step 1."""
        transitions = int(state.from_available.sum())
        mean = int(state.stayed_available.sum()) / transitions if transitions else 0.5
        stayed, began = state.stayed_available[candidates], state.from_available[candidates]
        forecast: FloatArray = (stayed + 2 * self.prior * mean) / (began + 2 * self.prior)
        return forecast
