"""Answers to probes."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.serverapp import strategy as flower

import fedpick
from fedpick.core.errors import InvalidInput
from fedpick.flower import with_policy
from tests.flower.fake_grid import (
    INFINITY,
    NAN,
    UNREADABLE,
    alter,
    federation,
    node_of,
    start,
    unaware,
    with_arrays,
    with_targets,
)


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


@pytest.mark.parametrize("kind", UNREADABLE)
def test_updates_of_no_use_are_no_answer_to_a_probe_either(kind):
    grid = with_targets(5)
    alter(node_of(grid, 2), "train", with_arrays(w=UNREADABLE[kind]))
    policy = fedpick.policies.get("fedgs", similarity="updates")
    strategy = with_policy(flower.FedAvg(), policy, budget=2, seed=0)
    start(strategy, grid, rounds=2)
    assert strategy.session.round == 2


@pytest.mark.parametrize("value", [[1.0], NAN, 10**400, -INFINITY], ids=lambda value: str(value)[:9])
def test_a_loss_that_is_none_is_no_answer(value):
    grid = federation(4)
    alter(node_of(grid, 3), "loss", lambda content: content["answer"].update({"value": value}))
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("pow-d", num_candidates=4), budget=2, seed=0)
    start(strategy, grid, rounds=1)
    assert sorted(strategy.history[0].clients.tolist()) == [1, 2]  # those with the largest loss that is one


def test_a_policy_that_learns_nothing_says_so(caplog):
    grid = federation(4)
    start(with_policy(flower.FedAvg(), fedpick.policies.get("afl"), budget=2), grid, rounds=3)
    assert caplog.text.count("AFL learns from 'loss'") == 1
    unaware(grid)
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("pow-d"), budget=1)
    start(strategy, grid, rounds=1)
    assert all(key.startswith("node:") for key in strategy.roster.keys)
    assert "None of 2 clients answered with a loss" in caplog.text
    assert not any(
        message.content["config"]["kind"] == "loss" for message in grid.sent if "query" in message.metadata.message_type
    )
    assert "answer_probes" in caplog.text


POW_D = fedpick.policies.get("pow-d", num_candidates=4)


def test_the_clients_own_evaluation_answers_probes():
    unchanged = unaware(federation(4))
    first = with_policy(flower.FedAvg(fraction_evaluate=0.0), POW_D, budget=2, seed=0, probe="evaluate")
    start(first, unchanged, rounds=3)
    with_answers = federation(4)
    second = with_policy(flower.FedAvg(), POW_D, budget=2, seed=0)
    start(second, with_answers, rounds=3)
    chosen = [[unchanged.nodes[first.roster.node_of[i]].partition for i in s.clients] for s in first.history]
    assert list(map(sorted, chosen)) == [sorted(s.clients.tolist()) for s in second.history]
    assert unchanged.kinds().count("evaluate") == 3 * 4


def test_evaluations_see_the_model_of_a_trial():
    policy = fedpick.policies.get("fedcor", warmup=1, interval=2)
    grid = unaware(federation(8))
    start(with_policy(flower.FedAvg(fraction_evaluate=0.0), policy, budget=2, probe="evaluate"), grid, rounds=4)
    models: dict[str, set[bytes]] = {"train": set(), "evaluate": set(), "query.fedpick": set()}
    for message in grid.sent:
        for record in message.content.array_records.values():
            models[message.metadata.message_type].add(record["w"].numpy().tobytes())
    assert models["evaluate"] - models["train"]  # the models of trials, which no cohort got
    assert models["evaluate"] & models["train"] and not models["query.fedpick"]


def test_evaluations_get_the_evaluate_config_and_the_loss_may_have_another_name(caplog):
    class Counting(flower.FedAvg):
        def configure_evaluate(self, server_round, arrays, config, grid):
            config["calls"] = config["calls"] + 1
            return super().configure_evaluate(server_round, arrays, config, grid)

    grid = unaware(federation(4))
    for node in grid.nodes.values():
        alter(node, "evaluate", lambda content: content["metrics"].update({"val": content["metrics"].pop("eval_loss")}))
    arrays, config = ArrayRecord({"w": Array(np.zeros(3))}), ConfigRecord({"calls": 0, "top-k": 5})
    options = {"budget": 2, "seed": 0, "probe": "evaluate"}
    strategy = with_policy(Counting(), POW_D, **options, reports={"eval_loss": "val"})
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=2, evaluate_config=config)
    seen = [message.content["config"] for message in grid.sent if message.metadata.message_type == "evaluate"]
    assert all(found["top-k"] == 5 for found in seen) and config["calls"] == 2  # not four: probes get a copy
    partitions = [grid.nodes[strategy.roster.node_of[i]].partition for i in strategy.history[0].clients]
    assert sorted(partitions) == [2, 3] and "evaluations" not in caplog.text
    start(with_policy(flower.FedAvg(), POW_D, **options), grid, rounds=1)
    assert "None of 4 evaluations has a usable 'eval_loss'" in caplog.text
    assert "['num-examples', 'val']" in caplog.text


def test_a_strategy_that_chooses_who_evaluates_cannot_answer_probes():
    class Silent(flower.FedAvg):
        def configure_evaluate(self, server_round, arrays, config, grid):
            return []

    with pytest.raises(InvalidInput, match="Silent sent evaluate messages to 0 nodes, not to the 4"):
        start(with_policy(Silent(), POW_D, budget=2, probe="evaluate"), federation(4), rounds=1)
