"""Norm clipping before the strategy aggregates, and the norms that the guard compares."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array
from flwr.server import strategy as older_strategies
from flwr.serverapp import strategy as flower

import fedpick
from fedpick.adapter.arrays import clipped, update_norm
from fedpick.core.errors import FedpickWarning
from fedpick.core.guard import guard_of
from fedpick.core.record import Callback
from fedpick.flower import legacy, with_policy
from fedpick.sim.robust import clip_norms
from tests.flower import test_legacy as older
from tests.flower.fake_grid import (
    UNIFORM,
    alter,
    federation,
    node_of,
    start,
    unaware,
    with_arrays,
    with_metric,
    with_targets,
)

EQUAL = fedpick.policies.get("uniform", weighting="equal")
RECENT = fedpick.policies.get("rpow-d")


def test_the_norm_is_that_of_the_floats():
    rng = np.random.Generator(np.random.PCG64(3))
    model = {"w": rng.normal(size=(300, 500)).astype(np.float32), "n": np.array([5]), "b": np.zeros(7, np.float16)}
    new = {
        "w": model["w"] + rng.normal(size=(300, 500)).astype(np.float32),
        "n": np.array([500]),
        "b": np.ones(7, np.float16),
    }
    flat = np.concatenate([(new[name].astype(float) - model[name].astype(float)).ravel() for name in ("w", "b")])
    assert update_norm(new, model) == pytest.approx(np.linalg.norm(flat), rel=1e-12)
    assert update_norm({"n": np.array([3])}, {"n": np.array([0])}) == 3.0
    largest = np.array([np.finfo(np.float64).max])
    assert update_norm({"w": largest}, {"w": -largest}) == np.inf
    assert clipped({"w": largest}, {"w": -largest}, 0.0)["w"] == -largest
    half = clipped(new, model, 0.5)
    assert half["n"] == [500] and {name: array.dtype for name, array in half.items()} == {
        name: array.dtype for name, array in model.items()
    }


@pytest.mark.parametrize("weights", ["policy", "ignored"])
def test_clipping_is_that_of_the_simulator(weights):
    """The reference: the simulator's rule on the stacked updates."""
    grid = with_targets(5)
    targets = np.array([[1.0, 2.0, 0.0], [2.0, 1.0, 1.0], [0.0, 1.0, 2.0], [1.0, 1.0, 1.0], [90.0, -70.0, 80.0]])
    for node in grid.nodes.values():
        alter(node, "train", with_arrays(w=Array(targets[node.partition])))
    strategy = with_policy(flower.FedAvg(), EQUAL, clip_norms=1.5, weights=weights)
    got = start(strategy, grid, rounds=1).arrays["w"].numpy()
    updates, cut = clip_norms(targets, 1.5)
    assert cut.tolist() == [False] * 4 + [True]
    sizes = np.array([node_of(grid, k).num_examples for k in range(5)], dtype=float)
    expected = np.average(updates, axis=0, weights=None if weights == "policy" else sizes)
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_clipping_works_with_weights_that_do_not_sum_to_one_and_in_the_older_api():
    grid = with_targets(4)
    for node in grid.nodes.values():
        alter(node, "train", with_arrays(w=Array(np.full(3, 1000.0 if node.partition == 3 else 1.0))))
    for name in ("unbiased", "uniform"):
        strategy = with_policy(flower.FedAvg(), fedpick.policies.get(name), clip_norms=1.0)
        got = start(strategy, grid, rounds=1).arrays["w"].numpy()
        total = 1.0 if name == "uniform" else strategy.history[0].weights.sum()
        np.testing.assert_allclose(got, total)  # all updates are as long as the median, which is (1, 1, 1)
    members = older.clients(4)
    members[3].result = [np.full(3, 1000.0)]
    model = older.start(legacy.with_policy(older.fedavg(), EQUAL, clip_norms=2.0), members, rounds=1)
    assert np.abs(model[0]).max() < 10
    median = older_strategies.FedMedian(initial_parameters=older.zeros())
    model = older.start(legacy.with_policy(median, EQUAL, clip_norms=2.0, weights="ignored"), members, rounds=1)
    assert np.isfinite(model[0]).all()


@pytest.mark.parametrize(
    "inner",
    [flower.Krum(num_malicious_nodes=1), flower.FedTrimmedAvg(beta=0.2), flower.FedMedian()],
    ids=lambda strategy: type(strategy).__name__,
)
def test_clipping_goes_before_flowers_own_robust_strategies(inner):
    grid = with_targets(5)
    alter(node_of(grid, 4), "train", with_arrays(w=Array(np.full(3, 1e6))))
    strategy = with_policy(inner, UNIFORM, clip_norms=2.0, weights="ignored")
    assert np.abs(start(strategy, grid, rounds=2).arrays["w"].numpy()).max() < 10


class Norms(Callback):
    def __init__(self) -> None:
        self.seen: list = []

    def on_round(self, record):
        self.seen.append(record.outcome.update_norm)


@pytest.mark.parametrize(
    ("policy", "guard", "known"),
    [("rpow-d", "mild", True), ("rpow-d", "off", False), ("uniform", "mild", False), ("uniform", "strict", True)],
)
def test_the_guard_gets_the_norms_that_it_compares(policy, guard, known):
    norms = Norms()
    start(
        with_policy(flower.FedAvg(), fedpick.policies.get(policy), guard=guard, record=norms), federation(4), rounds=1
    )
    assert np.isfinite(norms.seen[0]).all() == known


def test_a_loss_that_moved_the_model_like_a_small_one_is_not_believed():
    """As in the simulator: the norm of the update is the server's own measurement."""
    grid = with_targets(12)
    liar = node_of(grid, 3)
    alter(liar, "train", lambda content: content["metrics"].update({"train_loss": 1e4 * (1 + liar.trained)}))
    strategy = with_policy(flower.FedAvg(fraction_evaluate=0.0), fedpick.policies.get("rpow-d"), guard="strict")
    start(strategy, grid, rounds=12)
    assert strategy.session.credibility[3] < 0.5 <= np.delete(strategy.session.credibility, 3).min()
    assert [row.identity for row in strategy.standings if row.status == "distrusted"] == ["partition:3"]


@pytest.mark.parametrize("api", ["message", "older"])
def test_an_update_in_doubt_does_not_enter_the_model(api, caplog):
    """The strict guard refuses it before the strategy aggregates; the mild one only lowers the credibility."""
    models = {}
    for guard in ("mild", "strict"):
        seen = Completed()
        if api == "message":
            grid = with_targets(8)
            for node in grid.nodes.values():
                alter(node, "train", with_arrays(w=Array(np.full(3, -1.0 if node.partition == 3 else 1.0))))
                alter(node, "train", with_metric("train_loss", 1e4 if node.partition == 3 else 1.0))
            strategy = with_policy(flower.FedAvg(fraction_evaluate=0.0), RECENT, guard=guard, record=seen)
            models[guard] = start(strategy, grid, rounds=1).arrays["w"].numpy()
        else:
            members = older.clients(8)
            for member in members:
                member.result = [np.full(3, -1.0 if member.number == 3 else 1.0)]
                member.metrics = {"train_loss": 1e4 if member.number == 3 else 1.0}
            strategy = legacy.with_policy(older.fedavg(), RECENT, guard=guard, record=seen)
            models[guard] = older.start(strategy, members, rounds=1)[0]
            strategy._driver.flush()
        assert strategy.session.credibility[3] < 0.5
        assert seen.refused == [[] if guard == "mild" else [3]]
        assert ("partition:3 are in doubt" in caplog.text) == (guard == "strict")
    assert (models["mild"] < 1).all()
    np.testing.assert_allclose(models["strict"], 1.0)


class Completed(Callback):
    def __init__(self) -> None:
        self.refused: list = []

    def on_round(self, record):
        self.refused.append(record.outcome.clients[~record.outcome.completed].tolist())


GIANT = 2**53


def bounded_share(guard: str, sizes: list[float]) -> float:
    """The last client's share of the weight, with bounded sizes."""
    bounded = guard_of(guard).sizes(fedpick.Clients(num_examples=np.array(sizes, dtype=float)))[0].num_examples
    return bounded[-1] / bounded.sum()


@pytest.mark.parametrize("guard", ["mild", "strict"])
@pytest.mark.parametrize(("policy", "weights"), [("uniform", "policy"), ("tifl", "policy"), ("uniform", "ignored")])
def test_a_size_in_a_train_reply_is_bounded_at_once(policy, weights, guard):
    """The client told a usual size until it was chosen."""
    grid = federation(21)
    for node in grid.nodes.values():
        node.target = 2.0 if node.partition == 20 else 0.0  # the new model is the weight of the last client
        alter(node, "train", with_metric("train_loss", 1.0))
    alter(node_of(grid, 20), "train", with_metric("num-examples", GIANT))
    options = {"budget": 21, "guard": guard, "weights": weights}
    strategy = with_policy(flower.FedAvg(fraction_evaluate=0.0), fedpick.policies.get(policy), **options)
    got = start(strategy, grid, rounds=1).arrays["w"].numpy()
    assert got[0] == pytest.approx(bounded_share(guard, [*range(10, 30), GIANT])) and got[0] < 0.4


@pytest.mark.parametrize("weights", ["policy", "ignored"])
def test_a_size_in_a_result_of_the_older_api_is_bounded_at_once(weights):
    members = older.clients(21)
    for member in members:
        member.result = [np.full(3, float(member.number == 20))]
    members[20].size = GIANT
    model = older.start(legacy.with_policy(older.fedavg(), UNIFORM, weights=weights), members, rounds=1)
    assert model[0][0] == pytest.approx(bounded_share("mild", [*range(10, 30), GIANT]))


def test_one_false_size_does_not_become_that_of_clients_that_told_none():
    """Most clients of a federation without `answer_probes` have not told a size yet. The bound needs theirs."""
    grid = unaware(federation(21))
    liar = grid.nodes[min(grid.nodes)]
    alter(liar, "train", with_metric("num-examples", GIANT))
    strategy = with_policy(flower.FedAvg(fraction_evaluate=0.0), UNIFORM, budget=5, seed=3)
    with pytest.warns(FedpickWarning, match="The guard bounds the sizes of 1 of 21"):
        start(strategy, grid, rounds=6)
    assert GIANT in strategy.roster.num_examples
    assert sum(np.isnan(strategy.roster.num_examples)) > 1 and strategy._driver.clients.num_examples.max() < 400
