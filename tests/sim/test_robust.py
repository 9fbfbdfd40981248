import numpy as np
import pytest
from scipy.optimize import minimize

from fedpick.core.errors import InvalidInput
from fedpick.sim.robust import clip_norms, combine, combine_reference
from fedpick.sim.settings import ServerStep


@pytest.mark.parametrize("rule", ["mean", "median", "trimmed-mean"])
@pytest.mark.parametrize("attackers", [0.0, 0.1, 0.25, 0.4])
@pytest.mark.parametrize("seed", range(5))
def test_coordinate_rules_equal_the_reference_with_weights(rule, attackers, seed):
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 4, size=9).astype(float)
    if rule == "trimmed-mean":
        weights[0] += (-weights.sum()) % 20  # whole clients are trimmed
    updates = rng.normal(size=(9, 6))
    expected = combine_reference(updates, weights, rule, attackers)
    np.testing.assert_allclose(combine(updates, weights, rule, attackers), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rule", ["krum", "multi-krum"])
@pytest.mark.parametrize("attackers", [0.0, 0.2, 0.4])
@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_krum_equals_the_reference(rule, attackers, count):
    updates = np.random.default_rng(count).normal(size=(count, 4))
    expected = combine_reference(updates, np.ones(count), rule, attackers)
    np.testing.assert_allclose(combine(updates, np.ones(count), rule, attackers), expected, rtol=1e-10)


def test_the_geometric_median_minimises_the_sum_of_distances():
    rng = np.random.default_rng(0)
    updates, weights = rng.normal(size=(7, 3)), rng.uniform(0.5, 2.0, size=7)

    def cost(point):
        return weights @ np.linalg.norm(updates - point, axis=1)

    best = minimize(cost, np.zeros(3), options={"gtol": 1e-9})
    found = combine(updates, weights, "geometric-median", 0.0) / weights.sum()
    assert cost(found) == pytest.approx(best.fun, rel=1e-8)


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "krum", "multi-krum", "geometric-median"])
def test_two_of_ten_absurd_updates_do_not_move_a_robust_rule(rule):
    updates = np.random.default_rng(1).normal(size=(10, 5))
    updates[[2, 7]] = 1e6
    assert np.abs(combine(updates, np.full(10, 0.1), rule, 0.2)).max() < 5
    assert np.abs(combine(updates, np.full(10, 0.1), "mean", 0.2)).max() > 1e4


def test_the_sum_of_the_weights_scales_the_step_and_nobody_is_no_step():
    updates = np.random.default_rng(2).normal(size=(5, 3))
    for rule in ("mean", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median"):
        once, twice = combine(updates, np.full(5, 0.2), rule, 0.2), combine(updates, np.full(5, 0.4), rule, 0.2)
        np.testing.assert_allclose(twice, 2 * once)
        np.testing.assert_array_equal(combine(updates, np.zeros(5), rule, 0.2), np.zeros(3))


def test_norms_are_cut_at_a_multiple_of_the_median():
    updates = np.array([[3.0, 4.0], [0.0, 5.0], [5.0, 0.0], [300.0, 400.0]])
    clipped, cut = clip_norms(updates, 2.0)
    np.testing.assert_array_equal(cut, [False, False, False, True])
    np.testing.assert_allclose(clipped[3], [6.0, 8.0])
    np.testing.assert_array_equal(clipped[:3], updates[:3])


@pytest.mark.parametrize(("rule", "attackers"), [("median", 0.0), ("trimmed-mean", 0.2), ("krum", 0.2)])
def test_equal_weights_equal_flowers_functions(rule, attackers):
    flower = pytest.importorskip("flwr.server.strategy.aggregate")
    updates = np.random.default_rng(3).normal(size=(10, 6))
    results = [([row], 1) for row in updates]
    expected = {
        "median": lambda: flower.aggregate_median(results),
        "trimmed-mean": lambda: flower.aggregate_trimmed_avg(results, attackers),
        "krum": lambda: flower.aggregate_krum(results, 2, 0),
    }[rule]()[0]
    np.testing.assert_allclose(combine(updates, np.full(10, 0.1), rule, attackers), expected, rtol=1e-10)


@pytest.mark.parametrize("bad", [{"aggregation": "mode"}, {"attackers": 0.5}, {"clip_norms": 0.0}])
def test_impossible_rules_are_refused(bad):
    with pytest.raises(InvalidInput):
        ServerStep(**bad)
