"""HiCS-FL: groups and draws against the definition, and the faults of the authors' code."""

from __future__ import annotations

import numpy as np
import pytest

from fedpick import Clients, Outcome, RoundContext, Session, policies
from fedpick.core.errors import InvalidInput, MissingSignal
from fedpick.core.policy import Signal
from fedpick.policies._sketches import LatestSketches
from fedpick.policies._ward import angles, ward_tree
from fedpick.policies.hics import HiCS, draw_from_groups, entropies, groups_reference, inclusion_reference


def context(count, budget, index=0):
    clients = Clients(num_examples=np.ones(count))
    return RoundContext(index=index, budget=budget, available=np.ones(count, bool), clients=clients)


def knowing(sketches):
    return LatestSketches(known=np.arange(len(sketches)), vectors=np.asarray(sketches, float))


def test_groups_equal_those_of_a_naive_ward_clustering():
    rng = np.random.default_rng(0)
    for _ in range(500):
        count, clusters = int(rng.integers(1, 12)), int(rng.integers(1, 7))
        updates = 0.01 * rng.normal(size=(count, 4))
        temperature, weight = float(rng.uniform(0.001, 0.05)), float(rng.choice([0.0, 1.0, 10.0]))
        policy = HiCS(clusters=clusters, temperature=temperature, entropy_weight=weight)
        group = policy._groups(updates, entropies(updates, temperature))
        found = sorted(np.flatnonzero(group == label).tolist() for label in np.unique(group))
        assert found == groups_reference(updates, temperature, weight, clusters)


@pytest.mark.parametrize(
    ("group", "weight", "size"),
    [([0, 0, 0, 1, 2], [0.1, 0.6, 0.3], 3), ([0, 1, 1, 1], [0.9, 0.1], 2), ([0, 0, 0], [1.0], 2)],
)
def test_clients_are_drawn_as_often_as_the_definition_says(group, weight, size):
    group, weight, rng = np.array(group), np.array(weight), np.random.default_rng(0)
    expected = inclusion_reference(group, weight, size)
    assert expected.sum() == pytest.approx(size)
    counts, trials = np.zeros(len(group)), 2000
    for _ in range(trials):
        drawn = draw_from_groups(group, weight, size, rng)
        assert len(np.unique(drawn)) == size
        counts[drawn] += 1
    assert np.abs(counts / trials - expected).max() < 5 * 0.5 / np.sqrt(trials)


def test_by_hand():
    """Two balanced and two one-sided clients, two groups, one place: exp(4 ln 2) = 16 against exp(0) = 1."""
    updates = np.array([[1.0, 1.0], [1.0, 1.0001], [100.0, 0.0], [0.0, 100.0]])
    policy = HiCS(clusters=2, temperature=1.0, entropy_weight=10.0, rounds=100)
    assert entropies(updates, 1.0) == pytest.approx([np.log(2), np.log(2), 0, 0], abs=1e-6)
    assert policy._groups(updates, entropies(updates, 1.0)).tolist() == [0, 0, 1, 1]
    assert policy._weight(np.array([np.log(2), 0.0]), 0) == pytest.approx([16 / 17, 1 / 17])
    assert policy._weight(np.array([np.log(2), 0.0]), 50) == pytest.approx([4 / 5, 1 / 5])
    for late in (100, 1000):
        assert policy._weight(np.array([np.log(2), 0.0]), late).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("budget", [1, 3, 10, 20])
def test_the_number_of_groups_and_of_places_need_not_be_equal(budget):
    """The authors' code indexes a list as long as the cohort by group: it fails with more groups than places."""
    updates = np.random.default_rng(0).normal(size=(20, 5))
    for clusters in (1, 5, 20, 30):
        selection, _ = HiCS(clusters=clusters).select(knowing(updates), context(20, budget), np.random.default_rng(1))
        assert len(selection.clients) == budget
        assert selection.weights == pytest.approx([1 / budget] * budget)


def test_large_updates_do_not_overflow():
    assert entropies(np.array([[1e6, 0.0, -1e6], [5.0, 5.0, 5.0]]), 0.001) == pytest.approx([0.0, np.log(3)])
    assert entropies(np.array([[1e6, 0.0, -1e6], [5.0, 5.0, 5.0]]), 1e-320) == pytest.approx([0.0, np.log(3)])


@pytest.mark.parametrize("shape", [(1, 8), (8, 1)])
def test_entropies_leave_the_updates_alone(shape):
    updates = np.arange(1.0, 9.0).reshape(shape)
    entropies(updates, 0.5)
    np.testing.assert_array_equal(updates.ravel(), np.arange(1.0, 9.0))


def test_groups_whose_weight_vanishes_still_fill_the_places():
    """exp(-4000) is 0: the other group is drawn once the first one is empty."""
    updates = np.vstack([np.ones((2, 3)), [[9.0, 0.0, 0.0]] * 3])
    policy = HiCS(clusters=2, temperature=0.1, focus=4000.0)
    selection, _ = policy.select(knowing(updates), context(5, 4), np.random.default_rng(0))
    assert {0, 1} < set(selection.clients.tolist())
    assert len(selection.clients) == 4


def test_unknown_and_dead_clients_get_their_share_only():
    """Clients 0 to 4 of 20 never complete; clients 5 to 9 send no sketch."""
    session = Session(policies.get("hics"), Clients(num_examples=np.ones(20)), seed=0)
    sketches, picks = np.random.default_rng(0).normal(size=(20, 6)), np.zeros(20)
    sketches[5:10] = np.nan
    for index in range(200):
        selection = session.ask(budget=4)
        picks[selection.clients] += 1
        session.tell(
            Outcome(
                index=index,
                clients=selection.clients,
                completed=selection.clients >= 5,
                sketch=sketches[selection.clients],
            )
        )
    assert session.state.known.tolist() == list(range(10, 20))
    assert 0.4 < picks[:10].sum() / picks.sum() < 0.6


def test_options():
    assert policies.get("hics").needs == {Signal.SKETCH}
    with pytest.raises(MissingSignal, match=r"outcome\.sketch"):
        Session(policies.get("hics"), Clients(num_examples=np.ones(3)), provides=frozenset())
    for option, value in [("clusters", 0), ("temperature", 0.0), ("entropy_weight", -1), ("focus", -1), ("rounds", 0)]:
        with pytest.raises(InvalidInput, match=f"'{option}' parameter of HiCS"):
            policies.get("hics", **{option: value})


def test_distances_too_large_to_square_still_make_a_tree():
    rows = np.random.default_rng(0).normal(size=(6, 3))
    _, usual = ward_tree(rows, angles)
    _, huge = ward_tree(rows, lambda each: 1e200 * angles(each))
    np.testing.assert_array_equal(huge[:, [0, 1, 3]], usual[:, [0, 1, 3]])
