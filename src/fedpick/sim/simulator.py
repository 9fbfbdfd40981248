"""The simulator: a federation, a task, local training and a server step, with the model as explicit state.

It knows nothing of policies: `train` takes a `Selection` and returns an `Outcome`, `measure` answers a `Probe`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedpick.core import checkpoint
from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.core.errors import InvalidInput, MissingSignal, OutOfOrder, StateFileError
from fedpick.core.policy import Signal
from fedpick.core.record import Counters, Timings
from fedpick.core.rng import Purpose
from fedpick.core.sketches import SketchFunction
from fedpick.core.types import Clients, Outcome, Probe, Selection, aggregation_weights
from fedpick.core.writing import write_atomically
from fedpick.data.types import Federation, Part
from fedpick.sim import hashing, tasks
from fedpick.sim.attacks import Attacks
from fedpick.sim.clock import Ending, Status, Waiting, round_clock
from fedpick.sim.devices import TRAINING_PASSES, Devices, Seconds
from fedpick.sim.engine import Engine, Params, Rounds, Trainable, Trained, Work
from fedpick.sim.examples import Examples, segment_means
from fedpick.sim.faults import FaultDraw, Faults
from fedpick.sim.late import UnderWay, stale_factors
from fedpick.sim.settings import EngineName, LocalTraining, ServerStep, SimulatorSettings

__all__ = ["Simulator"]

_NUMBERS = {Signal.OUTCOME_LOSS, Signal.TRAIN_LOSS, Signal.LOSS_RMS}
"""Reports that a client sends as a number of its own."""
_DURATIONS = ("deadline", "latency", "seconds_per_example", "speed_spread", "jitter")
"""Fields of `Faults` that devices replace."""


class _Plan(NamedTuple):
    """One round before training: the selection, what goes wrong, and who trains."""

    selection: Selection
    faults: FaultDraw
    expected: BoolArray
    """(k,) which of the selected clients answer in time."""
    training: BoolArray
    """(k,) which of them train: those, and the ones whose late answer counts."""
    work: Work
    """Of the clients that train."""
    seconds: Seconds | None = None
    """What the clients spend their time on; None without devices."""
    ending: Ending | None = None
    arriving: BoolArray | None = None
    """(j,) which of the answers under way come in this round."""


class _Exchange(NamedTuple):
    """The late answers that come in a round, and those that start in it."""

    come: UnderWay
    used: BoolArray
    """(j,) which of `come` entered the model."""
    own: FloatArray
    """(k,) the weights of the selected clients, had all of them completed."""
    updates: NDArray[Any]
    """(l, P) of the selected clients that answer later."""


class _Prepared(NamedTuple):
    """A round started ahead of its turn; see `Simulator.prepare`."""

    plan: _Plan
    settings: tuple[Any, ...]
    """Everything else that decided the plan; see `Simulator._settings`."""
    rounds: Rounds
    step: int
    """Of this round among `rounds`."""


class Simulator:
    """A federation at work. The state is `params`, `velocity` (server momentum), `round`, `counters` and `clock`.

    Args:
        federation: the clients' data.
        task: a `Task`, the name of one, a PyTorch module, or a function that makes a module.
        local: what a chosen client does.
        server: what the server does with the updates.
        seed: of the initial model, the mini-batches, the measurements and the faults.
        clients: the table that policies see; by default `federation.clients()`.
        faults: what goes wrong; None: nothing.
        devices: how fast clients are. With devices the simulator keeps a `clock`, in seconds since the start; None: a
            round takes no time.
        waiting: for whom the server waits; needs devices. None: for all selected clients.
        attacks: who lies, and how; None: nobody.
        losses_on: the part of the local data on which losses are measured: "train", "validation", "test" or "all".
        shards: pieces of a cohort that train in parallel; None: chosen by the engine.
        group: clients per batched program; None: chosen by the engine.
        sketch: how the server describes an update for policies that learn from it: "head" (the update of the last
            layer's bias), "count-sketch" (512 numbers of the whole update), or a function (arrays of the update by
            name) -> vector.
        update_length: length of the count sketch that answers an UPDATE probe; None: the whole update.
        noise_examples: common Gaussian inputs on which OUTPUTS probes are answered.
        engine: "jax" or "torch", for a task given by name; None: JAX.
    """

    def __init__(
        self,
        federation: Federation,
        task: Trainable | Callable[..., Any] | str,
        *,
        local: LocalTraining,
        server: ServerStep | None = None,
        seed: int = 0,
        clients: Clients | None = None,
        faults: Faults | None = None,
        devices: Devices | None = None,
        waiting: Waiting | None = None,
        attacks: Attacks | None = None,
        losses_on: Part = "train",
        shards: int | None = None,
        group: int | None = None,
        sketch: str | SketchFunction = "head",
        update_length: int | None = None,
        noise_examples: int = 128,
        engine: EngineName | None = None,
    ) -> None:
        settings = SimulatorSettings(
            losses_on=losses_on,
            shards=shards,
            group=group,
            sketch=sketch,
            update_length=update_length,
            noise_examples=noise_examples,
            engine=engine,
        )  # validates them
        self.task = tasks.as_task(
            task, input_shape=federation.x.shape[1:], num_classes=federation.num_classes, engine=engine
        )
        self.clients = federation.clients() if clients is None else clients
        if len(self.clients) != federation.num_clients:
            raise InvalidInput(f"There are {federation.num_clients} clients with data and {len(self.clients)} rows.")
        self.federation, self.examples = federation, Examples(federation)
        if not self.examples.has(losses_on):
            raise InvalidInput(f"No client has {losses_on} data to measure losses on. Choose another losses_on.")
        self.local, self.server = local, server or ServerStep()
        self.seed, self.faults, self.losses_on = seed, faults, losses_on
        self.attacks = attacks
        self.lying = np.zeros(len(self.clients), bool)
        """(N,) the clients that lie."""
        if attacks is not None:
            self.lying = attacks.liars(seed, len(self.clients), self.clients.group)
        self.sketch, self.update_length = settings.sketch, settings.update_length
        self.noise_examples = noise_examples
        self.engine: Engine = self.task.engine(
            self.examples, local, self.server, seed=seed, shards=shards, group=group, sketch=self.sketch
        )
        self.params, self.velocity = self.engine.init()
        self.devices, self.waiting = devices, waiting or Waiting()
        self.fleet = None if devices is None else devices.fleet(self.clients, seed)
        self._refuse_waiting(waiting)
        self.clock = 0.0
        self.times: FloatArray | None = None
        """(4, k) of the latest round; see `fedpick.sim.clock`. None without devices."""
        self.under_way = UnderWay.none(self.engine.num_parameters)
        self.stale: FloatArray | None = None
        """(3, j) client, age and weight of the late answers used in the latest round; None: there were none."""
        self.fresh_share = 1.0
        """Of the weight of the latest round that fresh answers have."""
        self.round = 0
        self.counters = Counters()
        self.timings = Timings()
        self._model_received = np.full(len(self.clients), -1, np.int64)
        self._prepared: deque[_Prepared] = deque()
        self._prepared_from: list[Any] = []
        self._evaluated: tuple[list[Any], tuple[float, float]] | None = None

    def __repr__(self) -> str:
        return (
            f"Simulator({self.federation.name!r}, task={self.task.name!r}, {len(self.clients):,} clients, "
            f"seed={self.seed}, round={self.round})"
        )

    @property
    def provides(self) -> frozenset[Signal]:
        """The signals that this simulator delivers, for `Session(..., provides=...)`."""
        given = {
            *(Signal.LOSS, Signal.TRIAL, Signal.UPDATE),
            *(Signal.OUTCOME_LOSS, Signal.TRAIN_LOSS, Signal.LOSS_RMS, Signal.DURATION, Signal.UPDATE_NORM),
            Signal.SKETCH,
        }
        return frozenset(given | {Signal.OUTPUTS} if self.task.outputs else given)

    @property
    def has_sybils(self) -> bool:
        """Whether liars take a fresh identity in every round; see `fedpick.sim.sybils`."""
        return self.attacks is not None and "sybils" in self.attacks.parts

    @property
    def model_bytes(self) -> int:
        """Size of one model."""
        return self.engine.model_bytes

    def settings(self) -> dict[str, Any]:
        """Everything that decides the numbers, as plain values."""
        return {
            "task": self.task.name,
            "local": asdict(self.local),
            "server": self.server.settings(),
            "faults": None if self.faults is None else asdict(self.faults),
            **({} if self.attacks is None else {"attacks": self.attacks.settings(self.lying)}),
            "seed": self.seed,
            "losses_on": self.losses_on,
            "sketch": None if self.sketch == "head" else getattr(self.sketch, "__qualname__", self.sketch),
            **({} if self.update_length is None else {"update_length": self.update_length}),
            "noise_examples": self.noise_examples,
            **({} if self.devices is None else {"devices": asdict(self.devices), "waiting": asdict(self.waiting)}),
            **self.engine.facts,
        }

    def _refuse_waiting(self, waiting: Waiting | None) -> None:
        """Raise if there is no clock to wait by, two of them, or a deadline that no client can meet."""
        if self.fleet is None:
            if waiting is not None and waiting != Waiting():
                raise InvalidInput("Waiting needs a clock: say how fast the clients are with devices, such as phones.")
            return
        default = Faults()
        twice = [name for name in _DURATIONS if self.faults and getattr(self.faults, name) != getattr(default, name)]
        if twice:
            raise InvalidInput(
                f"Both the devices and the faults say how long clients take. Leave out {twice[0]!r} of the faults; "
                "the deadline is one of Waiting."
            )
        everybody = np.arange(len(self.clients))
        fastest = float(self._training_seconds(0, everybody, fresh=True).total.min())
        # The jitter of this draw and of another one: hardly ever beyond four standard deviations each.
        if fastest * np.exp(-8 * self.fleet.jitter) > self.waiting.deadline:
            raise InvalidInput(
                f"No client can meet the deadline of {self.waiting.deadline:g} s: the fastest takes {fastest:.3g} s. "
                "Choose a later deadline or faster devices."
            )

    # Training

    def train(
        self,
        selection: Selection,
        round: int | None = None,
        *,
        report: frozenset[Signal] = frozenset(),
        budget: int | None = None,
        judge: Callable[[Outcome], Outcome] | None = None,
    ) -> Outcome:
        """Train the selected clients, take the server step and go to the next round.

        `judge`, such as `Session.judge`, says before the server step whose answers count: those that it marks as not
        completed are left out. It is not asked where late answers are used.

        `budget` is the cohort size before over-commitment, which decides for how many answers a server with `devices`
        waits; None: for all.

        `report` names the signals to report. OUTCOME_LOSS and LOSS_RMS cost a pass over the cohort's data, so they are
        measured only if they are named; they and TRAIN_LOSS count as a number sent. The server makes the SKETCH of
        each update it receives, if it is named. The other fields cost nothing and are always filled.
        """
        if round is not None and round != self.round:
            raise OutOfOrder(f"The simulator is in round {self.round}; it was asked to train round {round}.")
        with self._clock("train"):
            ahead = self._take_prepared(selection, budget, report)
            plan = ahead[0] if ahead else self._plan(selection, self.round, budget=budget)
            if Signal.SKETCH in report:
                plan = plan._replace(work=plan.work._replace(sketch=True))
            losses = np.full((2, len(selection.clients)), np.nan)
            if report & {Signal.OUTCOME_LOSS, Signal.LOSS_RMS} and plan.training.any():
                losses[:, plan.training] = self._losses_before(plan.work.clients)
            if self.waiting.late == "drop":
                return self._commit(plan, ahead[1] if ahead else self._train(plan), losses, report, judge=judge)
            trained, exchange = self._train_with_late_answers(plan)
            return self._commit(plan, trained, losses, report, exchange)

    def _plan(self, selection: Selection, round: int, faults: bool = True, budget: int | None = None) -> _Plan:
        """Decide what training this selection in this round means; nobody trains yet."""
        chosen = selection.clients
        if self.faults is None or not faults:
            nobody = np.zeros(len(chosen), bool)
            draw = FaultDraw(nobody, nobody, nobody, np.full(len(chosen), np.nan))
        else:
            draw = self.faults.draw(self.seed, round, chosen, self._processed(chosen))
        if self.attacks is not None and faults:
            dropped = draw.dropped | self.attacks.dropped(self.lying[chosen])
            draw = draw._replace(dropped=dropped, duration=np.where(dropped, np.nan, draw.duration))
        expected = ~(draw.dropped | draw.late)
        training, seconds, ending, arriving = expected, None, None, None
        if self.fleet is not None and faults:
            seconds = self._training_seconds(round, chosen, self._model_received[chosen] != round)
            ending, arriving = self._ending(seconds.total, draw.dropped, budget)
            expected = training = ending.in_time
            if self.waiting.late != "drop":
                training = expected | (ending.cut_off & ~draw.dropped)
        work = self._work(round, chosen[training], poisoned=draw.poisoned[training])
        weights = aggregation_weights(selection, expected & ~draw.poisoned, self.clients)[training]
        return _Plan(selection, draw, expected, training, work._replace(weights=weights), seconds, ending, arriving)

    def _ending(self, finish: FloatArray, failed: BoolArray, budget: int | None) -> tuple[Ending, BoolArray]:
        """When the round ends, and (j,) which of the answers under way come before that."""
        waiting, count = self.waiting, len(self.under_way)
        due = np.maximum(self.under_way.due - self.clock, 0.0)
        if waiting.late == "buffer":
            both = np.concatenate([due, finish])
            gone = np.concatenate([np.zeros(count, bool), failed])
            ending = round_clock(both, gone, waiting.wanted(budget, len(both)), waiting.deadline)
            arriving = ending.in_time[:count]
            ending = ending._replace(in_time=ending.in_time[count:], cut_off=ending.cut_off[count:])
        else:
            ending = round_clock(finish, failed, waiting.wanted(budget, len(finish)), waiting.deadline)
            if not len(finish) and count:  # nobody to ask: the next answer is the next thing that happens
                ending = ending._replace(seconds=float(due.min()))
            arriving = due <= ending.seconds
        if not len(finish) and not count:
            ending = ending._replace(seconds=waiting.idle)
        return ending, arriving

    def _processed(self, clients: IntArray) -> IntArray:
        """(k,) how many examples each of these clients processes when it trains."""
        sizes = self.examples.sizes[clients]
        batch = np.minimum(sizes, self.local.batch_size or sizes.max(initial=0))
        return self.local.num_steps(sizes) * batch

    def _training_seconds(self, round: int, clients: IntArray, fresh: BoolArray | bool) -> Seconds:
        """How long these clients train; `fresh` are those that must receive the model first."""
        assert self.fleet is not None
        down = np.where(fresh, self.model_bytes, 0)
        return self.fleet.seconds(
            round, clients, TRAINING_PASSES * self._processed(clients), down, bytes_up=self.model_bytes
        )

    def _work(self, round: int, clients: IntArray, poisoned: BoolArray) -> Work:
        factors = None if self.attacks is None else self.attacks.update_factors(self.lying[clients])
        return Work(
            key=hashing.key_from(self.seed, int(Purpose.BATCHES), round),
            clients=clients,
            weights=np.zeros(len(clients)),
            poisoned=poisoned,
            lr=self.local.lr_at(round),
            server_lr=self.server.lr_at(round),
            factors=factors,
        )

    def _train(self, plan: _Plan) -> Trained:
        """Train a plan from the current model; nothing is committed."""
        trained = self.engine.train(self.params, self.velocity, plan.work)
        weights = self._weights_after(plan, trained)
        if (weights == plan.work.weights).all() or not weights.any():
            return trained
        # An update diverged, and the others take over its weight: rare enough to train them again with theirs.
        return self.engine.train(self.params, self.velocity, plan.work._replace(weights=weights))

    def _weights_after(self, plan: _Plan, trained: Trained) -> FloatArray:
        """(k,) the weights of those expected to answer, now that is known which updates are finite.

        The engine leaves out an update that is not finite: its weight counts as it was given, unless others rely on it.
        """
        finite = np.isfinite(trained.norms)
        if finite.all():
            return plan.work.weights
        completed = plan.expected.copy()
        completed[plan.expected] = finite
        weights = aggregation_weights(plan.selection, completed, self.clients)[plan.expected]
        return np.where(finite, weights, plan.work.weights)

    def _train_with_late_answers(self, plan: _Plan) -> tuple[Trained, _Exchange]:
        """Train those in time and those who answer later at once; the step also takes the late answers that come."""
        assert plan.arriving is not None
        come = self.under_way.where(plan.arriving)
        usable = np.asarray(np.isfinite(come.updates).all(axis=1))
        old, age = come.where(usable), self.round - come.started[usable]
        own = aggregation_weights(plan.selection, np.ones(len(plan.expected), bool), self.clients)
        in_time, mine = plan.expected[plan.training], own[plan.training]
        later = np.empty((0, 0), np.float32)
        stale = np.empty(0)
        self.fresh_share = 1.0

        def combine(updates: NDArray[Any], weights: FloatArray) -> FloatArray | None:
            nonlocal later, stale
            later = updates[~in_time]
            answered = in_time & (weights > 0)
            fresh, total = mine[answered], float(mine[answered].sum())
            mean = fresh @ updates[answered] / total if total > 0 else None
            stale = old.weights * stale_factors(self.waiting.stale_weight, age, old.updates, mean)
            total += float(stale.sum())
            if plan.selection.renormalize and total > 0:
                scale = (own.sum() if len(own) else 1.0) / total
                self.fresh_share = float(fresh.sum()) / total
                fresh, stale = fresh * scale, stale * scale
            return self.server.combine(np.concatenate([updates[answered], old.updates]), np.concatenate([fresh, stale]))

        trained = self.engine.train(self.params, self.velocity, plan.work._replace(combine=combine))
        taken = not len(trained.norms) or bool(np.isfinite(trained.norms).any())  # else the step was refused
        self.stale = np.stack([old.clients, age, stale]) if taken and len(old) else None
        return trained, _Exchange(come, usable & taken, own, later)

    def _losses_before(self, clients: IntArray) -> FloatArray:
        """(2, k): mean and root mean square of the per-example losses at the received model."""
        rows, bounds = self.examples.of(clients, self.losses_on)
        loss, _ = self.engine.measure(self.params, rows)
        squares = segment_means(loss.astype(np.float64) ** 2, bounds[:-1], bounds[1:])
        return np.stack([segment_means(loss, bounds[:-1], bounds[1:]), np.sqrt(squares)])

    def _commit(
        self,
        plan: _Plan,
        trained: Trained,
        losses: FloatArray,
        report: frozenset[Signal],
        exchange: _Exchange | None = None,
        judge: Callable[[Outcome], Outcome] | None = None,
    ) -> Outcome:
        """Take the result of a plan, count its messages and go to the next round."""
        chosen, draw = plan.selection.clients, plan.faults
        train_loss, norm = np.full((2, len(chosen)), np.nan)
        train_loss[plan.training], norm[plan.training] = trained.losses, trained.norms
        sketch = np.full((len(chosen), trained.sketches.shape[1]), np.nan)
        sketch[plan.training] = trained.sketches
        finite = np.isfinite(norm)
        train_loss[~finite], norm[~finite], sketch[~finite] = np.nan, np.nan, np.nan
        if self.attacks is not None:
            lying = self.lying[chosen]
            losses = np.stack([self.attacks.losses(row, lying, self.round) for row in losses])
            train_loss = self.attacks.losses(train_loss, lying, self.round)
        completed = plan.expected & finite
        status = self._status(plan, completed)
        cancelled, late = status == Status.CANCELLED, status == Status.LATE
        later = plan.training & ~plan.expected
        answers = int((~draw.dropped & ~cancelled & ~later).sum()) + (0 if exchange is None else len(exchange.come))
        self._count_model(chosen)
        self._count(updates_up=answers, scalars_up=len(report & _NUMBERS) * answers)
        told = [np.where(plan.expected, values, np.nan) for values in (*losses, train_loss, norm)]
        outcome = Outcome(
            index=self.round,
            clients=chosen,
            completed=completed,
            loss=told[0],
            loss_rms=told[1],
            train_loss=told[2],
            duration=self._durations(plan),
            update_norm=told[3],
            sketch=np.where(plan.expected[:, None], sketch, np.nan),
            late=late,
            cancelled=cancelled,
        )
        if judge is not None:
            outcome = judge(outcome)
            if (completed & ~outcome.completed).any():
                # Refused answers are rare: train the others again, with their new weights.
                weights = aggregation_weights(plan.selection, outcome.completed, self.clients)[plan.expected]
                trained = self.engine.train(self.params, self.velocity, plan.work._replace(weights=weights))
        if exchange is not None:
            assert plan.arriving is not None and plan.seconds is not None
            outcome = outcome.with_stale(exchange.come.outcome(self.round, exchange.used))
            reports = np.column_stack([*losses, train_loss, plan.seconds.total, norm, sketch])[later]
            starting = UnderWay(
                clients=chosen[later],
                started=np.full(int(later.sum()), self.round),
                due=self.clock + plan.seconds.total[later],
                weights=exchange.own[later],
                updates=exchange.updates.astype(np.float32),
                reports=reports,
            )
            self.under_way = self.under_way.where(~plan.arriving).and_also(starting)
        if plan.seconds is not None and plan.ending is not None:
            self.times = np.stack([*plan.seconds, status.astype(np.float64)])
            self.clock += plan.ending.seconds
        self.params, self.velocity = trained.params, trained.velocity
        self.round += 1
        self._evaluated = None
        if trained.evaluation is not None:
            self._evaluated = self.engine.leaves(self.params, self.velocity), trained.evaluation
        return outcome

    def _status(self, plan: _Plan, completed: BoolArray) -> IntArray:
        """(k,) the `Status` of every selected client."""
        status = np.where(completed, Status.ANSWERED, Status.FAILED)
        if plan.ending is None:
            status[plan.faults.late] = Status.LATE
        else:
            goes_on = plan.ending.seconds >= self.waiting.deadline or self.waiting.late != "drop"
            status[plan.ending.cut_off] = Status.LATE if goes_on else Status.CANCELLED
        return status

    def _durations(self, plan: _Plan) -> FloatArray:
        """(k,) seconds until the answer, or until the server stopped waiting; NaN for a client that failed."""
        if plan.seconds is None or plan.ending is None:
            return plan.faults.duration
        waited = np.minimum(plan.seconds.total, plan.ending.seconds)
        return np.where(plan.ending.in_time | plan.ending.cut_off, waited, np.nan)

    # Rounds that share a program

    @property
    def num_prepared(self) -> int:
        """How many of the next rounds were started ahead of their turn."""
        return len(self._prepared)

    @property
    def num_preparable(self) -> int:
        """How many more rounds to prepare now: one program's worth while the rounds of another are handed out."""
        size = self.engine.rounds_at_once if self.waiting.late == "drop" else 1
        return size if size > 1 and len(self._prepared) <= size else 0

    def prepare(self, selections: Sequence[Selection], evaluate: Sequence[bool], budget: int | None = None) -> None:
        """Start the rounds after those prepared already; `train` takes their results when it gets these selections.

        Nothing is committed. If `train` gets another selection, or the model or a setting was changed meanwhile, all
        prepared rounds are dropped and the round is trained as usual.
        """
        with self._clock("train"):
            first = self.round + len(self._prepared)
            plans = [self._plan(each, first + step, budget=budget) for step, each in enumerate(selections)]
            works = [plan.work for plan in plans]
            if self._prepared:
                last = self._prepared[-1].rounds
                rounds = self.engine.start_rounds(last.params, last.velocity, works, evaluate)
            else:
                self._prepared_from = self.engine.leaves(self.params, self.velocity)
                rounds = self.engine.start_rounds(self.params, self.velocity, works, evaluate)
            settings = self._settings(budget)
            self._prepared += [_Prepared(plan, settings, rounds, step) for step, plan in enumerate(plans)]

    def _settings(self, budget: int | None) -> tuple[Any, ...]:
        """What decides a plan beside the selection and the round: frozen values, so comparing them is quick."""
        chosen = (self.clients, self.local, self.server, self.faults, self.attacks, self.fleet, self.waiting)
        return self.seed, budget, *chosen

    def _take_prepared(
        self, selection: Selection, budget: int | None, report: frozenset[Signal]
    ) -> tuple[_Plan, Trained] | None:
        """Return the next prepared round if it is this one; otherwise drop everything prepared."""
        if not self._prepared:
            return None
        ahead = self._prepared.popleft()
        plan = ahead.plan
        same = ahead.settings == self._settings(budget) and _same(selection, plan.selection)
        asked = Signal.SKETCH in report or (self._model_received[selection.clients] == self.round).any()
        if same and not asked and self._is_model(self._prepared_from):
            trained = ahead.rounds.result(ahead.step)
            if (self._weights_after(plan, trained) == plan.work.weights).all():
                self._prepared_from = self.engine.leaves(trained.params, trained.velocity)
                return plan, trained
        self._prepared.clear()
        return None

    def _is_model(self, leaves: list[Any]) -> bool:
        """Whether the current model is made of these very arrays."""
        model = self.engine.leaves(self.params, self.velocity)
        return len(model) == len(leaves) and all(new is old for new, old in zip(model, leaves, strict=True))

    # Measuring

    def measure(self, probe: Probe) -> FloatArray:
        """Answer a probe: (d,) losses, or (d, s) vectors. Nothing is committed but the cost."""
        if probe.signal not in self.provides or probe.signal not in (Signal.LOSS, Signal.UPDATE, Signal.OUTPUTS):
            raise MissingSignal(
                f"The simulator with the task {self.task.name!r} cannot measure {probe.signal.value!r}."
            )
        with self._clock("measure"):
            params = self.params
            fresh = np.ones(len(probe.clients), bool)
            if probe.trial is None:
                fresh = self._count_model(probe.clients)
            else:
                params = self.trial_params(probe.trial)
                trial_fresh = self._count_model(probe.trial.clients)
                self._count(models_down=len(probe.clients), updates_up=len(probe.trial.clients))
                if self.fleet is not None:
                    trial = self._training_seconds(self.round, probe.trial.clients, trial_fresh)
                    self.clock += float(trial.total.max(initial=0.0))
            if probe.signal is Signal.LOSS:
                values = self._losses(params, probe.clients, probe.batch_size)
                if self.attacks is not None:
                    values = self.attacks.losses(values, self.lying[probe.clients], self.round)
            else:
                values = self._vectors(params, probe)
            if probe.signal is Signal.UPDATE and self.update_length is None:
                self._count(updates_up=len(probe.clients))
            else:
                self._count(scalars_up=values.size)
            if self.faults is not None and self.faults.silence:
                values[self.faults.silent(self.seed, self.round, probe.clients)] = np.nan
            if self.fleet is not None:
                values[self._wait_for_answers(probe, fresh, values)] = np.nan
            return values

    def _wait_for_answers(self, probe: Probe, fresh: BoolArray, values: FloatArray) -> BoolArray:
        """Advance the clock by the time of a question; return (d,) which clients answer too late."""
        assert self.fleet is not None
        passes, bytes_up = np.zeros(len(probe.clients), np.int64), 4 * values[:1].size
        if probe.signal is not Signal.LOSS:
            passes += TRAINING_PASSES * self._processed(probe.clients)
        if probe.signal is Signal.OUTPUTS:
            passes += self.noise_examples
        if probe.signal is Signal.LOSS:
            first, last = (edge[probe.clients] for edge in self.examples.ranges[self.losses_on])
            passes += np.minimum(last - first, probe.batch_size or last - first)
        if probe.signal is Signal.UPDATE and self.update_length is None:
            bytes_up = self.model_bytes
        down = np.where(fresh, self.model_bytes, 0)
        finish = self.fleet.seconds(self.round, probe.clients, passes, down, bytes_up).total
        self.clock += min(float(finish.max(initial=0.0)), self.waiting.probe_timeout)
        return finish > self.waiting.probe_timeout

    def trial_params(self, selection: Selection) -> Params:
        """Return the model that training this selection now would give, without faults; nothing is committed."""
        return self._train(self._plan(selection, self.round, faults=False)).params

    def client_losses(self, params: Params | None = None, part: Part | None = None) -> FloatArray:
        """(N,) mean loss of every client in one pass, at the current model; NaN for a client without such data."""
        with self._clock("evaluate"):
            everybody = np.arange(len(self.clients))
            return self._losses(self.params if params is None else params, everybody, part=part)

    def _losses(
        self, params: Params, clients: IntArray, batch_size: int | None = None, part: Part | None = None
    ) -> FloatArray:
        return self._client_means(params, clients, batch_size, part or self.losses_on)[0]

    def _client_means(
        self, params: Params, clients: IntArray, batch_size: int | None, part: Part
    ) -> tuple[FloatArray, FloatArray]:
        """(d,) mean loss and (d,) accuracy of these clients."""
        first, last = (edge[clients] for edge in self.examples.ranges[part])
        wanted = int((last - first).sum())
        if batch_size is None and wanted > len(self.examples.y) // 2 and (np.diff(clients) > 0).all():
            loss, right = self.engine.measure(params)  # all rows in one pass are faster than gathering most of them
            return segment_means(loss, first, last), segment_means(right, first, last)
        if batch_size is None:
            rows, bounds = self.examples.of(clients, part)
        else:
            rows, bounds = self._mini_batches(clients, first, last - first, batch_size)
        loss, right = self.engine.measure(params, rows)
        return segment_means(loss, bounds[:-1], bounds[1:]), segment_means(right, bounds[:-1], bounds[1:])

    def _mini_batches(
        self, clients: IntArray, first: IntArray, sizes: IntArray, batch_size: int
    ) -> tuple[NDArray[np.int32], IntArray]:
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
        work = self._work(self.round, probe.clients, poisoned=np.zeros(len(probe.clients), bool))
        if probe.signal is Signal.UPDATE:
            return self.engine.updates(params, work, self.update_length)
        return self.engine.outputs(params, work, self.noise_examples)

    # Evaluating

    def evaluate(self) -> tuple[float, float]:
        """Return (loss, accuracy) on the central test set; NaN where there is none."""
        with self._clock("evaluate"):
            if len(self.examples.test_y) == 0:
                return float("nan"), float("nan")
            if self._evaluated is not None and self._is_model(self._evaluated[0]):
                return self._evaluated[1]  # with the prepared round
            return self.engine.evaluate(self.params)

    def evaluate_clients(self, part: Part = "test") -> tuple[FloatArray, FloatArray]:
        """(N,) loss and (N,) accuracy of the current model on every client's own data."""
        with self._clock("evaluate"):
            return self._client_means(self.params, np.arange(len(self.clients)), None, part)

    def weighted(self, values: FloatArray) -> float:
        """Return the mean of a value per client, weighted by importance, over the clients that have the value."""
        known = np.isfinite(values)
        total = self.clients.importance[known].sum()
        return float(self.clients.importance[known] @ values[known] / total) if total > 0 else float("nan")

    # Costs and state

    def _count(self, models_down: int = 0, updates_up: int = 0, scalars_up: int = 0) -> None:
        self.counters = self.counters.plus(self.model_bytes, models_down, updates_up, scalars_up)

    def _count_model(self, clients: IntArray) -> BoolArray:
        """Count the current model as sent to the clients that did not receive it earlier in this round: (k,)."""
        new: BoolArray = self._model_received[clients] != self.round
        self._model_received[clients] = self.round
        self._count(models_down=int(new.sum()))
        return new

    @contextmanager
    def _clock(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = getattr(self.timings, what) + time.perf_counter() - start
            self.timings = replace(self.timings, **{what: spent})

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Return the state as (arrays, plain values), for a checkpoint."""
        leaves = self.engine.leaves(self.params, self.velocity)
        arrays = {f"model/{position}": np.asarray(leaf) for position, leaf in enumerate(leaves)}
        clock = {} if self.fleet is None else {"clock": self.clock}
        arrays |= self.under_way.arrays() if len(self.under_way) else {}
        return arrays, {"round": self.round, "counters": self.counters.as_dict(), **clock}

    def restore(self, arrays: Mapping[str, NDArray[Any]], plain: Mapping[str, Any]) -> None:
        """Go on from a `state` of a simulator with the same settings."""
        wanted = self.engine.leaves(self.params, self.velocity)
        saved = [arrays[f"model/{position}"] for position in range(len(wanted)) if f"model/{position}" in arrays]
        if [leaf.shape for leaf in saved] != [leaf.shape for leaf in wanted]:
            raise StateFileError(
                "The saved model is not of this simulator's shape. Build the simulator with the settings of the saved "
                "one."
            )
        self.params, self.velocity = self.engine.rebuild(saved)
        self.round, self.counters = plain["round"], Counters(**plain["counters"])
        self.clock = float(plain.get("clock", 0.0))
        self.under_way = (
            UnderWay.from_arrays(arrays) if "late/clients" in arrays else UnderWay.none(self.engine.num_parameters)
        )
        self._model_received[:] = -1
        self._prepared.clear()

    def save(self, path: str | Path) -> None:
        """Write the state to one file, without pickle; a crash leaves the previous file."""
        arrays, plain = self.state()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(path), checkpoint.pack(arrays, {"simulator": plain, "seed": self.seed}))

    def load(self, path: str | Path) -> None:
        """Go on from a saved state. The simulator must have been built with the same settings."""
        try:
            content = Path(path).read_bytes()
        except FileNotFoundError as error:
            raise StateFileError(f"There is no saved simulator at {path}.") from error
        arrays, plain = checkpoint.unpack(content, str(path))
        if "simulator" not in plain:
            raise StateFileError(f"{path} is not a saved simulator.")
        if plain["seed"] != self.seed:
            raise InvalidInput(f"{path} was saved with seed {plain['seed']}; this simulator has seed {self.seed}.")
        self.restore(arrays, plain["simulator"])


def _same(one: Selection, other: Selection) -> bool:
    """Whether both select the same clients with the same weights."""
    if one.weights is None or other.weights is None:
        weights = one.weights is other.weights
    else:
        weights = np.array_equal(one.weights, other.weights)
    return weights and one.renormalize == other.renormalize and np.array_equal(one.clients, other.clients)
