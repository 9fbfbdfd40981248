"""The numbers behind FedGS's figures and tables, on known cases."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.theory import fedgs as analysis
from fedpick.core.errors import InvalidInput
from fedpick.policies._graph import GraphRule, scaled, similarities


def label_shares(rng, count, concentration=0.3):
    return rng.dirichlet(np.full(10, concentration), count)


def test_count_analysis():
    assert analysis.count_variance([4, 4, 4]) == 0.0
    assert analysis.count_variance([5]) == 0.0
    levels, clients = analysis.count_histogram([2, 5, 2])
    np.testing.assert_array_equal(levels, [2, 3, 4, 5])
    np.testing.assert_array_equal(clients, [2, 0, 0, 1])
    assert [len(part) for part in analysis.count_histogram([])] == [0, 0]


def test_mean_cohort_distance():
    distance = np.array([[0.0, 0.2, 0.4], [0.2, 0.0, 0.9], [0.4, 0.9, 0.0]])
    assert analysis.mean_cohort_distance(distance, [0, 2]) == pytest.approx(0.4)
    assert analysis.mean_cohort_distance(distance, [0, 1, 2]) == pytest.approx(0.5)
    assert analysis.mean_cohort_distance(distance, [1]) == 0.0


def test_bias_factor_follows_the_derivation():
    # Eq. 20: M/N * n_k / (n_k + (M-1)/(N-1) (n - n_k)) is what eq. 22 writes as n_k/n * gamma_k.
    sizes, budget = np.array([10.0, 50.0, 200.0, 40.0]), 3
    total, count = sizes.sum(), len(sizes)
    direct = budget / count * sizes / (sizes + (budget - 1) / (count - 1) * (total - sizes))
    np.testing.assert_allclose(sizes / total * analysis.bias_factor(sizes, budget), direct)
    np.testing.assert_array_equal(analysis.bias_factor(sizes, 4), np.ones(4))
    np.testing.assert_array_equal(analysis.bias_factor([7], 1), [1.0])
    with pytest.raises(InvalidInput, match="between 1 and the number of clients"):
        analysis.bias_factor(sizes, 5)


def test_edge_scores():
    oracle = np.array([[0, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 1], [0, 0, 1, 0]], dtype=bool)
    built = np.array([[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]], dtype=bool)
    scores = analysis.edge_scores(built, oracle)
    assert (scores.precision, scores.recall) == (1 / 2, 1 / 3)
    assert scores.f1 == pytest.approx(0.4)
    assert analysis.edge_scores(np.zeros((4, 4)), oracle).f1 == 0.0
    with pytest.raises(InvalidInput, match="square matrices"):
        analysis.edge_scores(np.zeros((3, 3)), oracle)


def test_the_oracle_scores_one_against_itself():
    shares = label_shares(np.random.default_rng(8), 20)
    similarity = analysis.graph_similarities(shares)
    rule = GraphRule()
    np.testing.assert_array_equal(similarity, scaled(similarities(shares, rule), np.ones(20, dtype=int), rule))
    threshold, scores = analysis.best_edge_scores(similarity, similarity >= 0.1)
    assert (threshold, scores.f1) == (0.1, 1.0)


def test_layout_keeps_linked_clients_together():
    edges = np.kron(np.eye(2), np.ones((5, 5))).astype(bool)
    edges[4, 5] = edges[5, 4] = True
    positions = analysis.graph_layout(edges)
    gaps = np.linalg.norm(positions[:, None] - positions[None], axis=2)
    assert gaps[:5, :5].max() < gaps[:4, 6:].min()
    assert gaps[np.triu_indices(10, 1)].min() > 0.01
    np.testing.assert_array_equal(positions, analysis.graph_layout(edges))


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    shares = label_shares(np.random.default_rng(4), 12)
    target = tmp_path / "graph.svg"
    analysis.draw_graph(target, analysis.graph_similarities(shares) >= 0.1, shares)
    assert target.stat().st_size > 5000
