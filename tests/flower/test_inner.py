"""Which strategies a policy can serve, and that exactly the cohort trains."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

import fedpick
from fedpick.core.errors import InvalidInput
from fedpick.flower import with_policy
from tests.flower.fake_grid import UNIFORM, federation, start

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


def test_what_is_derived_from_a_strategy_without_weights_is_refused_too():
    class MyMedian(flower.FedMedian):
        pass

    with pytest.raises(InvalidInput, match="MyMedian does not aggregate by weights"):
        with_policy(MyMedian(), fedpick.policies.get("uniform"))


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("FedAvg", r"strategy must be a Flower strategy object.*Got 'FedAvg'"),
        (flower.FedAvg, r"FedAvg is a class.*FedAvg\(\.\.\.\)"),
        (None, "strategy must be a Flower strategy object"),
        (UNIFORM, "strategy must be a Flower strategy object"),
        (with_policy(flower.FedAvg(), UNIFORM), "already has a policy"),
    ],
    ids=["name", "class", "none", "policy", "twice"],
)
def test_a_strategy_is_a_strategy(strategy, message):
    with pytest.raises(InvalidInput, match=message):
        with_policy(strategy, UNIFORM)


def test_a_strategy_without_a_key_for_weights_is_refused_before_anybody_trains():
    class Own(Strategy):
        configure_train = configure_evaluate = aggregate_train = aggregate_evaluate = summary = None

    with pytest.raises(InvalidInput, match=r"weighted_by_key(.|\n)*weights=\"ignored\""):
        with_policy(Own(), UNIFORM)
    with_policy(Own(), UNIFORM, weights="ignored")


def test_a_strategy_whose_model_has_no_updates_is_refused():
    for weights in ("policy", "ignored"):
        with pytest.raises(InvalidInput, match="FedXgbBagging"):
            with_policy(flower.FedXgbBagging(), UNIFORM, weights=weights)


class Schedule(flower.FedAvg):
    """Halves the learning rate in every round, as Flower's tutorials do."""

    def configure_train(self, server_round, arrays, config, grid):
        if server_round > 1:
            config["lr"] *= 0.5
        return super().configure_train(server_round, arrays, config, grid)


@pytest.mark.parametrize("policy", ["uniform", "fedcor"])
def test_what_a_strategy_writes_into_the_config_stays_but_for_trials(policy):
    grid = federation(6)
    options = {"warmup": 1, "interval": 2} if policy == "fedcor" else {}
    strategy = with_policy(Schedule(fraction_evaluate=0.0), fedpick.policies.get(policy, **options), budget=2)
    config = ConfigRecord({"lr": 0.8})
    strategy.start(grid=grid, initial_arrays=ArrayRecord({"w": Array(np.zeros(3))}), num_rounds=4, train_config=config)
    cohorts = [message for message in grid.sent if message.metadata.message_type == "train"]
    assert cohorts[-1].content["config"]["lr"] == pytest.approx(0.1)
    assert config["lr"] == pytest.approx(0.1)


class Checkpointing(flower.FedAvg):
    """Overrides `start`, as for checkpoints or W&B."""

    def start(self, grid, initial_arrays, num_rounds=3, timeout=3600, folder="none", **others):
        self.folder = folder
        self.result = super().start(grid, initial_arrays, num_rounds, timeout, **others)
        return self.result


def test_a_start_that_the_strategy_overrides_is_used():
    grid, inner, evaluated = federation(6), Checkpointing(), []
    strategy = with_policy(inner, UNIFORM, budget=2, seed=3)
    result = strategy.start(
        grid,
        ArrayRecord({"w": Array(np.zeros(3))}),
        num_rounds=3,
        folder="checkpoints",
        evaluate_fn=lambda server_round, arrays: evaluated.append(server_round),
    )
    assert inner.folder == "checkpoints" and inner.result is result and evaluated == [0, 1, 2, 3]
    assert [len(selection.clients) for selection in strategy.history] == [2, 2, 2]
    assert grid.kinds().count("train") == 6
    plain = with_policy(flower.FedAvg(), UNIFORM, budget=2, seed=3)
    expected = start(plain, federation(6), rounds=3)
    np.testing.assert_array_equal(result.arrays["w"].numpy(), expected.arrays["w"].numpy())
