"""herd: its search against the definition, the bound on the debt, and what it does in small cases by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fedpick import Clients, Outcome, Session, policies
from fedpick.core.errors import InvalidInput, MissingSignal
from fedpick.core.policy import Signal
from fedpick.policies._rates import selection_rates
from fedpick.policies.herd import Herd, reference


def problem(rng, count, size):
    importance = rng.dirichlet(np.full(count, 5.0))
    due = importance / selection_rates(importance, size)
    debt, recent = importance + 0.3 * rng.normal(size=count), importance + 0.1 * rng.normal(size=count)
    described = rng.normal(size=(count, 3))
    return debt, recent, described - described.mean(axis=0), due


def objective(cohort, debt, recent, described, due, alpha):
    kappa = (due * (described**2).sum(axis=1)).mean()
    chosen = np.isin(np.arange(len(debt)), cohort) * due
    rest = described.T @ (recent - chosen)
    return alpha * rest @ rest / kappa + (1 - alpha) * ((debt - chosen) ** 2 / due).sum()


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.95])
def test_the_search_is_near_the_best_of_all_cohorts(alpha):
    rng = np.random.default_rng(1)
    best = 0
    for _ in range(200):
        count = int(rng.integers(4, 9))
        size = int(rng.integers(1, min(4, count)))
        given = problem(rng, count, size)
        exact = reference(*given, alpha, size)
        found, _ = Herd(alpha=alpha)._search(*given, np.arange(count), size, rng)
        assert len(found) == len(set(found.tolist())) == size
        optimum, reached = objective(exact, *given, alpha), objective(found, *given, alpha)
        assert reached >= optimum - 1e-9
        best += reached <= optimum + 1e-9
        # No swap of one member helps any more.
        for old in found:
            for new in set(range(count)) - set(found.tolist()):
                swapped = [new if member == old else member for member in found]
                assert objective(swapped, *given, alpha) >= reached - 1e-9
    assert best >= 170 if alpha else best == 200


def test_swaps_never_make_it_worse():
    rng = np.random.default_rng(2)
    for _ in range(100):
        given = problem(rng, 12, 4)
        with_swaps, without = (
            Herd(swaps=swaps)._search(*given, np.arange(12), 4, np.random.default_rng(0))[0] for swaps in (True, False)
        )
        assert objective(with_swaps, *given, Herd().alpha) <= objective(without, *given, Herd().alpha) + 1e-9


def test_rates_are_filled_up():
    assert selection_rates(np.full(4, 0.25), 2).tolist() == [0.5] * 4
    rates = selection_rates(np.array([0.7, 0.1, 0.1, 0.1]), 2)
    assert rates.tolist() == pytest.approx([1.0, 1 / 3, 1 / 3, 1 / 3])
    assert selection_rates(np.array([0.5, 0.5, 0.0]), 3).tolist() == [1.0, 1.0, 0.0]


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
    # What a client is owed is what arrived minus what it was given: a bounded debt means the share p_k in the long run.
    assert np.abs(given / given.sum() - clients.importance).max() < 0.01
    assert max(largest[rounds // 2 :]) < 2 * max(largest[: rounds // 2]) + 1


def test_a_client_that_never_answers_is_not_chosen_for_ever():
    session = Session(policies.get("herd", source="none"), Clients(num_examples=np.ones(10)), seed=0)
    picks = 0
    for _ in range(100):
        selection = session.ask(budget=2)
        alive = selection.clients != 0
        picks += int((~alive).sum())
        session.tell(Outcome(index=session.round, clients=selection.clients, completed=alive))
    assert picks <= 21  # its share of 200 places is 20


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
    with pytest.raises(MissingSignal, match=r"outcome\.sketch"):
        Session(policies.get("herd"), clients, provides=frozenset())
    with pytest.raises(InvalidInput, match="'source' parameter of Herd"):
        policies.get("herd", source="losses")
