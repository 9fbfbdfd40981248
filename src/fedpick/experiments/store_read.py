"""Reading the store: rows become arrays, and the bytes in them become what they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import FloatArray
from fedpick.core.errors import InvalidInput
from fedpick.experiments import schema as tables
from fedpick.experiments.records import bytes_array, floats_from, from_json, indices_from, mask_from, unpack_checkpoint
from fedpick.experiments.schema import sa

__all__ = ["Experiment", "FederationFacts", "Reader", "Run", "SelectionRow"]


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


@dataclass(frozen=True, kw_only=True, eq=False)
class SelectionRow:
    """Who was chosen in one round; see the table `selections`."""

    round: int
    clients: NDArray[np.int64]
    given_weights: FloatArray | None
    weights: FloatArray
    completed: NDArray[np.bool_]
    loss: FloatArray
    train_loss: FloatArray
    duration: FloatArray
    update_norm: FloatArray
    available: NDArray[np.bool_]
    """(N,)"""


_RUNS = sa.select(tables.runs, tables.runs.c.policy.label("label"), sa.literal(0).label("position"))


class Reader:
    """The reading half of `fedpick.experiments.store.Store`."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine

    def _rows(self, query: sa.Select[Any]) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(query).all())

    def experiments(self) -> list[Experiment]:
        """All of them, the latest first."""
        query = sa.select(tables.experiments).order_by(tables.experiments.c.touched.desc())
        return [_experiment(row) for row in self._rows(query)]

    def experiment(self, which: str | int | None = None) -> Experiment:
        """By id, title or the first letters of the hash; None: the latest."""
        known = self.experiments()
        if not known:
            raise InvalidInput("There is no experiment in this store yet. Make one: fedpick run SPEC.toml.")
        if which is None:
            return known[0]
        text = str(which)
        for matches in (
            [each for each in known if str(each.id) == text or each.title == text],
            [each for each in known if len(text) >= 4 and each.hash.startswith(text)],
        ):
            if matches:
                return matches[0]
        listing = ", ".join(f"{each.id} ({each.title})" for each in known)
        raise InvalidInput(f"There is no experiment {text!r} in this store. It has: {listing}.")

    def runs(self, experiment_id: int) -> list[Run]:
        """The runs of an experiment: by policy, as in the spec, then by seed."""
        query = (
            sa.select(tables.runs, tables.members.c.label, tables.members.c.position)
            .join(tables.members, tables.members.c.run_id == tables.runs.c.id)
            .where(tables.members.c.experiment_id == experiment_id)
            .order_by(tables.members.c.position, tables.members.c.seed)
        )
        return [_run(row) for row in self._rows(query)]

    def run(self, run_id: int) -> Run:
        """One run by its id, outside of any experiment: its label is the policy's name."""
        rows = self._rows(_RUNS.where(tables.runs.c.id == run_id))
        if not rows:
            raise InvalidInput(f"There is no run {run_id} in this store.")
        return _run(rows[0])

    def runs_with(self, keys: list[str]) -> list[Run]:
        """The runs with these keys that are there already; see `run` for their labels."""
        return [_run(row) for row in self._rows(_RUNS.where(tables.runs.c.key.in_(keys)))]

    def progress(self, run_ids: list[int]) -> dict[int, tuple[str, int, float | None]]:
        """run -> (status, rounds done, latest accuracy)."""
        columns = tables.runs.c
        query = sa.select(columns.id, columns.status, columns.rounds_done, columns.accuracy).where(
            columns.id.in_(run_ids)
        )
        return {row.id: (row.status, row.rounds_done, row.accuracy) for row in self._rows(query)}

    def rounds(self, run_id: int, limit: int | None = None) -> dict[str, NDArray[Any]]:
        """The columns of `rounds` as arrays in order of the rounds, NaN for NULL; `diagnostics` as a list of dicts."""
        query = sa.select(tables.rounds).where(tables.rounds.c.run_id == run_id).order_by(tables.rounds.c.round)
        if limit is not None:
            query = query.where(tables.rounds.c.round < limit)
        rows = self._rows(query)
        columns: dict[str, Any] = {}
        for position, column in enumerate(tables.rounds.c):
            values = [row[position] for row in rows]
            if column.name == "diagnostics":
                columns[column.name] = np.array([from_json(value) for value in values], dtype=object)
            elif isinstance(column.type, sa.Double):
                columns[column.name] = np.array([np.nan if value is None else value for value in values], np.float64)
            elif column.name != "run_id":
                columns[column.name] = np.array(values, np.int64)
        return columns

    def federation(self, federation_id: int) -> FederationFacts:
        """What the clients of some runs have."""
        row = self._rows(sa.select(tables.federations).where(tables.federations.c.id == federation_id))[0]
        histogram = None
        if row.label_histogram is not None:
            histogram = np.frombuffer(row.label_histogram, "<i4").reshape(row.num_clients, row.num_classes)
        return FederationFacts(
            id=row.id,
            data=row.data,
            partition=row.partition,
            num_clients=row.num_clients,
            num_classes=row.num_classes,
            num_examples=floats_from(row.num_examples),
            label_histogram=histogram,
        )

    def selections(self, run_id: int, limit: int | None = None) -> Iterator[SelectionRow]:
        """Round by round, so that a million clients never need the whole matrix."""
        query = sa.select(tables.selections).where(tables.selections.c.run_id == run_id)
        query = query.order_by(tables.selections.c.round)
        if limit is not None:
            query = query.where(tables.selections.c.round < limit)
        size = self._num_clients(run_id)
        with self.engine.connect() as connection:
            for row in connection.execution_options(yield_per=64).execute(query):
                yield _selection(row, size)

    def _num_clients(self, run_id: int) -> int:
        query = (
            sa.select(tables.federations.c.num_clients)
            .join(tables.runs, tables.runs.c.federation_id == tables.federations.c.id)
            .where(tables.runs.c.id == run_id)
        )
        rows = self._rows(query)
        return int(rows[0][0]) if rows else 0

    def selection_counts(self, run_id: int, limit: int | None = None) -> NDArray[np.int64]:
        """(N,) how often each client was chosen."""
        counts = np.zeros(self._num_clients(run_id), np.int64)
        columns = tables.selections.c
        query = sa.select(columns.clients).where(columns.run_id == run_id)
        if limit is not None:
            query = query.where(columns.round < limit)
        for (content,) in self._rows(query):
            counts[indices_from(content)] += 1
        return counts

    def array_names(self, run_id: int) -> dict[str, list[int]]:
        """name -> the rounds in which such an array was stored."""
        columns = tables.arrays.c
        query = sa.select(columns.name, columns.round).where(columns.run_id == run_id).order_by(columns.round)
        found: dict[str, list[int]] = {}
        for name, round_index in self._rows(query):
            found.setdefault(name, []).append(round_index)
        return found

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

    def arrays(self, run_id: int, name: str, limit: int | None = None) -> Iterator[tuple[int, NDArray[Any]]]:
        """(round, array) for every round that stored an array of this name."""
        columns = tables.arrays.c
        query = sa.select(columns.round, columns.value).where(columns.run_id == run_id, columns.name == name)
        query = query.order_by(columns.round)
        if limit is not None:
            query = query.where(columns.round < limit)
        with self.engine.connect() as connection:
            for row in connection.execution_options(yield_per=64).execute(query):
                yield row.round, bytes_array(row.value)

    def policy_state(self, run_id: int) -> dict[str, NDArray[Any]]:
        """The arrays of the policy's state at the latest checkpoint (an embedding it learned, ...), by field name."""
        rows = self._rows(sa.select(tables.checkpoints.c.content).where(tables.checkpoints.c.run_id == run_id))
        if not rows:
            return {}
        arrays, _ = unpack_checkpoint(rows[0][0])
        return {name.removeprefix("policy/"): value for name, value in arrays.items() if name.startswith("policy/")}


def _experiment(row: Any) -> Experiment:
    return Experiment(id=row.id, hash=row.hash, title=row.title, spec=from_json(row.spec), touched_at=row.touched_at)


def _run(row: Any) -> Run:
    values = dict(row._mapping)
    for name in ("parameters", "settings", "manifest"):
        values[name] = from_json(values[name] or "{}")
    values["reference"] = values["reference"] or ""
    return Run(**values)


def _selection(row: Any, num_clients: int) -> SelectionRow:
    return SelectionRow(
        round=row.round,
        clients=indices_from(row.clients),
        given_weights=None if row.given_weights is None else floats_from(row.given_weights),
        weights=floats_from(row.weights),
        completed=np.frombuffer(row.completed, np.uint8).astype(bool),
        loss=floats_from(row.loss),
        train_loss=floats_from(row.train_loss),
        duration=floats_from(row.duration),
        update_norm=floats_from(row.update_norm),
        available=mask_from(row.available, num_clients),
    )
