"""What the availability-aware policies share: estimates of pi_k and lambda_k, weights alpha_k / pi_k, small budgets.

`estimates` names the source of pi_k (availability) and lambda_k (correlation):

- "bayes": counted from the masks seen so far, with a Beta(prior, prior) for pi_k and for each row of the transition
  matrix (CA-Fed, section IV-B);
- "bayes-chain": the same, but pi_k is the stationary probability of the estimated chain (CA-Fed, section V-B d);
- "oracle": the true values, given as `Clients.availability` and `Clients.correlation`.

The mask of round t is counted before round t is decided, as in CA-Fed's algorithm 1 (line 3 receives the set of
available clients, line 4 updates the estimates, line 5 uses them). An available client has therefore been seen
available at least once, and its estimate is above 0 even with prior = 0.

Estimates are ratios of counts, so exact ties are common, and floating-point numbers miss them in the last bits:
2/3 - 1/2 is not 1/2 - 1/3. Comparisons between estimates therefore treat numbers closer than `TIE` as equal.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from fedpick.availability.estimators import (
    AvailabilityCounts,
    estimate_availability,
    estimate_correlation,
    estimate_stationary_availability,
    no_counts,
    update_counts,
)
from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.core.errors import InvalidInput
from fedpick.core.policy import Policy, Signal
from fedpick.core.sampling import sample_uniform, top_k
from fedpick.core.types import Clients, RoundContext
from fedpick.core.validation import choice, number

__all__ = [
    "RODIO",
    "TIE",
    "AvailabilityAware",
    "availability_of",
    "check_estimates",
    "correlation_of",
    "count_mask",
    "inverse_weights",
    "oracle_signals",
    "ranked",
    "sample_within_budget",
    "top_k_with_ties",
]

TIE = 1e-12
"""Numbers that differ by less, relative to the largest of their kind (1 for probabilities), are equal.

Far above the rounding error of a few operations, far below any difference that matters. CA-Fed's sums over many clients
need more."""

_SOURCES = ("bayes", "bayes-chain", "oracle")

CountsT = TypeVar("CountsT", bound=AvailabilityCounts)

RODIO = """
        @article{rodio2024federated,
          title = {Federated Learning Under Heterogeneous and Correlated Client Availability},
          author = {Rodio, Angelo and Faticanti, Francescomaria and Marfoq, Othmane and Neglia, Giovanni and
                    Leonardi, Emilio},
          journal = {IEEE/ACM Transactions on Networking},
          volume = {32},
          number = {2},
          pages = {1451--1460},
          year = {2024}
        }"""
"""The paper of ca-fed, and of the baselines that it defines."""


class _UsesEstimates(Protocol):
    """The two hyper-parameters that every policy of this family has."""

    @property
    def estimates(self) -> str: ...
    @property
    def prior(self) -> float: ...


def check_estimates(policy: _UsesEstimates) -> None:
    """Validate the two hyper-parameters."""
    choice(policy, "estimates", _SOURCES)
    number(policy, "prior", "[0, inf)")


def oracle_signals(policy: _UsesEstimates, *signals: Signal) -> frozenset[Signal]:
    """The columns of the table that estimates="oracle" reads; empty for the other estimates."""
    return frozenset(signals) if policy.estimates == "oracle" else frozenset()


def count_mask(policy: _UsesEstimates, counts: CountsT, context: RoundContext) -> CountsT:
    """The counts, including this round's mask. An oracle needs no counts."""
    return counts if policy.estimates == "oracle" else update_counts(counts, context.available)


def availability_of(policy: _UsesEstimates, counts: AvailabilityCounts, context: RoundContext) -> FloatArray:
    """pi_k, (N,)."""
    if policy.estimates == "oracle":
        return _column(context.clients.availability)
    if policy.estimates == "bayes-chain":
        return estimate_stationary_availability(counts, policy.prior)
    return estimate_availability(counts, policy.prior)


def correlation_of(policy: _UsesEstimates, counts: AvailabilityCounts, context: RoundContext) -> FloatArray:
    """lambda_k, (N,)."""
    if policy.estimates == "oracle":
        return _column(context.clients.correlation)
    return estimate_correlation(counts, policy.prior)


def _column(column: FloatArray | None) -> FloatArray:
    if column is None:  # a session raises at its start; a direct call of select ends here
        raise InvalidInput(
            "estimates='oracle' needs Clients.availability (and Clients.correlation for ca-fed). Got None."
        )
    return column


def ranked(values: FloatArray) -> IntArray:
    """The positions of probabilities or correlations in ascending order; ties by index.

    >>> ranked(np.array([0.5, 2 / 3 - 1 / 2, 1 / 2 - 1 / 3]))    # 1/6 twice, the second smaller by the last bit
    array([1, 2, 0])
    """
    order = np.argsort(values, kind="stable")
    steps = np.diff(values[order])
    if not ((steps > 0) & (steps < TIE)).any():
        return order
    rank = np.empty(len(values), dtype=np.int64)
    rank[order] = np.concatenate([[0], np.cumsum(steps >= TIE)])
    return np.argsort(rank, kind="stable")


def top_k_with_ties(values: FloatArray, k: int, rng: np.random.Generator) -> IntArray:
    """The positions of the k largest of some values of at least 0, as `top_k`; ties up to `TIE` are random.

    Only the k-th value decides who is in, so the others need no tolerance, and the cost stays O(N).
    """
    if not 0 < k < len(values):
        return top_k(values, k, rng)
    last = np.partition(values, len(values) - k)[len(values) - k]
    return top_k(np.where(np.abs(values - last) <= TIE * last, last, values), k, rng)


def inverse_weights(availability: FloatArray, eligible: BoolArray, context: RoundContext) -> FloatArray:
    """alpha_k / pi_k of the eligible clients, 0 elsewhere, (N,)."""
    impossible = eligible & (availability <= 0)
    if impossible.any():
        raise InvalidInput(
            f"Clients.availability says that client {int(np.argmax(impossible))} is never available, but it is "
            f"available in round {context.index}. Give it its true probability, or use estimates='bayes'."
        )
    weights: FloatArray = np.zeros(len(availability))
    return np.divide(context.clients.importance, availability, out=weights, where=eligible)


def sample_within_budget(eligible: BoolArray, budget: int, rng: np.random.Generator) -> tuple[IntArray, float]:
    """The eligible clients, or `budget` of them drawn uniformly, and the factor of the weights that keeps the step."""
    count = int(np.count_nonzero(eligible))
    if budget >= count:
        return np.flatnonzero(eligible).astype(np.int64), 1.0
    chosen = sample_uniform(eligible, budget, rng)
    return chosen, count / budget if budget else 0.0


@dataclass(frozen=True, kw_only=True)
class AvailabilityAware(Policy[AvailabilityCounts], ABC):
    """Base of the baselines that weight by availability. Each adds its own `select`."""

    estimates: str = "bayes"
    prior: float = 1.0

    def __post_init__(self) -> None:
        check_estimates(self)

    @property
    def needs(self) -> frozenset[Signal]:
        """The true availability, with estimates="oracle"."""
        return oracle_signals(self, Signal.AVAILABILITY)

    def init(self, clients: Clients, rng: np.random.Generator) -> AvailabilityCounts:
        """No mask is counted yet."""
        return AvailabilityCounts(**no_counts(len(clients)))
