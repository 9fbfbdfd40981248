"""One run of an experiment: build it from its settings, compute its rounds, and commit each of them to the store.

The settings alone decide the rows, so any process on any machine can take a run up where another one left it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

import fedpick
from fedpick.availability.logs import ReplayTrace
from fedpick.availability.markov import cluster_of_clients
from fedpick.availability.process import Trace
from fedpick.availability.statistics import groups_of_trace
from fedpick.core import checkpoint
from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.core.errors import InvalidInput, MissingSignal, StateFileError
from fedpick.core.record import RoundRecord
from fedpick.core.registry import parameters
from fedpick.core.session import Session
from fedpick.core.types import Clients, Outcome
from fedpick.data.types import Federation
from fedpick.experiments.encoding import to_json
from fedpick.experiments.input_files import referenced_files, refuse_changed_files
from fedpick.experiments.integrity import Damage
from fedpick.experiments.leases import RunLeased
from fedpick.experiments.manifest import new_manifest
from fedpick.experiments.schema import sa
from fedpick.experiments.settings import RunParts, build_settings, federation_of, federation_texts
from fedpick.experiments.store import ClientAccuracies, Store, StoreError, StoreLocked, in_a_sentence
from fedpick.sim.sybils import grown_table

if TYPE_CHECKING:
    from fedpick.data.types import Part
    from fedpick.sim import Simulator
    from fedpick.sim.loop import Masks

__all__ = ["FederatedRun", "build", "clients_and_trace", "compute", "refuse_early"]

# A checkpoint is written when the rounds since the last one took this many times longer than writing it.
_CHECKPOINT_SHARE = 10.0
_PACKAGES = ("numpy", "scipy", "jax", "jaxlib", "torch", "sqlalchemy")
"""Whose versions the manifest holds."""


class LaterTrace(Trace):
    """A trace from round `first` on, which becomes round 0."""

    def __init__(self, trace: Trace, first: int) -> None:
        super().__init__(trace.num_clients, trace.seed)
        self.trace, self.first = trace, first

    def _mask(self, round: int) -> BoolArray:
        return self.trace.mask(self.first + round)

    def _truth(self) -> tuple[FloatArray, FloatArray]:
        return self.trace.availability, self.trace.correlation


@dataclass(frozen=True)
class AtClock:
    """Device logs read at the time of a simulator's clock instead of once per round."""

    trace: ReplayTrace
    simulator: Simulator
    start: float
    """Seconds into the logs at which the run starts, after their offset."""

    def mask(self, round: int) -> BoolArray:
        """(N,) who is available now."""
        return self.trace.at(self.start + self.simulator.clock)


@dataclass
class FederatedRun:
    """A session that decides and a simulator that trains."""

    parts: RunParts
    session: Session
    simulator: Simulator
    trace: Trace
    federation: Mapping[str, Any]
    """The row of the table `federations`, its key included."""
    files: Mapping[str, str]
    """SHA-256 of the files that the settings name; see `referenced_files`."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """How this run is computed, for the manifest."""
        return {"simulator": self.simulator.settings(), **({"files": self.files} if self.files else {})}

    def rounds(self, until: int) -> Iterator[RoundRecord]:
        """Compute the rounds from here on; one record each, until `until` rounds are done."""
        from fedpick.sim import simulate

        parts = self.parts
        if parts.history and self.session.round == 0:  # after a checkpoint the policy's state has it
            show_history(self.session, self.trace, parts.history)
        # Older specs ask for local accuracy where no client has local test data: nothing is measured.
        local = parts.local_accuracy_every if self.simulator.examples.has("test") else None
        return simulate(
            self.simulator,
            self.session,
            rounds=until,
            budget=parts.budget,
            availability=self._availability(),
            evaluate_every=parts.evaluate_every,
            losses_every=parts.losses_every,
            local_accuracy_every=local,
            validation_every=parts.validation_every,
            # Which rounds are evaluated must not depend on how many were asked for this time.
            evaluate_last=False,
        )

    def _availability(self) -> Masks:
        history = self.parts.history
        if self.parts.at_clock:
            assert isinstance(self.trace, ReplayTrace)  # validated with the spec
            return AtClock(self.trace, self.simulator, history * self.trace.round_seconds)
        return LaterTrace(self.trace, history) if history else self.trace

    def client_accuracies(self) -> ClientAccuracies | None:
        """Measure the current model on every client's own test data, else on its validation or training data.

        None if the data have no classes.
        """
        if not self.federation["num_classes"]:
            return None
        parts: tuple[Part, ...] = ("test", "validation", "train")
        part = next(part for part in parts if self.simulator.examples.has(part))
        return ClientAccuracies(self.simulator.round, part, self.simulator.evaluate_clients(part)[1])

    def checkpoint(self) -> bytes:
        """Return everything needed to go on after the latest round."""
        arrays, plain = self.simulator.state()
        policy_arrays, policy_plain = self.session.split()
        arrays |= {f"policy/{name}": value for name, value in policy_arrays.items()}
        return checkpoint.pack(arrays, {**plain, "policy": policy_plain})

    def restore(self, content: bytes) -> None:
        """Go on from a checkpoint."""
        try:
            arrays, plain = checkpoint.unpack(content, "The checkpoint in the store")
            own = {name.removeprefix("policy/"): value for name, value in arrays.items() if name.startswith("policy/")}
            self.simulator.restore(arrays, plain)
            if self.simulator.has_sybils:
                self.session.grow(grown_table(self.simulator, plain["round"]))
            self.session.restore(own, plain["policy"], round=plain["round"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateFileError(f"{in_a_sentence(error)} Start this run over with --restart.") from error


def show_history(session: Session, trace: Trace, rounds: int) -> None:
    """Show the policy the masks of past rounds. It may choose nobody, and no client is measured.

    Afterwards the session is in round 0 again, with what the policy learned.
    """
    nobody = np.empty(0, np.int64)
    for index in range(rounds):
        try:
            session.ask(available=trace.mask(index), budget=0)
        except MissingSignal as error:
            raise InvalidInput(
                f"[availability]: history shows masks alone, but {type(session.policy).__name__} wants to measure "
                "clients even in a round without a budget. Leave out history, or this policy."
            ) from error
        session.tell(Outcome(index=index, clients=nobody, completed=nobody.astype(bool)))
    session.restore(*session.split(), round=0)


def clients_and_trace(parts: RunParts, federation: Federation) -> tuple[Clients, Trace]:
    """Return the table that policies see, with the true availability and the groups, and who is available when."""
    clients = federation.clients()
    trace = parts.availability.start(clients, parts.availability_seed)
    return replace(trace.oracle(clients), group=_group_of_clients(parts.groups, clients, trace)), trace


def _group_of_clients(groups: str | int | tuple[int, ...] | None, clients: Clients, trace: Trace) -> IntArray | None:
    """(N,) the group of every client; see `RunSettings.groups`."""
    if groups is None:
        return clients.group
    if isinstance(groups, int):
        return cluster_of_clients(len(clients), groups)
    if not isinstance(groups, str):
        return np.array(groups, dtype=np.int64)
    found = groups_of_trace(trace, groups)
    found = clients.group if found is None else found
    if found is None:
        raise InvalidInput(
            "[run]: groups = 'cluster' needs clusters: those of the availability 'clustered', or of the partition "
            "'clustered' or 'dirichlet-mixture'. Or give a number of groups, or a list."
        )
    return found


def build(settings: Mapping[str, Any]) -> FederatedRun:
    """Build the run that these settings (the column `runs.settings`) describe, at its start."""
    from fedpick.sim import Simulator

    parts, files = build_settings(settings), referenced_files(settings)
    federation = federation_of(settings)
    clients, trace = clients_and_trace(parts, federation)
    simulator = Simulator(
        federation,
        parts.task.build(federation.x.shape[1:], federation.num_classes, parts.simulator.engine),
        local=parts.local,
        server=parts.server,
        faults=parts.faults,
        devices=parts.devices,
        waiting=parts.waiting,
        attacks=parts.attacks,
        seed=parts.seed,
        clients=clients,
        losses_on=parts.simulator.losses_on,
        shards=parts.simulator.shards,
        group=parts.simulator.group,
        sketch=parts.simulator.sketch,
        update_length=parts.simulator.update_length,
        noise_examples=parts.simulator.noise_examples,
    )
    session = Session(parts.policy, clients, parts.seed, provides=simulator.provides, guard=parts.guard)
    data_files = [f"{name} {digest}" for name, digest in files.items() if name.startswith(("data.", "partition."))]
    histogram = federation.label_histogram
    row = {
        "key": hashlib.sha256("\n".join([*federation_texts(settings), *data_files]).encode()).hexdigest(),
        "data": federation.name,
        "partition": federation.partition,
        "num_clients": federation.num_clients,
        "num_classes": federation.num_classes,
        "num_examples": clients.num_examples.astype("<f8").tobytes(),
        "label_histogram": None if histogram is None else histogram.astype("<i4").tobytes(),
    }
    return FederatedRun(parts, session, simulator, trace, row, files)


def refuse_early(all_settings: list[Mapping[str, Any]]) -> None:
    """Build what the first seed needs, and raise now what would fail hours later: signals, shapes, sizes."""
    if not all_settings:
        return
    first = build(all_settings[0])
    clients, budget = first.session.clients, first.parts.budget
    for settings in all_settings:
        if settings["seed"] == first.parts.seed:
            policy = build_settings(settings).policy
            options: dict[str, Any] = {"provides": first.simulator.provides, "guard": first.parts.guard}
            session = Session(policy, clients, first.parts.seed, **options)
            show_history(session, first.trace, min(1, first.parts.history))
    if budget is not None and budget > len(clients):
        raise InvalidInput(f"[run]: a budget of {budget} is more than the {len(clients)} clients there are.")
    if first.parts.validation_every and not first.simulator.examples.has("validation"):
        raise InvalidInput(
            "[run]: validation_every needs validation data: set holdout = 0.2 in [partition], or a split with a share "
            "for validation."
        )


def compute(
    store: Store,
    run_id: int,
    rounds: int,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    on_round: Callable[[int, float | None], None] = lambda done, accuracy: None,
) -> str:
    """Bring one run to `rounds` rounds, from its last checkpoint on.

    Returns "done"; "stopped" if `should_stop` returned True after a round; "busy" if another process computes the run.
    """
    try:
        with store.computing(run_id):
            return _compute(store, run_id, rounds, should_stop, on_round)
    except RunLeased:
        return "busy"


def _compute(
    store: Store,
    run_id: int,
    rounds: int,
    should_stop: Callable[[], bool],
    on_round: Callable[[int, float | None], None],
) -> str:
    run = store.run(run_id)
    try:
        # Another process may have finished it: then there is nothing to build.
        computed = build(run.settings) if run.rounds_done < rounds else None
        done, content = store.resume(run_id)
        status = "done"
        if done < rounds:
            computed = computed or build(run.settings)
            if content is not None:
                refuse_changed_files(run.manifest, run.settings)
                _refuse_other_makers(run.manifest, computed)
                computed.restore(content)
            _describe(store, run_id, computed, run.manifest)
            status = _commit_rounds(store, run_id, computed, rounds, should_stop, on_round)
        if status == "done" and store.torn([run_id]):
            raise Damage(f"Run {run_id} has lost rows. Compute it again with: fedpick verify --repair")
        store.release(run_id, status=status, error=None)
    except (RunLeased, StoreLocked):
        raise  # nothing can be said in the store
    except BaseException as error:
        # After Ctrl-C in the middle of a round the run resumes from its last checkpoint.
        stopped = isinstance(error, KeyboardInterrupt)
        text = f"{type(error).__name__}: {error}"
        with suppress(sa.exc.SQLAlchemyError, StoreError):  # if the store itself failed, the first error says so
            store.release(run_id, status="stopped" if stopped else "failed", error=None if stopped else text)
        raise
    return status


def _commit_rounds(
    store: Store,
    run_id: int,
    run: FederatedRun,
    rounds: int,
    should_stop: Callable[[], bool],
    on_round: Callable[[int, float | None], None],
) -> str:
    cost, latest, clock = 0.0, -float("inf"), time.perf_counter()
    accuracy: float | None = None
    for record in run.rounds(rounds):
        finished = record.index + 1 >= rounds
        stopping = should_stop() and not finished
        start = time.perf_counter()
        due = finished or stopping or start - latest >= _CHECKPOINT_SHARE * cost
        content = run.checkpoint() if due else None
        accuracies = run.client_accuracies() if finished else None
        store.write_round(run_id, record, checkpoint=content, wall_seconds=start - clock, accuracies=accuracies)
        clock = time.perf_counter()
        if due:
            latest, cost = clock, clock - start
        accuracy = record.test_accuracy if record.test_accuracy is not None else accuracy
        on_round(record.index + 1, accuracy)
        if finished or stopping:
            return "done" if finished else "stopped"
    raise StateFileError("The simulation ended before the last round.")


def _refuse_other_makers(manifest: Mapping[str, Any], run: FederatedRun) -> None:
    """Raise if the run was begun by another version, or with another split of the work: rows would differ."""
    begun = manifest.get("versions", {}).get("fedpick")
    if begun not in (None, fedpick.__version__):
        raise StoreError(
            f"This run was begun with fedpick {begun}; this is {fedpick.__version__}. Go on with that version, or "
            "start the run over with --restart."
        )
    for name, fact in run.facts.items():
        if name in manifest and name != "files" and to_json(manifest[name]) != to_json(fact):
            raise StoreError(
                f"This run was begun with the {name} {to_json(manifest[name])}; here it is {to_json(fact)}. Go on on a "
                "machine like the first (shards follow its cores), or start the run over with --restart."
            )


def _describe(store: Store, run_id: int, run: FederatedRun, manifest: Mapping[str, Any]) -> None:
    row = dict(run.federation)
    policy = run.session.policy
    store.update_run(
        run_id,
        federation_id=store.put_federation(row.pop("key"), **row),
        parameters=to_json(parameters(policy), finite=False),
        reference=type(policy).reference,
        model_bytes=run.simulator.model_bytes,
        manifest=to_json(manifest or new_manifest(*_PACKAGES, **run.facts)),
        status="running",
        error=None,
    )
