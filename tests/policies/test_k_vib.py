"""K-Vib: its probabilities and its learning against the definition, no bias, newcomers."""

from __future__ import annotations

import numpy as np
import pytest

from fedpick import Clients, Outcome, RoundContext, Session, policies
from fedpick.core.errors import InvalidInput
from fedpick.core.policy import Signal
from fedpick.policies._rates import selection_rates
from fedpick.policies.k_vib import KVib, KVibState, probabilities_reference


def test_probabilities_equal_those_of_the_definition():
    rng = np.random.default_rng(0)
    for _ in range(600):
        size, budget = int(rng.integers(1, 15)), int(rng.integers(1, 10))
        omega, gamma = rng.exponential(size=size) ** 4, float(rng.exponential() + 1e-3)
        theta = float(rng.uniform(0.01, 1))
        expected = probabilities_reference(omega, gamma, theta, budget)
        assert KVib(theta=theta)._rates(omega, gamma, budget) == pytest.approx(expected, abs=1e-9)
        assert expected.sum() == pytest.approx(min(size, budget))


def test_one_round_by_hand():
    """Four equal clients, m = 2, theta = 1/2, gamma = 1: pi = 1/2; then omega = (norm / 4)^2 / (1/2)."""
    policy = policies.get("k-vib", theta=0.5, gamma=1.0)
    session = Session(policy, Clients(num_examples=np.ones(4)), seed=0)
    selection = session.ask(budget=2)
    assert selection.weights.tolist() == [0.5, 0.5]
    first, second = selection.clients
    session.tell(
        Outcome(index=0, clients=selection.clients, completed=np.ones(2, bool), update_norm=np.array([8.0, np.nan]))
    )
    assert session.state.omega[first] == 8.0
    assert session.state.omega.sum() == 8.0
    # sqrt(omega + gamma) = 3, 1, 1, 1: y = 1, 1/3, 1/3, 1/3; mixed with 1/2.
    session.ask(budget=2)
    assert policy._rates(session.state.omega, 1.0, 2)[second] == pytest.approx(0.5 / 3 + 0.25)
    assert policy._rates(session.state.omega, 1.0, 2)[first] == pytest.approx(0.75)


def test_gamma_comes_from_the_first_reports():
    session = Session(policies.get("k-vib", theta=0.5), Clients(num_examples=np.ones(4)), seed=0)
    selection = session.ask(budget=2)
    session.tell(Outcome(index=0, clients=selection.clients, completed=np.zeros(2, bool)))
    assert session.state.gamma == 0.0
    selection = session.ask(budget=2)
    norms = np.array([4.0, 8.0])
    session.tell(Outcome(index=1, clients=selection.clients, completed=np.ones(2, bool), update_norm=norms))
    assert session.state.gamma == 2.5 * 4 / (0.5 * 2)  # G^2 = (1 + 4) / 2


def test_gamma_counts_the_clients_of_this_round_and_stays_finite():
    table, states = Clients(num_examples=np.ones(4)), []
    for theta in (0.5, 1e-320):
        session = Session(policies.get("k-vib", theta=theta), table, seed=0, guard="off")
        session.ask(budget=4)
        session.tell(Outcome(index=0, clients=np.arange(4), completed=np.zeros(4, bool), late=np.ones(4, bool)))
        selection = session.ask(budget=2)
        late = np.setdiff1d(np.arange(4), selection.clients)
        own = {"completed": np.ones(2, bool), "update_norm": np.array([4.0, 8.0])}
        stale = Outcome(index=1, clients=late, **own)
        session.tell(Outcome(index=1, clients=selection.clients, **own).with_stale(stale))
        states.append(session.state)
        assert np.isfinite(session.ask(budget=2).weights).all()
    assert states[0].gamma == 2.5 * 4 / (0.5 * 2)
    assert np.isfinite(states[1].gamma)


def test_mean_weights_are_the_importance_of_the_available_clients():
    sizes = np.array([1.0, 2.0, 3.0, 10.0, 4.0, 2.0])
    available = np.arange(6) != 3
    context = RoundContext(index=1, budget=3, available=available, clients=Clients(num_examples=sizes))
    state = KVibState(
        gamma=0.1, omega=np.array([0.0, np.nan, 5.0, 1.0, 100.0, 1.0]), importance=np.zeros(6), rate=np.zeros(6)
    )
    rng = np.random.default_rng(0)
    weights = np.zeros((4000, 6))
    for row in weights:
        selection, _ = KVib().select(state, context, rng)
        assert len(selection.clients) == 3
        row[selection.clients] = selection.weights
    expected = np.where(available, sizes, 0) / sizes[available].sum()
    assert (np.abs(weights.mean(axis=0) - expected) <= 5 * weights.std(axis=0) / np.sqrt(len(weights)) + 1e-12).all()


def play(session, rounds, budget, norms):
    picks = np.zeros(len(session.clients))
    for _ in range(rounds):
        selection = session.ask(budget=budget)
        picks[selection.clients] += 1
        session.tell(
            Outcome(
                index=session.round,
                clients=selection.clients,
                completed=~np.isnan(norms[selection.clients]),
                update_norm=norms[selection.clients],
            )
        )
    return picks


def test_it_learns_who_sends_large_updates():
    session = Session(policies.get("k-vib"), Clients(num_examples=np.ones(10)), seed=0)
    norms = np.array([10.0, 10.0, *[1.0] * 8])
    play(session, 200, 3, norms)
    picks = play(session, 200, 3, norms)
    assert picks[:2].min() > 1.5 * picks[2:].max()
    assert picks[2:].min() > 0.3 * 3 / 10 * 200 / 2  # the share theta is never taken away


def test_newcomers_start_at_the_mean_and_dead_clients_do_not_gain():
    session = Session(policies.get("k-vib"), Clients(num_examples=np.ones(10)), seed=0)
    norms = np.ones(15)
    norms[0] = np.nan
    play(session, 200, 3, norms)
    assert session.state.omega[0] == 0
    mean = session.state.omega.mean()
    session.grow(Clients(num_examples=np.ones(15)))
    assert np.isnan(session.state.omega[10:]).all()
    picks = play(session, 100, 3, norms)
    assert session.state.omega[10:].min() >= mean
    assert 0.7 < picks[10:].mean() / picks[1:10].mean() < 1.4


def test_options():
    assert policies.get("k-vib").needs == {Signal.UPDATE_NORM}
    with pytest.raises(InvalidInput, match="'theta' parameter of KVib"):
        policies.get("k-vib", theta=0.0)
    with pytest.raises(InvalidInput, match="'gamma' parameter of KVib"):
        policies.get("k-vib", gamma=-1.0)


def test_the_root_that_the_authors_code_leaves_out():
    """By hand. Their code: omega + gamma = (1, 1, 10), so 1/12, 1/12, 10/12. The paper: roots 1, 1, 3.162."""
    omega = np.array([0.0, 0.0, 9.0])
    root = np.sqrt(10.0)
    expected = np.array([1, 1, root]) / (2 + root)
    assert probabilities_reference(omega, 1.0, 1e-12, 1) == pytest.approx(expected)
    assert selection_rates(np.sqrt(omega + 1.0), 1) == pytest.approx(expected)


def test_a_client_that_must_be_taken_has_the_probability_one():
    """By hand. Sizes (1, 1, 10) and two places: 1/2, 1/2, 1. Their solver and FedLab's give 1/2, 1/2, 5."""
    assert selection_rates(np.array([1.0, 1.0, 10.0]), 2) == pytest.approx([0.5, 0.5, 1.0])
