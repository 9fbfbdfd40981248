"""Who may be asked, how often, and how many answers are waited for."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp import strategy as flower

import fedpick
from fedpick.core.errors import InvalidInput, TrainingFailed
from fedpick.core.record import Callback
from fedpick.flower import answer_probes, with_policy
from tests.flower.fake_grid import (
    UNIFORM,
    FakeGrid,
    alter,
    errors_become_replies,
    federation,
    node_of,
    start,
    with_metric,
)
from tests.flower.test_strategy import rewrite_roster


def with_facts(count: int, facts) -> FakeGrid:
    """Clients that report free-form facts: `facts(partition)`."""
    grid = federation(count)
    for node in grid.nodes.values():
        app = type(node.app)()
        answer_probes(app, num_examples=node.num_examples, facts=facts(node.partition))
        app.train()(node.train)
        app.evaluate()(node.evaluate)
        node.app = app
    return grid


def test_facts_reach_the_servers_functions_and_cannot_replace_what_fedpick_asks_for():
    seen = {}

    def eligible(info, reported):
        seen[reported["partition-id"]] = reported
        return reported["battery"] > 0.5

    grid = with_facts(4, lambda i: lambda context: {"battery": i / 4, "os": "linux", "num-examples": 10**6})
    strategy = with_policy(flower.FedAvg(), UNIFORM, eligible=eligible)
    start(strategy, grid, rounds=1)
    assert strategy.roster.keys == ["partition:3"]
    assert seen[3] == {"battery": 0.75, "os": "linux", "num-examples": 13, "partition-id": 3}


def test_tags_admit_the_clients_that_have_one(caplog):
    tags = [["gpu", "eu"], "eu, cpu", ["cpu"], 7]
    grid = with_facts(4, lambda i: {"tags": tags[i]})
    strategy = with_policy(flower.FedAvg(), UNIFORM, eligible=["tag:eu", "partition:3"])
    start(strategy, grid, rounds=1)
    assert strategy.roster.keys == ["partition:0", "partition:1", "partition:3"]
    assert "partition:3 reported tags = 7, which counts as unknown: it must be a list of texts" in caplog.text


GREEDY = fedpick.policies.get("pow-d", num_candidates=100)
BOUNDED = fedpick.Guard(cut=False, most_places=1.0)


def with_losses(count: int, loss) -> FakeGrid:
    grid = federation(count)
    for node in grid.nodes.values():
        answer = {"value": loss(node.partition)}
        alter(node, "loss", lambda content, answer=answer: content["answer"].update(answer))
    return grid


def test_the_places_of_a_group_are_bounded_for_newcomers_and_after_a_restart(tmp_path):
    """The clients of one owner take turns: none of them has too many places, only the group has."""
    north = {f"partition:{k}": "north" for k in [*range(6), 12, 13]}
    places = {}
    for name, groups in (("none", None), ("table", north)):
        options = {"budget": 2, "guard": BOUNDED, "groups": groups, "state": tmp_path / name}
        grid = with_losses(14, lambda k: 2.0 if f"partition:{k}" in north else 1.0)
        newcomers = {node: grid.nodes.pop(node) for node in list(grid.nodes) if grid.nodes[node].partition >= 12}
        strategy = with_policy(flower.FedAvg(), GREEDY, **options)
        start(strategy, grid, rounds=30)
        chosen = np.concatenate([selection.clients for selection in strategy.history])
        places[name] = int(np.isin(chosen, range(6)).sum())
        if groups:
            assert strategy.session.clients.group.tolist() == [0] * 6 + [1] * 6
            grid.nodes = newcomers  # after a restart the others are away
            resumed = with_policy(flower.FedAvg(), GREEDY, **options)
            start(resumed, grid, rounds=1)
            assert resumed.session.clients.group.tolist() == [0] * 6 + [1] * 6 + [0] * 2
    assert places["none"] == 60
    assert 30 < places["table"] < 50  # 30 would be fair


def test_groups_come_from_identities_tags_or_a_function(caplog):
    facts = [{"tags": ["eu"], "owner": "a"}, {"tags": ["eu", "gpu"]}, {"owner": 7}, {}]

    def owner(info, reported):
        return reported["owner"] if reported["partition-id"] != 1 else None

    for groups, expected in [
        ({"partition:0": "north", "tag:eu": "south", "tag:gpu": 3}, ["north", "south", "", ""]),
        (owner, ["a", "", "7", ""]),
        (None, [""] * 4),
    ]:
        strategy = with_policy(flower.FedAvg(), UNIFORM, groups=groups)
        start(strategy, with_facts(4, lambda k: facts[k]), rounds=1)
        assert strategy.roster.groups == expected
    assert strategy.session.clients.group is None
    assert "The groups function failed for partition:3" in caplog.text


@pytest.mark.parametrize("groups", [["tag:eu"], {"eu": "south"}, {"tag:eu": None}, "tag"])
def test_groups_must_be_a_table_or_a_function(groups):
    with pytest.raises(InvalidInput, match="groups must be a function"):
        with_policy(flower.FedAvg(), UNIFORM, groups=groups)


def test_a_client_rests_after_a_round(tmp_path):
    strategy = with_policy(flower.FedAvg(), UNIFORM, budget=2, cooldown=2, state=tmp_path)
    start(strategy, federation(7), rounds=9)
    cohorts = [set(selection.clients.tolist()) for selection in strategy.history]
    for first in range(7):
        assert not cohorts[first] & (cohorts[first + 1] | cohorts[first + 2])
    resumed = with_policy(flower.FedAvg(), UNIFORM, budget=2, cooldown=2, state=tmp_path)
    start(resumed, federation(7), rounds=1)
    assert not set(resumed.history[0].clients.tolist()) & (cohorts[-1] | cohorts[-2])


def test_no_client_is_in_more_than_its_share_of_the_rounds():
    policy = fedpick.policies.get("pow-d", num_candidates=6)  # without a limit it always takes the largest losses
    strategy = with_policy(flower.FedAvg(), policy, budget=2, max_share=0.4)
    start(strategy, federation(6), rounds=10)
    counts = np.bincount(np.concatenate([selection.clients for selection in strategy.history]), minlength=6)
    assert counts.max() == 4 and counts.sum() == 20
    assert strategy.roster.selections == counts.tolist()


def test_a_round_without_rested_clients_is_told_and_the_run_goes_on(caplog):
    strategy = with_policy(flower.FedAvg(), UNIFORM, cooldown=1)
    start(strategy, federation(3), rounds=4)
    assert [len(selection.clients) for selection in strategy.history] == [3, 0, 3, 0]
    assert "cooldown and max_share exclude all 3 ready clients: nobody trains in round 2" in caplog.text


def test_a_roster_of_an_older_version_has_no_counts_and_groups_and_is_read(tmp_path):
    start(with_policy(flower.FedAvg(), UNIFORM, state=tmp_path), federation(3), rounds=2)
    rewrite_roster(tmp_path, without=("selections", "last", "strikes", "rests_until", "groups"))
    roster = with_policy(flower.FedAvg(), UNIFORM, state=tmp_path).roster
    assert (roster.last, roster.groups) == ([-1] * 3, [""] * 3)


class PacedGrid(FakeGrid):
    """A node answers a train message after `seconds[partition]`, everything else at once."""

    def __init__(self, nodes, clock, seconds):
        super().__init__(nodes)
        self.clock, self.seconds, self.sent_at = clock, seconds, {}
        self.on_send = lambda message: self.sent_at.update({message.metadata.message_id: clock.monotonic()})

    def due(self, message) -> float:
        seconds = self.seconds.get(self.nodes[message.metadata.dst_node_id].partition, 0.0)
        return self.sent_at[message.metadata.message_id] + (
            seconds if message.metadata.message_type == "train" else 0.0
        )

    def pull_messages(self, message_ids):
        here = [i for i in message_ids if i in self.waiting and self.due(self.waiting[i]) <= self.clock.monotonic()]
        return super().pull_messages(here)


def test_a_client_that_nearly_misses_every_deadline_is_asked_less_and_less(clock, tmp_path, caplog):
    def run(rounds):
        grid = PacedGrid(federation(4).nodes, clock, {0: 1.0, 1: 99.0, 2: 2.0, 3: 3.0})
        strategy = with_policy(
            flower.FedAvg(fraction_evaluate=0.0),
            UNIFORM,
            train_timeout=100.0,
            progress=lambda report: reports.append(report) if report.over else None,
            state=tmp_path,
        )
        start(strategy, grid, rounds=rounds)
        return strategy

    reports = []
    run(12)
    strategy = run(20)  # it is remembered
    asked = [report.round for report in reports if "partition:1" in report.cohort]
    assert asked == [1, 3, 7, 15, 31]
    assert all(len(report.completed) == len(report.cohort) >= 3 for report in reports)
    assert strategy.roster.strikes == [0, 10, 0, 0]
    assert "partition:1 took 99" in caplog.text and "it is not asked until round 7" in caplog.text


def test_a_client_that_is_slow_in_every_second_round_is_asked_less(clock):
    grid = PacedGrid(federation(3).nodes, clock, {})
    reports = []
    strategy = with_policy(flower.FedAvg(fraction_evaluate=0.0), UNIFORM, train_timeout=100.0, progress=reports.append)
    honest = grid.on_send

    def on_send(message):
        grid.seconds = {1: 99.0 if node_of(grid, 1).trained % 2 else 0.0}
        honest(message)

    grid.on_send = on_send
    start(strategy, grid, rounds=60)
    assert sum("partition:1" in report.cohort for report in reports if report.over) < 25


def test_times_belong_to_their_nodes_if_a_message_could_not_be_sent(clock):
    """Flower's grid for simulations returns no id for such a message."""

    class Losing(PacedGrid):
        def push_messages(self, messages):
            messages = list(messages)
            identities = list(super().push_messages(messages))
            for message in messages:
                if message.metadata.message_type == "train" and message.metadata.dst_node_id == max(self.nodes):
                    del self.waiting[message.metadata.message_id]
                    identities.remove(message.metadata.message_id)
            return identities

    grid = Losing(federation(4).nodes, clock, {1: 99.0})
    strategy = with_policy(flower.FedAvg(fraction_evaluate=0.0), UNIFORM, train_timeout=100.0)
    start(strategy, grid, rounds=1)
    lost = grid.nodes[max(grid.nodes)].partition
    assert lost != 1 and np.flatnonzero(strategy.roster.strikes).tolist() == sorted([1, lost])


def test_a_deadline_that_is_short_for_all_is_no_clients_fault(clock):
    grid = PacedGrid(federation(4).nodes, clock, dict.fromkeys(range(4), 95.0))
    strategy = with_policy(flower.FedAvg(fraction_evaluate=0.0), UNIFORM, train_timeout=100.0)
    start(strategy, grid, rounds=3)
    assert [len(selection.clients) for selection in strategy.history] == [4, 4, 4]
    assert strategy.roster.strikes == [0] * 4


def test_a_client_far_slower_than_most_is_asked_less_whatever_the_deadline(clock):
    grid = PacedGrid(federation(5).nodes, clock, {0: 10.0, 1: 2844.0, 2: 11.0, 3: 12.0, 4: 40.0})
    reports = []
    strategy = with_policy(flower.FedAvg(fraction_evaluate=0.0), UNIFORM, train_timeout=3600.0, progress=reports.append)
    start(strategy, grid, rounds=4)
    assert [report.round for report in reports if report.over and "partition:1" in report.cohort] == [1, 3]
    assert strategy.roster.strikes == [0, 4, 0, 0, 0]
    (slow,) = [row for row in strategy.standings if row.status == "slow"]
    assert slow.identity == "partition:1" and slow.why == "much slower than most; rests until round 7"


def test_neither_errors_nor_a_look_for_messages_make_others_slow(clock):
    grid = PacedGrid(federation(5).nodes, clock, {3: 30.0, 4: 40.0})
    for partition in range(3):
        node_of(grid, partition).app = errors_become_replies(None)  # fails at once
    strategy = with_policy(flower.FedAvg(fraction_evaluate=0.0), UNIFORM, key=lambda node, told: None)
    start(strategy, grid, rounds=1)
    assert strategy.roster.strikes == [0] * 5
    grid = PacedGrid(federation(4).nodes, clock, {0: 0.1, 1: 0.1, 2: 0.1, 3: 4.0})
    strategy = with_policy(flower.FedAvg(fraction_evaluate=0.0), UNIFORM)
    start(strategy, grid, rounds=1)
    assert strategy.roster.strikes == [0] * 4


def test_slow_clients_train_if_there_are_no_others(clock):
    grid = PacedGrid(federation(2).nodes, clock, {1: 99.0})
    strategy = with_policy(flower.FedAvg(fraction_evaluate=0.0), UNIFORM, train_timeout=100.0)
    start(strategy, grid, rounds=1)
    node_of(grid, 0).mode = "gone"
    start(strategy, grid, rounds=2)
    assert [len(selection.clients) for selection in strategy.history] == [2, 1, 1]


class Seeing(Callback):
    """Keeps the durations of the last round, in the order of the table."""

    durations = None

    def on_round(self, record):
        self.durations = record.outcome.duration[np.argsort(record.outcome.clients)]


@pytest.mark.parametrize("told", [None, 5.0])
def test_the_servers_clock_counts_where_a_client_says_nothing_or_was_slow(clock, told):
    grid, seeing = PacedGrid(federation(3).nodes, clock, {0: 10.0, 1: 99.0, 2: 20.0}), Seeing()
    for node in grid.nodes.values():
        if told is not None:
            alter(node, "train", with_metric("train-time", told))
    strategy = with_policy(flower.FedAvg(fraction_evaluate=0.0), UNIFORM, train_timeout=100.0, record=seeing)
    start(strategy, grid, rounds=1)
    expected = [10.0, 99.0, 20.0] if told is None else [5.0, 99.0, 5.0]
    np.testing.assert_allclose(seeing.durations, expected, atol=1.1)


@pytest.mark.parametrize(
    ("told", "seconds", "expected"),
    [
        ([9.0, 0.001, 18.0, 9.0], [10.0, 12.0, 20.0, 10.0], [9.0, 12.0, 18.0, 9.0]),
        ([9.0, 0.0, 18.0, 0.0], [10.0, 12.0, 20.0, 10.0], [9.0, 0.0, 18.0, 0.0]),  # half of them: whom to believe?
        ([9.0, 3.0, 18.0, 9.0], [10.0, 12.0, 20.0, 10.0], [9.0, 3.0, 18.0, 9.0]),
        ([1.0, 1.0, 1.0, 1.0], [1.0, 7.0, 14.0, 20.0], [1.0, 1.0, 1.0, 1.0]),  # one machine trains one after another
    ],
)
def test_a_client_that_says_it_trained_in_no_time_is_not_believed(clock, told, seconds, expected):
    grid, seeing = PacedGrid(federation(4).nodes, clock, dict(enumerate(seconds))), Seeing()
    for node in grid.nodes.values():
        alter(node, "train", with_metric("train-time", told[node.partition]))
    start(with_policy(flower.FedAvg(fraction_evaluate=0.0), UNIFORM, record=seeing), grid, rounds=1)
    np.testing.assert_allclose(seeing.durations, expected, rtol=0.1)


def slow_in_training(grid, partition):
    """The node never answers a train message; everything else it does at once."""
    grid.on_send = lambda message: setattr(
        node_of(grid, partition), "mode", "late" if message.metadata.message_type == "train" else "good"
    )


@pytest.mark.parametrize(("quorum", "completed"), [(0.8, 4), (0.5, 4)])
def test_a_quorum_ends_the_round_without_the_slow_client(quorum, completed, caplog):
    grid, reports = federation(5), []
    slow_in_training(grid, 2)
    strategy = with_policy(
        flower.FedAvg(fraction_evaluate=0.0), UNIFORM, quorum=quorum, train_timeout=3600.0, progress=reports.append
    )
    start(strategy, grid, rounds=1)
    (over,) = [report for report in reports if report.over]
    # Answers that came in the same look are used, also beyond the quorum.
    assert (len(over.completed), over.failed, over.late) == (completed, ["partition:2"], ["partition:2"])
    assert strategy._membership.busy_nodes() == {node for node, value in grid.nodes.items() if value.partition == 2}
    assert "failed: none; late: partition:2" in caplog.text


def test_overcommitment_asks_more_and_takes_the_first():
    grid, reports = federation(10), []
    policy = fedpick.policies.get("pow-d", num_candidates=10)
    strategy = with_policy(
        flower.FedAvg(fraction_evaluate=0.0), policy, budget=4, overcommit=1.3, progress=reports.append
    )
    start(strategy, grid, rounds=3)
    for over in [report for report in reports if report.over]:
        assert len(over.cohort) == 6  # 4 x 1.3, rounded up
        assert over.completed == over.cohort[:4]  # all came in one look, so the order is that of the cohort
        assert over.late == over.failed == over.cohort[4:]
    assert not strategy._membership.busy_nodes()  # they did answer


def test_an_error_is_no_answer_that_ends_a_round():
    grid, reports = federation(5), []
    strategy = with_policy(
        flower.FedAvg(fraction_evaluate=0.0), UNIFORM, quorum=0.8, progress=reports.append, min_clients=4
    )
    grid.on_send = lambda message: setattr(
        node_of(grid, 0), "mode", "error" if message.metadata.message_type == "train" else "good"
    )
    start(strategy, grid, rounds=1)
    over = reports[-1]
    assert len(over.completed) == 4 and over.failed == ["partition:0"] and over.late == []


def test_overcommitment_needs_a_budget():
    with pytest.raises(InvalidInput, match=r"overcommit=1\.3 .* Set a budget"):
        with_policy(flower.FedAvg(), UNIFORM, overcommit=1.3)


class Recorded(Callback):
    """Keeps what a driver tells its record."""

    def __init__(self):
        self.calls, self.rounds = [], []

    def on_start(self, session):
        self.calls.append(("start", session.round))

    def on_round(self, record):
        self.calls.append(("round", record.index))
        self.rounds.append(record)

    def on_end(self, error=None):
        self.calls.append(("end", error))


def test_every_round_is_recorded_with_its_weights_failures_and_evaluation():
    grid, record = federation(4), Recorded()
    slow_in_training(grid, 1)
    policy = fedpick.policies.get("pow-d", num_candidates=4)
    strategy = with_policy(flower.FedAvg(fraction_evaluate=0.0), policy, budget=3, quorum=0.6, record=record)
    accuracies = iter([0.1, 0.2, 0.3])
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord({"w": Array(np.zeros(3))}),
        num_rounds=2,
        evaluate_fn=lambda round, arrays: MetricRecord({"accuracy": next(accuracies), "loss": 1.0}),
    )
    assert record.calls == [("start", 0), ("round", 0), ("round", 1), ("end", None)]
    first, second = record.rounds
    assert [round.test_accuracy for round in record.rounds] == [0.2, 0.3] and first.test_loss == 1.0
    assert first.weights[first.outcome.completed].sum() == pytest.approx(1) and not first.outcome.completed.all()
    assert not first.weights[~first.outcome.completed].any()
    assert np.isfinite(first.outcome.train_loss[first.outcome.completed]).all()
    assert first.outcome.cancelled.sum() == 1 and not first.outcome.late.any()
    assert (first.outcome.duration[first.outcome.cancelled] > 0).all()
    assert first.available.sum() == 4 and second.available.sum() == 3  # the slow one is busy
    assert first.counters.scalars_up == 4 and first.counters.updates_up == 2 and first.counters.models_down == 7
    assert second.counters.bytes_down > first.counters.bytes_down > 0


def test_a_client_that_misses_the_deadline_is_late_and_not_cancelled():
    grid, record = federation(4), Recorded()
    slow_in_training(grid, 1)
    strategy = with_policy(flower.FedAvg(fraction_evaluate=0.0), UNIFORM, train_timeout=0.5, record=record)
    start(strategy, grid, rounds=1)
    (round,) = record.rounds
    assert round.outcome.late.sum() == 1 and not round.outcome.cancelled.any()
    assert round.outcome.late.tolist() == (~round.outcome.completed).tolist()


def test_a_run_that_fails_is_recorded_as_failed():
    record = Recorded()
    strategy = with_policy(flower.FedAvg(), UNIFORM, record=record)
    grid = federation(2)
    for node in grid.nodes.values():
        node.mode = "nan"
    with pytest.raises(TrainingFailed):
        start(strategy, grid, rounds=1)
    assert record.calls[:2] == [("start", 0), ("round", 0)] and "None of 1 rounds" in str(record.calls[2][1])
