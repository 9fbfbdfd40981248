"""Clustered sampling: bins and groups against the paper's steps, no bias, and the faults of public code."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from scipy.cluster.hierarchy import ClusterWarning, fcluster, linkage

from fedpick import Clients, Outcome, RoundContext, Session, policies
from fedpick.core.errors import InvalidInput, MissingSignal
from fedpick.core.policy import Signal
from fedpick.policies import _ward
from fedpick.policies._ward import angles, merges_reference, ward_tree
from fedpick.policies.clustered import (
    ClusteredUpdates,
    bins_reference,
    draw_from_bins,
    groups_reference,
)


def bins(sizes, group, count):
    """(m, n) as `bins_reference`, read off the draws at the middle of every unit of every bin."""
    capacity = int(sizes.sum())
    result = np.zeros((count, len(sizes)), dtype=int)
    for unit in range(capacity):
        drawn = draw_from_bins(sizes / capacity, group, count, np.full(count, (unit + 0.5) / capacity))
        result[np.arange(count), drawn] += 1
    return result


def as_lists(group):
    return [np.flatnonzero(group == label).tolist() for label in np.unique(group)]


def test_bins_equal_those_of_the_paper():
    rng = np.random.default_rng(0)
    for _ in range(600):
        count, size = int(rng.integers(1, 6)), int(rng.integers(1, 10))
        sizes = rng.integers(1, 6, size)
        group = rng.integers(0, 4, size) if rng.random() < 0.6 else np.zeros(size, dtype=int)
        expected = bins_reference(sizes.tolist(), as_lists(group), count)
        assert bins(sizes, group, count).tolist() == expected.tolist()
        # The two conditions under which the paper proves that the draws are unbiased.
        assert (expected.sum(axis=1) == sizes.sum()).all()
        assert (expected.sum(axis=0) == count * sizes).all()


def test_algorithm_1_by_hand():
    """Sizes 4, 3, 2, 1 and m = 2: 20 units in bins of 10. The first takes 8 + 2, the second 4 + 4 + 2."""
    expected = [[2, 0, 8, 0], [4, 2, 0, 4]]
    sizes = np.array([3, 1, 4, 2])
    assert bins_reference(sizes.tolist(), [[0, 1, 2, 3]], 2).tolist() == expected
    assert bins(sizes, np.zeros(4, dtype=int), 2).tolist() == expected


def test_algorithm_2_by_hand():
    """Groups of 4, 3 and 3 of 10 examples, m = 2: the third group fills up the first bin with 2, the second with 4."""
    sizes, groups = [2, 2, 3, 3], [[0, 1], [2], [3]]
    assert bins_reference(sizes, groups, 2).tolist() == [[4, 4, 0, 2], [0, 0, 6, 4]]
    assert bins(np.array(sizes), np.array([0, 0, 1, 2]), 2).tolist() == [[4, 4, 0, 2], [0, 0, 6, 4]]


@pytest.mark.parametrize("distance", ["angle", "euclidean"])
def test_groups_equal_those_of_a_naive_ward_clustering(distance):
    rng = np.random.default_rng(1)
    policy = ClusteredUpdates(distance=distance)
    for _ in range(300):
        size, count = int(rng.integers(1, 12)), int(rng.integers(1, 6))
        sizes, sketches = rng.integers(1, 9, size), rng.normal(size=(size, 3))
        if distance == "angle":
            unit = sketches / np.sqrt((sketches**2).sum(axis=1))[:, None]
            matrix = np.array([[np.arccos(min(max(float(a @ b), -1.0), 1.0)) for a in unit] for b in unit])
        else:
            matrix = np.array([[np.sqrt(((a - b) ** 2).sum()) for a in sketches] for b in sketches])
        group = policy._groups(sketches, count * sizes / sizes.sum())
        assert sorted(as_lists(group)) == groups_reference(sizes.tolist(), matrix, count)


def test_distances_are_not_read_as_points():
    """Public code gives the square matrix to `linkage`, whose groups then are others than those of the distances."""
    rng = np.random.default_rng(3)
    differs = 0
    for _ in range(100):
        rows = rng.normal(size=(10, 3))
        _, tree = ward_tree(rows, angles)
        two = {frozenset(group) for group in as_lists(fcluster(tree, 2, "maxclust"))}
        assert two == set(merges_reference(angles(rows))[-1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ClusterWarning)  # SciPy suspects the mistake, though not always
            as_points = fcluster(linkage(angles(rows), method="ward"), 2, "maxclust")
        differs += two != {frozenset(group) for group in as_lists(as_points)}
    assert differs > 10


def test_equal_updates_have_no_nan_between_them():
    rows = np.tile([0.1, 0.3, 0.7], (5, 1)) * np.array([[1.0], [3.0], [0.1], [7.0], [1e-9]])
    assert np.isfinite(angles(rows)).all()
    assert angles(rows).max() < 1e-7


def knowing(policy, sketch, clients=None):
    """The state after the given clients, or all, completed with these sketches."""
    clients = np.arange(len(sketch)) if clients is None else clients
    outcome = Outcome(index=0, clients=clients, completed=np.ones(len(sketch), bool), sketch=sketch)
    return policy.observe(policy.init(None, None), outcome)


def test_mean_weights_are_the_importance_of_the_available_clients():
    """With updates known of some, and with one client away."""
    sizes = np.array([1.0, 2.0, 3.0, 10.0, 4.0, 2.0])
    available = np.arange(6) != 4
    policy = ClusteredUpdates()
    rng = np.random.default_rng(0)
    state = knowing(policy, rng.normal(size=(5, 3)))
    context = RoundContext(index=1, budget=3, available=available, clients=Clients(num_examples=sizes))
    weights = np.zeros((1500, 6))
    for row in weights:
        selection, _ = policy.select(state, context, rng)
        assert selection.weights.sum() == pytest.approx(1)
        row[selection.clients] = selection.weights
    expected = np.where(available, sizes, 0) / sizes[available].sum()
    assert (np.abs(weights.mean(axis=0) - expected) <= 5 * weights.std(axis=0) / np.sqrt(len(weights)) + 1e-12).all()


def test_cohorts_have_one_client_of_each_kind():
    """Two kinds of clients with half the examples each: two draws, one from each kind."""
    kinds, policy = np.array([1.0, -1.0] * 4), ClusteredUpdates()
    state = knowing(policy, np.stack([kinds, 0.1 * np.arange(8)], axis=1))
    clients = Clients(num_examples=np.ones(8))
    context = RoundContext(index=1, budget=2, available=np.ones(8, bool), clients=clients)
    for seed in range(20):
        selection, _ = policy.select(state, context, np.random.default_rng(seed))
        assert sorted(kinds[selection.clients]) == [-1.0, 1.0]


def test_without_reports_algorithm_2_is_algorithm_1():
    clients = Clients(num_examples=np.arange(1.0, 13.0))
    by_size, by_updates = (Session(policies.get(f"clustered-{name}"), clients, seed=5) for name in ("size", "updates"))
    first, second = by_size.ask(budget=5), by_updates.ask(budget=5)
    assert first.clients.tolist() == second.clients.tolist()
    assert first.weights.tolist() == second.weights.tolist()


def test_a_client_that_fails_or_sends_no_sketch_loses_the_old_one():
    policy = ClusteredUpdates()
    state = knowing(policy, np.eye(4))
    assert state.known.tolist() == [0, 1, 2, 3]
    sketch = np.array([[np.nan] * 4, [0.0] * 4, [1.0, 2, 3, 4], [1.0] * 4])
    completed = np.array([True, True, True, False])
    state = policy.observe(state, Outcome(index=1, clients=[3, 1, 2, 0], completed=completed, sketch=sketch))
    assert state.known.tolist() == [2]
    assert state.vectors.tolist() == [[1.0, 2.0, 3.0, 4.0]]
    silent = Outcome(index=2, clients=[2], completed=np.ones(1, bool))
    assert policy.observe(state, silent) is state
    other = Outcome(index=3, clients=[1, 0], completed=np.ones(2, bool), sketch=np.array([[5.0, 6.0], [7.0, 8.0]]))
    state = policy.observe(state, other)  # sketches of another length: another model
    assert state.known.tolist() == [0, 1]
    assert state.vectors.tolist() == [[7.0, 8.0], [5.0, 6.0]]


def test_more_clients_than_the_exact_tree_are_merged_first(monkeypatch):
    rng = np.random.default_rng(0)
    centres = np.array([[10.0, 0, 0], [0, 10, 0], [0, 0, 10]])
    sketches = centres[np.arange(60) % 3] + 0.1 * rng.normal(size=(60, 3))
    monkeypatch.setattr(_ward, "EXACT", 50)
    monkeypatch.setattr(_ward, "PROTOTYPES", 12)
    group = ClusteredUpdates()._groups(sketches, np.full(60, 3 / 60))
    kinds_of = [{client % 3 for client in members} for members in as_lists(group)]
    assert all(len(kinds) == 1 for kinds in kinds_of)


def test_clients_without_examples_are_drawn_only_if_nobody_else_is_there():
    clients = Clients(num_examples=np.array([0.0, 0.0, 1.0, 1.0]))
    for name in ("clustered-size", "clustered-updates"):
        session = Session(policies.get(name), clients, seed=0)
        assert set(session.ask(budget=3).clients) <= {2, 3}
        assert set(session.ask(available=np.array([True, True, False, False]), budget=2).clients) <= {0, 1}


def test_options():
    assert policies.get("clustered-size").needs == frozenset()
    assert policies.get("clustered-updates").needs == {Signal.SKETCH}
    with pytest.raises(MissingSignal, match=r"outcome\.sketch"):
        Session(policies.get("clustered-updates"), Clients(num_examples=np.ones(3)), provides=frozenset())
    with pytest.raises(InvalidInput, match="'distance' parameter of ClusteredUpdates"):
        policies.get("clustered-updates", distance="l1")
