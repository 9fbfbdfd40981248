"""The programs that JAX compiles: train a cohort, take the server step, measure rows.

One program serves all cohorts up to a power of two. It loops over groups of clients, `group` at a time and batched, a
*dynamic* number of times: a changing cohort size seldom recompiles, and padding is not trained. With group=1 the
update of a client shares no matrix product with another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedpick.sim import hashing
from fedpick.sim.jax_engine.training import client_trainer
from fedpick.sim.settings import LocalTraining, ServerStep
from fedpick.sim.tasks import Task

__all__ = [
    "Cohort",
    "bucket",
    "cohort_program",
    "measure_program",
    "round_program",
    "rounds_program",
    "server_program",
    "vector_program",
]

Array = Any
Params = Any
Describe = Callable[[Params], Array]
"""update -> (s,): a short description of it."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cohort:
    """The clients one program trains, padded to a bucket; only the first `count` are trained."""

    table: Array
    """(4, c) int32: identity (with the round it makes the random numbers), first training row, number of training
    rows, local steps."""
    floats: Array
    """(2, c) float32: weight of the update (0 for padding); factor of the update: 1, NaN (a fault), -1 (a lie), ..."""
    count: Array
    """() int32."""


def bucket(size: int, least: int = 16) -> int:
    """The next of least, 2 least, 4 least, ...: shapes come in few kinds, so that few programs are compiled."""
    capacity = least
    while capacity < size:
        capacity *= 2
    return capacity


def _group_trainer(task: Task, local: LocalTraining, batch: int, group: int) -> Callable[..., Any]:
    """(params, x, y, words of the round's key, table, factors, lr) -> updates and losses of `group` clients."""
    train = client_trainer(task, local, batch, group)

    def one(params: Params, x: Array, y: Array, words: Array, row: Array, factor: Array, lr: Array) -> Any:
        client_key = hashing.fold(hashing.Key(words[0], words[1]), row[0].astype(jnp.uint32))
        update, loss = train(params, x, y, row[1], row[2], client_key, row[3], lr)
        return jax.tree.map(lambda u: u * factor, update), loss

    def several(params: Params, x: Array, y: Array, words: Array, table: Array, factors: Array, lr: Array) -> Any:
        if group == 1:
            single = one(params, x, y, words, table[:, 0], factors[0], lr)
            return jax.tree.map(lambda leaf: leaf[None], single)
        return jax.vmap(lambda row, factor: one(params, x, y, words, row, factor, lr), in_axes=(1, 0))(table, factors)

    return several


def _members(cohort: Cohort, first: Array, group: int) -> tuple[Array, Array]:
    """The table and the floats of the clients first..first+group-1."""
    cut = lax.dynamic_slice_in_dim
    return cut(cohort.table, first, group, axis=1), cut(cohort.floats, first, group, axis=1)


def cohort_program(
    task: Task, local: LocalTraining, batch: int, group: int, describe: Describe | None = None, stacked: bool = False
) -> Callable[..., Any]:
    """(params, x, y, words of the round's key, cohort, lr) -> weighted sum of updates, (2 + s, c) reports.

    With `stacked` the updates are not summed: the first result is (c, P), every update as one row. The reports are the
    training loss, the norm of the update and, with `describe`, its sketch of length s. An update that is not finite has
    norm NaN or infinity and never enters the sum.
    """
    several = _group_trainer(task, local, batch, group)

    def program(params: Params, x: Array, y: Array, words: Array, cohort: Cohort, lr: Array) -> Any:
        capacity = cohort.table.shape[1]

        def body(index: Array, carry: tuple[Params, Array]) -> tuple[Params, Array]:
            total, reports = carry
            table, (weights, factors) = _members(cohort, index * group, group)
            updates, loss = several(params, x, y, words, table, factors, lr)
            squares = sum(jnp.sum(leaf.reshape(group, -1) ** 2, axis=1) for leaf in jax.tree.leaves(updates))
            norm = jnp.sqrt(squares)
            usable = jnp.isfinite(norm)

            def add(so_far: Array, update: Array) -> Array:
                shape = (group,) + (1,) * (update.ndim - 1)
                kept = jnp.where(usable.reshape(shape), update, 0.0)
                return so_far + jnp.tensordot(weights, kept, axes=1)

            sketch = [] if describe is None else [jax.vmap(describe)(updates).T]
            new = jnp.concatenate([loss[None], norm[None], *sketch])
            reports = lax.dynamic_update_slice_in_dim(reports, new, index * group, 1)
            if stacked:
                flat = jnp.concatenate([leaf.reshape(group, -1) for leaf in jax.tree.leaves(updates)], axis=1)
                return lax.dynamic_update_slice_in_dim(total, flat, index * group, 0), reports
            return jax.tree.map(add, total, updates), reports

        width = 2 if describe is None else 2 + jax.eval_shape(describe, params).shape[0]
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        nothing = jnp.zeros((capacity, size), jnp.float32) if stacked else jax.tree.map(jnp.zeros_like, params)
        start = (nothing, jnp.full((width, capacity), jnp.nan, jnp.float32))
        return lax.fori_loop(0, (cohort.count + group - 1) // group, body, start)

    return program


def vector_program(
    task: Task, local: LocalTraining, batch: int, group: int, describe: Callable[[Params, Params], Array], width: int
) -> Callable[..., Any]:
    """(params, x, y, words of the round's key, cohort, lr) -> (c, width): describe(params, update) of every client."""
    several = _group_trainer(task, local, batch, group)

    def program(params: Params, x: Array, y: Array, words: Array, cohort: Cohort, lr: Array) -> Any:
        def body(index: Array, rows: Array) -> Array:
            table, floats = _members(cohort, index * group, group)
            updates, _ = several(params, x, y, words, table, floats[1], lr)
            vectors = jax.vmap(partial(describe, params))(updates)
            return lax.dynamic_update_slice_in_dim(rows, vectors, index * group, 0)

        start = jnp.full((cohort.table.shape[1], width), jnp.nan, jnp.float32)
        return lax.fori_loop(0, (cohort.count + group - 1) // group, body, start)

    return program


def _step(server: ServerStep, params: Params, velocity: Params, parts: Any, weights: Any, lr: Array) -> Any:
    """Add up the parts of a cohort and take the server step: -> (params, velocity, whether the step is finite).

    Without any weight, and where the step would make the model infinite or NaN, nothing changes.
    """
    total = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *[part[0] for part in parts])
    counted = [
        jnp.any(jnp.isfinite(reports[1]) & (given > 0)) for (_, reports), given in zip(parts, weights, strict=True)
    ]
    any_weight = jnp.any(jnp.stack(counted))
    if server.momentum or server.weight_decay:
        gradient = jax.tree.map(lambda s, w: server.weight_decay * w - s, total, params)
        moved = jax.tree.map(lambda v, g: server.momentum * v + g, velocity, gradient) if server.momentum else gradient
        stepped = jax.tree.map(lambda w, v: w - lr * v, params, moved)
    else:
        moved, stepped = velocity, jax.tree.map(lambda w, s: w + lr * s, params, total)
    if server.radius is not None:
        norm = jnp.sqrt(sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(stepped)))
        shrink = jnp.minimum(1.0, server.radius / jnp.maximum(norm, 1e-30))
        stepped = jax.tree.map(lambda w: w * shrink, stepped)

    # Finite updates can still overflow: in the weighted sum, in the momentum or in the step.
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(stepped)]))
    taken = any_weight & finite

    def keep(new: Array, old: Array) -> Array:
        return jnp.where(taken, new, old)

    new_velocity = jax.tree.map(keep, moved, velocity) if server.momentum else velocity
    return jax.tree.map(keep, stepped, params), new_velocity, finite


def server_program(server: ServerStep) -> Callable[..., Any]:
    """(params, velocity, parts of the cohort, their weights, lr) -> (params, velocity, whether the step is finite)."""
    return partial(_step, server)


def round_program(
    task: Task, local: LocalTraining, server: ServerStep, batch: int, group: int, describe: Describe | None = None
) -> Callable[..., Any]:
    """A whole round in one call, for a cohort that is not split: -> (params, velocity, reports).

    All reports are NaN if the step was not finite and therefore not taken.
    """
    train = cohort_program(task, local, batch, group, describe)

    def program(
        params: Params, velocity: Params, x: Array, y: Array, words: Array, cohort: Cohort, rates: Array
    ) -> Any:
        part = train(params, x, y, words, cohort, rates[0])
        params, velocity, finite = _step(server, params, velocity, [part], [cohort.floats[0]], rates[1])
        return params, velocity, jnp.where(finite, part[1], jnp.nan)

    return program


def rounds_program(
    task: Task, local: LocalTraining, server: ServerStep, batch: int, group: int, capacity: int
) -> Callable[..., Any]:
    """Up to `capacity` rounds in one call: -> (params, velocity) after each, and (capacity, 2, c) losses and norms.

    The arguments are those of `round_program`, with one more dimension from `words` on, and the number of rounds.
    What a round gives does not depend on the others in the call.
    """
    one_round = round_program(task, local, server, batch, group)

    def program(
        params: Params,
        velocity: Params,
        x: Array,
        y: Array,
        words: Array,
        cohorts: Cohort,
        rates: Array,
        count: Array,
    ) -> Any:
        def body(index: Array, carry: Any) -> Any:
            state, states, reports = carry
            cohort = jax.tree.map(lambda leaf: leaf[index], cohorts)
            *state, report = one_round(*state, x, y, words[index], cohort, rates[index])
            states = jax.tree.map(lambda leaf, new: leaf.at[index].set(new), states, tuple(state))
            return tuple(state), states, reports.at[index].set(report)

        start = (params, velocity)
        states = jax.tree.map(lambda leaf: jnp.zeros((capacity, *leaf.shape), leaf.dtype), start)
        reports = jnp.full((capacity, 2, cohorts.table.shape[2]), jnp.nan, jnp.float32)
        _, states, reports = lax.fori_loop(0, count, body, (start, states, reports))
        return [jax.tree.map(itemgetter(index), states) for index in range(capacity)], reports

    return program


def measure_program(task: Task, block: int, gathered: bool) -> Callable[..., Any]:
    """(params, x, y, rows, count) -> (n,) loss + i * correctness (0 or 1) of every row, `block` rows at a time.

    As one complex number, because XLA then makes both in one pass.

    `gathered`: only the first `count` of `rows` are measured; otherwise all of x, and `rows` and `count` are ignored.
    """
    key = np.zeros(2, np.uint32)

    def program(params: Params, x: Array, y: Array, rows: Array, count: Array) -> Array:
        total = rows.shape[0] if gathered else x.shape[0]
        size = min(block, total)
        random_key = jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32")

        def values_of(batch_x: Array, batch_y: Array) -> Array:
            losses = task.per_example_loss(params, batch_x, batch_y, random_key, False)
            right = task.correct(params, batch_x, batch_y)
            return lax.complex(losses.astype(jnp.float32), right.astype(jnp.float32))

        if not gathered and size == total:
            return values_of(x, y)  # one block: cutting it out would only copy all the data

        def body(index: Array, out: Array) -> Array:
            # The last block overlaps the one before it instead of running over the end.
            first = jnp.minimum(index * size, total - size)
            if gathered:
                chosen = lax.dynamic_slice_in_dim(rows, first, size)
                batch_x, batch_y = jnp.take(x, chosen, axis=0), jnp.take(y, chosen, axis=0)
            else:
                batch_x = lax.dynamic_slice_in_dim(x, first, size)
                batch_y = lax.dynamic_slice_in_dim(y, first, size)
            return lax.dynamic_update_slice_in_dim(out, values_of(batch_x, batch_y), first, axis=0)

        needed = count if gathered else total
        return lax.fori_loop(0, (needed + size - 1) // size, body, jnp.zeros(total, jnp.complex64))

    return program
