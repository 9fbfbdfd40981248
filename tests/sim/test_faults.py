from dataclasses import replace

import numpy as np
import pytest

from fedpick.core.errors import InvalidInput
from fedpick.core.policy import Signal
from fedpick.core.types import Probe, Selection, aggregation_weights
from fedpick.sim import Faults, LocalTraining, ServerStep, Simulator, Task
from tests.sim.naive_loop import assert_trees_close, make_federation, to_numpy, train_round

LOCAL = LocalTraining(lr=0.1, steps=3, batch_size=8)
EVERYBODY = np.arange(6)


def simulator_with(faults, **options):
    return Simulator(make_federation(), "logistic", local=LOCAL, faults=faults, seed=11, **options)


def zeros(simulator):
    import jax

    return jax.tree.map(np.zeros_like, to_numpy(simulator.params))


@pytest.mark.parametrize("faults", [Faults(dropout=0.5), Faults(nan=0.5), Faults(deadline=1.0, jitter=1.0)])
@pytest.mark.parametrize(
    "selection",
    [
        Selection(clients=EVERYBODY),
        Selection(clients=EVERYBODY, weights=np.full(6, 0.3)),
        Selection(clients=EVERYBODY, weights=np.full(6, 0.3), renormalize=False),
    ],
)
def test_only_those_who_completed_enter_the_model(faults, selection):
    simulator = simulator_with(faults)
    for index in range(3):
        before = simulator.params
        outcome = simulator.train(selection)
        expected, _, _ = train_round(simulator, before, zeros(simulator), selection, outcome.completed, index)
        assert_trees_close(simulator.params, expected)
        assert np.isnan(outcome.update_norm[~outcome.completed]).all()
        assert np.isfinite(outcome.update_norm[outcome.completed]).all()
        assert 0 < outcome.completed.sum() < 6


def test_nobody_completes_nothing_changes():
    simulator = simulator_with(Faults(nan=1.0), server=ServerStep(momentum=0.9, weight_decay=0.1))
    before = to_numpy((simulator.params, simulator.velocity))
    outcome = simulator.train(Selection(clients=EVERYBODY))
    assert not outcome.completed.any()
    assert simulator.counters.updates_up == 6
    assert simulator.round == 1
    assert_trees_close((simulator.params, simulator.velocity), before, rtol=0, atol=0)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_finite_updates_that_would_make_the_model_infinite_make_no_step(shards, momentum):
    simulator = simulator_with(None, server=ServerStep(momentum=momentum), shards=shards, group=1)
    before = to_numpy((simulator.params, simulator.velocity))
    huge = Selection(clients=EVERYBODY, weights=np.full(6, 1e39), renormalize=False)
    outcome = simulator.train(huge)
    assert not outcome.completed.any()
    assert np.isnan(outcome.update_norm).all()
    assert simulator.round == 1
    assert_trees_close((simulator.params, simulator.velocity), before, rtol=0, atol=0)
    assert simulator.train(Selection(clients=EVERYBODY)).completed.all()


def test_prepared_rounds_refuse_an_infinite_model_too():
    simulator = simulator_with(None)
    before = to_numpy(simulator.params)
    huge = Selection(clients=EVERYBODY, weights=np.full(6, 1e39), renormalize=False)
    usual = Selection(clients=EVERYBODY)
    simulator.prepare([huge, usual], [True, True])
    assert not simulator.train(huge).completed.any()
    assert_trees_close(simulator.params, before, rtol=0, atol=0)
    assert simulator.num_prepared == 1
    assert simulator.train(usual).completed.all()
    assert all(np.isfinite(leaf).all() for leaf in simulator.engine.leaves(simulator.params, simulator.velocity))


def test_a_diverging_client_does_not_complete():
    import jax.numpy as jnp

    def loss(params, x, y, key, train):
        return jnp.exp(jnp.exp(jnp.abs(x @ params) * jnp.where(y == 2, 99.0, 0.1)))

    # Client 3's rows blow up; its neighbours' do not.
    task = Task(
        name="fragile", init=lambda key: jnp.ones(6), per_example_loss=loss, correct=lambda params, x, y: y == 0
    )
    federation = make_federation()
    labels = np.zeros(len(federation.y), np.int32)
    labels[federation.rows(3)] = 2
    simulator = Simulator(replace(federation, y=labels), task, local=LOCAL)
    selection = Selection(clients=[0, 3, 5], weights=[0.2, 0.5, 0.3])
    updates = simulator.measure(Probe(clients=[0, 5], signal=Signal.UPDATE))
    before = np.asarray(simulator.params)
    outcome = simulator.train(selection)
    np.testing.assert_array_equal(outcome.completed, [True, False, True])
    weights = aggregation_weights(selection, outcome.completed, simulator.clients)
    np.testing.assert_allclose(weights, [0.4, 0.0, 0.6])
    np.testing.assert_allclose(np.asarray(simulator.params) - before, weights[[0, 2]] @ updates, rtol=1e-4, atol=1e-7)


def test_faults_depend_on_seed_round_and_client_alone():
    faults = Faults(dropout=0.3, nan=0.3, deadline=2.0, jitter=0.5, speed_spread=0.5, seconds_per_example=0.01)
    clients = np.arange(1000)
    examples = np.full(1000, 50)
    draw = faults.draw(3, 7, clients, examples)
    part = faults.draw(3, 7, clients[::7], examples[::7])
    for whole, piece in zip(draw, part, strict=True):
        np.testing.assert_array_equal(whole[::7], piece)
    assert (faults.draw(3, 8, clients, examples).dropped != draw.dropped).any()
    assert (faults.draw(4, 7, clients, examples).dropped != draw.dropped).any()


def test_rates_and_durations_are_as_stated():
    faults = Faults(dropout=0.2, nan=0.1, silence=0.4, latency=2.0, seconds_per_example=0.1, speed_spread=0.3)
    clients, examples = np.arange(20_000), np.full(20_000, 30)
    draw = faults.draw(0, 0, clients, examples)
    assert draw.dropped.mean() == pytest.approx(0.2, abs=0.01)
    assert draw.poisoned[~draw.dropped].mean() == pytest.approx(0.1, abs=0.01)
    assert faults.silent(0, 0, clients).mean() == pytest.approx(0.4, abs=0.01)
    assert np.isnan(draw.duration[draw.dropped]).all()
    logs = np.log(draw.duration[~draw.dropped] / 5.0)
    assert logs.mean() == pytest.approx(0.0, abs=0.01)
    assert logs.std() == pytest.approx(0.3, abs=0.01)
    # A client's speed stays; the next round's durations are the same without jitter.
    later = faults.draw(0, 1, clients, examples).duration
    both = ~np.isnan(later) & ~draw.dropped
    np.testing.assert_array_equal(later[both], draw.duration[both])


def test_silent_clients_do_not_answer_probes():
    simulator = simulator_with(Faults(silence=0.5))
    values = simulator.measure(Probe(clients=EVERYBODY))
    assert 0 < np.isnan(values).sum() < 6


def test_late_answers_are_sent_but_not_used():
    simulator = simulator_with(Faults(deadline=0.5, latency=1.0))
    outcome = simulator.train(Selection(clients=EVERYBODY))
    assert not outcome.completed.any()
    np.testing.assert_array_equal(outcome.duration, np.ones(6))
    assert simulator.counters.updates_up == 6
    dropping = simulator_with(Faults(dropout=1.0))
    dropping.train(Selection(clients=EVERYBODY))
    assert dropping.counters.updates_up == 0


@pytest.mark.parametrize("bad", [{"dropout": 1.5}, {"nan": -0.1}, {"deadline": 0.0}, {"jitter": float("nan")}])
def test_impossible_faults_are_refused(bad):
    with pytest.raises(InvalidInput):
        Faults(**bad)
