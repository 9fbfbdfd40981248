"""The tables of the store, for SQLAlchemy Core. What they mean is told in `fedpick.experiments.store`."""

from __future__ import annotations

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
    "arrays",
    "checkpoints",
    "experiments",
    "federations",
    "members",
    "metadata",
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
