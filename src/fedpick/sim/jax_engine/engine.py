"""The JAX engine: feeds the compiled programs from the host. Pads cohorts, splits them over threads, reads back.

The module is imported when a simulator is built; without JAX it raises `MissingDependency`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import FloatArray, IntArray
from fedpick.core.errors import InvalidInput
from fedpick.core.rng import Purpose
from fedpick.core.sketches import SketchFunction
from fedpick.sim import hashing
from fedpick.sim.engine import Combine, Float32Array, Params, Trained, Work
from fedpick.sim.examples import Examples
from fedpick.sim.jax_engine import programs
from fedpick.sim.jax_engine.programs import Cohort, bucket
from fedpick.sim.jax_engine.setup import default_shards, on_cpu
from fedpick.sim.settings import LocalTraining, ServerStep
from fedpick.sim.sketches import sketcher_of
from fedpick.sim.tasks import Task

__all__ = ["JaxEngine"]

Array = Any

HEAVY = 5_000
"""Models with more parameters than this are worth a thread on every core."""
SMALL_GROUP = 16
"""Clients of a small model trained as one batch on a GPU."""
SMALL_GROUP_CPU = 10
"""The same on a CPU, if all clients take equally many steps: most cohorts are a multiple of ten, and padding a batch
costs as much as a client. With unequal steps a batch waits for the longest client, so clients train one by one."""
ROUNDS_AT_ONCE = 16
"""Rounds of a small model that one program trains at most."""
_Reports = tuple[Float32Array, Float32Array, NDArray[Any]]
_NO_REPORTS = (np.empty(0, np.float32), np.empty(0, np.float32), np.empty((0, 0), np.float32))
"""Losses, norms and sketches of no client."""


class _Piece(NamedTuple):
    """A part of a round's cohort, as one program takes it."""

    places: IntArray
    """Positions of its clients in the cohort."""
    cohort: Cohort
    group: int
    """Clients trained as one batch."""

    @property
    def kind(self) -> tuple[int, int]:
        """Pieces of one kind are trained by one compiled program."""
        return self.group, self.cohort.table.shape[1]


class _StartedRound(NamedTuple):
    state: tuple[Params, Params]
    piece: _Piece
    reports: Array
    """(rounds, 2, c) losses and norms of all rounds of the program."""
    place: int
    """Of this round in the program."""
    values: Array | None
    """The evaluation of the test set."""


class _StartedRounds:
    """Rounds that were dispatched; JAX computes them while the host goes on."""

    def __init__(self, rounds: Sequence[_StartedRound]) -> None:
        self.rounds = rounds
        self.params, self.velocity = rounds[-1].state

    def result(self, step: int) -> Trained:
        """Wait for one of the rounds."""
        started = self.rounds[step]
        reports = _in_order([started.piece], [np.asarray(started.reports)[started.place]])
        return Trained(*started.state, *reports, None if started.values is None else _means(started.values))


class _TrainingPrograms(NamedTuple):
    rounds: Callable[..., Any]
    round: Callable[..., Any]
    piece: Callable[..., Any]
    stack: Callable[..., Any]
    """Like `piece`, with every update as a row instead of their sum."""
    server: Callable[..., Any]


@lru_cache(maxsize=64)
def _training_programs(
    task: Task,
    shape: tuple[int, ...],
    local: LocalTraining,
    server: ServerStep,
    batch: int,
    group: int,
    describe: programs.Describe | None = None,
) -> _TrainingPrograms:
    """Compile lazily; all simulators with these settings share the programs."""
    task = _for_flat_rows(task, shape)
    return _TrainingPrograms(
        jax.jit(programs.rounds_program(task, local, server, batch, group, ROUNDS_AT_ONCE)),
        jax.jit(programs.round_program(task, local, server, batch, group, describe)),
        jax.jit(programs.cohort_program(task, local, batch, group, describe)),
        jax.jit(programs.cohort_program(task, local, batch, group, describe, stacked=True)),
        jax.jit(programs.server_program(server)),
    )


@lru_cache(maxsize=64)
def _measuring_programs(task: Task, shape: tuple[int, ...]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the programs for all rows and for chosen rows."""
    task = _for_flat_rows(task, shape)
    block = task.evaluation_batch
    return (
        jax.jit(programs.measure_program(task, block, gathered=False)),
        jax.jit(programs.measure_program(task, block, gathered=True)),
    )


class JaxEngine:
    """Train and measure with JAX; see `fedpick.sim.engine.Engine`.

    Args:
        task: the model and its loss.
        examples: the clients' examples.
        local: what a client does.
        server: what the server does with the updates.
        seed: of the initial model, the sketch and the noise.
        shards: pieces into which a cohort is cut, each trained by its own thread. Part of the setting: another number
            adds up the updates in another order. A cohort that fits into one group is not cut. None: one per core on a
            CPU for models above `HEAVY` parameters, otherwise one.
        group: clients per batched program; None: by the size of the model. A smaller cohort trains one by one on a CPU.
        sketch: what `Trained.sketches` holds, where a policy needs it; see `Simulator`.
    """

    def __init__(
        self,
        task: Task,
        examples: Examples,
        local: LocalTraining,
        server: ServerStep,
        *,
        seed: int,
        shards: int | None = None,
        group: int | None = None,
        sketch: str | SketchFunction = "head",
    ) -> None:
        self.examples, self.local, self.seed = examples, local, seed
        self.task = _for_flat_rows(task, examples.shape)
        self.server = server
        # On a CPU these share the memory of the examples.
        self.x, self.y = jax.device_put(examples.x), jax.device_put(examples.y)
        self.test_x, self.test_y = jax.device_put(examples.test_x), jax.device_put(examples.test_y)
        named = jax.tree_util.tree_leaves_with_path(self.init()[0])
        leaves = [leaf for _, leaf in named]
        self.num_parameters = sum(int(leaf.size) for leaf in leaves)
        self.model_bytes = sum(int(leaf.nbytes) for leaf in leaves)
        names = [_name(path) for path, _ in named]
        self._sketcher = sketcher_of(sketch, seed, names, [leaf.shape for leaf in leaves])
        heavy = self.num_parameters > HEAVY
        self.group = group or task.group or _default_group(heavy, equal_steps=local.steps is not None)
        self.shards = shards or (default_shards() if heavy else 1)
        self.rounds_at_once = 1 if heavy or self.shards > 1 or server.robust else ROUNDS_AT_ONCE
        largest = int(examples.sizes.max(initial=1))
        self.batch = max(largest, 1) if local.batch_size is None else local.batch_size
        # Learning rates are arguments of the programs, so they do not tell programs apart.
        settings = (task, examples.shape, replace(local, lr=1.0), replace(server, lr=1.0), self.batch)
        described = _whole_update if self._sketcher else head_update
        kinds = [(size, describe) for size in {1, self.group} for describe in (None, described)]
        self._training = {
            (size, describe is not None): _training_programs(*settings, size, describe) for size, describe in kinds
        }
        self._all_rows, self._some_rows = _measuring_programs(task, examples.shape)
        self._vector_programs: dict[Any, Callable[..., Array]] = {}

    @property
    def facts(self) -> Mapping[str, Any]:
        """What else decides the last bits."""
        return {"shards": self.shards, "group": self.group, "backend": jax.default_backend()}

    # Models

    def init(self) -> tuple[Params, Params]:
        """Return the initial (params, velocity) of this seed."""
        words = np.concatenate(hashing.key_from(self.seed, int(Purpose.MODEL)))
        params = jax.jit(self.task.init)(jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32"))
        return params, jax.tree.map(jnp.zeros_like, params) if self.server.momentum else ()

    def leaves(self, params: Params, velocity: Params) -> list[Any]:
        """Return the arrays of a model, in a fixed order."""
        return list(jax.tree.leaves((params, velocity)))

    def rebuild(self, leaves: Sequence[NDArray[Any]]) -> tuple[Params, Params]:
        """Return the (params, velocity) made of these arrays."""
        structure: Any = jax.tree.structure(jax.eval_shape(self.init))
        rebuilt: tuple[Params, Params] = jax.tree.unflatten(structure, [jax.device_put(leaf) for leaf in leaves])
        return rebuilt

    # Training

    def train(self, params: Params, velocity: Params, work: Work) -> Trained:
        """Train the clients of `work` and take the server step."""
        if work.combine is not None or self.server.robust:
            return self._train_singly(params, velocity, work, work.combine or self.server.combine)
        if len(work.clients) == 0:
            return Trained(params, velocity, *_NO_REPORTS)
        pieces = self._pieces(work)
        compiled = self._training[pieces[0].group, work.sketch]
        if self.shards == 1:
            x, y, rates = self.x, self.y, np.array([work.lr, work.server_lr], np.float32)
            words, cohort = _words(work.key), pieces[0].cohort
            params, velocity, reports = compiled.round(params, velocity, x, y, words, cohort, rates)
            return Trained(params, velocity, *self._sketched(work, *_in_order(pieces, [reports])))
        call = partial(self._train_piece, compiled.piece, params, _words(work.key), np.float32(work.lr))
        parts = _in_threads([partial(call, piece.cohort) for piece in pieces])
        given = [piece.cohort.floats[0] for piece in pieces]
        params, velocity, finite = compiled.server(params, velocity, parts, given, np.float32(work.server_lr))
        reports = [report if finite else np.full_like(report, np.nan) for _, report in parts]
        return Trained(params, velocity, *self._sketched(work, *_in_order(pieces, reports)))

    def _sketched(self, work: Work, losses: Float32Array, norms: Float32Array, sketches: NDArray[Any]) -> _Reports:
        """The reports of a cohort. If the host makes the sketches, those of the program are whole updates."""
        if work.sketch and self._sketcher is not None:
            sketches = self._sketcher(sketches, np.isfinite(norms))
        return losses, norms, sketches

    def _train_singly(self, params: Params, velocity: Params, work: Work, combine: Combine) -> Trained:
        """Train the cohort, combine its updates on the host, and take the server step."""
        reports: _Reports = _NO_REPORTS
        updates = np.empty((len(work.clients), self.num_parameters), np.float32)
        if len(work.clients):
            pieces = self._pieces(work)
            program = self._training[pieces[0].group, work.sketch].stack
            call = partial(self._train_piece, program, params, _words(work.key), np.float32(work.lr))
            parts = _in_threads([partial(call, piece.cohort) for piece in pieces])
            reports = self._sketched(work, *_in_order(pieces, [report for _, report in parts]))
            for piece, (rows, _) in zip(pieces, parts, strict=True):
                updates[piece.places] = np.asarray(rows)[: len(piece.places)]
        total = combine(updates, np.where(np.isfinite(reports[1]), work.weights, 0.0))
        if total is None:
            return Trained(params, velocity, *reports)
        leaves, structure = jax.tree.flatten(params)
        cuts = np.cumsum([leaf.size for leaf in leaves])[:-1]
        rows = np.split(total.astype(np.float32), cuts)
        shaped = [row.reshape(leaf.shape) for row, leaf in zip(rows, leaves, strict=True)]
        step = (jax.tree.unflatten(structure, shaped), np.zeros((2, 1), np.float32))
        server = self._training[self.group, False].server
        params, velocity, taken = server(params, velocity, [step], [np.ones(1)], np.float32(work.server_lr))
        if not taken:
            reports = (
                np.full_like(reports[0], np.nan),
                np.full_like(reports[1], np.nan),
                np.full_like(reports[2], np.nan),
            )
        return Trained(params, velocity, *reports)

    def _train_piece(self, program: Callable[..., Any], params: Params, words: Array, lr: Array, cohort: Cohort) -> Any:
        # Each thread waits for its own program; JAX alone would run the programs one after the other.
        # (JAX does not type block_until_ready.)
        return jax.block_until_ready(program(params, self.x, self.y, words, cohort, lr))  # type: ignore[no-untyped-call]

    def start_rounds(
        self, params: Params, velocity: Params, works: Sequence[Work], evaluate: Sequence[bool]
    ) -> _StartedRounds:
        """Dispatch `train` for consecutive rounds, up to ROUNDS_AT_ONCE of one kind in one program."""
        jobs = [(work, self._pieces(work)[0]) for work in works]
        started: list[_StartedRound] = []
        for _, same in groupby(jobs, key=lambda job: job[1].kind):
            chunk = list(same)
            states, reports = self._dispatch_rounds(params, velocity, chunk)
            for place, ((_, piece), state) in enumerate(zip(chunk, states, strict=True)):
                due = evaluate[len(started)] and len(self.test_y) > 0
                values = self._test_values(state[0]) if due else None
                started.append(_StartedRound(state, piece, reports, place, values))
            params, velocity = states[-1]
        return _StartedRounds(started)

    def _dispatch_rounds(
        self, params: Params, velocity: Params, jobs: Sequence[tuple[Work, _Piece]]
    ) -> tuple[list[tuple[Params, Params]], Array]:
        """Start one program for rounds of one kind: the model after each, and (rounds, 2, c) reports."""
        count = len(jobs)

        def stacked(*values: Any) -> NDArray[Any]:
            return np.stack([*values, *[values[0]] * (ROUNDS_AT_ONCE - count)])

        states, reports = self._training[jobs[0][1].group, False].rounds(
            params,
            velocity,
            self.x,
            self.y,
            stacked(*[_words(work.key) for work, _ in jobs]),
            jax.tree.map(stacked, *[piece.cohort for _, piece in jobs]),
            stacked(*[np.array([work.lr, work.server_lr], np.float32) for work, _ in jobs]),
            np.int32(count),
        )
        return states[:count], reports

    def _pieces(self, work: Work) -> list[_Piece]:
        """Cut the cohort of a round for the shards."""
        clients, group = work.clients, self._group_of(len(work.clients))
        factors = work.multipliers

        def piece(places: IntArray) -> _Piece:
            return _Piece(places, self._cohort(clients[places], work.weights[places], factors[places]), group)

        return [piece(places) for places in self._split(clients)]

    def _group_of(self, count: int) -> int:
        """How many of `count` clients train as one batch: one, if they do not fill it, because padding costs time."""
        return 1 if on_cpu() and count < self.group else self.group

    def _cohort(self, clients: IntArray, weights: FloatArray, factors: FloatArray) -> Cohort:
        """Pad clients to a bucket that is a multiple of the group."""
        count = len(clients)
        capacity = -(-bucket(count) // self.group) * self.group
        sizes = self.examples.sizes[clients]
        table = np.zeros((4, capacity), np.int32)
        table[:, :count] = clients, self.examples.starts[clients], sizes, self.local.num_steps(sizes)
        floats = np.zeros((2, capacity), np.float32)
        with np.errstate(over="ignore"):  # the step of an infinite weight is refused
            floats[:, :count] = weights, factors
        return Cohort(table, floats, np.int32(count))

    def _split(self, clients: IntArray) -> list[IntArray]:
        """Assign the positions of a cohort to shards: by descending local steps, back and forth.

        Clients of a group then take about equally many steps and seldom wait for each other. The assignment depends on
        the cohort and the number of shards alone, never on how busy the machine is.
        """
        pieces = max(1, min(self.shards, -(-len(clients) // self.group)))
        order = np.argsort(-self.local.num_steps(self.examples.sizes[clients]), kind="stable")
        place = np.arange(len(order)) % (2 * pieces)
        shard = np.where(place < pieces, place, 2 * pieces - 1 - place)
        return [order[shard == index] for index in range(pieces)]

    # Measuring

    def measure(self, params: Params, rows: NDArray[np.int32] | None = None) -> tuple[Float32Array, Float32Array]:
        """Return the loss and the correctness (0 or 1) of these rows of the clients' examples; None: of all."""
        count = len(self.examples.y) if rows is None else len(rows)
        if count == 0:
            return np.empty(0, np.float32), np.empty(0, np.float32)
        if rows is None:
            values = np.asarray(self._all_rows(params, self.x, self.y, np.zeros(0, np.int32), np.int32(count)))
        else:
            padded = np.zeros(bucket(count, 64), np.int32)
            padded[:count] = rows
            values = np.asarray(self._some_rows(params, self.x, self.y, padded, np.int32(count)))[:count]
        return values.real, values.imag

    def evaluate(self, params: Params) -> tuple[float, float]:
        """Return (loss, accuracy) on the central test set."""
        return _means(self._test_values(params))

    def _test_values(self, params: Params) -> Array:
        """Start the evaluation of the test set: loss + i * correctness of every example."""
        return self._all_rows(params, self.test_x, self.test_y, np.zeros(0, np.int32), np.int32(len(self.test_y)))

    def updates(self, params: Params, work: Work, length: int | None) -> FloatArray:
        """(k, s): the update of each client, or its count sketch."""
        describe = partial(_flat_update, length, hashing.key_from(self.seed, int(Purpose.MEASURE)))
        return self._vectors(params, work, describe, ("updates", length))

    def outputs(self, params: Params, work: Work, noise_examples: int) -> FloatArray:
        """(k, s): the mean output, on common noise, of each client's model after training."""
        noise = self.examples.noise(hashing.key_from(self.seed, int(Purpose.MEASURE)), noise_examples)
        describe = partial(_mean_outputs, self.task, jnp.asarray(noise))
        return self._vectors(params, work, describe, ("outputs", noise_examples))

    def _vectors(
        self, params: Params, work: Work, describe: Callable[[Params, Params], Array], which: tuple[str, int | None]
    ) -> FloatArray:
        count = len(work.clients)
        if count == 0:
            return np.empty((0, 1))
        group = self._group_of(count)
        if (group, which) not in self._vector_programs:
            width = jax.eval_shape(describe, params, params).shape[0]
            program = programs.vector_program(self.task, self.local, self.batch, group, describe, width)
            self._vector_programs[group, which] = jax.jit(program)
        cohort = self._cohort(work.clients, work.weights, work.multipliers)
        rows = self._vector_programs[group, which](
            params, self.x, self.y, _words(work.key), cohort, np.float32(work.lr)
        )
        return np.asarray(rows)[:count].astype(np.float64)


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="fedpick-shard")


def _in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run all calls at the same time, the first one in this thread."""
    others = [_threads(len(calls) - 1).submit(call) for call in calls[1:]]
    return [calls[0](), *(other.result() for other in others)]


def _default_group(heavy: bool, equal_steps: bool) -> int:
    if heavy:
        return 1
    if not on_cpu():
        return SMALL_GROUP
    return SMALL_GROUP_CPU if equal_steps else 1


def _words(key: hashing.Key) -> NDArray[np.uint32]:
    return np.concatenate(key)


def _in_order(pieces: Sequence[_Piece], reports: Sequence[Array]) -> tuple[Float32Array, Float32Array, Float32Array]:
    """(k,) losses, (k,) norms and (k, s) sketches in the order of the cohort, from the (2 + s, c) of its pieces."""
    columns = np.empty((len(reports[0]), sum(len(piece.places) for piece in pieces)), np.float32)
    for piece, report in zip(pieces, reports, strict=True):
        columns[:, piece.places] = np.asarray(report)[:, : len(piece.places)]
    return columns[0], columns[1], columns[2:].T


def head_update(update: Params) -> Array:
    """The update of the last layer's bias: the last one-dimensional array of the model.

    A model without one is described by the mean over the inputs of its last array.
    """
    leaves = jax.tree.leaves(update)
    biases = [leaf for leaf in leaves if leaf.ndim == 1]
    if biases:
        return biases[-1]
    return leaves[-1].reshape(-1, leaves[-1].shape[-1]).mean(axis=0)


def _means(values: Array) -> tuple[float, float]:
    """(loss, accuracy) from loss + i * correctness."""
    read = np.asarray(values)
    return float(read.real.mean(dtype=np.float64)), float(np.count_nonzero(read.imag) / len(read))


def _mean_outputs(task: Task, noise: Array, params: Params, update: Params) -> Array:
    assert task.outputs is not None
    return task.outputs(jax.tree.map(jnp.add, params, update), noise).mean(axis=0)


def _name(path: Sequence[Any]) -> str:
    """The name of one of a model's arrays, such as "dense0.bias"."""
    # Keys of dictionaries, fields of classes and positions in lists have different attributes.
    return ".".join(
        str(next((getattr(key, kind) for kind in ("key", "name", "idx") if hasattr(key, kind)), key)) for key in path
    )


def _whole_update(update: Params) -> Array:
    """The update as one vector."""
    return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(update)])


def _flat_update(length: int | None, key: hashing.Key, params: Params, update: Params) -> Array:
    """The update as one vector; or its count sketch, which keeps inner products in expectation and costs O(P)."""
    flat = _whole_update(update)
    if length is None:
        return flat
    signs, cells = hashing.sketch_cells(key, flat.shape[0], length)
    return jax.ops.segment_sum(flat * signs, cells, num_segments=length)


def _for_flat_rows(task: Task, shape: tuple[int, ...]) -> Task:
    """Wrap a task for flat rows: give them their shape back and check that answers are one per example."""

    def back(x: Array) -> Array:
        return x.reshape(x.shape[0], *shape)

    def loss(params: Params, x: Array, y: Array, key: Array, train: bool) -> Array:
        values = task.per_example_loss(params, back(x), y, key, train)
        _check_answers(task, "per_example_loss", values, len(x), "number", "Do not take their mean or sum.")
        return values

    def correct(params: Params, x: Array, y: Array) -> Array:
        values = task.correct(params, back(x), y)
        _check_answers(task, "correct", values, len(x), "truth value", "Compare the predictions with y.")
        return values

    return replace(task, per_example_loss=loss, correct=correct)


def _check_answers(task: Task, name: str, values: Array, count: int, kind: str, advice: str) -> None:
    """Check shape and type, which are known when a program is compiled; nothing is checked while it runs."""
    dtype, shape = jnp.result_type(values), jnp.shape(values)
    if shape != (count,) or not jnp.issubdtype(dtype, jnp.floating if kind == "number" else jnp.bool_):
        raise InvalidInput(
            f"{name} of the task {task.name!r} must give one {kind} per example, {count} for {count} of them. "
            f"Got {dtype} of shape {shape}. {advice}"
        )
