"""FedAU: random cohorts, weighted by how rarely each client takes part (Wang and Ji, ICLR 2024).

Algorithm: m = budget of the available clients are chosen, every subset of that size equally likely. The model moves by
(1/N) * sum of omega_k * update_k over the clients that take part. omega_k is the mean length, in rounds, of the
intervals that end when client k takes part. An interval also ends, and the next one begins, after `cutoff` rounds
without it. omega_k is 1 until the first interval has ended. For a client that takes part with a fixed probability q,
the mean interval tends to 1/q without a cut-off, so that the weights correct any participation that does not depend on
time, without an estimate of availability. The cut-off bounds the weight of clients that take part very rarely.
A round counts as an interval's last one if the client completes it, so failures are corrected too.
The weights of round t use the intervals that ended before round t.

Deviations: the paper takes participation as given; here the budget limits it, uniformly. `weighting="importance"`
replaces 1/N by the importance p_k.

>>> reference([False, True, True, False], cutoff=50)     # intervals of 2 and 1; the last one has not ended
1.5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

import numpy as np

from fedpick.core.arrays import FloatArray, IntArray
from fedpick.core.policy import Policy
from fedpick.core.sampling import sample_uniform
from fedpick.core.state import per_client
from fedpick.core.types import Clients, Outcome, RoundContext, Selection
from fedpick.core.validation import choice, whole

__all__ = ["FedAU", "Intervals", "reference"]


def reference(took_part: Sequence[bool], cutoff: int | None) -> float:
    """Omega of one client after these rounds."""
    intervals, length = [], 0
    for present in took_part:
        length += 1
        if present or length == cutoff:
            intervals.append(length)
            length = 0
    return sum(intervals) / len(intervals) if intervals else 1.0


@dataclass(frozen=True)
class Intervals:
    """The intervals between the rounds in which a client took part."""

    ended: IntArray = per_client()
    """(N,) number of intervals that have ended."""
    rounds: IntArray = per_client()
    """(N,) their total length."""
    waiting: IntArray = per_client()
    """(N,) rounds since the last one ended."""


@final
@dataclass(frozen=True, kw_only=True)
class FedAU(Policy[Intervals]):
    """Available clients uniformly at random, weighted by the mean interval between their participations.

    Args:
        cutoff: longest interval, in rounds; None: no limit.
        weighting: "equal" weights by omega_k / N, as in the paper; "importance" by omega_k times importance.
    """

    cutoff: int | None = 50
    weighting: Literal["equal", "importance"] = "equal"

    reference: ClassVar[str] = """
        @inproceedings{wang2024lightweight,
          title = {A Lightweight Method for Tackling Unknown Participation Statistics in Federated Averaging},
          author = {Wang, Shiqiang and Ji, Mingyue},
          booktitle = {International Conference on Learning Representations (ICLR)},
          year = {2024}
        }"""

    def __post_init__(self) -> None:
        whole(self, "cutoff", 1, optional=True)
        choice(self, "weighting", ("equal", "importance"))

    def init(self, clients: Clients, rng: np.random.Generator) -> Intervals:
        """No interval has begun. A newcomer's first one begins when it joins."""
        none = np.zeros(len(clients), dtype=np.int64)
        return Intervals(ended=none, rounds=none, waiting=none)

    def select(self, state: Intervals, context: RoundContext, rng: np.random.Generator) -> tuple[Selection, Intervals]:
        """Draw the cohort and weight it."""
        chosen = sample_uniform(context.available, context.budget, rng)
        omega = _mean_interval(state, chosen)
        equal = self.weighting == "equal"
        weights = omega / len(context.clients) if equal else omega * context.clients.importance[chosen]
        diagnostics = {"largest_interval": float(omega.max(initial=0.0))}
        return Selection(clients=chosen, weights=weights, renormalize=False, diagnostics=diagnostics), state

    def observe(self, state: Intervals, outcome: Outcome) -> Intervals:
        """End the intervals of the clients that took part, and those that reached the cut-off."""
        waiting = state.waiting + 1
        ends = waiting == self.cutoff if self.cutoff is not None else np.zeros(len(waiting), dtype=bool)
        ends[outcome.clients[outcome.completed]] = True
        return replace(
            state,
            ended=state.ended + ends,
            rounds=state.rounds + np.where(ends, waiting, 0),
            waiting=np.where(ends, 0, waiting),
        )


def _mean_interval(state: Intervals, chosen: IntArray) -> FloatArray:
    ended = state.ended[chosen]
    return np.where(ended > 0, state.rounds[chosen] / np.maximum(ended, 1), 1.0)
