import jax
import numpy as np
import pytest

from fedpick.core.errors import InvalidInput, MissingSignal
from fedpick.core.policy import Signal
from fedpick.core.rng import Purpose
from fedpick.core.types import Probe, Selection
from fedpick.sim import LocalTraining, ServerStep, Simulator, hashing, tasks
from tests.sim.naive_loop import assert_trees_close, make_federation, mean_loss, to_numpy, train_client

LOCAL = LocalTraining(lr=0.1, steps=3, batch_size=8)


def simulator_for(**options):
    federation = make_federation(sizes=(40, 7, 23, 64, 2, 30), validation=0.2, local_test=0.3)
    return Simulator(federation, "logistic", local=LOCAL, **{"seed": 4, **options})


@pytest.mark.parametrize("part", ["train", "validation", "test", "all"])
def test_losses_are_those_of_the_readable_loop(part):
    simulator = simulator_for(losses_on=part)
    expected = [mean_loss(simulator, simulator.params, client, part) for client in range(6)]
    np.testing.assert_allclose(simulator.client_losses(), expected, rtol=1e-5)
    np.testing.assert_allclose(simulator.measure(Probe(clients=[5, 0])), [expected[5], expected[0]], rtol=1e-5)
    # A client without such rows has no loss.
    assert np.isnan(expected[4]) == (part in ("validation", "test"))


def test_small_blocks_give_the_same_losses():
    from dataclasses import replace

    small = replace(tasks.get("logistic", input_shape=(6,), num_classes=3), evaluation_batch=7)
    federation = make_federation()
    simulators = [Simulator(federation, task, local=LOCAL) for task in ("logistic", small)]
    np.testing.assert_allclose(*[s.client_losses() for s in simulators], rtol=1e-6)
    np.testing.assert_allclose(*[s.measure(Probe(clients=[3, 1])) for s in simulators], rtol=1e-6)
    np.testing.assert_allclose(*[s.evaluate() for s in simulators], rtol=1e-6)


def test_mini_batch_losses_come_from_that_many_rows_and_need_no_more():
    simulator = simulator_for()
    whole = simulator.measure(Probe(clients=[1, 4]))
    # Client 1 has 4 training rows and client 4 has 2: a batch of 16 is all they have.
    np.testing.assert_allclose(simulator.measure(Probe(clients=[1, 4], batch_size=16)), whole, rtol=1e-6)
    probe = Probe(clients=[0, 3], batch_size=5)
    first = simulator.measure(probe)
    np.testing.assert_array_equal(simulator.measure(probe), first)
    np.testing.assert_array_equal(simulator.measure(Probe(clients=[3], batch_size=5)), first[1:])
    simulator.round = 1
    assert (simulator.measure(probe) != first).all()


def test_a_trial_measures_the_model_that_training_would_give_and_commits_nothing():
    simulator = simulator_for(server=ServerStep(lr=0.5, momentum=0.9))
    cohort = Selection(clients=[0, 3], weights=[0.2, 0.3])
    before = to_numpy((simulator.params, simulator.velocity))
    tried = simulator.measure(Probe(clients=np.arange(6), trial=cohort))
    assert_trees_close((simulator.params, simulator.velocity), before, rtol=0, atol=0)
    assert simulator.round == 0
    assert (tried != simulator.client_losses()).all()
    simulator.train(cohort)
    np.testing.assert_array_equal(tried, simulator.client_losses())


def test_outputs_are_mean_answers_of_the_trained_model_on_common_noise():
    simulator = simulator_for(noise_examples=32)
    values = simulator.measure(Probe(clients=[2, 0], signal=Signal.OUTPUTS))
    noise = simulator.examples.noise(hashing.key_from(simulator.seed, int(Purpose.MEASURE)), 32)
    for row, client in zip(values, (2, 0), strict=True):
        update, _ = train_client(simulator, simulator.params, client, 0)
        trained = jax.tree.map(np.add, to_numpy(simulator.params), update)
        layer = trained["dense0"]
        expected = (np.asarray(noise) @ layer["weight"] + layer["bias"]).mean(axis=0)
        np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(simulator.measure(Probe(clients=[0], signal=Signal.OUTPUTS)), values[1:])


def test_sketches_keep_inner_products():
    federation = make_federation(shape=(60,), num_classes=10)
    whole = Simulator(federation, "logistic", local=LOCAL).measure(Probe(clients=np.arange(6), signal=Signal.UPDATE))
    simulator = Simulator(federation, "logistic", local=LOCAL, update_length=256)
    sketched = simulator.measure(Probe(clients=np.arange(6), signal=Signal.UPDATE))
    assert sketched.shape == (6, 256)
    products, estimates = whole @ whole.T, sketched @ sketched.T
    scale = np.sqrt(np.outer(np.diag(products), np.diag(products)))
    # Each entry has a standard deviation of about sqrt(2/256) of the norms.
    assert np.abs((estimates - products) / scale).max() < 0.4
    assert np.corrcoef(products.ravel(), estimates.ravel())[0, 1] > 0.9


def test_evaluation():
    simulator = simulator_for()
    federation = simulator.federation
    layer = to_numpy(simulator.params)["dense0"]
    logits = federation.normalized(federation.test_x) @ layer["weight"] + layer["bias"]
    loss, accuracy = simulator.evaluate()
    assert accuracy == pytest.approx((logits.argmax(axis=1) == federation.test_y).mean())
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert loss == pytest.approx(-np.log(shares[np.arange(50), federation.test_y]).mean(), rel=1e-5)
    losses, accuracies = simulator.evaluate_clients("test")
    assert losses[3] == pytest.approx(mean_loss(simulator, simulator.params, 3, "test"), rel=1e-5)
    importance = simulator.clients.importance
    expected = np.nansum(importance * accuracies) / importance[~np.isnan(accuracies)].sum()
    assert simulator.weighted(accuracies) == pytest.approx(expected)


def test_without_a_test_set_there_is_no_accuracy():
    simulator = Simulator(make_federation(num_test=0), "logistic", local=LOCAL)
    assert np.isnan(simulator.evaluate()).all()


def test_counters():
    simulator = simulator_for()
    size = simulator.model_bytes
    assert size == 4 * (6 * 3 + 3)
    simulator.measure(Probe(clients=[0, 1, 2]))
    assert simulator.counters.as_dict() == {
        "models_down": 3,
        "updates_up": 0,
        "scalars_up": 3,
        "bytes_down": 3 * size,
        "bytes_up": 12,
    }
    # Clients 0 and 1 have this round's model already.
    simulator.train(Selection(clients=[0, 1, 3]), report=frozenset({Signal.OUTCOME_LOSS}))
    counters = simulator.counters
    assert (counters.models_down, counters.updates_up, counters.scalars_up) == (4, 3, 6)
    # Two train for the trial, four get the trial's model and answer.
    simulator.measure(Probe(clients=[0, 1, 2, 3], trial=Selection(clients=[4, 5])))
    counters = simulator.counters
    assert (counters.models_down, counters.updates_up, counters.scalars_up) == (10, 5, 10)
    simulator.measure(Probe(clients=[2], signal=Signal.UPDATE))
    counters = simulator.counters
    assert (counters.models_down, counters.updates_up, counters.scalars_up) == (11, 6, 10)
    assert counters.bytes_up == 6 * size + 40


def test_the_loss_before_training_is_reported_only_when_asked_for():
    simulator = simulator_for()
    expected = simulator.measure(Probe(clients=[3, 1]))
    outcome = simulator.train(Selection(clients=[3, 1]), report=frozenset({Signal.OUTCOME_LOSS}))
    np.testing.assert_allclose(outcome.loss, expected, rtol=1e-6)
    assert np.isnan(simulator.train(Selection(clients=[3, 1])).loss).all()


def test_what_cannot_be_measured_is_refused():
    simulator = simulator_for()
    with pytest.raises(MissingSignal, match=r"outcome\.loss"):
        simulator.measure(Probe(clients=[0], signal=Signal.OUTCOME_LOSS))
    with pytest.raises(InvalidInput, match="No client has validation data"):
        Simulator(make_federation(), "logistic", local=LOCAL, losses_on="validation")
