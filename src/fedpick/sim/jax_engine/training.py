"""Local training of one client, for JAX.

Clients of different size are handled by drawing indices, never by cutting data: client k trains on all of its training
rows, and the last batch of an epoch is as short as it comes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedpick.sim import hashing
from fedpick.sim.batches import batch_positions
from fedpick.sim.jax_engine.setup import on_cpu
from fedpick.sim.settings import LocalTraining
from fedpick.sim.tasks import Task

__all__ = ["client_trainer"]

Array = Any
Params = Any

# XLA's CPU compiler splits an operation over all cores by the size of what it could read, and starting the threads
# takes longer than the operation itself when it is small. The limits below keep small work on one core. Measured in
# docs/results/speed.md.
LARGE_MATRIX = 4096
"""Size from which a weight matrix is kept transposed, unless the model is light."""
SMALL_BATCH = 16384
"""Numbers in a mini-batch that one core copies faster than several."""
PARALLEL_GATHER = 2**19
"""XLA parallelises a gather once its source exceeds this many bytes."""
ONE_CORE = 1024
"""Positions drawn in one operation; XLA would parallelise more."""
MANY_POSITIONS = 128
"""Positions drawn in one operation that make a loop over the steps of the permutation worth while."""
LIGHT = 16
"""Parameters per input of a light model: copying a mini-batch takes about as long as learning from it."""


def client_trainer(task: Task, local: LocalTraining, batch: int, group: int) -> Callable[..., tuple[Params, Array]]:
    """Make the function (params, x, y, start, size, client_key, num_steps, lr) -> (update, mean training loss).

    `x` and `y` hold the rows of all clients; this client trains on start..start+size-1. The caller maps the function
    over `group` clients.
    """

    def train(
        params: Params, x: Array, y: Array, start: Array, size: Array, key: hashing.Key, num_steps: Array, lr: Array
    ) -> tuple[Params, Array]:
        light = sum(leaf.size for leaf in jax.tree.leaves(params)) <= LIGHT * x.shape[1]
        fast = on_cpu() and batch > 1 and (light or batch * x.shape[1] <= SMALL_BATCH)
        transposed = partial(_transposed, small_ones=light)

        def loss_of(params: Params, x: Array, y: Array, counts: Array, key: Array) -> Array:
            losses = task.per_example_loss(transposed(params), x, y, key, True)
            return jnp.sum(jnp.where(counts, losses, 0.0)) / jnp.maximum(jnp.sum(counts), 1)

        safe_size = jnp.maximum(size, 1).astype(jnp.uint32)
        # With a fixed number of steps all batches are drawn before the loop: fewer, larger operations.
        drawn = None
        if local.steps is not None:
            drawn = _drawn(
                partial(batch_positions, local, key, size=safe_size, batch=batch), local.steps, group * batch
            )

        def step(
            index: Array, carry: tuple[Params, Params, Array, list[Any]]
        ) -> tuple[Params, Params, Array, list[Any]]:
            weights, velocity, total, buffers = carry
            step_index = jnp.asarray(index).astype(jnp.uint32)
            if drawn is None:
                positions, counts = batch_positions(local, key, step_index, safe_size, batch)
            else:
                positions, counts = drawn[0][index], drawn[1][index]
            rows = start + positions
            noise = hashing.fold(key, ~step_index)
            random_key = jax.random.wrap_key_data(jnp.stack([noise.high, noise.low]), impl="threefry2x32")
            mini_batch = [_gather(buffer, values, rows) for buffer, values in zip(buffers, (x, y), strict=True)]
            loss, gradient = jax.value_and_grad(loss_of)(weights, *mini_batch, counts, random_key)
            weights, velocity = _sgd_step(local, received, weights, velocity, gradient, lr)
            buffers = [None if buffer is None else new for buffer, new in zip(buffers, mini_batch, strict=True)]
            return weights, velocity, total + loss, buffers

        received = transposed(params)
        velocity = jax.tree.map(jnp.zeros_like, received) if local.momentum else ()
        steps = local.steps if local.steps is not None else num_steps
        buffers = [_buffer(values, batch) if fast else None for values in (x, y)]
        trained, _, total, _ = lax.fori_loop(0, steps, step, (received, velocity, jnp.float32(0.0), buffers))
        # With a fixed number of steps a client without data would decay its weights: its update must be 0.
        has_data = size > 0
        update = jax.tree.map(lambda new, old: jnp.where(has_data, new - old, 0.0), transposed(trained), params)
        return update, jnp.where(has_data, total / jnp.maximum(num_steps, 1), jnp.nan)

    return train


def _drawn(draw: Callable[..., tuple[Array, Array]], steps: int, width: int) -> tuple[Array, Array]:
    """Draw the batches of all steps; `width` is the number of positions that one step draws for all clients."""

    at_once = min(steps, max(1, ONE_CORE // width)) if on_cpu() else steps
    draw = partial(draw, rolled=on_cpu() and at_once * width >= MANY_POSITIONS)
    if at_once == steps:
        return draw(step=jnp.arange(steps, dtype=jnp.uint32)[:, None])
    parts = jnp.arange(-(-steps // at_once) * at_once, dtype=jnp.uint32).reshape(-1, at_once, 1)
    positions, counts = lax.map(lambda part: draw(step=part), parts)
    return positions.reshape(-1, positions.shape[-1])[:steps], counts.reshape(-1, counts.shape[-1])[:steps]


def _transposed(tree: Params, small_ones: bool) -> Params:
    """Transpose weight matrices; applied twice it changes nothing.

    The loop keeps them transposed: on a CPU the gradient of a dense layer is then up to four times as fast.
    """

    def transpose(leaf: Array) -> Array:
        return leaf.T if leaf.ndim == 2 and (small_ones or leaf.size >= LARGE_MATRIX) else leaf

    return jax.tree.map(transpose, tree)


def _buffer(values: Array, batch: int) -> Array | None:
    """Return memory into which mini-batches are written; None: XLA allocates them."""

    if values.size * values.dtype.itemsize < PARALLEL_GATHER:
        return None
    return jnp.zeros((batch, *values.shape[1:]), values.dtype)


def _gather(buffer: Array | None, values: Array, rows: Array) -> Array:
    """Return values[rows], written into the buffer if there is one.

    XLA parallelises a gather by the size of its source, even for ten rows, and starting the threads takes longer than
    copying them. It does not parallelise an update in place. Two halves, because XLA treats an update of the whole
    buffer as a new array.
    """

    # Only a client without rows can be out of range; checking for that would cost a pass over the batch.
    take = partial(jnp.take, values, axis=0, mode="clip")
    if buffer is None:
        return take(rows)
    half = len(rows) // 2
    for first, part in ((0, rows[:half]), (half, rows[half:])):
        buffer = lax.dynamic_update_slice_in_dim(buffer, take(part), first, 0)
    return buffer


def _sgd_step(
    local: LocalTraining, received: Params, weights: Params, velocity: Params, gradient: Params, lr: Array
) -> tuple[Params, Params]:

    if local.weight_decay:
        gradient = jax.tree.map(lambda g, w: g + local.weight_decay * w, gradient, weights)
    if local.proximal:
        gradient = jax.tree.map(lambda g, w, r: g + local.proximal * (w - r), gradient, weights, received)
    if local.momentum:
        # PyTorch's form: v <- momentum v + g, w <- w - lr v.
        velocity = jax.tree.map(lambda v, g: local.momentum * v + g, velocity, gradient)
        gradient = velocity
    return jax.tree.map(lambda w, g: w - lr * g, weights, gradient), velocity
