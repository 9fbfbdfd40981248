"""Stored results as plain tables: CSV and Parquet files, and data frames of pandas, polars or pyarrow.

    table = export("results/fedpick.sqlite", "hospitals")       # one row per run and round
    table["accuracy"]                                           # a NumPy array
    table.to_pandas(), table.to_polars(), table.to_arrow()
    table.write("rounds.csv"), table.write("rounds.parquet")

A table implements Arrow's `__arrow_c_stream__`, so that `polars.DataFrame(table)` and DuckDB read it too.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.errors import InvalidInput, MissingDependency, unknown_name
from fedpick.core.record import Callback
from fedpick.core.writing import refuse_directory, write_atomically
from fedpick.experiments import DEFAULT_STORE
from fedpick.experiments.encoding import cell_text
from fedpick.experiments.store import Experiment, Run, Store, opened

__all__ = ["TABLES", "ExportedTable", "export", "replay"]

Columns = dict[str, NDArray[Any]]


class ExportedTable(Mapping[str, NDArray[Any]]):
    """Columns by name, NumPy arrays of equal length. NaN: no value."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self.num_rows = len(next(iter(columns.values()), ()))

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return f"ExportedTable({self.num_rows:,} rows: {', '.join(self._columns)})"

    def to_pandas(self) -> Any:
        """A pandas.DataFrame."""
        return _require("pandas").DataFrame(self._columns)

    def to_polars(self) -> Any:
        """A polars.DataFrame; NaN becomes null."""
        polars = _require("polars")
        columns = {
            name: values.tolist() if values.dtype.kind in "OU" else values for name, values in self._columns.items()
        }
        return polars.DataFrame(columns, nan_to_null=True)

    def to_arrow(self) -> Any:
        """A pyarrow.Table; NaN becomes null."""
        pyarrow = _require("pyarrow")
        return pyarrow.table({name: pyarrow.array(values, from_pandas=True) for name, values in self._columns.items()})

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def to_csv(self) -> str:
        """Text with a header. NaN is an empty cell; a text that a spreadsheet would compute is quoted."""
        output = io.StringIO()
        writer = csv.writer(output, lineterminator="\n")
        writer.writerow([cell_text(name) for name in self])
        writer.writerows(zip(*map(_cells, self._columns.values()), strict=True))
        return output.getvalue()

    def write(self, path: str | Path) -> Path:
        """Write a file, whole or not at all: CSV or Parquet, by its ending."""
        target = refuse_directory(path)
        if target.suffix == ".csv":
            return write_atomically(target, self.to_csv())
        if target.suffix == ".parquet":
            table, buffer = self.to_arrow(), io.BytesIO()
            importlib.import_module("pyarrow.parquet").write_table(table, buffer)
            return write_atomically(target, buffer.getvalue())
        raise InvalidInput(f"A table is written as .csv or .parquet. Got {str(path)!r}.")


def _cells(values: NDArray[Any]) -> list[Any]:
    if values.dtype.kind == "f":
        return ["" if value != value else repr(value) for value in values.tolist()]
    if values.dtype.kind in "OU":
        return [cell_text(text) for text in values.tolist()]
    return values.tolist()  # type: ignore[no-any-return]  # a list, because columns have one axis


def _require(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        wanted = "'fedpick[parquet]'" if package == "pyarrow" else package
        raise MissingDependency(f"This needs {package}. Install it with: pip install {wanted}") from error


def export(
    store: Store | str | Path = DEFAULT_STORE, experiment: str | int | None = None, *, table: str = "rounds"
) -> ExportedTable:
    """Read one experiment (id, title or hash; None: the latest) as a table.

    Args:
        store: an open store, or its path or URL.
        experiment: which one.
        table: "rounds" has a row per run and round; "selections" one per selected client; "clients" one per run and
            client.
    """
    if table not in TABLES:
        raise unknown_name("table", table, TABLES)
    with opened(store) as reader:
        chosen = reader.experiment(experiment)
        parts = [
            {**_names(run, part), **part}
            for run in reader.runs(chosen.id)
            for part in [TABLES[table](reader, run, chosen)]
        ]
    names = list(parts[0]) if parts else []
    return ExportedTable({name: np.concatenate([part[name] for part in parts]) for name in names})


def _names(run: Run, part: Columns) -> Columns:
    """The columns that say which run a row is of."""
    count = len(next(iter(part.values())))
    return {
        "label": np.full(count, run.label, dtype=object),
        "policy": np.full(count, run.policy, dtype=object),
        "seed": np.full(count, run.seed, np.int64),
    }


def _rounds(store: Store, run: Run, experiment: Experiment) -> Columns:
    columns = dict(store.rounds(run.id, limit=experiment.rounds))
    texts = [json.dumps(each, sort_keys=True) for each in columns.pop("diagnostics")]
    return {**columns, "diagnostics": np.array(texts, dtype=object)}


def _selections(store: Store, run: Run, experiment: Experiment) -> Columns:
    found: dict[str, list[NDArray[Any]]] = {}
    for record in store.records(run.id, limit=experiment.rounds):
        outcome = record.outcome
        row = {
            "round": np.full(len(outcome.clients), record.index, np.int64),
            "client": outcome.clients,
            "weight": record.weights,
            "completed": outcome.completed,
            **{name: getattr(outcome, name) for name in ("loss", "train_loss", "duration", "update_norm")},
        }
        for name, values in row.items():
            found.setdefault(name, []).append(values)
    empty = {name: np.empty(0, kind) for name, kind in (("round", np.int64), ("client", np.int64), ("weight", float))}
    empty |= {"completed": np.empty(0, bool)}
    empty |= {name: np.empty(0) for name in ("loss", "train_loss", "duration", "update_norm")}
    return {name: np.concatenate(parts) for name, parts in found.items()} or empty


def _clients(store: Store, run: Run, experiment: Experiment) -> Columns:
    facts = None if run.federation_id is None else store.federation(run.federation_id)
    size = 0 if facts is None else facts.num_clients
    selected, completed, available, weight = np.zeros((4, size))
    rounds = 0
    for choices in store.choices(run.id, limit=experiment.rounds):
        selected += np.bincount(choices.clients, minlength=size)
        completed += np.bincount(choices.clients[choices.completed], minlength=size)
        weight += np.bincount(choices.clients, choices.weights, minlength=size)
        available += choices.available.sum(axis=0)
        rounds += len(choices.available)
    accuracies = np.full(size, np.nan)
    measured = store.client_accuracies(run.id, rounds)
    if measured is not None:
        accuracies[: len(measured.values)] = measured.values[:size]
    return {
        "client": np.arange(size),
        "num_examples": np.empty(0) if facts is None else facts.num_examples,
        "rounds_available": available.astype(np.int64),
        "rounds_selected": selected.astype(np.int64),
        "rounds_completed": completed.astype(np.int64),
        "weight": weight,
        "accuracy": accuracies,
    }


TABLES: Mapping[str, Callable[[Store, Run, Experiment], Columns]] = {
    "rounds": _rounds,
    "selections": _selections,
    "clients": _clients,
}
"""The tables that can be exported."""


def replay(store: Store | str | Path, callback: Callable[[Run], Callback], experiment: str | int | None = None) -> None:
    """Send stored rounds to callbacks: `callback(run)` makes the one of each run, such as a TensorBoard directory."""
    with opened(store) as reader:
        chosen = reader.experiment(experiment)
        for run in reader.runs(chosen.id):
            made = callback(run)
            for record in reader.records(run.id, limit=chosen.rounds):
                made.on_round(record)
            made.on_end()
