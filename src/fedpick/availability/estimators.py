"""Estimates of every client's availability and correlation from the observed masks (CA-Fed, section IV-B).

pi_k, the probability of being available, has a beta prior: (rounds available + n) / (rounds seen + n + m) with
n = m = prior. The client's two-state Markov chain has one beta prior per row of its transition matrix, so each row is
divided by the time spent in the state it *starts from*, and lambda_k = P(on | on) - P(on | off), the second eigenvalue
of that matrix.

The counts are per-client arrays in `AvailabilityCounts`. A policy derives its own state from that class.
`update_counts` then takes and returns the policy's state:

    @dataclass(frozen=True, kw_only=True)
    class State(AvailabilityCounts):
        losses: FloatArray = per_client()

    def init(self, clients, rng):
        return State(**no_counts(len(clients)), losses=...)

    def select(self, state, context, rng):
        state = update_counts(state, context.available)
        pi = estimate_availability(state, prior=self.prior)

A newcomer starts with empty counts, so its estimates use its own age and never the global clock. The round in which it
appears has no predecessor (`last_mask` is -1): it counts as an observation but not as a transition.

Deviation from the authors' code: it divides transition counts by the total time, which makes the estimate of lambda
wrong, and puts a prior of 100 pseudo-rounds at the *true* values, which is unfair. Neither is offered.

>>> import numpy as np
>>> counts = AvailabilityCounts(**no_counts(2))
>>> for mask in ([True, False], [True, False], [False, False], [True, False]):
...     counts = update_counts(counts, np.array(mask))
>>> estimate_availability(counts)                    # (3 + 1) / (4 + 2) and (0 + 1) / (4 + 2)
array([0.66666667, 0.16666667])
>>> estimate_correlation(counts)                     # (1 + 1) / (2 + 2) - (1 + 1) / (1 + 2); 1/2 - 1/5
array([-0.16666667,  0.3       ])
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.core.errors import InvalidInput
from fedpick.core.state import per_client

__all__ = [
    "AvailabilityCounts",
    "estimate_availability",
    "estimate_correlation",
    "estimate_stationary_availability",
    "estimate_transitions",
    "no_counts",
    "update_counts",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class AvailabilityCounts:
    """Counts over the observed masks, each (N,)."""

    rounds_seen: IntArray = per_client()
    """Rounds in which the client's availability was known."""
    rounds_available: IntArray = per_client()
    """Of these, the rounds in which it was available."""
    from_available: IntArray = per_client()
    """Known transitions that start in an available round."""
    stayed_available: IntArray = per_client()
    """Of these, the ones that end in an available round."""
    from_unavailable: IntArray = per_client()
    """Known transitions that start in an unavailable round."""
    became_available: IntArray = per_client()
    """Of these, the ones that end in an available round."""
    last_mask: NDArray[np.int8] = per_client()
    """The latest round: 1 available, 0 not, -1 unknown."""


CountsT = TypeVar("CountsT", bound=AvailabilityCounts)


def no_counts(num_clients: int) -> dict[str, NDArray[Any]]:
    """Return the fields of `AvailabilityCounts` before the first observation, to be unpacked into a state."""
    names = (
        "rounds_seen",
        "rounds_available",
        "from_available",
        "stayed_available",
        "from_unavailable",
        "became_available",
    )
    counts: dict[str, NDArray[Any]] = {name: np.zeros(num_clients, dtype=np.int64) for name in names}
    counts["last_mask"] = np.full(num_clients, -1, dtype=np.int8)
    return counts


def update_counts(counts: CountsT, available: BoolArray, known: BoolArray | None = None) -> CountsT:
    """Return the counts after one more round. `known` masks the clients that were observed (None: all)."""
    shape = counts.last_mask.shape
    for name, mask in (("available", available), ("known", known)):
        if mask is not None and (mask.shape != shape or mask.dtype != np.bool_):
            raise InvalidInput(
                f"{name} must be a boolean mask of shape {shape}, one entry per client. "
                f"Got {mask.dtype} of shape {mask.shape}."
            )
    was_on, was_off = counts.last_mask == 1, counts.last_mask == 0
    now_on = available
    seen: BoolArray | int = 1
    if known is not None:
        seen, now_on = known, available & known
        was_on, was_off = was_on & known, was_off & known
    last = now_on.astype(np.int8)
    if known is not None:
        last[~known] = -1
    return replace(
        counts,
        rounds_seen=counts.rounds_seen + seen,
        rounds_available=counts.rounds_available + now_on,
        from_available=counts.from_available + was_on,
        stayed_available=counts.stayed_available + (was_on & now_on),
        from_unavailable=counts.from_unavailable + was_off,
        became_available=counts.became_available + (was_off & now_on),
        last_mask=last,
    )


def estimate_availability(counts: AvailabilityCounts, prior: float = 1.0) -> FloatArray:
    """Posterior mean of pi_k under a Beta(prior, prior), (N,); 1/2 for a client without observations."""
    return _posterior_mean(counts.rounds_available, counts.rounds_seen, prior)


def estimate_transitions(counts: AvailabilityCounts, prior: float = 1.0) -> tuple[FloatArray, FloatArray]:
    """Posterior means of P(on | on) and P(on | off), each (N,), each with its own Beta(prior, prior)."""
    return (
        _posterior_mean(counts.stayed_available, counts.from_available, prior),
        _posterior_mean(counts.became_available, counts.from_unavailable, prior),
    )


def estimate_correlation(counts: AvailabilityCounts, prior: float = 1.0) -> FloatArray:
    """lambda_k = P(on | on) - P(on | off) from their posterior means, (N,); 0 without observations."""
    stay, appear = estimate_transitions(counts, prior)
    return stay - appear


def estimate_stationary_availability(counts: AvailabilityCounts, prior: float = 1.0) -> FloatArray:
    """pi_k as the stationary probability of the estimated chain, (N,): the alternative of CA-Fed's section V-B d."""
    stay, appear = estimate_transitions(counts, prior)
    leaving_rate = appear + (1.0 - stay)
    # With prior = 0 a client that never changed its state gives 0 / 0: use its frequency.
    frequency = estimate_availability(counts, prior)
    return np.divide(appear, leaving_rate, out=frequency, where=leaving_rate > 0)


def _posterior_mean(successes: IntArray, trials: IntArray, prior: float) -> FloatArray:
    prior = float(prior)  # NumPy does not know whole numbers of more than 64 bits
    if not (np.isfinite(prior) and prior >= 0):
        raise InvalidInput(f"prior must be a number of pseudo-counts of at least 0. Got {prior!r}.")
    half = 0.5 * trials + prior  # of the denominator: twice a huge prior would be infinite
    mean: FloatArray = np.full(len(half), 0.5)
    np.divide(0.5 * successes + 0.5 * prior, half, out=mean, where=half > 0)
    return mean
