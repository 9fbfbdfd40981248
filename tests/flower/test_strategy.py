"""Rounds: weights, failures, aborted rounds, saved state."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.serverapp import strategy as flower

import fedpick
from fedpick.core.errors import InvalidInput, StateFileError
from fedpick.flower import with_policy
from tests.flower.fake_grid import UNIFORM, FakeGrid, FakeNode, federation, start


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


def test_a_state_of_another_policy_or_seed_is_not_resumed(tmp_path):
    uniform = fedpick.policies.get("uniform")
    start(with_policy(flower.FedAvg(), uniform, budget=2, seed=4, state=tmp_path), federation(), rounds=1)
    with pytest.raises(InvalidInput, match=r"saved with seed=4\. Got seed=5"):
        with_policy(flower.FedAvg(), uniform, budget=2, seed=5, state=tmp_path)
    with pytest.raises(StateFileError, match="of the policy 'uniform'"):
        with_policy(flower.FedAvg(), fedpick.policies.get("md"), budget=2, seed=4, state=tmp_path)


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


def test_a_state_is_made_and_left_empty_until_the_first_round(tmp_path):
    strategy = with_policy(flower.FedAvg(), UNIFORM, state=tmp_path / "runs" / "policy", budget=2)
    assert list((tmp_path / "runs" / "policy").iterdir()) == []
    start(strategy, federation(3), rounds=1)
    assert (tmp_path / "runs" / "policy" / "session.npz").exists()


@pytest.mark.parametrize("name", ["session.npz", "roster.json"])
def test_somebody_elses_files_are_not_overwritten(tmp_path, name):
    (tmp_path / name).write_text('{"mine": 1}')
    with pytest.raises(StateFileError, match=name):
        with_policy(flower.FedAvg(), UNIFORM, state=tmp_path)
    assert (tmp_path / name).read_text() == '{"mine": 1}'


def test_a_roster_that_does_not_fit_the_session_is_refused(tmp_path):
    start(with_policy(flower.FedAvg(), UNIFORM, state=tmp_path), federation(3), rounds=1)
    rows = json.loads((tmp_path / "roster.json").read_text())
    (tmp_path / "roster.json").write_text(json.dumps({**rows, "keys": rows["keys"][:1]}))
    with pytest.raises(StateFileError, match="damaged"):
        with_policy(flower.FedAvg(), UNIFORM, state=tmp_path)
    shorter = {name: value[:1] if isinstance(value, list) else value for name, value in rows.items()}
    (tmp_path / "roster.json").write_text(json.dumps(shorter))
    with pytest.raises(StateFileError, match=r"1 clients.*3"):
        with_policy(flower.FedAvg(), UNIFORM, state=tmp_path)


def test_a_saved_roster_with_nonsense_in_it_is_read_without(tmp_path):
    start(with_policy(flower.FedAvg(), UNIFORM, state=tmp_path), federation(3), rounds=1)
    rows = json.loads((tmp_path / "roster.json").read_text())
    rows["histograms"] = [[1.0, float("nan")], [1.0, 2.0], [-1.0, 2.0]]
    rows["num_examples"] = [10.0, float("inf"), None]
    (tmp_path / "roster.json").write_text(json.dumps(rows))
    (tmp_path / "roster.json.4711.partial").write_text("a crash left this")
    (tmp_path / "roster.json.mine.partial").write_text("not this")
    strategy = with_policy(flower.FedAvg(), UNIFORM, state=tmp_path)
    assert strategy.roster.clients().label_histogram.tolist() == [[1, 2]] * 3
    assert strategy.roster.clients().num_examples.tolist() == [10, 10, 10]
    start(strategy, federation(3), rounds=1)
    assert [file.name for file in tmp_path.glob("*.partial")] == ["roster.json.mine.partial"]


def test_a_round_is_not_asked_of_a_policy_without_anybody(tmp_path):
    strategy = with_policy(flower.FedAvg(), UNIFORM, wait=0.0)
    assert strategy.configure_train(1, ArrayRecord({"w": Array(np.zeros(1))}), ConfigRecord(), FakeGrid({})) == []
