"""Answers to probes."""

from __future__ import annotations

import pytest
from flwr.serverapp import strategy as flower

import fedpick
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
