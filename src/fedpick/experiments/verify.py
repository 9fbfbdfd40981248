"""Search a whole store for damage, and compute again what is damaged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fedpick.core import checkpoint
from fedpick.core.errors import StateFileError
from fedpick.experiments import leases
from fedpick.experiments import schema as tables
from fedpick.experiments.encoding import from_json, without_control_characters
from fedpick.experiments.integrity import Damage, verify_rounds
from fedpick.experiments.runner import Report, run
from fedpick.experiments.schema import sa
from fedpick.experiments.spec import digest_of, parse_spec
from fedpick.experiments.store import Store, damage_in_words, in_a_sentence

__all__ = ["Findings", "repair", "verify"]


@dataclass
class Findings:
    """What a store holds, and what is wrong with it, in sentences."""

    runs: int = 0
    rounds: int = 0
    unverified: int = 0
    """Rounds that were stored before checksums existed."""
    database: list[str] = field(default_factory=list)
    """Damage that this module cannot repair."""
    orphans: list[str] = field(default_factory=list)
    """Rows that refer to missing rows."""
    damaged: dict[int, str] = field(default_factory=dict)
    """Run -> what is damaged. It must be computed again."""
    mislabelled: dict[int, str] = field(default_factory=dict)
    """Run -> what is wrong with its status. Its rows are all there."""

    recorded: set[int] = field(default_factory=set)
    """The damaged runs that a `Recorder` wrote: fedpick cannot compute them again."""

    @property
    def sentences(self) -> list[str]:
        """Everything that is wrong."""
        found = [*self.database, *self.orphans, *self.damaged.values(), *self.mislabelled.values()]
        return [without_control_characters(text) for text in found]


def verify(store: Store) -> Findings:
    """Verify the database, the identities, and every run: rows, checksums, checkpoint, status."""
    found = Findings()
    with damage_in_words(store):
        _search(store, found)
    return found


def _search(store: Store, found: Findings) -> None:
    # A snapshot for each run: other processes may be writing.
    engine = store.engine
    if engine.dialect.name == "postgresql":
        engine = engine.execution_options(isolation_level="REPEATABLE READ")
    with engine.connect() as connection:
        if connection.dialect.name == "sqlite":
            answers = connection.exec_driver_sql("PRAGMA integrity_check").scalars()
            found.database += [f"SQLite: {text}." for text in answers if text != "ok"]
        inspector = sa.inspect(connection)
        for table in tables.metadata.sorted_tables:  # a damaged schema may lack a column that nothing below reads
            if inspector.has_table(table.name):
                connection.execute(sa.select(*tables.readable_columns(connection, table)).limit(0))
                unknown = {column["name"] for column in inspector.get_columns(table.name)} - set(table.c.keys())
                found.database += [
                    f"The table {table.name} has an unknown column {name!r}." for name in sorted(unknown)
                ]
        found.orphans += [f"The table {table.name} has {many}." for table, _, many in _orphans(connection)]
        for row in connection.execute(sa.select(tables.experiments)).mappings():
            if (problem := _identity(row["spec"], row["hash"], without="title")) is not None:
                found.database.append(f"Experiment {row['id']}: its spec {problem}. Run its TOML file again.")
        wanted = _wanted_rounds(connection)
        run_ids = list(connection.execute(sa.select(tables.runs.c.id).order_by(tables.runs.c.id)).scalars())
    for run_id in run_ids:
        with engine.connect() as connection:
            _verify_run(connection, run_id, wanted.get(run_id), found)


def _verify_run(connection: sa.Connection, run_id: int, wanted: int | None, found: Findings) -> None:
    try:
        facts = connection.execute(sa.select(tables.runs).where(tables.runs.c.id == run_id)).mappings().one()
    except (sa.exc.SQLAlchemyError, ValueError) as error:
        found.database.append(f"Run {run_id}: its row in the table runs cannot be read. {in_a_sentence(error)}")
        return
    name = f"Run {run_id} ({facts['policy']}, seed {facts['seed']})"
    found.runs += 1
    found.rounds += facts["rounds_done"]
    try:
        found.unverified += _require_whole(connection, facts)
    except Exception as error:  # damaged bytes become values of any type
        found.damaged[run_id] = f"{name}: {in_a_sentence(error).rstrip('.')}."
        if _is_recorded(facts):
            found.recorded.add(run_id)
            found.damaged[run_id] += " Only its training loop can repair it: Recorder(..., restart=True)."
        return
    complete = wanted is not None and facts["rounds_done"] >= wanted > 0
    if complete and facts["status"] != "done" and _holder(connection, run_id) is None:
        found.mislabelled[run_id] = f"{name}: it has all its rounds, but its status is {facts['status']!r}."


def _require_whole(connection: sa.Connection, facts: Mapping[Any, Any]) -> int:
    """Return how many rounds have no checksum. Raise Damage if the run is not as it was written."""
    run_id, done = facts["id"], facts["rounds_done"]
    if (problem := _identity(facts["settings"], facts["key"])) is not None:
        raise Damage(f"its settings {problem}")
    settings = from_json(facts["settings"])
    if (settings["policy"]["name"], settings["seed"]) != (facts["policy"], facts["seed"]):
        raise Damage("its policy and seed are not those of its settings")
    for name in ("parameters", "manifest"):
        from_json(facts[name] or "{}")
    if facts["status"] == "done" and not done:
        raise Damage("its status is 'done', but it has no rounds")
    unverified = verify_rounds(connection, run_id, done).unverified
    for table in (tables.rounds, tables.selections, tables.arrays, tables.checksums):
        if sa.inspect(connection).has_table(table.name):
            beyond = sa.select(sa.func.count()).where(table.c.run_id == run_id, ~table.c.round.between(0, done - 1))
            if connection.scalar(beyond):
                raise Damage(f"the table {table.name} has rows beyond its {done} rounds")
    rounds = tables.rounds.c
    latest = sa.select(rounds.accuracy).where(rounds.run_id == run_id, rounds.accuracy.is_not(None))
    if connection.scalar(latest.order_by(rounds.round.desc()).limit(1)) != facts["accuracy"]:
        raise Damage("its latest accuracy is not that of its rounds")
    # A recorded run resumes from a save of its own; the store drops a checkpoint that is later than this save.
    _require_checkpoint(connection, run_id, done, optional=_is_recorded(facts))
    return unverified


def _require_checkpoint(connection: sa.Connection, run_id: int, done: int, *, optional: bool) -> None:
    kept = connection.execute(sa.select(tables.checkpoints).where(tables.checkpoints.c.run_id == run_id)).one_or_none()
    if kept is None:
        if done and not optional:
            raise Damage("its checkpoint is missing")
        return
    _, plain = checkpoint.unpack(kept.content, "its checkpoint")
    if not plain.get("round") == kept.rounds_done <= done:
        raise Damage(f"its checkpoint is for round {plain.get('round')}, not {kept.rounds_done} of {done}")


def _identity(text: str, digest: str, without: str | None = None) -> str | None:
    try:
        same = isinstance(text, str) and digest_of(from_json(text), without) == digest  # damage can make text a blob
        return None if same else "was changed"
    except (StateFileError, AttributeError):
        return "cannot be read"


def _is_recorded(facts: Mapping[Any, Any]) -> bool:
    with suppress(StateFileError, TypeError):
        return "recorded" in from_json(facts["settings"])
    return False


def _holder(connection: sa.Connection, run_id: int) -> str | None:
    known = sa.inspect(connection).has_table(tables.leases.name)
    return leases.holder(connection, run_id) if known else None


def _wanted_rounds(connection: sa.Connection) -> dict[int, int]:
    """Run -> the most rounds that an experiment wants of it."""
    query = sa.select(tables.members.c.run_id, tables.experiments.c.spec).join(tables.experiments)
    wanted: dict[int, int] = {}
    for run_id, text in connection.execute(query):
        try:
            rounds = int(from_json(text)["run"]["rounds"])
        except (StateFileError, LookupError, TypeError, ValueError):
            continue  # `verify` reports the spec
        wanted[run_id] = max(rounds, wanted.get(run_id, 0))
    return wanted


def _orphans(connection: sa.Connection) -> Iterable[tuple[sa.Table, Any, str]]:
    """Yield (table, condition, words) for rows that refer to rows that are missing."""
    for table in tables.metadata.sorted_tables:
        if not sa.inspect(connection).has_table(table.name):
            continue
        for key in table.foreign_keys:
            target = key.column
            lost = key.parent.is_not(None) & key.parent.not_in(sa.select(target))
            if count := connection.scalar(sa.select(sa.func.count()).select_from(table).where(lost)):
                yield table, lost, f"{count} rows that refer to missing {target.table.name}"


def repair(store: Store, found: Findings, **options: Any) -> list[Report]:
    """Drop the damaged runs and orphans, then bring the experiments they belong to to their end.

    Damaged runs that a `Recorder` wrote are left as they are. `options` go to `fedpick.experiments.runner.run`. Raise
    RunLeased, and drop nothing, if a process computes one.
    """
    damaged = [run_id for run_id in found.damaged if run_id not in found.recorded]
    members = sa.select(tables.members.c.experiment_id).where(
        tables.members.c.run_id.in_([*damaged, *found.mislabelled])
    )
    with store.writing(queue=True) as connection:
        affected = set(connection.execute(members).scalars())
        # Read now: a spec that cannot be read must not cost its rows.
        specs = [parse_spec(each.spec) for each in store.experiments() if each.id in affected and not each.recorded]
        order = connection.execute(sa.select(tables.experiments.c.id, tables.experiments.c.touched)).all()
        for table, lost, _ in list(_orphans(connection)):
            connection.execute(table.delete().where(lost))
        for run_id in found.mislabelled:
            connection.execute(
                tables.runs.update().where(tables.runs.c.id == run_id), {"status": "done", "error": None}
            )
        for run_id in damaged:
            if (owner := leases.holder(connection, run_id)) is not None:
                raise leases.RunLeased(f"Run {run_id} is being computed by {leases.describe(owner)}. Let it finish.")
            for table in reversed(tables.metadata.sorted_tables):
                if "run_id" in table.c:
                    connection.execute(table.delete().where(table.c.run_id == run_id))
            connection.execute(tables.runs.delete().where(tables.runs.c.id == run_id))
    reports = [run(spec, store, **options) for spec in specs]
    with store.writing() as connection:
        for experiment, touched in order:  # the latest stays the latest
            chosen = tables.experiments.update().where(tables.experiments.c.id == experiment)
            connection.execute(chosen, {"touched": touched})
    return reports
