"""The store: every result in one database, SQLite by default, any SQLAlchemy URL otherwise.

`fedpick.experiments.schema` describes the tables, which are public: scripts may read them with any SQL tool. One round
is one transaction: its rows, the progress of the run and, mostly, the checkpoint.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

import fedpick
from fedpick.core import checkpoint
from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.core.errors import FedpickError, InvalidInput
from fedpick.core.record import Counters, RoundRecord, Timings
from fedpick.core.types import Outcome, Selection
from fedpick.experiments import DEFAULT_STORE, leases
from fedpick.experiments import schema as tables
from fedpick.experiments.encoding import (
    array_bytes,
    bytes_array,
    float_bytes,
    floats_from,
    from_json,
    index_bytes,
    indices_from,
    mask_bytes,
    mask_from,
    masks_from,
    split_diagnostics,
    table_from_json,
    utc_now,
    without_control_characters,
)
from fedpick.experiments.integrity import Damage, link, start_of_chain, verify_rounds
from fedpick.experiments.leases import RunLeased
from fedpick.experiments.schema import sa
from fedpick.experiments.spec import Spec, canonical_json, digest_of

__all__ = [
    "Choices",
    "ClientAccuracies",
    "Experiment",
    "FederationFacts",
    "Progress",
    "Run",
    "Store",
    "StoreError",
    "StoreLocked",
    "damage_in_words",
    "in_a_sentence",
    "open_store",
    "opened",
    "public_name",
]

_LOCK_SECONDS = 30
"""How long SQLite waits for another program's lock."""
_BATCH_ROUNDS, _BATCH_CELLS = 2048, 2**20
"""Rounds, and rounds x clients, that `Store.choices` reads at a time."""
_LARGEST_SEED = 2**63 - 1
"""Of a database's integers; sessions take twice as many."""
_BEGIN_WRITING = "BEGIN IMMEDIATE"
"""In SQLite: a transaction that began as a reader could fail when it writes; this one waits."""
_QUEUE = 7_305_811_204
"""The advisory lock of PostgreSQL by which transactions queue; see `Store.writing`."""


class StoreError(InvalidInput):
    """A store that cannot be used."""


class StoreLocked(StoreError):
    """A store that another program keeps locked."""


def _engine_url(where: str | Path) -> sa.URL:
    text = str(where)
    if "://" not in text:
        return sa.URL.create("sqlite", database=str(Path(text).absolute()))
    try:
        url = sa.make_url(text)
    except (sa.exc.ArgumentError, ValueError):  # ValueError: a port that is no number
        # Neither the text nor the first error is shown: both may hold a password.
        raise StoreError(
            f"{public_name(text)} is not a database URL. Expected SCHEME://USER:PASSWORD@HOST:PORT/DATABASE, special "
            "characters percent-encoded. Examples: results/a.sqlite, postgresql://host/db."
        ) from None
    # SQLAlchemy's own default for this name is the older psycopg2.
    return url.set(drivername="postgresql+psycopg") if url.drivername in ("postgresql", "postgres") else url


def public_name(where: str | Path) -> str:
    """The place of a store without its passwords, for messages."""
    text = str(where)
    if "://" not in text:
        return text
    try:
        url = sa.make_url(text)
    except (sa.exc.ArgumentError, ValueError):
        return f"{text.partition('://')[0]}://..."
    secrets = {key: "..." for key in url.query if "password" in key.lower()}
    return url.update_query_dict(secrets).render_as_string(hide_password=True)


def _read_only(file: Path) -> sqlite3.Connection:
    """Open a connection that changes nothing, even on a read-only medium."""
    address = file.absolute().as_uri()
    # Not mode=ro: it leaves the index of the write-ahead log behind, owned by the reader.
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
        # The index of the write-ahead log cannot be created; without a log it is not needed.
        return sqlite3.connect(f"{address}?immutable=1", uri=True, check_same_thread=False)
    except BaseException:
        connection.close()
        raise
    return connection


def _set_up_sqlite(engine: sa.Engine, read_only: bool) -> None:
    pragmas = [f"busy_timeout = {1000 * _LOCK_SECONDS}"]
    if not read_only:
        pragmas += ["journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON"]

    @sa.event.listens_for(engine, "connect")
    def on_connect(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # on_begin starts the transactions
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def on_begin(connection: sa.Connection) -> None:
        writes = connection.get_execution_options().get("fedpick_writes", False)
        connection.exec_driver_sql(_BEGIN_WRITING if writes else "BEGIN")


def open_store(where: str | Path = DEFAULT_STORE, *, create: bool = False) -> Store:
    """Open the store at a path or URL for reading; with `create` also for writing, creating it if it is missing."""
    return Store(where, create=create, read_only=not create)


@contextmanager
def opened(store: Store | str | Path) -> Iterator[Store]:
    """Open the store at a path or URL for the duration of the block; pass an open store through."""
    if isinstance(store, Store):
        yield store
        return
    own = open_store(store)
    try:
        yield own
    finally:
        own.close()


def in_a_sentence(error: BaseException) -> str:
    """Describe an error in a sentence: of a database error the message without the SQL around it."""
    if isinstance(error, sa.exc.DBAPIError):
        return f"The database failed: {error.orig}."
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}." if error.filename is not None else f"{error.strerror}."
    return str(error) if isinstance(error, FedpickError) else f"{type(error).__name__}: {error}"


def _require_place(file: Path, create: bool) -> None:
    """Raise if the file is missing, or create its directory."""
    if not create and not file.exists():
        raise StoreError(f"There are no results at {file} yet. Make some: fedpick run SPEC.toml, or fedpick demo.")
    if create:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"There can be no store at {file}: {error.strerror} ({error.filename}). Name another place: --store."
            ) from error


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One spec in the store."""

    id: int
    hash: str
    title: str
    spec: Mapping[str, Any]
    """As the TOML file: spec["run"]["targets"], ..."""
    touched_at: str

    @property
    def rounds(self) -> int:
        """How many rounds it wants. A run that it shares with another experiment may have more."""
        return int(self.spec["run"]["rounds"])

    @property
    def recorded(self) -> bool:
        """Whether a `Recorder` wrote it: fedpick cannot compute its runs."""
        return "recorded" in self.spec

    @property
    def targets(self) -> tuple[float, ...]:
        """The accuracies of the rounds-to-target table."""
        return tuple(self.spec["run"].get("targets", ()))

    @property
    def loss_targets(self) -> tuple[float, ...]:
        """Likewise for the global training loss."""
        return tuple(self.spec["run"].get("loss_targets", ()))


@dataclass(frozen=True, kw_only=True)
class Run:
    """One policy with one seed, as a member of an experiment."""

    id: int
    key: str
    label: str
    """What the experiment calls the policy: the line in tables."""
    position: int
    """Of the policy in the spec: the order in tables."""
    policy: str
    parameters: Mapping[str, Any]
    seed: int
    settings: Mapping[str, Any]
    federation_id: int | None
    status: str
    rounds_done: int
    accuracy: float | None
    model_bytes: int | None
    reference: str
    error: str | None
    manifest: Mapping[str, Any]
    wall_seconds: float


@dataclass(frozen=True, kw_only=True, eq=False)
class FederationFacts:
    """What the clients have."""

    id: int
    data: str
    partition: str
    num_clients: int
    num_classes: int
    num_examples: FloatArray
    """(N,)"""
    label_histogram: NDArray[np.int32] | None
    """(N, L)"""


class Choices(NamedTuple):
    """Who was chosen in B consecutive rounds, and what came of it; K choices in all, round by round."""

    first: int
    """The first of the rounds."""
    row: IntArray
    """(K,) round of each choice, counted from `first`."""
    clients: IntArray
    """(K,)"""
    weights: FloatArray
    """(K,) with which the updates entered the model."""
    completed: BoolArray
    """(K,)"""
    available: BoolArray
    """(B, N)"""

    def per_round(self, values: NDArray[Any]) -> FloatArray:
        """(B,) sum of a value of each choice over the choices of a round."""
        return np.bincount(self.row, values, len(self.available)).astype(np.float64)


class Progress(NamedTuple):
    """How far one run of an experiment is."""

    run_id: int
    label: str
    seed: int
    status: str
    rounds_done: int
    accuracy: float | None


class ClientAccuracies(NamedTuple):
    """How good a model is for each client."""

    rounds: int
    """Rounds done when it was measured."""
    part: str
    """The clients' data it was measured on: "test", "validation", "train", or "own" if a loop of the user did."""
    values: FloatArray
    """(N,) accuracies; NaN for a client without such data."""


Method = TypeVar("Method", bound=Callable[..., Any])


@contextmanager
def damage_in_words(store: Store) -> Iterator[None]:
    """Raise StoreError for whatever a damaged database makes SQLite, JSON or NumPy raise."""
    try:
        yield
    except FedpickError:
        raise
    except (
        *(sa.exc.SQLAlchemyError, ArithmeticError, AssertionError, AttributeError, LookupError),
        *(MemoryError, TypeError, ValueError),
    ) as error:
        raise StoreError(
            f"The store {store.name} is damaged or cannot be read. {in_a_sentence(error)} Restore it from a "
            "backup, or compute the experiment again into another --store."
        ) from error


def _reads(method: Method) -> Method:
    """Put a method of Store into `damage_in_words`."""
    if inspect.isgeneratorfunction(method):

        def reading(self: Store, *args: Any, **options: Any) -> Any:
            with damage_in_words(self):
                yield from method(self, *args, **options)
    else:

        def reading(self: Store, *args: Any, **options: Any) -> Any:
            with damage_in_words(self):
                return method(self, *args, **options)

    return cast(Method, wraps(method)(reading))


class Store:
    """One database of results."""

    def __init__(self, where: str | Path = DEFAULT_STORE, *, create: bool = True, read_only: bool = False) -> None:
        url = _engine_url(where)
        self.read_only = read_only
        self.url = url.render_as_string(hide_password=False)
        self.name = public_name(where) if url.get_backend_name() != "sqlite" else url.database
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
        self.engine = engine
        self._writer = engine.execution_options(fedpick_writes=True)
        self._owner = leases.new_owner()
        self._digests: dict[int, bytes | None] = {}
        """Run whose lease this store holds -> the digest of its latest round."""
        self._compiled: dict[sa.UpdateBase, Any] = {}
        """Statement -> its text for this database; see `_writing_by_driver`."""
        self._has_all_columns = False
        self._prepare(create)

    def __repr__(self) -> str:
        return f"Store({self.name!r}{', read_only=True' if self.read_only else ''})"

    def _prepare(self, create: bool) -> None:
        try:
            version = self._version()
            if version is None and not create:
                raise StoreError(f"{self.name} holds no fedpick results.")
            if not self.read_only and version in (None, tables.SCHEMA_VERSION) and not self._is_complete():
                with self.writing(queue=True) as connection:
                    tables.metadata.create_all(connection)
                    tables.add_younger_columns(connection)
                    if connection.scalar(sa.select(tables.schema.c.version)) is None:
                        row = {"version": tables.SCHEMA_VERSION, "written_by": f"fedpick {fedpick.__version__}"}
                        connection.execute(tables.schema.insert(), row)
                version = self._version()
        except (sa.exc.SQLAlchemyError, sqlite3.Error, UnicodeDecodeError) as error:
            raise StoreError(f"The store {self.name} cannot be opened. {in_a_sentence(error)}") from error
        if version != tables.SCHEMA_VERSION:
            raise StoreError(
                f"The store {self.name} has schema {version} (written by {self._author()}); fedpick "
                f"{fedpick.__version__} reads schema {tables.SCHEMA_VERSION}. Use that version, or another store."
            )

    @_reads
    def _author(self) -> str:
        with self.engine.connect() as connection:
            return without_control_characters(str(connection.scalar(sa.select(tables.schema.c.written_by))))

    def _version(self) -> int | None:
        if not sa.inspect(self.engine).has_table(tables.schema.name):
            return None
        with self.engine.connect() as connection:
            return connection.scalar(sa.select(tables.schema.c.version))

    def _is_complete(self) -> bool:
        """Whether the database has all tables and columns of this version."""
        with self.engine.connect() as connection:
            has_tables = set(tables.metadata.tables) <= set(sa.inspect(connection).get_table_names())
            return has_tables and not tables.missing_columns(connection)

    def close(self) -> None:
        """Close the connections."""
        self.engine.dispose()

    @contextmanager
    def writing(self, *, queue: bool = False) -> Iterator[sa.Connection]:
        """One transaction. With `queue` it waits for others of its kind, as every writer does in SQLite."""
        with self._refusals(), self._writer.begin() as connection:
            if queue and connection.dialect.name == "postgresql":
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_QUEUE)))
            yield connection

    @contextmanager
    def _writing_by_driver(self) -> Iterator[Callable[[sa.UpdateBase, Mapping[str, Any]], int]]:
        """One transaction as a function that executes a constant of this module and returns how many rows it changed.

        The statements are compiled once and go to the driver: with SQLAlchemy in between, a round took twice as long.
        """
        with self._refusals():
            dialect, connection = self.engine.dialect, self.engine.raw_connection()
            cursor = connection.cursor()
            try:
                if dialect.name == "sqlite":
                    cursor.execute(_BEGIN_WRITING)

                def execute(statement: sa.UpdateBase, values: Mapping[str, Any]) -> int:
                    if statement not in self._compiled:
                        self._compiled[statement] = statement.compile(dialect=dialect)
                    compiled = self._compiled[statement]
                    names = compiled.positiontup
                    cursor.execute(compiled.string, values if names is None else [values[name] for name in names])
                    return cursor.rowcount

                yield execute
                connection.commit()
            except dialect.loaded_dbapi.Error as error:
                if dialect.is_disconnect(error, connection.driver_connection, cursor):
                    connection.invalidate(error)
                raise sa.exc.DBAPIError(None, None, error) from error
            finally:
                connection.close()  # without a commit this rolls back

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Raise StoreError if the store was opened for reading or is locked."""
        if self.read_only:
            raise StoreError(f"{self.name} was opened for reading. Open it with Store(...) to write.")
        try:
            yield
        except sa.exc.DBAPIError as error:
            if isinstance(error.orig, sqlite3.OperationalError) and "locked" in str(error.orig):
                raise StoreLocked(
                    f"Another program has kept the store {self.name} locked for {_LOCK_SECONDS} s. Close it or end its "
                    f"transaction, then run the same command again. `fuser {self.name}` shows which program it is."
                ) from error
            raise

    # Experiments and runs

    def register(self, spec: Spec, *, latest: bool = True) -> int:
        """Add an experiment and its runs, keep those that exist, and return its id.

        With `latest` False it comes after all others in `experiments`.
        """
        with self.writing(queue=True) as connection:
            touched = (connection.scalar(sa.select(sa.func.max(tables.experiments.c.touched))) or 0) + 1
            touched = touched if latest else 0
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

    def register_recorded(
        self, title: str, policy: Mapping[str, Any], *, label: str, seed: int, rounds: int | None
    ) -> int:
        """Add a run to the recorded experiment of this title, or find it there, and return its id.

        `policy` holds the name and the hyper-parameters. `rounds` None: as many as will be recorded.
        """
        own = {"name": policy["name"], "label": label, **policy}
        settings = {"recorded": title, "label": label, "policy": dict(policy), "seed": seed}
        with self.writing(queue=True) as connection:
            columns = tables.experiments.c
            rows = connection.execute(sa.select(columns.id, columns.spec).where(columns.title == title))
            known = [(row.id, from_json(row.spec)) for row in rows]
            nothing: tuple[int | None, dict[str, Any]] = (None, {"run": {}, "policies": []})
            found, spec = next(((number, each) for number, each in known if each.get("recorded")), nothing)
            policies = {each["label"]: each for each in spec["policies"]}
            if canonical_json(policies.setdefault(label, own)) != canonical_json(own):
                raise InvalidInput(
                    f"The experiment {title!r} has {label!r} with other hyper-parameters: "
                    f"{json.dumps(policies[label])}. Give this policy a label of its own: Recorder(..., label=...)."
                )
            length = max(spec["run"].get("rounds", 0), rounds or 0)
            spec = {
                "title": title,
                "recorded": title,
                "run": {
                    "seeds": sorted({*spec["run"].get("seeds", []), seed}),
                    **({"rounds": length} if length else {}),
                },
                "policies": list(policies.values()),
            }
            values = {
                "hash": digest_of(spec, without="title"),
                "title": title,
                "spec": json.dumps(spec),
                "touched": (connection.scalar(sa.select(sa.func.max(columns.touched))) or 0) + 1,
                "touched_at": utc_now(),
            }
            if found is None:
                found = _insert(connection, tables.experiments, **values)
            else:
                connection.execute(tables.experiments.update().where(columns.id == found), values)
            run_id = self._register_run(connection, settings, digest_of(settings))
            member = {"experiment_id": found, "position": list(policies).index(label), "seed": seed}
            same = [tables.members.c[name] == value for name, value in member.items()]
            if connection.scalar(sa.select(tables.members.c.run_id).where(*same)) is None:
                connection.execute(tables.members.insert(), {**member, "label": label, "run_id": run_id})
        return run_id

    def _register_run(self, connection: sa.Connection, settings: Mapping[str, Any], key: str) -> int:
        found = connection.scalar(sa.select(tables.runs.c.id).where(tables.runs.c.key == key))
        if found is not None:
            return int(found)
        if settings["seed"] > _LARGEST_SEED:
            raise InvalidInput(f"The store takes seeds up to {_LARGEST_SEED:,}. Got {settings['seed']:,}.")
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
        """Return the id of a federation, adding it if it is new. See the table for the values."""
        with self.writing(queue=True) as connection:
            found = connection.scalar(sa.select(tables.federations.c.id).where(tables.federations.c.key == key))
            return int(found) if found is not None else _insert(connection, tables.federations, key=key, **values)

    def update_run(self, run_id: int, **values: Any) -> None:
        """Change facts about a run: status, manifest, error, ..."""
        with self.writing() as connection:
            if run_id in self._digests:
                self._require_lease(connection, run_id)
            connection.execute(tables.runs.update().where(tables.runs.c.id == run_id), values)

    # Leases: one process computes a run

    @contextmanager
    def computing(self, run_id: int) -> Iterator[None]:
        """Hold and renew the lease of a run. Raise RunLeased if another living process holds it."""
        self.take(run_id)
        try:
            with leases.beating(self._writer, run_id, self._owner):
                yield
        finally:
            if run_id in self._digests:  # neither released nor lost; if this fails, the lease becomes stale
                with suppress(sa.exc.SQLAlchemyError, StoreError):
                    self.release(run_id)

    def take(self, run_id: int) -> None:
        """Take the lease of a run, or raise RunLeased if another living process holds it."""
        with self.writing(queue=True) as connection:
            leases.take(connection, run_id, self._owner)
        self._digests[run_id] = None

    def release(self, run_id: int, **values: Any) -> None:
        """Give the lease back and change these facts about the run; if another process has it now, do neither."""
        self._digests.pop(run_id, None)
        mine = (tables.leases.c.run_id == run_id) & (tables.leases.c.owner == self._owner)
        with self.writing() as connection:
            if connection.execute(tables.leases.delete().where(mine)).rowcount and values:
                connection.execute(tables.runs.update().where(tables.runs.c.id == run_id), values)

    def holders(self, run_ids: list[int]) -> dict[int, str]:
        """Run -> who computes it now, for people; this process and processes that have ended aside."""
        with self.engine.connect() as connection:
            found = {run_id: leases.holder(connection, run_id) for run_id in run_ids}
        return {run_id: leases.describe(owner) for run_id, owner in found.items() if owner not in (None, self._owner)}

    def _require_lease(self, connection: sa.Connection, run_id: int) -> None:
        query = sa.select(tables.leases.c.owner).where(tables.leases.c.run_id == run_id).with_for_update()
        if connection.scalar(query) != self._owner:
            raise self._lost(run_id)

    def _lost(self, run_id: int) -> RunLeased:
        self._digests.pop(run_id, None)
        return RunLeased(
            f"This process does not hold the lease of run {run_id}: call Store.take first. If it did, another process "
            f"took the run over because this one had not answered for {leases.STALE_SECONDS:.0f} s."
        )

    # Rounds

    def resume(self, run_id: int, first: int | None = None) -> tuple[int, bytes | None]:
        """Return (rounds done, checkpoint) and drop the rows beyond the checkpoint. Needs the lease of the run.

        `first` is the round to go on with if the checkpoint does not decide it: rows from there on are dropped, and
        the checkpoint too if it is later. Raise Damage if a round before is missing or does not match its checksum.
        """
        with self.writing() as connection:
            self._require_lease(connection, run_id)
            row = connection.execute(
                sa.select(tables.checkpoints).where(tables.checkpoints.c.run_id == run_id)
            ).one_or_none()
            done, content = (int(row.rounds_done), row.content) if row else (0, None)
            if first is not None:
                later = tables.checkpoints.c.rounds_done > first
                connection.execute(tables.checkpoints.delete().where(tables.checkpoints.c.run_id == run_id, later))
                done, content = first, content if done <= first else None
            try:
                digest = verify_rounds(connection, run_id, done).digest if done else None
            except Damage as error:
                raise Damage(
                    f"Run {run_id} is damaged: {error}. Compute it again with: fedpick verify --repair --store "
                    f"{self.name}"
                ) from error
            self._drop_rounds(connection, run_id, done)
        self._digests[run_id] = digest
        return done, content

    def restart(self, *run_ids: int) -> None:
        """Forget everything these runs have done. Raise RunLeased, and forget nothing, if a process computes one."""
        with self.writing(queue=True) as connection:
            for run_id in run_ids:
                leases.take(connection, run_id, self._owner)
                for table in (tables.checkpoints, tables.leases):
                    connection.execute(table.delete().where(table.c.run_id == run_id))
                self._drop_rounds(connection, run_id, 0)
                values = {"status": "new", "error": None, "wall_seconds": 0.0, "manifest": None}
                connection.execute(tables.runs.update().where(tables.runs.c.id == run_id), values)

    def _drop_rounds(self, connection: sa.Connection, run_id: int, first: int) -> None:
        for table in (tables.arrays, tables.selections, tables.rounds, tables.checksums):
            connection.execute(table.delete().where(table.c.run_id == run_id, table.c.round >= first))
        final = tables.client_accuracies
        connection.execute(final.delete().where(final.c.run_id == run_id, final.c.rounds_done > first))
        rounds = tables.rounds.c
        latest = sa.select(rounds.accuracy).where(rounds.run_id == run_id, rounds.accuracy.is_not(None))
        values = {"rounds_done": first, "accuracy": connection.scalar(latest.order_by(rounds.round.desc()).limit(1))}
        connection.execute(tables.runs.update().where(tables.runs.c.id == run_id), values)

    def replace_federation(self, run_id: int, federation_id: int) -> None:
        """Give a run another table of clients: a longer one, or other facts. Needs the lease of the run.

        In the stored rounds, new clients were not available. A shorter table drops the last clients.
        The checksums are computed anew.
        """
        rounds, selections, arrays = tables.rounds, tables.selections, tables.arrays
        with self.writing() as connection:
            self._require_lease(connection, run_id)
            facts = sa.select(tables.runs.c.rounds_done, tables.runs.c.federation_id).where(tables.runs.c.id == run_id)
            done, before = connection.execute(facts).one()
            verify_rounds(connection, run_id, done)  # new checksums must not hide damage
            sizes = sa.select(tables.federations.c.num_clients)
            old = int(connection.scalar(sizes.where(tables.federations.c.id == before)) or 0)
            new = int(connection.scalar(sizes.where(tables.federations.c.id == federation_id)) or 0)
            connection.execute(tables.runs.update().where(tables.runs.c.id == run_id), {"federation_id": federation_id})
            digest = start_of_chain(connection, run_id)
            for index in range(done):
                row, selection, checksum = (
                    dict(connection.execute(sa.select(table).where(*_of_round(table, run_id, index))).mappings().one())
                    for table in (rounds, selections, tables.checksums)
                )
                mask = np.zeros(max(old, new), bool)
                mask[:old] = mask_from(selection["available"], old)
                selection["available"] = mask_bytes(mask[:new])
                stored = connection.execute(sa.select(arrays).where(*_of_round(arrays, run_id, index))).mappings()
                digest = link(digest, row, selection, {each["name"]: each["value"] for each in stored})
                checksum["digest"] = digest
                for table, values in ((selections, selection), (tables.checksums, checksum)):
                    connection.execute(table.update().where(*_of_round(table, run_id, index)), values)
            used = sa.select(tables.runs.c.federation_id).where(tables.runs.c.federation_id == before)
            connection.execute(tables.federations.delete().where(tables.federations.c.id == before, ~sa.exists(used)))
        self._digests[run_id] = digest if done else None

    def write_round(
        self,
        run_id: int,
        record: RoundRecord,
        *,
        checkpoint: bytes | None,
        wall_seconds: float = 0.0,
        accuracies: ClientAccuracies | None = None,
    ) -> None:
        """Commit one round: rows, progress and, where given, the checkpoint after it. Needs the lease of the run.

        `accuracies` are those of the final model. They are no part of the round: its rows must not depend on whether
        it is the last one.
        """
        if run_id not in self._digests:
            raise self._lost(run_id)
        text, found = split_diagnostics(record.selection.diagnostics)
        arrays = {f"policy/{name}": array_bytes(value) for name, value in found.items()}
        arrays |= {f"evaluation/{name}": array_bytes(value) for name, value in record.evaluation.items()}
        key = {"run_id": run_id, "round": record.index}
        row = {**key, **_round_row(record), "diagnostics": text}
        selection = {**key, **_selection_row(record)}
        progress = {"run": run_id, "done": record.index + 1}
        digest = link(self._digests[run_id] or self._start_of_chain(run_id), row, selection, arrays)
        with self._writing_by_driver() as execute:
            if execute(_NEW_CHECKSUM, {**key, "digest": digest, "owner": self._owner}) != 1:
                raise self._lost(run_id)
            execute(_NEW_ROUND, row)
            execute(_NEW_SELECTION, selection)
            for name, value in arrays.items():
                execute(_NEW_ARRAY, {**key, "name": name, "value": value})
            if checkpoint is not None:
                values = {**progress, "state": checkpoint}
                if not execute(_CHECKPOINT, values):
                    execute(_NEW_CHECKPOINT, values)
            if accuracies is not None:
                execute(_NO_ACCURACIES, progress)
                execute(_NEW_ACCURACIES, {"run_id": run_id, **_accuracies_row(accuracies)})
            execute(_PROGRESS, {**progress, "spent": wall_seconds, "latest": _number(record.test_accuracy)})
        self._digests[run_id] = digest

    def _start_of_chain(self, run_id: int) -> bytes:
        with self.engine.connect() as connection:
            return start_of_chain(connection, run_id)

    # Reading

    def _rows(self, query: sa.Select[Any]) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(query).all())

    @_reads
    def experiments(self) -> list[Experiment]:
        """All of them, the latest first."""
        query = sa.select(tables.experiments).order_by(
            tables.experiments.c.touched.desc(), tables.experiments.c.id.desc()
        )
        longest = (
            sa.select(tables.members.c.experiment_id, sa.func.max(tables.runs.c.rounds_done))
            .join(tables.runs, tables.members.c.run_id == tables.runs.c.id)
            .group_by(tables.members.c.experiment_id)
        )
        lengths: dict[int, int] = dict(map(tuple, self._rows(longest)))
        return [_experiment(row, lengths.get(row.id, 0)) for row in self._rows(query)]

    def experiment(self, which: str | int | None = None) -> Experiment:
        """By id, else by title, else by the first letters of the hash; None: the latest."""
        known = self.experiments()
        if not known:
            raise InvalidInput("There is no experiment in this store yet. Make one: fedpick run SPEC.toml.")
        if which is None:
            return known[0]
        text = str(which)
        for matches in (
            [each for each in known if str(each.id) == text],
            [each for each in known if each.title == text],
            [each for each in known if len(text) >= 4 and each.hash.startswith(text)],
        ):
            if matches:
                return matches[0]
        listing = ", ".join(f"{each.id} ({each.title})" for each in known)
        raise InvalidInput(f"There is no experiment {text!r} in this store. It has: {listing}.")

    @_reads
    def runs(self, experiment_id: int) -> list[Run]:
        """The runs of an experiment: by policy, as in the spec, then by seed."""
        query = (
            sa.select(tables.runs, tables.members.c.label, tables.members.c.position)
            .join(tables.members, tables.members.c.run_id == tables.runs.c.id)
            .where(tables.members.c.experiment_id == experiment_id)
            .order_by(tables.members.c.position, tables.members.c.seed)
        )
        return [_run(row) for row in self._rows(query)]

    @_reads
    def run(self, run_id: int) -> Run:
        """One run by its id, outside of any experiment: its label is the policy's name."""
        rows = self._rows(_RUNS.where(tables.runs.c.id == run_id))
        if not rows:
            raise InvalidInput(f"There is no run {run_id} in this store.")
        return _run(rows[0])

    @_reads
    def runs_with(self, keys: list[str]) -> list[Run]:
        """The runs with these keys that are there already; see `run` for their labels."""
        return [_run(row) for row in self._rows(_RUNS.where(tables.runs.c.key.in_(keys)))]

    @_reads
    def progress(self, run_ids: list[int]) -> dict[int, tuple[str, int, float | None]]:
        """run -> (status, rounds done, latest accuracy)."""
        columns = tables.runs.c
        query = sa.select(columns.id, columns.status, columns.rounds_done, columns.accuracy).where(
            columns.id.in_(run_ids)
        )
        return {row.id: (row.status, row.rounds_done, row.accuracy) for row in self._rows(query)}

    @_reads
    def overview(self) -> dict[int, list[Progress]]:
        """Experiment -> the progress of its runs: by policy, as in the spec, then by seed."""
        members, runs = tables.members.c, tables.runs.c
        query = (
            sa.select(
                members.experiment_id, runs.id, members.label, runs.seed, runs.status, runs.rounds_done, runs.accuracy
            )
            .join(tables.runs, members.run_id == runs.id)
            .order_by(members.experiment_id, members.position, members.seed)
        )
        found: dict[int, list[Progress]] = {}
        for number, run_id, label, *rest in self._rows(query):
            found.setdefault(number, []).append(Progress(run_id, without_control_characters(label), *rest))
        return found

    @_reads
    def curves(self, run_ids: list[int], column: str, limit: int | None = None) -> dict[int, FloatArray]:
        """Run -> (T, 3): round, value of a column of `rounds` and bytes sent, both ways. NaN: not measured."""
        columns = tables.rounds.c
        query = sa.select(columns.run_id, columns.round, columns[column], columns.bytes_down + columns.bytes_up)
        query = query.where(columns.run_id.in_(run_ids)).order_by(columns.run_id, columns.round)
        if limit is not None:
            query = query.where(columns.round < limit)
        found: dict[int, list[tuple[float, ...]]] = {}
        for run_id, index, value, sent in self._rows(query):
            found.setdefault(run_id, []).append((index, np.nan if value is None else value, sent))
        return {run_id: np.array(rows, np.float64) for run_id, rows in found.items()}

    @_reads
    def torn(self, run_ids: list[int]) -> set[int]:
        """Return those runs whose rows are not exactly the rounds from 0 to `rounds_done` - 1."""
        expected = {run_id: done for run_id, (_, done, _) in self.progress(run_ids).items()}
        found: set[int] = set()
        for table in (tables.rounds, tables.selections):
            count, last = sa.func.count(), sa.func.max(table.c.round)
            query = sa.select(table.c.run_id, count, last).where(table.c.run_id.in_(run_ids)).group_by(table.c.run_id)
            rows = {run_id: (number, final + 1) for run_id, number, final in self._rows(query)}
            found |= {run_id for run_id, done in expected.items() if rows.get(run_id, (0, 0)) != (done, done)}
        return found

    @_reads
    def rounds(
        self, run_id: int, limit: int | None = None, columns: Collection[str] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Return columns of `rounds` (None: all) as arrays in order of the rounds.

        NaN stands for NULL. `diagnostics` is an array of dicts.
        """
        wanted = [
            each
            for each in self._round_columns()
            if each.name != "run_id" and (columns is None or each.name in columns)
        ]
        rows = self._rows(_rounds_of(run_id, tables.rounds, sa.select(*wanted), limit))
        found: dict[str, Any] = {}
        for column, values in zip(wanted, zip(*rows, strict=True) if rows else [()] * len(wanted), strict=True):
            if column.name == "diagnostics":
                parsed = {text: table_from_json(text) for text in set(values)}  # mostly one text
                found[column.name] = np.array([parsed[text] for text in values], dtype=object)
            else:  # None becomes NaN
                kind = tables.rounds.c[column.name].type
                found[column.name] = np.array(values, np.float64 if isinstance(kind, sa.Double) else np.int64)
        return found

    @_reads
    def diagnostics(self, run_id: int, limit: int | None = None) -> dict[int, dict[str, Any]]:
        """Round -> the plain values that the policy and the guard reported, for the rounds in which they did."""
        columns = tables.rounds.c
        query = sa.select(columns.round, columns.diagnostics).where(columns.diagnostics != "{}")
        rows = self._rows(_rounds_of(run_id, tables.rounds, query, limit))
        return {_round_number(index): table_from_json(text) for index, text in rows}

    @_reads
    def mean_seconds(self, run_id: int, first: int, limit: int) -> dict[str, float | None]:
        """Part of a round -> mean of its seconds from round `first` up to `limit`; None: never measured."""
        columns = tables.rounds.c
        means = [sa.func.avg(columns[f"{name}_seconds"]) for name in _SECONDS]
        query = sa.select(*means).where(columns.run_id == run_id, columns.round >= first, columns.round < limit)
        return dict(zip(_SECONDS, self._rows(query)[0], strict=True))

    @_reads
    def federation(self, federation_id: int) -> FederationFacts:
        """What the clients of some runs have."""
        row = self._rows(sa.select(tables.federations).where(tables.federations.c.id == federation_id))[0]
        sizes, histogram = floats_from(row.num_examples), None
        if len(sizes) != row.num_clients:
            raise ValueError(f"federation {federation_id} has a wrong number of clients")
        if row.label_histogram is not None:
            histogram = np.frombuffer(row.label_histogram, "<i4").reshape(row.num_clients, row.num_classes)
        return FederationFacts(
            id=row.id,
            data=without_control_characters(row.data),
            partition=without_control_characters(row.partition),
            num_clients=row.num_clients,
            num_classes=row.num_classes,
            num_examples=sizes,
            label_histogram=histogram,
        )

    @_reads
    def records(self, run_id: int, limit: int | None = None) -> Iterator[RoundRecord]:
        """Yield the stored rounds in order. Large runs fit: the rows are read in small batches."""
        rounds, selections = tables.rounds, tables.selections
        shared = (selections.c.run_id == rounds.c.run_id) & (selections.c.round == rounds.c.round)
        # Both tables have a train_loss: the mean of the round, and the reports.
        own = [each.label(f"{each.name}_mean") if each.name in _REPORTS else each for each in self._round_columns()]
        chosen = [column for column in selections.c if column.name not in ("run_id", "round")]
        query = sa.select(*own, *chosen).select_from(rounds).join(selections, shared)
        query = _rounds_of(run_id, rounds, query, limit)
        size = self._num_clients(run_id)
        with self.engine.connect() as connection:
            for row in connection.execution_options(yield_per=64).execute(query):
                yield _record(dict(row._mapping), size)

    def _round_columns(self) -> list[sa.ColumnElement[Any]]:
        """The columns of `rounds` in order; NULL for those that an older store, opened for reading, lacks."""
        if self._has_all_columns:
            return list(tables.rounds.c)
        with self.engine.connect() as connection:
            self._has_all_columns = not tables.missing_columns(connection)
            return tables.readable_columns(connection, tables.rounds)

    @_reads
    def choices(self, run_id: int, limit: int | None = None) -> Iterator[Choices]:
        """Yield the choices of the stored rounds in order, many rounds at a time: the fast part of `records`."""
        columns = tables.selections.c
        query = sa.select(columns.clients, columns.weights, columns.completed, columns.available)
        query = _rounds_of(run_id, tables.selections, query, limit)
        size, first = self._num_clients(run_id), 0
        batch = min(max(_BATCH_CELLS // max(size, 1), 1), _BATCH_ROUNDS)
        with self.engine.connect() as connection:
            found = connection.execution_options(yield_per=batch).execute(query)
            for rows in found.partitions(batch):
                clients, weights, completed, available = zip(*rows, strict=True)
                sizes = np.fromiter(map(len, completed), np.int64, len(rows))
                choices = Choices(
                    first=first,
                    row=np.repeat(np.arange(len(rows)), sizes),
                    clients=indices_from(b"".join(clients)),
                    weights=floats_from(b"".join(weights)),
                    completed=np.frombuffer(b"".join(completed), np.uint8).astype(bool),
                    available=masks_from(available, size),
                )
                _check_choices(choices, clients, weights, size)
                yield choices
                first += len(rows)

    def _num_clients(self, run_id: int) -> int:
        query = (
            sa.select(tables.federations.c.num_clients, tables.federations.c.num_examples)
            .join(tables.runs, tables.runs.c.federation_id == tables.federations.c.id)
            .where(tables.runs.c.id == run_id)
        )
        rows = self._rows(query)
        if rows and 8 * rows[0][0] != len(rows[0][1]):
            raise ValueError(f"the federation of run {run_id} has a wrong number of clients")
        return int(rows[0][0]) if rows else 0

    @_reads
    def selection_counts(self, run_id: int, limit: int | None = None) -> NDArray[np.int64]:
        """(N,) how often each client was chosen."""
        counts = np.zeros(self._num_clients(run_id), np.int64)
        query = _rounds_of(run_id, tables.selections, sa.select(tables.selections.c.clients), limit)
        with self.engine.connect() as connection:
            for rows in connection.execution_options(yield_per=_BATCH_ROUNDS).execute(query).partitions(_BATCH_ROUNDS):
                clients = indices_from(b"".join(content for (content,) in rows))
                _require_range(clients, len(counts))
                counts += np.bincount(clients, minlength=len(counts))
        return counts

    @_reads
    def client_accuracies(self, run_id: int, rounds: int) -> ClientAccuracies | None:
        """How good the model was for each client after this many rounds; None: not measured then.

        A recorded run may have measured it after any round: the latest counts.
        """
        final = tables.client_accuracies
        if sa.inspect(self.engine).has_table(final.name):
            query = sa.select(final.c.part, final.c.accuracies)
            for part, content in self._rows(query.where(final.c.run_id == run_id, final.c.rounds_done == rounds)):
                return ClientAccuracies(rounds, part, bytes_array(content).astype(np.float64))
        measured = [index for index in self.array_names(run_id).get("evaluation/accuracies", []) if index < rounds]
        if not measured:
            return None
        return ClientAccuracies(measured[-1] + 1, "own", self.array(run_id, measured[-1], "evaluation/accuracies"))

    @_reads
    def array_names(self, run_id: int) -> dict[str, list[int]]:
        """name -> the rounds in which such an array was stored."""
        columns = tables.arrays.c
        query = sa.select(columns.name, columns.round).where(columns.run_id == run_id).order_by(columns.round)
        found: dict[str, list[int]] = {}
        for name, round_index in self._rows(query):
            found.setdefault(name, []).append(_round_number(round_index))
        return found

    @_reads
    def array(self, run_id: int, round_index: int, name: str) -> NDArray[Any]:
        """One stored array."""
        columns = tables.arrays.c
        query = sa.select(columns.value).where(
            columns.run_id == run_id, columns.round == round_index, columns.name == name
        )
        rows = self._rows(query)
        if not rows:
            raise InvalidInput(f"Run {run_id} stored no array {name!r} in round {round_index}.")
        return bytes_array(rows[0][0])

    @_reads
    def arrays(self, run_id: int, name: str, limit: int | None = None) -> Iterator[tuple[int, NDArray[Any]]]:
        """(round, array) for every round that stored an array of this name."""
        columns = tables.arrays.c
        query = sa.select(columns.round, columns.value).where(columns.name == name)
        query = _rounds_of(run_id, tables.arrays, query, limit)
        with self.engine.connect() as connection:
            for row in connection.execution_options(yield_per=64).execute(query):
                yield _round_number(row.round), bytes_array(row.value)

    @_reads
    def policy_state(self, run_id: int) -> dict[str, NDArray[Any]]:
        """The arrays of the policy's state at the latest checkpoint (an embedding it learned, ...), by field name."""
        rows = self._rows(sa.select(tables.checkpoints.c.content).where(tables.checkpoints.c.run_id == run_id))
        if not rows:
            return {}
        arrays, _ = checkpoint.unpack(rows[0][0], "A checkpoint in the store")
        state = {name.removeprefix("policy/"): value for name, value in arrays.items() if name.startswith("policy/")}
        # The session keeps its guard's arrays beside the policy's.
        return {name: value for name, value in state.items() if not name.startswith("guard/")}


def _rounds_of(run_id: int, table: sa.Table, query: sa.Select[Any], limit: int | None) -> sa.Select[Any]:
    """Restrict a query to the rows of one run, in order of the rounds; to its first `limit` rounds, if given."""
    query = query.where(table.c.run_id == run_id).order_by(table.c.round)
    return query if limit is None else query.where(table.c.round < limit)


def _round_number(value: Any) -> int:
    """Return a round's number. SQLite keeps any value in a column of integers."""
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"a round has the number {value!r:.40}")
    return value


def _require_range(clients: IntArray, size: int) -> None:
    if len(clients) and (clients.min() < 0 or clients.max() >= size):
        raise ValueError(f"a selection has clients outside of 0 to {size - 1}")


def _check_choices(choices: Choices, clients: Sequence[bytes], weights: Sequence[bytes], size: int) -> None:
    """Raise if a row's columns differ in length: joined, its neighbours would fill the gap."""
    for column, width in ((clients, 4), (weights, 8)):
        lengths = np.fromiter(map(len, column), np.int64, len(column))
        if not np.array_equal(lengths, width * np.bincount(choices.row, minlength=len(column))):
            raise ValueError("a selection has columns of different lengths")
    _require_range(choices.clients, size)


# The statements of `Store.write_round`.
_NEW_ROUND, _NEW_SELECTION, _NEW_ARRAY = (table.insert() for table in (tables.rounds, tables.selections, tables.arrays))
# Inserts nothing if this process has lost the lease. The lock makes a process that takes the lease over wait.
_NEW_CHECKSUM = tables.checksums.insert().from_select(
    ["run_id", "round", "digest"],
    sa.select(
        tables.leases.c.run_id,
        sa.bindparam("round", type_=sa.Integer),
        sa.bindparam("digest", type_=sa.LargeBinary),
    )
    .where(tables.leases.c.run_id == sa.bindparam("run_id"), tables.leases.c.owner == sa.bindparam("owner"))
    .with_for_update(),
)
_STATE: dict[str, Any] = {"rounds_done": sa.bindparam("done"), "content": sa.bindparam("state")}
_CHECKPOINT = tables.checkpoints.update().where(tables.checkpoints.c.run_id == sa.bindparam("run")).values(_STATE)
_NEW_CHECKPOINT = tables.checkpoints.insert().values(run_id=sa.bindparam("run"), **_STATE)
_NEW_ACCURACIES = tables.client_accuracies.insert()
_NO_ACCURACIES = tables.client_accuracies.delete().where(tables.client_accuracies.c.run_id == sa.bindparam("run"))
_PROGRESS = (
    tables.runs.update()
    .where(tables.runs.c.id == sa.bindparam("run"))
    .values(
        rounds_done=sa.bindparam("done"),
        wall_seconds=tables.runs.c.wall_seconds + sa.bindparam("spent"),
        accuracy=sa.func.coalesce(sa.bindparam("latest", type_=sa.Float), tables.runs.c.accuracy),
    )
)


def _insert(connection: sa.Connection, table: sa.Table, **values: Any) -> int:
    result = connection.execute(table.insert(), values)
    assert result.inserted_primary_key is not None
    return int(result.inserted_primary_key[0])


def _of_round(table: sa.Table, run_id: int, index: int) -> tuple[Any, Any]:
    return table.c.run_id == run_id, table.c.round == index


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _round_row(record: RoundRecord) -> dict[str, Any]:
    outcome = record.outcome
    reported = outcome.train_loss[outcome.completed & np.isfinite(outcome.train_loss)]
    return {
        "num_available": record.num_available,
        "num_selected": len(outcome.clients),
        "num_completed": int(np.count_nonzero(outcome.completed)),
        "accuracy": _number(record.test_accuracy),
        "loss": _number(record.test_loss),
        "train_loss": float(reported.mean()) if len(reported) else None,
        "objective": _number(record.objective),
        "local_accuracy": _number(record.local_accuracy),
        "clock": _number(record.clock),
        **record.counters.as_dict(),
        **{f"{name}_seconds": _number(value) for name, value in record.seconds.as_dict().items()},
    }


def _selection_row(record: RoundRecord) -> dict[str, Any]:
    given = record.selection.weights
    return {
        "clients": index_bytes(record.selection.clients),
        "given_weights": None if given is None else float_bytes(given),
        "weights": float_bytes(record.weights),
        "completed": record.outcome.completed.astype(np.uint8).tobytes(),
        **{name: float_bytes(getattr(record.outcome, name)) for name in _REPORTS},
        "available": mask_bytes(record.available),
    }


def _accuracies_row(accuracies: ClientAccuracies) -> dict[str, Any]:
    content = array_bytes(accuracies.values.astype("<f4"))
    return {"rounds_done": accuracies.rounds, "part": accuracies.part, "accuracies": content}


_REPORTS = ("loss", "train_loss", "duration", "update_norm")
_COUNTERS = tuple(item.name for item in fields(Counters))
_SECONDS = tuple(item.name for item in fields(Timings))


def _record(row: Mapping[Any, Any], num_clients: int) -> RoundRecord:
    """The record of a stored round. Arrays of its diagnostics and evaluations are read with `Store.array`."""
    clients, given = indices_from(row["clients"]), row["given_weights"]
    reports: dict[str, Any] = {name: floats_from(row[name]) for name in _REPORTS}
    outcome = Outcome(
        index=row["round"],
        clients=clients,
        completed=np.frombuffer(row["completed"], np.uint8).astype(bool),
        **reports,
    )
    return RoundRecord(
        index=row["round"],
        selection=Selection(
            clients=clients,
            weights=None if given is None else floats_from(given),
            diagnostics=table_from_json(row["diagnostics"]),
        ),
        outcome=outcome,
        weights=floats_from(row["weights"]),
        available=mask_from(row["available"], num_clients),
        counters=Counters(**{name: row[name] for name in _COUNTERS}),
        seconds=Timings(**{name: row[f"{name}_seconds"] or 0.0 for name in _SECONDS}),
        test_loss=row["loss_mean"],
        test_accuracy=row["accuracy"],
        objective=row["objective"],
        local_accuracy=row["local_accuracy"],
        clock=row["clock"],
    )


_RUNS = sa.select(tables.runs, tables.runs.c.policy.label("label"), sa.literal(0).label("position"))


def _experiment(row: Any, longest: int) -> Experiment:
    """An experiment; a recorded one that states no number of rounds wants as many as its `longest` run has."""
    spec = from_json(row.spec)
    if spec.get("recorded"):
        spec["run"].setdefault("rounds", max(1, longest))
    found = Experiment(
        id=row.id,
        hash=without_control_characters(row.hash),
        title=without_control_characters(row.title),
        spec=spec,
        touched_at=without_control_characters(row.touched_at),
    )
    if found.rounds < 1 or not all(map(math.isfinite, (*found.targets, *found.loss_targets))):
        raise ValueError(f"the spec of experiment {row.id} has wrong numbers")
    return found


def _run(row: Any) -> Run:
    values = dict(row._mapping)
    for name in ("parameters", "settings", "manifest"):
        values[name] = table_from_json(values[name] or "{}")
    if not isinstance(values["seed"], int) or values["seed"] < 0:
        raise ValueError(f"the seed of run {row.id} is not a whole number")
    for name in ("label", "policy", "reference", "status"):
        values[name] = without_control_characters(values[name] or "")
    values["error"] = values["error"] and without_control_characters(values["error"])
    return Run(**values)
