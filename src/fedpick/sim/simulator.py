"""The simulator: a federation, a task, local training and a server step, with the model as explicit state.

It knows nothing of policies: `train` takes a `Selection` and gives an `Outcome`, `measure` answers a `Probe`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import FloatArray
from fedpick.core.errors import InvalidInput, MissingSignal, OutOfOrder
from fedpick.core.policy import Signal
from fedpick.core.rng import Purpose
from fedpick.core.types import Clients, Outcome, Probe, Selection
from fedpick.data.types import Federation, Part
from fedpick.sim import hashing, tasks
from fedpick.sim.accounts import Counters, Timings
from fedpick.sim.checkpoint import read_checkpoint, write_checkpoint
from fedpick.sim.examples import Rows, segment_means
from fedpick.sim.faults import Faults
from fedpick.sim.jax_engine.setup import default_shards, on_cpu, require_jax
from fedpick.sim.jax_engine.training import LocalTraining
from fedpick.sim.plan import Plan, Work, plan_round, round_key
from fedpick.sim.server import ServerStep
from fedpick.sim.tasks import Task

__all__ = ["Simulator"]

Params = Any

HEAVY = 5_000
"""Models with more parameters than this are worth a thread on every core."""
SMALL_GROUP = 16
"""Clients of a small model trained as one batch on a GPU."""
SMALL_GROUP_CPU = 10
"""The same on a CPU, if all take equally many steps: most cohorts are a multiple of ten, and a batch fills up with
nobody. Otherwise one after another there: a batch waits for the client with the most steps."""


class Simulator:
    """A federation at work. The state is `params`, `velocity` (server momentum), `round` and `counters`.

    `fuses` says whether several rounds may be one program; `simulate` does that where nobody decides in between.

    Args:
        federation: the clients' data.
        task: a `Task`, or the name of one.
        local: what a chosen client does.
        server: what the server does with the updates.
        seed: of the initial model, the mini-batches, the measurements and the faults.
        clients: the table policies see; by default `federation.clients()`.
        faults: what goes wrong; None: nothing.
        losses_on: which part of the local data losses are measured on: "train", "validation", "test" or "all".
        shards: into how many pieces a cohort is cut, each trained by its own thread. Part of the setting: another
            number adds the updates up in another order. A cohort that fits into one group is not cut. None: one per
            core on a CPU, but one for a small model, of which several runs fit side by side; else one.
        group: clients per batched program; a smaller cohort is trained one after another on a CPU. None: more than one
            for a small model, on a CPU only if all clients take equally many steps (LocalTraining.steps).
        sketch: length of the sketch with which UPDATE probes answer; None: the whole update.
        noise_examples: common Gaussian inputs on which OUTPUTS probes are answered.
    """

    def __init__(
        self,
        federation: Federation,
        task: Task | str,
        *,
        local: LocalTraining,
        server: ServerStep | None = None,
        seed: int = 0,
        clients: Clients | None = None,
        faults: Faults | None = None,
        losses_on: Part = "train",
        shards: int | None = None,
        group: int | None = None,
        sketch: int | None = None,
        noise_examples: int = 128,
    ) -> None:
        jax = require_jax()
        from fedpick.sim.jax_engine.engine import Programs

        if isinstance(task, str):
            task = tasks.get(task, input_shape=federation.x.shape[1:], num_classes=federation.num_classes)
        for name, value in (("shards", shards), ("group", group), ("sketch", sketch)):
            if value is not None and value < 1:
                raise InvalidInput(f"Simulator's {name} must be at least 1. Got {value}.")
        if losses_on not in ("train", "validation", "test", "all"):
            raise InvalidInput(f"losses_on is one of train, validation, test, all. Got {losses_on!r}.")
        self.federation = federation
        self.clients = federation.clients() if clients is None else clients
        if len(self.clients) != federation.num_clients:
            raise InvalidInput(f"There are {federation.num_clients} clients with data and {len(self.clients)} rows.")
        self.task, self.local, self.server = task, local, server or ServerStep()
        self.seed, self.faults, self.losses_on, self.sketch = seed, faults, losses_on, sketch
        self.noise_examples = noise_examples
        self.rows = Rows(federation)
        if not (self.rows.ranges[losses_on][1] > self.rows.ranges[losses_on][0]).any():
            raise InvalidInput(f"Nobody has {losses_on} data to measure losses on. Choose another losses_on.")
        self.params: Params = self.initial_params()
        leaves = jax.tree.leaves(self.params)
        self.num_parameters = sum(int(leaf.size) for leaf in leaves)
        self.model_bytes = sum(int(leaf.nbytes) for leaf in leaves)
        heavy = self.num_parameters > HEAVY
        self.group = group or task.group or _default_group(heavy, equal_steps=local.steps is not None)
        self.shards = shards or (default_shards() if heavy else 1)
        self.fuses = self.shards == 1 and not heavy
        self.velocity: Params = jax.tree.map(jax.numpy.zeros_like, self.params) if self.server.momentum else ()
        self.round = 0
        self.counters = Counters()
        self.timings = Timings()
        self.programs = Programs(task, local, self.server, self.rows, self.shards, self.group)
        self._sent = np.full(len(self.clients), -1, np.int64)

    @property
    def provides(self) -> frozenset[Signal]:
        """The signals this simulator can deliver, for `Session(..., provides=...)`."""
        given = {
            Signal.LOSS,
            Signal.TRIAL,
            Signal.UPDATE,
            Signal.OUTCOME_LOSS,
            Signal.TRAIN_LOSS,
            Signal.DURATION,
            Signal.UPDATE_NORM,
        }
        return frozenset(given | {Signal.OUTPUTS} if self.task.outputs else given)

    def settings(self) -> dict[str, Any]:
        """Everything that decides the numbers, as plain values."""
        return {
            "task": self.task.name,
            "local": asdict(self.local),
            "server": asdict(self.server),
            "faults": None if self.faults is None else asdict(self.faults),
            "seed": self.seed,
            "losses_on": self.losses_on,
            "shards": self.shards,
            "group": self.group,
            "sketch": self.sketch,
            "noise_examples": self.noise_examples,
            "backend": require_jax().default_backend(),
        }

    def initial_params(self) -> Params:
        """The model every run with this seed starts from."""
        jax = require_jax()
        words = np.concatenate(hashing.key_from(self.seed, int(Purpose.MODEL)))
        key = jax.random.wrap_key_data(jax.numpy.asarray(words), impl="threefry2x32")
        return jax.jit(self.task.init)(key)

    # Training

    def train(
        self, selection: Selection, round: int | None = None, *, report: frozenset[Signal] = frozenset()
    ) -> Outcome:
        """Train the selected clients, take the server step and go to the next round.

        `report`: OUTCOME_LOSS costs a pass over the cohort's data, so it is measured only when asked for here; it and
        TRAIN_LOSS count as a number sent. The rest of the outcome costs nothing and is always there.
        """
        if round is not None and round != self.round:
            raise OutOfOrder(f"The simulator is in round {self.round}; it was asked to train round {round}.")
        with self._clock("train"):
            plan = self.plan(selection, self.round)
            loss = np.full(len(selection.clients), np.nan)
            if Signal.OUTCOME_LOSS in report and plan.expected.any():
                loss[plan.expected] = self._losses(self.params, plan.work.clients)
            return self.commit(plan, *self._train(plan.work), loss=loss, report=report)

    def plan(self, selection: Selection, round: int, faults: bool = True) -> Plan:
        """What training this selection in some round means; nobody trains yet."""
        return plan_round(
            selection,
            round,
            clients=self.clients,
            sizes=self.rows.sizes,
            local=self.local,
            server=self.server,
            faults=self.faults if faults else None,
            seed=self.seed,
        )

    def commit(
        self,
        plan: Plan,
        params: Params,
        velocity: Params,
        train_losses: NDArray[np.float32],
        norms: NDArray[np.float32],
        *,
        loss: FloatArray | None = None,
        report: frozenset[Signal] = frozenset(),
    ) -> Outcome:
        """Take the result of a plan for the current round, count its messages and go to the next round."""
        chosen, draw = plan.selection.clients, plan.draw
        train_loss, norm = np.full((2, len(chosen)), np.nan)
        train_loss[plan.expected], norm[plan.expected] = train_losses, norms
        completed = plan.expected & np.isfinite(norm)
        self._count_model(chosen)
        numbers = len(report & {Signal.OUTCOME_LOSS, Signal.TRAIN_LOSS})
        answers = int((~draw.dropped).sum())
        self._count(updates_up=answers, scalars_up=numbers * answers)
        outcome = Outcome(
            index=self.round,
            clients=chosen,
            completed=completed,
            loss=np.full(len(chosen), np.nan) if loss is None else loss,
            train_loss=np.where(completed, train_loss, np.nan),
            duration=draw.duration,
            update_norm=np.where(completed, norm, np.nan),
        )
        self.params, self.velocity = params, velocity
        self.round += 1
        return outcome

    def _train(self, work: Work) -> tuple[Params, Params, NDArray[np.float32], NDArray[np.float32]]:
        """The new (params, velocity), (k,) training losses and (k,) norms of the updates; nothing is committed."""
        if len(work.clients) == 0:
            nothing = np.empty(0, np.float32)
            return self.params, self.velocity, nothing, nothing
        return self.programs.train(self.params, self.velocity, work)

    # Measuring

    def measure(self, probe: Probe) -> FloatArray:
        """Answer a probe: (d,) losses, or (d, s) vectors. Nothing is committed but the cost."""
        if probe.signal not in self.provides or probe.signal not in (Signal.LOSS, Signal.UPDATE, Signal.OUTPUTS):
            raise MissingSignal(
                f"The simulator with the task {self.task.name!r} cannot measure {probe.signal.value!r}."
            )
        with self._clock("measure"):
            params = self.params
            if probe.trial is None:
                self._count_model(probe.clients)
            else:
                params = self.trial_params(probe.trial)
                self._count_model(probe.trial.clients)
                self._count(models_down=len(probe.clients), updates_up=len(probe.trial.clients))
            if probe.signal is Signal.LOSS:
                values = self._losses(params, probe.clients, probe.batch_size)
            else:
                values = self._vectors(params, probe)
            whole_update = probe.signal is Signal.UPDATE and self.sketch is None
            if whole_update:
                self._count(updates_up=len(probe.clients))
            else:
                self._count(scalars_up=values.size)
            if self.faults is not None and self.faults.silence:
                values[self.faults.silent(self.seed, self.round, probe.clients)] = np.nan
            return values

    def trial_params(self, selection: Selection) -> Params:
        """The model that training this selection now would give, without faults; nothing is committed."""
        return self._train(self.plan(selection, self.round, faults=False).work)[0]

    def client_losses(self, params: Params | None = None, part: Part | None = None) -> FloatArray:
        """(N,) mean loss of everybody in one pass, at the current model; NaN for a client without such data."""
        with self._clock("evaluate"):
            everybody = np.arange(len(self.clients))
            return self._losses(self.params if params is None else params, everybody, part=part)

    def _losses(
        self, params: Params, clients: NDArray[np.int64], batch_size: int | None = None, part: Part | None = None
    ) -> FloatArray:
        return self._client_means(params, clients, batch_size, part or self.losses_on)[0]

    def _client_means(
        self, params: Params, clients: NDArray[np.int64], batch_size: int | None, part: Part
    ) -> tuple[FloatArray, FloatArray]:
        """(d,) mean loss and (d,) share of right answers of some clients."""
        first, last = (edge[clients] for edge in self.rows.ranges[part])
        wanted = int((last - first).sum())
        if batch_size is None and wanted > self.rows.num_rows // 2 and (np.diff(clients) > 0).all():
            loss, right = self.programs.measure(params, self.rows.x, self.rows.y)
            return segment_means(loss, first, last), segment_means(right, first, last)
        if batch_size is None:
            rows, bounds = self.rows.of(clients, part)
        else:
            rows, bounds = self._mini_batches(clients, first, last - first, batch_size)
        loss, right = self.programs.measure(params, self.rows.x, self.rows.y, rows)
        return segment_means(loss, bounds[:-1], bounds[1:]), segment_means(right, bounds[:-1], bounds[1:])

    def _mini_batches(
        self, clients: NDArray[np.int64], first: NDArray[np.int64], sizes: NDArray[np.int64], batch_size: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Up to `batch_size` distinct rows of each client, a function of (seed, round, client)."""
        base = hashing.key_from(self.seed, int(Purpose.MEASURE), self.round)
        key = hashing.fold(base, clients.astype(np.uint32)[:, None])
        lane = np.arange(batch_size, dtype=np.uint32)[None, :]
        span = np.maximum(sizes, 1).astype(np.uint32)[:, None]
        drawn = hashing.permute(key, np.broadcast_to(lane, (len(clients), batch_size)), span)
        counted = lane < sizes[:, None]
        bounds = np.concatenate([[0], np.cumsum(np.minimum(sizes, batch_size))])
        return (first[:, None] + drawn)[counted].astype(np.int32), bounds

    def _vectors(self, params: Params, probe: Probe) -> FloatArray:
        """(d, s): updates (or their sketches), or the mean outputs of the locally trained models on noise."""
        sketch = self.sketch if probe.signal is Signal.UPDATE else None
        return self.programs.vectors(
            params,
            round_key(self.seed, self.round),
            probe.clients,
            self.local.lr_at(self.round),
            outputs=probe.signal is Signal.OUTPUTS,
            sketch=sketch,
            noise_examples=self.noise_examples,
            seed=self.seed,
        )

    # Evaluating

    def evaluate(self) -> tuple[float, float]:
        """(loss, accuracy) on the central test set; NaN where there is none."""
        with self._clock("evaluate"):
            if len(self.rows.test_y) == 0:
                return float("nan"), float("nan")
            return self.test_means(self.programs.measure_later(self.params, self.rows.test_x, self.rows.test_y))

    @staticmethod
    def test_means(values: Any) -> tuple[float, float]:
        """(loss, accuracy) from what `Programs.measure_later` has for the test set."""
        read = np.asarray(values)
        return float(read.real.mean(dtype=np.float64)), float(np.count_nonzero(read.imag) / len(read))

    def evaluate_clients(self, part: Part = "test") -> tuple[FloatArray, FloatArray]:
        """(N,) loss and (N,) accuracy of the current model on every client's own data."""
        with self._clock("evaluate"):
            return self._client_means(self.params, np.arange(len(self.clients)), None, part)

    def weighted(self, values: FloatArray) -> float:
        """The mean of a value per client, weighted by importance; clients without the value are left out."""
        known = np.isfinite(values)
        total = self.clients.importance[known].sum()
        return float(self.clients.importance[known] @ values[known] / total) if total > 0 else float("nan")

    # Accounts and state

    def _count(self, models_down: int = 0, updates_up: int = 0, scalars_up: int = 0) -> None:
        self.counters = self.counters.plus(self.model_bytes, models_down, updates_up, scalars_up)

    def _count_model(self, clients: NDArray[np.int64]) -> None:
        """The current model goes to these clients, unless they got it earlier in this round."""
        new = int((self._sent[clients] != self.round).sum())
        self._sent[clients] = self.round
        self._count(models_down=new)

    @contextmanager
    def _clock(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = getattr(self.timings, what) + time.perf_counter() - start
            self.timings = replace(self.timings, **{what: spent})

    def save(self, path: str | Path) -> None:
        """Write the state to one file, without pickle; a crash leaves the previous file."""
        plain = {"round": self.round, "seed": self.seed, "counters": self.counters.as_dict()}
        write_checkpoint(Path(path), {"params": self.params, "velocity": self.velocity}, plain)

    def load(self, path: str | Path) -> None:
        """Go on from a saved state. The simulator must have been built with the same settings."""
        trees, plain = read_checkpoint(Path(path), {"params": self.params, "velocity": self.velocity})
        if plain["seed"] != self.seed:
            raise InvalidInput(f"{path} was saved with seed {plain['seed']}; this simulator has seed {self.seed}.")
        self.params, self.velocity = trees["params"], trees["velocity"]
        self.round, self.counters = plain["round"], Counters(**plain["counters"])
        self._sent[:] = -1


def _default_group(heavy: bool, equal_steps: bool) -> int:
    if heavy:
        return 1
    if not on_cpu():
        return SMALL_GROUP
    return SMALL_GROUP_CPU if equal_steps else 1
