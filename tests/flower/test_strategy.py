"""Rounds: weights, failures, aborted rounds, saved state."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower

import fedpick
from fedpick.core.checkpoint import pack, unpack
from fedpick.core.errors import InvalidInput, StateFileError, TrainingFailed
from fedpick.core.guard import guard_of
from fedpick.flower import with_policy
from tests.flower.fake_grid import (
    INFINITY,
    NAN,
    UNIFORM,
    FakeGrid,
    FakeNode,
    alter,
    errors_become_replies,
    federation,
    node_of,
    start,
    with_arrays,
    with_metric,
    with_targets,
)


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


def test_a_run_without_clients_ends_with_an_error_and_spends_no_round(caplog):
    grid = federation(3)
    strategy = with_policy(
        flower.FedAvg(), fedpick.policies.get("uniform"), budget=2, wait=0.05, ready_timeout=0.2, min_clients=2
    )
    for node in grid.nodes.values():
        node.mode = "gone"
    with pytest.raises(TrainingFailed, match="No client became ready"):
        start(strategy, grid, rounds=2)
    assert "No client is ready after" in caplog.text
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


def test_a_resumed_federation_has_the_guard_that_is_given(tmp_path, caplog):
    recent = fedpick.policies.get("rpow-d")

    def run(guard, budget=12, rounds=2):
        grid = with_targets(12)
        liar = node_of(grid, 3)
        for node in grid.nodes.values():
            alter(node, "train", with_metric("train_loss", 1e4 if node is liar else 1.0))
        inner, options = flower.FedAvg(fraction_evaluate=0.0), {"budget": budget, "state": tmp_path}
        strategy = with_policy(inner, recent, guard=guard, **options)
        start(strategy, grid, rounds=rounds)
        return strategy, liar

    first, liar = run("mild")
    assert first.session.credibility[3] < 0.5 and liar.trained == 2
    caplog.clear()
    again, liar = run("strict", budget=11)
    assert again.session.guard == guard_of("strict")
    assert "was saved with Guard(" in caplog.text and "from round 3 on it is Guard(" in caplog.text
    assert liar.trained == 0 and again.session.credibility[3] < 0.5  # what the mild guard learned still counts
    assert all(len(selection.clients) == 11 for selection in again.history)
    caplog.clear()
    bound = fedpick.Guard(exclude=True, newcomers=True, most_size=3.0, most_places=2.0)
    third, _ = run(bound, budget=11)
    assert third.session.guard == bound and third.session._guard.places.max() > 0
    caplog.clear()
    run(bound, budget=11)
    assert "was saved with" not in caplog.text
    off, liar = run("off")
    assert liar.trained == 2 and off.session.credibility.tolist() == [1.0] * 12
    again, _ = run("strict", budget=6, rounds=1)
    assert again.session.guard.exclude and again.session.round == 11
    assert "not_offered" not in again.history[0].diagnostics  # nobody is a newcomer


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


@pytest.mark.parametrize("name", ["session.npz", "roster.npz"])
def test_somebody_elses_files_are_not_overwritten(tmp_path, name):
    (tmp_path / name).write_text('{"mine": 1}')
    with pytest.raises(StateFileError, match=name):
        with_policy(flower.FedAvg(), UNIFORM, state=tmp_path)
    assert (tmp_path / name).read_text() == '{"mine": 1}'


def rewrite_roster(path, *, keys=None, without=(), **arrays):
    """Save the roster again with other keys or arrays."""
    old, plain = unpack((path / "roster.npz").read_bytes())
    if keys is not None:
        plain |= {"keys": keys, "groups": [""] * len(keys)}
    kept = ({name: value for name, value in part.items() if name not in without} for part in ({**old, **arrays}, plain))
    (path / "roster.npz").write_bytes(pack(*kept))


def test_a_roster_that_does_not_fit_the_session_is_refused(tmp_path):
    start(with_policy(flower.FedAvg(), UNIFORM, state=tmp_path), federation(3), rounds=1)
    rewrite_roster(tmp_path, keys=["partition:0"])
    with pytest.raises(StateFileError, match="damaged"):
        with_policy(flower.FedAvg(), UNIFORM, state=tmp_path)
    one = np.array([0])
    counts = dict.fromkeys(("selections", "last", "strikes", "rests_until", "widths"), one)
    rewrite_roster(tmp_path, num_examples=np.array([10.0]), **counts)
    with pytest.raises(StateFileError, match=r"1 clients.*3"):
        with_policy(flower.FedAvg(), UNIFORM, state=tmp_path)
    content = (tmp_path / "roster.npz").read_bytes()
    (tmp_path / "roster.npz").write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    with pytest.raises(StateFileError, match="checksum"):
        with_policy(flower.FedAvg(), UNIFORM, state=tmp_path)


def test_a_saved_roster_with_nonsense_in_it_is_read_without(tmp_path):
    start(with_policy(flower.FedAvg(), UNIFORM, state=tmp_path), federation(3), rounds=1)
    rewrite_roster(
        tmp_path,
        histograms=np.array([1.0, NAN, 1.0, 2.0, -1.0, 2.0]),
        widths=np.array([2, 2, 2]),
        num_examples=np.array([10.0, INFINITY, NAN]),
    )
    (tmp_path / "roster.npz.4711.partial").write_text("a crash left this")
    (tmp_path / "roster.npz.mine.partial").write_text("not this")
    strategy = with_policy(flower.FedAvg(), UNIFORM, state=tmp_path)
    assert strategy.roster.clients().label_histogram.tolist() == [[1, 2]] * 3
    assert strategy.roster.clients().num_examples.tolist() == [10, 10, 10]
    start(strategy, federation(3), rounds=1)
    assert [file.name for file in tmp_path.glob("*.partial")] == ["roster.npz.mine.partial"]


def with_statistics(variance):
    """A train function that moves the parameters, and returns the statistics of batch normalisation."""

    def change(content):
        arrays = content["arrays"]
        content["arrays"] = ArrayRecord(
            {
                "w": arrays["w"],
                "bn.running_var": Array(np.full(2, variance)),
                "bn.num_batches_tracked": Array(np.array(7)),
                "ema": Array(np.full(2, variance)),
            }
        )

    return change


@pytest.mark.parametrize("policy", ["unbiased", "ca-fed", "more-available"])
def test_statistics_are_averaged_with_weights_that_sum_to_one(policy):
    grid = federation(5)
    for node in grid.nodes.values():
        alter(node, "train", with_statistics(0.1 + node.partition / 100))
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get(policy), seed=1, buffers=lambda name: name == "ema")
    model = {"w": np.zeros(3), "bn.running_var": np.ones(2), "bn.num_batches_tracked": np.array(0), "ema": np.ones(2)}
    arrays = ArrayRecord({name: Array(array) for name, array in model.items()})
    messages = list(strategy.configure_train(1, arrays, ConfigRecord(), grid))
    new, _ = strategy.aggregate_train(1, list(grid.send_and_receive(messages)))
    weights = strategy.history[-1].weights
    assert abs(weights.sum() - 1) > 0.05
    expected = (weights / weights.sum()) @ (0.1 + strategy.history[-1].clients / 100)
    np.testing.assert_allclose(new["bn.running_var"].numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(new["ema"].numpy(), expected, rtol=1e-12)
    assert new["bn.num_batches_tracked"].numpy() == pytest.approx(7)


@pytest.mark.parametrize("policy", ["unbiased", "ca-fed"])
def test_a_finite_update_does_not_make_the_model_infinite(policy, caplog):
    grid, reports = federation(5), []
    alter(node_of(grid, 2), "train", with_arrays(w=Array(np.full(3, 1.7e308))))
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get(policy), seed=1, progress=reports.append)
    result = start(strategy, grid, rounds=2)
    assert np.isfinite(result.arrays["w"].numpy()).all()
    assert reports[-1].failed == ["partition:2"]
    assert "is not finite" in caplog.text


def test_an_aggregate_that_is_not_finite_makes_no_step(caplog):
    class Exploding(flower.FedAvg):
        def aggregate_train(self, server_round, replies):
            arrays, metrics = super().aggregate_train(server_round, replies)
            if server_round == 2:
                arrays = ArrayRecord({"w": Array(np.full(3, np.inf))})
            return arrays, metrics

    reports = []
    strategy = with_policy(Exploding(), UNIFORM, budget=2, progress=reports.append)
    result = start(strategy, federation(4), rounds=3)
    assert np.isfinite(result.arrays["w"].numpy()).all()
    assert [len(report.completed) for report in reports if report.over] == [2, 0, 2]
    assert "The aggregated model of round 2 is not finite" in caplog.text


def test_a_part_of_the_model_is_a_usable_reply():
    """Personal heads: clients keep some arrays for themselves."""
    grid, reports = federation(4), []
    strategy = with_policy(flower.FedAvg(), UNIFORM, seed=1, progress=reports.append)
    head = np.array([5.0, 6.0])
    arrays = ArrayRecord({"head": Array(head), "w": Array(np.zeros(3))})
    messages = list(strategy.configure_train(1, arrays, ConfigRecord(), grid))  # the clients return "w" alone
    new, _ = strategy.aggregate_train(1, list(grid.send_and_receive(messages)))
    assert len(reports[-1].completed) == 4
    assert list(new) == ["head", "w"]
    np.testing.assert_allclose(new["head"].numpy(), head, rtol=1e-15)
    assert new["w"].numpy().all()


def test_a_run_in_which_no_client_completes_ends_with_an_error():
    grid = federation(3)
    for node in grid.nodes.values():
        node.train_mode = "nan"
        alter(node, "train", with_arrays(w=Array(np.full(3, np.nan))))
    with pytest.raises(TrainingFailed, match="None of 2 rounds changed the model"):
        start(with_policy(flower.FedAvg(), UNIFORM), grid, rounds=2)


def test_secure_aggregation_is_refused():
    grid = federation(3)
    for node in grid.nodes.values():
        app = ClientApp(mods=[secaggplus_mod])
        app.train()(node.train)
        node.app = errors_become_replies(app)
    with pytest.raises(InvalidInput, match="uses secure aggregation"):
        start(with_policy(flower.FedAvg(), UNIFORM), grid, rounds=2)
    with pytest.raises(InvalidInput, match='herd works without updates: source="labels"'):
        start(with_policy(flower.FedAvg(), fedpick.policies.get("herd")), grid, rounds=2)


def test_the_log_names_policy_budget_and_seed_and_every_round(caplog):
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("md"), budget=2, seed=41)
    start(strategy, federation(3), rounds=2)
    ours = [record for record in caplog.records if record.name.startswith("flwr.")]  # Flower streams its own logger
    text = "\n".join(record.getMessage() for record in ours)
    assert "Policy: md" in text and "budget: 2" in text and "seed: 41" in text
    assert "Round 1: " in text and "Round 2: " in text and "Round 0: " not in text


def test_flowers_own_log_names_the_node_that_died():
    seen = []

    class Seeing(flower.FedAvg):
        def aggregate_train(self, server_round, replies):
            seen.extend(reply.metadata.src_node_id for reply in replies if reply.has_error())
            return super().aggregate_train(server_round, replies)

    grid = federation(3)
    strategy = with_policy(Seeing(fraction_evaluate=0.0), UNIFORM)
    start(strategy, grid, rounds=1)
    dead, node = next(iter(grid.nodes.items()))
    node.mode = "error"  # the SuperLink writes this error, with its own id, 1
    start(strategy, grid, rounds=1)
    assert seen == [dead]


def test_history_keeps_no_arrays_of_diagnostics():
    policy = fedpick.policies.get("fedcor", warmup=2, interval=1, dimension=2)
    strategy = with_policy(flower.FedAvg(), policy, budget=2)
    start(strategy, federation(6), rounds=6)
    held = [value for selection in strategy.history for value in selection.diagnostics.values()]
    assert not any(isinstance(value, np.ndarray) for value in held)


def test_weights_may_come_from_a_function_of_the_user():
    def last_client_only(selection, completed, clients):
        assert len(clients) == 4 and completed.tolist() == [client != 3 for client in selection.clients]
        return 0.5 * (selection.clients == 2) + (selection.clients == 3)  # the last one failed: its weight is dropped

    grid = federation(4)
    alter(node_of(grid, 3), "train", with_arrays(w=Array(np.full(3, np.nan))))
    result = start(with_policy(flower.FedAvg(), UNIFORM, weights=last_client_only), grid, rounds=1)
    # Half the way from 0 to the target, 2, by the weight 1/2.
    np.testing.assert_allclose(result.arrays["w"].numpy(), 0.5 * 0.5 * 2.0)


@pytest.mark.parametrize(
    "wrong",
    [lambda *args: 1.0, lambda *args: [1.0], lambda *args: [NAN] * 4, lambda *args: [-1.0] * 4, lambda *args: "abcd"],
    ids=["number", "short", "nan", "negative", "text"],
)
def test_weights_that_cannot_be_used_are_refused(wrong):
    with pytest.raises(InvalidInput, match="weights"):
        start(with_policy(flower.FedAvg(), UNIFORM, weights=wrong), federation(4), rounds=1)
