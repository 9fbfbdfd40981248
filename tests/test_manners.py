"""What a console and a notebook show of the objects that users hold."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

import fedpick
from fedpick import availability

CLIENTS = fedpick.Clients(num_examples=np.ones(1000))


def test_a_session_and_a_trace_are_one_line():
    session = fedpick.Session(fedpick.policies.get("md"), CLIENTS, seed=7)
    assert repr(session) == "Session(MD(), 1,000 clients, seed=7, round=0)"
    trace = availability.get("log-normal").start(CLIENTS, seed=3)
    assert repr(trace) == f"{type(trace).__name__}(1,000 clients, seed=3)"


def test_a_simulator_is_one_line():
    pytest.importorskip("jax")
    from fedpick import data
    from fedpick.sim import LocalTraining, Simulator

    federation = data.partition(data.load("synthetic", num_clients=4, dimension=3), "natural")
    simulator = Simulator(federation, "logistic", local=LocalTraining(lr=0.1, steps=1))
    assert repr(simulator) == "Simulator('synthetic', task='logistic', 4 clients, seed=0, round=0)"


def test_results_are_a_line_in_a_console_and_tables_in_a_notebook(tmp_path):
    pytest.importorskip("sqlalchemy")
    from fedpick.report.analysis import load_results
    from tests.report.report_store import HOSTILE, make_spec, make_store

    spec = make_spec(("uniform", HOSTILE), seeds=2, rounds=3)
    with closing(make_store(tmp_path / "a.sqlite", spec)) as store:
        assert repr(store) == f"Store({str(tmp_path / 'a.sqlite')!r})"
        results = load_results(store, store.experiment(None))
        assert repr(results) == f"Results('toy', 4 runs of uniform, {HOSTILE})"
        assert repr(results.policies[0]) == "PolicyResults('uniform', 2 runs)"
        assert repr(results.policies[0].runs[1]) == "RunResults('uniform', seed=1, 3 rounds)"
        page = results._repr_html_()
    assert page.count("<table>") >= 2 and "final accuracy %" in page
    assert HOSTILE not in page and "&lt;/script&gt;" in page
