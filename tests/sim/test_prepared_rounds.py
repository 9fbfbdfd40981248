"""Rounds that share a program: the same numbers, and nothing of them shows before its turn."""

from dataclasses import dataclass, replace
from itertools import islice

import jax
import numpy as np
import pytest

import fedpick.policies  # noqa: F401  (fills the registry)
from fedpick.availability.process import Trace
from fedpick.core import registry
from fedpick.core.policy import Policy
from fedpick.core.session import Session
from fedpick.core.state import Stateless
from fedpick.core.types import Selection
from fedpick.sim import Faults, LearningRate, LocalTraining, ServerStep, Simulator, simulate
from tests.sim.naive_loop import make_federation
from tests.sim.test_loop import digest

FAULTS = Faults(dropout=0.2, nan=0.1, deadline=3, latency=1, speed_spread=0.5)
LOCAL = LocalTraining(lr=LearningRate(initial=0.1, milestones=(5,)), steps=3, batch_size=8)
ROUNDS = 40


def start(policy="uniform", local=LOCAL, task="logistic", **options):
    federation = make_federation(sizes=(40, 7, 23, 64, 1, 30, 12, 9, 17, 5, 33, 21))
    options = {"server": ServerStep(lr=0.5, momentum=0.5), "faults": FAULTS, "seed": 5, "group": 4, **options}
    simulator = Simulator(federation, task, local=local, **options)
    chooser = registry.get(policy) if isinstance(policy, str) else policy
    return simulator, Session(chooser, simulator.clients, seed=1, provides=simulator.provides)


class Varying(Trace):
    """Between nobody and everybody: cohorts of all sizes, with and without a whole group."""

    def _mask(self, round):
        return np.roll(np.arange(12) < (12, 12, 9, 7, 2, 0, 1, 5, 12, 12, 12)[round % 11], round)

    def _truth(self):
        return np.full(12, 0.5), np.zeros(12)


def run(simulator, session, rounds=ROUNDS, **options):
    options = {"budget": 6, "evaluate_every": 2, "losses_every": 7, **options}
    return simulate(simulator, session, rounds=rounds, availability=Varying(12, 0), **options)


def one_by_one(*arguments, **options):
    simulator, session = start(*arguments, **options)
    simulator.engine.rounds_at_once = 1
    return simulator, session


@pytest.fixture
def calls(monkeypatch):
    """How many rounds each call of the engine was for: (started together, trained alone)."""
    from fedpick.sim.jax_engine.engine import JaxEngine

    together, alone = [], []
    start_rounds, train = JaxEngine.start_rounds, JaxEngine.train

    def several(self, params, velocity, works, evaluate):
        together.append(len(works))
        return start_rounds(self, params, velocity, works, evaluate)

    def single(self, *arguments):
        alone.append(1)
        return train(self, *arguments)

    monkeypatch.setattr(JaxEngine, "start_rounds", several)
    monkeypatch.setattr(JaxEngine, "train", single)
    return together, alone


@pytest.mark.parametrize("policy", ["uniform", "md", "fedgs", "unbiased", "f3ast"])
@pytest.mark.parametrize(
    "local",
    [LOCAL, LocalTraining(lr=0.1, epochs=2, batch_size=8, momentum=0.5, proximal=0.1)],
    ids=["steps", "epochs"],
)
def test_it_makes_no_difference(policy, local, calls):
    simulator, session = start(policy, local)
    other, other_session = one_by_one(policy, local)
    for ours, theirs in zip(run(simulator, session), run(other, other_session), strict=True):
        assert ours.index == theirs.index
        np.testing.assert_array_equal(ours.selection.clients, theirs.selection.clients)
        np.testing.assert_array_equal(ours.available, theirs.available)
        np.testing.assert_array_equal(ours.weights, theirs.weights)
        np.testing.assert_array_equal(ours.outcome.completed, theirs.outcome.completed)
        np.testing.assert_array_equal(ours.outcome.duration, theirs.outcome.duration)
        assert ours.counters == theirs.counters
        for name in ("train_loss", "update_norm"):
            mine = getattr(ours.outcome, name)
            np.testing.assert_allclose(mine, getattr(theirs.outcome, name), rtol=1e-4, atol=1e-6)
        assert (ours.test_loss is None) == (theirs.test_loss is None) == (ours.index % 2 == 0)
        if ours.test_loss is not None:
            assert ours.test_loss == pytest.approx(theirs.test_loss, rel=1e-4)
        for mine, his in zip(jax.tree.leaves(simulator.params), jax.tree.leaves(other.params), strict=True):
            np.testing.assert_allclose(mine, his, rtol=1e-4, atol=1e-6)
    together, alone = calls
    assert sum(together) == ROUNDS
    assert max(together) > 4
    assert len(alone) == ROUNDS  # of the other simulator


def test_the_numbers_do_not_depend_on_which_rounds_share_a_program(tmp_path, calls):
    whole, session = start()
    expected = digest(whole, list(run(whole, session, losses_every=1)))
    together, alone = calls
    assert max(together) > 4
    assert not alone

    records = []
    for stop in (1, 3, 4, 11, 27, ROUNDS):
        again, session_again = start()
        if records:
            again.load(tmp_path / "model.npz")
            session_again = Session.load(tmp_path / "policy")
        records += list(run(again, session_again, rounds=stop, losses_every=1, evaluate_last=False))
        again.save(tmp_path / "model.npz")
        session_again.save(tmp_path / "policy")
    assert digest(again, records) == expected


def test_between_two_records_everything_is_at_the_round_of_the_last_one():
    simulator, session = start("f3ast")
    other, other_session = one_by_one("f3ast")
    for record, _ in zip(run(simulator, session, evaluate_every=1), run(other, other_session), strict=True):
        assert session.round == simulator.round == record.index + 1
        assert simulator.counters == record.counters
        assert simulator.evaluate() == (record.test_loss, record.test_accuracy)
        for mine, his in zip(*(vars(each.state).values() for each in (session, other_session)), strict=True):
            np.testing.assert_array_equal(mine, his)


def clear_the_model(simulator, session):
    simulator.params = jax.tree.map(np.zeros_like, simulator.params)


def clear_a_layer_in_place(simulator, session):
    simulator.params["dense0"]["weight"] = np.zeros_like(simulator.params["dense0"]["weight"])


def forgive(simulator, session):
    simulator.faults = None


def slow_down(simulator, session):
    simulator.local = replace(simulator.local, lr=1e-3)


def stop_the_server(simulator, session):
    simulator.server = replace(simulator.server, lr=1e-9)


def draw_others(simulator, session):
    simulator.seed = 99


def choose_otherwise(simulator, session):
    session.policy = registry.get("uniform", weighting="equal")


def choose_others(simulator, session):
    session.seed = 99


def train_somebody_else(simulator, session):
    session.tell(simulator.train(Selection(clients=session.ask(available=Varying(12, 0).mask(session.round)).clients)))


def begin_again(simulator, session):
    fresh, fresh_session = start()
    simulator.params, simulator.velocity, simulator.round = fresh.params, fresh.velocity, 0
    session.restore({}, {}, round=0)
    assert type(fresh_session.state) is type(session.state)


@pytest.mark.parametrize(
    "change",
    [
        *(clear_the_model, clear_a_layer_in_place, forgive, slow_down, stop_the_server, draw_others, choose_otherwise),
        *(choose_others, train_somebody_else, begin_again),
    ],
)
@pytest.mark.parametrize("when", [5, 12, 15, 16, 23])
def test_a_change_between_two_records_takes_effect(change, when):
    """In the middle of prepared rounds, and between two programs."""
    results = []
    for simulator, session in (start(), one_by_one()):
        records = run(simulator, session)
        before = list(islice(records, when))
        change(simulator, session)
        results.append([*before, *islice(records, 12)])
    for ours, theirs in zip(*results, strict=True):
        assert ours.index == theirs.index
        np.testing.assert_array_equal(ours.outcome.clients, theirs.outcome.clients)
        np.testing.assert_array_equal(ours.weights, theirs.weights)
        np.testing.assert_array_equal(ours.outcome.completed, theirs.outcome.completed)
        np.testing.assert_allclose(ours.outcome.update_norm, theirs.outcome.update_norm, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("policy", ["pow-d", "rpow-d", "afl", "ca-fed", "fedcor"])
def test_a_policy_that_asks_or_learns_gets_what_it_needs_first(policy, calls):
    simulator, session = start(policy)
    assert len(list(run(simulator, session, rounds=6))) == 6
    assert not calls[0]


def test_an_update_that_diverges_hands_its_weight_to_the_others(calls):
    """Client 3 has data that make its update infinite; it is known only after the round was prepared."""

    def spoiled(policy):
        simulator, session = start(policy, faults=None)
        x = simulator.federation.x.copy()
        x[simulator.federation.rows(3)] = 3e38
        federation = replace(simulator.federation, x=x)
        simulator = Simulator(federation, "logistic", local=LOCAL, seed=5, group=4)
        return simulator, Session(session.policy, simulator.clients, seed=1)

    simulator, session = spoiled("uniform")
    other, other_session = spoiled("uniform")
    other.engine.rounds_at_once = 1
    failures = 0
    for ours, theirs in zip(run(simulator, session), run(other, other_session), strict=True):
        np.testing.assert_array_equal(ours.outcome.completed, theirs.outcome.completed)
        np.testing.assert_array_equal(ours.weights, theirs.weights)
        assert ours.weights.sum() == pytest.approx(1.0 if ours.outcome.completed.any() else 0.0)
        failures += int((~ours.outcome.completed).sum())
        for mine, his in zip(jax.tree.leaves(simulator.params), jax.tree.leaves(other.params), strict=True):
            assert np.isfinite(mine).all()
            np.testing.assert_allclose(mine, his, rtol=1e-4, atol=1e-6)
    assert failures > 5


def test_a_large_model_is_trained_round_by_round(calls):
    federation = make_federation(sizes=(20,) * 12, shape=(100,))
    simulator = Simulator(federation, "mlp", local=LOCAL, shards=1)
    session = Session(registry.get("uniform"), simulator.clients)
    assert len(list(run(simulator, session, rounds=3))) == 3
    assert not calls[0]


def test_masks_of_another_type_are_asked_for_in_their_round():
    class FollowsTheRecords:
        done, asked_early = 0, False

        def mask(self, round):
            self.asked_early |= round != self.done
            return np.ones(12, bool)

    mine = FollowsTheRecords()
    simulator, session = start()
    for record in simulate(simulator, session, rounds=20, budget=3, availability=mine):
        mine.done = record.index + 1
    assert not mine.asked_early


def test_a_subclass_of_session_or_simulator_is_called_in_every_round():
    class Counting(Simulator):
        trained = 0

        def train(self, *arguments, **options):
            self.trained += 1
            return super().train(*arguments, **options)

    class Listening(Session):
        asked = 0

        def ask(self, **options):
            self.asked += 1
            return super().ask(**options)

    simulator, session = start()
    mine = Listening(session.policy, simulator.clients)
    list(run(simulator, mine, rounds=5))
    assert mine.asked == 5
    counting = Counting(simulator.federation, "logistic", local=LOCAL)
    list(run(counting, Session(session.policy, counting.clients), rounds=5))
    assert counting.trained == 5


@dataclass(frozen=True, kw_only=True)
class FailsInRound(Policy[Stateless]):
    which: int

    def init(self, clients, rng):
        return Stateless()

    def select(self, state, context, rng):
        if context.index == self.which:
            raise RuntimeError("made to fail")
        return Selection(clients=np.flatnonzero(context.available)[: context.budget]), state


def test_what_goes_wrong_goes_wrong_in_its_round():
    simulator, session = start(FailsInRound(which=11))
    records = []
    with pytest.raises(RuntimeError, match="made to fail"):
        for record in run(simulator, session):
            records.append(record)  # not extend: it would keep none of them
    assert simulator.round == session.round == 11
    assert records[-1].index == 10


def test_nothing_is_computed_beyond_the_last_round(calls):
    simulator, session = start()
    list(run(simulator, session, rounds=21))
    assert sum(calls[0]) == 21
