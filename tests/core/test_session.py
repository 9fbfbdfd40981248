from __future__ import annotations

import copy
import errno
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import pytest

import fedpick
from fedpick import Clients, Outcome, Policy, Probe, Selection, Session, Signal
from fedpick.core import checkpoint
from fedpick.core import state as states
from fedpick.core.errors import InvalidInput, InvalidSelection, MissingSignal, OutOfOrder, StateFileError
from fedpick.core.guard import guard_of
from fedpick.core.session import SESSION_FILE
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


def test_sketches_are_guarded_by_row():
    session = Session(Recorder(probes=False), CLIENTS)
    selection = session.ask(budget=3)
    seen = {}
    policy = type(session.policy)
    sketch = np.array([[1.0, -2.0], [np.inf, 0.0], [np.nan, np.nan]])
    rms = np.array([1.0, -1.0, np.nan])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "observe", lambda self, state, outcome: seen.update(outcome=outcome) or state)
        told = session.tell(done(session, selection, sketch=sketch, loss_rms=rms))
    assert told == {"rejected_reports": 2}
    np.testing.assert_array_equal(seen["outcome"].sketch, [[1.0, -2.0], [np.nan, np.nan], [np.nan, np.nan]])
    np.testing.assert_array_equal(seen["outcome"].loss_rms, [1.0, np.nan, np.nan])


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


def test_vectors_without_an_entry_are_no_answers():
    policy = fedpick.policies.get("fedgs", similarity="updates")
    session = Session(policy, Clients(num_examples=np.ones(4)), seed=0)
    for width in (3, 0):
        chosen = session.ask(budget=2, measure=lambda probe, width=width: np.ones((len(probe.clients), width))).clients
        assert len(chosen) == 2
        session.tell(Outcome(index=session.round, clients=chosen, completed=np.ones(2, dtype=bool)))
        session.grow(Clients(num_examples=np.ones(6)))


def test_asking_without_a_measure_says_what_to_pass():
    with pytest.raises(MissingSignal, match="measure=f"):
        Session(Recorder(), CLIENTS).ask(budget=2)


def test_a_measure_of_the_wrong_length_is_refused():
    with pytest.raises(InvalidInput, match="each of the 6 probed clients"):
        Session(Recorder(), CLIENTS).ask(budget=2, measure=lambda probe: np.ones(3))


@pytest.mark.parametrize(
    "answer", ["loss", list("abcdef"), np.array([object()] * 6), np.ones(6) * 1j, [[1], [1, 2], [], [], [], []]]
)
def test_a_measure_returns_numbers(answer):
    with pytest.raises(InvalidInput, match="What measure returns must be an array of numbers"):
        Session(Recorder(), CLIENTS).ask(budget=2, measure=lambda probe: answer)


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


def test_late_answers_follow_the_selected_clients(monkeypatch):
    session = Session(Recorder(probes=False), CLIENTS, report_limit=10.0)
    told = []
    monkeypatch.setattr(Recorder, "observe", lambda self, state, outcome: told.append(outcome) or state)
    selection = session.ask(budget=2)
    other = np.setdiff1d(np.arange(len(CLIENTS)), selection.clients)[:1]
    stale = Outcome(index=0, clients=other, completed=[True], loss=[50.0], sketch=[[1.0, 2.0]])
    own = Outcome(index=0, clients=selection.clients[::-1], completed=[True, False], loss=[2.0, 1.0])
    with pytest.raises(InvalidInput, match="no client 99 among"):
        session.tell(own.with_stale(Outcome(index=0, clients=[99], completed=[True])))
    with pytest.raises(InvalidInput, match="must be unique"):
        own.with_stale(own)
    assert session.tell(own.with_stale(stale)) == {"rejected_reports": 1}
    (seen,) = told
    assert seen.clients.tolist() == [*selection.clients, *other] and seen.stale.tolist() == [False, False, True]
    assert seen.loss == pytest.approx([1.0, 2.0, np.nan], nan_ok=True) and seen.completed.tolist() == [
        False,
        True,
        True,
    ]
    assert np.isnan(seen.sketch[:2]).all() and seen.sketch[2].tolist() == [1.0, 2.0]
    assert seen.of_selected().clients.tolist() == selection.clients.tolist()
    assert own.with_stale(stale.take(np.empty(0, int))) is own


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
    arrays, _ = checkpoint.unpack((tmp_path / "policy" / SESSION_FILE).read_bytes())
    assert arrays.keys() == {"state/counts", "clients/num_examples", "clients/importance"}  # no derived field
    with pytest.raises(StateFileError, match="not registered here"):
        Session.load(tmp_path / "policy")


def test_a_session_is_one_file_that_only_its_owner_reads(tmp_path):
    session = Session(fedpick.policies.get("uniform"), CLIENTS)
    for _ in range(3):
        session.tell(done(session, session.ask(budget=2)))
        session.save(tmp_path / "new" / "policy")
    files = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "new" / "policy").iterdir()}
    assert files == {"session.npz": 0o600, "session.lock": 0o600}


def test_saving_removes_its_own_leftovers_and_nothing_else(tmp_path):
    """The directory is the user's: other files of arrays may live there, a simulator's model.npz for one."""
    foreign = ["model.npz", "download.partial", "model.npz.77.partial", "session.npz.old.partial", "session.json"]
    leftovers = ["session.npz.4711.partial", "session.npz.1.partial"]
    for name in [*foreign, *leftovers]:
        (tmp_path / name).write_text("content")
    Session(fedpick.policies.get("uniform"), CLIENTS).save(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {*foreign, "session.npz", "session.lock"}
    assert all((tmp_path / name).read_text() == "content" for name in foreign)


@pytest.mark.parametrize("content", [b'{"mine": 1}', b"", b"PK", checkpoint.pack({"w": np.ones(3)}, {"mine": 1})])
def test_a_foreign_file_in_the_sessions_place_is_not_overwritten(tmp_path, content):
    (tmp_path / SESSION_FILE).write_bytes(content)
    with pytest.raises(StateFileError, match=r"not a fedpick session.*another directory"):
        Session(fedpick.policies.get("uniform"), CLIENTS).save(tmp_path)
    assert (tmp_path / SESSION_FILE).read_bytes() == content


def test_the_directory_is_synced_after_the_file_has_its_name(tmp_path, monkeypatch):
    synced = []

    def sync(descriptor):
        if os.path.samestat(os.fstat(descriptor), tmp_path.stat()):
            synced.append((tmp_path / SESSION_FILE).exists())

    monkeypatch.setattr(os, "fsync", sync)
    Session(Recorder(probes=False), CLIENTS).save(tmp_path)
    assert synced == [True]


def test_a_full_disk_leaves_the_previous_state(tmp_path, monkeypatch):
    session = Session(Recorder(probes=False), CLIENTS)
    session.save(tmp_path)
    session.tell(done(session, session.ask(budget=2)))
    session.grow(Clients(num_examples=np.ones(9)))

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            session.save(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"session.npz", "session.lock"}
    loaded = Session.load(tmp_path, policy=Recorder(probes=False))
    assert (loaded.round, len(loaded.clients), len(loaded.state.counts)) == (0, 6, 6)
    session.save(tmp_path)
    assert Session.load(tmp_path, policy=Recorder(probes=False)).round == 1


def test_every_flipped_bit_is_refused(tmp_path):
    Session(Recorder(probes=False), CLIENTS, guard="off").save(tmp_path)
    content = (tmp_path / SESSION_FILE).read_bytes()
    for position in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[position // 8] ^= 1 << position % 8
        (tmp_path / SESSION_FILE).write_bytes(flipped)
        with pytest.raises(StateFileError, match=r"session\.npz is .*(damaged|not a checkpoint)"):
            Session.load(tmp_path, policy=Recorder(probes=False))


def rewritten(path, change):
    """Write a session file with other content and a valid checksum."""
    arrays, plain = checkpoint.unpack((path / SESSION_FILE).read_bytes())
    change(arrays, plain)
    (path / SESSION_FILE).write_bytes(checkpoint.pack(arrays, plain))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays, plain: plain.update(format="other"), "not a fedpick session"),
        (lambda arrays, plain: plain.clear(), "not a fedpick session"),
        (lambda arrays, plain: plain.update(schema=99), "schema 99"),
        (lambda arrays, plain: plain.pop("seed"), "lacks 'seed'"),
        (lambda arrays, plain: plain.update(policy=3), "its 'policy' is a int"),
        (lambda arrays, plain: plain.update(policy=None), "its 'policy' is a NoneType"),
        (lambda arrays, plain: plain.update(parameters=["a"]), "its 'parameters' is a list"),
        (lambda arrays, plain: plain.update(seed="1"), "its 'seed' is a str"),
        (lambda arrays, plain: plain.update(seed=-1), "'seed' parameter of Session"),
        (lambda arrays, plain: plain.update(seed=True), "'seed' parameter of Session"),
        (lambda arrays, plain: plain.update(round=1.5), "its 'round' is a float"),
        (lambda arrays, plain: plain.update(round=-1), "'round' parameter"),
        (lambda arrays, plain: plain.update(report_limit=None), "its 'report_limit' is a NoneType"),
        (lambda arrays, plain: plain.update(report_limit=0), "'report_limit' parameter"),
        (lambda arrays, plain: plain.update(state=[]), "its 'state' is a list"),
        (lambda arrays, plain: plain.update(state={}), "written by another version"),
        (lambda arrays, plain: plain["state"].update(rounds="many"), "rounds is text instead of a number"),
        (lambda arrays, plain: plain["state"].update(rounds=[1]), "rounds is a list instead of a number"),
        (lambda arrays, plain: plain["state"].update(more=1), "written by another version"),
        (lambda arrays, plain: arrays.pop("state/counts"), "written by another version"),
        (lambda arrays, plain: arrays.update({"state/counts": np.ones(3)}), "not for the 6 clients"),
        (lambda arrays, plain: arrays.update({"state/counts": np.array(list("abcdef"))}), "an array of text instead"),
        (lambda arrays, plain: arrays.pop("clients/num_examples"), "cannot be used"),
        (lambda arrays, plain: arrays.update({"clients/age": np.ones(6)}), "cannot be used"),
        (lambda arrays, plain: arrays.update({"clients/num_examples": np.array(list("abcdef"))}), "array of numbers"),
    ],
)
def test_content_that_is_not_a_session_is_refused_in_a_sentence(tmp_path, change, message):
    Session(Recorder(probes=False), CLIENTS).save(tmp_path)
    rewritten(tmp_path, change)
    with pytest.raises(StateFileError, match=message):
        Session.load(tmp_path, policy=Recorder(probes=False))


def test_a_session_that_was_never_saved_is_not_loaded(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(StateFileError, match="no saved session"):
            Session.load(path)


WRITER = """
import sys, numpy as np, fedpick
from fedpick import Clients, Outcome, Session
from fedpick.core.errors import StateFileError
session = Session(fedpick.policies.get("uniform"), Clients(num_examples=np.ones(50_000)), seed=int(sys.argv[2]))
for _ in range(int(sys.argv[3])):
    selection = session.ask(budget=3)
    session.tell(Outcome(index=session.round, clients=selection.clients, completed=np.ones(3, bool)))
    try:
        session.save(sys.argv[1])
        print("saved", flush=True)
    except StateFileError as error:
        print(error, flush=True)
sys.stdin.read()
"""


def python(script, *arguments, **options):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


def test_a_second_writer_is_refused_and_a_reader_always_succeeds(tmp_path):
    with python(WRITER, tmp_path, 1, 200, stdin=subprocess.PIPE) as first:
        assert first.stdout.readline() == "saved\n"
        rounds = []
        with python(WRITER, tmp_path, 2, 5, stdin=subprocess.DEVNULL) as second:
            while second.poll() is None:
                session = Session.load(tmp_path)
                assert session.seed == 1
                rounds.append(session.round)
            refusals = second.stdout.read().splitlines()
        assert rounds == sorted(rounds)
        expected = rf"^Another process \(id {first.pid}\) saves its session in .*another directory"
        assert len(refusals) == 5
        assert all(re.search(expected, line) for line in refusals)
        with pytest.raises(StateFileError, match=expected):
            Session.load(tmp_path).save(tmp_path)
        assert first.communicate()[0].split() == ["saved"] * 199
    session = Session.load(tmp_path)
    assert (session.seed, session.round) == (1, 200)
    session.save(tmp_path)  # the first writer has ended


def test_sessions_of_one_process_follow_each_other(tmp_path):
    """A loaded session takes over from the one that was saved, which may still exist."""
    first = Session(fedpick.policies.get("uniform"), CLIENTS)
    first.save(tmp_path)
    second = Session.load(tmp_path)
    second.tell(done(second, second.ask(budget=2)))
    second.save(tmp_path)
    assert Session.load(tmp_path).round == 1
    shutil.rmtree(tmp_path)
    second.save(tmp_path)
    assert copy.deepcopy(second).round == Session.load(tmp_path).round == 1


FORKED = """
import os, sys, numpy as np, fedpick
session = fedpick.Session(fedpick.policies.get("uniform"), fedpick.Clients(num_examples=np.ones(5)))
session.save(sys.argv[1])
child = os.fork()
if child == 0:
    try:
        session.save(sys.argv[1])
    except fedpick.core.errors.StateFileError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
session.save(sys.argv[1])
"""


def test_a_forked_child_is_another_writer(tmp_path):
    with python(FORKED, tmp_path) as parent:
        assert f"Another process (id {parent.pid})" in parent.communicate()[0]
    assert parent.returncode == 0


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


SAVING = """
import resource, signal, sys, numpy as np, fedpick
from pathlib import Path
from fedpick import Clients, Outcome, Session
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def play(session):
    chosen = session.ask(budget=5).clients
    losses = 2 + np.sin(chosen + session.round)
    session.tell(Outcome(index=session.round, clients=chosen, completed=np.ones(5, bool), loss=losses))
def start():
    return Session(fedpick.policies.get("afl"), Clients(num_examples=np.arange(1.0, 50_001)), seed=1)
if __name__ == "__main__":
    where, full = Path(sys.argv[1]), sys.argv[2] == "full"
    session = Session.load(where) if (where / "session.npz").exists() else start()
    while True:
        play(session)
        if full:  # a limit on the size of files stands for a disk that fills up in the middle of writing
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
            try:
                session.save(where)
                sys.exit("saved although the disk is full")
            except OSError:
                print("full", flush=True)
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        if session.round % 2 or not full:
            session.save(where)
            print(session.round, flush=True)
"""


@pytest.mark.parametrize("disk", ["full", "empty"])
@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_kills_while_saving_lose_no_round_that_was_confirmed(tmp_path, kills, disk):
    script, where = tmp_path / "saving.py", tmp_path / "state"
    script.write_text(SAVING)
    rng, confirmed, refused = np.random.default_rng(kills), 0, 0
    for kill in range(kills):
        child = subprocess.Popen([sys.executable, script, where, disk], stdout=subprocess.PIPE, text=True)
        try:
            said = [child.stdout.readline()]
            # Half of the kills come after a confirmed round: on a busy machine the others may all hit the first save.
            while kill % 2 and said[-1] and not said[-1].strip().isdigit():
                said.append(child.stdout.readline())
            time.sleep(rng.uniform(0, 0.1))
        finally:
            child.kill()
            said += child.communicate()[0].splitlines()
        said = [line.strip() for line in said if line.strip()]
        refused += said.count("full")
        confirmed = max([confirmed, *(int(line) for line in said if line.isdigit())])
        if confirmed:
            found = Session.load(where).round
            assert confirmed <= found <= confirmed + 2
            confirmed = found
    assert (refused > 0) == (disk == "full")
    assert confirmed > 0
    content: dict[str, Any] = {"__name__": "saving"}
    exec(SAVING, content)
    undisturbed, session = content["start"](), Session.load(where)
    while undisturbed.round < session.round:
        content["play"](undisturbed)
    arrays, plain = states.split(session.state)
    expected, expected_plain = states.split(undisturbed.state)
    assert plain == expected_plain
    for name, values in expected.items():
        np.testing.assert_array_equal(arrays[name], values)


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


def test_a_loaded_session_may_have_another_guard(tmp_path):
    policy, clients = fedpick.policies.get("rpow-d"), Clients(num_examples=np.ones(10))
    session = Session(policy, clients, guard="mild")
    selection = session.ask(budget=10)
    told = np.where(selection.clients == 3, 1e6, 1.0)
    session.tell(Outcome(index=0, clients=selection.clients, completed=np.ones(10, bool), train_loss=told))
    session.save(tmp_path)
    for guard in ("strict", fedpick.Guard(most_places=2.0), "off", None):
        again = Session.load(tmp_path, guard=guard)
        assert again.guard == guard_of("mild" if guard is None else guard)
        np.testing.assert_array_equal(again.credibility, np.ones(10) if guard == "off" else session.credibility)
        chosen = again.ask(budget=5).clients
        again.tell(Outcome(index=1, clients=chosen, completed=np.ones(5, bool), train_loss=np.ones(5)))
        again.grow(Clients(num_examples=np.ones(12)))
        assert guard != "strict" or 3 not in chosen
    with pytest.raises(InvalidInput, match="guard must be"):
        Session.load(tmp_path, guard="harsh")
