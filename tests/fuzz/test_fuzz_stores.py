"""Damaged stores: whatever reads one answers with a sentence."""

import sqlite3

import numpy as np
import pytest

from fedpick.experiments.encoding import array_bytes
from fedpick.experiments.store import open_store
from fedpick.experiments.verify import verify
from fedpick.report.material import read_material
from fedpick.report.tables import FORMATS, render, tables_of
from tests.fuzz.damage import ODD_VALUES, both_half, damaged, pick, survives
from tests.report.report_store import make_spec, make_store


class Reader:
    """Reads whatever a file holds. Most cases share a store: SQLAlchemy compiles the queries of a new one again."""

    def __init__(self, file, content):
        file.write_bytes(content)
        self.file, self.store = file, open_store(file)

    def read(self, rng):
        self.store.close()  # the next connection opens the new content
        if rng.random() < 0.05:
            self.store = open_store(self.file)
        store = self.store
        if rng.random() < 0.2:
            verify(store)
            return
        for experiment in store.experiments():
            results = read_material(store, experiment).results
            render(tables_of(results), pick(rng, list(FORMATS)))
            for run in store.runs(experiment.id):
                list(store.records(run.id))
                for name, rounds in store.array_names(run.id).items():
                    for index in rounds:
                        store.array(run.id, index, name)


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    """The bytes of two small stores: a run with arrays, and one with numbers that its policy reported."""
    found = []
    for label in ("fedcor", "ca-fed"):
        path = tmp_path_factory.mktemp("store") / f"{label}.sqlite"
        make_store(path, make_spec((label,), rounds=6, seeds=1), num_clients=6, num_classes=3).close()
        with sqlite3.connect(path) as connection:
            accuracies = array_bytes(np.linspace(0, 1, 6).astype("<f4"))
            connection.execute("INSERT INTO client_accuracies VALUES (1, 6, 'test', ?)", (accuracies,))
        for words in ("PRAGMA journal_mode = DELETE", "PRAGMA page_size = 512", "VACUUM"):  # few bytes without meaning
            connection.execute(words)
        connection.close()
        found.append(path.read_bytes())
    return found


@both_half
def test_damaged_bytes(tmp_path, contents, cases):
    file = tmp_path / "damaged.sqlite"
    reader = Reader(file, contents[0])

    def case(rng):
        file.write_bytes(damaged(pick(rng, contents), rng, moves=rng.random() < 0.1))
        reader.read(rng)

    assert survives(case, cases, seed=9) > cases // 10


@both_half
def test_odd_values_in_rows(tmp_path, contents, cases):
    file = tmp_path / "odd.sqlite"
    reader = Reader(file, contents[0])
    storable = [value for value in ODD_VALUES if isinstance(value, (int, float, str, bytes, type(None)))]
    storable = [value for value in storable if not isinstance(value, int) or abs(value) < 2**63]

    def case(rng):
        file.write_bytes(pick(rng, contents))
        connection = sqlite3.connect(file)
        connection.execute("PRAGMA synchronous = OFF")
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for _ in range(int(rng.integers(1, 3))):
            table = pick(rng, tables)
            column = pick(rng, [row[1] for row in connection.execute(f"PRAGMA table_info({table})")])
            rows = connection.execute(f"SELECT rowid, {column} FROM {table} ORDER BY rowid").fetchall()
            if not rows:
                continue
            row, value = pick(rng, rows), pick(rng, storable)
            if isinstance(row[1], (bytes, str)) and row[1] and rng.random() < 0.5:
                old = row[1] if isinstance(row[1], bytes) else row[1].encode()
                value = damaged(old, rng)
                value = value if isinstance(row[1], bytes) else value.decode(errors="replace")
            try:
                connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (value, row[0]))
            except sqlite3.IntegrityError:
                continue
        connection.commit()
        connection.close()
        reader.read(rng)

    survives(case, cases, seed=10)
