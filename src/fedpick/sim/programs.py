"""The compiled programs of one simulator, fed from the host: padding, splitting over threads, reading back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedpick.core.rng import Purpose
from fedpick.sim import counter, engine
from fedpick.sim.devices import on_cpu
from fedpick.sim.engine import Cohort, bucket
from fedpick.sim.local import LocalTraining
from fedpick.sim.rows import Rows, shaped
from fedpick.sim.server import ServerStep
from fedpick.sim.tasks import Task

__all__ = ["Programs"]

Array = Any
Params = Any
FloatArray = NDArray[np.float64]


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="fedpick-shard")


def _side_by_side(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of all calls, each in a thread of its own; the first one in this thread."""
    others = [_threads(len(calls) - 1).submit(call) for call in calls[1:]]
    return [calls[0](), *(other.result() for other in others)]


@lru_cache(maxsize=64)
def _training_programs(
    task: Task, shape: tuple[int, ...], local: LocalTraining, server: ServerStep, batch: int, group: int
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """A whole round, a piece of a cohort, and the server step; shared by all simulators with these settings."""
    task = shaped(task, shape)
    return (
        jax.jit(engine.round_program(task, local, server, batch, group)),
        jax.jit(engine.cohort_program(task, local, batch, group)),
        jax.jit(engine.server_program(server)),
    )


@lru_cache(maxsize=64)
def _measuring_programs(task: Task, shape: tuple[int, ...]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """All rows, and chosen rows."""
    task = shaped(task, shape)
    block = task.evaluation_batch
    return (
        jax.jit(engine.measure_program(task, block, gathered=False)),
        jax.jit(engine.measure_program(task, block, gathered=True)),
    )


class Programs:
    """What a simulator runs, for any cohort."""

    def __init__(
        self, task: Task, local: LocalTraining, server: ServerStep, rows: Rows, shards: int, group: int
    ) -> None:
        self.local, self.rows = local, rows
        self.shards, self.group = shards, group
        largest = int(rows.sizes.max(initial=1))
        self.batch = max(largest, 1) if local.batch_size is None else local.batch_size
        # Learning rates are arguments of the programs, so they do not tell programs apart.
        settings = (task, rows.shape, replace(local, lr=1.0), replace(server, lr=1.0), self.batch)
        self._training = {size: _training_programs(*settings, size) for size in {1, group}}
        self._whole, self._gathered = _measuring_programs(task, rows.shape)
        self.task = shaped(task, rows.shape)
        self._vector_programs: dict[Any, Callable[..., Array]] = {}

    def group_of(self, clients: NDArray[np.int64]) -> int:
        """How many of these clients train as one batch. One, if they do not fill it: on a CPU nobody costs as much as
        somebody.
        """
        return 1 if on_cpu() and len(clients) < self.group else self.group

    def cohort(
        self, clients: NDArray[np.int64], weights: FloatArray, poisoned: NDArray[np.bool_] | None = None
    ) -> Cohort:
        """These clients, padded to a bucket that is a multiple of the group."""
        count = len(clients)
        capacity = -(-bucket(count) // self.group) * self.group
        table = np.zeros((4, capacity), np.int32)
        table[0, :count] = clients
        table[1, :count] = self.rows.starts[clients]
        sizes = self.rows.sizes[clients]
        table[2, :count] = sizes
        table[3, :count] = self.local.num_steps(sizes)
        floats = np.zeros((2, capacity), np.float32)
        floats[0, :count] = weights
        if poisoned is not None:
            floats[1, :count] = poisoned
        return Cohort(table, floats, np.int32(count))

    def split(self, clients: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Which positions of a cohort go to which shard: the most local steps first, dealt back and forth.

        In this order clients of a group take about equally many steps and seldom wait for each other. A function of
        the cohort and the number of shards alone: never of how busy the machine is.
        """
        pieces = min(self.shards, -(-len(clients) // self.group))
        order = np.argsort(-self.local.num_steps(self.rows.sizes[clients]), kind="stable")
        place = np.arange(len(order)) % (2 * pieces)
        shard = np.where(place < pieces, place, 2 * pieces - 1 - place)
        return [order[shard == index] for index in range(pieces)]

    def train(
        self,
        params: Params,
        velocity: Params,
        key: counter.Key,
        clients: NDArray[np.int64],
        weights: FloatArray,
        poisoned: NDArray[np.bool_],
        renormalize: bool,
        lr: float,
        server_lr: float,
    ) -> tuple[Params, Params, NDArray[np.float32], NDArray[np.float32]]:
        """Train and step: the new (params, velocity), (k,) training losses and (k,) norms of the updates."""
        words, keep = _words(key), np.bool_(renormalize)
        whole_round, piece_of_round, server_step = self._training[self.group_of(clients)]
        pieces = self.split(clients)
        cohorts = [self.cohort(clients[piece], weights[piece], poisoned[piece]) for piece in pieces]
        losses, norms = np.empty((2, len(clients)), np.float32)
        if self.shards == 1:
            x, y, rates = self.rows.x, self.rows.y, np.array([lr, server_lr], np.float32)
            params, velocity, report = whole_round(params, velocity, x, y, words, cohorts[0], keep, rates)
            losses[pieces[0]], norms[pieces[0]] = np.asarray(report)[:, : len(clients)]
            return params, velocity, losses, norms
        call = partial(self._train_piece, piece_of_round, params, words, np.float32(lr))
        parts = _side_by_side([partial(call, cohort) for cohort in cohorts])
        given = [cohort.floats[0] for cohort in cohorts]
        params, velocity = server_step(params, velocity, parts, given, keep, np.float32(server_lr))
        for piece, part in zip(pieces, parts, strict=True):
            losses[piece] = np.asarray(part[1])[: len(piece)]
            norms[piece] = np.asarray(part[2])[: len(piece)]
        return params, velocity, losses, norms

    def _train_piece(self, program: Callable[..., Any], params: Params, words: Array, lr: Array, cohort: Cohort) -> Any:
        # Waiting in the thread keeps the two programs side by side; JAX alone would run them one after the other.
        # (JAX does not type block_until_ready.)
        return jax.block_until_ready(program(params, self.rows.x, self.rows.y, words, cohort, lr))  # type: ignore[no-untyped-call]

    def measure(
        self, params: Params, x: Array, y: Array, rows: NDArray[np.int32] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The loss of every row of x, or of some, and whether it is answered right (0 or 1)."""
        if rows is None:
            count, padded, program = len(x), np.zeros(0, np.int32), self._whole
        else:
            count, padded, program = len(rows), np.zeros(bucket(len(rows), 64), np.int32), self._gathered
            padded[:count] = rows
        if count == 0:
            return np.empty(0, np.float32), np.empty(0, np.float32)
        values = np.asarray(program(params, x, y, padded, np.int32(count)))[:count]
        return values.real, values.imag

    def vectors(
        self,
        params: Params,
        key: counter.Key,
        clients: NDArray[np.int64],
        lr: float,
        *,
        outputs: bool,
        sketch: int | None,
        noise_examples: int,
        seed: int,
    ) -> FloatArray:
        """(d, s): what a client's training from `params` gives: its update, a sketch of it, or outputs on noise."""
        if len(clients) == 0:
            return np.empty((0, 1))
        which = (self.group_of(clients), outputs, sketch, noise_examples, seed)
        if which not in self._vector_programs:
            self._vector_programs[which] = self._vector_program(params, *which)
        cohort = self.cohort(clients, np.zeros(len(clients)))
        words = _words(key)
        rows = self._vector_programs[which](params, self.rows.x, self.rows.y, words, cohort, np.float32(lr))
        return np.asarray(rows)[: len(clients)].astype(np.float64)

    def _vector_program(
        self, params: Params, group: int, outputs: bool, sketch: int | None, noise_examples: int, seed: int
    ) -> Callable[..., Array]:
        if outputs:
            noise = self._noise(noise_examples, seed)
            describe = partial(_mean_outputs, self.task, noise)
        else:
            describe = partial(_flat_update, sketch, counter.key_from(seed, int(Purpose.MEASURE)))
        width = jax.eval_shape(describe, params, params).shape[0]
        return jax.jit(engine.vector_program(self.task, self.local, self.batch, group, describe, width))

    def _noise(self, count: int, seed: int) -> Array:
        """Gaussian inputs with the mean and spread of the data (its first rows stand for all of it)."""
        sample = np.asarray(self.rows.x[:4096], np.float64)
        key = counter.key_from(seed, int(Purpose.MEASURE))
        generator = np.random.Generator(np.random.PCG64([int(key.high[0]), int(key.low[0])]))
        noise = generator.standard_normal((count, *self.rows.shape))
        return jnp.asarray(sample.mean() + sample.std() * noise, jnp.float32)


def _words(key: counter.Key) -> NDArray[np.uint32]:
    return np.concatenate(key)


def _mean_outputs(task: Task, noise: Array, params: Params, update: Params) -> Array:
    assert task.outputs is not None
    return task.outputs(jax.tree.map(jnp.add, params, update), noise).mean(axis=0)


def _flat_update(sketch: int | None, key: counter.Key, params: Params, update: Params) -> Array:
    """The update as one vector; or its count sketch, which keeps inner products in expectation and costs O(P)."""
    flat = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(update)])
    if sketch is None:
        return flat
    bits = counter.uniform_bits(key, np.arange(flat.shape[0], dtype=np.uint32))
    signs = np.where(bits & np.uint32(1), np.float32(1), np.float32(-1))
    cells = (bits >> np.uint32(1)) % np.uint32(sketch)
    return jax.ops.segment_sum(flat * signs, cells.astype(np.int32), num_segments=sketch)
