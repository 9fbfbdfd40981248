"""Flower's older API: its own server and client manager, with clients that are functions."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest
from flwr.client import ClientApp, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import strategy as older
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.server import Server
from flwr.serverapp import strategy as newer

import fedpick
from fedpick.core.errors import InvalidInput, MissingSignal, TrainingFailed
from fedpick.core.policy import Signal
from fedpick.flower import legacy, with_policy
from tests.flower.fake_grid import UNIFORM, errors_become_replies, federation
from tests.flower.fake_manager import FakeProxy, manager_of
from tests.flower.test_limits import Recorded


class SmallClient(FakeProxy):
    """Training moves the model towards the client's number; `delay` lets it wait first."""

    def __init__(self, number: int, properties: dict | None = None) -> None:
        super().__init__(str(1000 - number), self._train, self._evaluate, properties)
        self.number, self.size, self.metrics, self.result = number, 10 + number, {}, None
        self.delay = threading.Event()
        self.delay.set()

    def _train(self, arrays, config):
        self.delay.wait(60)
        new = [array + 0.5 * (self.number - array) for array in arrays] if self.result is None else self.result
        return new, self.size, self.metrics

    def _evaluate(self, arrays, config):
        return float(np.mean((arrays[0] - self.number) ** 2)), self.size, {}


def clients(count: int, **properties) -> list[SmallClient]:
    return [SmallClient(k, {"partition-id": k, **properties}) for k in range(count)]


def start(strategy, members, rounds=3, timeout=None):
    server = Server(client_manager=manager_of(members), strategy=strategy)
    server.fit(num_rounds=rounds, timeout=timeout)
    return parameters_to_ndarrays(server.parameters)


def zeros():
    return ndarrays_to_parameters([np.zeros(3)])


def fedavg(**options):
    return older.FedAvg(**{"initial_parameters": zeros(), "fraction_evaluate": 0.0, **options})


def test_the_two_apis_are_told_apart():
    with pytest.raises(
        InvalidInput, match=r"FedAvg is a strategy of flwr\.server\.strategy.* Use fedpick\.flower\.legacy"
    ):
        with_policy(older.FedAvg(), UNIFORM)
    with pytest.raises(
        InvalidInput, match=r"a strategy of flwr\.serverapp\.strategy.* Use fedpick\.flower\.with_policy"
    ):
        legacy.with_policy(newer.FedAvg(), UNIFORM)


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        (fedavg(), {"probe": "query"}, "has no option 'probe'"),
        (fedavg(), {"budgets": 3}, "has no option 'budgets'"),
        (fedavg(), {"budget": 2.5}, "budget must be"),
        (older.FedAvg, {}, "is a class"),
        ("FedAvg", {}, r"such as flwr\.server\.strategy\.FedAvg\(\)"),
        (older.FedMedian(), {}, 'pass weights="ignored"'),
        (older.FedXgbCyclic(), {}, "chooses its clients itself"),
        (legacy.with_policy(fedavg(), UNIFORM), {}, "already has a policy"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(strategy, options, message):
    with pytest.raises(InvalidInput, match=message):
        legacy.with_policy(strategy, UNIFORM, **options)


@pytest.mark.parametrize("inner", [fedavg(), older.FedAdam(initial_parameters=zeros())])
def test_power_of_choice_asks_by_evaluation_and_takes_the_largest_losses(inner):
    members = clients(6)
    strategy = legacy.with_policy(inner, fedpick.policies.get("pow-d", num_candidates=6), budget=2)
    model = start(strategy, members, rounds=1)
    assert sorted(strategy.history[0].clients.tolist()) == [4, 5]
    assert [member.calls.count("fit") for member in members] == [0, 0, 0, 0, 1, 1]
    assert all("evaluate" in member.calls for member in members) and model[0].any()


def test_clients_without_properties_are_known_by_their_node_ids():
    strategy = legacy.with_policy(fedavg(), UNIFORM, budget=2)
    start(strategy, [SmallClient(k) for k in range(3)], rounds=2)
    assert strategy.roster.keys == ["node:998", "node:999", "node:1000"]


class Waking(SmallClient):
    """A client of a real SuperNode that is not awake: a message expires after its timeout, and the proxy raises."""

    def __init__(self, number: int, asleep: str) -> None:
        super().__init__(number, {"partition-id": number})
        self.asleep, self.awake = asleep, threading.Event()

    def _wait(self, kind: str, timeout: float | None) -> None:
        if kind == self.asleep and not self.awake.wait(timeout):
            raise ValueError("Message contains an Error (reason: expired)")

    def get_properties(self, ins, timeout, group_id):
        self._wait("properties", timeout)
        return super().get_properties(ins, timeout, group_id)

    def evaluate(self, ins, timeout, group_id):
        self._wait("evaluate", timeout)
        return super().evaluate(ins, timeout, group_id)


@pytest.mark.parametrize("count", [1, 3])
def test_clients_that_start_slowly_keep_their_identity(count):
    members = [*(Waking(k, "properties") for k in range(count)), SmallClient(count, {"partition-id": count})]
    timers = [threading.Timer(0.8, member.awake.set) for member in members[:count]]
    for timer in timers:
        timer.start()
    strategy = legacy.with_policy(fedavg(), UNIFORM, probe_timeout=0.1, min_clients=count + 1)
    start(strategy, members, rounds=2)
    assert sorted(strategy.roster.keys) == [f"partition:{k}" for k in range(count + 1)]
    assert [len(selection.clients) for selection in strategy.history] == [count + 1] * 2


def test_a_client_whose_properties_fail_stays_out_and_is_asked_again(caplog, monkeypatch):
    members, errors = clients(3), [ConnectionError("lost"), ConnectionError("lost again")]
    answer = members[1].get_properties

    def fails_twice(ins, timeout, group_id):
        if errors:
            raise errors.pop(0)
        return answer(ins, timeout, group_id)

    monkeypatch.setattr(members[1], "get_properties", fails_twice)
    first = legacy.with_policy(fedavg(), UNIFORM, min_clients=2)
    start(first, members, rounds=1)
    assert first.roster.keys == ["partition:0", "partition:2"] and len(errors) == 1
    second = legacy.with_policy(fedavg(), UNIFORM, min_clients=3)
    start(second, members, rounds=1)
    assert sorted(second.roster.keys) == ["partition:0", "partition:1", "partition:2"]
    assert [record.getMessage() for record in caplog.records if "get_properties" in record.getMessage()] == [
        f"Client 999 takes no part until its get_properties answers. It failed: {why}. Asked again after 1 s."
        for why in ("lost", "lost again")
    ]


def test_a_client_that_does_not_answer_a_policy_in_time_is_busy():
    members, reports = [*clients(2), Waking(2, "evaluate")], []
    policy = fedpick.policies.get("pow-d", num_candidates=3)
    strategy = legacy.with_policy(fedavg(), policy, budget=1, probe_timeout=0.2, progress=reports.append)
    start(strategy, members, rounds=3)
    assert [("partition:2" in report.available) for report in reports if report.over] == [True, False, False]
    members[2].awake.set()


def test_tags_and_functions_decide_who_takes_part():
    members = [SmallClient(k, {"partition-id": k, "tags": "gpu, eu" if k % 2 else "cpu"}) for k in range(6)]
    strategy = legacy.with_policy(fedavg(fraction_evaluate=1.0), UNIFORM, eligible=["tag:eu"])
    start(strategy, members, rounds=2)
    assert strategy.roster.keys == ["partition:1", "partition:3", "partition:5"]
    assert all("fit" not in member.calls and "evaluate" not in member.calls for member in members[::2])


def test_labels_come_as_text():
    rows = ["[9, 0]", "[0, 9]", "[[", "[5, 5]"]
    members = [SmallClient(k, {"partition-id": k, "label-histogram": row}) for k, row in enumerate(rows)]
    strategy = legacy.with_policy(fedavg(), fedpick.policies.get("fedgs"), budget=2)
    start(strategy, members)
    assert strategy.session.clients.label_histogram[[0, 1, 3]].tolist() == [[9, 0], [0, 9], [5, 5]]
    with pytest.raises(MissingSignal, match="get_properties"):
        start(legacy.with_policy(fedavg(), fedpick.policies.get("fedgs")), clients(3))
    assert Signal.LABEL_HISTOGRAM in strategy.policy.needs


def test_a_round_goes_on_without_the_slow_client_which_is_then_busy():
    members, reports = clients(5), []
    members[2].delay.clear()
    strategy = legacy.with_policy(fedavg(), UNIFORM, quorum=0.8, progress=reports.append)
    started = time.monotonic()
    start(strategy, members, rounds=2)
    first, second = [report for report in reports if report.over]
    assert first.late == first.failed == ["partition:2"] and len(first.completed) == 4
    assert "partition:2" not in second.available and len(second.completed) >= 4 - 1
    members[2].delay.set()
    for call in strategy._members.busy.values():
        call.join(30)
    strategy.inner.initial_parameters = zeros()
    start(strategy, members, rounds=1)
    assert "partition:2" in reports[-1].available
    assert time.monotonic() - started < 50  # the round did not wait for the client


def test_a_deadline_ends_the_round():
    members, reports = clients(3), []
    members[0].delay.clear()
    start(legacy.with_policy(fedavg(), UNIFORM, train_timeout=0.5, progress=reports.append), members, rounds=1)
    assert reports[-1].late == ["partition:0"] and len(reports[-1].completed) == 2
    members[0].delay.set()


@pytest.mark.parametrize("result", [[], [np.zeros(4)], [np.full(3, np.nan)], [np.array(["a"] * 3)]], ids=repr)
def test_a_result_that_does_not_fit_failed_and_is_named(result, caplog):
    members, reports = clients(3), []
    members[1].result = result
    model = start(legacy.with_policy(fedavg(), UNIFORM, progress=reports.append), members, rounds=1)
    assert reports[-1].failed == ["partition:1"] and np.isfinite(model[0]).all() and model[0].any()
    assert "The reply of partition:1 counts as failed" in caplog.text


def normalised(count: float = 0):
    """A linear layer and batch normalisation, in the order of a PyTorch state_dict; the count may be a float."""
    return [np.zeros((2, 2)), np.zeros(2), np.ones(2), np.zeros(2), np.zeros(2), np.ones(2), np.array(count)]


def statistics_after(policy, model, inplace=True, **options):
    """(model, weights, cohort) of one round in which client k has a variance of 0.1 + k / 100."""
    members = clients(5)
    for k, member in enumerate(members):
        member.result = [*(array + 1 for array in model[:4]), np.full(2, 0.5), np.full(2, 0.1 + k / 100), np.array(7)]
    strategy = legacy.with_policy(
        fedavg(initial_parameters=ndarrays_to_parameters(model), inplace=inplace),
        fedpick.policies.get(policy),
        seed=1,
        **options,
    )
    model = start(strategy, members, rounds=1)
    return model, strategy.history[-1].weights, strategy.history[-1].clients


@pytest.mark.parametrize("policy", ["unbiased", "ca-fed", "more-available"])
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("count", [0, 0.0])
def test_statistics_are_averaged_with_weights_that_sum_to_one(policy, inplace, count):
    model, weights, chosen = statistics_after(policy, normalised(count), inplace)
    assert abs(weights.sum() - 1) > 0.05
    np.testing.assert_allclose(model[1], weights.sum())
    np.testing.assert_allclose(model[4], 0.5)
    np.testing.assert_allclose(model[5], (weights / weights.sum()) @ (0.1 + chosen / 100))


def test_the_users_function_says_what_statistics_are():
    model, weights, chosen = statistics_after("unbiased", normalised(), buffers=lambda name: name == "2")
    np.testing.assert_allclose(model[2], 2.0)
    np.testing.assert_allclose(model[5], 1 + weights @ (chosen / 100 - 0.9))


def test_statistics_stay_known_when_a_strategy_makes_floats_of_the_counts():
    members = clients(5)
    for member in members:
        member.result = [*normalised()[:5], np.full(2, 0.1), np.array(7.0)]
    inner = fedavg(initial_parameters=ndarrays_to_parameters(normalised(0)), inplace=False)
    model = start(legacy.with_policy(inner, fedpick.policies.get("unbiased"), seed=1), members, rounds=3)
    np.testing.assert_allclose(model[5], 0.1)


def test_a_count_that_is_not_finite_does_not_reach_the_model():
    members, reports = clients(3), []
    for member in members:
        member.result = [*(array + 1 for array in normalised()[:6]), np.array(7)]
    members[1].result[6] = np.array(np.nan)
    inner = fedavg(initial_parameters=ndarrays_to_parameters(normalised()), inplace=False)
    model = start(legacy.with_policy(inner, UNIFORM, progress=reports.append), members, rounds=1)
    assert reports[-1].failed == ["partition:1"] and model[6] == 7


def test_vectors_before_an_array_that_is_no_count_are_parameters():
    model = [np.zeros(2), np.ones(2), np.array(1.5), np.zeros(3), np.ones(2), np.array(1), np.zeros(2), np.array(3)]
    assert legacy._statistics(legacy._named(model)) == set()
    assert legacy._statistics(legacy._named(normalised())) == {"4", "5", "6"}


def test_evaluation_is_seeded_and_a_size_of_nobody_is_left_out(caplog):
    asked = []
    for _ in range(2):
        members = clients(8)
        members[3].size = 0
        start(legacy.with_policy(fedavg(fraction_evaluate=0.5), UNIFORM, budget=1), members, rounds=3)
        asked.append([member.calls.count("evaluate") for member in members])
    assert asked[0] == asked[1] and sum(asked[0]) == 12
    assert "evaluations are left out" in caplog.text


def test_rounds_are_recorded_with_the_servers_evaluation():
    record = Recorded()
    inner = fedavg(evaluate_fn=lambda round, arrays, config: (float(round), {"accuracy": round / 10}))
    start(legacy.with_policy(inner, UNIFORM, budget=2, record=record), clients(4), rounds=2)
    assert record.calls == [("start", 0), ("round", 0), ("round", 1)]
    assert [(round.test_loss, round.test_accuracy) for round in record.rounds] == [(1.0, 0.1), (2.0, 0.2)]


def test_the_log_names_policy_budget_and_seed_and_every_round(caplog, tmp_path):
    for _ in range(2):
        strategy = legacy.with_policy(fedavg(), fedpick.policies.get("md"), budget=2, seed=41, state=tmp_path)
        start(strategy, clients(3), rounds=2)
    ours = [record for record in caplog.records if record.name.startswith("flwr.")]  # Flower streams its own logger
    text = "\n".join(record.getMessage() for record in ours)
    assert text.count("Policy: md") == text.count("budget: 2, seed: 41, weights of: the policy") == 2
    assert text.count("resumed after round 2 with 3 clients") == 1
    assert "Round 1: " in text and "Round 4: " in text and "Round 0: " not in text


def test_a_strategy_that_samples_by_itself_is_refused():
    class Own(older.FedAvg):
        def configure_fit(self, server_round, parameters, client_manager):
            return super().configure_fit(server_round, parameters, client_manager)[:1]

    strategy = legacy.with_policy(Own(initial_parameters=zeros()), UNIFORM)
    with pytest.raises(InvalidInput, match="Own instructs 1 clients to fit, not the 3"):
        start(strategy, clients(3), rounds=1)


class Quiet(NumPyClient):
    """A client of Flower that trains nothing."""

    def fit(self, parameters, config):
        return parameters, 1, {}


@pytest.mark.parametrize("mods", [[], [secaggplus_mod]])
def test_secure_aggregation_is_refused(mods):
    app = ClientApp(client_fn=lambda context: Quiet().to_client(), mods=mods)
    grid = federation(3)
    for node in grid.nodes.values():
        node.app = errors_become_replies(app)
    members = [GridClientProxy(node, grid, run_id=1) for node in grid.nodes]
    refused = pytest.raises(InvalidInput, match="The ClientApp uses secure aggregation")
    with refused if mods else nullcontext():
        start(legacy.with_policy(fedavg(), UNIFORM), members, rounds=1)


@pytest.mark.parametrize("good", [True, False])
def test_a_run_without_training_ends_with_an_error(good):
    members = clients(3)
    for member in members:
        member.result = None if good else [np.full(3, np.nan)]
    record = Recorded()
    server = legacy.server_of(legacy.with_policy(fedavg(), UNIFORM, record=record))
    for member in members:
        server.client_manager().register(member)
    with nullcontext() if good else pytest.raises(TrainingFailed, match="None of 2 rounds changed the model"):
        server.fit(2, None)
    assert record.calls[-1][0] == "end"
    with pytest.raises(InvalidInput, match="server_of needs a strategy made by"):
        legacy.server_of(fedavg())
