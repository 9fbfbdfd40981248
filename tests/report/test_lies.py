"""Who lied, who lost credibility and when, as a stored run shows it."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

import fedpick
from fedpick import Clients, Outcome, Session
from fedpick.core.errors import StateFileError
from fedpick.core.record import RoundRecord
from fedpick.core.session import with_notes
from fedpick.experiments.recorder import Recorder
from fedpick.experiments.store import Store
from fedpick.report import lies, tables
from fedpick.report.analysis import load_results
from fedpick.report.html import page_of
from fedpick.report.material import read_material
from tests.report.report_store import make_spec, make_store
from tests.report.test_tables import make_results, make_run


def attacked(count, liars, *, lost=None, regained=None, distrusted=None, guard="mild", rounds=6, seed=0):
    """A run whose first clients lie; `distrusted` are the diagnostics of a store from before `lost`."""
    results = make_run([0.5] * rounds, counts=np.ones(count, int), seed=seed)
    settings = {"attacks": {"kind": "inflate", "clients": list(range(liars))}, "seed": 0, "guard": guard}
    notes = [{} if clients is None else {"distrusted": clients} for clients in distrusted or [None] * rounds]
    return replace(
        results,
        run=replace(results.run, settings=settings),
        rounds={**results.rounds, "diagnostics": np.array(notes, object)},
        lost={index: np.array(clients) for index, clients in (lost or {}).items()},
        regained={index: np.array(clients) for index, clients in (regained or {}).items()},
    )


def test_shares_and_rounds_of_more_clients_than_a_round_lists():
    lost = {0: np.arange(900), 3: np.arange(900, 1001)}
    run = attacked(3000, 1000, lost=lost, distrusted=[None, *[list(range(100))] * 5])
    assert lies.found(run) == 1.0
    assert lies.false_alarms(run) == pytest.approx(1 / 2000)
    assert lies.found_by(run) == 1


def test_who_lost_credibility_when_and_how_often():
    run = attacked(10, 2, lost={0: [1, 7], 4: [1], 5: [0]}, regained={2: [1], 5: [7]})
    assert lies.doubts_of(run) == [
        lies.Doubt(client=1, lost_in=1, regained_in=3, times=2, liar=True),
        lies.Doubt(client=7, lost_in=1, regained_in=6, times=1, liar=False),
        lies.Doubt(client=0, lost_in=6, regained_in=None, times=1, liar=True),
    ]


def test_a_store_from_before_rounds_named_them_is_still_read():
    run = attacked(10, 2, distrusted=[None, None, [0], [0, 5], [0, 1, 5], [1]])
    assert [(doubt.client, doubt.lost_in) for doubt in lies.doubts_of(run)] == [(0, 2), (5, 3), (1, 4)]
    assert lies.found(run) == 1.0
    assert lies.false_alarms(run) == 1 / 8
    assert lies.found_by(run) == 2


def test_half_of_the_liars_is_enough():
    assert lies.found_by(attacked(10, 4, lost={2: [0], 3: [1], 5: [2, 3]})) == 4
    assert lies.found_by(attacked(10, 2, lost={2: [0]})) == 3
    assert lies.found_by(attacked(10, 3, lost={2: [0], 4: [1]})) == 5
    assert lies.found_by(attacked(10, 3, lost={2: [0]})) is None


def test_without_a_guard_nobody_is_found():
    assert lies.found(attacked(10, 2, guard="off")) is None


def test_the_table_marks_liars_and_says_how_many_it_leaves_out():
    many = attacked(100, 40, lost={0: np.arange(50)})
    few = attacked(100, 40, lost={2: [3, 99]}, seed=1)
    results = make_results({"A": [many, few], "B": [few]})
    table = tables.credibility_table(results, most=10)
    assert [label for label, _ in table.lines] == [
        *(f"A, seed 0: client {client} (liar)" for client in range(5)),
        "B, seed 1: client 3 (liar)",
        "B, seed 1: client 99",
    ]
    assert table.policies == ("A",) * 5 + ("B",) * 2
    assert "47 of 54 such clients are not shown" in table.note
    assert "| B, seed 1: client 99 | 3 |  | 1 |" in tables.to_markdown(table)
    assert "client 99" in tables.to_text(table)
    assert len(tables.credibility_table(results, most=None).lines) == 54
    titles = [table.title for table in tables.tables_of(results)]
    assert titles.index("Clients that lie") < titles.index(tables.CREDIBILITY_TITLE)


def test_no_table_if_everybody_is_trusted():
    shown = tables.tables_of(make_results({"A": [make_run([1])]}))
    assert tables.CREDIBILITY_TITLE not in [table.title for table in shown]


def rounds_of_liars(session, rounds, liars):
    """Selections and outcomes of a federation whose first clients report a thousand times their loss."""
    losses = np.where(np.arange(len(session.clients)) < liars, 1000.0, 1.0)
    for _ in range(rounds):
        selection = session.ask(budget=4, measure=lambda probe: losses[probe.clients])
        told = {"loss": losses[selection.clients], "train_loss": losses[selection.clients]}
        outcome = Outcome(index=session.round, clients=selection.clients, completed=np.ones(4, bool), **told)
        session.tell(outcome)
        yield selection, outcome


def test_a_recorded_session_stores_all_clients_that_lost_credibility(tmp_path):
    session = Session(fedpick.policies.get("adapow-d"), Clients(num_examples=np.ones(2500)), seed=1)
    with Recorder(tmp_path / "s.sqlite", session, experiment="liars") as recorder:
        for selection, outcome in rounds_of_liars(session, 3, 1000):
            recorder.round(selection, outcome)
    with closing(Store(tmp_path / "s.sqlite")) as store:
        results = load_results(store, store.experiment())
        page = page_of(read_material(store))
    (run,) = results.policies[0].runs
    assert [doubt.client for doubt in lies.doubts_of(run)] == list(range(1000))
    assert {doubt.lost_in for doubt in lies.doubts_of(run)} == {1}
    assert not any(doubt.liar for doubt in lies.doubts_of(run))  # nobody knows who lied in a recorded session
    assert "Who lost credibility, and when: 1000 lines" in page
    assert "adapow-d, seed 1: client 999<" in page


def test_counts_of_asking_and_telling_add_up_in_a_record(tmp_path):
    selection = fedpick.Selection(clients=np.array([0]), diagnostics={"cut_reports": 2, "phase": "normal"})
    noted = with_notes(selection, {"cut_reports": 1, "rejected_reports": 3, "lost_credibility": [5]})
    assert {**noted.diagnostics, "lost_credibility": noted.diagnostics["lost_credibility"].tolist()} == {
        "cut_reports": 3, "rejected_reports": 3, "phase": "normal", "lost_credibility": [5],
    }  # fmt: skip
    assert with_notes(selection, {}) is selection


@pytest.mark.parametrize("odd", [np.array([[1]]), np.array([0.5]), np.array([-1])])
def test_a_list_of_clients_that_is_none_is_refused(tmp_path, odd, monkeypatch):
    written = Store.write_round

    def write(self, run_id, record: RoundRecord, **rest):
        diagnostics = {**record.selection.diagnostics, "lost_credibility": odd}
        written(self, run_id, replace(record, selection=replace(record.selection, diagnostics=diagnostics)), **rest)

    monkeypatch.setattr(Store, "write_round", write)
    store = make_store(tmp_path / "s.sqlite", make_spec(("uniform",), seeds=1, rounds=2))
    with closing(store), pytest.raises(StateFileError, match="lists no clients"):
        load_results(store, store.experiment())
