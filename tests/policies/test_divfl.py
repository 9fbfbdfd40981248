"""DivFL: the greedy choice against the paper's loop, weights by cluster, unknown and dead clients."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from fedpick import Clients, Outcome, RoundContext, Session, policies
from fedpick.core.errors import InvalidInput, MissingSignal
from fedpick.core.policy import Signal
from fedpick.policies import _ward
from fedpick.policies._sketches import LatestSketches
from fedpick.policies.divfl import DivFL, greedy, greedy_reference


def context(sizes, budget, available=None):
    everyone = np.ones(len(sizes), bool)
    clients = Clients(num_examples=np.asarray(sizes, float))
    return RoundContext(index=1, budget=budget, available=everyone if available is None else available, clients=clients)


def knowing(sketches):
    return LatestSketches(known=np.arange(len(sketches)), vectors=np.asarray(sketches, float))


def test_the_greedy_choice_equals_the_papers_loop():
    rng = np.random.default_rng(0)
    for _ in range(500):
        count = int(rng.integers(1, 12))
        sketches = rng.integers(-2, 3, (count, 2)) if rng.random() < 0.3 else rng.normal(size=(count, 3))
        distances = cdist(sketches, sketches)
        allowed = np.flatnonzero(rng.random(count) < 0.8)
        size = min(int(rng.integers(0, 6)), len(allowed))
        chosen = allowed[greedy(distances[:, allowed], np.ones(count), size)]
        assert chosen.tolist() == greedy_reference(distances, allowed.tolist(), size)


def test_every_selected_client_is_a_best_one_and_has_the_weight_of_its_cluster():
    rng = np.random.default_rng(1)
    for _ in range(300):
        count = int(rng.integers(1, 12))
        sizes, sketches = rng.integers(1, 9, count), rng.normal(size=(count, 3))
        available = rng.random(count) < 0.8
        distances = cdist(sketches, sketches)
        selection, _ = DivFL().select(knowing(sketches), context(sizes, 4, available), rng)
        chosen = selection.clients.tolist()
        assert len(chosen) == min(4, available.sum())
        for place in range(len(chosen)):
            values = {
                new: distances[:, [*chosen[:place], new]].min(axis=1).sum()
                for new in np.flatnonzero(available).tolist()
            }
            assert values[chosen[place]] <= min(values.values()) + 1e-9
        mass = np.zeros(len(chosen))
        for client in range(count if chosen else 0):
            mass[np.argmin(distances[client, chosen])] += sizes[client] / sizes.sum()
        assert selection.weights == pytest.approx(mass)


def test_by_hand():
    """Clients on a line at 1, 2, 3 and 9, 10: the first is the one at 3, the median; the second is at 9 or 10."""
    sketches = np.array([[1.0], [2.0], [3.0], [9.0], [10.0]])
    assert greedy_reference(cdist(sketches, sketches), [0, 1, 2, 3, 4], 2) == [2, 3]
    selection, _ = DivFL().select(knowing(sketches), context([1, 1, 1, 1, 1], 2), np.random.default_rng(0))
    assert selection.clients[0] == 2
    assert selection.clients[1] in (3, 4)
    # Public code takes the plain mean, as if each of the two stood for the same number of clients.
    assert selection.weights == pytest.approx([0.6, 0.4])
    equal, _ = DivFL(weights="equal").select(knowing(sketches), context([1, 1, 1, 1, 1], 2), np.random.default_rng(0))
    assert equal.weights.tolist() == [0.5, 0.5]


def test_unknown_clients_get_their_share_of_places_and_weight():
    """6 of 10 clients are unknown: 2.4 of 4 places in the mean, and the weight 0.6."""
    state, rng = knowing(np.eye(4)), np.random.default_rng(0)
    places = []
    for _ in range(400):
        selection, _ = DivFL().select(state, context(np.ones(10), 4), rng)
        assert len(selection.clients) == 4
        unknown = selection.clients >= 4
        places.append(unknown.sum())
        assert selection.weights[unknown].sum() == pytest.approx(0.6)
    assert set(places) == {2, 3}
    assert np.mean(places) == pytest.approx(2.4, abs=0.1)


def test_a_client_that_died_is_not_selected_for_ever():
    """Client 0 stands for all others until it dies in round 30."""
    sketches = np.vstack([np.full(4, 0.1), np.eye(4), -np.eye(4)])
    session = Session(policies.get("divfl"), Clients(num_examples=np.ones(9)), seed=0)
    before = after = 0
    for index in range(100):
        selection = session.ask(budget=1)
        alive = selection.clients != 0 if index >= 30 else np.ones(1, bool)
        before += int(index < 30 and selection.clients[0] == 0)
        after += int(index >= 30 and selection.clients[0] == 0)
        session.tell(
            Outcome(index=index, clients=selection.clients, completed=alive, sketch=sketches[selection.clients])
        )
    assert before >= 5
    assert after <= 20


def test_more_clients_than_the_exact_choice_are_merged_first(monkeypatch):
    monkeypatch.setattr(_ward, "EXACT", 50)
    monkeypatch.setattr(_ward, "PROTOTYPES", 12)
    rng = np.random.default_rng(0)
    centres = 10 * np.eye(4)
    sketches = centres[np.arange(80) % 4] + 0.1 * rng.normal(size=(80, 4))
    selection, _ = DivFL().select(knowing(sketches), context(np.ones(80), 4), rng)
    assert sorted(selection.clients % 4) == [0, 1, 2, 3]
    assert selection.weights == pytest.approx([0.25] * 4)
    # More places than groups: the others at random, and the weights still sum to 1.
    selection, _ = DivFL().select(knowing(sketches), context(np.ones(80), 40), rng)
    assert len(np.unique(selection.clients)) == 40
    assert selection.weights.sum() == pytest.approx(1)


def test_ties_are_random():
    picks = np.zeros(6)
    for seed in range(60):
        selection, _ = DivFL().select(knowing(np.ones((6, 2))), context(np.ones(6), 1), np.random.default_rng(seed))
        picks[selection.clients] += 1
    assert picks.min() > 0


def test_options():
    assert policies.get("divfl").needs == {Signal.SKETCH}
    with pytest.raises(MissingSignal, match=r"outcome\.sketch"):
        Session(policies.get("divfl"), Clients(num_examples=np.ones(3)), provides=frozenset())
    with pytest.raises(InvalidInput, match="'weights' parameter of DivFL"):
        policies.get("divfl", weights="size")
