from __future__ import annotations

import logging

import numpy as np
import pytest

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedpick[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import strategy as flower  # noqa: E402

import fedpick  # noqa: E402
from fedpick.core.errors import InvalidInput, MissingSignal, StateFileError  # noqa: E402
from fedpick.flower import with_policy  # noqa: E402
from fedpick.flower.roster import Roster  # noqa: E402
from tests.flower.fake_grid import FakeGrid, FakeNode, federation, start  # noqa: E402

logging.getLogger("flwr").setLevel(logging.ERROR)


WEIGHTED = [
    flower.FedAvg(),
    flower.FedAvg(fraction_train=0.1, min_available_nodes=50),
    flower.FedProx(proximal_mu=0.1),
    flower.FedAdam(eta=0.1),
    flower.FedYogi(eta=0.1),
    flower.FedAdagrad(eta=0.1),
    flower.FedAvgM(server_learning_rate=1.0, server_momentum=0.9),
]
UNWEIGHTED = [
    flower.QFedAvg(client_learning_rate=0.1),
    flower.FedMedian(),
    flower.FedTrimmedAvg(),
    flower.Krum(num_malicious_nodes=1),
    flower.DifferentialPrivacyServerSideFixedClipping(
        flower.FedAvg(min_available_nodes=50), noise_multiplier=0.0, clipping_norm=1.0, num_sampled_clients=5
    ),
]


@pytest.mark.parametrize("inner", [*WEIGHTED, *UNWEIGHTED], ids=lambda inner: type(inner).__name__)
def test_exactly_the_cohort_trains_whatever_the_strategy(inner):
    grid = federation()
    weights = "policy" if inner in WEIGHTED else "ignored"
    strategy = with_policy(inner, fedpick.policies.get("uniform"), budget=5, seed=3, weights=weights, wait=0.1)
    start(strategy, grid, rounds=8)
    trained = [message for message in grid.sent if message.metadata.message_type == "train"]
    assert len(trained) == 8 * 5
    for round, selection in enumerate(strategy.history):
        nodes = {strategy.roster.node_of[int(client)] for client in selection.clients}
        assert {message.metadata.dst_node_id for message in trained[5 * round : 5 * round + 5]} == nodes


@pytest.mark.parametrize("inner", UNWEIGHTED, ids=lambda inner: type(inner).__name__)
def test_strategies_that_ignore_weights_are_refused_with_the_way_out(inner):
    with pytest.raises(InvalidInput, match='weights="ignored"'):
        with_policy(inner, fedpick.policies.get("uniform"))


def test_strategies_that_sample_themselves_are_refused():
    with pytest.raises(InvalidInput, match="chooses its clients itself"):
        with_policy(flower.FedXgbCyclic(), fedpick.policies.get("uniform"))


def test_what_flower_cannot_report_is_refused_before_the_first_round():
    with pytest.raises(MissingSignal, match="outputs"):
        with_policy(flower.FedAvg(), fedpick.policies.get("fedgs", similarity="outputs"), budget=2)


def expected_step(weights, strategy, selection, completed=None):
    """model + sum of weight x update, in plain NumPy."""
    completed = np.ones(len(selection.clients), bool) if completed is None else completed
    given = fedpick.aggregation_weights(selection, completed, strategy.session.clients)
    return weights + sum(w * 0.5 * (float(c) - weights) for w, c in zip(given, selection.clients, strict=True))


@pytest.mark.parametrize("policy", ["uniform", "md", "pow-d", "unbiased", "ca-fed"])
def test_weights_are_exact_also_unnormalised_ones(policy):
    grid = federation()
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get(policy), budget=4, seed=5)
    model = np.zeros(3)
    for round in range(1, 6):
        messages = strategy.configure_train(round, ArrayRecord({"w": Array(model)}), ConfigRecord(), grid)
        replies = list(grid.send_and_receive(messages))
        arrays, _ = strategy.aggregate_train(round, replies)
        wanted = expected_step(model, strategy, strategy.history[-1])
        model = arrays["w"].numpy()
        np.testing.assert_allclose(model, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", ["late", "error", "nan", "gone"])
def test_a_client_that_fails_is_the_one_marked_failed(mode):
    grid = federation(6)
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("uniform"), budget=6, seed=0)
    victim = next(node for node in grid.nodes.values() if node.partition == 4)
    model = np.zeros(2)
    messages = list(strategy.configure_train(1, ArrayRecord({"w": Array(model)}), ConfigRecord(), grid))
    victim.mode = mode if mode != "gone" else "error"
    told = {}
    real = strategy.session.tell
    strategy.session.tell = lambda outcome: told.update(outcome=outcome) or real(outcome)
    arrays, _ = strategy.aggregate_train(1, grid.send_and_receive(messages))
    outcome = told["outcome"]
    assert outcome.clients[~outcome.completed].tolist() == [4]
    wanted = expected_step(model, strategy, strategy.history[-1], outcome.completed)
    np.testing.assert_allclose(arrays["w"].numpy(), wanted, atol=1e-12)


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


def test_nobody_online_ends_the_wait_and_the_round():
    grid = federation(3)
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("uniform"), budget=2, wait=0.05, min_clients=2)
    for node in grid.nodes.values():
        node.mode = "gone"
    assert start(strategy, grid, rounds=2).arrays == ArrayRecord()
    assert strategy.history == []
    for node in grid.nodes.values():
        node.mode = "good"
    start(strategy, grid, rounds=1)
    assert len(strategy.history[0].clients) == 2


def test_the_same_seed_chooses_the_same_partitions_whatever_the_node_ids():
    first = with_policy(flower.FedAvg(), fedpick.policies.get("pow-d"), budget=4, seed=9)
    second = with_policy(flower.FedAvg(), fedpick.policies.get("pow-d"), budget=4, seed=9)
    start(first, federation(), rounds=6)
    start(second, FakeGrid({500 - 3 * i: FakeNode(i, 10 + i) for i in range(12)}), rounds=6)
    for one, other in zip(first.history, second.history, strict=True):
        assert one.clients.tolist() == other.clients.tolist()


def test_probes_carry_the_batch_size_and_trials_train_on_the_side():
    grid = federation(8)
    start(with_policy(flower.FedAvg(), fedpick.policies.get("cpow-d"), budget=2, seed=0), grid, rounds=1)
    probes = [message for message in grid.sent if message.metadata.message_type == "query.fedpick"]
    assert [message.content["config"]["batch-size"] for message in probes if "arrays" in message.content] == [64] * 4
    grid = federation(8)
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("fedcor", warmup=1, interval=2), budget=2, seed=0)
    start(strategy, grid, rounds=8)
    trained = sum(message.metadata.message_type == "train" for message in grid.sent)
    assert trained > 8 * 2 and trained % 2 == 0  # the trial cohorts come on top


def test_the_policys_state_survives_a_restart_of_server_and_nodes(tmp_path):
    policy = fedpick.policies.get("rpow-d", num_candidates=6)
    whole = with_policy(flower.FedAvg(), policy, budget=3, seed=4)
    start(whole, federation(), rounds=6)

    first = with_policy(flower.FedAvg(), policy, budget=3, seed=4, state=tmp_path / "policy")
    result = start(first, federation(), rounds=3)
    # Everything restarts: new node ids, a new strategy object, the model as the user kept it.
    again = with_policy(flower.FedAvg(), policy, budget=3, seed=4, state=tmp_path / "policy")
    grid = FakeGrid({40_000 + i: FakeNode(i, 10 + i) for i in range(12)})
    again.start(grid=grid, initial_arrays=result.arrays, num_rounds=3)
    assert again.session.round == 6
    got = [selection.clients.tolist() for selection in (*first.history, *again.history)]
    assert got == [selection.clients.tolist() for selection in whole.history]


def test_identity_prefers_the_callers_key_then_the_partition_then_the_node():
    strategy = with_policy(
        flower.FedAvg(), fedpick.policies.get("uniform"), budget=2, key=lambda node, facts: f"site-{node.node_id % 5}"
    )
    start(strategy, FakeGrid({10: FakeNode(0), 11: FakeNode(1)}), rounds=1)
    assert strategy.roster.keys == ["key:site-0", "key:site-1"]
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("uniform"), budget=2)
    start(strategy, FakeGrid({10: FakeNode(0, reports_partition=False), 11: FakeNode(1)}), rounds=1)
    assert strategy.roster.keys == ["node:10", "partition:1"]


def test_evaluation_is_seeded_and_waits_for_nobody():
    asked = []
    for _ in range(2):
        grid = federation()
        inner = flower.FedAvg(fraction_evaluate=0.5, min_available_nodes=100)
        start(with_policy(inner, fedpick.policies.get("uniform"), budget=2, seed=1), grid, rounds=2)
        asked.append([m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "evaluate"])
    for part in (slice(0, 6), slice(6, 12)):  # within a round the order of the messages is Flower's own
        assert sorted(asked[0][part]) == sorted(asked[1][part])
    assert len(asked[0]) == 2 * 6


def hellos(grid) -> list[int]:
    return [
        message.metadata.dst_node_id
        for message in grid.sent
        if message.metadata.message_type == "query.fedpick" and message.content["config"]["kind"] == "hello"
    ]


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
    assert hellos(grid).count(slow_id) == 1  # the old question was answered, no new one was needed


def test_nodes_with_one_identity_are_one_client_for_which_the_newest_speaks(caplog):
    grid = FakeGrid({1: FakeNode(0), 2: FakeNode(1), 3: FakeNode(1)})
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("uniform"), seed=0)
    start(strategy, grid, rounds=2)
    assert strategy.roster.node_of == {0: 1, 1: 3}
    assert "both online as 'partition:1'" in caplog.text
    assert sorted(hellos(grid)) == [1, 2, 3]
    grid.nodes[3].mode = "gone"
    start(strategy, grid, rounds=1)
    assert strategy.roster.node_of == {0: 1, 1: 2}


def test_a_killed_node_that_still_counts_as_online_is_no_second_client():
    grid = FakeGrid({1: FakeNode(0), 2: FakeNode(1)})
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("uniform"), seed=0)
    start(strategy, grid, rounds=1)
    grid.nodes[2].mode = "late"  # killed; its heartbeat has not run out
    grid.nodes[9] = FakeNode(1)  # the same client, restarted
    start(strategy, grid, rounds=2)
    assert strategy.roster.keys == ["partition:0", "partition:1"]
    assert strategy.roster.node_of[1] == 9


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


def test_a_state_of_another_policy_or_seed_is_not_resumed(tmp_path):
    uniform = fedpick.policies.get("uniform")
    start(with_policy(flower.FedAvg(), uniform, budget=2, seed=4, state=tmp_path), federation(), rounds=1)
    with pytest.raises(InvalidInput, match=r"saved with seed=4\. Got seed=5"):
        with_policy(flower.FedAvg(), uniform, budget=2, seed=5, state=tmp_path)
    with pytest.raises(StateFileError, match="of the policy 'uniform'"):
        with_policy(flower.FedAvg(), fedpick.policies.get("md"), budget=2, seed=4, state=tmp_path)


def test_what_is_derived_from_a_strategy_without_weights_is_refused_too():
    class MyMedian(flower.FedMedian):
        pass

    with pytest.raises(InvalidInput, match="MyMedian does not aggregate by weights"):
        with_policy(MyMedian(), fedpick.policies.get("uniform"))


def test_a_policy_that_learns_nothing_says_so(caplog):
    grid = federation(4)
    start(with_policy(flower.FedAvg(), fedpick.policies.get("afl"), budget=2), grid, rounds=3)
    assert caplog.text.count("ActiveLearning learns from 'loss'") == 1
    for node in grid.nodes.values():
        node.app = ClientApp()  # knows nothing of fedpick
        node.app.train()(node.train)
        node.app.evaluate()(node.evaluate)
        node.app = errors_become_replies(node.app)
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("pow-d"), budget=1)
    start(strategy, grid, rounds=1)
    assert all(key.startswith("node:") for key in strategy.roster.keys)
    assert "None of 2 clients answered with a loss" in caplog.text
    assert "answer_probes" in caplog.text


def errors_become_replies(app):
    """As SuperNodes do with an exception in the app."""

    def call(message, context):
        try:
            return app(message, context)
        except Exception as error:
            return Message(Error(code=2, reason=str(error)), reply_to=message)

    return call


def test_an_unusable_reply_is_named(caplog):
    grid = federation(3)
    next(node for node in grid.nodes.values() if node.partition == 1).mode = "nan"
    start(with_policy(flower.FedAvg(), fedpick.policies.get("uniform")), grid, rounds=1)
    assert "The reply of partition:1 counts as failed" in caplog.text


def test_reports_that_are_no_outcome_are_refused():
    with pytest.raises(InvalidInput, match="reports must map"):
        with_policy(flower.FedAvg(), fedpick.policies.get("uniform"), reports={"accuracy": "acc"})


def test_clients_that_keep_their_labels_private_count_as_the_mean():
    roster = Roster()
    roster.admit({1: ("partition:0", {"label-histogram": [4, 0]}), 2: ("partition:1", {})})
    np.testing.assert_array_equal(roster.clients().label_histogram, [[4, 0], [4, 0]])
    roster.admit({3: ("partition:2", {"label-histogram": [0, 2]}), 4: ("partition:3", {"label-histogram": [1, 2, 3]})})
    np.testing.assert_array_equal(roster.clients().label_histogram, [[4, 0], [2, 1], [0, 2], [2, 1]])
    assert Roster(keys=["a"], num_examples=[1.0], histograms=[None]).clients().label_histogram is None
