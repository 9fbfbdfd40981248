"""What FedCor's paper assumes of loss changes, tested on samples: that they are Gaussian, and that they stay alike.

A sample is what one random cohort, trained from a fixed model, does to the loss of every client (appendices D.2, D.3).
`sample_loss_changes` takes them from any function that answers trial probes. The rest is NumPy and SciPy on (S, N)
arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from fedpick.core.arrays import FloatArray
from fedpick.core.errors import InvalidInput
from fedpick.core.policy import Signal
from fedpick.core.types import Probe, Selection

__all__ = [
    "Components",
    "Normality",
    "covariance_similarity",
    "henze_zirkler",
    "normality",
    "principal_components",
    "sample_loss_changes",
]


def sample_loss_changes(
    measure: Callable[[Probe], FloatArray],
    num_clients: int,
    *,
    cohorts: int,
    budget: int,
    rng: np.random.Generator,
) -> FloatArray:
    """(S, N) change of every client's loss by S uniformly random cohorts, each trained from the current model.

    The updates of a cohort count equally, as in the authors' program. Nothing is committed.

    Args:
        measure: answers probes of losses, with a trial or without, such as `Simulator.measure`.
        num_clients: N.
        cohorts: S.
        budget: clients per cohort.
        rng: for the cohorts.
    """
    if not 1 <= budget <= num_clients:
        raise InvalidInput(f"budget must be between 1 and the number of clients, {num_clients}. Got {budget}.")
    clients = np.arange(num_clients)
    before = measure(Probe(clients=clients, signal=Signal.LOSS))
    changes = np.empty((cohorts, num_clients))
    for row in changes:
        chosen = rng.choice(num_clients, budget, replace=False)
        trial = Selection(clients=chosen, weights=np.full(budget, 1 / budget))
        row[:] = measure(Probe(clients=clients, signal=Signal.LOSS, trial=trial)) - before
    return changes


@dataclass(frozen=True)
class Components:
    """The principal components of samples, the largest first."""

    scores: FloatArray
    """(S, k) the samples, centred, along each component."""
    share: FloatArray
    """(k,) of the total variance."""


def principal_components(samples: ArrayLike, count: int | None = None) -> Components:
    """The first `count` principal components of (S, N) samples; None: all that vary.

    >>> principal_components([[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]]).share
    array([1.])
    """
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 2 or len(values) < 2:
        raise InvalidInput(f"Principal components need at least two samples, one per row. Got {values.shape}.")
    left, length, _ = np.linalg.svd(values - values.mean(axis=0), full_matrices=False)
    variance = length**2
    vary = int((variance > 1e-20 * max(float(variance[0]), np.finfo(float).tiny)).sum())
    keep = vary if count is None else min(count, vary)
    return Components(left[:, :keep] * length[:keep], variance[:keep] / max(float(variance.sum()), 1e-300))


@dataclass(frozen=True)
class Normality:
    """How far a number's distribution is from a Gaussian."""

    shapiro: float
    """W of Shapiro and Wilk, 1 for a perfect Gaussian."""
    p_value: float
    """Of W, under the hypothesis of a Gaussian: with enough samples, any difference makes it small."""
    skewness: float
    excess_kurtosis: float
    distance: float
    """Largest difference between the two cumulative distributions, with the mean and variance of the samples."""


def normality(values: ArrayLike) -> Normality:
    """Compare (S,) values with the Gaussian of their own mean and variance."""
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or len(sample) < 3 or not np.ptp(sample) > 0:
        raise InvalidInput("Normality needs at least three values that are not all equal.")
    statistic, p_value = stats.shapiro(sample)
    standard = (sample - sample.mean()) / sample.std(ddof=1)
    distance = stats.kstest(standard, "norm").statistic
    return Normality(
        shapiro=float(statistic),
        p_value=float(p_value),
        skewness=float(stats.skew(sample)),
        excess_kurtosis=float(stats.kurtosis(sample)),
        distance=float(distance),
    )


def henze_zirkler(samples: ArrayLike) -> tuple[float, float]:
    """(statistic, p-value) of the multivariate test of Henze and Zirkler (1990) on (S, k) samples.

    The p-value is from the log-normal distribution that the authors fit to the statistic under the hypothesis. The
    covariance must not be singular, so give it a few components, not all clients.
    """
    values = np.asarray(samples, dtype=np.float64)
    number, size = values.shape
    if number <= size + 1:
        raise InvalidInput(f"Henze and Zirkler's test needs more samples than dimensions + 1. Got {values.shape}.")
    centred = values - values.mean(axis=0)
    inverse = np.linalg.inv(centred.T @ centred / number)
    products = centred @ inverse @ centred.T
    lengths = np.diagonal(products)
    between = lengths[:, None] + lengths[None, :] - 2 * products
    b2 = ((2 * size + 1) * number / 4) ** (2 / (size + 4)) / 2
    statistic = (
        np.exp(-b2 / 2 * between).sum() / number
        - 2 * (1 + b2) ** (-size / 2) * np.exp(-b2 / (2 * (1 + b2)) * lengths).sum()
        + number * (1 + 2 * b2) ** (-size / 2)
    )
    a, w = 1 + 2 * b2, (1 + b2) * (1 + 3 * b2)
    mean = 1 - a ** (-size / 2) * (1 + size * b2 / a + size * (size + 2) * b2**2 / (2 * a**2))
    variance = (
        2 * (1 + 4 * b2) ** (-size / 2)
        + 2 * a**-size * (1 + 2 * size * b2**2 / a**2 + 3 * size * (size + 2) * b2**4 / (4 * a**4))
        - 4 * w ** (-size / 2) * (1 + 3 * size * b2**2 / (2 * w) + size * (size + 2) * b2**4 / (2 * w**2))
    )
    spread = np.sqrt(np.log1p(variance / mean**2))
    location = np.log(mean) - spread**2 / 2
    return float(statistic), float(stats.norm.sf((np.log(statistic) - location) / spread))


def covariance_similarity(first: ArrayLike, second: ArrayLike) -> float:
    """The cosine of two covariance matrices, tr(A'B) / sqrt(tr(A'A) tr(B'B)).

    Equation 151 is printed without the square root; only with it the value lies in [0, 1], as the paper says, and is 1
    for equal matrices.

    >>> covariance_similarity([[2.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 0.0]])
    1.0
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 2:
        raise InvalidInput(f"Two matrices of the same size are needed. Got {a.shape} and {b.shape}.")
    scale = np.sqrt((a * a).sum()) * np.sqrt((b * b).sum())
    if not scale > 0:
        raise InvalidInput("A covariance of zeros has no direction to compare.")
    return float((a * b).sum() / scale)
