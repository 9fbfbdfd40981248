"""The store: every result in one database, SQLite by default, any SQLAlchemy URL otherwise.

Schema, version 1. Public: scripts may read it with any SQL tool. Rounds count from 0. JSON columns are text.

`fedpick_schema`   version, written_by                                     one row
`experiments`      one row per spec (a set of policies x seeds on one setting)
    id, hash (SHA-256 of the spec, unique), title, spec (JSON, as the TOML), touched (grows with every `fedpick run`:
    the largest is the latest), touched_at (UTC)
`members`          which runs belong to an experiment; one run may belong to several
    experiment_id, position (of the policy in the spec), seed, label (of the policy), run_id
`federations`      one row per data set x partition x seed
    id, key, data, partition (names), num_clients N, num_classes L,
    num_examples  (N,) float64, label_histogram  (N, L) int32 or NULL
`runs`             one policy with one seed on one setting; the manifest
    id, key (SHA-256 of `settings`, unique), policy (registry name), parameters (JSON, all of them), seed,
    settings (JSON: everything that decides the rows), federation_id, status ("new", "running", "stopped", "done",
    "failed"), rounds_done, accuracy (latest), model_bytes, reference (BibTeX of the policy), error,
    manifest (JSON: versions, host, simulator, started_at), wall_seconds
`rounds`           one row per run and round
    run_id, round, num_available, num_selected, num_completed,
    accuracy, loss          on the test set after the round; NULL where not evaluated
    train_loss              mean over those who completed; NULL for nobody
    objective               everybody's loss weighted by importance; NULL where not measured
    local_accuracy          on the clients' own test data, weighted by importance; NULL where not measured
    models_down, updates_up, scalars_up, bytes_down, bytes_up    since the start of the run, this round included
    select_seconds, measure_seconds, train_seconds, evaluate_seconds    this round alone
    diagnostics             JSON: the plain values that the policy reported
`selections`       one row per run and round; k clients chosen
    run_id, round, clients (k,) int32, given_weights (k,) float64 as the policy gave them or NULL (it gave none),
    weights (k,) float64 as they entered the model, completed (k,) uint8, loss, train_loss, duration, update_norm
    (k,) float64 each (NaN: not reported), available: NULL (everybody), or zlib of numpy.packbits of the (N,) mask
`arrays`           larger things, where there are any
    run_id, round, name, value (zlib of a .npy file). Names: "policy/..." the arrays in the policy's diagnostics,
    "evaluation/losses" (N,) everybody's loss, "evaluation/validation" (2,) loss and accuracy on the clients'
    validation data, weighted by importance
`checkpoints`      where a run goes on: run_id, rounds_done, content (.npz of model and policy state)

Arrays without another note are raw little-endian bytes: `numpy.frombuffer(value, "<f8")`. A number NaN is NULL. In
`spec`, `settings` and `parameters`, infinity (`kappa2 = inf`) is the word Infinity, and NaN NaN, as in JSON5.

One round is one transaction: its rows, the run's progress and (mostly) the checkpoint. Where checkpoints are large they
are written less often; rows beyond the last checkpoint are then dropped on resuming and come out the same again.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import fedpick
from fedpick.core.errors import FedpickError, InvalidInput
from fedpick.experiments import DEFAULT_STORE
from fedpick.experiments import schema as tables
from fedpick.experiments.records import (
    RoundRecord,
    array_bytes,
    float_bytes,
    index_bytes,
    mask_bytes,
    split_diagnostics,
    utc_now,
)
from fedpick.experiments.schema import sa
from fedpick.experiments.spec import Spec
from fedpick.experiments.store_read import Reader

__all__ = ["Store", "StoreError", "in_a_sentence", "open_store"]


class StoreError(InvalidInput):
    """A store that cannot be used."""


def _engine_url(where: str | Path) -> sa.URL:
    text = str(where)
    if "://" not in text:
        return sa.URL.create("sqlite", database=str(Path(text).absolute()))
    try:
        url = sa.make_url(text)
    except sa.exc.ArgumentError as error:
        raise StoreError(
            f"{text!r} is not a database URL. Examples: results/a.sqlite, postgresql://host/db."
        ) from error
    # SQLAlchemy's own default for this name is the older psycopg2.
    return url.set(drivername="postgresql+psycopg") if url.drivername in ("postgresql", "postgres") else url


def _read_only(file: Path) -> sqlite3.Connection:
    """A connection that changes nothing, also to a file on a medium that cannot be written."""
    address = file.absolute().as_uri()
    # Not mode=ro: such a connection leaves the index of the write-ahead log behind, which then belongs to the reader.
    connection = sqlite3.connect(f"{address}?mode=rw", uri=True, check_same_thread=False)
    try:
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA schema_version")  # SQLite opens a file when it is first read
    except sqlite3.OperationalError:
        connection.close()
        log = file.with_name(f"{file.name}-wal")
        effective = {"effective_ids": True} if os.access in os.supports_effective_ids else {}
        if os.access(file.parent, os.W_OK, **effective) or (log.exists() and log.stat().st_size):
            raise
        # There is no place for the index of the write-ahead log; and without a log, no need of one.
        return sqlite3.connect(f"{address}?immutable=1", uri=True, check_same_thread=False)
    except BaseException:
        connection.close()
        raise
    return connection


def _set_up_sqlite(engine: sa.Engine, read_only: bool) -> None:
    pragmas = ["busy_timeout = 60000"]
    if not read_only:
        pragmas += ["journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON"]

    @sa.event.listens_for(engine, "connect")
    def on_connect(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # transactions are ours, see on_begin
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def on_begin(connection: sa.Connection) -> None:
        # A writer that starts as a reader may find itself behind another writer and can only give up; one that
        # queues from the start just waits.
        writes = connection.get_execution_options().get("fedpick_writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def open_store(where: str | Path = DEFAULT_STORE, *, create: bool = False) -> Store:
    """The store at a path or URL, for reading; with `create` also for writing, and made where there is none."""
    return Store(where, create=create, read_only=not create)


def in_a_sentence(error: BaseException) -> str:
    """What went wrong, for people: of the database's errors its own words, not the SQL around them."""
    if isinstance(error, sa.exc.DBAPIError):
        return f"The database failed: {error.orig}."
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}." if error.filename is not None else f"{error.strerror}."
    return str(error) if isinstance(error, FedpickError) else f"{type(error).__name__}: {error}"


def _require_place(file: Path, create: bool) -> None:
    """Refuse a file that is not there, or make the directory it goes to."""
    if not create and not file.exists():
        raise StoreError(f"There are no results at {file} yet. Make some: fedpick run SPEC.toml, or fedpick demo.")
    if create:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"There can be no store at {file}: {error.strerror} ({error.filename}). Name another place: --store."
            ) from error


class Store(Reader):
    """One database of results; see the module for its tables. Reading is in `Reader`."""

    def __init__(self, where: str | Path = DEFAULT_STORE, *, create: bool = True, read_only: bool = False) -> None:
        url = _engine_url(where)
        self.read_only = read_only
        self.url = url.render_as_string(hide_password=False)
        self.name = url.render_as_string(hide_password=True) if url.get_backend_name() != "sqlite" else url.database
        options: dict[str, Any] = {}
        if url.get_backend_name() == "sqlite" and url.database not in (None, ":memory:"):
            file = Path(str(url.database))
            _require_place(file, create and not read_only)
            if read_only:
                options["creator"] = partial(_read_only, file)
        try:
            engine = sa.create_engine(url, **options)
        except sa.exc.ArgumentError as error:
            raise StoreError(f"{self.name!r} is not a database URL that SQLAlchemy knows: {error}.") from error
        except ModuleNotFoundError as error:
            raise StoreError(
                f"The database {self.name} needs {error.name!r}. Install it, for PostgreSQL with: "
                "pip install 'fedpick[postgres]'"
            ) from error
        if url.get_backend_name() == "sqlite":
            _set_up_sqlite(engine, read_only)
        super().__init__(engine)
        self._writer = engine.execution_options(fedpick_writes=True)
        self._prepare(create)

    def _prepare(self, create: bool) -> None:
        try:
            version = self._version()
            if version is None:
                if not create:
                    raise StoreError(f"{self.name} holds no fedpick results.")
                with self._writer.begin() as connection:
                    tables.metadata.create_all(connection)
                    if connection.scalar(sa.select(tables.schema.c.version)) is None:
                        row = {"version": tables.SCHEMA_VERSION, "written_by": f"fedpick {fedpick.__version__}"}
                        connection.execute(tables.schema.insert(), row)
                version = self._version()
        except sa.exc.DBAPIError as error:
            raise StoreError(f"The store {self.name} cannot be opened: {error.orig}.") from error
        if version != tables.SCHEMA_VERSION:
            with self.engine.connect() as connection:
                author = connection.scalar(sa.select(tables.schema.c.written_by))
            raise StoreError(
                f"The store {self.name} has schema {version} (written by {author}); fedpick "
                f"{fedpick.__version__} reads schema {tables.SCHEMA_VERSION}. Use that version, or another store."
            )

    def _version(self) -> int | None:
        if not sa.inspect(self.engine).has_table(tables.schema.name):
            return None
        with self.engine.connect() as connection:
            return connection.scalar(sa.select(tables.schema.c.version))

    def close(self) -> None:
        """Give the connections back."""
        self.engine.dispose()

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """One transaction."""
        if self.read_only:
            raise StoreError(f"{self.name} was opened for reading. Open it with Store(...) to write.")
        with self._writer.begin() as connection:
            yield connection

    # Experiments and runs

    def register(self, spec: Spec) -> int:
        """Put an experiment and its runs down; what is there already stays. Its id."""
        with self.writing() as connection:
            touched = (connection.scalar(sa.select(sa.func.max(tables.experiments.c.touched))) or 0) + 1
            values = {
                "title": spec.title,
                "spec": json.dumps(spec.to_dict()),
                "touched": touched,
                "touched_at": utc_now(),
            }
            found = connection.scalar(sa.select(tables.experiments.c.id).where(tables.experiments.c.hash == spec.hash))
            if found is None:
                found = _insert(connection, tables.experiments, hash=spec.hash, **values)
            else:
                connection.execute(tables.experiments.update().where(tables.experiments.c.id == found), values)
            connection.execute(tables.members.delete().where(tables.members.c.experiment_id == found))
            for seed in spec.seeds:
                for position, policy in enumerate(spec.policies):
                    run_id = self._register_run(connection, spec.settings_of(policy, seed), spec.run_key(policy, seed))
                    connection.execute(
                        tables.members.insert(),
                        {
                            "experiment_id": found,
                            "position": position,
                            "seed": seed,
                            "label": policy.label,
                            "run_id": run_id,
                        },
                    )
        return int(found)

    def _register_run(self, connection: sa.Connection, settings: Mapping[str, Any], key: str) -> int:
        found = connection.scalar(sa.select(tables.runs.c.id).where(tables.runs.c.key == key))
        if found is not None:
            return int(found)
        parameters = {name: value for name, value in settings["policy"].items() if name != "name"}
        return _insert(
            connection,
            tables.runs,
            key=key,
            policy=settings["policy"]["name"],
            parameters=json.dumps(parameters),
            seed=settings["seed"],
            settings=json.dumps(settings, sort_keys=True),
            status="new",
            rounds_done=0,
            wall_seconds=0.0,
        )

    def put_federation(self, key: str, **values: Any) -> int:
        """The id of a federation, written down if it is new. See the table for the values."""
        with self.writing() as connection:
            found = connection.scalar(sa.select(tables.federations.c.id).where(tables.federations.c.key == key))
            return int(found) if found is not None else _insert(connection, tables.federations, key=key, **values)

    def update_run(self, run_id: int, **values: Any) -> None:
        """Change facts about a run: status, manifest, error, ..."""
        with self.writing() as connection:
            connection.execute(tables.runs.update().where(tables.runs.c.id == run_id), values)

    # Rounds

    def resume(self, run_id: int) -> tuple[int, bytes | None]:
        """(rounds done, checkpoint) to go on from; rows beyond the checkpoint are dropped."""
        with self.writing() as connection:
            row = connection.execute(
                sa.select(tables.checkpoints).where(tables.checkpoints.c.run_id == run_id)
            ).one_or_none()
            done, content = (row.rounds_done, row.content) if row else (0, None)
            self._drop_rounds(connection, run_id, done)
        return int(done), content

    def restart(self, run_id: int) -> None:
        """Forget everything a run has done."""
        with self.writing() as connection:
            connection.execute(tables.checkpoints.delete().where(tables.checkpoints.c.run_id == run_id))
            self._drop_rounds(connection, run_id, 0)
            values = {"status": "new", "error": None, "wall_seconds": 0.0, "accuracy": None, "manifest": None}
            connection.execute(tables.runs.update().where(tables.runs.c.id == run_id), values)

    def _drop_rounds(self, connection: sa.Connection, run_id: int, first: int) -> None:
        for table in (tables.arrays, tables.selections, tables.rounds):
            connection.execute(table.delete().where(table.c.run_id == run_id, table.c.round >= first))
        connection.execute(tables.runs.update().where(tables.runs.c.id == run_id), {"rounds_done": first})

    def write_round(
        self, run_id: int, record: RoundRecord, *, checkpoint: bytes | None, wall_seconds: float = 0.0
    ) -> None:
        """Commit one round: rows, progress and, where given, the checkpoint after it."""
        text, found = split_diagnostics(record.diagnostics)
        stored = {f"policy/{name}": value for name, value in found.items()}
        stored |= {f"evaluation/{name}": value for name, value in record.evaluation.items()}
        key = {"run_id": run_id, "round": record.index}
        progress = {"run": run_id, "done": record.index + 1, "spent": wall_seconds}
        try:
            with self.writing() as connection:
                connection.execute(_NEW_ROUND, {**key, **_round_row(record), "diagnostics": text})
                connection.execute(_NEW_SELECTION, {**key, **_selection_row(record)})
                for name, value in stored.items():
                    connection.execute(tables.arrays.insert(), {**key, "name": name, "value": array_bytes(value)})
                if checkpoint is not None:
                    _put_checkpoint(connection, run_id, record.index + 1, checkpoint)
                connection.execute(_PROGRESS, {**progress, "latest": _number(record.test_accuracy)})
        except sa.exc.IntegrityError as error:
            raise StoreError(
                f"Round {record.index} of run {run_id} is in {self.name} already: is another process working on this "
                "experiment? Let it finish, or give this one another --store."
            ) from error


# Made once: made anew for every round they took more than a third of the time it takes to write one.
_NEW_ROUND, _NEW_SELECTION = tables.rounds.insert(), tables.selections.insert()
_PROGRESS = (
    tables.runs.update()
    .where(tables.runs.c.id == sa.bindparam("run"))
    .values(
        rounds_done=sa.bindparam("done"),
        wall_seconds=tables.runs.c.wall_seconds + sa.bindparam("spent"),
        accuracy=sa.func.coalesce(sa.bindparam("latest", type_=sa.Float), tables.runs.c.accuracy),
    )
)


def _put_checkpoint(connection: sa.Connection, run_id: int, rounds_done: int, content: bytes) -> None:
    values = {"rounds_done": rounds_done, "content": content}
    changed = connection.execute(tables.checkpoints.update().where(tables.checkpoints.c.run_id == run_id), values)
    if changed.rowcount == 0:
        connection.execute(tables.checkpoints.insert(), {"run_id": run_id, **values})


def _insert(connection: sa.Connection, table: sa.Table, **values: Any) -> int:
    result = connection.execute(table.insert(), values)
    assert result.inserted_primary_key is not None
    return int(result.inserted_primary_key[0])


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _round_row(record: RoundRecord) -> dict[str, Any]:
    reported = record.train_loss[record.completed & np.isfinite(record.train_loss)]
    return {
        "num_available": int(np.count_nonzero(record.available)),
        "num_selected": len(record.clients),
        "num_completed": int(np.count_nonzero(record.completed)),
        "accuracy": _number(record.test_accuracy),
        "loss": _number(record.test_loss),
        "train_loss": float(reported.mean()) if len(reported) else None,
        "objective": _number(record.objective),
        "local_accuracy": _number(record.local_accuracy),
        **{name: int(value) for name, value in record.counters.items()},
        **{f"{name}_seconds": float(value) for name, value in record.seconds.items()},
    }


def _selection_row(record: RoundRecord) -> dict[str, Any]:
    return {
        "clients": index_bytes(record.clients),
        "given_weights": None if record.given_weights is None else float_bytes(record.given_weights),
        "weights": float_bytes(record.weights),
        "completed": record.completed.astype(np.uint8).tobytes(),
        **{name: float_bytes(getattr(record, name)) for name in ("loss", "train_loss", "duration", "update_norm")},
        "available": mask_bytes(record.available),
    }
