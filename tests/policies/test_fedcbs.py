"""fedcbs: cohorts against the definition with the same random numbers, and the balance that they reach."""

from __future__ import annotations

import numpy as np
import pytest

from fedpick import Clients, Outcome, Session, Signal, policies
from fedpick.core.errors import InvalidInput, MissingSignal
from fedpick.core.rng import Purpose, stream
from fedpick.core.types import RoundContext
from fedpick.policies import fedcbs
from fedpick.policies.fedcbs import reference


def table(histograms):
    histograms = np.asarray(histograms, dtype=float)
    return Clients(num_examples=histograms.sum(axis=1) + 1, label_histogram=histograms)


def select(policy, clients, times, budget, index, seed, available=None):
    state = policy.init(clients, stream(0, 0, Purpose.INIT))
    state = type(state)(alone=state.alone, times=np.asarray(times))
    mask = np.ones(len(clients), dtype=bool) if available is None else available
    context = RoundContext(index=index, budget=budget, available=mask, clients=clients)
    return policy.select(state, context, stream(seed, index, Purpose.SELECT))


def naive(clients, times, budget, index, seed, available, **options):
    """The definition, with the Gumbel noise that the policy draws."""
    rng = stream(seed, index, Purpose.SELECT)
    rows = np.flatnonzero(available)
    drawn = []
    for _ in range(min(budget, len(rows))):
        probability = reference(clients.label_histogram[rows], drawn, times[rows], index + 1, **options)
        with np.errstate(divide="ignore"):
            drawn.append(int(np.argmax(np.log(probability) + rng.gumbel(size=len(rows)))))
    return rows[drawn].tolist()


def test_cohorts_equal_the_definition():
    rng = np.random.default_rng(0)
    for seed in range(600):
        count, labels = int(rng.integers(1, 15)), int(rng.integers(2, 6))
        histograms = np.floor(rng.random((count, labels)) ** 3 * 30)
        histograms[rng.random(count) < 0.1] = 0
        options = {"exploration": float(rng.choice([0.0, 10.0])), "power": float(rng.choice([0.0, 0.5, 1.0]))}
        clients, times = table(histograms), rng.integers(0, 6, count)
        budget, index, available = int(rng.integers(0, 8)), int(rng.integers(0, 50)), rng.random(count) < 0.8
        selection, state = select(policies.get("fedcbs", **options), clients, times, budget, index, seed, available)
        expected = naive(clients, times, budget, index, seed, available, **options)
        assert selection.clients.tolist() == expected
        assert (state.times - times).tolist() == np.isin(np.arange(count), expected).astype(int).tolist()


PAPER = [[5] * 6, [6, 6, 6, 6, 6, 0], [0, 0, 0, 10, 10, 10], [10, 10, 10, 0, 0, 0]]


def test_the_case_of_the_papers_figure_3_by_hand():
    """After client 0 (QCID 0), client 1 gives QCID 1/120 and clients 2 and 3 give 1/24: 120^2 against 24^2."""
    probability = reference(np.array(PAPER, dtype=float), [0], np.ones(4), t=1, exploration=10.0, power=1.0)
    assert probability == pytest.approx(np.array([0, 14400, 576, 576]) / 15552)
    policy, clients, second = policies.get("fedcbs"), table(PAPER), np.zeros(4)
    for seed in range(1000):
        selection, _ = select(policy, clients, np.zeros(4, dtype=int), 2, 0, seed)
        assert selection.clients[0] == 0
        second[selection.clients[1]] += 1
    assert second[1] / 1000 == pytest.approx(14400 / 15552, abs=5 * np.sqrt(0.926 * 0.074 / 1000))
    # The best cohort {0, 2, 3}, which a greedy search never finds, is drawn.
    cohorts = [set(select(policy, clients, np.zeros(4, int), 3, 0, seed)[0].clients.tolist()) for seed in range(200)]
    assert {0, 2, 3} in cohorts


def test_cohorts_are_more_balanced_than_random_ones():
    rng = np.random.default_rng(2)
    clients = table(np.eye(5)[rng.integers(0, 5, 100)] * rng.integers(5, 50, (100, 1)))

    def imbalance(name):
        session = Session(policies.get(name), clients, seed=0)
        found = []
        for index in range(20):
            chosen = session.ask(budget=10).clients
            shares = clients.label_histogram[chosen].sum(axis=0) / clients.label_histogram[chosen].sum()
            found.append(((shares - 0.2) ** 2).sum())
            session.tell(Outcome(index=index, clients=chosen, completed=np.ones(10, dtype=bool)))
        return np.mean(found)

    assert imbalance("fedcbs") < 0.1 * imbalance("uniform")


def test_rarely_selected_clients_come_first_more_often():
    clients = table([[9, 1], [9, 1], [9, 1]])
    first = np.zeros(3)
    for seed in range(600):
        first[select(policies.get("fedcbs"), clients, [50, 50, 1], 1, 100, seed)[0].clients] += 1
    bonus = 10 * np.sqrt(3 * np.log(101) / (2 * np.array([50, 50, 1])))
    expected = (1 / 0.32 + bonus) / (3 / 0.32 + bonus.sum())
    assert (np.abs(first / 600 - expected) <= 5 * np.sqrt(expected * (1 - expected) / 600)).all()


def test_many_powers_do_not_overflow():
    """A naive QCID^(-beta) of the hundredth client is larger than any float."""
    rng = np.random.default_rng(0)
    clients = table(rng.integers(0, 9, (300, 4)) + 1)
    selection, _ = select(policies.get("fedcbs", power=50), clients, np.zeros(300, int), 120, 3, 0)
    assert len(set(selection.clients.tolist())) == 120


def test_a_shortlist_replaces_large_federations(monkeypatch):
    monkeypatch.setattr(fedcbs, "_SHORTLIST", 30)
    rng = np.random.default_rng(0)
    clients = table(np.eye(5)[rng.integers(0, 5, 500)] * 10)
    for seed in range(20):
        selection, state = select(policies.get("fedcbs"), clients, np.zeros(500, int), 5, 3, seed)
        assert len(set(selection.clients.tolist())) == 5
        assert selection.diagnostics["imbalance"] < 0.01
        assert state.times.sum() == 5


def test_a_client_that_never_answers_counts_as_selected():
    session = Session(policies.get("fedcbs"), table([[5, 5]] * 10), seed=0)
    picks = 0
    for index in range(200):
        selection = session.ask(budget=2)
        alive = selection.clients != 0
        picks += int((~alive).sum())
        session.tell(Outcome(index=index, clients=selection.clients, completed=alive))
    assert picks < 80  # its share of 400 places is 40


def test_newcomers_and_refusals():
    session = Session(policies.get("fedcbs"), table([[5, 0], [0, 5]]), seed=0)
    session.tell(Outcome(index=0, clients=session.ask(budget=1).clients, completed=np.array([True])))
    session.grow(table([[5, 0], [0, 5], [9, 9]]))
    assert session.state.times.sum() == 1
    assert session.state.alone == pytest.approx([0.5, 0.5, 1e-12])
    assert policies.get("fedcbs").needs == {Signal.LABEL_HISTOGRAM}
    with pytest.raises(MissingSignal, match="label_histogram"):
        Session(policies.get("fedcbs"), Clients(num_examples=np.ones(2)))
    for options in ({"exploration": -1.0}, {"power": float("inf")}):
        with pytest.raises(InvalidInput, match=next(iter(options))):
            policies.get("fedcbs", **options)
