"""The tables of the store, for SQLAlchemy Core.

Schema, version 1. Public: scripts may read it with any SQL tool. Rounds count from 0. JSON columns are text.

`fedpick_schema`   version, written_by                                     one row
`experiments`      one row per spec (a set of policies x seeds on one setting)
    id, hash (SHA-256 of the spec, unique), title, spec (JSON, as the TOML), touched (grows with every `fedpick run`:
    the largest is the latest; 0: a search of `fedpick tune`), touched_at (UTC)
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
    train_loss              mean over the clients that completed; NULL if none did
    objective               the loss of all clients, weighted by importance; NULL where not measured
    local_accuracy          on the clients' own test data, weighted by importance; NULL where not measured
    clock                   seconds of virtual time since the start, this round included; NULL without devices
    models_down, updates_up, scalars_up, bytes_down, bytes_up    since the start of the run, this round included
    select_seconds, measure_seconds, train_seconds, evaluate_seconds    this round alone
    diagnostics             JSON: the plain values that the policy reported
`selections`       one row per run and round; k clients chosen
    run_id, round, clients (k,) int32, given_weights (k,) float64 as the policy gave them or NULL (it gave none),
    weights (k,) float64 as they entered the model, completed (k,) uint8, loss, train_loss, duration, update_norm
    (k,) float64 each (NaN: not reported), available: NULL (all clients), or zlib of numpy.packbits of the (N,) mask
`arrays`           larger arrays
    run_id, round, name, value (zlib of a .npy file). Names: "policy/..." the arrays in the policy's diagnostics
    and the guard's ("policy/lost_credibility", "policy/regained_credibility": clients),
    "evaluation/losses" (N,) the loss of every client, "evaluation/validation" (2,) loss and accuracy on the clients'
    validation data, weighted by importance, "evaluation/times" (4, k) what the chosen clients spend their time on and
    "evaluation/stale" (3, j) late answers that were used; see `fedpick.sim.clock` and `fedpick.sim.late`
`checkpoints`      where a run resumes: run_id, rounds_done, content (.npz of model and policy state)
`checksums`        one row per run and round: run_id, round, digest (BLAKE2b of the digest before it, the row of
    `rounds`, the row of `selections` and the arrays of the round; see `fedpick.experiments.integrity`)
`client_accuracies`  how good the final model of a run is for each client
    run_id, rounds_done (of the run when it was measured), part (the clients' data it was measured on: "test",
    "validation" or "train"), accuracies (zlib of a .npy file: (N,) float32, NaN for a client without such data)
`leases`           which process computes a run: run_id, owner, beat (when the owner last renewed it, in seconds since
    1970); see `fedpick.experiments.leases`

The last three tables and the column `rounds.clock` are younger than the others. A store without them is still version
1: they are added when it is opened for writing, and rounds without a checksum count as unverified.

Arrays without another note are raw little-endian bytes: `numpy.frombuffer(value, "<f8")`. A number NaN is NULL. In
`spec`, `settings` and `parameters`, infinity (`kappa2 = inf`) is the word Infinity, and NaN NaN, as in JSON5.

One round is one transaction: its rows, the run's progress and (mostly) the checkpoint. Where checkpoints are large they
are written less often; rows beyond the last checkpoint are dropped on resuming and computed again, with equal content.
"""

from __future__ import annotations

from typing import Any

try:
    import sqlalchemy as sa
except ModuleNotFoundError as error:
    from fedpick.core.errors import MissingDependency

    raise MissingDependency(
        "The store needs SQLAlchemy. Install it with: pip install 'fedpick[sim]'; or, to read results only, with: "
        "pip install 'fedpick[report]'"
    ) from error

__all__ = [
    "SCHEMA_VERSION",
    "YOUNGER_COLUMNS",
    "add_younger_columns",
    "arrays",
    "checkpoints",
    "checksums",
    "client_accuracies",
    "experiments",
    "federations",
    "leases",
    "members",
    "metadata",
    "missing_columns",
    "readable_columns",
    "rounds",
    "runs",
    "sa",
    "schema",
    "selections",
]

SCHEMA_VERSION = 1

metadata = sa.MetaData()


def _run_and_round() -> list[sa.Column[int]]:
    return [
        sa.Column("run_id", sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("round", sa.Integer, primary_key=True),
    ]


schema = sa.Table(
    "fedpick_schema",
    metadata,
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("written_by", sa.Text, nullable=False),
)

experiments = sa.Table(
    "experiments",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("hash", sa.Text, nullable=False, unique=True),
    sa.Column("title", sa.Text, nullable=False),
    sa.Column("spec", sa.Text, nullable=False),
    sa.Column("touched", sa.Integer, nullable=False),
    sa.Column("touched_at", sa.Text, nullable=False),
)

federations = sa.Table(
    "federations",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("key", sa.Text, nullable=False, unique=True),
    sa.Column("data", sa.Text, nullable=False),
    sa.Column("partition", sa.Text, nullable=False),
    sa.Column("num_clients", sa.Integer, nullable=False),
    sa.Column("num_classes", sa.Integer, nullable=False),
    sa.Column("num_examples", sa.LargeBinary, nullable=False),
    sa.Column("label_histogram", sa.LargeBinary),
)

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("key", sa.Text, nullable=False, unique=True),
    sa.Column("policy", sa.Text, nullable=False),
    sa.Column("parameters", sa.Text, nullable=False),
    sa.Column("seed", sa.BigInteger, nullable=False),
    sa.Column("settings", sa.Text, nullable=False),
    sa.Column("federation_id", sa.ForeignKey("federations.id")),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("rounds_done", sa.Integer, nullable=False),
    sa.Column("accuracy", sa.Double),
    sa.Column("model_bytes", sa.BigInteger),
    sa.Column("reference", sa.Text),
    sa.Column("error", sa.Text),
    sa.Column("manifest", sa.Text),
    sa.Column("wall_seconds", sa.Double, nullable=False),
)

members = sa.Table(
    "members",
    metadata,
    sa.Column("experiment_id", sa.ForeignKey("experiments.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("position", sa.Integer, primary_key=True),
    sa.Column("seed", sa.BigInteger, primary_key=True),
    sa.Column("label", sa.Text, nullable=False),
    sa.Column("run_id", sa.ForeignKey("runs.id", ondelete="CASCADE"), nullable=False, index=True),
)

rounds = sa.Table(
    "rounds",
    metadata,
    *_run_and_round(),
    sa.Column("num_available", sa.Integer, nullable=False),
    sa.Column("num_selected", sa.Integer, nullable=False),
    sa.Column("num_completed", sa.Integer, nullable=False),
    sa.Column("accuracy", sa.Double),
    sa.Column("loss", sa.Double),
    sa.Column("train_loss", sa.Double),
    sa.Column("objective", sa.Double),
    sa.Column("local_accuracy", sa.Double),
    sa.Column("models_down", sa.BigInteger, nullable=False),
    sa.Column("updates_up", sa.BigInteger, nullable=False),
    sa.Column("scalars_up", sa.BigInteger, nullable=False),
    sa.Column("bytes_down", sa.BigInteger, nullable=False),
    sa.Column("bytes_up", sa.BigInteger, nullable=False),
    sa.Column("select_seconds", sa.Double),
    sa.Column("measure_seconds", sa.Double),
    sa.Column("train_seconds", sa.Double),
    sa.Column("evaluate_seconds", sa.Double),
    sa.Column("diagnostics", sa.Text, nullable=False),
    sa.Column("clock", sa.Double),
)

selections = sa.Table(
    "selections",
    metadata,
    *_run_and_round(),
    sa.Column("clients", sa.LargeBinary, nullable=False),
    sa.Column("given_weights", sa.LargeBinary),
    sa.Column("weights", sa.LargeBinary, nullable=False),
    sa.Column("completed", sa.LargeBinary, nullable=False),
    sa.Column("loss", sa.LargeBinary, nullable=False),
    sa.Column("train_loss", sa.LargeBinary, nullable=False),
    sa.Column("duration", sa.LargeBinary, nullable=False),
    sa.Column("update_norm", sa.LargeBinary, nullable=False),
    sa.Column("available", sa.LargeBinary),
)

arrays = sa.Table(
    "arrays",
    metadata,
    *_run_and_round(),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.LargeBinary, nullable=False),
)

checkpoints = sa.Table(
    "checkpoints",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("rounds_done", sa.Integer, nullable=False),
    sa.Column("content", sa.LargeBinary, nullable=False),
)

checksums = sa.Table("checksums", metadata, *_run_and_round(), sa.Column("digest", sa.LargeBinary, nullable=False))

client_accuracies = sa.Table(
    "client_accuracies",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("rounds_done", sa.Integer, nullable=False),
    sa.Column("part", sa.Text, nullable=False),
    sa.Column("accuracies", sa.LargeBinary, nullable=False),
)

leases = sa.Table(
    "leases",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("beat", sa.Double, nullable=False),
)

YOUNGER_COLUMNS = frozenset({rounds.c.clock})
"""Columns that older stores of this version lack. They hold NULL, or a fact that older rounds do not have."""


def missing_columns(connection: sa.Connection) -> list[sa.Column[Any]]:
    """The younger columns that this database lacks."""
    inspector = sa.inspect(connection)
    return [
        column
        for column in YOUNGER_COLUMNS
        if column.name not in {each["name"] for each in inspector.get_columns(column.table.name)}
    ]


def add_younger_columns(connection: sa.Connection) -> None:
    """Add the columns that an older store lacks."""
    for column in missing_columns(connection):
        kind = column.type.compile(connection.dialect)
        connection.exec_driver_sql(f"ALTER TABLE {column.table.name} ADD COLUMN {column.name} {kind}")


def readable_columns(connection: sa.Connection, table: sa.Table) -> list[sa.ColumnElement[Any]]:
    """The columns of a table in order; NULL for those that this database lacks."""
    missing = {column.name for column in missing_columns(connection) if column.table is table}
    return [sa.null().label(column.name) if column.name in missing else column for column in table.c]
