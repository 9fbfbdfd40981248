"""Rounds that break: aggregation that raises or declines, nodes that vanish, and what listeners are told."""

from __future__ import annotations

import logging

import numpy as np
import pytest

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedpick[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message  # noqa: E402
from flwr.serverapp import strategy as flower  # noqa: E402

import fedpick  # noqa: E402
from fedpick.flower import with_policy  # noqa: E402
from tests.flower.fake_grid import FakeGrid, FakeNode, federation, start  # noqa: E402

logging.getLogger("flwr").setLevel(logging.ERROR)


def test_a_round_that_was_broken_off_counts_as_failed():
    grid = federation(3)
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("uniform"), seed=0)
    model = ArrayRecord({"w": Array(np.zeros(1))})
    strategy.configure_train(1, model, ConfigRecord(), grid)
    grid.nodes[1] = FakeNode(7)  # the table grows, which the open round must not forbid
    strategy.configure_train(1, model, ConfigRecord(), grid)
    assert strategy.session.round == 1
    assert len(strategy.session.clients) == 4


class Failing(flower.FedAvg):
    """Aggregates badly in one of its rounds."""

    def __init__(self, bad_call, how):
        super().__init__(fraction_evaluate=0.0)
        self.calls, self.bad_call, self.how = 0, bad_call, how

    def aggregate_train(self, server_round, replies):
        self.calls += 1
        if self.calls != self.bad_call:
            return super().aggregate_train(server_round, replies)
        if self.how == "raises":
            raise RuntimeError("out of memory")
        return None, None


def test_a_step_that_was_not_made_is_not_in_the_saved_state(tmp_path):
    policy = fedpick.policies.get("rpow-d", num_candidates=6)
    whole = with_policy(flower.FedAvg(fraction_evaluate=0.0), policy, budget=3, seed=4)
    start(whole, federation(), rounds=5)

    path, kept = tmp_path / "policy", []
    broken = with_policy(Failing(3, "raises"), policy, budget=3, seed=4, state=path)
    with pytest.raises(RuntimeError, match="out of memory"):
        broken.start(
            grid=federation(),
            initial_arrays=ArrayRecord({"w": Array(np.zeros(3))}),
            num_rounds=5,
            evaluate_fn=lambda index, arrays: kept.append(arrays),
        )
    again = with_policy(flower.FedAvg(fraction_evaluate=0.0), policy, budget=3, seed=4, state=path)
    assert again.session.round == 2  # as many steps as the model made
    again.start(grid=federation(), initial_arrays=kept[-1], num_rounds=3)
    got = [selection.clients.tolist() for selection in (*broken.history[:2], *again.history)]
    assert got == [selection.clients.tolist() for selection in whole.history]


def test_after_an_aggregation_that_raised_the_same_object_goes_on(tmp_path):
    reports = []
    strategy = with_policy(
        Failing(1, "raises"), fedpick.policies.get("uniform"), budget=2, state=tmp_path, progress=reports.append
    )
    with pytest.raises(RuntimeError):
        start(strategy, federation(4), rounds=1)
    start(strategy, federation(4), rounds=1)
    assert strategy.session.round == 2
    assert [len(report.failed) for report in reports if report.over] == [2, 0]


def test_updates_that_the_strategy_declined_did_not_enter_the_model():
    reports = []
    strategy = with_policy(Failing(2, "declines"), fedpick.policies.get("uniform"), budget=2, progress=reports.append)
    start(strategy, federation(4), rounds=3)
    assert [len(report.completed) for report in reports if report.over] == [2, 0, 2]


def test_progress_is_told_when_the_cohort_is_chosen_and_when_the_round_is_over():
    grid, reports = federation(5), []
    strategy = with_policy(
        flower.FedAvg(fraction_evaluate=0.0),
        fedpick.policies.get("pow-d", num_candidates=5),
        budget=2,
        progress=reports.append,
        probe_timeout=11.0,
        train_timeout=22.0,
    )
    # Power-of-Choice takes those with the largest loss, which are 3 and 4; the latter fails.
    grid.on_send = lambda message: [
        setattr(node, "mode", "late" if message.metadata.message_type == "train" and node.partition == 4 else "good")
        for node in grid.nodes.values()
    ]
    start(strategy, grid, rounds=2)
    chosen, over, chosen_later, _ = reports
    assert not chosen.over and over.over and chosen.index == over.index == 0
    assert chosen.available == over.available == [f"partition:{i}" for i in range(5)]
    assert sorted(chosen.cohort) == ["partition:3", "partition:4"]
    assert (over.completed, over.failed) == (["partition:3"], ["partition:4"])
    steps = [(step.kind, step.asked, step.answered, step.deadline) for step in over.steps]
    assert steps == [("query.fedpick", 5, 5, 11.0), ("query.fedpick", 5, 5, 11.0), ("train", 2, 1, 22.0)]
    assert over.seconds >= sum(step.seconds for step in over.steps)
    assert chosen_later.index == 1


class ForgetfulGrid(FakeGrid):
    """Refuses messages to nodes that have unregistered, as a SuperLink does: see test_vanished_nodes.py."""

    def __init__(self, nodes):
        super().__init__(nodes)
        self.unregistered = set()

    def get_node_ids(self):
        return [node for node in super().get_node_ids() if node not in self.unregistered]

    def push_messages(self, messages):
        messages = list(messages)
        identities = super().push_messages(messages)
        refused = {m.metadata.message_id for m in messages if m.metadata.dst_node_id in self.unregistered}
        for identity in refused:
            del self.waiting[identity]
        return ["" if identity in refused else identity for identity in identities]

    def pull_messages(self, message_ids):
        unknown = [identity for identity in message_ids if identity not in self.waiting]
        replies = super().pull_messages([identity for identity in message_ids if identity in self.waiting])
        for identity in set(unknown):
            reply = Message(Error(code=3, reason="unknown message"), reply_to=self.sent[0])
            reply.metadata.__dict__.update(_reply_to_message_id=identity, _src_node_id=1)
            replies.append(reply)
        return replies


def test_a_node_that_unregisters_between_choice_and_message_failed_and_is_not_busy():
    grid, reports = ForgetfulGrid(federation(4).nodes), []
    strategy = with_policy(
        flower.FedAvg(fraction_evaluate=0.0), fedpick.policies.get("uniform"), progress=reports.append
    )
    node_id, node = next(item for item in grid.nodes.items() if item[1].partition == 2)

    def one_round(index, vanishes=False):
        messages = strategy.configure_train(index, ArrayRecord({"w": Array(np.zeros(1))}), ConfigRecord(), grid)
        if vanishes:
            grid.unregistered.add(node_id)
        strategy.aggregate_train(index, list(grid.send_and_receive(messages)))
        return reports[-1]

    assert one_round(1).failed == []
    lost = one_round(2, vanishes=True)
    assert (lost.failed, len(lost.completed)) == (["partition:2"], 3)
    assert sorted(one_round(3).cohort) == ["partition:0", "partition:1", "partition:3"]
    grid.nodes[77] = node  # the same client, back under another node id
    assert len(one_round(4).completed) == 4
    grid.unregistered.add(77)
    grid.unregistered.remove(node_id)  # and under its old one
    assert len(one_round(5).completed) == 4
