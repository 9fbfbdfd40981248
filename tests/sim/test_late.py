"""Late answers: weights by age, against a loop over clients; buffered rounds, against a heap of events; resuming."""

import heapq

import numpy as np
import pytest

from fedpick.core import registry
from fedpick.core.errors import InvalidInput
from fedpick.core.policy import Policy, Signal
from fedpick.core.session import Session
from fedpick.core.types import Selection, aggregation_weights
from fedpick.sim import Faults, LocalTraining, ServerStep, Simulator, Waiting, devices, simulate
from fedpick.sim.clock import Status
from fedpick.sim.late import stale_factors
from fedpick.sim.robust import combine
from tests.sim.naive_loop import make_federation

LOCAL = LocalTraining(lr=0.1, steps=3, batch_size=8)
SPREAD = devices.get("lognormal", spread=1.0, jitter=0.3)


def _start(waiting, policy="uniform", faults=None, **options):
    simulator = Simulator(
        make_federation(), "logistic", local=LOCAL, seed=5, devices=SPREAD, waiting=waiting, faults=faults, **options
    )
    return simulator, Session(registry.get(policy), simulator.clients, seed=1, provides=simulator.provides)


def _flat(simulator, params):
    return np.concatenate([np.ravel(leaf) for leaf in simulator.engine.leaves(params, ())]).astype(np.float64)


def test_factors_by_hand():
    age, updates, fresh = np.array([0, 3]), np.array([[1.0, 0.0], [3.0, 0.0]]), np.array([1.0, 2.0])
    assert stale_factors("equal", age, updates, fresh).tolist() == [1, 1]
    assert stale_factors("age", age, updates, fresh).tolist() == [1, 0.25]
    assert stale_factors("sqrt", age, updates, fresh).tolist() == [1, 0.5]
    # Squared distances 4 and 8.
    wanted = [0.65 + 0.35 * (1 - np.exp(-0.5) / 10), 0.65 / 4 + 0.35 * (1 - np.exp(-1) / 10)]
    assert stale_factors("refl", age, updates, fresh) == pytest.approx(wanted)
    assert stale_factors("refl", age, updates, None)[0] == pytest.approx(0.65 + 0.35 * (1 - np.exp(-1) / 10))


@pytest.mark.parametrize(
    ("rule", "server"),
    [
        ("refl", ServerStep()),
        ("age", ServerStep()),
        ("equal", ServerStep()),
        ("refl", ServerStep(momentum=0.5, weight_decay=0.1)),
        ("age", ServerStep(aggregation="median")),
    ],
)
def test_the_model_is_that_of_a_loop_over_clients(rule, server):
    """Every update of every client is computed singly; arrivals are read off the durations."""
    waiting = Waiting(overcommit=1.5, late="stale", stale_weight=rule)
    simulator, session = _start(waiting, server=server)
    model, pending, used = _flat(simulator, simulator.params), [], 0
    velocity = np.zeros_like(model)
    simulated = simulate(simulator, session, rounds=12, budget=2)
    while simulator.round < 12:
        start, params = simulator.clock, simulator.params
        record = next(simulated)
        chosen, times = record.selection.clients, record.evaluation["times"]
        assert not np.isin(chosen, [client for client, *_ in pending]).any()  # busy clients are not available
        work = simulator._work(record.index, chosen, np.zeros(len(chosen), bool))
        updates = simulator.engine.updates(params, work, None)
        own = aggregation_weights(record.selection, np.ones(len(chosen), bool), simulator.clients)
        finish = start + times[:3].sum(axis=0)
        in_time = np.sort(np.argsort(finish)[:2])
        assert np.flatnonzero(record.outcome.completed).tolist() == in_time.tolist()
        come = [entry for entry in pending if entry[1] <= record.clock]
        pending = [entry for entry in pending if entry[1] > record.clock]
        fresh = own[in_time] @ updates[in_time] / own[in_time].sum()
        age = np.array([record.index - entry[2] for entry in come], dtype=np.int64)
        old = np.array([entry[4] for entry in come]).reshape(len(come), updates.shape[1])
        stale = np.array([entry[3] for entry in come]) * stale_factors(rule, age, old, fresh)
        total = own[in_time].sum() + stale.sum()
        weights = np.concatenate([own[in_time], stale]) / total
        step = combine(np.concatenate([updates[in_time], old]), weights, server.aggregation, server.attackers)
        velocity = server.momentum * velocity + server.weight_decay * model - step
        model = model - velocity
        late = np.setdiff1d(np.arange(len(chosen)), in_time)
        pending += [(chosen[k], finish[k], record.index, own[k], updates[k]) for k in late]
        assert (times[3][late] == Status.LATE).all() and record.outcome.late[late].all()
        np.testing.assert_allclose(_flat(simulator, simulator.params), model, atol=2e-5)
        if len(come):
            assert record.evaluation["stale"] == pytest.approx(
                np.array([[entry[0] for entry in come], age, stale / total])
            )
        assert record.weights.sum() + (stale / total).sum() == pytest.approx(1)
        used += len(come)
    assert used > 3


def test_without_late_answers_it_is_the_same_model():
    def play(waiting):
        simulator, session = _start(waiting)
        return [record.test_loss for record in simulate(simulator, session, rounds=5, budget=3)]

    assert play(Waiting(late="stale")) == pytest.approx(play(Waiting()), rel=1e-5)


class _Listening(Policy):
    """Takes everybody in turn, and keeps what it is told."""

    def __init__(self):
        self.told = []

    @property
    def needs(self):
        return frozenset({Signal.OUTCOME_LOSS, Signal.TRAIN_LOSS, Signal.UPDATE_NORM, Signal.SKETCH, Signal.DURATION})

    def init(self, clients, rng):
        return None

    def select(self, state, context, rng):
        return Selection(clients=rng.permutation(np.flatnonzero(context.available))[: context.budget]), state

    def observe(self, state, outcome):
        self.told.append(outcome)
        return state


@pytest.mark.parametrize("late", ["stale", "buffer"])
def test_the_policy_is_told_of_a_late_answer_when_it_comes(late):
    """With the reports that the client made in its own round, and its whole duration."""
    waiting = Waiting(late=late, buffer=2, overcommit=1.5 if late == "stale" else 1.0)
    simulator, _ = _start(waiting, faults=Faults(nan=0.2))
    policy = _Listening()
    session = Session(policy, simulator.clients, seed=1, provides=simulator.provides, guard="off")
    asked, told = {}, 0
    simulated = simulate(simulator, session, rounds=16, budget=3)
    while simulator.round < 16:
        params, losses = simulator.params, simulator.client_losses()
        record = next(simulated)
        chosen, outcome = record.selection.clients, policy.told[-1]
        poisoned = simulator.faults.draw(5, record.index, chosen, np.ones(len(chosen))).poisoned
        work = simulator._work(record.index, chosen, poisoned)._replace(sketch=True)
        alone = simulator.engine.train(params, simulator.velocity, work)
        assert np.array_equal(outcome.clients[~outcome.stale], chosen) and not outcome.stale[: len(chosen)].any()
        stale = record.evaluation.get("stale", np.empty((3, 0)))
        assert outcome.clients[outcome.stale & outcome.completed].tolist() == stale[0].tolist()
        for row in np.flatnonzero(outcome.stale):
            reports = asked.pop(int(outcome.clients[row]))
            assert outcome.completed[row] == np.isfinite(reports[1])
            got = [outcome.train_loss[row], outcome.update_norm[row], outcome.loss[row], outcome.duration[row]]
            wanted = reports if np.isfinite(reports[1]) else (np.nan, np.nan, *reports[2:])
            assert [*got, *outcome.sketch[row]] == pytest.approx([*wanted[:4], *reports[4:]], nan_ok=True, rel=1e-4)
            told += 1
        durations = record.evaluation["times"][:3].sum(axis=0)
        for place in np.flatnonzero(outcome.late[: len(chosen)]):
            client, sketch = int(chosen[place]), alone.sketches[place]
            asked[client] = (alone.losses[place], alone.norms[place], losses[client], durations[place], *sketch)
        assert np.isnan(outcome.train_loss[outcome.late]).all() and np.isnan(outcome.loss[outcome.late]).all()
        assert record.counters.scalars_up == 2 * record.counters.updates_up
    assert told > 3 and set(asked) == set(simulator.under_way.clients)


def test_a_buffered_run_follows_its_events():
    """The clock and who arrives when, from a heap of events that knows nothing but durations and cohorts."""
    waiting = Waiting(late="buffer", buffer=2, stale_weight="sqrt")
    simulator, session = _start(waiting, faults=Faults(dropout=0.2))
    clock, events, running = 0.0, [], set()
    for record in simulate(simulator, session, rounds=25, budget=4):
        chosen, times = record.selection.clients, record.evaluation["times"]
        assert len(chosen) == 4 - len(running) and not running & set(chosen)
        dropped = simulator.faults.draw(5, record.index, chosen, np.ones(len(chosen))).dropped
        for client, seconds, gone in zip(chosen, times[:3].sum(axis=0), dropped, strict=True):
            heapq.heappush(events, (clock + seconds, int(client), record.index, bool(gone)))
        answered = []
        while events and len(answered) < 2:
            clock, client, begun, gone = heapq.heappop(events)
            if not gone:
                answered.append((client, begun))
        events = [event for event in events if not event[3]]  # the server forgets those that will not answer
        heapq.heapify(events)
        running = {client for _, client, _, _ in events}
        assert record.clock == pytest.approx(clock)
        assert set(simulator.under_way.clients) == running
        fresh = {client for client, begun in answered if begun == record.index}
        assert set(chosen[record.outcome.completed]) == fresh
        old = {client for client, begun in answered if begun < record.index}
        assert set(record.evaluation.get("stale", np.empty((3, 0)))[0].astype(int)) == old
    assert record.test_accuracy > 0.3


@pytest.mark.parametrize("late", ["stale", "buffer"])
@pytest.mark.parametrize("policy", ["uniform", "oort", "pow-d"])
def test_a_resumed_run_gives_the_same_bytes_with_answers_under_way(policy, late, tmp_path):
    waiting = Waiting(late=late, buffer=2, overcommit=1.5 if late == "stale" else 1.0)
    options = {"waiting": waiting, "policy": policy, "faults": Faults(dropout=0.1)}

    def bytes_of(records):
        return [(record.clock, record.test_loss, record.weights.tobytes(), record.counters) for record in records]

    simulator, session = _start(**options)
    whole = bytes_of(simulate(simulator, session, rounds=9, budget=3))
    simulator, session = _start(**options)
    parts = bytes_of(simulate(simulator, session, rounds=4, budget=3))
    assert len(simulator.under_way)
    simulator.save(tmp_path / "simulator.npz"), session.save(tmp_path / "session")
    simulator, _ = _start(**options)
    simulator.load(tmp_path / "simulator.npz")
    session = Session.load(tmp_path / "session", provides=simulator.provides)
    assert parts + bytes_of(simulate(simulator, session, rounds=9, budget=3)) == whole


def test_poisoned_late_answers_are_left_out():
    simulator, session = _start(Waiting(overcommit=2.0, late="stale"), faults=Faults(nan=0.5))
    records = list(simulate(simulator, session, rounds=15, budget=2))
    assert np.isfinite(_flat(simulator, simulator.params)).all()
    assert any("stale" in record.evaluation for record in records)


def test_a_round_without_free_clients_waits_for_the_next_answer():
    class OnlyOnce:
        def mask(self, round):
            return np.full(6, round == 0)

    simulator, session = _start(Waiting(overcommit=3.0, late="stale", idle=1000.0))
    first, second, *_ = simulate(simulator, session, rounds=4, budget=2, availability=OnlyOnce())
    due = np.sort(first.evaluation["times"][:3].sum(axis=0))
    assert (first.clock, second.clock) == (due[1], pytest.approx(due[2]))
    assert second.evaluation["stale"].shape == (3, 1) and second.evaluation["stale"][2, 0] == pytest.approx(1)


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(InvalidInput, match="a buffer has its own number"):
        Waiting(late="buffer", quorum=0.5)
    with pytest.raises(InvalidInput, match="'buffer'"):
        Waiting(buffer=0)
