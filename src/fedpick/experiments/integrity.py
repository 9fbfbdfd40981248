"""Checksums of stored rounds, in a chain.

The digest of a round covers the digest before it, the round's row, its selection and its arrays. The chain of a run
starts with the run's key and its federation. A changed, missing or exchanged row therefore shows. Rounds written before
checksums existed have none: they are the first rounds of a run, and they count as unverified.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedpick.core.errors import StateFileError
from fedpick.experiments import schema as tables
from fedpick.experiments.schema import sa

__all__ = ["Chain", "Damage", "link", "start_of_chain", "verify_rounds"]


def _columns(table: sa.Table) -> tuple[tuple[str, type | None], ...]:
    kinds = {sa.Integer: int, sa.BigInteger: int, sa.Double: float}
    return tuple((column.name, kinds.get(type(column.type))) for column in table.c if column.name != "run_id")


_YOUNGER = {column.name for column in tables.YOUNGER_COLUMNS}
_ROUND, _SELECTION, _FEDERATION = map(_columns, (tables.rounds, tables.selections, tables.federations))


def _absorb(digest: Any, row: Mapping[Any, Any], columns: Iterable[tuple[str, type | None]]) -> None:
    """Add a row. Databases return 0.0 for -0.0 and floats for integers in a column of floats: make them equal."""
    values: list[Any] = []
    blobs = []
    for name, kind in columns:
        value = row[name]
        if isinstance(value, bytes):
            blobs.append(value)
            values.append(len(value))
        elif value is not None:
            values.append(value if kind is None else kind(value) + kind(0))
        elif name not in _YOUNGER:  # rounds written before such a column existed keep their digest
            values.append(None)
    digest.update(repr(values).encode())
    for blob in blobs:
        digest.update(blob)


def link(
    before: bytes, round_row: Mapping[Any, Any], selection: Mapping[Any, Any], arrays: Mapping[str, bytes]
) -> bytes:
    """Return the digest of a round, given the digest of the round before it."""
    digest = hashlib.blake2b(before, digest_size=16)
    _absorb(digest, round_row, _ROUND)
    _absorb(digest, selection, _SELECTION)
    for name, value in sorted(arrays.items()):
        _absorb(digest, {"name": name, "value": value}, (("name", None), ("value", None)))
    return digest.digest()


def start_of_chain(connection: sa.Connection, run_id: int) -> bytes:
    """Return what the digest of a run's first round follows."""
    runs, federations = tables.runs.c, tables.federations
    key, federation_id = connection.execute(sa.select(runs.key, runs.federation_id).where(runs.id == run_id)).one()
    digest = hashlib.blake2b(str(key).encode(), digest_size=16)
    for row in connection.execute(sa.select(federations).where(federations.c.id == federation_id)).mappings():
        _absorb(digest, row, [(name, kind) for name, kind in _FEDERATION if name != "id"])
    return digest.digest()


@dataclass(frozen=True)
class Chain:
    """The last digest of a run, and how many of its rounds have no checksum."""

    unverified: int
    digest: bytes


class Damage(StateFileError):
    """Stored rounds that were changed or lost."""


def verify_rounds(connection: sa.Connection, run_id: int, until: int) -> Chain:
    """Verify the first `until` rounds of a run. Raise Damage at the first one that is missing or was changed."""
    rounds = _by_round(connection, tables.rounds, run_id, until)
    selections = _by_round(connection, tables.selections, run_id, until)
    arrays = _by_round(connection, tables.arrays, run_id, until)
    checksums = _by_round(connection, tables.checksums, run_id, until)
    digest, unverified, chained = start_of_chain(connection, run_id), 0, False
    for index in range(until):
        row, selection, stored, checksum = next(rounds), next(selections), next(arrays), next(checksums)
        if not row or not selection:
            raise Damage(f"round {index} is missing")
        if checksum:
            chained = True
            digest = link(digest, row[0], selection[0], {each["name"]: each["value"] for each in stored})
            if digest != checksum[0]["digest"]:
                raise Damage(f"round {index} was changed, or the rounds before it: its checksum does not match")
        elif chained:
            raise Damage(f"the checksum of round {index} is missing")
        else:
            unverified += 1
    return Chain(unverified, digest)


def _by_round(connection: sa.Connection, table: sa.Table, run_id: int, until: int) -> Iterator[list[Any]]:
    """Yield for every round the list of its rows."""
    if table is tables.checksums and not sa.inspect(connection).has_table(table.name):
        yield from ([] for _ in range(until))  # an older store, opened for reading
        return
    columns = tables.readable_columns(connection, table)
    query = sa.select(*columns).where(table.c.run_id == run_id, table.c.round < until).order_by(table.c.round)
    rows = connection.execute(query, execution_options={"yield_per": 64}).mappings()
    row = next(rows, None)
    for index in range(until):
        found = []
        while row is not None and row["round"] <= index:
            found.append(row)
            row = next(rows, None)
        yield found
