"""How biased a policy is, and what the bias costs: the analysis of Power-of-Choice, for any policy and any task.

Cho, Wang and Joshi (2022) describe a task by its local-global objective gap (definition 3.1) and a policy by its
selection skew (definition 3.2): the expected excess loss of the cohort over that of all clients. A larger skew
converges faster, a skew that varies leaves a bias. The skews need a task whose local optima are known: `Objectives`.

Every skew is linear in the policy's mean weights at a model w, so one Monte Carlo sample of cohorts at w serves all w'.
The weights are those with which the policy averages, so that a policy that does not average equally gets its skew of
appendix E; fixed weights q_k can be given instead (equation 77).

The bounds: E[F(w_T)] - F* is at most a part that vanishes with T, the number of local *iterations* (rounds times local
steps), plus a bias that the policy's skew leaves behind. They hold for objectives that are smooth and strongly convex,
with bounded gradients (assumptions 3.1 to 3.4).

Deviations: the bias in equation 86 is printed as 2 L Gamma / (rho_bar mu) * (rho_tilde / rho_bar - 1), but equations
83 to 85, from which it follows, give it without the first rho_bar. `averaging_bound` returns what follows from them,
and with `as_printed=True` what is printed.

The example is figure 1 with one client to choose: two clients, F_1 = w^2 / 2 and F_2 = (w - 2)^2 / 2. At w = 0 the
second has all of the excess loss, twice the mean:

>>> from fedpick import policies
>>> task = quadratics(curvature=[1.0, 1.0], linear=[[0.0], [2.0]])
>>> objective_gap(task)
0.5
>>> greedy = policies.get("pow-d", num_candidates="all")
>>> selection_skew(greedy, task, selecting=np.zeros(1), evaluated=np.zeros(1), budget=1, samples=10).value
2.0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpick.core.arrays import FloatArray
from fedpick.core.errors import InvalidInput
from fedpick.core.policy import Policy
from fedpick.core.rng import Purpose, stream
from fedpick.core.types import Clients, Measurement, Outcome, RoundContext, aggregation_weights
from fedpick.core.validation import assign
from fedpick.policies.md import MD

__all__ = [
    "Bound",
    "Cohorts",
    "Constants",
    "Estimate",
    "Objectives",
    "SkewExtremes",
    "averaging_bound",
    "decaying_rate_bound",
    "fixed_rate_bound",
    "grid",
    "largest_fixed_rate",
    "objective_gap",
    "quadratics",
    "sample_cohorts",
    "selection_skew",
    "skew_extremes",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class Objectives:
    """The local objectives of a task with known optima. A model w may be anything that `losses` understands."""

    clients: Clients
    """The table of clients."""
    losses: Callable[[Any], ArrayLike]
    """losses(w) -> (N,), F_k(w) for every client."""
    local_minima: FloatArray
    """(N,), F_k*: the smallest value of each local objective."""
    minimizer: Any
    """w*, the minimiser of F = sum_k importance_k F_k."""

    def __post_init__(self) -> None:
        minima = np.asarray(self.local_minima, dtype=np.float64)
        if minima.shape != (len(self.clients),) or not np.isfinite(minima).all():
            raise InvalidInput(
                f"Objectives.local_minima must be {len(self.clients)} finite numbers, one per client. "
                f"Got an array of shape {minima.shape}."
            )
        assign(self, local_minima=minima)

    def at(self, point: Any) -> FloatArray:
        """(N,), F_k(w)."""
        values = np.asarray(self.losses(point), dtype=np.float64)
        if values.shape != (len(self.clients),) or not np.isfinite(values).all():
            raise InvalidInput(
                f"Objectives.losses must return {len(self.clients)} finite numbers, one per client. "
                f"Got {'an array of shape ' + str(values.shape) if values.ndim != 1 else values}."
            )
        return values

    def excess(self, point: Any) -> FloatArray:
        """(N,), F_k(w) - F_k*: what the model at w loses on each client against the best local model."""
        values = self.at(point)
        excess = values - self.local_minima
        # Rounding may leave a little less than 0. Anything lower means that the given local minimum is wrong.
        allowed = 1e-9 * (1 + np.abs(values) + np.abs(self.local_minima))
        if (excess < -allowed).any():
            worst = int(np.argmin(excess))
            raise InvalidInput(
                f"Objectives.local_minima[{worst}] is {self.local_minima[worst]:g}, but that client's loss is "
                f"{values[worst]:g} at some point: give the smallest value of every local objective."
            )
        return np.maximum(excess, 0.0)


def quadratics(curvature: ArrayLike, linear: ArrayLike, clients: Clients | None = None) -> Objectives:
    """The quadratic federation of appendix F: F_k(w) = h_k/2 |w|^2 - e_k.w + |e_k|^2 / (2 h_k), equation 87.

    Args:
        curvature: (N,), h_k larger than 0.
        linear: (N, v), e_k.
        clients: whose importance weights the global objective; None: equal sizes.
    """
    h, e = np.asarray(curvature, dtype=np.float64), np.asarray(linear, dtype=np.float64)
    if h.ndim != 1 or e.ndim != 2 or len(h) != len(e) or not (len(h) and h.min() > 0):
        raise InvalidInput(
            f"quadratics needs curvature (N,) larger than 0 and linear (N, v). Got the shapes {h.shape} and {e.shape}."
        )
    table = Clients(num_examples=np.ones(len(h))) if clients is None else clients
    centres, p = e / h[:, None], table.importance
    return Objectives(
        clients=table,
        losses=lambda w: 0.5 * h * ((np.asarray(w) - centres) ** 2).sum(axis=1),
        local_minima=np.zeros(len(h)),
        minimizer=(p @ e) / (p @ h),
    )


def grid(low: ArrayLike, high: ArrayLike, per_axis: int) -> FloatArray:
    """(per_axis ** v, v) points of a regular grid over a box, the corners included.

    >>> grid([0.0, 0.0], [1.0, 2.0], 2).tolist()
    [[0.0, 0.0], [0.0, 2.0], [1.0, 0.0], [1.0, 2.0]]
    """
    bottom, top = np.atleast_1d(np.asarray(low, dtype=np.float64)), np.atleast_1d(np.asarray(high, dtype=np.float64))
    if bottom.shape != top.shape or bottom.ndim != 1 or per_axis < 1:
        raise InvalidInput("grid needs low and high of one length, and at least one point per axis.")
    axes = [np.linspace(a, b, per_axis) for a, b in zip(bottom, top, strict=True)]
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(bottom))


def objective_gap(objectives: Objectives) -> float:
    """Gamma = F* - sum_k p_k F_k*, definition 3.1: how far apart the clients' optima are; 0 if one model suits all."""
    return float(objectives.clients.importance @ objectives.excess(objectives.minimizer))


@dataclass(frozen=True)
class Estimate:
    """A Monte Carlo estimate."""

    value: float
    """The mean."""
    standard_error: float
    """Its standard error."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Cohorts:
    """Cohorts drawn by a policy at one model, laid end to end."""

    num_clients: int
    """N."""
    clients: NDArray[np.int64]
    """(sum of the cohort sizes,)"""
    weights: FloatArray
    """(sum of the cohort sizes,), with which each client's update would enter the model."""
    ends: NDArray[np.int64]
    """(samples,), where each cohort ends."""

    def mean_weights(self) -> FloatArray:
        """(N,), the mean weight of every client."""
        totals = np.bincount(self.clients, weights=self.weights, minlength=self.num_clients)
        return totals / len(self.ends)

    def mean_of(self, values: FloatArray) -> Estimate:
        """The mean over the cohorts of the weighted sum of a per-client quantity, (N,)."""
        running = np.concatenate([[0.0], np.cumsum(self.weights * values[self.clients])])
        sums = np.diff(running[np.concatenate([[0], self.ends])])
        spread = sums.std(ddof=1) if len(sums) > 1 else np.nan
        return Estimate(float(sums.mean()), float(spread / np.sqrt(len(sums))))


def sample_cohorts(
    policy: Policy[Any],
    objectives: Objectives,
    point: Any,
    *,
    budget: int,
    samples: int = 10_000,
    seed: int = 0,
    index: int = 0,
    available: ArrayLike | None = None,
    state: Any = None,
    informed: bool = False,
    averaging: ArrayLike | None = None,
) -> Cohorts:
    """Draw S(pi, w) many times: the policy decides at the model w and gets exact losses as answers to its probes.

    Args:
        point: w, the model that the selection sees.
        samples: 10,000 in the paper.
        index: the round that the policy is given; it matters to schedules such as that of adapow-d.
        state: the policy's state; None: a new one.
        informed: first report every client's exact loss at w to the policy, as if all had just trained. A policy that
            does not probe but remembers reports (rpow-d, afl) knows nothing of w otherwise.
        averaging: (N,), fixed weights q_k as in appendix E, once for every copy of a client that `md` drew several
            times; None: the weights that the policy gives.
    """
    if samples < 1:
        raise InvalidInput(f"samples must be at least 1. Got {samples}.")
    clients, losses = objectives.clients, objectives.at(point)
    rng = stream(seed, index, Purpose.ANALYSIS)
    mask = np.ones(len(clients), dtype=bool) if available is None else np.asarray(available)
    context = RoundContext(index=index, budget=budget, available=mask, clients=clients)
    start = policy.init(clients, rng) if state is None else state
    if informed:
        completed = np.ones(len(clients), dtype=bool)
        start = policy.observe(
            start,
            Outcome(index=index, clients=np.arange(len(clients)), completed=completed, loss=losses, train_loss=losses),
        )
    fixed = None if averaging is None else np.asarray(averaging, dtype=np.float64)
    if fixed is not None and fixed.shape != (len(clients),):
        raise InvalidInput(f"averaging must have the shape ({len(clients)},). Got {fixed.shape}.")
    chosen, weights = [], []
    for _ in range(samples):
        selection = _one_cohort(policy, start, context, losses, rng)
        chosen.append(selection.clients)
        completed = np.ones(len(selection.clients), dtype=bool)
        given = aggregation_weights(selection, completed, clients)
        if fixed is not None:
            # Only `md` draws a client several times; its weight is copies / m.
            copies = given * budget if isinstance(policy, MD) else 1.0
            given = fixed[selection.clients] * copies
        weights.append(given)
    return Cohorts(
        num_clients=len(clients),
        clients=np.concatenate(chosen),
        weights=np.concatenate(weights),
        ends=np.cumsum([len(cohort) for cohort in chosen]),
    )


def _one_cohort(policy: Policy[Any], state: Any, context: RoundContext, losses: FloatArray, rng: Any) -> Any:
    probes = policy.probe(state, context, rng)
    for probe in probes:
        if probe.signal != "loss" or probe.trial is not None:
            raise InvalidInput(
                f"{type(policy).__name__} asks for more than the loss of the current model "
                f"({probe.signal.value}{' of a trial' if probe.trial is not None else ''}), which a task with known "
                "optima does not define. Analyse such a policy on its runs instead."
            )
    answers = tuple(Measurement(clients=probe.clients, values=losses[probe.clients]) for probe in probes)
    selection, _ = policy.select(state, replace(context, measurements=answers), rng)
    return selection


def selection_skew(
    policy: Policy[Any], objectives: Objectives, *, selecting: Any, evaluated: Any, **sampling: Any
) -> Estimate:
    """rho(S(pi, w), w') of equation 5, or of equation 77 for a policy that does not average equally.

    Args:
        selecting: w, which governs the selection.
        evaluated: w', where the losses are compared.
        sampling: `budget` and the other arguments of `sample_cohorts`.
    """
    excess = objectives.excess(evaluated)
    mean_excess = float(objectives.clients.importance @ excess)
    if not mean_excess > 0:
        raise InvalidInput("The skew is not defined where every client is at its own optimum: the denominator is 0.")
    cohort = sample_cohorts(policy, objectives, selecting, **sampling).mean_of(excess)
    return Estimate(cohort.value / mean_excess, cohort.standard_error / mean_excess)


@dataclass(frozen=True, kw_only=True)
class SkewExtremes:
    """The result of a grid search. As extremes of noisy values, the minima are biased down and the maximum up."""

    rho_bar: float
    """Smallest rho(S(pi, w), w'), equation 6: the speed."""
    rho_tilde: float
    """Largest rho(S(pi, w), w*), equation 7; with `rho_bar`, the bias."""
    rho_same: float
    """Smallest rho(S(pi, w), w): what the proof needs where clients take one local step. Not in the paper."""
    selecting: int
    """Position of the w that gives `rho_bar`."""
    evaluated: int
    """Position of the w' that gives `rho_bar`; the number of positions stands for w*."""

    @property
    def ratio(self) -> float:
        """rho_tilde / rho_bar, the bias of figure 2 (d); infinite where rho_bar is 0."""
        return self.rho_tilde / self.rho_bar if self.rho_bar > 0 else float("inf")


def skew_extremes(
    policy: Policy[Any],
    objectives: Objectives,
    points: Sequence[Any],
    *,
    evaluated: Sequence[Any] | None = None,
    **sampling: Any,
) -> SkewExtremes:
    """rho-bar and rho-tilde of equations 6 and 7, by search over points and Monte Carlo at each (appendix F).

    Args:
        points: the models w that govern the selection, such as `grid(...)`; costly: each takes `samples` cohorts.
        evaluated: the models w' at which losses are compared; cheap; None: the same points. w* is always added.
        sampling: `budget` and the other arguments of `sample_cohorts`.
    """
    if len(points) == 0:
        raise InvalidInput("skew_extremes needs at least one point. Got none.")
    importance = objectives.clients.importance
    mean_weights = np.stack(
        [sample_cohorts(policy, objectives, point, **sampling).mean_weights() for point in points]
    )  # (P, N)
    compared = [*(points if evaluated is None else evaluated), objectives.minimizer]
    skews = _skews(mean_weights, np.stack([objectives.excess(point) for point in compared]), importance)  # (P, Q)
    if np.isnan(skews[:, -1]).any():
        raise InvalidInput("The objective gap is 0: one model suits all clients, and no selection is biased.")
    own = np.stack([objectives.excess(point) for point in points])
    diagonal = np.array(
        [_skews(mean_weights[row : row + 1], own[row : row + 1], importance)[0, 0] for row in range(len(own))]
    )
    selecting, evaluating = np.unravel_index(int(np.nanargmin(skews)), skews.shape)
    return SkewExtremes(
        rho_bar=float(np.nanmin(skews)),
        rho_tilde=float(skews[:, -1].max()),
        rho_same=float(np.nanmin(np.append(diagonal, np.inf))),
        selecting=int(selecting),
        evaluated=int(evaluating),
    )


def _skews(mean_weights: FloatArray, excess: FloatArray, importance: FloatArray) -> FloatArray:
    """(P, Q) skews from mean weights (P, N) and excess losses (Q, N); NaN where the denominator is 0."""
    mean_excess = excess @ importance
    safe = np.where(mean_excess > 0, mean_excess, np.nan)
    skews: FloatArray = (mean_weights @ excess.T) / safe
    return skews


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
    """The part that stays for every T."""

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
            "The bound is infinite for rho_bar = 0: at some model the policy picks only clients that are at their "
            "optimum at another one. Search a smaller range of models, those that training passes through."
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
