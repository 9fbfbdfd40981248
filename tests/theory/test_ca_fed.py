from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from fedpick.core.errors import InvalidInput
from fedpick.theory import ca_fed as errors


def test_biased_importance_and_distances_by_hand():
    # pi q = (0.9, 0.05, 0.05): p is the same, the sum being 1.
    importance = errors.biased_importance([1.0, 0.1, 0.5], [0.9, 0.5, 0.1])
    np.testing.assert_allclose(importance, [0.9, 0.05, 0.05])
    target = [0.5, 0.25, 0.25]
    assert errors.total_variation(target, importance) == pytest.approx(0.4)
    # 0.16 / 0.9 + 2 * 0.04 / 0.05
    assert errors.chi_square_divergence(target, importance) == pytest.approx(0.16 / 0.9 + 1.6)


def test_weights_over_availability_are_without_bias():
    target, availability = np.array([0.2, 0.3, 0.5]), np.array([0.9, 0.1, 0.4])
    importance = errors.biased_importance(target / availability, availability)
    np.testing.assert_allclose(importance, target)
    result = errors.round_error(target, target / availability, availability, [1.0, 2.0, 4.0])
    assert result.total_variation == pytest.approx(0.0, abs=1e-15)
    assert result.epsilon_opt == pytest.approx(0.2 + 0.6 + 2.0)
    assert result.total == pytest.approx(2.8)


def test_excluding_clients_obeys_the_identity_of_the_fast_form():
    # d_TV = 1 - A and the first term S / A, A and S over those left.
    target, availability, gap = np.array([0.2, 0.3, 0.5]), np.array([0.9, 0.1, 0.4]), np.array([1.0, 2.0, 4.0])
    weights = target / availability * [1, 0, 1]
    result = errors.round_error(target, weights, availability, gap, kappa2=0.25)
    assert result.total_variation == pytest.approx(0.3)
    assert result.epsilon_opt == pytest.approx((0.2 + 2.0) / 0.7)
    assert result.epsilon_bias == pytest.approx(4 * 0.25 * 0.09 * 4.0)
    assert result.gamma == 4.0


def test_divergence_is_infinite_for_a_wanted_client_without_importance():
    assert errors.chi_square_divergence([0.5, 0.5], [1.0, 0.0]) == float("inf")
    assert errors.chi_square_divergence([1.0, 0.0], [1.0, 0.0]) == 0.0
    assert errors.bias_bound_chi_square(float("inf"), 0.0, 3.0) == 0.0
    assert errors.bias_bound_total_variation(0.0, 1.0, float("inf")) == 0.0


def test_bounds_by_hand():
    assert errors.bias_bound_chi_square(0.5, 2.0, 9.0) == pytest.approx(9.0)
    assert errors.bias_bound_total_variation(0.5, 2.0, 9.0) == pytest.approx(18.0)
    assert errors.total_error_bound(1.0, 0.5, 4.0) == pytest.approx(12.0)


def constants(**changes):
    values = {
        "smoothness": 2.0,
        "gradient_bound": 3.0,
        "second_moment": 5.0,
        "loss_range": np.e / 2,
        "gamma": 0.5,
        "noise": 1.0,
        "diameter": 4.0,
        "local_steps": 2,
        "num_states": 4.0,
        "mixing_constant": 1.0,
        "mixing_time": 2,
        "eigenvalue": 2 / np.e - 1,  # so that lambda(P) = 1 / e and ln(1 / lambda(P)) = 1
    }
    return errors.ConvergenceConstants(**(values | changes))


def test_theorem_two_by_hand():
    # Two rounds of step sizes 0.5 and 0.1, q = (1, 2), pi = (0.5, 0.25): Q = 3, pi'q = 1, sum of squares 0.26.
    # Sigma = 2 * 3 * pi * 0.26 = (0.78, 0.39): 1/2 q'Sigma q = (0.78 + 1.56) / 2 = 1.17.
    # v = 2/2 * 16 + 1/4 * 4 * 3 * (0.26 + 1 + 1/4) = 16 + 4.53.
    # psi = (4 * 2 * (1 + 6) * 0.5 + 2 * 4 * 25) * 0.26 + e/2 * 0.5 = 228 * 0.26 + e/4.
    # ln(2 C H t) = 1 and 1 + ln 2; J = min(max(1, 2), 1) = 1 and min(max(2, 2), 2) = 2.
    # phi = 2 * 2 * 3 * 5 * 3 * (0.25 * 1 + (1 + ln 2) * 0.01 * 2).
    expected = 1.17 + 20.53 + 59.28 + np.e / 4 + 180 * (0.25 + 0.02 * (1 + np.log(2)))
    arguments = ([1.0, 2.0], [0.5, 0.25], [0.5, 0.1], constants())
    assert errors.optimization_bound(*arguments, per_step=False) == pytest.approx(expected)
    assert errors.optimization_bound(*arguments) == pytest.approx(expected / 0.6)
    # A chain that mixes at once has no rounds before it has: the term of the loss range is empty, as with time 1.
    none, one = (errors.optimization_bound(*arguments[:3], constants(mixing_time=time)) for time in (0, 1))
    assert none == pytest.approx(one)


def test_correlation_worsens_the_bound():
    bounds = [
        errors.optimization_bound([1.0], [0.5], 0.1 / np.arange(1, 50), constants(eigenvalue=value))
        for value in (0.1, 0.5, 0.9, 0.99)
    ]
    assert bounds == sorted(bounds)
    assert bounds[-1] > bounds[0]


def objective(weights, target, availability, quadratic, constant, bias):
    """Problem 14 in its own variables."""
    importance = availability * weights / (availability @ weights)
    error = (0.5 * quadratic @ weights**2 + constant) / (availability @ weights)
    return error + (bias * ((target - importance) ** 2 / importance).sum() if bias else 0.0)


def test_optimal_weights_in_cases_with_a_known_answer():
    target, availability = np.array([0.2, 0.3, 0.5]), np.array([0.9, 0.3, 0.5])
    # Only the bias counts: the unbiased weights.
    weights = errors.optimal_weights(target, availability, np.zeros(3), 0.0, bias=1.0)
    np.testing.assert_allclose(weights, target / availability, rtol=1e-5)
    # Equal clients: equal weights.
    weights = errors.optimal_weights(np.full(3, 1 / 3), np.full(3, 0.5), np.ones(3), 1.0, bias=1.0, total_weight=6.0)
    np.testing.assert_allclose(weights, 2.0, rtol=1e-6)
    # Only the constant counts: all weight to the most available.
    weights = errors.optimal_weights(target, availability, np.zeros(3), 1.0, bias=0.0, total_weight=2.0)
    np.testing.assert_allclose(weights, [2.0, 0.0, 0.0], atol=1e-6)


def test_without_bias_weights_are_linear_in_availability_where_positive():
    # Section III-D: with Sigma proportional to the identity, q_k = a (iota pi_k - theta) or 0.
    availability = np.array([0.05, 0.3, 0.5, 0.7, 0.9])
    weights = errors.optimal_weights(np.full(5, 0.2), availability, np.ones(5), 3.0, bias=0.0, total_weight=2.0)
    assert weights[0] < 1e-6
    positive = weights > 1e-4
    assert positive.sum() >= 3
    slopes = np.diff(weights[positive]) / np.diff(availability[positive])
    np.testing.assert_allclose(slopes, slopes[0], rtol=1e-4)
    assert slopes[0] > 0


def test_optimal_weights_equal_a_general_solver():
    rng = np.random.default_rng(0)
    for _ in range(15):
        size = int(rng.integers(2, 7))
        target, availability = rng.dirichlet(np.ones(size) * 3), rng.uniform(0.1, 1, size)
        quadratic, constant, bias = rng.exponential(size=size), rng.exponential(), rng.exponential()
        total = float((target / availability).sum())
        problem = (target, availability, quadratic, constant, bias)
        ours = errors.optimal_weights(target, availability, quadratic, constant, bias=bias)
        assert ours.sum() == pytest.approx(total)
        assert ours.min() >= 0
        reference = minimize(
            objective,
            target / availability,
            args=problem,
            bounds=[(1e-9, None)] * size,
            constraints={"type": "eq", "fun": lambda weights, total=total: weights.sum() - total},
            options={"ftol": 1e-13, "maxiter": 1000},
        )
        assert objective(ours, *problem) == pytest.approx(reference.fun, rel=1e-5)
        np.testing.assert_allclose(ours, reference.x, atol=5e-3 * total)


def test_cumulative_importance():
    given = errors.cumulative_importance([([0, 1], [1.0, 2.0]), ([1], [3.0]), ([], []), ([2], [4.0])], 4)
    np.testing.assert_allclose(given, [0.25, 1.25, 1.0, 0.0])
    # Realised against target importance.
    assert errors.total_variation([0.25] * 4, given / given.sum()) == pytest.approx(0.4)


@pytest.mark.parametrize(
    "call",
    [
        lambda: errors.biased_importance([0.0, 1.0], [1.0, 0.0]),
        lambda: errors.total_variation([0.5, 0.5], [1.0]),
        lambda: errors.chi_square_divergence([0.5, -0.5], [0.5, 0.5]),
        lambda: errors.optimal_weights([0.5, 0.5], [0.0, 0.5], [1.0, 1.0], 1.0, bias=1.0),
    ],
)
def test_nonsense_is_refused(call):
    with pytest.raises(InvalidInput):
        call()
