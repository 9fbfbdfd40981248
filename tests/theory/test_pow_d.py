from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from fedpick import Clients, Outcome, Session, policies
from fedpick.core.errors import InvalidInput
from fedpick.core.rng import Purpose, stream
from fedpick.theory.pow_d import (
    Constants,
    Objectives,
    averaging_bound,
    decaying_rate_bound,
    fixed_rate_bound,
    grid,
    largest_fixed_rate,
    objective_gap,
    quadratics,
    sample_cohorts,
    selection_skew,
    skew_extremes,
)


def paper_quadratics(num_clients, seed, dimension=5):
    """Appendix F: h_k ~ U(1, 20), sizes by a power law with exponent 3; e_k ~ U(0, 100) is our choice."""
    rng = stream(seed, 0, Purpose.DATA)
    sizes = rng.power(3, num_clients)
    return quadratics(
        rng.uniform(1, 20, num_clients), rng.uniform(0, 100, (num_clients, dimension)), Clients(num_examples=sizes)
    )


def two_clients():
    """F_1 = w^2 / 2 and F_2 = (w - 2)^2 / 2, of equal weight."""
    return quadratics([1.0, 1.0], [[0.0], [2.0]])


def greedy():
    return policies.get("pow-d", num_candidates="all")


def close(estimate, expected):
    """Within 5 standard errors: a false alarm once in about two million."""
    assert abs(estimate.value - expected) <= 5 * estimate.standard_error + 1e-12, (estimate, expected)


def test_objective_gap_by_hand():
    assert objective_gap(two_clients()) == pytest.approx(0.5)  # w* = 1, both lose 1/2 there
    uneven = quadratics([1.0, 3.0], [[0.0], [6.0]], Clients(num_examples=[3.0, 1.0]))
    # w* = 1.5 / 1.5 = 1; F_1(1) = 1/2, F_2(1) = 3/2; Gamma = 3/4 * 1/2 + 1/4 * 3/2.
    assert uneven.minimizer == pytest.approx([1.0])
    assert objective_gap(uneven) == pytest.approx(0.75)


def test_objective_gap_is_zero_where_clients_agree():
    assert objective_gap(quadratics([1.0, 2.0], [[3.0], [6.0]])) == pytest.approx(0.0)


def test_the_gap_does_not_depend_on_constants_in_the_losses():
    task = paper_quadratics(6, 0)
    shift = np.arange(6.0) - 3
    shifted = Objectives(
        clients=task.clients,
        losses=lambda w: task.at(w) + shift,
        local_minima=shift,
        minimizer=task.minimizer,
    )
    assert objective_gap(shifted) == pytest.approx(objective_gap(task))


def test_quadratics_follow_equation_87():
    task = paper_quadratics(7, 3)
    rng = stream(3, 0, Purpose.DATA)
    sizes, h, e = rng.power(3, 7), rng.uniform(1, 20, 7), rng.uniform(0, 100, (7, 5))
    w = np.linspace(-3, 8, 5)
    expected = [
        0.5 * w @ (h[k] * np.eye(5)) @ w - e[k] @ w + 0.5 * e[k] @ np.linalg.inv(h[k] * np.eye(5)) @ e[k]
        for k in range(7)
    ]
    np.testing.assert_allclose(task.at(w), expected)
    p = sizes / sizes.sum()
    gradient = sum(p[k] * (h[k] * task.minimizer - e[k]) for k in range(7))
    np.testing.assert_allclose(gradient, 0, atol=1e-9)


@pytest.mark.parametrize(
    ("selecting", "evaluated", "expected"),
    [(0.0, 0.0, 2.0), (0.0, 1.0, 1.0), (0.0, 2.0, 0.0), (2.0, 0.0, 0.0), (0.5, 0.5, 1.8), (-1.0, -1.0, 1.8)],
)
def test_skew_of_the_greedy_choice_by_hand(selecting, evaluated, expected):
    skew = selection_skew(greedy(), two_clients(), selecting=[selecting], evaluated=[evaluated], budget=1, samples=3)
    assert skew.value == pytest.approx(expected)


def test_the_skew_of_unbiased_sampling_is_one_everywhere():
    task = paper_quadratics(8, 1)
    for seed, (w, other) in enumerate([(np.zeros(5), np.full(5, 9.0)), (np.full(5, -20.0), task.minimizer)]):
        skew = selection_skew(policies.get("md"), task, selecting=w, evaluated=other, budget=3, samples=3000, seed=seed)
        close(skew, 1.0)
        assert skew.standard_error < 0.05


def test_fixed_weights_count_once_for_every_copy():
    task = paper_quadratics(4, 2)
    common = {"selecting": np.zeros(5), "evaluated": np.full(5, 4.0), "budget": 3, "samples": 3000}
    close(selection_skew(policies.get("md"), task, averaging=np.full(4, 1 / 3), **common), 1.0)


def test_appendix_e_uniform_sampling_with_rescaled_weights_has_skew_one():
    task = paper_quadratics(8, 2)
    scaled = task.clients.importance * 8 / 3  # q_k = p_k K / m
    common = {"selecting": np.zeros(5), "evaluated": np.full(5, 4.0), "budget": 3, "samples": 3000}
    close(selection_skew(policies.get("uniform"), task, averaging=scaled, **common), 1.0)
    # Averaged equally, uniform sampling forgets the sizes.
    plain = selection_skew(policies.get("uniform", weighting="equal"), task, **common)
    excess = task.excess(common["evaluated"])
    close(plain, excess.mean() / (task.clients.importance @ excess))
    assert abs(plain.value - 1) > 5 * plain.standard_error


def test_skew_of_pow_d_against_going_through_all_candidate_lists():
    task = paper_quadratics(5, 4)
    w, other = np.full(5, 3.0), np.full(5, 12.0)
    losses, p, excess = task.at(w), task.clients.importance, task.excess(other)
    expected = 0.0
    for order in permutations(range(5), 3):
        left, probability = 1.0, 1.0
        for client in order:
            probability *= p[client] / left
            left -= p[client]
        top = sorted(order, key=lambda client: -losses[client])[:2]
        expected += probability * excess[top].mean()
    skew = selection_skew(
        policies.get("pow-d", num_candidates=3), task, selecting=w, evaluated=other, budget=2, samples=4000
    )
    close(skew, expected / (p @ excess))


def test_skew_grows_with_the_number_of_candidates():
    task = paper_quadratics(30, 5)
    far = np.full(5, 60.0)
    values = [
        selection_skew(
            policies.get("pow-d", num_candidates=d), task, selecting=far, evaluated=far, budget=3, samples=600
        ).value
        for d in (3, 9, 30)
    ]
    assert values[0] < values[1] < values[2]


def test_policies_that_remember_are_informed_on_request():
    task = paper_quadratics(6, 6)
    w = np.full(5, 2.0)
    remembering, asking = policies.get("rpow-d", num_candidates="all"), greedy()
    common = {"budget": 2, "samples": 50}
    expected = sample_cohorts(asking, task, w, **common).mean_weights()
    informed = sample_cohorts(remembering, task, w, informed=True, **common).mean_weights()
    np.testing.assert_allclose(informed, expected)
    assert np.count_nonzero(sample_cohorts(remembering, task, w, **common).mean_weights()) == 6


def test_the_round_reaches_the_policy():
    task = paper_quadratics(10, 7)
    policy = policies.get("adapow-d", drop_at=5)
    early = sample_cohorts(policy, task, np.zeros(5), budget=2, samples=200, index=4)
    late = sample_cohorts(policy, task, np.zeros(5), budget=2, samples=200, index=5)
    assert np.count_nonzero(early.mean_weights()) == 2
    assert np.count_nonzero(late.mean_weights()) > 5


def test_extremes_by_hand():
    task = two_clients()
    found = skew_extremes(greedy(), task, grid([0.0], [2.0], 5), budget=1, samples=400)
    # At w = 0 client 2 is chosen, which loses nothing at w' = 2; at w* both lose the same.
    assert found.rho_bar == 0.0
    assert found.rho_tilde == pytest.approx(1.0)
    assert found.ratio == float("inf")
    assert found.rho_same == pytest.approx(1.0, abs=0.01)  # at w = w*
    nearby = skew_extremes(greedy(), task, [[0.5]], evaluated=[[0.5], [1.5]], budget=1, samples=10)
    # Client 2 chosen; at 1.5 the excess is 1/8 of a mean of (9/8 + 1/8) / 2.
    assert nearby.rho_bar == pytest.approx(0.2)
    assert (nearby.selecting, nearby.evaluated) == (0, 1)
    assert nearby.rho_same == pytest.approx(1.8)


def test_extremes_of_unbiased_sampling_are_near_one_and_ordered():
    task = paper_quadratics(6, 8, dimension=2)
    found = skew_extremes(policies.get("md"), task, grid([-5.0, -5.0], [25.0, 25.0], 3), budget=2, samples=1500)
    assert found.rho_bar <= found.rho_same
    assert found.rho_bar <= found.rho_tilde
    assert 0.85 < found.rho_bar <= 1.0 <= found.rho_tilde < 1.15


def test_extremes_skip_points_at_which_everybody_is_optimal_only_if_the_clients_differ():
    agreeing = quadratics([1.0, 2.0], [[3.0], [6.0]])
    with pytest.raises(InvalidInput, match="objective gap is 0"):
        skew_extremes(greedy(), agreeing, [[0.0]], budget=1, samples=2)


def test_availability_limits_the_cohorts():
    task = paper_quadratics(6, 9)
    mask = np.array([True, False, True, False, True, False])
    weights = sample_cohorts(greedy(), task, np.zeros(5), budget=2, samples=20, available=mask).mean_weights()
    assert weights[~mask].sum() == 0
    assert weights.sum() == pytest.approx(1)


def test_cohorts_of_varying_size_are_told_apart():
    task = paper_quadratics(6, 10)
    cohorts = sample_cohorts(policies.get("md"), task, np.zeros(5), budget=4, samples=300)
    sizes = np.diff(np.concatenate([[0], cohorts.ends]))
    assert sizes.min() < sizes.max() <= 4
    values = np.arange(6.0)
    starts = cohorts.ends - sizes
    naive = [
        sum(cohorts.weights[i] * values[cohorts.clients[i]] for i in range(start, end))
        for start, end in zip(starts, cohorts.ends, strict=True)
    ]
    estimate = cohorts.mean_of(values)
    assert estimate.value == pytest.approx(np.mean(naive))
    assert estimate.standard_error == pytest.approx(np.std(naive, ddof=1) / np.sqrt(300))
    assert estimate.value == pytest.approx(cohorts.mean_weights() @ values)


def test_refusals():
    task = two_clients()
    with pytest.raises(InvalidInput, match="denominator is 0"):
        selection_skew(
            greedy(), quadratics([1.0, 1.0], [[0.0], [0.0]]), selecting=[1.0], evaluated=[0.0], budget=1, samples=1
        )
    with pytest.raises(InvalidInput, match=r"local_minima\[1\]"):
        Objectives(clients=task.clients, losses=task.losses, local_minima=[0.0, 1.0], minimizer=np.ones(1)).excess(
            np.full(1, 1.5)
        )
    with pytest.raises(InvalidInput, match="2 finite numbers"):
        Objectives(clients=task.clients, losses=task.losses, local_minima=[0.0], minimizer=np.ones(1))
    with pytest.raises(InvalidInput, match=r"Objectives\.losses"):
        Objectives(
            clients=task.clients, losses=lambda w: [np.nan, 1.0], local_minima=[0.0, 0.0], minimizer=np.ones(1)
        ).at(np.ones(1))
    with pytest.raises(InvalidInput, match="samples"):
        sample_cohorts(greedy(), task, np.ones(1), budget=1, samples=0)
    with pytest.raises(InvalidInput, match="averaging"):
        sample_cohorts(greedy(), task, np.ones(1), budget=1, samples=1, averaging=[1.0])
    with pytest.raises(InvalidInput, match="at least one point"):
        skew_extremes(greedy(), task, [], budget=1)
    with pytest.raises(InvalidInput, match="curvature"):
        quadratics([0.0, 1.0], [[1.0], [1.0]])
    with pytest.raises(InvalidInput, match="grid"):
        grid([0.0], [1.0, 2.0], 3)


# Bounds

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


def test_bounds_refuse_impossible_arguments():
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
