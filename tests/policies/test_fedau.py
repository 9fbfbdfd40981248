"""fedau: its weights against the definition over random histories, and the step that they correct."""

from __future__ import annotations

import numpy as np
import pytest

from fedpick import Clients, Outcome, Session, aggregation_weights, policies
from fedpick.core.errors import InvalidInput
from fedpick.policies.fedau import reference


def table(count):
    return Clients(num_examples=np.arange(1.0, count + 1))


def test_one_case_by_hand():
    """Client 0 takes part in rounds 1, 2 and 6; the cut-off of 3 ends an interval in round 5."""
    session = Session(policies.get("fedau", cutoff=3), table(4))
    present, weights = [True, True, False, False, False, True, False], []
    for here in present:
        selection = session.ask(available=np.array([here, True, True, True]))
        weights.append(selection.weights[selection.clients == 0].tolist())
        session.tell(Outcome(index=session.round, clients=selection.clients, completed=np.ones(3 + here, dtype=bool)))
    assert weights == [[0.25], [0.25], [], [], [], [5 / 3 / 4], []]  # 1, then the mean of 1, 1 and 3, over N = 4
    assert session.state.ended[0] == 4


def test_weights_equal_the_definition_on_random_histories():
    rng = np.random.default_rng(0)
    compared = 0
    for seed in range(60):
        count, cutoff = int(rng.integers(1, 10)), rng.choice([1, 2, 5, 50, None])
        session = Session(policies.get("fedau", cutoff=cutoff), table(count), seed=seed)
        history = np.zeros((0, count), dtype=bool)
        for index in range(12):
            selection = session.ask(available=rng.random(count) < 0.7, budget=int(rng.integers(0, count + 1)))
            expected = [reference(history[:, client].tolist(), cutoff) / count for client in selection.clients]
            np.testing.assert_allclose(selection.weights, expected, rtol=1e-14)
            assert not selection.renormalize
            completed = rng.random(len(selection.clients)) < 0.8
            session.tell(Outcome(index=index, clients=selection.clients, completed=completed))
            history = np.vstack([history, np.isin(np.arange(count), selection.clients[completed])])
            compared += len(expected)
    assert compared > 500


def test_the_weights_correct_rare_participation_and_failures():
    """In the mean over many rounds, every client has the weight 1/N, however rarely it takes part."""
    rng = np.random.default_rng(1)
    rates, fails = np.array([0.9, 0.5, 0.2, 0.9]), np.array([0, 0, 0, 0.6])
    clients = table(4)
    session = Session(policies.get("fedau", cutoff=None), clients, seed=0)
    given, rounds = np.zeros(4), 4000
    for index in range(rounds):
        selection = session.ask(available=rng.random(4) < rates, budget=2)
        completed = rng.random(len(selection.clients)) >= fails[selection.clients]
        given[selection.clients] += aggregation_weights(selection, completed, clients)
        session.tell(Outcome(index=index, clients=selection.clients, completed=completed))
    np.testing.assert_allclose(given / rounds, 0.25, rtol=0.1)


def test_the_cut_off_bounds_the_weight():
    session = Session(policies.get("fedau", cutoff=5), table(2), seed=0)
    for index in range(100):
        selection = session.ask(available=np.array([index == 99, True]))
        if index < 99:
            session.tell(Outcome(index=index, clients=[1], completed=np.array([True])))
    assert selection.weights.max() == 5 / 2


def test_newcomers_start_at_one_and_do_not_inherit_the_past():
    session = Session(policies.get("fedau"), table(2), seed=0)
    for index in range(20):
        selection = session.ask(available=np.array([index % 4 == 0, False]))
        session.tell(Outcome(index=index, clients=selection.clients, completed=np.ones(len(selection.clients), bool)))
    session.grow(table(3))
    selection = session.ask()
    omega = dict(zip(selection.clients.tolist(), (selection.weights * 3).tolist(), strict=True))
    assert omega == pytest.approx({0: 17 / 5, 1: 1.0, 2: 1.0})


def test_importance_and_refusals():
    session = Session(policies.get("fedau", weighting="importance"), table(3))
    selection = session.ask()
    np.testing.assert_allclose(selection.weights, session.clients.importance[selection.clients])
    assert policies.get("fedau").needs == frozenset()
    for options in ({"cutoff": 0}, {"cutoff": 2.5}, {"weighting": "examples"}):
        with pytest.raises(InvalidInput, match=next(iter(options))):
            policies.get("fedau", **options)
