"""Record the rounds of any training loop in the store, so that tables, report and verdict work on them.

    with Recorder("results/fedpick.sqlite", session, experiment="hospitals") as recorder:
        for _ in range(20):
            selection = session.ask(budget=10)
            outcome = train(selection)
            session.tell(outcome)
            recorder.round(selection, outcome, test_accuracy=evaluate())
            session.save("run/policy")

The store holds the same records as for simulated runs, with checksums and one writer per run. What the loop does not
report is missing in the report. A `Recorder` is a `Callback`: drivers that take callbacks record with it too.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpick.core import checkpoint, registry
from fedpick.core.errors import InvalidInput, OutOfOrder
from fedpick.core.record import Callback, Counters, RoundRecord, Timings
from fedpick.core.session import Session, in_order_of, policy_name, with_notes
from fedpick.core.types import Clients, Outcome, Selection, aggregation_weights, as_floats
from fedpick.core.validation import whole
from fedpick.experiments.encoding import from_json, has_control_characters, to_json
from fedpick.experiments.manifest import new_manifest
from fedpick.experiments.schema import sa
from fedpick.experiments.store import Store, StoreError

__all__ = ["Recorder"]

# A checkpoint is written when the rounds since the last one took this many times longer than writing it.
_CHECKPOINT_SHARE = 10.0
_NOT_TIMED = Timings(select=np.nan, measure=np.nan, train=np.nan, evaluate=np.nan)


class Recorder(Callback):
    """Writes the rounds of one session to a store, as one run of an experiment.

    Args:
        store: an open store, or its path or URL; the file is created if it is missing.
        session: the session whose rounds are recorded. None: a driver passes it to `on_start`.
        experiment: the title. Runs with the same title, of other policies or seeds, are compared in one report.
        label: what tables call the policy; default: its name.
        rounds: how many rounds the run is to have, for progress; None: not known.
        restart: discard the stored rounds of this run and begin anew.
        callbacks: further callbacks, which get the same calls.

    A run is identified by experiment, label, policy, hyper-parameters and seed. A session that goes on from a save
    (`Session.load`) goes on in the store: rounds that were recorded after the save are dropped and recorded again.
    """

    def __init__(
        self,
        store: Store | str | Path,
        session: Session | None = None,
        *,
        experiment: str,
        label: str | None = None,
        rounds: int | None = None,
        restart: bool = False,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        for name, text in (("experiment", experiment), ("label", label)):
            if text is not None and (not isinstance(text, str) or not text.strip() or has_control_characters(text)):
                raise InvalidInput(f"Recorder: {name} must be text of one line. Got {text!r}.")
        self.experiment, self.label, self.restart = experiment, label, restart
        self.rounds = whole("Recorder", "rounds", 1, optional=True, value=rounds)
        self.callbacks = tuple(callbacks)
        self.run_id: int | None = None
        """The run in the store, once it has begun."""
        self._where = store
        self._session: Session | None = None
        self._open = ExitStack()
        self._store: Store
        self._clients: Clients
        self._counters = Counters()
        self._checkpoint = (-np.inf, 0.0)
        """When the latest one was written, and how long that took."""
        if session is not None:
            self.on_start(session)

    # Begin and end

    def on_start(self, session: Session) -> None:
        """Begin or resume the run of this session. Raise if another process records it."""
        if self._session is not None:
            raise OutOfOrder("This recorder has begun already. Make a Recorder for each session.")
        if self.restart and session.round:
            raise InvalidInput(
                f"restart=True records the run anew, but the session is in round {session.round}. Pass a session in "
                "round 0, or leave restart out to go on."
            )
        policy = from_json(to_json(registry.parameters(session.policy), finite=False))
        name = policy_name(session.policy)
        with ExitStack() as stack:
            if isinstance(self._where, Store):
                self._store = self._where
            else:
                self._store = Store(self._where)
                stack.callback(self._store.close)
            run_id = self._store.register_recorded(
                self.experiment,
                {"name": name, **policy},
                label=self.label or name,
                seed=session.seed,
                rounds=self.rounds,
            )
            if self.restart:
                self._store.restart(run_id)
            stack.enter_context(self._store.computing(run_id))
            self._resume(run_id, session)
            self._open = stack.pop_all()
        self.run_id, self._session, self._clock = run_id, session, time.perf_counter()
        for callback in self.callbacks:
            callback.on_start(session)

    def _resume(self, run_id: int, session: Session) -> None:
        run = self._store.run(run_id)
        if session.round > run.rounds_done:
            raise InvalidInput(
                f"The session is in round {session.round}, but the store has {run.rounds_done} rounds of this run. "
                "Record a session from its first round on."
            )
        if run.rounds_done and session.round == 0:
            raise InvalidInput(
                f"The experiment {self.experiment!r} has {run.rounds_done} rounds of {run.policy} with seed "
                f"{run.seed} already. Go on from a saved session (Session.load), choose another experiment or label, "
                "or pass restart=True to record the run anew."
            )
        self._store.resume(run_id, session.round)
        if session.round:
            columns = self._store.rounds(run_id)
            self._counters = Counters(**{item.name: int(columns[item.name][-1]) for item in fields(Counters)})
        self._set_clients(run_id, session.clients)
        self._store.update_run(
            run_id,
            parameters=to_json(registry.parameters(session.policy), finite=False),
            reference=type(session.policy).reference,
            manifest=to_json(run.manifest or new_manifest("numpy", "scipy", "sqlalchemy", "flwr")),
            status="running",
            error=None,
        )

    def _set_clients(self, run_id: int, clients: Clients) -> None:
        """Store the table of clients as it is now."""
        histogram = clients.label_histogram
        row: dict[str, Any] = {
            "data": self.experiment,
            "partition": "recorded",
            "num_clients": len(clients),
            "num_classes": 0 if histogram is None else histogram.shape[1],
            "num_examples": clients.num_examples.astype("<f8").tobytes(),
            "label_histogram": None if histogram is None else np.round(histogram).astype("<i4").tobytes(),
        }
        digest = hashlib.sha256()
        for value in row.values():
            digest.update(value if isinstance(value, bytes) else f"{value}\n".encode())
        federation = self._store.put_federation(digest.hexdigest(), **row)
        if self._store.run(run_id).federation_id != federation:
            self._store.replace_federation(run_id, federation)
        self._clients = clients

    def on_end(self, error: BaseException | None = None) -> None:
        """End the run: "done", "stopped" if rounds are missing or Ctrl-C was pressed, or "failed" with the error."""
        if self._session is None:
            return
        session, run_id = self._session, self._run_id
        self._session = None
        try:
            stopped = isinstance(error, KeyboardInterrupt)
            failed = error is not None and not stopped
            with suppress(
                *((sa.exc.SQLAlchemyError, StoreError) if error else ())
            ):  # the first error is the one to show
                if session.clients is not self._clients:
                    self._set_clients(run_id, session.clients)
                missing = self.rounds is not None and self._store.run(run_id).rounds_done < self.rounds
                self._store.release(
                    run_id,
                    status="failed" if failed else "stopped" if stopped or missing else "done",
                    error=f"{type(error).__name__}: {error}" if failed else None,
                )
        finally:
            self._open.close()
            for callback in self.callbacks:
                callback.on_end(error)

    def close(self) -> None:
        """End the run, as leaving a `with` block does."""
        self.on_end()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.on_end(error)

    @property
    def _run_id(self) -> int:
        assert self.run_id is not None
        return self.run_id

    # Rounds

    @property
    def counters(self) -> Counters:
        """Communication up to the latest recorded round; `recorder.counters.plus(model_bytes, models_down=10, ...)`."""
        return self._counters

    def round(
        self,
        selection: Selection,
        outcome: Outcome,
        *,
        available: ArrayLike | None = None,
        weights: ArrayLike | None = None,
        test_accuracy: float | None = None,
        test_loss: float | None = None,
        objective: float | None = None,
        local_accuracy: float | None = None,
        losses: ArrayLike | None = None,
        accuracies: ArrayLike | None = None,
        counters: Counters | None = None,
        seconds: Timings | None = None,
    ) -> RoundRecord:
        """Record a round after `session.tell(outcome)`, and before `session.save`. Return the record.

        Args:
            selection: what `session.ask` returned.
            outcome: what the session was told.
            available: (N,) mask of the clients that could be reached; None: all.
            weights: (k,) weight of each update in the new model; None: `fedpick.aggregation_weights`.
            test_accuracy: of the new model on a central test set; likewise `test_loss`.
            objective: mean loss of all clients, weighted by importance.
            local_accuracy: mean accuracy on the clients' own data, weighted by importance.
            losses: (N,) the loss of every client; NaN: not measured.
            accuracies: (N,) the accuracy of every client on its own data, for the report on fairness; NaN likewise.
            counters: communication since the start of the run; None: as in the round before.
            seconds: how long the parts of the round took.
        """
        session = self._begun()
        size = len(session.clients)
        given = {"losses": losses, "accuracies": accuracies}
        arrays = {name: _per_client(values, name, size) for name, values in given.items() if values is not None}
        mask = np.ones(size, bool) if available is None else np.asarray(available)
        if mask.dtype != np.bool_ or mask.shape != (size,):
            raise InvalidInput(
                f"available must be a boolean mask of the {size} clients. Got {mask.dtype} {mask.shape}."
            )
        told = in_order_of(selection.clients, outcome.of_selected())
        used = aggregation_weights(selection, told.completed, session.clients)
        if weights is not None:
            used = as_floats(weights, "weights")
            if used.shape != (len(selection.clients),):
                raise InvalidInput(
                    f"weights must have one entry for each of the {len(selection.clients)} selected clients. "
                    f"Got the shape {used.shape}."
                )
        record = RoundRecord(
            index=outcome.index,
            selection=with_notes(selection, session.notes),
            outcome=told,
            weights=used,
            available=mask,
            counters=counters or self._counters,
            seconds=seconds or _NOT_TIMED,
            test_accuracy=test_accuracy,
            test_loss=test_loss,
            objective=objective,
            local_accuracy=local_accuracy,
            evaluation=arrays,
        )
        self.on_round(record)
        return record

    def on_round(self, record: RoundRecord) -> None:
        """Record a round that a driver describes, such as one of `fedpick.sim.simulate`."""
        session = self._begun()
        if session.round != record.index + 1:
            raise OutOfOrder(
                f"Round {record.index} cannot be recorded while the session is in round {session.round}. After "
                "session.tell(outcome), record the same round once."
            )
        if len(session.clients) != len(self._clients):
            self._set_clients(self._run_id, session.clients)
        start = time.perf_counter()
        latest, cost = self._checkpoint
        content = _checkpoint(session) if start - latest >= _CHECKPOINT_SHARE * cost else None
        self._store.write_round(self._run_id, record, checkpoint=content, wall_seconds=start - self._clock)
        self._clock = time.perf_counter()
        if content is not None:
            self._checkpoint = (self._clock, self._clock - start)
        self._counters = record.counters
        for callback in self.callbacks:
            callback.on_round(record)

    def _begun(self) -> Session:
        if self._session is None:
            raise OutOfOrder(
                "This recorder records no session. Make it with one, Recorder(store, session, experiment=...), and "
                "record before it is closed."
            )
        return self._session


def _per_client(values: ArrayLike, name: str, size: int) -> NDArray[np.float64]:
    array = as_floats(values, name)
    if array.shape != (size,):
        raise InvalidInput(f"{name} must have one entry for each of the {size} clients. Got the shape {array.shape}.")
    return array


def _checkpoint(session: Session) -> bytes:
    """The policy's state, for the report: the model is the loop's own, so the store cannot resume it."""
    arrays, plain = session.split()
    own: Mapping[str, NDArray[Any]] = {f"policy/{name}": value for name, value in arrays.items()}
    return checkpoint.pack(own, {"round": session.round, "policy": plain})
