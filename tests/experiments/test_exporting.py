"""Stored results as tables for other programs."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest

from fedpick.core.errors import InvalidInput, MissingDependency, UnknownName
from fedpick.core.record import Callback
from fedpick.experiments import export, exporting, replay
from tests.report.report_store import make_spec, make_store

FORMULA = "=cmd|' /C calc'!A0"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("export") / "s.sqlite"
    store = make_store(file, make_spec(("uniform", "fedcor", FORMULA), rounds=6, budget=3), every=2)
    store.close()
    return file


def test_rounds_are_those_of_the_store(path):
    table = export(path)
    assert table.num_rows == 3 * 2 * 6
    assert list(table)[:4] == ["label", "policy", "seed", "round"]
    from fedpick.experiments.store import open_store

    store = open_store(path)
    for run in store.runs(1):
        mine = (table["label"] == run.label) & (table["seed"] == run.seed)
        columns = store.rounds(run.id)
        np.testing.assert_array_equal(table["accuracy"][mine], columns["accuracy"])
        np.testing.assert_array_equal(table["bytes_down"][mine], columns["bytes_down"])
    store.close()
    assert repr(table).startswith("ExportedTable(36 rows: label, policy")


def test_selections_and_clients_add_up(path):
    chosen, clients = export(path, "toy", table="selections"), export(path, 1, table="clients")
    assert chosen.num_rows == clients["rounds_selected"].sum() == 3 * 2 * 6 * 3
    assert clients["rounds_completed"].sum() == chosen["completed"].sum()
    assert clients["weight"].sum() == pytest.approx(chosen["weight"].sum())
    assert (clients["rounds_available"] <= 6).all()
    assert np.isnan(clients["accuracy"]).all()  # this store was made before accuracies were measured


def test_csv_has_no_formulas_and_no_nan(path, tmp_path):
    file = export(path).write(tmp_path / "rounds.csv")
    rows = list(csv.DictReader(io.StringIO(file.read_text())))
    assert len(rows) == 36
    assert {row["label"] for row in rows} == {"uniform", "fedcor", f"'{FORMULA}"}
    assert rows[0]["accuracy"] == "" and float(rows[1]["accuracy"]) == export(path)["accuracy"][1]
    assert "nan" not in file.read_text().lower()


def test_bad_requests_are_one_sentence(path, tmp_path):
    with pytest.raises(InvalidInput, match=r"\.csv or \.parquet"):
        export(path).write(tmp_path / "rounds.xlsx")
    with pytest.raises(UnknownName, match="Did you mean 'rounds'"):
        export(path, table="round")
    with pytest.raises(InvalidInput, match="no experiment 'nosuch'"):
        export(path, "nosuch")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("method", "package"), [("to_pandas", "pandas"), ("to_polars", "polars"), ("to_arrow", "'fedpick.parquet.'")]
)
def test_a_missing_package_is_named(path, monkeypatch, method, package):
    def missing(name):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(exporting.importlib, "import_module", missing)
    with pytest.raises(MissingDependency, match=f"pip install {package}"):
        getattr(export(path), method)()


def test_pandas(path):
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    frame = export(path).to_pandas()
    assert isinstance(frame, pandas.DataFrame) and frame.shape == (36, len(export(path)))
    assert frame.groupby("label")["round"].count().tolist() == [12, 12, 12]


def test_polars(path):
    polars = pytest.importorskip("polars", reason="needs polars")
    frame = export(path).to_polars()
    assert frame.height == 36 and frame["accuracy"].null_count() == 18
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    assert polars.DataFrame(export(path)).height == 36  # by Arrow's stream


def test_parquet(path, tmp_path):
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    from pyarrow import parquet

    read = parquet.read_table(export(path).write(tmp_path / "rounds.parquet"))
    assert read.num_rows == 36 and read["accuracy"].null_count == 18
    assert read["label"].to_pylist()[-1] == FORMULA  # a formula only to spreadsheets


def test_replay_sends_every_stored_round(path):
    class Notes(Callback):
        def __init__(self, run):
            self.run, self.rounds, self.ended = run, [], False
            made.append(self)

        def on_round(self, record):
            self.rounds.append(record.index)

        def on_end(self, error=None):
            self.ended = True

    made = []
    replay(path, Notes)
    assert [(each.run.label, each.run.seed) for each in made][:3] == [("uniform", 0), ("uniform", 1), ("fedcor", 0)]
    assert all(each.rounds == list(range(6)) and each.ended for each in made)
