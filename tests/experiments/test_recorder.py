"""The recorder: rounds of a training loop in the same tables, with the same checksums, leases and report."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import fedpick
from fedpick.core.errors import InvalidInput, OutOfOrder
from fedpick.core.record import Callback, Counters
from fedpick.experiments.leases import RunLeased
from fedpick.experiments.recorder import Recorder
from fedpick.experiments.store import Store
from fedpick.experiments.verify import repair, verify
from fedpick.report import analysis, tables
from fedpick.report.verdict import verdict_of

SIZES = np.array([600.0, 300.0, 900.0, 450.0, 750.0, 120.0])
LOSSES = np.array([0.9, 2.1, 0.4, 1.7, 1.2, 3.0, 0.1, 0.2])


def clients_of(count=6):
    return fedpick.Clients(num_examples=np.resize(SIZES, count), label_histogram=np.ones((count, 3)))


def session_of(policy="uniform", seed=1, count=6, **parameters):
    return fedpick.Session(fedpick.policies.get(policy, **parameters), clients_of(count), seed=seed)


def train(session, recorder, rounds, *, bonus=0.0, **more):
    """Rounds of a loop of the user: nobody trains, and the accuracy grows."""
    for _ in range(rounds):
        index = session.round
        available = np.ones(len(session.clients), bool)
        available[index % len(session.clients)] = False
        selection = session.ask(available=available, budget=2, measure=lambda probe: LOSSES[probe.clients])
        outcome = fedpick.Outcome(
            index=index, clients=selection.clients, completed=np.array([True, index % 3 > 0]),
            loss=LOSSES[selection.clients], train_loss=0.9 * LOSSES[selection.clients],
        )  # fmt: skip
        session.tell(outcome)
        accuracy = 0.5 + 0.02 * index + 0.001 * session.seed + bonus
        recorder.round(selection, outcome, available=available, test_accuracy=accuracy, **more)


def rows_of(store, run_id):
    """Everything in the store about the rounds of a run, times aside."""
    columns = {name: values.tolist() for name, values in store.rounds(run_id).items() if "seconds" not in name}
    chosen = [(*(values.tolist() for values in each[1:]),) for each in store.choices(run_id)]
    return repr(columns), chosen


@pytest.fixture
def store(tmp_path):
    opened = Store(tmp_path / "s.sqlite")
    yield opened
    opened.close()


def test_a_loop_has_the_tables_and_the_verdict_of_a_simulation(store):
    for policy, bonus in (("uniform", 0.0), ("pow-d", 0.03)):
        for seed in (1, 2, 3):
            session = session_of(policy, seed)
            with Recorder(store, session, experiment="hospitals") as recorder:
                train(session, recorder, 6, bonus=bonus + 0.0001 * seed)
    experiment = store.experiment("hospitals")
    assert experiment.recorded and experiment.rounds == 6
    assert [(run.label, run.seed, run.status, run.rounds_done) for run in store.runs(experiment.id)] == [
        (policy, seed, "done", 6) for policy in ("uniform", "pow-d") for seed in (1, 2, 3)
    ]
    results = analysis.load_results(store, experiment)
    made = tables.tables_of(results)
    assert [[column.heading for column in table.columns] for table in made] == [
        ["final accuracy %", "best accuracy %"], ["variance of selection counts"],
    ]  # fmt: skip
    verdict = verdict_of(results)
    assert verdict.headline.startswith("pow-d is better than uniform: final accuracy 63.2 % instead of 60.2 %")
    assert "bytes" not in " ".join(verdict.sentences)
    assert verify(store).sentences == []
    assert verify(store).unverified == 0
    record = next(store.records(1))
    assert not record.available[0] and record.available[1:].all()
    np.testing.assert_array_equal(
        record.weights, fedpick.aggregation_weights(record.selection, record.outcome.completed, clients_of())
    )
    assert store.federation(store.run(1).federation_id).num_examples.tolist() == SIZES.tolist()


def test_the_page_leaves_out_what_was_not_recorded(store, tmp_path):
    pytest.importorskip("plotly")
    from fedpick.report import write_report

    session = session_of()
    with Recorder(store, session, experiment="hospitals") as recorder:
        train(session, recorder, 4)
    page = write_report(store, tmp_path / "r.html").read_text()
    body = page[page.index("<body") : page.index("</main>")]
    assert "Recorded in a training loop with 6 clients; 4 rounds, 1 seed." in body
    for missing in ("N/A", "0 B", "fedpick run", "per round (mean", "by bytes", "nan"):
        assert missing not in body, missing


def test_what_is_recorded_reads_back(store):
    session = session_of("herd", source="labels")
    counters = Counters().plus(1000, models_down=4, updates_up=3)
    with Recorder(store, session, experiment="e", label="ours", rounds=2) as recorder:
        train(session, recorder, 1, test_loss=0.7, objective=0.8, losses=LOSSES[:6], accuracies=LOSSES[:6] / 4)
        train(session, recorder, 1, counters=counters, weights=np.array([0.2, 0.3]))
        run_id = recorder.run_id
    first, second = store.records(run_id)
    assert (first.test_loss, first.objective, first.test_accuracy) == (0.7, 0.8, pytest.approx(0.501))
    assert first.counters == Counters() and second.counters == counters
    assert second.weights.tolist() == [0.2, 0.3]
    assert store.array(run_id, 0, "evaluation/accuracies").tolist() == (LOSSES[:6] / 4).tolist()
    run = store.runs(store.experiment("e").id)[0]
    assert (run.label, run.policy, run.status) == ("ours", "herd", "done")
    assert store.policy_state(run_id)  # of the latest checkpoint


def test_a_loaded_session_goes_on_and_equals_a_run_that_never_stopped(store, tmp_path):
    with Recorder(store, session_of(), experiment="whole") as recorder:
        train(recorder._begun(), recorder, 7)
    session = session_of()
    with Recorder(store, session, experiment="cut") as recorder:
        train(session, recorder, 3)
        session.save(tmp_path / "policy")
        train(session, recorder, 2)  # recorded, but not saved: a crash would lose them
        stopped = recorder.run_id
    again = fedpick.Session.load(tmp_path / "policy")
    with Recorder(store, again, experiment="cut") as recorder:
        assert recorder.run_id == stopped
        train(again, recorder, 4)
    whole, cut = (store.runs(store.experiment(title).id)[0].id for title in ("whole", "cut"))
    assert rows_of(store, whole) == rows_of(store, cut)
    assert verify(store).sentences == []


def test_the_accuracy_of_a_dropped_round_is_not_the_latest_one(store, tmp_path):
    session = session_of()
    with Recorder(store, session, experiment="cut") as recorder:
        train(session, recorder, 3)
        session.save(tmp_path / "policy")
        train(session, recorder, 2)
    again = fedpick.Session.load(tmp_path / "policy")
    with Recorder(store, again, experiment="cut") as recorder:
        selection = again.ask(budget=2)
        outcome = fedpick.Outcome(index=3, clients=selection.clients, completed=np.ones(2, bool))
        again.tell(outcome)
        recorder.round(selection, outcome)  # without an evaluation
        assert store.run(recorder.run_id).accuracy == store.rounds(recorder.run_id)["accuracy"][2]
    assert verify(store).sentences == []


def test_a_loop_that_ends_before_its_next_checkpoint_is_not_damaged(store, tmp_path, monkeypatch):
    monkeypatch.setattr("fedpick.experiments.recorder._CHECKPOINT_SHARE", 0.0)  # as if rounds took long
    session = session_of()
    with Recorder(store, session, experiment="cut") as recorder:
        train(session, recorder, 3)
        session.save(tmp_path / "policy")
        train(session, recorder, 2)
    with Recorder(store, fedpick.Session.load(tmp_path / "policy"), experiment="cut"):
        pass  # a crash, before a round is recorded
    assert verify(store).sentences == []


def test_nothing_is_discarded_unasked_and_no_round_is_left_out(store):
    session = session_of()
    with Recorder(store, session, experiment="e") as recorder:
        train(session, recorder, 2)
    with pytest.raises(InvalidInput, match="has 2 rounds of uniform with seed 1 already"):
        Recorder(store, session_of(), experiment="e")
    later = session_of()
    train(later, Recorder(store, later, experiment="other"), 1)
    with pytest.raises(InvalidInput, match="the store has 0 rounds"):
        Recorder(store, later, experiment="third")
    anew = session_of()
    with Recorder(store, anew, experiment="e", restart=True) as recorder:
        train(anew, recorder, 1)
    assert store.runs(store.experiment("e").id)[0].rounds_done == 1


def test_a_restart_with_a_session_that_goes_on_discards_nothing(store):
    session = session_of()
    with Recorder(store, session, experiment="one") as recorder:
        train(session, recorder, 3)
    with pytest.raises(InvalidInput, match="the session is in round 3"):
        Recorder(store, session, experiment="one", restart=True)
    assert store.run(recorder.run_id).rounds_done == 3


def test_a_label_means_one_set_of_hyper_parameters(store):
    Recorder(store, session_of("pow-d", num_candidates=4), experiment="e").close()
    with pytest.raises(InvalidInput, match="label of its own"):
        Recorder(store, session_of("pow-d", num_candidates=5), experiment="e")
    Recorder(store, session_of("pow-d", num_candidates=5), experiment="e", label="pow-d 5").close()
    assert [run.label for run in store.runs(store.experiment("e").id)] == ["pow-d", "pow-d 5"]


def test_clients_that_join_were_not_available_before(store):
    session = session_of()
    with Recorder(store, session, experiment="e") as recorder:
        train(session, recorder, 2)
        session.grow(clients_of(8))
        train(session, recorder, 2)
        run_id = recorder.run_id
    masks = [mask for choices in store.choices(run_id) for mask in choices.available]
    assert [len(mask) for mask in masks] == [8, 8, 8, 8]
    assert [mask[6:].all() for mask in masks] == [False, False, True, True]
    assert masks[0][1:6].all() and not masks[0][0]
    assert verify(store).sentences == []
    assert len(store._rows(__import__("sqlalchemy").text("select * from federations"))) == 1


def test_the_page_of_seeds_with_different_numbers_of_clients(store, tmp_path):
    pytest.importorskip("plotly")
    from fedpick.report import write_figures
    from fedpick.report.charts import sections_of
    from fedpick.report.material import read_material

    for label, seed, count in (("grown", 1, 6), ("grown", 2, 8), ("small", 1, 5)):
        session = session_of(seed=seed, count=count)
        with Recorder(store, session, experiment="growing", label=label) as recorder:
            train(session, recorder, 3)
    charts = {chart.key: chart.data for section in sections_of(read_material(store)) for chart in section.charts}
    frequency = charts["frequency"]
    assert len(frequency["positions"]) == 8
    assert {label: len(line) for label, line in frequency["measures"][0]["ranked"].items()} == {"grown": 8, "small": 5}
    assert (tmp_path / "frequency-chosen.png") in write_figures(store, tmp_path, ["png"])


def test_damage_is_found_and_left_to_the_loop(store):
    session = session_of()
    with Recorder(store, session, experiment="e") as recorder:
        train(session, recorder, 3)
    with store.writing() as connection:
        connection.exec_driver_sql("update rounds set accuracy = 0.9 where round = 1")
    found = verify(store)
    assert "round 1 was changed" in found.sentences[0] and "restart=True" in found.sentences[0]
    assert repair(store, found) == []
    assert store.run(1).rounds_done == 3
    session.grow(clients_of(8))
    with pytest.raises(fedpick.FedpickError, match="round 1 was changed"):  # no new checksum hides it
        Recorder(store, session, experiment="e")


def test_one_process_records_a_run(store, tmp_path):
    recorder = Recorder(store, session_of(), experiment="e")
    with pytest.raises(RunLeased, match="is being computed by"):
        Recorder(tmp_path / "s.sqlite", session_of(), experiment="e")
    recorder.close()
    Recorder(tmp_path / "s.sqlite", session_of(), experiment="e").close()


def test_a_killed_loop_leaves_whole_rounds_and_can_go_on(store, tmp_path):
    program = (
        "import os, sys; sys.path.insert(0, os.getcwd())\n"
        "from tests.experiments.test_recorder import *\n"
        "session = session_of()\n"
        f"recorder = Recorder({str(tmp_path / 's.sqlite')!r}, session, experiment='e')\n"
        f"train(session, recorder, 3); session.save({str(tmp_path / 'policy')!r}); train(session, recorder, 2)\n"
        "os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 9
    assert verify(store).damaged == {}
    session = fedpick.Session.load(tmp_path / "policy")
    with Recorder(store, session, experiment="e") as recorder:
        train(session, recorder, 2)
    run = store.runs(store.experiment("e").id)[0]
    assert (run.rounds_done, run.status) == (5, "done")
    assert verify(store).sentences == []


def test_the_status_says_how_a_loop_ended(store):
    for seed, error, expected in (
        (1, None, "stopped"),
        (2, KeyboardInterrupt(), "stopped"),
        (3, OSError("x"), "failed"),
    ):
        recorder = Recorder(store, session_of(seed=seed), experiment="e", rounds=9)
        train(recorder._begun(), recorder, 1)
        recorder.on_end(error)
        assert store.run(recorder.run_id).status == expected
    assert store.run(recorder.run_id).error == "OSError: x"
    assert store.experiment("e").rounds == 9


def test_callbacks_get_the_same_calls(store):
    calls = []

    class Notes(Callback):
        def on_start(self, session):
            calls.append(("start", session.round))

        def on_round(self, record):
            calls.append(("round", record.index, record.test_accuracy))

        def on_end(self, error=None):
            calls.append(("end", error))

    session = session_of()
    with Recorder(store, session, experiment="e", callbacks=[Notes(), Callback()]) as recorder:
        train(session, recorder, 1)
    assert calls == [("start", 0), ("round", 0, 0.501), ("end", None)]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"losses": np.ones(3)}, "losses must have one entry for each of the 6 clients"),
        ({"accuracies": np.ones((6, 1))}, "accuracies must have one entry for each of the 6 clients"),
        ({"weights": np.ones(3)}, "weights must have one entry for each of the 2 selected clients"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(store, more, sentence):
    session = session_of()
    with Recorder(store, session, experiment="e") as recorder:
        with pytest.raises(InvalidInput, match=sentence):
            train(session, recorder, 1, **more)
        assert store.run(recorder.run_id).rounds_done == 0


def test_calls_out_of_order(store):
    session = session_of()
    recorder = Recorder(store, session, experiment="e")
    selection = session.ask(budget=2)
    outcome = fedpick.Outcome(index=0, clients=selection.clients, completed=np.ones(2, bool))
    with pytest.raises(OutOfOrder, match=r"After session\.tell"):
        recorder.round(selection, outcome)
    session.tell(outcome)
    recorder.round(selection, outcome)
    with pytest.raises(OutOfOrder, match="has begun already"):
        recorder.on_start(session)
    recorder.close()
    recorder.close()
    with pytest.raises(OutOfOrder, match="records no session"):
        recorder.round(selection, outcome)


@pytest.mark.parametrize("options", [{"experiment": ""}, {"experiment": "a\nb"}, {"experiment": "e", "label": 3}])
def test_titles_and_labels_are_text(tmp_path, options):
    with pytest.raises(InvalidInput, match="must be text of one line"):
        Recorder(tmp_path / "s.sqlite", session_of(), **options)
    assert not (tmp_path / "s.sqlite").exists()
