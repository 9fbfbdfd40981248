from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import pytest

import fedpick
from fedpick import Clients, Outcome, Policy, Probe, Selection, Session, Signal
from fedpick.core import state as states
from fedpick.core.errors import InvalidInput, InvalidSelection, MissingSignal, OutOfOrder, StateFileError
from fedpick.core.state import derived, per_client

CLIENTS = Clients(num_examples=np.arange(1.0, 7.0))


@dataclass(frozen=True, kw_only=True)
class CountState:
    counts: np.ndarray = per_client()
    sizes: np.ndarray = derived()
    rounds: int


@final
@dataclass(frozen=True, kw_only=True)
class Recorder(Policy[CountState]):
    """Takes the first clients that answer a probe; counts how often it took them."""

    choose: tuple[int, ...] | None = None
    probes: bool = True

    @property
    def needs(self):
        return frozenset({Signal.LOSS}) if self.probes else frozenset()

    def init(self, clients, rng):
        return CountState(counts=np.zeros(len(clients)), sizes=clients.num_examples * 2, rounds=0)

    def probe(self, state, context, rng):
        return (Probe(clients=np.flatnonzero(context.available)),) if self.probes else ()

    def select(self, state, context, rng):
        if self.choose is not None:
            chosen = np.array(self.choose, dtype=int)
        elif self.probes:
            answers = context.measurements[0]
            chosen = answers.clients[np.argsort(-np.nan_to_num(answers.values, nan=-1.0), kind="stable")][
                : context.budget
            ]
        else:
            chosen = np.flatnonzero(context.available)[: context.budget]
        counts = state.counts.copy()
        counts[chosen[chosen < len(counts)]] += 1
        return Selection(clients=chosen), replace(state, counts=counts, rounds=state.rounds + 1)


def done(session: Session, selection: Selection, **reports) -> Outcome:
    return Outcome(
        index=session.round, clients=selection.clients, completed=np.ones(len(selection.clients), bool), **reports
    )


def test_a_budget_larger_than_the_available_is_no_error():
    session = Session(fedpick.policies.get("uniform"), CLIENTS)
    assert len(session.ask(available=np.array([1, 0, 1, 0, 0, 0], bool), budget=100).clients) == 2


def test_without_a_budget_everybody_available_is_chosen():
    session = Session(fedpick.policies.get("uniform"), CLIENTS)
    assert sorted(session.ask(available=np.array([1, 0, 1, 0, 1, 0], bool)).clients) == [0, 2, 4]


def test_nobody_available_is_an_empty_selection_that_says_so():
    session = Session(Recorder(), CLIENTS)
    selection = session.ask(available=np.zeros(6, bool), budget=3)
    assert len(selection.clients) == 0
    assert selection.diagnostics["nobody_available"] is True
    session.tell(done(session, selection))
    assert session.round == 1


def test_only_tell_commits():
    session = Session(Recorder(probes=False), CLIENTS)
    session.ask(budget=2)
    session.ask(budget=2)
    assert session.state.rounds == 0
    session.tell(done(session, session.ask(budget=2)))
    assert session.state.rounds == 1
    assert session.state.counts.sum() == 2


def test_reports_are_guarded_before_the_policy_sees_them():
    session = Session(Recorder(), CLIENTS)
    lies = np.array([1.0, np.inf, 1e30, np.nan, -1e30, 2.0])
    selection = session.ask(budget=2, measure=lambda probe: lies[probe.clients])
    assert selection.clients.tolist() == [5, 0]
    assert selection.diagnostics["rejected_reports"] == 3  # silence is no lie
    told = session.tell(done(session, selection, duration=np.array([-1.0, 2.0]), loss=np.array([-3.0, np.inf])))
    assert told == {"rejected_reports": 2}  # a negative duration and an infinite loss; a negative loss is fine


def test_without_a_limit_infinity_is_still_no_answer():
    session = Session(fedpick.policies.get("pow-d", num_candidates="all"), CLIENTS, report_limit=np.inf)
    answers = np.arange(len(CLIENTS), dtype=float)
    answers[0] = np.inf
    assert 0 not in session.ask(budget=2, measure=lambda probe: answers[probe.clients]).clients


def test_the_report_limit_is_the_callers():
    session = Session(Recorder(), CLIENTS, report_limit=10)
    selection = session.ask(budget=1, measure=lambda probe: np.array([1, 5, 11, 2, 3, 4.0]))
    assert selection.clients.tolist() == [1]


@pytest.mark.parametrize(
    ("choose", "message"),
    [((1,), "not available in round 0"), ((9,), "there are 6 clients"), ((0, 2, 4), "budget of 2")],
)
def test_a_policy_that_breaks_the_contract_is_named(choose, message):
    session = Session(Recorder(choose=choose, probes=False), CLIENTS)
    with pytest.raises(InvalidSelection, match=f"Recorder selected .*{message}"):
        session.ask(available=np.array([1, 0, 1, 0, 1, 0], bool), budget=2)


def test_asking_without_a_measure_says_what_to_pass():
    with pytest.raises(MissingSignal, match="measure=f"):
        Session(Recorder(), CLIENTS).ask(budget=2)


def test_a_measure_of_the_wrong_length_is_refused():
    with pytest.raises(InvalidInput, match="each of the 6 probed clients"):
        Session(Recorder(), CLIENTS).ask(budget=2, measure=lambda probe: np.ones(3))


def test_a_loss_is_one_number_per_client():
    with pytest.raises(InvalidInput, match=r"the shape \(6,\)\. Got \(6, 2\)"):
        Session(Recorder(), CLIENTS).ask(budget=2, measure=lambda probe: np.ones((6, 2)))


def test_missing_signals_are_refused_before_the_first_round():
    with pytest.raises(MissingSignal, match="needs the signal 'loss'"):
        Session(Recorder(), CLIENTS, provides=frozenset({Signal.DURATION}))
    Session(Recorder(), CLIENTS, provides=frozenset({Signal.LOSS}))


def test_order_of_calls_is_checked():
    session = Session(Recorder(probes=False), CLIENTS)
    empty = Outcome(index=0, clients=[], completed=np.zeros(0, bool))
    with pytest.raises(OutOfOrder, match="before ask"):
        session.tell(empty)
    selection = session.ask(budget=1)
    with pytest.raises(OutOfOrder, match="between ask"):
        session.grow(CLIENTS)
    with pytest.raises(InvalidInput, match="round 5"):
        session.tell(Outcome(index=5, clients=selection.clients, completed=np.ones(1, bool)))
    with pytest.raises(InvalidInput, match="completed=False"):
        session.tell(empty)


@pytest.mark.parametrize("policy", ["uniform", "md", "fedgs", "unbiased", "more-available", "adafed", "f3ast"])
def test_what_is_foreseen_is_what_will_be_asked(policy):
    count = 20
    clients = Clients(
        num_examples=np.arange(1, count + 1),
        label_histogram=np.random.default_rng(0).integers(0, 5, (count, 3)),
        availability=np.full(count, 0.5),
        correlation=np.zeros(count),
    )
    masks = np.random.default_rng(1).random((12, count)) < 0.5
    masks[4] = False
    ahead, asked = (Session(fedpick.policies.get(policy), clients, seed=3) for _ in range(2))
    decisions = []
    for mask in masks:
        decisions.append(ahead.foresee(available=mask, budget=4, after=decisions[-1] if decisions else None))
    assert ahead.round == 0
    for mask, decision in zip(masks, decisions, strict=True):
        assert ahead.expects(decision)
        taken, selection = ahead.take(decision), asked.ask(available=mask, budget=4)
        np.testing.assert_array_equal(taken.clients, selection.clients)
        assert np.array_equal(taken.weights, selection.weights) or taken.weights is selection.weights is None
        assert taken.diagnostics.keys() == selection.diagnostics.keys()
        for session in (ahead, asked):
            session.tell(done(session, selection))
    for name, value in vars(asked.state).items():
        np.testing.assert_array_equal(vars(ahead.state)[name], value)


def test_a_decision_that_no_longer_fits_is_not_taken():
    session = Session(fedpick.policies.get("uniform"), Clients(num_examples=np.ones(5)))
    first = session.foresee(budget=2)
    second = session.foresee(budget=2, after=first)
    with pytest.raises(OutOfOrder, match="foreseen for round 1"):
        session.take(second)
    session.grow(Clients(num_examples=np.ones(6)))
    with pytest.raises(OutOfOrder, match="Ask instead"):
        session.take(first)
    session.take(session.foresee(budget=2))


def test_nobody_foresees_what_depends_on_the_clients():
    recorder = Session(Recorder(), Clients(num_examples=np.ones(5)))
    assert recorder.foresee(budget=2) is None
    assert Session(fedpick.policies.get("pow-d"), Clients(num_examples=np.ones(5))).foresee(budget=2) is None
    assert Session(Recorder(probes=False), Clients(num_examples=np.ones(5))).foresee(budget=2) is not None


def test_an_outcome_in_another_order_is_put_in_order(monkeypatch):
    session = Session(Recorder(probes=False), CLIENTS)
    seen = {}

    selection = session.ask(budget=3)
    spy = lambda self, state, outcome: seen.update(clients=outcome.clients, loss=outcome.loss) or state  # noqa: E731
    monkeypatch.setattr(Recorder, "observe", spy)
    reports = {"completed": np.ones(3, bool), "loss": np.array([3.0, 2.0, 1.0])}
    session.tell(Outcome(index=0, clients=selection.clients[::-1], **reports))
    assert seen["clients"].tolist() == selection.clients.tolist()
    assert seen["loss"].tolist() == [1.0, 2.0, 3.0]


def test_growth_keeps_what_is_known_and_recomputes_what_is_derived():
    session = Session(Recorder(probes=False), CLIENTS)
    session.tell(done(session, session.ask(budget=2)))
    session.grow(Clients(num_examples=np.full(8, 3.0)))
    assert session.state.counts.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert session.state.sizes.tolist() == [6.0] * 8
    assert session.state.rounds == 1
    with pytest.raises(InvalidInput, match="only grow"):
        session.grow(CLIENTS)


def test_save_and_load(tmp_path):
    session = Session(Recorder(probes=False), CLIENTS, seed=9)
    session.tell(done(session, session.ask(budget=2)))
    session.save(tmp_path / "policy")
    loaded = Session.load(tmp_path / "policy", policy=Recorder(probes=False))
    assert (loaded.round, loaded.seed) == (1, 9)
    np.testing.assert_array_equal(loaded.state.counts, session.state.counts)
    np.testing.assert_array_equal(loaded.state.sizes, session.state.sizes)
    with np.load(next((tmp_path / "policy").glob("state-*.npz"))) as arrays:
        assert arrays.files == ["counts"]  # the derived field is not on disk
    with pytest.raises(StateFileError, match="not registered here"):
        Session.load(tmp_path / "policy")


def test_saving_again_leaves_only_what_is_needed(tmp_path):
    session = Session(fedpick.policies.get("uniform"), CLIENTS)
    for _ in range(3):
        session.tell(done(session, session.ask(budget=2)))
        session.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_saving_removes_its_own_leftovers_and_nothing_else(tmp_path):
    """The directory is the user's: other files of arrays may live there, a simulator's model.npz for one."""
    foreign = [
        *("model.npz", "download.partial", "model.npz.77.partial", "state.npz", "state-best.npz", "state-00000001.npz"),
        *("clients-of-mine.npz", "clients-0123456789abcdef.npz.bak", "state-00000001-0123456789abcdef.npz.partial"),
        *("session.json.old.partial", "my-clients-0123456789abcdef.npz", "state-00000001-0123456789ABCDEF.npz"),
    ]
    leftovers = [
        *("state-00000007-0123456789abcdef.npz", "state-123456789-0123456789abcdef.npz"),
        *(
            "clients-fedcba9876543210.npz",
            "state-00000007-0123456789abcdef.npz.4711.partial",
            "clients-fedcba9876543210.npz.1.partial",
        ),
        "session.json.4711.partial",
    ]
    for name in [*foreign, *leftovers]:
        (tmp_path / name).write_text("content")
    (tmp_path / "clients-0000000000000000.npz").mkdir()  # no file of ours
    Session(fedpick.policies.get("uniform"), CLIENTS).save(tmp_path)
    found = {file.name for file in tmp_path.iterdir()}
    assert found.isdisjoint(leftovers)
    assert found >= {*foreign, "clients-0000000000000000.npz"}
    assert len(found) == len(foreign) + 1 + 3  # the manifest, the state and the table
    assert all((tmp_path / name).read_text() == "content" for name in foreign)


@pytest.mark.parametrize("content", ['{"mine": 1}', "[]", "notes", ""])
def test_a_foreign_file_in_the_manifests_place_is_not_overwritten(tmp_path, content):
    (tmp_path / "session.json").write_text(content)
    with pytest.raises(StateFileError, match=r"not a fedpick session.*another directory"):
        Session(fedpick.policies.get("uniform"), CLIENTS).save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["session.json"]
    assert (tmp_path / "session.json").read_text() == content


def damaged(path, kind):
    if kind == "nothing there":
        (path / "session.json").unlink()
    elif kind == "truncated manifest":
        (path / "session.json").write_text((path / "session.json").read_text()[:40])
    elif kind == "foreign manifest":
        (path / "session.json").write_text('{"hello": 1}')
    elif kind == "newer schema":
        manifest = json.loads((path / "session.json").read_text())
        (path / "session.json").write_text(json.dumps({**manifest, "schema": 99}))
    elif kind == "truncated arrays":
        file = next(path.glob("state-*.npz"))
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif kind == "missing arrays":
        next(path.glob("state-*.npz")).unlink()
    elif kind == "pickle inside":
        file = next(path.glob("state-*.npz"))
        np.savez(file, counts=np.array([{"a": 1}], dtype=object))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nothing there", "no saved session"),
        ("truncated manifest", "damaged"),
        ("foreign manifest", "not a fedpick session"),
        ("newer schema", "schema 99"),
        ("truncated arrays", "truncated"),
        ("missing arrays", "is missing"),
        ("pickle inside", "truncated or not a file of arrays"),
    ],
)
def test_damaged_files_get_a_clear_error(tmp_path, kind, message):
    Session(Recorder(probes=False), CLIENTS).save(tmp_path)
    damaged(tmp_path, kind)
    with pytest.raises(StateFileError, match=message):
        Session.load(tmp_path, policy=Recorder(probes=False))


KILLED = """
import sys, numpy as np, fedpick
from fedpick import Clients, Outcome, Session
session = Session(fedpick.policies.get("uniform"), Clients(num_examples=np.ones(200_000)), seed=1)
while True:
    selection = session.ask(budget=3)
    session.tell(Outcome(index=session.round, clients=selection.clients, completed=np.ones(3, bool)))
    session.save(sys.argv[1])
    print(session.round, flush=True)
"""


@pytest.mark.parametrize("attempt", range(6))
def test_a_kill_at_any_moment_leaves_a_state_that_loads(tmp_path, attempt):
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        reached = int(child.stdout.readline())
        time.sleep(0.013 * attempt)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        rest = child.communicate()[0]
    reached = max([reached, *map(int, rest.split())])
    session = Session.load(tmp_path)
    assert session.round >= reached  # what save() confirmed is there; at most the next round is, too
    assert session.round <= reached + 1
    session.ask(budget=3)


def test_a_crash_while_a_grown_table_is_saved_leaves_the_previous_state(tmp_path, monkeypatch):
    """The round is the same before and after the growth, so the round alone must not name a file."""
    session = Session(Recorder(probes=False), CLIENTS)
    session.tell(done(session, session.ask(budget=2)))
    session.save(tmp_path)
    session.grow(Clients(num_examples=np.ones(9)))
    write = states.write_atomically

    def crash_before_the_manifest(target, content):
        if target.suffix == ".json":
            raise KeyboardInterrupt
        write(target, content)

    monkeypatch.setattr(states, "write_atomically", crash_before_the_manifest)
    with pytest.raises(KeyboardInterrupt):
        session.save(tmp_path)
    loaded = Session.load(tmp_path, policy=Recorder(probes=False))
    assert len(loaded.clients) == len(loaded.state.counts) == 6


def test_a_state_is_not_given_to_another_policy(tmp_path):
    Session(fedpick.policies.get("rpow-d", num_candidates=4), CLIENTS).save(tmp_path)
    with pytest.raises(StateFileError, match="is of the policy 'rpow-d', but 'uniform' was passed"):
        Session.load(tmp_path, policy=fedpick.policies.get("uniform"))
    with pytest.raises(StateFileError, match="num_candidates was 4, now 5"):
        Session.load(tmp_path, policy=fedpick.policies.get("rpow-d", num_candidates=5))
    Session.load(tmp_path, policy=fedpick.policies.get("rpow-d", num_candidates=4))


def test_numbers_of_numpy_can_be_saved_and_other_objects_are_refused(tmp_path):
    policy = fedpick.policies.get("fedcor", dimension=np.int64(3), theta=np.float32(0.5))
    Session(policy, CLIENTS, np.int64(7)).save(tmp_path)
    assert Session.load(tmp_path, policy=policy).seed == 7
    assert Session.load(tmp_path).policy == policy
    with pytest.raises(InvalidInput, match="cannot be saved"):
        Session(Recorder(choose=object()), CLIENTS).save(tmp_path / "other")


@pytest.mark.parametrize("seed", [-1, 1.5, None, "7", True])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(InvalidInput, match="'seed' parameter of Session must be a whole number"):
        Session(Recorder(probes=False), CLIENTS, seed)


def test_a_state_of_other_clients_is_not_restored():
    few, many = (Session(fedpick.policies.get("rpow-d"), Clients(num_examples=np.ones(size))) for size in (5, 9))
    with pytest.raises(StateFileError, match=r"has the shape \(5,\), which is not for the 9 clients"):
        many.restore(*states.split(few.state), round=0)
    assert len(many.state.loss) == 9
