"""Optimal sampling: its probabilities against the paper's formula, no bias, and clients that do not report."""

from __future__ import annotations

import numpy as np
import pytest

from fedpick import Clients, Outcome, RoundContext, Session, policies
from fedpick.core.errors import InvalidInput, MissingSignal
from fedpick.core.policy import Signal
from fedpick.policies._rates import selection_rates
from fedpick.policies.optimal_sampling import LatestNorms, OptimalSampling, rates_reference


def test_probabilities_equal_those_of_the_formula():
    rng = np.random.default_rng(0)
    for _ in range(600):
        size, budget = int(rng.integers(1, 15)), int(rng.integers(1, 10))
        u = rng.integers(1, 5, size).astype(float) if rng.random() < 0.3 else rng.exponential(size=size) ** 3 + 1e-6
        expected = rates_reference(u, budget)
        assert selection_rates(u, budget) == pytest.approx(expected)
        assert expected.sum() == pytest.approx(min(size, budget))


def test_probabilities_by_hand():
    """u = 8, 1, 1, 2 and m = 2: 2 * 8 / 12 exceeds 1, so client 0 is certain and the others share one place.

    FedLab's sampler is off by one in which clients share (`i <= l`); here the three smallest do, and the sum is 2.
    """
    u = np.array([8.0, 1.0, 1.0, 2.0])
    assert selection_rates(u, 2).tolist() == [1.0, 0.25, 0.25, 0.5]
    assert rates_reference(u, 2).tolist() == [1.0, 0.25, 0.25, 0.5]


def test_mean_weights_are_the_importance_of_the_available_clients():
    """Whatever the norms are: zero, unknown, large; and with one client away."""
    sizes = np.array([1.0, 2.0, 3.0, 10.0, 4.0, 2.0])
    available = np.arange(6) != 3
    context = RoundContext(index=1, budget=3, available=available, clients=Clients(num_examples=sizes))
    state, policy, rng = LatestNorms(norm=np.array([0.0, np.nan, 5.0, 1.0, 100.0, 1.0])), OptimalSampling(), None
    rng = np.random.default_rng(0)
    weights = np.zeros((4000, 6))
    for row in weights:
        selection, _ = policy.select(state, context, rng)
        assert len(selection.clients) == 3
        assert not selection.renormalize
        row[selection.clients] = selection.weights
    expected = np.where(available, sizes, 0) / sizes[available].sum()
    assert (np.abs(weights.mean(axis=0) - expected) <= 5 * weights.std(axis=0) / np.sqrt(len(weights)) + 1e-12).all()


def test_large_updates_are_selected_more_often():
    session = Session(policies.get("optimal-sampling"), Clients(num_examples=np.ones(10)), seed=0)
    picks = np.zeros(10)
    for index in range(300):
        selection = session.ask(budget=3)
        picks[selection.clients] += 1
        norms = np.where(selection.clients < 2, 10.0, 1.0)
        session.tell(Outcome(index=index, clients=selection.clients, completed=np.ones(3, bool), update_norm=norms))
    assert picks[:2].min() > 240  # the guard counts a norm of 10 times the median as 6 times
    assert picks[2:].min() > 10


def test_a_client_that_died_after_a_large_update_is_forgotten():
    session = Session(policies.get("optimal-sampling"), Clients(num_examples=np.ones(10)), seed=0)
    picks = 0
    for index in range(200):
        selection = session.ask(budget=2)
        first = selection.clients == 0
        alive = ~first if index >= 50 else np.ones(2, bool)
        picks += int(first.sum()) if index >= 60 else 0
        session.tell(
            Outcome(
                index=index,
                clients=selection.clients,
                completed=alive,
                update_norm=np.where(first, 1000.0, np.where(selection.clients == 1, np.nan, 1.0)),
            )
        )
    assert picks < 60  # its share of 280 places is 28


def test_fresh_norms_of_all_candidates():
    """Asked before the selection: client 2 has the largest update in this round and is certain."""
    policy = OptimalSampling(norms="asked", explore=0.01)
    assert policy.needs == {Signal.UPDATE}
    session = Session(policy, Clients(num_examples=np.ones(5)), seed=0)
    asked = []

    def measure(probe):
        asked.append(probe.clients.tolist())
        return np.where(probe.clients[:, None] == 2, 30.0, 0.1) * np.ones((1, 4))

    available = np.array([True, True, True, True, False])
    for _ in range(5):
        selection = session.ask(available=available, budget=2, measure=measure)
        assert 2 in selection.clients
        session.tell(Outcome(index=session.round, clients=selection.clients, completed=np.ones(2, bool)))
    assert asked == [[0, 1, 2, 3]] * 5


def test_options():
    assert policies.get("optimal-sampling").needs == {Signal.UPDATE_NORM}
    with pytest.raises(MissingSignal, match="update_norm"):
        Session(policies.get("optimal-sampling"), Clients(num_examples=np.ones(3)), provides=frozenset())
    with pytest.raises(InvalidInput, match="'explore' parameter of OptimalSampling"):
        policies.get("optimal-sampling", explore=0.0)
    with pytest.raises(InvalidInput, match="'norms' parameter of OptimalSampling"):
        policies.get("optimal-sampling", norms="guessed")
