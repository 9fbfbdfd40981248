from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedpick import Outcome, Session, policies
from fedpick.core.errors import InvalidInput
from fedpick.theory.power_of_choice import (
    Constants,
    averaging_bound,
    decaying_rate_bound,
    fixed_rate_bound,
    grid,
    largest_fixed_rate,
    objective_gap,
    quadratics,
    skew_extremes,
)

SETTING = Constants(
    smoothness=2.0, strong_convexity=1.0, gradient_bound=0.5, gradient_noise=1.0, local_steps=3, budget=4, gap=0.25
)


def recursion(steps, *, initial, factor, noise, bias, rate):
    """Delta_{t+1} = (1 - eta_t mu B) Delta_t + eta_t^2 C + eta_t D, equation 66."""
    delta = initial
    for t in range(steps):
        eta = rate(t)
        delta = (1 - eta * factor) * delta + eta**2 * noise + eta * bias
    return delta


def test_theorem_31_by_hand():
    bound = decaying_rate_bound(SETTING, 2.0, 3.0, iterations=np.array([0, 92]), initial_distance=3.0)
    # gamma = 8; noise = 32 * 9 * 1/4 + 1/4 = 72.25; 4 * 2 * 72.25 / 6 + 8 * 4 / 4 + 2 * 8 * 9 / 2 = 96.333 + 8 + 72
    np.testing.assert_allclose(bound.vanishing, np.array([1 / 8, 1 / 100]) * (289 / 3 + 80))
    assert bound.bias == pytest.approx(8 * 2 * 0.25 / 3 * 0.5)
    np.testing.assert_allclose(bound.total, bound.vanishing + bound.bias)


def test_theorem_31_covers_the_recursion_it_comes_from():
    for rho_bar, rho_tilde in ((1.0, 1.0), (0.5, 0.7), (2.0, 3.0)):
        noise = 32 * 9 * 0.25 + 0.25 + 6 * rho_bar * 2.0 * 0.25
        for steps in (1, 10, 1000):
            delta = recursion(
                steps,
                initial=9.0,
                factor=1 + 3 * rho_bar / 8,
                noise=noise,
                bias=2 * 0.25 * (rho_tilde - rho_bar),
                rate=lambda t: 1 / (t + 8),
            )
            bound = decaying_rate_bound(SETTING, rho_bar, rho_tilde, iterations=steps, initial_distance=3.0)
            assert SETTING.smoothness / 2 * delta <= bound.total


def test_theorem_a1_is_the_closed_form_of_its_recursion():
    rho_bar, rho_tilde, eta = 1.5, 2.0, 0.05
    noise = 32 * 9 * 0.25 + 0.25 + 6 * rho_bar * 2.0 * 0.25
    for steps in (0, 1, 7, 300):
        # Equation 71 starts from Delta_0 = 2 / mu (F(w_0) - F*) with F(w_0) - F* = 3.
        delta = recursion(
            steps,
            initial=2 * 3.0,
            factor=1 + 3 * rho_bar / 8,
            noise=noise,
            bias=2 * 0.25 * (rho_tilde - rho_bar),
            rate=lambda t: eta,
        )
        bound = fixed_rate_bound(SETTING, rho_bar, rho_tilde, iterations=steps, learning_rate=eta, initial_error=3.0)
        assert bound.total == pytest.approx(SETTING.smoothness / 2 * delta)


def test_theorem_a1_refuses_a_rate_that_it_does_not_cover():
    assert largest_fixed_rate(SETTING, 8.0) == pytest.approx(1 / 8)
    flat = replace(SETTING, smoothness=1.0)
    assert largest_fixed_rate(flat, 8.0) == pytest.approx(1 / 8)  # 1 / (2 (1 + 3))
    with pytest.raises(InvalidInput, match="learning rate"):
        fixed_rate_bound(SETTING, 8.0, 8.0, iterations=1, learning_rate=0.13, initial_error=1.0)


def test_equation_86_covers_its_recursion_only_without_the_extra_factor():
    """The bias as printed has one rho_bar too many: for rho_bar > 1 it is smaller than the recursion's limit."""
    rho_bar, rho_tilde, m = 8.0, 16.0, 4
    gap = 1000.0  # so that the bias dominates
    setting = replace(SETTING, gap=gap)
    L, mu = 2.0, 1.0
    gamma, beta = 4 * m * (1 + m) * L / mu, m / mu
    noise = 32 * m**2 * (m - 1) * 9 * 0.25 + m + 2 * L * (2 + m) * rho_bar * gap
    steps = 200_000
    delta = recursion(
        steps,
        initial=9.0,
        factor=mu * (1 / m + rho_bar / 2),
        noise=noise,
        bias=2 * gap * (rho_tilde - rho_bar),
        rate=lambda t: beta / (t + gamma),
    )
    options = {"iterations": steps, "initial_distance": 3.0}
    derived = averaging_bound(setting, rho_bar, rho_tilde, **options)
    printed = averaging_bound(setting, rho_bar, rho_tilde, as_printed=True, **options)
    assert printed.bias == pytest.approx(derived.bias / rho_bar)
    assert printed.total < L / 2 * delta <= derived.total


def test_without_skew_there_is_no_bias():
    for bound in (
        decaying_rate_bound(SETTING, 1.0, 1.0, iterations=10, initial_distance=1.0),
        averaging_bound(SETTING, 1.0, 1.0, iterations=10, initial_distance=1.0),
    ):
        assert bound.bias == 0
    slow = fixed_rate_bound(SETTING, 1.0, 1.0, iterations=10, learning_rate=1e-9, initial_error=1.0)
    assert slow.bias == pytest.approx(0, abs=1e-6)


def test_a_larger_skew_is_faster():
    slow, fast = (
        decaying_rate_bound(SETTING, rho, rho, iterations=1000, initial_distance=1.0).total for rho in (1.0, 2.0)
    )
    assert fast < slow


def test_runs_stay_below_the_bound_on_average():
    """Three clients, one of two candidates, two local steps with the decaying rate of theorem 3.1."""
    curvature, linear = np.array([1.0, 2.0, 1.0]), np.array([0.5, 2.0, 2.0])  # local optima 0.5, 1 and 2
    task = quadratics(curvature, linear[:, None])
    policy = policies.get("pow-d", num_candidates=2)
    # Training that starts between the outermost local optima never leaves them.
    skews = skew_extremes(policy, task, grid([0.5], [2.0], 16), budget=1, samples=300)
    assert 0 < skews.rho_bar < 1 < skews.rho_tilde
    setting = Constants(
        smoothness=2.0, strong_convexity=1.0, gradient_bound=2.0, local_steps=2, budget=1, gap=objective_gap(task)
    )
    start, rounds, runs = 2.0, 100, 20
    errors = np.zeros((runs, rounds))
    best = task.clients.importance @ task.at(task.minimizer)
    for seed in range(runs):
        session = Session(policy, task.clients, seed=seed)
        w, t = np.array([start]), 0
        for index in range(rounds):
            chosen = session.ask(budget=1, measure=lambda probe, w=w: task.at(w)[probe.clients]).clients
            for _ in range(2):
                gradient = curvature[chosen] * w - linear[chosen]
                assert np.abs(gradient).max() <= setting.gradient_bound
                w = w - gradient / (t + 8.0)
                t += 1
            session.tell(Outcome(index=index, clients=chosen, completed=np.array([True])))
            errors[seed, index] = task.clients.importance @ task.at(w) - best
    bound = decaying_rate_bound(
        setting,
        skews.rho_bar,
        skews.rho_tilde,
        iterations=2 * np.arange(1, rounds + 1),
        initial_distance=abs(start - task.minimizer[0]),
    )
    assert (errors.mean(axis=0) <= bound.total).all()


def test_refusals():
    with pytest.raises(InvalidInput, match="rho_tilde >= rho_bar"):
        decaying_rate_bound(SETTING, 2.0, 1.0, iterations=1, initial_distance=1.0)
    with pytest.raises(InvalidInput, match="infinite"):
        decaying_rate_bound(SETTING, 0.0, 1.0, iterations=1, initial_distance=1.0)
    with pytest.raises(InvalidInput, match="infinite"):
        averaging_bound(SETTING, 0.0, 1.0, iterations=1, initial_distance=1.0)
    with pytest.raises(InvalidInput, match="iterations"):
        decaying_rate_bound(SETTING, 1.0, 1.0, iterations=-1, initial_distance=1.0)
    with pytest.raises(InvalidInput, match="strong_convexity"):
        replace(SETTING, strong_convexity=3.0)
    with pytest.raises(InvalidInput, match="budget"):
        replace(SETTING, budget=0)
    with pytest.raises(InvalidInput, match="smoothness"):
        replace(SETTING, smoothness=0.0)
