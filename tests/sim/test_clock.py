"""The clock of rounds: against the reference, for every way to wait, through the simulator."""

import time

import numpy as np
import pytest

from fedpick import availability
from fedpick.core import registry
from fedpick.core.errors import InvalidInput
from fedpick.core.session import Session
from fedpick.core.types import Clients, Probe, Selection
from fedpick.sim import Faults, LocalTraining, Simulator, Waiting, devices, simulate
from fedpick.sim.clock import Status, reference, round_clock
from fedpick.sim.devices import TRAINING_PASSES
from tests.sim.naive_loop import make_federation

LOCAL = LocalTraining(lr=0.1, steps=3, batch_size=8)
PHONES = devices.get("phones", seconds_per_example=0.02, jitter=0.1)


def _random_devices(rng):
    kind = rng.integers(3)
    jitter = float(rng.choice([0.0, 0.5]))
    if kind == 0:
        return devices.get("phones", jitter=jitter)
    if kind == 1:
        return devices.get("lognormal", jitter=jitter, spread=float(rng.uniform(0, 2)))
    return devices.get("classes", seconds_per_example=[0.2, 0.1], shares=[0.5, 0.5], jitter=jitter)


@pytest.mark.parametrize("part", range(5))
def test_the_clock_of_a_hundred_random_federations_is_that_of_the_events(part):
    rng = np.random.default_rng(part)
    for seed in range(100):
        clients = Clients(num_examples=rng.integers(1, 4, rng.integers(1, 40)).astype(float))
        fleet = _random_devices(rng).fleet(clients, seed)
        waiting = Waiting(
            overcommit=float(rng.choice([1.0, 1.3, 2.0])),
            quorum=float(rng.choice([1.0, 0.8, 0.1])),
            deadline=float(rng.choice([np.inf, 0.5, 1.0, 3.0])),
        )
        budget = int(rng.integers(1, 12))
        clock = by_events = 0.0
        for round in range(3):
            chosen = rng.permutation(len(clients))[: waiting.asked(budget)]
            failed = rng.random(len(chosen)) < 0.2
            passes = 3 * clients.num_examples[chosen].astype(int)
            finish = fleet.seconds(round, chosen, passes, 1e5, 1e5).total
            if rng.random() < 0.3:
                finish = np.ceil(finish)  # ties, also with the deadline
            wanted = waiting.wanted(budget, len(chosen))
            ending = round_clock(finish, failed, wanted, waiting.deadline)
            seconds, answered = reference(finish.tolist(), failed.tolist(), wanted, waiting.deadline)
            clock, by_events = clock + ending.seconds, by_events + seconds
            assert np.flatnonzero(ending.in_time).tolist() == sorted(answered)
            over = failed & (finish <= seconds)
            assert (ending.in_time.astype(int) + ending.cut_off + over == 1).all()
        assert clock == by_events


def test_waiting_counts():
    assert Waiting(overcommit=1.3).asked(50) == 65
    assert Waiting(overcommit=1.1).asked(10) == 11
    assert Waiting(overcommit=1.3).asked(None) is None
    assert Waiting(quorum=0.8).wanted(50, 65) == 40
    assert Waiting(quorum=0.8).wanted(None, 10) == 8
    assert Waiting(overcommit=1.3).wanted(50, 30) == 30
    assert Waiting(quorum=0.1).wanted(1, 1) == 1
    assert Waiting().wanted(5, 0) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"overcommit": 0.9},
        {"overcommit": np.nan},
        {"quorum": 0},
        {"quorum": 1.1},
        {"deadline": 0},
        {"deadline": -1},
        {"probe_timeout": 0},
        {"idle": 0},
        {"late": "never"},
        {"stale_weight": "none"},
    ],
)
def test_bad_waiting_is_one_sentence(options):
    ((name, value),) = options.items()
    with pytest.raises(InvalidInput, match=rf"'{name}' .*must be .* Got {value!r}") as found:
        Waiting(**options)
    assert "\n" not in str(found.value)


def _start(policy="uniform", waiting=None, faults=None, model=PHONES, **options):
    simulator = Simulator(
        make_federation(), "logistic", local=LOCAL, seed=5, devices=model, waiting=waiting, faults=faults, **options
    )
    return simulator, Session(registry.get(policy), simulator.clients, seed=1, provides=simulator.provides)


def test_a_round_lasts_until_its_last_answer():
    simulator, session = _start()
    clock = 0.0
    for record in simulate(simulator, session, rounds=4, budget=3):
        chosen = record.selection.clients
        passes = TRAINING_PASSES * 3 * np.minimum(8, simulator.examples.sizes[chosen])
        size = simulator.model_bytes
        spent = simulator.fleet.seconds(record.index, chosen, passes, size, size)
        clock += spent.total.max()
        assert record.clock == pytest.approx(clock)
        assert record.outcome.duration == pytest.approx(spent.total)
        times = record.evaluation["times"]
        assert np.array_equal(times[:3], np.stack(spent)) and not times[3].any()


def test_without_devices_there_is_no_clock():
    simulator, session = _start(model=None)
    records = list(simulate(simulator, session, rounds=2, budget=3))
    assert [record.clock for record in records] == [None, None]
    assert "times" not in records[0].evaluation and "clock" not in simulator.state()[1]
    assert not (records[0].outcome.late | records[0].outcome.cancelled).any()


def test_over_commitment_takes_the_first_answers_and_cancels_the_others():
    waiting = Waiting(overcommit=2.0)
    simulator, session = _start(waiting=waiting)
    record = next(simulate(simulator, session, rounds=1, budget=2))
    outcome, finish = record.outcome, record.evaluation["times"][:3].sum(axis=0)
    first = np.argsort(finish)[:2]
    assert len(outcome.clients) == 4
    assert np.flatnonzero(outcome.completed).tolist() == sorted(first)
    assert np.array_equal(outcome.cancelled, ~outcome.completed) and not outcome.late.any()
    assert record.clock == finish[first].max()
    assert (outcome.duration <= record.clock).all() and (outcome.duration[outcome.cancelled] == record.clock).all()
    assert record.counters.models_down == 4 and record.counters.updates_up == 2
    assert (record.weights[outcome.cancelled] == 0).all() and record.weights.sum() == pytest.approx(1)


def test_a_quorum_ends_the_round_early():
    simulator, session = _start(waiting=Waiting(quorum=0.5))
    record = next(simulate(simulator, session, rounds=1, budget=4))
    assert record.outcome.completed.sum() == 2 and record.outcome.cancelled.sum() == 2


def test_a_deadline_makes_answers_late_and_a_round_without_answers_goes_on():
    simulator, session = _start(model=devices.get("classes", seconds_per_example=[1.0, 0.001], shares=[0.5, 0.5]))
    slow = np.flatnonzero(simulator.fleet.seconds_per_example == 1.0)
    fast = np.setdiff1d(np.arange(len(simulator.clients)), slow)
    assert len(slow) and len(fast)
    simulator.waiting = Waiting(deadline=2.0)

    class First:
        def mask(self, round):
            return np.isin(np.arange(len(simulator.clients)), slow if round == 0 else np.append(slow[:1], fast[:1]))

    failed, mixed = simulate(simulator, session, rounds=2, budget=None, availability=First())
    assert not failed.outcome.completed.any() and failed.outcome.late.all()
    assert failed.clock == 2.0 and (failed.weights == 0).all() and (failed.outcome.duration == 2.0).all()
    assert failed.counters.updates_up == len(slow)  # sent, but of no use
    assert mixed.clock == 4.0 and mixed.outcome.completed.sum() == 1
    assert set(mixed.evaluation["times"][3]) == {Status.ANSWERED, Status.LATE}


def test_a_failed_client_is_noticed_when_its_answer_was_due():
    simulator, session = _start(faults=Faults(dropout=1.0))
    record = next(simulate(simulator, session, rounds=1, budget=3))
    assert record.clock == record.evaluation["times"][:3].sum(axis=0).max()
    assert np.isnan(record.outcome.duration).all() and set(record.evaluation["times"][3]) == {Status.FAILED}


def test_questions_take_time():
    simulator, _ = _start("pow-d")
    everybody, size = np.arange(len(simulator.clients)), simulator.model_bytes
    first, last = simulator.examples.ranges["train"]
    simulator.measure(Probe(clients=everybody))
    asked = simulator.fleet.seconds(0, everybody, last - first, size, 4).total
    assert simulator.clock == asked.max()
    # The second question finds the model there: only computing and one number are left.
    before = simulator.clock
    simulator.measure(Probe(clients=everybody, batch_size=2))
    again = simulator.fleet.seconds(0, everybody, np.minimum(2, last - first), 0, 4).total
    assert simulator.clock - before == pytest.approx(again.max())
    # A trial is trained by its cohort, then measured by the probed clients.
    before = simulator.clock
    some = everybody[:2]
    simulator.measure(Probe(clients=everybody[3:], trial=Selection(clients=some)))
    trained = simulator._training_seconds(0, some, False).total.max()
    rest = simulator.fleet.seconds(0, everybody[3:], (last - first)[3:], size, 4).total.max()
    assert simulator.clock - before == pytest.approx(trained + rest)


def test_a_timeout_makes_slow_clients_silent():
    simulator, _ = _start("pow-d")
    everybody = np.arange(len(simulator.clients))
    first, last = simulator.examples.ranges["train"]
    finish = simulator.fleet.seconds(0, everybody, last - first, simulator.model_bytes, 4).total
    simulator.waiting = Waiting(probe_timeout=float(np.median(finish)))
    answers = simulator.measure(Probe(clients=everybody))
    assert np.array_equal(np.isnan(answers), finish > np.median(finish))
    assert simulator.clock == np.median(finish)


def test_a_round_without_clients_lasts_as_long_as_the_server_waits_to_ask_again():
    class Nobody:
        def mask(self, round):
            return np.zeros(6, bool)

    simulator, session = _start(waiting=Waiting(idle=30.0))
    assert [record.clock for record in simulate(simulator, session, rounds=2, availability=Nobody())] == [30.0, 60.0]


@pytest.mark.parametrize("policy", ["uniform", "oort"])
def test_a_resumed_run_has_the_same_clock(policy, tmp_path):
    waiting = Waiting(overcommit=1.5, deadline=3.0)
    simulator, session = _start(policy, waiting, Faults(dropout=0.2))
    whole = [record.clock for record in simulate(simulator, session, rounds=8, budget=2)]
    simulator, session = _start(policy, waiting, Faults(dropout=0.2))
    begun = [record.clock for record in simulate(simulator, session, rounds=3, budget=2)]
    simulator.save(tmp_path / "simulator.npz"), session.save(tmp_path / "session")
    simulator, _ = _start(policy, waiting, Faults(dropout=0.2))
    simulator.load(tmp_path / "simulator.npz")
    session = Session.load(tmp_path / "session")
    assert begun + [record.clock for record in simulate(simulator, session, rounds=8, budget=2)] == whole


def test_rounds_that_share_a_program_give_the_same_clock_and_model():
    waiting = Waiting(overcommit=1.5, deadline=3.0)

    def play(ahead):
        simulator, session = _start(waiting=waiting, faults=Faults(dropout=0.2))
        if not ahead:
            simulator.engine.rounds_at_once = 1
        records = list(simulate(simulator, session, rounds=20, budget=3))
        assert not ahead or simulator.engine.rounds_at_once > 1
        return [(record.clock, record.test_loss) for record in records]

    assert play(True) == play(False)


def test_impossible_settings_are_refused_before_work_starts():
    with pytest.raises(InvalidInput, match=r"No client can meet the deadline of 0\.01 s: the fastest takes"):
        _start(waiting=Waiting(deadline=0.01), model=devices.get("phones"))
    with pytest.raises(InvalidInput, match="Waiting needs a clock"):
        _start(waiting=Waiting(quorum=0.8), model=None)
    with pytest.raises(InvalidInput, match="Leave out 'latency'"):
        _start(faults=Faults(latency=3.0))


def test_a_log_is_read_at_any_moment(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("client,time,state\n0,0,2\n0,100,0\n1,0,0\n1,50,2\n1,400,0\n")
    trace = availability.get("trace", path=str(path), round_seconds=60).start(Clients(num_examples=np.ones(2)), 0)
    assert [trace.at(moment).tolist() for moment in (0, 49, 50, 99, 100)] == [
        [True, False],
        [True, False],
        [True, True],
        [True, True],
        [False, True],
    ]
    assert np.array_equal(trace.mask(1), trace.at(60))


def test_a_round_of_a_million_clients_takes_little_time():
    clients = Clients(num_examples=np.full(1_000_000, 60.0))
    fleet = devices.get("phones", jitter=0.1).fleet(clients, seed=0)
    everybody = np.arange(len(clients))
    spent = []
    for round in range(7):
        start = time.process_time()
        finish = fleet.seconds(round, everybody, 60, 4, 4).total
        float(finish.max())
        spent.append(time.process_time() - start)
    assert min(spent) < 0.04  # 14 ms on the machine of the results; a normal score per client takes 119 ms
    for moments in (finish, finish.round(1), np.sort(finish)):  # with ties; in an order that a sample need not know
        for wanted in (1, 500, 700_000, 999_999):
            ending = round_clock(moments, np.zeros(len(moments), bool), wanted)
            assert ending.in_time.sum() == wanted and ending.seconds == np.partition(moments, wanted - 1)[wanted - 1]
