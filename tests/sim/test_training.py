"""The fast path against the readable loop, for every task, local solver and server step."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from fedpick.core.errors import InvalidInput
from fedpick.core.policy import Signal
from fedpick.core.types import Probe, Selection
from fedpick.sim import Faults, LearningRate, LocalTraining, ServerStep, Simulator, Task, tasks
from fedpick.sim.jax_engine import engine
from tests.sim.naive_loop import (
    assert_trees_close,
    client_batches,
    make_federation,
    quadratic_federation,
    to_numpy,
    train_client,
    train_round,
)

SOLVERS = {
    "epoch steps": LocalTraining(lr=0.1, steps=7, batch_size=8),
    "epochs": LocalTraining(lr=0.1, epochs=2, batch_size=8),
    "batch": LocalTraining(lr=0.1, steps=4, batch_size=16, sampling="batch"),
    "replacement": LocalTraining(lr=0.1, steps=4, batch_size=16, sampling="replacement"),
    "batches of an odd number": LocalTraining(lr=0.1, epochs=1, batch_size=7),
    "many positions": LocalTraining(lr=0.02, steps=29, batch_size=20, sampling="batch"),
    "very many positions": LocalTraining(lr=0.02, steps=29, batch_size=50),
    "one at a time": LocalTraining(lr=0.1, steps=4, batch_size=1),
    "gradient descent": LocalTraining(lr=0.1, steps=3, batch_size=None),
    "full epochs": LocalTraining(lr=0.1, epochs=2, batch_size=None),
    "momentum and decay": LocalTraining(lr=0.05, steps=5, batch_size=8, momentum=0.9, weight_decay=0.01),
    "fedprox": LocalTraining(lr=0.1, epochs=2, batch_size=8, proximal=0.5),
    "schedule": LocalTraining(
        lr=LearningRate(initial=0.2, milestones=(1, 2), per_round=0.9, decay=0.1), steps=3, batch_size=8
    ),
}
SERVERS = {
    "average": ServerStep(),
    "rate": ServerStep(lr=0.3),
    "momentum and decay": ServerStep(lr=0.3, momentum=0.9, weight_decay=0.01),
    "decay": ServerStep(weight_decay=0.1),
    "ball": ServerStep(lr=2.0, radius=0.5),
}


@pytest.fixture
def fresh_programs():
    """Compile anew before and after a test that changes a constant of the programs."""
    engine._training_programs.cache_clear()
    yield
    engine._training_programs.cache_clear()


def follow(simulator, selections, rounds_done=0):
    """Train some rounds on both paths and compare the models and losses."""
    params, velocity = to_numpy(simulator.params), jax.tree.map(np.zeros_like, to_numpy(simulator.params))
    for index, selection in enumerate(selections, rounds_done):
        completed = np.ones(len(selection.clients), bool)
        params, velocity, losses = train_round(simulator, simulator.params, velocity, selection, completed, index)
        outcome = simulator.train(selection, index)
        assert_trees_close(simulator.params, params)
        np.testing.assert_allclose(outcome.train_loss, losses, rtol=1e-4)
        assert outcome.completed.all()


@pytest.mark.parametrize(("group", "shards"), [(1, 2), (3, 1)])
@pytest.mark.parametrize("solver", SOLVERS)
def test_local_solvers(solver, group, shards):
    simulator = Simulator(make_federation(), "logistic", local=SOLVERS[solver], seed=3, group=group, shards=shards)
    cohorts = [Selection(clients=[4, 0, 2]), Selection(clients=[1, 3, 5, 0], weights=[0.1, 0.5, 0.2, 0.0])]
    follow(simulator, [*cohorts, Selection(clients=[5, 1])])


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("solver", SOLVERS)
def test_local_solvers_with_mini_batches_on_one_core(monkeypatch, fresh_programs, solver, group):
    """As with more data than these."""
    monkeypatch.setattr("fedpick.sim.jax_engine.training.PARALLEL_GATHER", 0)
    simulator = Simulator(make_federation(), "logistic", local=SOLVERS[solver], seed=3, group=group, shards=1)
    follow(simulator, [Selection(clients=[4, 0, 2]), Selection(clients=[1, 3, 5, 0])])


@pytest.mark.parametrize("large", [1, 10**9], ids=["transposed", "as they are"])
@pytest.mark.parametrize("solver", ["epochs", "momentum and decay", "fedprox"])
def test_large_matrices_are_transposed_and_back(monkeypatch, fresh_programs, solver, large):
    """6 x 16 and 16 x 3: a matrix left transposed would not fit; more parameters than a light model has."""
    monkeypatch.setattr("fedpick.sim.jax_engine.training.LARGE_MATRIX", large)
    task = replace(tasks.get("mlp", input_shape=(6,), num_classes=3, hidden=(16,)), name="under test")
    simulator = Simulator(make_federation(), task, local=SOLVERS[solver], seed=3, group=3, shards=1)
    follow(simulator, [Selection(clients=[4, 0, 2]), Selection(clients=[1, 3, 5, 0], weights=[0.1, 0.5, 0.2, 0.0])])


@pytest.mark.parametrize("server", SERVERS)
def test_server_steps(server):
    local = LocalTraining(lr=0.1, steps=3, batch_size=8)
    simulator = Simulator(make_federation(), "logistic", local=local, server=SERVERS[server], seed=1)
    follow(simulator, [Selection(clients=[4, 0, 2]), Selection(clients=[1, 3], weights=[0.4, 0.8], renormalize=False)])
    if SERVERS[server].radius:
        norm = np.sqrt(sum(float((np.asarray(leaf) ** 2).sum()) for leaf in jax.tree.leaves(simulator.params)))
        assert norm == pytest.approx(0.5, rel=1e-5)


TASKS = {
    "mlp": ("mlp", {"hidden": (8, 5)}, (6, 6, 1)),
    "mlp fedcor": ("mlp", {"hidden": (8, 5), "dropout": "fedcor"}, (6, 6, 1)),
    "mlp power-of-choice": ("mlp", {"hidden": (8, 5), "dropout": "power-of-choice"}, (6, 6, 1)),
    "cnn-fedcor": ("cnn-fedcor", {}, (20, 20, 1)),
    "cnn-mcmahan-fmnist": ("cnn-mcmahan-fmnist", {}, (8, 8, 1)),
    "cnn-mcmahan-cifar": ("cnn-mcmahan-cifar", {}, (16, 16, 2)),
    "cnn-cafed": ("cnn-cafed", {"filters": (4, 5)}, (16, 16, 2)),
    "cnn-power-of-choice": ("cnn-power-of-choice", {}, (16, 16, 2)),
    "logistic ridge": ("logistic", {"ridge": 0.1, "start": "zero"}, (6,)),
    "sent140-mlp": ("sent140-mlp", {}, (10,)),
}


@pytest.mark.parametrize("name", TASKS)
def test_tasks(name):
    task, options, shape = TASKS[name]
    built = tasks.get(task, input_shape=shape, num_classes=3, **options)
    local = LocalTraining(lr=0.05, steps=2, batch_size=6, weight_decay=1e-3)
    federation = make_federation(sizes=(12, 6, 12), shape=shape)
    # Under another name, so that the loop takes its gradient from the task itself, ridge included.
    simulator = Simulator(federation, replace(built, name="under test"), local=local, seed=2)
    follow(simulator, [Selection(clients=[2, 1])])


def test_quadratic():
    simulator = Simulator(
        quadratic_federation(), "quadratic", local=LocalTraining(lr=1e-3, steps=2, batch_size=None), seed=2
    )
    follow(simulator, [Selection(clients=[2, 1]), Selection(clients=[5])])
    diagonal, linear = (simulator.federation.x[:, i].astype(np.float64) for i in (0, 1))
    w = np.asarray(simulator.params["w"], np.float64)
    printed = 0.5 * (diagonal * w * w).sum(1) - linear @ w + 0.5 * (linear**2 / diagonal).sum(1)
    np.testing.assert_allclose(simulator.client_losses(), printed, rtol=1e-4)


def test_every_task_is_covered_and_described():
    assert {name for name, _, _ in TASKS.values()} | {"quadratic"} == set(tasks.names())
    assert all(tasks.describe(name) for name in tasks.names())


def test_a_task_of_ones_own():
    import jax.numpy as jnp

    def loss(params, x, y, key, train):
        return (x @ params - y) ** 2

    own = Task(
        name="least-squares",
        init=lambda key: jnp.zeros(6),
        per_example_loss=loss,
        correct=lambda params, x, y: jnp.abs(x @ params - y) < 0.5,
    )
    simulator = Simulator(make_federation(), own, local=LocalTraining(lr=0.01, epochs=1, batch_size=8))
    follow(simulator, [Selection(clients=[0, 3])])
    assert Signal.OUTPUTS not in simulator.provides


def test_every_row_is_used_once_per_epoch_and_short_batches_are_short():
    local = LocalTraining(lr=0.1, epochs=2, batch_size=8)
    simulator = Simulator(make_federation(validation=0.2), "logistic", local=local)
    for client in range(6):
        rows = simulator.federation.rows(client, "train")
        batches = list(client_batches(simulator, client, 0))
        half = len(batches) // 2
        for epoch in (batches[:half], batches[half:]):
            np.testing.assert_array_equal(np.sort(np.concatenate(epoch)), np.sort(rows))
            assert [len(batch) for batch in epoch[:-1]] == [8] * (half - 1)
    assert not np.array_equal(batches[0], batches[half])


def test_batches_without_replacement_are_distinct_within_the_batch():
    local = LocalTraining(lr=0.1, steps=6, batch_size=16, sampling="batch")
    simulator = Simulator(make_federation(), "logistic", local=local)
    for client, size in enumerate(simulator.federation.train_sizes):
        for batch in client_batches(simulator, client, 3):
            assert len(batch) == len(set(batch)) == min(16, size)


def test_a_client_without_training_data_changes_nothing():
    local = LocalTraining(lr=0.1, steps=3, batch_size=8, weight_decay=0.5)
    simulator = Simulator(make_federation(sizes=(10, 0, 5)), "logistic", local=local)
    before = to_numpy(simulator.params)
    outcome = simulator.train(Selection(clients=[1], weights=[1.0]))
    assert outcome.completed.all()
    assert outcome.update_norm[0] == 0
    assert np.isnan(outcome.train_loss[0])
    assert_trees_close(simulator.params, before, rtol=0, atol=0)


def test_outcome_norm_and_probed_update_are_the_update():
    local = LocalTraining(lr=0.1, epochs=1, batch_size=8)
    simulator = Simulator(make_federation(), "logistic", local=local, seed=5)
    probed = simulator.measure(Probe(clients=[3, 1], signal=Signal.UPDATE))
    for row, client in zip(probed, (3, 1), strict=True):
        update, _ = train_client(simulator, simulator.params, client, 0)
        flat = np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(update)])
        np.testing.assert_allclose(row, flat, rtol=1e-4, atol=1e-6)
    outcome = simulator.train(Selection(clients=[3, 1]))
    np.testing.assert_allclose(outcome.update_norm, np.linalg.norm(probed, axis=1), rtol=1e-5)


def test_learning_rate_schedules():
    halving = LearningRate(initial=0.1, milestones=(150, 300))
    assert [halving.at(t) for t in (149, 150, 299, 300)] == [0.1, 0.05, 0.05, 0.025]
    assert LearningRate(initial=1.0, per_round=0.998).at(100) == pytest.approx(0.998**100)
    assert LearningRate(initial=1.0, decay=1.0).at(9) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "bad",
    [
        {"lr": 0.1},
        {"lr": 0.1, "steps": 1, "epochs": 1},
        {"lr": 0.0, "steps": 1},
        {"lr": 0.1, "steps": 0},
        {"lr": 0.1, "steps": 1, "batch_size": 0},
        {"lr": 0.1, "steps": 1, "sampling": "shuffle"},
        {"lr": 0.1, "steps": 1, "momentum": -0.1},
    ],
)
def test_impossible_local_training_is_refused(bad):
    with pytest.raises(InvalidInput):
        LocalTraining(**bad)


def test_wrong_tasks_are_refused():
    with pytest.raises(LookupError, match="Did you mean 'mlp'"):
        tasks.get("mlpp")
    with pytest.raises(InvalidInput, match="options"):
        tasks.get("mlp", depth=3)
    with pytest.raises(InvalidInput, match="dropout"):
        tasks.get("mlp", dropout="everywhere")
    for rate in (-0.1, 1.0, float("nan"), "high"):
        with pytest.raises(InvalidInput, match=r"'rate' parameter of Mlp must be a number in \[0, 1\)"):
            tasks.get("mlp", dropout="fedcor", rate=rate)
    for ridge in (-0.1, float("nan"), "high"):
        with pytest.raises(InvalidInput, match="'ridge' parameter of Logistic must be a finite number of at least 0"):
            tasks.get("logistic", ridge=ridge)
    with pytest.raises(InvalidInput, match="images"):
        tasks.get("cnn-fedcor", input_shape=(784,))


@pytest.mark.parametrize(("shards", "group"), [(1, 1), (1, 3), (2, 1)])
def test_sketches_and_root_mean_squares_are_reported_where_they_are_asked_for(shards, group):
    local = LocalTraining(lr=0.1, steps=3, batch_size=8)
    simulator = Simulator(make_federation(), "logistic", local=local, seed=5, shards=shards, group=group)
    chosen = [3, 1, 0, 5]
    biases = [train_client(simulator, simulator.params, client, 0)[0]["dense0"]["bias"] for client in chosen]
    before = simulator.client_losses()
    other = Simulator(make_federation(), "logistic", local=local, seed=5, shards=shards, group=group)
    plain = other.train(Selection(clients=chosen))
    assert plain.sketch.shape == (4, 0)
    assert np.isnan(plain.loss_rms).all()
    outcome = simulator.train(Selection(clients=chosen), report=frozenset({Signal.SKETCH, Signal.LOSS_RMS}))
    np.testing.assert_allclose(outcome.sketch, biases, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(outcome.loss, before[chosen], rtol=1e-6)
    assert (outcome.loss_rms >= outcome.loss).all()
    # A sketch is made by the server; a root mean square is a number that the client sends.
    assert simulator.counters.scalars_up == 4
    assert_trees_close(simulator.params, other.params, rtol=1e-6, atol=1e-7)


def test_a_client_that_sends_nan_has_no_sketch():
    simulator = Simulator(
        make_federation(), "logistic", local=LocalTraining(lr=0.1, steps=3), seed=5, faults=Faults(nan=1.0)
    )
    outcome = simulator.train(Selection(clients=[3, 1]), report=frozenset({Signal.SKETCH}))
    assert np.isnan(outcome.sketch).all()
    assert outcome.sketch.shape == (2, 3)
