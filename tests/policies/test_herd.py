"""herd: its search against the definition, the bound on the debt, and what it does in small cases by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedpick import Clients, Outcome, Session, policies
from fedpick.core.errors import InvalidInput, MissingSignal
from fedpick.core.policy import Signal
from fedpick.core.types import RoundContext, aggregation_weights
from fedpick.policies import herd
from fedpick.policies._rates import selection_rates
from fedpick.policies.herd import Herd, reference


def problem(rng, count, size):
    importance = rng.dirichlet(np.full(count, 5.0))
    share = importance / selection_rates(importance, size)
    due = importance / selection_rates(importance, size, most=rng.uniform(0.2, 1.0, count))
    debt, recent = importance + 0.3 * rng.normal(size=count), importance + 0.1 * rng.normal(size=count)
    described = rng.normal(size=(count, 3))
    uncertain = np.where(rng.random(count) < 0.3, 3.0, 0.0)
    described[uncertain > 0] = 0.0
    return debt, recent, described - described.mean(axis=0), uncertain, share, due


def objective(cohort, debt, recent, described, uncertain, share, due, alpha):
    kappa = (share * (described**2).sum(axis=1)).mean()
    chosen = np.isin(np.arange(len(debt)), cohort)
    rest = described.T @ (recent - chosen * share)
    doubt = (chosen * share**2 * uncertain).sum()
    return alpha * (rest @ rest + doubt) / kappa + (1 - alpha) * ((debt - chosen * due) ** 2 / due).sum()


def searched(policy, given, size, rng):
    debt, recent, described, uncertain, share, due = given
    kappa = (share * (described**2).sum(axis=1)).mean()
    everybody = np.arange(len(debt))
    return policy._search(debt, described.T @ recent, described, uncertain, share, due, kappa, everybody, size, rng)[0]


@pytest.mark.parametrize("wanted", [0.0, 0.5, 0.95])
def test_the_search_is_near_the_best_of_all_cohorts(wanted):
    rng = np.random.default_rng(1)
    best = 0
    for _ in range(200):
        count = int(rng.integers(4, 9))
        size = int(rng.integers(1, min(4, count)))
        given = problem(rng, count, size)
        alpha = min(wanted, 4 * size / (4 * size + 1))  # what a cohort of this size uses
        exact = reference(*given, alpha, size)
        found = searched(Herd(alpha=wanted), given, size, rng)
        assert len(found) == len(set(found.tolist())) == size
        optimum, reached = objective(exact, *given, alpha), objective(found, *given, alpha)
        assert reached >= optimum - 1e-9
        best += reached <= optimum + 1e-9
        # No swap of one member helps any more.
        for old in found:
            for new in set(range(count)) - set(found.tolist()):
                swapped = [new if member == old else member for member in found]
                assert objective(swapped, *given, alpha) >= reached - 1e-9
    assert best >= 170 if wanted else best == 200


def test_swaps_never_make_it_worse():
    rng = np.random.default_rng(2)
    for _ in range(100):
        given = problem(rng, 12, 4)
        with_swaps, without = (
            searched(Herd(swaps=swaps), given, 4, np.random.default_rng(0)) for swaps in (True, False)
        )
        alpha = min(Herd().alpha, 16 / 17)
        assert objective(with_swaps, *given, alpha) <= objective(without, *given, alpha) + 1e-9


def test_rates_are_filled_up():
    assert selection_rates(np.full(4, 0.25), 2).tolist() == [0.5] * 4
    rates = selection_rates(np.array([0.7, 0.1, 0.1, 0.1]), 2)
    assert rates.tolist() == pytest.approx([1.0, 1 / 3, 1 / 3, 1 / 3])
    assert selection_rates(np.array([0.5, 0.5, 0.0]), 3).tolist() == [1.0, 1.0, 0.0]


def test_rates_are_cut_at_the_availability():
    rates = selection_rates(np.array([0.4, 0.3, 0.3]), 1, most=np.array([0.2, 1.0, 1.0]))
    assert rates.tolist() == pytest.approx([0.2, 0.4, 0.4])
    most = np.array([0.5, 0.25, 0.25])
    assert selection_rates(np.array([0.2, 0.4, 0.4]), 3, most=most).tolist() == most.tolist()


def test_if_all_available_clients_train_weights_are_importance_over_availability():
    """Without descriptions: within a factor of 2 of adafed's weights."""
    rng = np.random.default_rng(0)
    importance = rng.dirichlet(np.ones(12))
    clients = Clients(num_examples=np.ones(12), importance=importance)
    ours, theirs = (
        Session(policies.get(name, **options), clients, seed=0)
        for name, options in (("herd", {"source": "none"}), ("adafed", {}))
    )
    often = rng.uniform(0.2, 0.9, 12)
    for _ in range(400):
        mask = rng.random(12) < often
        mine, adafed = ours.ask(available=mask), theirs.ask(available=mask)
        told(ours, mine)
        told(theirs, adafed)
    assert mine.clients.tolist() == adafed.clients.tolist()
    ratio = mine.weights / adafed.weights
    assert ratio.max() / ratio.min() < 4.2


def told(session, selection, **reports):
    everybody = np.ones(len(selection.clients), bool)
    session.tell(Outcome(index=session.round, clients=selection.clients, completed=everybody, **reports))


def test_without_descriptions_clients_take_turns():
    session = Session(policies.get("herd", source="none"), Clients(num_examples=np.ones(6)), seed=3)
    counts = np.zeros(6, int)
    for _ in range(9):
        selection = session.ask(budget=2)
        assert selection.weights.tolist() == [0.5, 0.5]
        counts[selection.clients] += 1
        told(session, selection)
    assert counts.tolist() == [3] * 6


def test_a_cohort_has_one_client_of_each_kind():
    """Two kinds of clients, known by their sketches after everybody took part once."""
    session = Session(policies.get("herd"), Clients(num_examples=np.ones(8)), seed=0)
    kinds = np.array([1.0, -1.0] * 4)
    for index in range(20):
        selection = session.ask(budget=2)
        if index >= 4:
            assert sorted(kinds[selection.clients]) == [-1.0, 1.0]
        told(session, selection, sketch=np.stack([kinds[selection.clients], np.ones(2)], axis=1))


@pytest.mark.parametrize("options", [{}, {"alpha": 0.0}, {"fade": 1.0}, {"source": "none"}])
def test_the_debt_is_bounded_so_that_every_client_gets_its_share(options):
    """For any availability that lets everybody in again and again: here large clients are there half as often."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 30, 20).astype(float)
    clients = Clients(num_examples=sizes)
    session = Session(policies.get("herd", **options), clients, seed=0)
    given, signature = np.zeros(20), rng.normal(size=(20, 4))
    rounds, largest = 3000, []
    for _ in range(rounds):
        mask = rng.random(20) < np.where(sizes > 15, 0.35, 0.7)
        selection = session.ask(available=mask, budget=4)
        given[selection.clients] += 0 if selection.weights is None else selection.weights
        told(session, selection, sketch=signature[selection.clients])
        largest.append(np.abs(session.state.debt).max())
    # No debt was cut, so what a client is owed is what arrived minus what it was given.
    np.testing.assert_allclose(session.state.debt, rounds * clients.importance - given, atol=1e-9)
    assert np.abs(given / given.sum() - clients.importance).max() < 0.01
    assert max(largest[rounds // 2 :]) <= 1.1 * max(largest[: rounds // 2])


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.95])
def test_the_steps_of_the_proof_hold_for_random_states(alpha, monkeypatch):
    """Steps 1, 3 and 4 of docs/policies/herd.md, with generous constants, for debts of up to 1,000,000."""
    monkeypatch.setattr(herd, "_MOST_OWED", np.inf)
    rng = np.random.default_rng(0)
    ends = 0
    for _ in range(300):
        count, size, fade = int(rng.integers(8, 30)), int(rng.integers(2, 4)), float(rng.choice([0.2, 0.8, 1.0]))
        importance = rng.dirichlet(np.full(count, 20.0))
        due = importance / selection_rates(importance, size, most=np.full(count, 901 / 1001))
        np.testing.assert_allclose(due, 1 / size)
        clients = Clients(num_examples=np.ones(count), importance=importance)
        policy = Herd(alpha=alpha, fade=fade)
        known = np.sort(rng.choice(count, count // 2, replace=False))
        recent = rng.normal(size=count)
        state = replace(
            policy.init(clients, rng),
            known=known,
            sketches=rng.normal(size=(len(known), 3)) * rng.pareto(1.0, size=(len(known), 1)),
            debt=rng.normal(size=count) * 10.0 ** rng.integers(-1, 7),
            recent=recent * (2 * (1 - fade) / fade / np.abs(recent).sum()),
            present=np.full(count, 900.0),
            age=np.full(count, 1000.0),
            silent=rng.integers(0, 5, count),
        )
        available = (rng.random(count) < rng.choice([0.05, 0.7])) | (np.arange(count) < size)
        context = RoundContext(index=0, clients=clients, available=available, budget=size)
        selection, _ = policy.select(state, context, rng)
        debt, weights = (state.debt + importance)[selection.clients], selection.weights
        constant = alpha * count / (1 - alpha) * (4 / fade + 4)
        left = np.setdiff1d(np.flatnonzero(available), selection.clients)
        assert not len(left) or (state.debt + importance)[left].max() - debt.min() <= constant + 1e-9
        large, small = debt > constant + 2 / size, debt < -constant
        if large.any() and small.any():
            ends += 1
            np.testing.assert_allclose(weights[large].min(), 4 * weights[small].max())
        assert debt @ weights - debt.mean() >= -3 * constant - 1e-9 * np.abs(debt).max()
    assert ends > 0


@pytest.mark.parametrize("options", [{}, {"alpha": 0.0}])
def test_large_debts_fall_to_a_bounded_level(options, monkeypatch):
    """Two groups of clients are available in turns of 25 rounds: the condition of the proof holds."""
    monkeypatch.setattr(herd, "_MOST_OWED", np.inf)
    rng = np.random.default_rng(0)
    clients = Clients(num_examples=rng.integers(5, 15, 20).astype(float))
    policy, signature = Herd(**options), rng.normal(size=(20, 4))
    debt = 10 * rng.normal(size=20)
    state = replace(policy.init(clients, rng), debt=debt - debt.mean())
    squares = []
    for index in range(1500):
        if index % 50 == 0:
            squares.append((state.debt**2).sum())
        available = (np.arange(20) % 2 == index // 25 % 2) | (np.arange(20) >= 15)
        context = RoundContext(index=index, clients=clients, available=available, budget=4)
        selection, state = policy.select(state, context, rng)
        chosen = selection.clients
        completed = np.ones(len(chosen), bool)
        state = policy.observe(
            state, Outcome(index=index, clients=chosen, completed=completed, sketch=signature[chosen])
        )
    falls = np.diff(squares) < 0
    assert falls[np.array(squares[:-1]) > 100].all()
    assert squares[0] > 1000
    assert max(squares[-10:]) < 100
    assert abs(state.debt.sum()) < 1e-9


def test_shares_are_of_selection_weight_not_of_what_enters_the_model():
    """Five of ten equal clients fail half of the time: herd does not make up for that."""
    rng = np.random.default_rng(0)
    clients = Clients(num_examples=np.ones(10))
    session = Session(policies.get("herd"), clients, seed=0, guard="off")
    signature, selected, entered = rng.normal(size=(10, 4)), np.zeros(10), np.zeros(10)
    for _ in range(1000):
        selection = session.ask(budget=4)
        completed = (selection.clients >= 5) | (rng.random(4) < 0.5)
        selected[selection.clients] += selection.weights
        entered[selection.clients] += aggregation_weights(selection, completed, clients)
        sketch = sketches_of(rng, selection.clients, signature)
        session.tell(Outcome(index=session.round, clients=selection.clients, completed=completed, sketch=sketch))
    assert selected[:5].sum() / selected.sum() == pytest.approx(0.5, abs=0.005)
    assert 0.27 < entered[:5].sum() / entered.sum() < 0.36


def test_after_a_cut_the_mean_debt_of_the_others_is_their_mean_importance():
    importance, due = np.array([0.4, 0.3, 0.2, 0.1]), np.full(4, 0.5)
    debt = herd._limited(np.array([40.0, -20.0, -13.0, -7.0]), importance, due)
    assert debt[0] == 15  # 30 places
    assert debt[1:].mean() == pytest.approx(importance[1:].mean())
    np.testing.assert_allclose(np.diff(debt[1:]), [7, 6])


def test_one_hot_descriptions_make_clients_take_turns():
    clients = Clients(num_examples=np.ones(6), features=np.eye(6))
    session = Session(policies.get("herd", source="features", fade=0.0), clients, seed=0)
    chosen = []
    for _ in range(6):
        selection = session.ask(budget=2)
        chosen.append(selection.clients)
        told(session, selection)
    for three in (chosen[:3], chosen[3:]):
        assert sorted(np.concatenate(three).tolist()) == list(range(6))


def test_the_debt_of_a_client_that_is_rarely_there_is_limited():
    """Two equal clients, one place, the second one there in every tenth round: no rule can give it its half."""
    session = Session(policies.get("herd", source="none"), Clients(num_examples=np.ones(2)), seed=0)
    for index in range(1000):
        selection = session.ask(available=np.array([True, index % 10 == 0]), budget=1)
        told(session, selection)
    # It is owed 30 places of h = p / q = 0.5 / 0.1 at most; the first client has what arrived for it, and has paid 1.
    np.testing.assert_allclose(session.state.debt, [-0.5, 30 * 0.5 / 0.1], rtol=0.02)


def sketches_of(rng, clients, signature):
    return signature[clients] + 0.1 * rng.normal(size=(len(clients), signature.shape[1]))


def test_clients_that_leave_do_not_make_newcomers_win():
    rng = np.random.default_rng(0)
    signature = rng.normal(size=(25, 8))
    session = Session(policies.get("herd"), Clients(num_examples=np.ones(20)), seed=0, guard="off")

    def play(rounds, available):
        chosen = []
        for _ in range(rounds):
            selection = session.ask(available=available, budget=5)
            told(session, selection, sketch=sketches_of(rng, selection.clients, signature))
            chosen.append(selection.clients)
        return np.concatenate(chosen)

    play(50, np.ones(20, dtype=bool))
    stayed = np.arange(20) < 10
    play(150, stayed)
    session.grow(Clients(num_examples=np.ones(25)))
    here = np.concatenate([stayed, np.ones(5, dtype=bool)])
    assert 80 <= (play(60, here) >= 20).sum() <= 120  # 5 of 15 clients, 300 places
    here[10] = True
    assert (play(200, here) == 10).sum() <= 100  # its share is 62, and it is owed 30 at most


def test_fresh_identities_do_not_buy_places():
    """5 of 30 clients come back under a fresh identity in every round: 50 of 295 places are their share."""
    rng = np.random.default_rng(0)
    count, captured = 30, 0
    session = Session(policies.get("herd"), Clients(num_examples=np.ones(count)), seed=0, guard="off")
    here = np.ones(count, dtype=bool)
    signature = rng.normal(size=(30 + 60 * 5, 8))
    for index in range(60):
        selection = session.ask(available=here, budget=5)
        captured += int((selection.clients >= 25).sum()) if index else 0
        told(session, selection, sketch=sketches_of(rng, selection.clients, signature))
        count += 5
        session.grow(Clients(num_examples=np.ones(count)))
        here = (np.arange(count) < 25) | (np.arange(count) >= count - 5)
    assert captured <= 50


def test_a_client_that_never_answers_is_not_chosen_for_ever():
    session = Session(policies.get("herd", source="none"), Clients(num_examples=np.ones(10)), seed=0)
    picks = 0
    for _ in range(100):
        selection = session.ask(budget=2)
        alive = selection.clients != 0
        picks += int((~alive).sum())
        session.tell(Outcome(index=session.round, clients=selection.clients, completed=alive))
    assert picks <= 21  # its share of 200 places is 20


def test_silent_clients_get_no_more_than_their_share():
    """An unknown client fits into every cohort. A fifth of all never answer: 40 of 200 places are their share."""
    rng = np.random.default_rng(0)
    session = Session(policies.get("herd"), Clients(num_examples=np.ones(20)), seed=0)
    signature, picks = rng.normal(size=(20, 10)), 0
    for _ in range(40):
        selection = session.ask(budget=5)
        alive = selection.clients >= 4
        picks += int((~alive).sum())
        sketch = signature[selection.clients] + 0.1 * rng.normal(size=(5, 10))
        session.tell(Outcome(index=session.round, clients=selection.clients, completed=alive, sketch=sketch))
    assert picks <= 42
    assert session.state.silent[:4].min() >= 3
    assert not session.state.silent[4:].any()


def test_a_silent_client_that_answers_is_known():
    session = Session(policies.get("herd"), Clients(num_examples=np.ones(2)), seed=0)
    for answers in (False, False, False, True):
        clients = session.ask(budget=2).clients
        completed = np.array([True, answers])
        session.tell(Outcome(index=session.round, clients=clients, completed=completed, sketch=np.eye(2)))
    assert session.state.silent.tolist() == [0, 0]
    assert session.state.known.tolist() == [0, 1]


def test_newcomers_are_not_owed_the_past():
    session = Session(policies.get("herd", source="none"), Clients(num_examples=np.ones(10)), seed=0)
    for _ in range(50):
        told(session, session.ask(budget=2))
    session.grow(Clients(num_examples=np.ones(15)))
    picks = 0
    for _ in range(30):
        selection = session.ask(budget=2)
        picks += int((selection.clients >= 10).sum())
        told(session, selection)
    assert picks <= 26  # a third of 60 places is 20


def test_sources():
    clients = Clients(num_examples=np.ones(4), label_histogram=np.array([[9, 0], [8, 0], [0, 7], [0, 6.0]]))
    session = Session(policies.get("herd", source="labels"), clients, seed=0)
    for _ in range(6):
        selection = session.ask(budget=2)
        assert (selection.clients < 2).sum() == 1
        told(session, selection)
    assert policies.get("herd").needs == {Signal.SKETCH}
    assert policies.get("herd", source="none").needs == frozenset()
    with pytest.raises(MissingSignal, match=r'outcome\.sketch(.|\n)*herd with source="labels", "features" or "none"'):
        Session(policies.get("herd"), clients, provides=frozenset())
    with pytest.raises(MissingSignal) as refused:
        Session(policies.get("pow-d"), clients, provides=frozenset())
    assert "secure aggregation" not in str(refused.value)
    with pytest.raises(InvalidInput, match="'source' parameter of Herd"):
        policies.get("herd", source="losses")
