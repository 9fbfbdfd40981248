"""Identity, descriptions and readiness of clients, including clients that report nonsense."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp import strategy as flower

import fedpick
from fedpick.adapter.members import Roster
from fedpick.core.errors import MissingSignal, TrainingFailed
from fedpick.flower import answer_probes, with_policy
from tests.flower.fake_grid import (
    INFINITY,
    NAN,
    UNIFORM,
    FakeGrid,
    FakeNode,
    alter,
    describe_queries,
    errors_become_replies,
    federation,
    labelled,
    node_of,
    start,
)


def test_a_late_client_is_busy_until_it_answers():
    grid = federation(4)
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("uniform"), seed=0)
    late = next(node for node in grid.nodes.values() if node.partition == 2)
    late.mode = "late"

    def one_round(index):
        messages = strategy.configure_train(index, ArrayRecord({"w": Array(np.zeros(1))}), ConfigRecord(), grid)
        strategy.aggregate_train(index, list(grid.send_and_receive(messages)))
        return sorted(strategy.history[-1].clients.tolist())

    # Said hello before it became slow.
    late.mode = "good"
    assert one_round(1) == [0, 1, 2, 3]
    late.mode = "late"
    assert one_round(2) == [0, 1, 2, 3]
    assert one_round(3) == [0, 1, 3]
    late.mode = "good"
    assert one_round(4) == [0, 1, 2, 3]


def test_clients_join_and_vanish():
    grid = federation(4)
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("fedgs", similarity="updates"), budget=3, seed=0)
    grid.on_send = lambda message: None
    start(strategy, grid, rounds=2)
    grid.nodes[999] = FakeNode(9, 50)
    next(node for node in grid.nodes.values() if node.partition == 0).mode = "gone"
    start(strategy, grid, rounds=3)
    assert strategy.roster.keys[-1] == "partition:9"
    assert len(strategy.session.clients) == 5
    assert not any(0 in selection.clients for selection in strategy.history[2:])


def test_identity_prefers_the_callers_key_then_the_partition_then_the_node():
    strategy = with_policy(
        flower.FedAvg(), fedpick.policies.get("uniform"), budget=2, key=lambda node, facts: f"site-{node.node_id % 5}"
    )
    start(strategy, FakeGrid({10: FakeNode(0), 11: FakeNode(1)}), rounds=1)
    assert strategy.roster.keys == ["key:site-0", "key:site-1"]
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("uniform"), budget=2)
    start(strategy, FakeGrid({10: FakeNode(0, reports_partition=False), 11: FakeNode(1)}), rounds=1)
    assert strategy.roster.keys == ["node:10", "partition:1"]


def test_a_node_that_does_not_say_who_it_is_comes_in_when_it_does():
    grid = federation(3)
    slow_id, slow = next(item for item in grid.nodes.items() if item[1].partition == 1)
    slow.mode = "late"
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("uniform"), seed=0)
    start(strategy, grid, rounds=2)
    assert strategy.roster.keys == ["partition:0", "partition:2"]
    slow.mode = "good"
    start(strategy, grid, rounds=1)
    assert strategy.roster.keys == ["partition:0", "partition:2", "partition:1"]  # and no "node:..." for good
    assert describe_queries(grid).count(slow_id) == 1  # the old question was answered, no new one was needed


def test_a_claim_of_an_identity_that_another_node_has_is_refused(caplog):
    grid = FakeGrid({1: FakeNode(0), 2: FakeNode(1), 3: FakeNode(1, num_examples=10**6)})
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("uniform"), seed=0)
    start(strategy, grid, rounds=2)
    assert strategy.roster.node_of == {0: 1, 1: 2}
    assert strategy.roster.num_examples == [10, 10]  # what it says of the other is not taken
    assert "Node 3 claims to be partition:1, but node 2 has this identity and is online" in caplog.text
    assert [(row.identity, row.node, row.status) for row in strategy.standings] == [
        ("partition:0", "1", "member"),
        ("partition:1", "2", "member"),
        ("partition:1", "3", "refused"),
    ]
    grid.nodes[4] = FakeNode(0)  # nor does a newcomer get the identity of a node that is online
    start(strategy, grid, rounds=2)
    assert strategy.roster.node_of == {0: 1, 1: 2} and grid.nodes[4].trained == grid.nodes[3].trained == 0
    evaluated = {m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "evaluate"}
    assert evaluated == {1, 2}
    assert sorted(describe_queries(grid)) == [1, 2, 3, 4]
    grid.nodes[2].mode = "gone"
    start(strategy, grid, rounds=2)
    assert strategy.roster.node_of == {0: 1, 1: 3}


class NamedGrid(FakeGrid):
    """A grid with authenticated nodes: node id -> registered name, and when it last came online."""

    def __init__(self, nodes, names):
        super().__init__(nodes)
        self.names, self.activated = names, {}

    def get_nodes(self):
        return [
            SimpleNamespace(node_id=node, name=self.names.get(node, ""), last_activated_at=self.activated.get(node, ""))
            for node in self.get_node_ids()
        ]


def test_the_registered_name_counts_and_claims_of_partitions_do_not(caplog):
    nodes = {9: FakeNode(0), 8: FakeNode(0), 1: FakeNode(0), 2: FakeNode(5)}
    grid = NamedGrid(nodes, {9: "clinic-a", 8: "clinic-b"})
    seen = {}

    def eligible(info, reported):
        return seen.setdefault(info.node_id, True)

    strategy = with_policy(flower.FedAvg(), UNIFORM, eligible=eligible)
    start(strategy, grid, rounds=2)
    assert strategy.roster.keys == ["name:clinic-a", "name:clinic-b", "partition:5"]
    assert "name:clinic-a claims to be partition:0, which node 8 is: the claim is refused" in caplog.text
    assert "Node 1 claims to be partition:0, but node 8 has this identity" in caplog.text  # it has no name
    why = {row.identity: row.why for row in strategy.standings if row.status == "member"}
    refused = "its claim to be partition:0 is refused: node 8 has that identity"
    assert why["name:clinic-b"] == "registered under this name"
    assert why["name:clinic-a"] == f"registered under this name; {refused}"
    assert why["partition:5"] == "its own report, without proof"


def test_two_nodes_with_one_registered_name_are_not_one_client(caplog):
    """Flower lets an operator register two keys under one name."""
    grid = NamedGrid({1: FakeNode(0), 2: FakeNode(1)}, {1: "clinic", 2: "clinic"})
    strategy = with_policy(flower.FedAvg(), UNIFORM)
    start(strategy, grid, rounds=1)
    assert strategy.roster.keys == ["name:clinic"] and strategy.roster.node_of == {0: 1}
    assert "Node 2 claims to be name:clinic" in caplog.text


def test_a_registered_node_that_restarts_is_not_busy_with_what_it_forgot():
    """It keeps its node id, and may be back before anybody saw that it was gone."""
    grid = NamedGrid({1: FakeNode(0), 2: FakeNode(1)}, {1: "clinic-a", 2: "clinic-b"})
    strategy = with_policy(flower.FedAvg(), UNIFORM)
    start(strategy, grid, rounds=1)
    grid.nodes[2].mode = "late"
    start(strategy, grid, rounds=1)
    grid.waiting.clear()  # the SuperLink has delivered the message and does not deliver it again
    grid.nodes[2].mode = "good"
    start(strategy, grid, rounds=1)
    assert grid.nodes[2].trained == 1  # as far as the server knows, it is still training
    grid.activated[2] = "later"
    start(strategy, grid, rounds=1)
    assert grid.nodes[2].trained == 2


def test_a_registered_node_that_restarts_is_asked_again_who_it_is():
    grid = NamedGrid({1: FakeNode(0), 2: FakeNode(1)}, {1: "clinic-a", 2: "clinic-b"})
    grid.nodes[2].mode = "late"
    strategy = with_policy(flower.FedAvg(), UNIFORM)
    start(strategy, grid, rounds=1)
    grid.waiting.clear()
    grid.nodes[2].mode, grid.activated[2] = "good", "later"
    start(strategy, grid, rounds=1)
    assert strategy.roster.keys == ["name:clinic-a", "name:clinic-b"] and describe_queries(grid).count(2) == 2


def test_excluded_clients_take_no_part_and_the_table_says_why():
    strategy = with_policy(flower.FedAvg(), UNIFORM, exclude=["partition:1", "partition:9"])
    start(strategy, grid := federation(3), rounds=2)
    assert strategy.roster.keys == ["partition:0", "partition:2"]
    assert {
        grid.nodes[m.metadata.dst_node_id].partition for m in grid.sent if m.metadata.message_type != "query.fedpick"
    } == {0, 2}
    (row,) = [row for row in strategy.standings if row.status != "member"]
    assert (row.identity, row.status, row.why) == ("partition:1", "excluded", "exclude= names partition:1")


def test_a_killed_node_that_still_counts_as_online_is_no_second_client():
    grid = FakeGrid({1: FakeNode(0), 2: FakeNode(1)})
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("uniform"), seed=0)
    start(strategy, grid, rounds=1)
    grid.nodes[2].mode = "late"  # killed; its heartbeat has not run out
    grid.nodes[9] = FakeNode(1)  # the same client, restarted
    start(strategy, grid, rounds=2)
    assert strategy.roster.keys == ["partition:0", "partition:1"]
    assert strategy.roster.node_of[1] == 2
    grid.nodes[2].mode = "gone"
    start(strategy, grid, rounds=2)
    assert strategy.roster.node_of[1] == 9 and grid.nodes[9].trained > 0


def test_a_client_that_is_late_with_an_answer_or_an_evaluation_is_busy_too():
    grid = federation(4)
    late_id, late = next(item for item in grid.nodes.items() if item[1].partition == 2)
    strategy = with_policy(flower.FedAvg(fraction_evaluate=0.0), fedpick.policies.get("ca-fed"), seed=0)
    start(strategy, grid, rounds=1)
    late.mode = "late"
    before = len(grid.sent)
    start(strategy, grid, rounds=3)
    # Asked for its loss once and then left alone, instead of one deadline in every round.
    kinds = [m.metadata.message_type for m in grid.sent[before:] if m.metadata.dst_node_id == late_id]
    assert kinds.count("query.fedpick") == 1
    assert [2 in selection.clients for selection in strategy.history[-2:]] == [False, False]

    grid = federation(4)
    late = next(node for node in grid.nodes.values() if node.partition == 2)
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("uniform"), seed=0)
    grid.on_send = lambda message: setattr(
        late, "mode", "late" if message.metadata.message_type == "evaluate" else late.mode
    )
    start(strategy, grid, rounds=2)
    assert [2 in selection.clients for selection in strategy.history] == [True, False]


def test_clients_that_keep_their_labels_private_count_as_the_mean():
    roster = Roster()
    roster.admit({1: ("partition:0", {"label-histogram": [4, 0]}), 2: ("partition:1", {})})
    np.testing.assert_array_equal(roster.clients().label_histogram, [[4, 0], [4, 0]])
    roster.admit({3: ("partition:2", {"label-histogram": [0, 2]}), 4: ("partition:3", {"label-histogram": [1, 2, 3]})})
    np.testing.assert_array_equal(roster.clients().label_histogram, [[4, 0], [2, 1], [0, 2], [2, 1]])
    assert Roster(keys=["a"], num_examples=[1.0], histograms=[None]).clients().label_histogram is None


@pytest.mark.parametrize(
    "histogram",
    [[NAN, 1.0], [-1.0, 2.0], [INFINITY, 0.0], [1e300, 0.0], [1.0, 2.0, 3.0], [1], [], 5.0, 3],
    ids=str,
)
def test_a_label_histogram_that_makes_no_sense_is_unknown(histogram, caplog):
    grid = labelled()
    alter(node_of(grid, 0), "describe", lambda content: content["answer"].update({"label-histogram": histogram}))
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("fedgs"), budget=2, seed=0)
    start(strategy, grid, rounds=3)
    assert strategy.session.round == 3
    table = strategy.session.clients
    # Nobody else's histogram is touched, and the unknown one counts as the mean of the others.
    np.testing.assert_allclose(table.label_histogram, [[4, 8], [0, 11], [12, 0], [0, 13]])
    assert table.num_examples.tolist() == [10, 11, 12, 13]
    said = [record.getMessage() for record in caplog.records if "label-histogram" in record.getMessage()]
    assert len(said) == 1 and "partition:0" in said[0]


@pytest.mark.parametrize("size", [[1, 2], NAN, -3, -1.0, INFINITY, 1e300, []], ids=str)
def test_a_size_that_makes_no_sense_is_unknown(size, caplog):
    grid = federation(4)
    alter(node_of(grid, 3), "describe", lambda content: content["answer"].update({"num-examples": size}))
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("md"), seed=0)
    grid_model = ArrayRecord({"w": Array(np.zeros(1))})
    strategy.configure_train(1, grid_model, ConfigRecord(), grid)
    assert strategy.session.clients.num_examples.tolist() == [10, 11, 12, 11]  # the median of the others
    said = [record.getMessage() for record in caplog.records if "num-examples" in record.getMessage()]
    assert len(said) == 1 and "partition:3" in said[0]


@pytest.mark.parametrize("partition", [NAN, INFINITY, [1], 1.5, -1, []], ids=str)
def test_a_partition_id_that_makes_no_sense_is_no_identity(partition, caplog):
    grid = federation(4)
    odd_id, odd = next(item for item in grid.nodes.items() if item[1].partition == 2)
    alter(odd, "describe", lambda content: content["answer"].update({"partition-id": partition}))
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("uniform"), seed=0)
    start(strategy, grid, rounds=2)
    assert strategy.roster.keys == [f"node:{odd_id}", "partition:0", "partition:1", "partition:3"]
    assert all(len(selection.clients) == 4 for selection in strategy.history)
    assert caplog.text.count("partition-id") == 1


def test_a_description_without_a_metric_record_says_nothing(caplog):
    grid = federation(3)
    odd_id, odd = next(item for item in grid.nodes.items() if item[1].partition == 1)
    alter(odd, "describe", lambda content: content.update({"answer": ConfigRecord({"partition-id": 1})}))
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("uniform"), seed=0)
    start(strategy, grid, rounds=1)
    assert f"node:{odd_id}" in strategy.roster.keys
    assert caplog.text.count("MetricRecord") == 1


def test_the_width_of_histograms_is_that_of_most_clients():
    roster = Roster()
    roster.admit({1: ("partition:0", {"label-histogram": [1, 2, 3]})})
    np.testing.assert_array_equal(roster.clients().label_histogram, [[1, 2, 3]])
    roster.admit({n: (f"partition:{n}", {"label-histogram": [4 * n, 0]}) for n in (2, 3)})
    np.testing.assert_array_equal(roster.clients().label_histogram, [[10, 0], [8, 0], [12, 0]])
    roster.admit({4: ("partition:4", {"label-histogram": [3, 2, 1]})})  # as many as the others: the first that came
    np.testing.assert_array_equal(roster.clients().label_histogram, [[1, 2, 3], [2, 2, 2], [2, 2, 2], [3, 2, 1]])


def test_a_policy_that_needs_labels_waits_where_only_nonsense_was_told_and_is_refused_where_nothing_was(caplog):
    grid = labelled(3)
    for node in grid.nodes.values():
        alter(node, "describe", lambda content: content["answer"].update({"label-histogram": [NAN, 1.0]}))
    strategy = with_policy(
        flower.FedAvg(), fedpick.policies.get("fedgs"), budget=2, seed=0, wait=0.05, ready_timeout=0.2
    )
    with pytest.raises(TrainingFailed, match="none with a usable label histogram"):
        start(strategy, grid, rounds=2)
    assert strategy.history == []
    assert "none with a usable label histogram" in caplog.text
    grid.nodes[77] = FakeNode(9)
    alter(grid.nodes[77], "describe", lambda content: content["answer"].update({"label-histogram": [1.0, 1.0]}))
    start(strategy, grid, rounds=2)
    assert len(strategy.history) == 2
    with pytest.raises(MissingSignal, match=r"answer_probes\(app, label_histogram="):
        start(with_policy(flower.FedAvg(), fedpick.policies.get("fedgs"), budget=2), federation(3))


def test_keys_that_look_like_numbers_but_are_none_can_be_sorted():
    roster = Roster()
    roster.admit({1: ("key:²", {}), 2: ("key:" + "7" * 5000, {}), 3: ("key:10", {}), 4: ("key:9", {})})
    assert roster.keys.index("key:9") < roster.keys.index("key:10")


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


def keyed(function, grid, rounds=1):
    strategy = with_policy(flower.FedAvg(fraction_evaluate=0.0), UNIFORM, key=function)
    start(strategy, grid, rounds=rounds)
    return strategy


@pytest.mark.parametrize("nothing", [None, ""])
def test_a_node_for_which_there_is_no_key_is_known_by_its_node_id(nothing, caplog):
    grid = FakeGrid({10: FakeNode(0), 11: FakeNode(1), 12: FakeNode(2)})
    strategy = keyed(lambda node, facts: nothing if node.node_id > 10 else "site", grid)
    assert strategy.roster.keys == ["key:site", "node:11", "node:12"]
    assert len(strategy.history[0].clients) == 3
    assert caplog.text.count("The key function returned") == 2


def test_a_key_function_that_raises_costs_only_that_nodes_key(caplog):
    def by_site(node, facts):
        return {10: "a", 11: "b"}[node.node_id]

    strategy = keyed(by_site, FakeGrid({10: FakeNode(0), 11: FakeNode(1), 12: FakeNode(2)}), rounds=2)
    assert strategy.roster.keys == ["key:a", "key:b", "node:12"]
    assert caplog.text.count("The key function failed for node 12") == 1


def test_nodes_that_the_key_function_cannot_tell_apart_are_known_by_their_node_ids(caplog):
    grid = FakeGrid({10: FakeNode(0), 11: FakeNode(1), 12: FakeNode(2)})
    strategy = keyed(lambda node, facts: "same" if node.node_id != 10 else "other", grid)
    assert strategy.roster.keys == ["key:other", "node:11", "node:12"]
    grid.nodes[13] = FakeNode(3)  # too late to be seen beside the others, but the value is known to be worth nothing
    start(strategy, grid, rounds=1)
    assert strategy.roster.keys[-1] == "node:13"
    assert [len(selection.clients) for selection in strategy.history] == [3, 4]
    assert caplog.text.count("The key function gives 'same' to several nodes") == 1


def test_a_restarted_node_keeps_its_key():
    grid = FakeGrid({10: FakeNode(0), 11: FakeNode(1)})
    strategy = keyed(lambda node, facts: f"site-{facts['partition-id']}", grid)
    grid.nodes[99] = grid.nodes.pop(11)
    start(strategy, grid, rounds=1)
    assert strategy.roster.keys == ["key:site-0", "key:site-1"]
    assert strategy.roster.node_of == {0: 10, 1: 99}


class SlowGrid(FakeGrid):
    """Nodes that answer their first message only after some pulls, as while a ClientApp imports torch."""

    def __init__(self, nodes, pulls):
        super().__init__(nodes)
        self.pulls_left = pulls

    def pull_messages(self, message_ids):
        if self.pulls_left > 0:
            self.pulls_left -= 1
            return []
        return super().pull_messages(message_ids)


def test_clients_that_are_slow_to_start_are_waited_for_and_no_round_is_spent(caplog):
    grid, reports = SlowGrid(federation(12).nodes, pulls=7), []
    strategy = with_policy(flower.FedAvg(), UNIFORM, budget=3, progress=reports.append, wait=0.05, probe_timeout=0.01)
    start(strategy, grid, rounds=5)
    assert [len(report.completed) for report in reports if report.over] == [3] * 5
    assert [report.round for report in reports if report.over] == [1, 2, 3, 4, 5]
    assert "No client is ready after" in caplog.text


def test_a_policy_that_needs_labels_waits_for_clients_that_are_slow_to_start():
    grid = SlowGrid(labelled(4).nodes, pulls=4)
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("fedgs"), budget=2, wait=0.01, probe_timeout=0.01)
    start(strategy, grid, rounds=2)
    assert [len(selection.clients) for selection in strategy.history] == [2, 2]


def test_a_dead_node_that_is_asked_first_does_not_hold_up_the_others_for_long():
    grid, reports = federation(5), []
    grid.nodes[next(iter(grid.get_node_ids()))].mode = "late"
    start(with_policy(flower.FedAvg(), UNIFORM, probe_timeout=0.4, progress=reports.append), grid, rounds=1)
    assert [(step.answered, step.deadline) for step in reports[0].steps] == [(0, 0.1), (4, 0.4)]
    assert len(reports[0].cohort) == 4


def test_min_clients_counts_clients_that_have_described_themselves(caplog):
    grid = federation(4)
    for node in grid.nodes.values():
        node.mode = "late" if node.partition else "good"
    strategy = with_policy(flower.FedAvg(), UNIFORM, min_clients=3, wait=0.1)
    start(strategy, grid, rounds=1)
    assert [len(selection.clients) for selection in strategy.history] == [1]
    assert "Only 1 of min_clients=3 clients" in caplog.text


def test_a_newcomer_that_does_not_answer_delays_no_round(clock):
    grid = federation(3)
    strategy = with_policy(flower.FedAvg(fraction_evaluate=0.0), UNIFORM)
    start(strategy, grid, rounds=1)
    grid.nodes[99] = FakeNode(7)
    grid.nodes[99].mode = "late"
    start(strategy, grid, rounds=2)
    assert clock.slept == 0.0
    assert describe_queries(grid).count(99) == 1
    grid.nodes[99].mode = "good"
    start(strategy, grid, rounds=1)
    assert strategy.roster.keys[-1] == "partition:7"


def test_a_first_node_that_is_slow_is_in_the_first_round_with_the_others():
    class SlowFirst(FakeGrid):
        """Starting the engine takes longer than the first query waits."""

        def pull_messages(self, message_ids):
            return [] if len(self.sent) == 1 else super().pull_messages(message_ids)

    strategy = with_policy(flower.FedAvg(), UNIFORM)
    start(strategy, SlowFirst(federation(5).nodes), rounds=1)
    assert strategy.roster.keys == [f"partition:{index}" for index in range(5)]
    assert len(strategy.history[0].clients) == 5


def app_of(node, **options):
    """The node's ClientApp again, with other options and without `answer_probes`, errors as SuperNodes send them."""
    app = ClientApp(**options)
    app.train()(node.train)
    app.evaluate()(node.evaluate)
    return app


def test_clients_without_answer_probes_are_asked_once_for_all_of_them(caplog):
    grid = federation(12)
    for node in grid.nodes.values():
        node.app = errors_become_replies(app_of(node))
    strategy = with_policy(flower.FedAvg(), UNIFORM, budget=2)
    start(strategy, grid, rounds=2)
    assert len(describe_queries(grid)) == 1  # each one costs a traceback of some 60 lines in the client's log
    assert len(strategy.roster.keys) == 12
    assert caplog.text.count("does not use fedpick.flower.answer_probes") == 1


def test_a_mod_that_rejects_queries_is_named_with_the_way_out(caplog):
    grid = federation(4)
    for node in grid.nodes.values():
        app = app_of(node, mods=[fixedclipping_mod])
        answer_probes(app, loss=node.loss, num_examples=10, label_histogram=lambda context: [1.0, 2.0])
        node.app = errors_become_replies(app)
    grid.nodes = dict(list(grid.nodes.items())[:3])
    with pytest.raises(MissingSignal, match=r"@app.train\(mods=\[\.\.\.\]\)"):
        start(with_policy(flower.FedAvg(), fedpick.policies.get("fedgs")), grid, rounds=1)
    with pytest.raises(TrainingFailed):  # the mod rejects FedAvg's train messages as well
        start(with_policy(flower.FedAvg(), UNIFORM), grid, rounds=1)
    assert caplog.text.count("A mod of the ClientApp rejected fedpick's query") == 2  # once for each strategy


def test_a_wide_label_histogram_is_refused_and_none_is_kept_for_a_policy_without_need(caplog):
    grid = labelled(4)
    wide = [1.0] * 100_000
    alter(node_of(grid, 0), "describe", lambda content: content["answer"].update({"label-histogram": wide}))
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("fedgs"), budget=2)
    start(strategy, grid, rounds=1)
    assert strategy.session.clients.label_histogram.shape == (4, 2)
    assert "partition:0 reported label-histogram" in caplog.text
    strategy = with_policy(flower.FedAvg(), UNIFORM, budget=2)
    start(strategy, grid, rounds=1)
    assert strategy.roster.histograms == [None] * 4
    assert strategy.session.clients.label_histogram is None


def test_a_grid_that_cannot_list_nodes_is_enough():
    class OldGrid(FakeGrid):
        """As before Flower 1.40."""

        def __getattribute__(self, name):
            if name == "get_nodes":
                raise AttributeError(name)
            return super().__getattribute__(name)

    strategy = with_policy(flower.FedAvg(), UNIFORM, budget=2, key=lambda node, reported: reported["partition-id"])
    start(strategy, OldGrid(federation(3).nodes), rounds=2)
    assert strategy.roster.keys == ["key:0", "key:1", "key:2"]


def test_clients_that_are_not_eligible_take_no_part(caplog):
    def large(info, reported):
        return reported["num-examples"] >= 13  # 10 + partition

    grid = federation(6)
    strategy = with_policy(flower.FedAvg(), UNIFORM, eligible=large)
    start(strategy, grid, rounds=2)
    assert strategy.roster.keys == ["partition:3", "partition:4", "partition:5"]
    reached = {m.metadata.dst_node_id for m in grid.sent if not m.metadata.message_type.startswith("query")}
    assert {grid.nodes[node].partition for node in reached} == {3, 4, 5}  # evaluation included
    assert (
        len(describe_queries(grid)) == 6 and "partition:2 takes no part: the eligible function says so" in caplog.text
    )


def test_a_list_of_identities_admits_these_clients_only():
    grid = federation(6)
    strategy = with_policy(flower.FedAvg(), UNIFORM, eligible=["partition:4", "partition:1"])
    start(strategy, grid, rounds=2)
    assert strategy.roster.keys == ["partition:1", "partition:4"]
    assert sum(node.trained for node in grid.nodes.values()) == 4


def test_a_function_that_fails_for_a_client_leaves_it_out(caplog):
    grid = federation(3)
    strategy = with_policy(flower.FedAvg(), UNIFORM, eligible=lambda info, reported: 1 / reported["partition-id"])
    start(strategy, grid, rounds=1)
    assert strategy.roster.keys == ["partition:1", "partition:2"]
    assert "The eligible function failed for partition:0" in caplog.text


def test_a_federation_without_eligible_clients_says_so():
    strategy = with_policy(flower.FedAvg(), UNIFORM, eligible=["name:a"], wait=0.0, ready_timeout=0.1)
    with pytest.raises(TrainingFailed, match="3 nodes are online, 3 are not eligible, 0 of them"):
        start(strategy, federation(3), rounds=1)
