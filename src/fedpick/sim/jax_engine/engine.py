"""The compiled programs of one simulator, fed from the host: padding, splitting over threads, reading back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import FloatArray
from fedpick.core.rng import Purpose
from fedpick.sim import hashing
from fedpick.sim.examples import Rows, shaped
from fedpick.sim.jax_engine import programs
from fedpick.sim.jax_engine.programs import Cohort, bucket
from fedpick.sim.jax_engine.setup import on_cpu
from fedpick.sim.jax_engine.training import LocalTraining
from fedpick.sim.plan import ROUNDS_AT_ONCE, Work
from fedpick.sim.server import ServerStep
from fedpick.sim.tasks import Task

__all__ = ["Piece", "Programs"]

Array = Any
Params = Any


class Piece(NamedTuple):
    """Some clients of a round, as a program takes them."""

    places: NDArray[np.int64]
    """Their places among the clients of the round."""
    cohort: Cohort
    group: int
    """How many of them train as one batch."""

    @property
    def kind(self) -> tuple[int, int]:
        """Pieces of one kind are trained by one compiled program."""
        return self.group, self.cohort.table.shape[1]

    def in_order(self, report: Array) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(k,) losses and (k,) norms of a cohort that was not cut, from what its program reports."""
        losses, norms = np.empty((2, len(self.places)), np.float32)
        losses[self.places], norms[self.places] = np.asarray(report)[:, : len(self.places)]
        return losses, norms


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="fedpick-shard")


def _side_by_side(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of all calls, each in a thread of its own; the first one in this thread."""
    others = [_threads(len(calls) - 1).submit(call) for call in calls[1:]]
    return [calls[0](), *(other.result() for other in others)]


class _Training(NamedTuple):
    """Several whole rounds, one, a piece of a cohort, and the server step."""

    rounds: Callable[..., Any]
    round: Callable[..., Any]
    piece: Callable[..., Any]
    server: Callable[..., Any]


@lru_cache(maxsize=64)
def _training_programs(
    task: Task, shape: tuple[int, ...], local: LocalTraining, server: ServerStep, batch: int, group: int
) -> _Training:
    """Shared by all simulators with these settings."""
    task = shaped(task, shape)
    return _Training(
        jax.jit(programs.rounds_program(task, local, server, batch, group, ROUNDS_AT_ONCE)),
        jax.jit(programs.round_program(task, local, server, batch, group)),
        jax.jit(programs.cohort_program(task, local, batch, group)),
        jax.jit(programs.server_program(server)),
    )


@lru_cache(maxsize=64)
def _measuring_programs(task: Task, shape: tuple[int, ...]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """All rows, and chosen rows."""
    task = shaped(task, shape)
    block = task.evaluation_batch
    return (
        jax.jit(programs.measure_program(task, block, gathered=False)),
        jax.jit(programs.measure_program(task, block, gathered=True)),
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
        pieces = max(1, min(self.shards, -(-len(clients) // self.group)))
        order = np.argsort(-self.local.num_steps(self.rows.sizes[clients]), kind="stable")
        place = np.arange(len(order)) % (2 * pieces)
        shard = np.where(place < pieces, place, 2 * pieces - 1 - place)
        return [order[shard == index] for index in range(pieces)]

    def pieces(self, work: Work) -> list[Piece]:
        """The cohort of a round, cut for the shards."""
        clients, group = work.clients, self.group_of(work.clients)

        def piece(places: NDArray[np.int64]) -> Piece:
            return Piece(places, self.cohort(clients[places], work.weights[places], work.poisoned[places]), group)

        return [piece(places) for places in self.split(clients)]

    def train(
        self, params: Params, velocity: Params, work: Work
    ) -> tuple[Params, Params, NDArray[np.float32], NDArray[np.float32]]:
        """Train and step: the new (params, velocity), (k,) training losses and (k,) norms of the updates."""
        words, keep = _words(work.key), np.bool_(work.renormalize)
        pieces = self.pieces(work)
        programs = self._training[pieces[0].group]
        if self.shards == 1:
            x, y, rates = self.rows.x, self.rows.y, np.array([work.lr, work.server_lr], np.float32)
            params, velocity, report = programs.round(params, velocity, x, y, words, pieces[0].cohort, keep, rates)
            return params, velocity, *pieces[0].in_order(report)
        call = partial(self._train_piece, programs.piece, params, words, np.float32(work.lr))
        parts = _side_by_side([partial(call, piece.cohort) for piece in pieces])
        given = [piece.cohort.floats[0] for piece in pieces]
        params, velocity = programs.server(params, velocity, parts, given, keep, np.float32(work.server_lr))
        losses, norms = np.empty((2, len(work.clients)), np.float32)
        for piece, part in zip(pieces, parts, strict=True):
            losses[piece.places] = np.asarray(part[1])[: len(piece.places)]
            norms[piece.places] = np.asarray(part[2])[: len(piece.places)]
        return params, velocity, losses, norms

    def train_rounds(
        self, params: Params, velocity: Params, works: Sequence[Work], pieces: Sequence[Piece]
    ) -> tuple[list[Any], Array]:
        """Rounds one after another in one program, each with its one piece: the (params, velocity) after each, and
        their reports for `Piece.in_order`, still in the making. All of one `kind`, at most ROUNDS_AT_ONCE.
        """
        count = len(works)

        def stacked(*values: Any) -> NDArray[Any]:
            return np.stack([*values, *[values[0]] * (ROUNDS_AT_ONCE - count)])

        rates = [np.array([work.lr, work.server_lr], np.float32) for work in works]
        states, reports = self._training[pieces[0].group].rounds(
            params,
            velocity,
            self.rows.x,
            self.rows.y,
            stacked(*[_words(work.key) for work in works]),
            jax.tree.map(stacked, *[piece.cohort for piece in pieces]),
            stacked(*[work.renormalize for work in works]),
            stacked(*rates),
            np.int32(count),
        )
        return states[:count], reports

    def _train_piece(self, program: Callable[..., Any], params: Params, words: Array, lr: Array, cohort: Cohort) -> Any:
        # Waiting in the thread keeps the two programs side by side; JAX alone would run them one after the other.
        # (JAX does not type block_until_ready.)
        return jax.block_until_ready(program(params, self.rows.x, self.rows.y, words, cohort, lr))  # type: ignore[no-untyped-call]

    def measure(
        self, params: Params, x: Array, y: Array, rows: NDArray[np.int32] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The loss of every row of x, or of some, and whether it is answered right (0 or 1)."""
        count = len(x) if rows is None else len(rows)
        if count == 0:
            return np.empty(0, np.float32), np.empty(0, np.float32)
        if rows is None:
            values = np.asarray(self.measure_later(params, x, y))
        else:
            padded = np.zeros(bucket(count, 64), np.int32)
            padded[:count] = rows
            values = np.asarray(self._gathered(params, x, y, padded, np.int32(count)))[:count]
        return values.real, values.imag

    def measure_later(self, params: Params, x: Array, y: Array) -> Array:
        """What `measure` reads of all rows of x, still in the making: loss + i * correctness."""
        return self._whole(params, x, y, np.zeros(0, np.int32), np.int32(len(x)))

    def vectors(
        self,
        params: Params,
        key: hashing.Key,
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
            describe = partial(_flat_update, sketch, hashing.key_from(seed, int(Purpose.MEASURE)))
        width = jax.eval_shape(describe, params, params).shape[0]
        return jax.jit(programs.vector_program(self.task, self.local, self.batch, group, describe, width))

    def _noise(self, count: int, seed: int) -> Array:
        """Gaussian inputs with the mean and spread of the data (its first rows stand for all of it)."""
        sample = np.asarray(self.rows.x[:4096], np.float64)
        key = hashing.key_from(seed, int(Purpose.MEASURE))
        generator = np.random.Generator(np.random.PCG64([int(key.high[0]), int(key.low[0])]))
        noise = generator.standard_normal((count, *self.rows.shape))
        return jnp.asarray(sample.mean() + sample.std() * noise, jnp.float32)


def _words(key: hashing.Key) -> NDArray[np.uint32]:
    return np.concatenate(key)


def _mean_outputs(task: Task, noise: Array, params: Params, update: Params) -> Array:
    assert task.outputs is not None
    return task.outputs(jax.tree.map(jnp.add, params, update), noise).mean(axis=0)


def _flat_update(sketch: int | None, key: hashing.Key, params: Params, update: Params) -> Array:
    """The update as one vector; or its count sketch, which keeps inner products in expectation and costs O(P)."""
    flat = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(update)])
    if sketch is None:
        return flat
    bits = hashing.uniform_bits(key, np.arange(flat.shape[0], dtype=np.uint32))
    signs = np.where(bits & np.uint32(1), np.float32(1), np.float32(-1))
    cells = (bits >> np.uint32(1)) % np.uint32(sketch)
    return jax.ops.segment_sum(flat * signs, cells.astype(np.int32), num_segments=sketch)
