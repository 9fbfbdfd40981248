"""The data-distribution-dependency graph: against hand-made examples and the reference."""

from __future__ import annotations

import numpy as np
import pytest

from fedpick.policies._graph import (
    Graph,
    GraphRule,
    build_graph,
    distances_reference,
    edge_weights,
    graph_of_similarities,
    scaled,
)
from fedpick.policies._prototypes import merge


def label_shares(rng, count, concentration=0.3):
    return rng.dirichlet(np.full(10, concentration), count)


@pytest.mark.parametrize(("variant", "cosine"), [("paper", False), ("paper", True), ("code", False), ("code", True)])
@pytest.mark.parametrize("seed", range(20))
def test_equals_the_reference(variant, cosine, seed):
    rng = np.random.default_rng(seed)
    features = label_shares(rng, 14) if seed % 2 else rng.normal(size=(14, 5))
    rule = GraphRule(variant=variant, cosine=cosine)
    built = build_graph(features, rule, max_prototypes=100).between_clients()
    np.testing.assert_allclose(built, distances_reference(features, rule), rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize("variant", ["paper", "code"])
@pytest.mark.parametrize("cosine", [False, True])
def test_copies_of_a_client_lose_nothing(variant, cosine):
    rng = np.random.default_rng(3)
    features = label_shares(rng, 6)[np.array([0, 1, 2, 0, 3, 4, 5, 5, 5, 2, 1])]
    rule = GraphRule(variant=variant, cosine=cosine)
    graph = build_graph(features, rule, max_prototypes=100)
    assert len(graph.distance) == 6
    np.testing.assert_allclose(graph.between_clients(), distances_reference(features, rule), rtol=1e-9, atol=1e-300)


def test_three_clients_by_hand():
    # Inner products: 0.5 (0, 1), 0 (0, 2), 0.5 (1, 2); scaled to 1, 0, 1: a path 0 - 1 - 2 of two equal edges.
    shares = np.array([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
    distance = build_graph(shares, GraphRule(), 10).between_clients()
    np.testing.assert_allclose(distance, [[0, 0.5, 1], [0.5, 0, 0.5], [1, 0.5, 0]])
    np.testing.assert_allclose(distances_reference(shares, GraphRule()), distance)


def test_edges_by_hand():
    similarity = np.array([[1.0, 0.1, 0.09], [0.1, 1.0, 0.5], [0.09, 0.5, 1.0]])
    paper = edge_weights(similarity, GraphRule())
    assert paper[0, 1] == 1.0 and np.isinf(paper[0, 2])
    assert paper[1, 2] / paper[0, 1] == pytest.approx(np.exp(-50) / np.exp(-10))
    code = edge_weights(np.array([[1.0, 0.01], [0.02, 1.0]]), GraphRule(variant="code"))
    assert np.isinf(code[0, 1]) and code[0, 0] / code[1, 0] == pytest.approx(np.exp(-10) / np.exp(-0.004))


def test_unreachable_pairs_are_as_far_as_can_be():
    apart = np.array([[1.0, 0, 0, 0], [1.0, 0.2, 0, 0], [0, 0, 1.0, 0], [0, 0, 1.0, 0.2]])
    distance = build_graph(apart, GraphRule(cosine=True), 10).between_clients()
    assert (distance[:2, 2:] == 1.0).all()
    assert distance[0, 1] == distance[2, 3] == 1.0  # the largest finite distance is scaled to 1 as well


def test_equally_similar_clients_are_at_distance_one():
    distance = build_graph(np.eye(4), GraphRule(), 10).between_clients()
    np.testing.assert_array_equal(distance, 1 - np.eye(4))
    copies = build_graph(np.ones((4, 3)), GraphRule(), 10)
    np.testing.assert_array_equal(copies.between_clients(), 1 - np.eye(4))


def test_tiny_weights_do_not_vanish():
    # exp(-1 / 1e-4) underflows to 0, which a graph would read as "no edge".
    shares = np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
    distance = build_graph(shares, GraphRule(sigma2=1e-4), 10).between_clients()
    assert np.isfinite(distance).all() and distance[0, 1] < 1e-6 and distance[0, 2] == 1.0


def test_one_client_and_clients_without_features():
    assert build_graph(np.ones((1, 3)), GraphRule(), 10).mean_distance() == 1.0
    nothing = build_graph(np.zeros((3, 4)), GraphRule(cosine=True), 10)
    np.testing.assert_array_equal(nothing.between_clients(), 1 - np.eye(3))


def test_mean_distance_counts_every_pair_once():
    graph = build_graph(label_shares(np.random.default_rng(1), 5)[[0, 1, 1, 2, 3, 4]], GraphRule(), 10)
    dense = graph.between_clients()
    assert graph.mean_distance() == pytest.approx(dense[np.triu_indices(6, 1)].mean())


def test_given_similarities_need_no_features():
    features = np.random.default_rng(5).normal(size=(9, 4))
    products = features @ features.T
    np.fill_diagonal(products, 0.0)
    built = graph_of_similarities(products, GraphRule()).between_clients()
    np.testing.assert_allclose(built, build_graph(features, GraphRule(), 10).between_clients(), rtol=1e-9)


def test_scaling_ignores_the_diagonal_unless_it_is_a_pair():
    values = np.array([[9.0, 1.0], [1.0, 9.0]])
    assert scaled(values, np.array([1, 1]), GraphRule())[0, 1] == 1.0
    assert scaled(values, np.array([2, 1]), GraphRule())[0, 1] == 0.0
    assert scaled(values, np.array([1, 1]), GraphRule(variant="code"))[0, 1] == 1.0


def test_merge_is_exact_up_to_the_limit_and_keeps_the_order():
    rows = np.array([[3.0, 1.0], [0.0, 2.0], [3.0, 1.0], [-0.0, 2.0], [1.0, 1.0]])
    merged = merge(rows, 3)
    np.testing.assert_array_equal(merged.member, [0, 1, 0, 1, 2])
    np.testing.assert_array_equal(merged.multiplicity, [2, 2, 1])
    np.testing.assert_array_equal(merged.centre, [[3, 1], [0, 2], [1, 1]])


def test_merge_finds_clusters():
    rng = np.random.default_rng(0)
    centres = rng.dirichlet(np.full(10, 0.3), 40)
    truth = rng.integers(0, 40, 4000)
    merged = merge(centres[truth] + rng.normal(scale=1e-4, size=(4000, 10)), 40)
    assert len(merged.centre) == 40
    assert len({(int(a), int(b)) for a, b in zip(truth, merged.member, strict=True)}) == 40
    assert np.abs(merged.centre[merged.member] - centres[truth]).max() < 1e-3
    assert merged.multiplicity.sum() == 4000


def test_merge_depends_on_nothing_but_the_rows():
    rows = np.random.default_rng(2).dirichlet(np.full(10, 0.5), 3000)
    one, two = merge(rows, 50), merge(rows.copy(), 50)
    np.testing.assert_array_equal(one.member, two.member)
    assert len(one.centre) <= 50
    np.testing.assert_array_equal(one.multiplicity, np.bincount(one.member))


def test_a_graph_of_nobody():
    empty = build_graph(np.empty((0, 3)), GraphRule(), 10)
    assert isinstance(empty, Graph) and empty.distance.shape == (0, 0)
