"""The readable way: one client after another, one mini-batch after another, no padding, no masks, numpy float64."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np

from fedpick.core.rng import Purpose
from fedpick.core.types import aggregation_weights
from fedpick.data.types import Federation
from fedpick.sim import hashing
from fedpick.sim.batches import batch_positions


def make_federation(
    sizes=(40, 7, 23, 64, 1, 30),
    shape=(6,),
    num_classes=3,
    validation=0.0,
    local_test=0.0,
    num_test=50,
    seed=0,
    shuffled=True,
):
    """Random, learnable data for ragged clients, with rows in no particular order."""
    rng = np.random.default_rng(seed)
    sizes = np.asarray(sizes)
    total = int(sizes.sum())
    x = rng.standard_normal((total + num_test, *shape)).astype(np.float32)
    teacher = rng.standard_normal((int(np.prod(shape)), num_classes))
    y = np.argmax(x.reshape(len(x), -1) @ teacher, axis=1).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    validation_ends = offsets[1:] - (sizes * local_test).astype(int)
    train_ends = validation_ends - (sizes * validation).astype(int)
    return Federation(
        name="random",
        partition="ragged",
        x=x[:total],
        y=y[:total],
        indices=rng.permutation(total) if shuffled else np.arange(total),
        offsets=offsets,
        train_ends=train_ends,
        validation_ends=validation_ends,
        test_x=x[total:],
        test_y=y[total:],
        num_classes=num_classes,
        scale=0.5,
        mean=np.array([0.1], np.float32),
        std=np.array([0.9], np.float32),
    )


def quadratic_federation(num_clients=6, dimension=4, seed=0):
    rng = np.random.default_rng(seed)
    diagonal = np.repeat(rng.uniform(1, 20, (num_clients, 1)), dimension, axis=1)
    x = np.stack([diagonal, rng.uniform(0, 100, (num_clients, dimension))], axis=1).astype(np.float32)
    ends = np.arange(1, num_clients + 1)
    return Federation(
        name="quadratic",
        partition="natural",
        x=x,
        y=np.zeros(num_clients, np.float32),
        indices=np.arange(num_clients),
        offsets=np.arange(num_clients + 1),
        train_ends=ends,
        validation_ends=ends,
        test_x=x[:0],
        test_y=np.zeros(0, np.float32),
        num_classes=0,
        stated_sizes=rng.power(3, num_clients),
    )


def client_key(seed, round, client):
    base = hashing.key_from(seed, int(Purpose.BATCHES), round)
    return hashing.fold(base, np.array([client], np.uint32))


def client_batches(simulator, client, round):
    """The rows of x of every local step, in order."""
    local, federation = simulator.local, simulator.federation
    rows = federation.rows(client, "train")
    size = np.array([max(len(rows), 1)], np.uint32)
    width = local.batch_size or max(int(federation.train_sizes.max()), 1)
    steps = int(local.num_steps(np.array([len(rows)]))[0])
    for step in range(steps):
        key = client_key(simulator.seed, round, client)
        positions, counts = batch_positions(local, key, np.array([step], np.uint32), size, width)
        yield rows[positions[counts]]


def to_numpy(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def logistic_gradient(weights, x, y):
    """Loss and gradient of multinomial logistic regression, by hand."""
    layer = weights["dense0"]
    x = x.reshape(len(x), -1).astype(np.float64)
    logits = x @ layer["weight"] + layer["bias"]
    logits -= logits.max(axis=1, keepdims=True)
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    loss = -np.log(shares[np.arange(len(y)), y]).mean()
    shares[np.arange(len(y)), y] -= 1.0
    shares /= len(y)
    return loss, {"dense0": {"weight": x.T @ shares, "bias": shares.sum(axis=0)}}


@cache
def compiled_gradient(task):
    return jax.jit(jax.value_and_grad(lambda w, x, y, key: task.per_example_loss(w, x, y, key, True).mean()))


def gradient_of(simulator, weights, rows, words):
    federation = simulator.federation
    x, y = federation.normalized(federation.x[rows]), federation.y[rows]
    if simulator.task.name == "logistic":
        return logistic_gradient(weights, x, y)
    key = jax.random.wrap_key_data(np.concatenate(words), impl="threefry2x32")
    single = jax.tree.map(lambda leaf: leaf.astype(np.float32), weights)
    loss, gradient = compiled_gradient(simulator.task)(single, x, y, key)
    return float(loss), to_numpy(gradient)


def train_client(simulator, params, client, round):
    """(update, mean training loss) of one client."""
    local = simulator.local
    lr = local.lr_at(round)
    weights, received = to_numpy(params), to_numpy(params)
    velocity = jax.tree.map(np.zeros_like, weights)
    losses = []
    for step, rows in enumerate(client_batches(simulator, client, round)):
        words = hashing.fold(client_key(simulator.seed, round, client), ~np.array([step], np.uint32))
        loss, gradient = gradient_of(simulator, weights, rows, words)
        losses.append(loss)
        gradient = jax.tree.map(
            lambda g, w, r: g + local.weight_decay * w + local.proximal * (w - r),
            gradient,
            weights,
            received,
        )
        velocity = jax.tree.map(lambda v, g: local.momentum * v + g, velocity, gradient)
        weights = jax.tree.map(lambda w, v: w - lr * v, weights, velocity)
    update = jax.tree.map(lambda new, old: new - old, weights, received)
    return update, float(np.mean(losses)) if losses else float("nan")


def train_round(simulator, params, velocity, selection, completed, round):
    """The new (params, velocity) and the clients' training losses."""
    server = simulator.server
    weights = aggregation_weights(selection, completed, simulator.clients)
    total = jax.tree.map(np.zeros_like, to_numpy(params))
    losses = []
    for client, weight, answered in zip(selection.clients, weights, completed, strict=True):
        update, loss = train_client(simulator, params, int(client), round)
        losses.append(loss if answered else np.nan)
        if answered:
            total = jax.tree.map(lambda t, u, w=weight: t + w * u, total, update)
    if weights.sum() == 0:
        return to_numpy(params), velocity, np.array(losses)
    gradient = jax.tree.map(lambda t, w: server.weight_decay * w - t, total, to_numpy(params))
    velocity = jax.tree.map(lambda v, g: server.momentum * v + g, velocity, gradient)
    params = jax.tree.map(lambda w, v: w - server.lr_at(round) * v, to_numpy(params), velocity)
    if server.radius is not None:
        norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(params)))
        params = jax.tree.map(lambda w: w * min(1.0, server.radius / norm), params)
    return params, velocity, np.array(losses)


def mean_loss(simulator, params, client, part):
    rows = simulator.federation.rows(client, part)
    if len(rows) == 0:
        return np.nan
    x = simulator.federation.normalized(simulator.federation.x[rows])
    losses = simulator.task.per_example_loss(params, x, simulator.federation.y[rows], jax.random.key(0), False)
    return float(np.asarray(losses, np.float64).mean())


def assert_trees_close(actual, expected, rtol=2e-4, atol=2e-6):
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(expected)[0]]
    for name, a, e in zip(names, jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(e), rtol=rtol, atol=atol, err_msg=name)
