"""How biased is a policy, and what does the bias cost? The analysis of Power-of-Choice, for any policy and any task.

Cho, Wang and Joshi (2022) describe a task by its local-global objective gap (definition 3.1) and a policy by its
selection skew (definition 3.2): the expected excess loss of the cohort over that of everybody. A larger skew converges
faster, a skew that varies leaves a bias. Everything here needs a task whose local optima are known: `Objectives`.

Every skew is linear in the policy's mean weights at a model w, so one Monte Carlo sample of cohorts at w serves all w'.
The weights are those with which the policy averages, so that a policy that does not average equally gets its skew of
appendix E; fixed weights q_k can be given instead (equation 77).

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
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpick.core.arrays import FloatArray
from fedpick.core.errors import InvalidInput
from fedpick.core.policy import Policy
from fedpick.core.rng import Purpose, stream
from fedpick.core.types import Clients, Measurement, Outcome, RoundContext, aggregation_weights
from fedpick.core.validation import assign
from fedpick.policies.md import Multinomial

__all__ = [
    "Cohorts",
    "Estimate",
    "Objectives",
    "SkewExtremes",
    "grid",
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
        """(N,), F_k(w) - F_k*: what the model at w loses on each client against the client's own best."""
        values = self.at(point)
        excess = values - self.local_minima
        # Rounding may leave a little less than 0; more than that is a local minimum that is none.
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
    """Gamma = F* - sum_k p_k F_k*, definition 3.1: how far the clients are from agreeing; 0 if one model suits all."""
    return float(objectives.clients.importance @ objectives.excess(objectives.minimizer))


@dataclass(frozen=True)
class Estimate:
    """A Monte Carlo estimate."""

    value: float
    standard_error: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Cohorts:
    """Cohorts drawn by a policy at one model, laid end to end."""

    num_clients: int
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
    """Draw S(pi, w) many times: the policy decides at the model w and gets exact losses wherever it asks.

    Args:
        point: w, the model that the selection sees.
        samples: 10,000 in the paper.
        index: the round in which the policy believes itself; matters to schedules such as that of adapow-d.
        state: where the policy starts; None: as new.
        informed: first tell the policy everybody's exact loss at w, as if all had just trained. A policy that asks
            nothing but remembers reports (rpow-d, afl) knows nothing of w otherwise.
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
        everybody = np.arange(len(clients))
        told = np.ones(len(clients), dtype=bool)
        start = policy.observe(
            start, Outcome(index=index, clients=everybody, completed=told, loss=losses, train_loss=losses)
        )
    fixed = None if averaging is None else np.asarray(averaging, dtype=np.float64)
    if fixed is not None and fixed.shape != (len(clients),):
        raise InvalidInput(f"averaging must have the shape ({len(clients)},). Got {fixed.shape}.")
    chosen, weights = [], []
    for _ in range(samples):
        selection = _one_cohort(policy, start, context, losses, rng)
        chosen.append(selection.clients)
        everyone = np.ones(len(selection.clients), dtype=bool)
        given = aggregation_weights(selection, everyone, clients)
        if fixed is not None:
            # Only `md` draws copies, and folds them into its weights, copies / m.
            copies = given * budget if isinstance(policy, Multinomial) else 1.0
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
    everybody = float(objectives.clients.importance @ excess)
    if not everybody > 0:
        raise InvalidInput("The skew is not defined where every client is at its own optimum: the denominator is 0.")
    cohort = sample_cohorts(policy, objectives, selecting, **sampling).mean_of(excess)
    return Estimate(cohort.value / everybody, cohort.standard_error / everybody)


@dataclass(frozen=True, kw_only=True)
class SkewExtremes:
    """What a grid search found. As extremes of noisy values, the minima are biased down and the maximum up."""

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
    everybody = excess @ importance
    safe = np.where(everybody > 0, everybody, np.nan)
    skews: FloatArray = (mean_weights @ excess.T) / safe
    return skews
