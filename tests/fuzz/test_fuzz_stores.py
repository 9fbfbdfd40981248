"""Damaged stores: whatever reads one answers with a sentence."""

import sqlite3

from fedpick.experiments.store import open_store
from fedpick.report.analysis import load_results
from fedpick.report.material import read_material
from fedpick.report.tables import render, tables_of
from tests.fuzz.damage import ODD_VALUES, both, damaged, pick, survives
from tests.report.report_store import make_spec, make_store


def read_everything(path):
    store = open_store(path)
    try:
        for experiment in store.experiments():
            results = load_results(store, experiment)
            for form in ("terminal", "csv", "markdown", "latex"):
                render(tables_of(results), form)
            for run in store.runs(experiment.id):
                list(store.records(run.id))
                for name, rounds in store.array_names(run.id).items():
                    for index in rounds:
                        store.array(run.id, index, name)
            read_material(store, experiment)
    finally:
        store.close()


def small_store(tmp_path):
    path = tmp_path / "good.sqlite"
    make_store(path, make_spec(rounds=8, seeds=1), num_clients=8, num_classes=3).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    connection.close()
    return path


@both
def test_damaged_bytes(tmp_path, cases):
    content = small_store(tmp_path).read_bytes()
    file = tmp_path / "damaged.sqlite"

    def case(rng):
        file.write_bytes(damaged(content, rng))
        read_everything(file)

    assert survives(case, cases, seed=9) > cases // 10


@both
def test_odd_values_in_rows(tmp_path, cases):
    content = small_store(tmp_path).read_bytes()
    file = tmp_path / "odd.sqlite"
    storable = [value for value in ODD_VALUES if isinstance(value, (int, float, str, bytes, type(None)))]
    storable = [value for value in storable if not isinstance(value, int) or abs(value) < 2**63]

    def case(rng):
        file.write_bytes(content)
        connection = sqlite3.connect(file)
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for _ in range(int(rng.integers(1, 3))):
            table = pick(rng, tables)
            column = pick(rng, [row[1] for row in connection.execute(f"PRAGMA table_info({table})")])
            row = connection.execute(f"SELECT rowid, {column} FROM {table} ORDER BY RANDOM() LIMIT 1").fetchone()
            if row is None:
                continue
            value = pick(rng, storable)
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
        read_everything(file)

    survives(case, cases, seed=10)
