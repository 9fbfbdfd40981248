"""Where the error of a federation with uneven availability comes from (CA-Fed, Rodio et al. 2024, sections II to IV).

Training with aggregation weights q under availability pi minimises a biased objective with importances
p_k = pi_k q_k / sum_h pi_h q_h instead of the target alpha (equation 4). The total error splits into an optimisation
error (how far that biased objective is from its minimum) and a bias error (how far its minimiser is from the target's).
This module has both as estimated in a round, their bounds, the weights that minimise the bounds, and the importance
that a run gave each client.

Symbols: target = alpha, importance = p, weights = q, availability = pi, gap = F_k - F_k*, kappa2 = (L / mu)^2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fedpick.core.arrays import FloatArray
from fedpick.core.errors import InvalidInput

__all__ = [
    "ConvergenceConstants",
    "RoundError",
    "bias_bound_chi_square",
    "bias_bound_total_variation",
    "biased_importance",
    "chi_square_divergence",
    "cumulative_importance",
    "optimal_weights",
    "optimization_bound",
    "round_error",
    "total_error_bound",
    "total_variation",
]


_BARRIER_STEPS = 45
_NEWTON_STEPS = 60


def _vector(values: ArrayLike, name: str, size: int | None = None) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or (size is not None and len(array) != size) or not np.isfinite(array).all() or array.min() < 0:
        length = "" if size is None else f" of length {size}"
        raise InvalidInput(f"{name} must be a vector{length} of finite numbers of at least 0. Got shape {array.shape}.")
    return array


def biased_importance(weights: ArrayLike, availability: ArrayLike) -> FloatArray:
    """The importance that training gives each client, equation 4: p_k = pi_k q_k over its sum.

    >>> biased_importance([1.0, 1.0], [0.9, 0.1])
    array([0.9, 0.1])
    """
    shares = _vector(weights, "weights") * _vector(availability, "availability", len(np.asarray(weights)))
    if not shares.sum() > 0:
        raise InvalidInput("At least one client must have both a weight and an availability above 0. Got none.")
    importance: FloatArray = shares / shares.sum()
    return importance


def total_variation(target: ArrayLike, importance: ArrayLike) -> float:
    """Half the sum of absolute differences of two distributions: 0 if equal, 1 if disjoint.

    >>> total_variation([0.5, 0.5], [1.0, 0.0])
    0.5
    """
    first = _vector(target, "target")
    return float(0.5 * np.abs(first - _vector(importance, "importance", len(first))).sum())


def chi_square_divergence(target: ArrayLike, importance: ArrayLike) -> float:
    """Sum of (alpha_k - p_k)^2 / p_k (theorem 1); infinite if p_k = 0 for a client with alpha_k > 0.

    >>> round(chi_square_divergence([0.5, 0.5], [0.8, 0.2]), 6)    # 0.09 / 0.8 + 0.09 / 0.2
    0.5625
    """
    wanted = _vector(target, "target")
    got = _vector(importance, "importance", len(wanted))
    if (wanted[got == 0] > 0).any():
        return float("inf")
    positive = got > 0
    return float(((wanted[positive] - got[positive]) ** 2 / got[positive]).sum())


@dataclass(frozen=True, kw_only=True)
class RoundError:
    """The estimates of one round (equations 18 to 20)."""

    epsilon_opt: float
    """Optimisation error."""
    epsilon_bias: float
    """Error of the bias."""
    total_variation: float
    """Distance between target and biased importance."""
    gamma: float
    """The largest gap."""

    @property
    def total(self) -> float:
        """The proxy of the total error that CA-Fed minimises."""
        return self.epsilon_opt + self.epsilon_bias


def round_error(
    target: ArrayLike, weights: ArrayLike, availability: ArrayLike, gap: ArrayLike, kappa2: float = 1.0
) -> RoundError:
    """Optimisation and bias error in one round, for any weights q (equations 18 to 20); `gap` is F_k - F_k*.

    >>> round_error([0.5, 0.5], [1.0, 0.0], [0.5, 0.5], [0.1, 0.3], kappa2=0.5)
    RoundError(epsilon_opt=0.1, epsilon_bias=0.15, total_variation=0.5, gamma=0.3)
    """
    importance = biased_importance(weights, availability)
    gaps = _vector(gap, "gap", len(importance))
    distance, gamma = total_variation(target, importance), float(gaps.max())
    return RoundError(
        epsilon_opt=float(importance @ gaps),
        epsilon_bias=bias_bound_total_variation(distance, gamma, kappa2),
        total_variation=distance,
        gamma=gamma,
    )


def bias_bound_chi_square(chi_square: float, gamma: float, kappa2: float) -> float:
    """Theorem 1, equation 11: the bias error is at most kappa2 * chi-square * Gamma, Gamma = max_k F_k(w*) - F_k*."""
    return kappa2 * chi_square * gamma if gamma > 0 else 0.0  # infinite divergence of identical clients: no bias


def bias_bound_total_variation(distance: float, gamma: float, kappa2: float) -> float:
    """Theorem 3, equation 15: the bias error is at most 4 kappa2 d_TV^2 Gamma', Gamma' = max_k F_k(w_B*) - F_k*."""
    return 4 * kappa2 * distance**2 * gamma if distance > 0 else 0.0


def total_error_bound(epsilon_opt: float, epsilon_bias: float, kappa2: float) -> float:
    """Theorem 1, equation 10: the error of the target objective is at most 2 kappa2 (epsilon_opt + epsilon_bias)."""
    return 2 * kappa2 * (epsilon_opt + epsilon_bias)


@dataclass(frozen=True, kw_only=True)
class ConvergenceConstants:
    """The constants of theorem 2: of the problem, of local training and of the availability chain."""

    smoothness: float
    """L."""
    gradient_bound: float
    """D: largest norm of a local gradient."""
    second_moment: float
    """G: root of the largest mean squared norm of a stochastic gradient."""
    loss_range: float
    """H: largest |F_k(w) - F_k(w_B*)|."""
    gamma: float
    """Gamma: the largest gap at the optimum."""
    noise: float | tuple[float, ...]
    """sigma_k: standard deviation of the stochastic gradients, one for all clients or one each."""
    diameter: float
    """diam(W)."""
    local_steps: int
    """E."""
    num_states: float
    """M: states of the chain; 2^N for N independent clients."""
    mixing_constant: float
    """C_P of equation 5."""
    mixing_time: int
    """T_P of equation 5."""
    eigenvalue: float
    """The second largest modulus of the chain's eigenvalues; lambda(P) = (eigenvalue + 1) / 2."""

    def quadratic(self, availability: FloatArray, squared_steps: float) -> FloatArray:
        """The diagonal of Sigma."""
        noise = np.broadcast_to(np.asarray(self.noise, dtype=np.float64), availability.shape)
        return 2 * (self.local_steps + 1) * noise**2 * availability * squared_steps

    def constant(self, total_weight: float, step_sizes: FloatArray) -> float:
        """v of theorem 2."""
        rounds = np.arange(1, len(step_sizes) + 1)
        series = float((step_sizes**2 + 1.0 / rounds**2).sum())
        return 2 / self.local_steps * self.diameter**2 + 0.25 * self.num_states * total_weight * series


def optimization_bound(
    weights: ArrayLike,
    availability: ArrayLike,
    step_sizes: ArrayLike,
    constants: ConvergenceConstants,
    *,
    per_step: bool = True,
) -> float:
    """Theorem 2, equation 13: how far the biased objective is at most from its minimum, in expectation.

    The sums of the theorem go to infinity; here they end with `step_sizes`, so give the step sizes of all rounds.
    `per_step` divides by the sum of the step sizes. The printed equation lacks that division (per_step=False). But the
    bounded quantity is a loss at the step-weighted mean model, and the text says that it vanishes with time. The
    right-hand side, a squared distance, does so only after the division.
    """
    pi = _vector(availability, "availability")
    q = _vector(weights, "weights", len(pi))
    steps = _vector(step_sizes, "step_sizes")
    total, squared = float(q.sum()), float((steps**2).sum())
    rounds = np.arange(1, len(steps) + 1)
    # ln(1 / lambda(P)) and, at round t, the number of rounds after which the chain is close to stationary.
    decay = np.log(2 / (constants.eigenvalue + 1))
    logarithm = np.log(2 * constants.mixing_constant * constants.loss_range * rounds)
    memory = np.minimum(np.maximum(np.ceil(logarithm / decay), constants.mixing_time), rounds)
    local = constants.local_steps
    quadratic = 0.5 * float(constants.quadratic(pi, squared) @ q**2)
    psi = 4 * constants.smoothness * (1 + local * total) * constants.gamma + 2 * local**2 * constants.second_moment**2
    psi = psi * squared + constants.loss_range * float(steps[: max(constants.mixing_time - 1, 0)].sum())
    factor = 2 * local * constants.gradient_bound * constants.second_moment * total
    phi = factor * float((logarithm * steps**2 * memory).sum())
    bound = (quadratic + constants.constant(total, steps)) / float(pi @ q) + psi + phi / decay
    return float(bound / steps.sum() if per_step else bound)


def optimal_weights(
    target: ArrayLike,
    availability: ArrayLike,
    quadratic: ArrayLike,
    constant: float,
    *,
    bias: float,
    total_weight: float | None = None,
) -> FloatArray:
    """The weights that minimise the sum of both bounds, problem 14, for known constants.

        minimise (1/2 sum_k quadratic_k q_k^2 + constant) / (pi'q) + bias * chi-square(alpha, p(q))
        subject to q >= 0, sum_k q_k = total_weight

    `quadratic` is the diagonal of Sigma and `constant` is v (`ConvergenceConstants` gives both); `bias` is Gamma times
    kappa2; 0 leaves the optimisation error alone (section III-D). The default total is that of alpha_k / pi_k.

    With z = q / (pi'q) the problem is convex: 1/2 Q z'Sz / (1'z) + (v / Q) 1'z + bias sum_k alpha_k^2 / (pi_k z_k)
    under pi'z = 1, z >= 0. Newton's method with a vanishing logarithmic barrier solves it, O(N^3) per step: for
    studies of some hundred clients, not for use in a round.
    """
    alpha = _vector(target, "target")
    pi = _vector(availability, "availability", len(alpha))
    if not pi.min() > 0:
        raise InvalidInput("availability must be above 0 for all clients. Leave out clients that are never available.")
    total = float((alpha / pi).sum()) if total_weight is None else float(total_weight)
    problem = _Problem(_vector(quadratic, "quadratic", len(alpha)) * total, constant / total, bias * alpha**2 / pi)
    z = np.full(len(alpha), 1 / pi.sum())
    barrier = max(abs(problem.value(z, 0.0)), 1.0) / len(alpha)
    for _ in range(_BARRIER_STEPS):
        z = problem.newton(z, pi, barrier)
        barrier *= 0.5
    weights: FloatArray = z * (total / z.sum())
    return weights


@dataclass(frozen=True)
class _Problem:
    """1/2 sum_k curve_k z_k^2 / sum(z) + slope sum(z) + sum_k pull_k / z_k, with a barrier."""

    curve: FloatArray
    slope: float
    pull: FloatArray

    def value(self, z: FloatArray, barrier: float) -> float:
        quadratic = 0.5 * float(self.curve @ z**2) / float(z.sum())
        return quadratic + self.slope * float(z.sum()) + float((self.pull / z).sum()) - barrier * float(np.log(z).sum())

    def newton(self, z: FloatArray, pi: FloatArray, barrier: float) -> FloatArray:
        """The minimum for one barrier, from a feasible start."""
        size = len(z)
        for _ in range(_NEWTON_STEPS):
            sum_z, curved, squares = z.sum(), self.curve * z, self.curve @ z**2
            gradient = curved / sum_z - squares / (2 * sum_z**2) + self.slope - self.pull / z**2 - barrier / z
            matrix = np.zeros((size + 1, size + 1))
            matrix[:size, :size] = (squares / sum_z - curved[:, None] - curved[None, :]) / sum_z**2
            matrix[np.arange(size), np.arange(size)] += self.curve / sum_z + 2 * self.pull / z**3 + barrier / z**2
            matrix[:size, size] = matrix[size, :size] = pi
            step = np.linalg.solve(matrix, np.append(-gradient, 0.0))[:size]
            slope = float(gradient @ step)
            if slope > -1e-12 * max(abs(self.value(z, barrier)), 1e-300):
                break
            shrinking = step < 0
            length = min(1.0, 0.99 * float((-z[shrinking] / step[shrinking]).min(initial=np.inf)))
            start = self.value(z, barrier)
            while self.value(z + length * step, barrier) > start + 1e-4 * length * slope and length > 1e-14:
                length *= 0.5
            z = z + length * step
        return z


def cumulative_importance(rounds: Iterable[tuple[ArrayLike, ArrayLike]], num_clients: int) -> FloatArray:
    """The mean weight with which every client entered the model, (N,), over rounds of (clients, weights): figure 1d.

    Give the weights as applied (`fedpick.aggregation_weights`), 0 for a client that did not complete. Empty rounds
    count.

    >>> cumulative_importance([([0, 2], [0.5, 1.0]), ([], []), ([2], [0.5])], 3).round(3)
    array([0.167, 0.   , 0.5  ])
    """
    sums, count = np.zeros(num_clients), 0
    for clients, weights in rounds:
        np.add.at(sums, np.asarray(clients, dtype=np.int64), np.asarray(weights, dtype=np.float64))
        count += 1
    return sums / max(count, 1)
