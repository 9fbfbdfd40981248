"""A store written by fedpick 0.1.0, schema 1, before the packages were rearranged: it opens, resumes and reports."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax")

from fedpick.experiments.runner import run
from fedpick.experiments.spec import load_spec
from fedpick.experiments.store import Store
from fedpick.report import tables
from fedpick.report.analysis import load_results

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def store(tmp_path):
    file = tmp_path / "older.sqlite"
    file.write_bytes(gzip.decompress((FIXTURES / "store-0.1.0.sqlite.gz").read_bytes()))
    return Store(file)


def test_an_older_store_is_read(store):
    experiment = store.experiment()
    assert experiment.title == "store of version 0.1.0, schema 1"
    for each in store.runs(experiment.id):
        assert (each.status, each.rounds_done) == ("done", 12)
        assert len(list(store.records(each.id))) == 12
    shown = tables.tables_of(load_results(store, experiment))
    assert [label for label, _ in shown[0].lines] == ["uniform", "fedcor", "pow-d", "fedgs", "ca-fed", "rpow-d"]


def test_its_runs_have_the_same_identity_and_resume_to_the_same_rounds(store):
    """12 of 24 rounds are in the store; the file of expectations holds all 24, made without a stop.

    One exception: `rpow-d` ranks clients that failed by the median loss now, no longer by the mean. In its rounds 12,
    15 and 19 the order within the cohort was changed to what this version gives; the cohorts are the same clients.
    """
    expected = json.loads((FIXTURES / "store-0.1.0-expected.json").read_text())
    spec = load_spec(FIXTURES / "store-0.1.0.toml").override(seeds=1)
    before = {each.id for each in store.runs(store.experiment().id)}
    report = run(spec, store, processes=1)
    assert report.complete, report.failures
    runs = store.runs(report.experiment.id)
    assert {each.id for each in runs} == before
    for each in runs:
        for record, known in zip(store.records(each.id), expected[each.policy], strict=True):
            assert record.selection.clients.tolist() == known["clients"]
            np.testing.assert_allclose(record.weights, known["weights"], rtol=1e-6, atol=1e-12)
            assert record.test_accuracy == pytest.approx(known["accuracy"], abs=0.02)
            assert record.test_loss == pytest.approx(known["loss"], rel=1e-3)
