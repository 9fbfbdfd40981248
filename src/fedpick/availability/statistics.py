"""Statistics of a trace, groups of its clients, and how fast the estimators learn it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedpick.availability.estimators import (
    AvailabilityCounts,
    estimate_availability,
    estimate_correlation,
    estimate_stationary_availability,
    no_counts,
    update_counts,
)
from fedpick.availability.process import AvailabilityProcess, Trace
from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.core.errors import InvalidInput
from fedpick.core.types import Clients

__all__ = [
    "GROUPINGS",
    "EstimationErrors",
    "TraceStatistics",
    "estimation_error_curve",
    "groups_of_trace",
    "measure_trace",
]

GROUPINGS = ("cluster", "availability")
"""In order of preference."""
_CORRELATED = 0.1


def groups_of_trace(trace: Trace, grouping: str) -> IntArray | None:
    """(N,) the number of every client's group; None if the trace has no such groups.

    "cluster": the clusters of the process `clustered`. "availability": 2 for more available clients (pi_k of at least
    1/2), and 1 more for weakly correlated ones (|lambda_k| up to 0.1).
    """
    if grouping == "cluster":
        cluster: IntArray | None = getattr(trace, "cluster", None)
        return cluster
    numbers = 2 * (trace.availability >= 0.5) + (np.abs(trace.correlation) <= _CORRELATED)
    return numbers.astype(np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class TraceStatistics:
    """Statistics over some rounds of a trace."""

    rates: FloatArray
    """(N,) share of the rounds in which each client was available."""
    available: IntArray
    """(T,) number of available clients in each round."""
    autocorrelation: FloatArray
    """(max_lag + 1,) correlation of a client's availability with itself some rounds later, pooled over the clients."""

    @property
    def empty_rounds(self) -> int:
        """Number of rounds without an available client."""
        return int((self.available == 0).sum())


def measure_trace(trace: Trace, num_rounds: int, *, start: int = 0, max_lag: int = 50) -> TraceStatistics:
    """Compute rates, counts and autocorrelation over rounds start .. start + num_rounds - 1.

    The autocorrelation at lag h is the sum over clients of their covariance at that lag, over the sum of their
    variances, each client around its own mean in these rounds. At most 2 max_lag + 1 masks are in memory.
    """
    if not 0 <= max_lag < num_rounds:
        raise InvalidInput(f"max_lag must be at least 0 and below the number of rounds, {num_rounds}. Got {max_lag}.")
    opening: list[BoolArray] = []
    recent: deque[BoolArray] = deque(maxlen=max_lag + 1)
    total = np.zeros(trace.num_clients, dtype=np.int64)
    together = np.zeros(max_lag + 1)
    available = np.zeros(num_rounds, dtype=np.int64)
    for step in range(num_rounds):
        mask = trace.mask(start + step)
        recent.append(mask)
        if step < max_lag:
            opening.append(mask)
        total += mask
        available[step] = mask.sum()
        for lag, earlier in enumerate(reversed(recent)):
            together[lag] += np.count_nonzero(mask & earlier)
    # At lag h the later series misses the first h rounds, the earlier one the last h.
    later, earlier_series = total.astype(np.float64), total.astype(np.float64)
    covariance = np.empty(max_lag + 1)
    for lag in range(max_lag + 1):
        pairs = num_rounds - lag
        covariance[lag] = together[lag] / pairs - float(later @ earlier_series) / pairs**2
        if lag < max_lag:
            later -= opening[lag]
            earlier_series -= recent[-1 - lag]
    variance = covariance[0]
    autocorrelation = covariance / variance if variance > 1e-9 else np.full(max_lag + 1, np.nan)
    return TraceStatistics(rates=total / num_rounds, available=available, autocorrelation=autocorrelation)


@dataclass(frozen=True, kw_only=True, eq=False)
class EstimationErrors:
    """Mean absolute errors over the clients, one row per seed, one column per number of observed rounds."""

    observations: IntArray
    """(P,) rounds observed."""
    availability: FloatArray
    """(S, P) of pi, estimated as the frequency."""
    stationary: FloatArray
    """(S, P) of pi, estimated as the stationary probability of the estimated chain."""
    correlation: FloatArray
    """(S, P) of lambda."""


# Ten to the power of 1, 1.5, ..., 4: the points of CA-Fed's figure 4a.
FIGURE_4A = (10, 32, 100, 316, 1000, 3162, 10_000)


def estimation_error_curve(
    process: AvailabilityProcess,
    clients: Clients,
    *,
    observations: Sequence[int] = FIGURE_4A,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    prior: float = 1.0,
) -> EstimationErrors:
    """Compute the mean absolute errors of pi and lambda after each number of rounds (CA-Fed, figure 4a)."""
    points = np.unique(np.asarray(observations, dtype=np.int64))
    if points.size == 0 or points[0] < 1 or not len(seeds):
        raise InvalidInput(f"observations must be at least 1 and there must be a seed. Got {list(observations)}.")
    errors = np.zeros((3, len(seeds), len(points)))
    for row, seed in enumerate(seeds):
        trace = process.start(clients, seed)
        counts = AvailabilityCounts(**no_counts(len(clients)))
        column = 0
        for round in range(int(points[-1])):
            counts = update_counts(counts, trace.mask(round))
            if round + 1 == points[column]:
                estimates = (
                    estimate_availability(counts, prior) - trace.availability,
                    estimate_stationary_availability(counts, prior) - trace.availability,
                    estimate_correlation(counts, prior) - trace.correlation,
                )
                errors[:, row, column] = [np.abs(error).mean() for error in estimates]
                column += 1
    return EstimationErrors(observations=points, availability=errors[0], stationary=errors[1], correlation=errors[2])
