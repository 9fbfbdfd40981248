from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog, minimize

from fedpick.data.dirichlet import least_norm_sizes


def check_optimal(fractions, totals, x) -> None:
    """The Karush-Kuhn-Tucker conditions of min 1/2 |x|^2, Q x = d, x >= 0."""
    scale = totals.sum() / len(x)
    assert x.min() >= 0
    assert np.abs(fractions @ x - totals).max() <= 1e-7 * totals.sum()
    inside = x > 1e-9 * scale
    multipliers = np.linalg.lstsq(fractions[:, inside].T, x[inside], rcond=None)[0]
    reduced = multipliers @ fractions
    assert np.abs(reduced[inside] - x[inside]).max() <= 1e-5 * scale  # stationary where x > 0
    assert not (~inside).any() or reduced[~inside].max() <= 1e-5 * scale  # no gain from raising a zero


@pytest.mark.parametrize("alpha", [0.2, 1.0, 10.0])
@pytest.mark.parametrize("seed", range(5))
def test_optimality_conditions_hold_at_the_size_of_the_paper(alpha, seed):
    rng = np.random.default_rng(seed)
    fractions = rng.dirichlet(np.full(10, alpha / 10), size=100).T
    totals = np.full(10, 6000.0)
    x = least_norm_sizes(fractions, totals)
    if x is None:
        assert not feasible(fractions, totals)
    else:
        check_optimal(fractions, totals, x)


def feasible(fractions, totals) -> bool:
    answer = linprog(np.zeros(fractions.shape[1]), A_eq=fractions, b_eq=totals, bounds=(0, None))
    return answer.status == 0


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 100_000),
    labels=st.integers(2, 5),
    clients=st.integers(5, 30),
    alpha=st.sampled_from([0.3, 1.0, 3.0]),
)
def test_agrees_with_a_linear_programme_on_whether_sizes_exist(seed, labels, clients, alpha):
    rng = np.random.default_rng(seed)
    fractions = rng.dirichlet(np.full(labels, alpha), size=clients).T
    totals = rng.integers(20, 200, size=labels).astype(float)
    x = least_norm_sizes(fractions, totals)
    assert (x is not None) == feasible(fractions, totals)
    if x is not None:
        check_optimal(fractions, totals, x)


@pytest.mark.parametrize("seed", range(4))
def test_no_other_solver_finds_a_smaller_norm(seed):
    rng = np.random.default_rng(seed)
    fractions = rng.dirichlet(np.full(4, 0.5), size=25).T
    totals = np.array([50.0, 60.0, 70.0, 80.0])
    x = least_norm_sizes(fractions, totals)
    other = minimize(
        lambda v: 0.5 * v @ v,
        np.full(25, totals.sum() / 25),
        jac=lambda v: v,
        bounds=[(0, None)] * 25,
        constraints={"type": "eq", "fun": lambda v: fractions @ v - totals, "jac": lambda v: fractions},
        method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-12},
    )
    assert other.success
    assert x == pytest.approx(other.x, abs=1e-4)


def test_a_hundred_thousand_clients():
    rng = np.random.default_rng(0)
    fractions = rng.dirichlet(np.full(10, 0.02), size=100_000).T
    totals = np.linspace(50_000, 150_000, 10)
    check_optimal(fractions, totals, least_norm_sizes(fractions, totals))
