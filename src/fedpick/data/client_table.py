"""Tables of clients: who they are, how many examples each has, and of which labels. A CSV or a Parquet file.

| column         | meaning                                                                                   |
|----------------|-------------------------------------------------------------------------------------------|
| `id`           | the name of a client, as in its device logs; also `client`, `client_id`                   |
| `num_examples` | how many examples it has; may be left out if there are labels, and is their sum otherwise |
| `label_NAME`   | how many of them have this label; one column per label, or none at all                    |
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.availability.logs import client_id
from fedpick.core.errors import DataError, MissingDependency

__all__ = ["ClientTable", "read_clients"]

_IDS = ("id", "client", "client_id")
_SIZE = "num_examples"
_LABEL = "label_"
_MOST_EXAMPLES = 2**31 - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientTable:
    """The clients of a federation, in the order of the file."""

    ids: tuple[str, ...]
    """(N,)"""
    num_examples: NDArray[np.int64]
    """(N,)"""
    labels: tuple[str, ...] = ()
    """The names of the labels."""
    histogram: NDArray[np.int64] | None = None
    """(N, L) examples per client and label; None if the table has no labels."""

    def __len__(self) -> int:
        return len(self.ids)


def read_clients(path: str | Path) -> ClientTable:
    """Read a table of clients and validate it; an error names the line."""
    file = Path(path)
    if not file.is_file():
        raise DataError(f"There is no table of clients at {path}. Pass the path of a CSV or Parquet file.")
    facts = file.stat()
    return _read(file.absolute(), str(path), facts.st_mtime_ns, facts.st_size)


@lru_cache(maxsize=4)
def _read(file: Path, shown: str, *_: int) -> ClientTable:
    """Cached by time and size: every run of an experiment deals by the same table."""
    header, rows = _parquet(file, shown) if file.suffix.lower() == ".parquet" else _csv(file, shown)
    id_column, size_column, label_columns = _columns(shown, header)
    ids: dict[str, str] = {}
    sizes: list[int] = []
    counts: list[list[int]] = []
    for where, row in rows:
        place = f"{shown}, {where}"
        name = client_id(row[id_column])
        if not name:
            raise DataError(f"{place}: the id of the client is missing.")
        if name in ids:
            raise DataError(
                f"{place}: the client {name!r} occurs twice, first in {ids[name]}. Give each client one row."
            )
        ids[name] = where
        own = [_count(place, header[column], row[column]) for column in label_columns]
        size = sum(own) if size_column is None else _count(place, _SIZE, row[size_column])
        if label_columns and size != sum(own):
            raise DataError(f"{place}: num_examples is {size}, but the labels of {name!r} sum to {sum(own)}.")
        if size < 1:
            raise DataError(f"{place}: the client {name!r} has no examples. Leave it out: it cannot train.")
        sizes.append(size)
        counts.append(own)
    if not ids:
        raise DataError(f"{shown} has a header and no clients.")
    if sum(sizes) > _MOST_EXAMPLES:
        raise DataError(f"{shown}: all clients together may have {_MOST_EXAMPLES:,} examples. Got {sum(sizes):,}.")
    histogram = np.array(counts, dtype=np.int64) if label_columns else None
    return ClientTable(
        ids=tuple(ids),
        num_examples=np.array(sizes, dtype=np.int64),
        labels=tuple(header[column].removeprefix(_LABEL) for column in label_columns),
        histogram=histogram,
    )


def _columns(shown: str, header: Sequence[str]) -> tuple[int, int | None, list[int]]:
    """The columns of the id, of the size and of the labels."""
    expected = "Expected the columns id, num_examples and label_NAME for each label"
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{shown}, header: the column {twice!r} occurs twice. {expected}.")
    own = [place for place, name in enumerate(header) if name in _IDS]
    labels = [place for place, name in enumerate(header) if name.startswith(_LABEL)]
    unknown = next((name for name in header if name not in (*_IDS, _SIZE) and not name.startswith(_LABEL)), None)
    if len(own) != 1:
        found = "several" if own else f"no column of ids (named {', '.join(_IDS)})"
        raise DataError(f"{shown}, header: found {found}. {expected}.")
    if unknown is not None:
        raise DataError(
            f"{shown}, header: the column {unknown!r} is not known. {expected}: remove it, or name it "
            f"{_LABEL + unknown!r} if it counts examples of a label."
        )
    size = header.index(_SIZE) if _SIZE in header else None
    if len(labels) == 1:
        raise DataError(f"{shown}, header: one label alone leaves nothing to learn. {expected}, two or more, or none.")
    if size is None and not labels:
        raise DataError(f"{shown}, header: found neither num_examples nor a label. {expected}.")
    return own[0], size, labels


def _count(place: str, column: str, value: str) -> int:
    """A number of examples."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (0 <= number <= _MOST_EXAMPLES and number.is_integer()):
        got = repr(value) if value else "nothing"
        raise DataError(f"{place}: {column} must be a whole number of at least 0. Got {got}.")
    return int(number)


def _csv(file: Path, shown: str) -> tuple[list[str], Iterator[tuple[str, list[str]]]]:
    """The header and the rows of a CSV file, each with its line."""

    def rows() -> Iterator[tuple[str, list[str]]]:
        try:
            with file.open(newline="", encoding="utf-8-sig") as content:
                reader = csv.reader(content, strict=True)
                for row in reader:
                    if row:
                        yield f"line {reader.line_num}", [cell.strip() for cell in row]
        except (csv.Error, ValueError) as error:
            raise DataError(f"{shown} is not a CSV file in UTF-8: {error}.") from error

    lines = rows()
    _, header = next(lines, ("", []))
    if not header:
        raise DataError(f"{shown} is empty. Expected a table of clients with a header.")

    def checked() -> Iterator[tuple[str, list[str]]]:
        for where, row in lines:
            if len(row) != len(header):
                raise DataError(f"{shown}, {where}: expected {len(header)} columns, as in the header. Got {len(row)}.")
            yield where, row

    return [name.lower() if name.lower() in (*_IDS, _SIZE) else name for name in header], checked()


def _parquet(file: Path, shown: str) -> tuple[list[str], Iterator[tuple[str, list[str]]]]:
    """The columns and the rows of a Parquet file; rows count from 1, without a header."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingDependency(
            f"Reading {shown} needs pyarrow. Install it with: pip install 'fedpick[parquet]', or save the table as CSV."
        ) from error
    try:
        columns: Mapping[str, list[Any]] = parquet.read_table(file).to_pydict()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{shown} is damaged or not a Parquet file: {error}.") from error

    def rows() -> Iterator[tuple[str, list[str]]]:
        for place, row in enumerate(zip(*columns.values(), strict=True), start=1):
            yield f"row {place}", ["" if cell is None else str(cell).strip() for cell in row]

    return list(columns), rows()
