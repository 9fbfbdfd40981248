"""The convergence bounds of Power-of-Choice (Cho, Wang and Joshi 2022) for any selection policy.

E[F(w_T)] - F* is at most a part that vanishes with T, the number of local *iterations* (rounds times local steps), plus
a bias that the policy's skew leaves behind. They hold for objectives that are smooth and strongly convex, with bounded
gradients (assumptions 3.1 to 3.4).
Deviations: the bias in equation 86 is printed as 2 L Gamma / (rho_bar mu) * (rho_tilde / rho_bar - 1), but equations
83 to 85, from which it follows, give it without the first rho_bar. `averaging_bound` returns what follows from them;
`as_printed=True` what is printed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike

from fedpick.core.arrays import FloatArray
from fedpick.core.errors import InvalidInput

__all__ = [
    "Bound",
    "Constants",
    "averaging_bound",
    "decaying_rate_bound",
    "fixed_rate_bound",
    "largest_fixed_rate",
]


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What the bounds need to know of a task and its training."""

    smoothness: float
    """L, of assumption 3.1."""
    strong_convexity: float
    """mu, of assumption 3.2."""
    gradient_bound: float
    """G: the root of the largest expected squared norm of a stochastic gradient, of assumption 3.4."""
    gradient_noise: float = 0.0
    """sigma: the root of the largest variance of a stochastic gradient, of assumption 3.3; 0 for full gradients."""
    local_steps: int = 1
    """tau: local iterations in a round."""
    budget: int
    """m: clients in a cohort."""
    gap: float
    """Gamma, of definition 3.1: `objective_gap`."""

    def __post_init__(self) -> None:
        least = {"smoothness": None, "strong_convexity": None, "local_steps": 1, "budget": 1}
        for item in fields(self):
            value, bottom = getattr(self, item.name), least.get(item.name, 0)
            enough = value > 0 if bottom is None else value >= bottom
            if not (np.isfinite(value) and enough):
                expected = "larger than 0" if bottom is None else f"at least {bottom}"
                raise InvalidInput(f"Constants.{item.name} must be finite and {expected}. Got {value!r}.")
        if self.strong_convexity > self.smoothness:
            raise InvalidInput(
                f"Constants.strong_convexity, {self.strong_convexity:g}, cannot exceed smoothness, {self.smoothness:g}."
            )


@dataclass(frozen=True, eq=False)
class Bound:
    """A bound in its two parts."""

    vanishing: FloatArray
    """For every T asked for; falls to 0 (theorem 3.1), or to 0 from either side (theorem A.1)."""
    bias: float
    """What stays."""

    @property
    def total(self) -> FloatArray:
        """The bound on E[F(w_T)] - F*."""
        return self.vanishing + self.bias


def _check(rho_bar: float, rho_tilde: float, iterations: ArrayLike) -> FloatArray:
    if not (np.isfinite(rho_bar) and np.isfinite(rho_tilde) and rho_tilde >= rho_bar >= 0):
        raise InvalidInput(
            f"The skews must satisfy rho_tilde >= rho_bar >= 0. Got rho_bar={rho_bar!r} and rho_tilde={rho_tilde!r}."
        )
    steps = np.asarray(iterations, dtype=np.float64)
    if not (steps >= 0).all():
        raise InvalidInput("iterations must be at least 0: local iterations, rounds times local steps.")
    return steps


def _check_positive_skew(rho_bar: float) -> None:
    if rho_bar == 0:
        raise InvalidInput(
            "The bound is infinite where rho_bar is 0: at some models the policy picks only clients that are at their "
            "own optimum elsewhere. Search a smaller range of models, those that training passes through."
        )


def decaying_rate_bound(
    constants: Constants, rho_bar: float, rho_tilde: float, *, iterations: ArrayLike, initial_distance: float
) -> Bound:
    """Theorem 3.1: learning rate 1 / (mu (t + gamma)) with gamma = 4 L / mu.

    Args:
        iterations: T, a number or an array.
        initial_distance: |w_0 - w*|.
    """
    steps = _check(rho_bar, rho_tilde, iterations)
    _check_positive_skew(rho_bar)
    L, mu, gap = constants.smoothness, constants.strong_convexity, constants.gap
    gamma = 4 * L / mu
    noise = 32 * constants.local_steps**2 * constants.gradient_bound**2 + constants.gradient_noise**2 / constants.budget
    bracket = 4 * L * noise / (3 * mu**2 * rho_bar) + 8 * L**2 * gap / mu**2 + L * gamma * initial_distance**2 / 2
    return Bound(bracket / (steps + gamma), 8 * L * gap / (3 * mu) * (rho_tilde / rho_bar - 1))


def largest_fixed_rate(constants: Constants, rho_bar: float) -> float:
    """The largest learning rate that theorem A.1 allows: min(1 / (2 mu B), 1 / (4 L)) with B = 1 + 3 rho_bar / 8."""
    return min(1 / (2 * constants.strong_convexity * (1 + 3 * rho_bar / 8)), 1 / (4 * constants.smoothness))


def fixed_rate_bound(
    constants: Constants,
    rho_bar: float,
    rho_tilde: float,
    *,
    iterations: ArrayLike,
    learning_rate: float,
    initial_error: float,
) -> Bound:
    """Theorem A.1 (equation 9): a fixed learning rate of at most `largest_fixed_rate`.

    Args:
        iterations: T, a number or an array.
        initial_error: F(w_0) - F*.
    """
    steps = _check(rho_bar, rho_tilde, iterations)
    if not 0 < learning_rate <= largest_fixed_rate(constants, rho_bar):
        raise InvalidInput(
            f"Theorem A.1 needs a learning rate in (0, {largest_fixed_rate(constants, rho_bar):g}]. "
            f"Got {learning_rate!r}."
        )
    L, mu, gap = constants.smoothness, constants.strong_convexity, constants.gap
    noise = 32 * constants.local_steps**2 * constants.gradient_bound**2 + constants.gradient_noise**2 / constants.budget
    floor = 4 * (learning_rate * (noise + 6 * rho_bar * L * gap) + 2 * gap * (rho_tilde - rho_bar)) / (8 + 3 * rho_bar)
    decay = (1 - learning_rate * mu * (1 + 3 * rho_bar / 8)) ** steps
    return Bound(L / mu * decay * (initial_error - floor), L / mu * floor)


def averaging_bound(
    constants: Constants,
    rho_bar: float,
    rho_tilde: float,
    *,
    iterations: ArrayLike,
    initial_distance: float,
    as_printed: bool = False,
) -> Bound:
    """Equation 86, for other averaging weights: rate m / (mu (t + gamma)) with gamma = 4 m (1 + m) L / mu.

    Args:
        iterations: T, a number or an array.
        initial_distance: |w_0 - w*|.
        as_printed: divide the bias once more by rho_bar, as the paper prints it.
    """
    steps = _check(rho_bar, rho_tilde, iterations)
    _check_positive_skew(rho_bar)
    L, mu, gap, m = constants.smoothness, constants.strong_convexity, constants.gap, constants.budget
    gamma = 4 * m * (1 + m) * L / mu
    noise = 32 * m * (m - 1) * constants.local_steps**2 * constants.gradient_bound**2 + constants.gradient_noise**2
    bracket = (
        L * m**2 * noise / (mu**2 * rho_bar)
        + 2 * L**2 * m * (m + 2) * gap / mu**2
        + L * gamma * initial_distance**2 / 2
    )
    bias = 2 * L * gap / mu * (rho_tilde / rho_bar - 1)
    return Bound(bracket / (steps + gamma), bias / rho_bar if as_printed else bias)
