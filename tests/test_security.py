"""What SECURITY.md promises about stores and reports, claim by claim."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from html import escape
from html.parser import HTMLParser

import pytest

pytest.importorskip("plotly")

from fedpick.experiments.store import Store, StoreError, open_store
from fedpick.experiments.verify import verify
from fedpick.report import write_report
from fedpick.report.analysis import load_results
from fedpick.report.tables import render, tables_of
from tests.report.report_store import make_spec, make_store

SECRET = "hunter2"
EVIL = "</script></title></pre><evil a=\"1\" b='2'>&amp;<!--"


class Tags(HTMLParser):
    """The names of all elements, and the attributes named like EVIL's."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}
        self.attributes: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.found[tag] = self.found.get(tag, 0) + 1
        self.attributes |= {name for name, _ in attrs}


def tags_of(path):
    parser = Tags()
    parser.feed(path.read_text(encoding="utf-8"))
    parser.close()
    return parser


def hostile(value):
    """The same tree with EVIL in every text, except in the names that fedpick looks up."""
    if isinstance(value, dict):
        return {
            f"{key}{EVIL}" if key in ("beta", "lr", "number") else key: hostile(each) for key, each in value.items()
        }
    if isinstance(value, list):
        return [hostile(each) for each in value]
    return value + EVIL if isinstance(value, str) else value


def test_text_of_a_foreign_store_is_never_markup(tmp_path):
    """Titles, labels, policies, parameters, settings, versions, hosts, errors, citations and diagnostics."""
    files = {}
    for name in ("plain", "hostile"):
        path = tmp_path / f"{name}.sqlite"
        # Three lines of one policy with different numbers: a chart of its own.
        make_store(path, make_spec(("uniform", "fedcor", "ca-fed", "a", "b"), rounds=5, seeds=1)).close()
        if name == "hostile":
            with sqlite3.connect(path) as connection:
                for table, texts, trees in (
                    ("experiments", ("title", "touched_at"), ("spec",)),
                    ("members", ("label",), ()),
                    ("federations", ("data", "partition"), ()),
                    ("runs", ("policy", "status", "reference"), ("parameters", "manifest")),
                    ("rounds", (), ("diagnostics",)),
                ):
                    for column in texts:
                        connection.execute(f"UPDATE {table} SET {column} = {column} || ?", (EVIL,))
                    for column in trees:
                        for key, text in connection.execute(f"SELECT rowid, {column} FROM {table}").fetchall():
                            tree = json.dumps({**hostile(json.loads(text)), EVIL: 1.5})
                            connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (tree, key))
                connection.execute("UPDATE runs SET error = ?", (EVIL,))
            connection.close()
        files[name] = tags_of(write_report(path, tmp_path / f"{name}.html"))
    assert "evil" not in files["hostile"].found
    assert not {"a", "b"} & files["hostile"].attributes
    for tag in ("script", "style", "title"):
        assert files["hostile"].found[tag] == files["plain"].found[tag]
    text = (tmp_path / "hostile.html").read_text(encoding="utf-8")
    assert EVIL not in text
    assert escape(EVIL) in text
    assert "sweep-uniform--script" in text


def fingerprint(directory):
    return {
        file.name: (file.stat().st_mtime_ns, hashlib.sha256(file.read_bytes()).hexdigest())
        for file in sorted(directory.iterdir())
    }


@pytest.mark.parametrize("left_open", [False, True])
def test_reading_never_changes_a_store(tmp_path, left_open):
    """With `left_open`, a writer still has it open, and its write-ahead log holds rows."""
    directory = tmp_path / "store"
    directory.mkdir()
    path = directory / "a.sqlite"
    writer = make_store(path, make_spec(rounds=3, seeds=1))
    if not left_open:
        writer.close()
    before = fingerprint(directory)
    store = open_store(path)
    experiment = store.experiment()
    render(tables_of(load_results(store, experiment)), "terminal")
    for run in store.runs(experiment.id):
        assert len(list(store.records(run.id))) == 3
    assert verify(store).rounds == 9
    write_report(store, tmp_path / "r.html")
    with pytest.raises(StoreError, match="opened for reading"):
        store.update_run(1, status="failed")
    store.close()
    after = fingerprint(directory)
    # The index of the log is memory that readers and writers share; SQLite makes it anew.
    for each in (before, after):
        each.pop("a.sqlite-shm", None)
    assert after == before
    writer.close()


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://ann:{SECRET}@127.0.0.1:1/db",
        f"postgresql://127.0.0.1:1/db?user=ann&password={SECRET}",
        f"postgresql://ann:{SECRET}@127.0.0.1:1/db?sslmode=nonsense",
        f"postgresql://ann:{SECRET}@127.0.0.1:1/db?nonsense=1",
        f"postgresql://ann:{SECRET}@[::1/db",
        f"nonsense://ann:{SECRET}@127.0.0.1:1/db",
        f"postgresql+nonsense://ann:{SECRET}@127.0.0.1:1/db",
        f"sqlite://ann:{SECRET}@127.0.0.1/db",
    ],
)
def test_errors_of_drivers_show_no_password(url):
    pytest.importorskip("psycopg")
    with pytest.raises(StoreError) as refused:
        Store(url)
    assert SECRET not in str(refused.value)
