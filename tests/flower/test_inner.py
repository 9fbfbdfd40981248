"""Which strategies a policy can serve, and that exactly the cohort trains."""

from __future__ import annotations

import pytest
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
