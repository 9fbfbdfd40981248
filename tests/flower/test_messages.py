"""Replies that make no sense: the run goes on without them, and the log names them."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import strategy as flower

import fedpick
from fedpick.core.errors import TrainingFailed
from fedpick.flower import with_policy
from tests.flower.fake_grid import (
    INFINITY,
    NAN,
    UNIFORM,
    UNREADABLE,
    alter,
    federation,
    node_of,
    of_bytes,
    start,
    with_arrays,
    with_metric,
    with_targets,
)


def test_an_unusable_reply_is_named(caplog):
    grid = federation(3)
    next(node for node in grid.nodes.values() if node.partition == 1).mode = "nan"
    start(with_policy(flower.FedAvg(), fedpick.policies.get("uniform")), grid, rounds=1)
    assert "The reply of partition:1 counts as failed" in caplog.text


@pytest.mark.parametrize("size", [[1, 2], NAN, -3, 1e300], ids=str)
def test_a_size_in_a_train_reply_that_makes_no_sense_changes_nothing(size):
    grid = federation(4)
    alter(node_of(grid, 3), "train", lambda content: content["metrics"].update({"num-examples": size}))
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("uniform"), seed=0)
    result = start(strategy, grid, rounds=2)
    assert strategy.roster.clients().num_examples.tolist() == [10, 11, 12, 13]
    assert np.isfinite(result.arrays["w"].numpy()).all()


def no_metrics(content):
    del content["metrics"]


def two_metrics(content):
    content["more"] = MetricRecord({"num-examples": 3, "train_loss": 1.0})


def two_arrays(content):
    content["more"] = ArrayRecord({"w": Array(np.zeros(3))})


def renamed_metrics(content):
    content["numbers"] = content.pop("metrics")


def renamed_arrays(content):
    content["weights"] = content.pop("arrays")


def config_in_place_of_metrics(content):
    content["metrics"] = ConfigRecord({"num-examples": 3, "train_loss": "high"})


def without(name):
    return lambda content: content["metrics"].pop(name)


UNUSABLE = {
    **{name: with_arrays(w=array) for name, array in UNREADABLE.items()},
    "other names": with_arrays(v=Array(np.zeros(3))),
    "more names": with_arrays(w=Array(np.zeros(3)), v=Array(np.zeros(3))),
    "no arrays": lambda content: content.pop("arrays"),
    "two arrays": two_arrays,
    "nothing at all": lambda content: content.clear(),
    "no metrics": no_metrics,
    "two metrics": two_metrics,
    "config": config_in_place_of_metrics,
    "size is a list": with_metric("num-examples", [1, 2]),
}
NO_LOSS = without("train_loss")


NOT_WITHOUT_WEIGHTS = {
    "no size": without("num-examples"),
    "size NaN": with_metric("num-examples", NAN),
    "negative size": with_metric("num-examples", -60),
    "infinite size": with_metric("num-examples", INFINITY),
}


HARMLESS = {
    "renamed arrays": renamed_arrays,
    "renamed metrics": renamed_metrics,
    "more metrics": with_metric("accuracy", 0.5),
    "a list more": with_metric("confusion", [0.5, 0.5]),
    "loss is a list": with_metric("train_loss", [1.0, 2.0]),
    "no loss": NO_LOSS,
}


def strategies() -> dict:
    return {
        "FedAvg": flower.FedAvg(),
        "FedAdam": flower.FedAdam(eta=0.1),
        "FedAvgM": flower.FedAvgM(server_learning_rate=1.0, server_momentum=0.9),
        "FedMedian": flower.FedMedian(),
        "QFedAvg": flower.QFedAvg(client_learning_rate=0.1),
        "Krum": flower.Krum(num_malicious_nodes=1),
        "private, adaptive": flower.DifferentialPrivacyServerSideAdaptiveClipping(
            flower.FedAvg(), noise_multiplier=0.1, num_sampled_clients=5
        ),
        "private": flower.DifferentialPrivacyServerSideFixedClipping(
            flower.FedAvg(), noise_multiplier=0.0, clipping_norm=1.0, num_sampled_clients=5
        ),
    }


@pytest.mark.parametrize("name", ["FedAvg", "private"])
def test_a_client_that_returns_the_model_unchanged_ends_nothing(name):
    """Flower's clipping divides by the length of an update."""
    grid, reports = federation(4), []
    alter(node_of(grid, 1), "train", with_arrays(w=Array(np.zeros(3))))
    strategy = with_policy(
        strategies()[name],
        fedpick.policies.get("uniform"),
        weights="policy" if name in WEIGHTED_NAMES else "ignored",
        progress=reports.append,
    )
    node_of(grid, 0).target = 5.0
    start(strategy, grid, rounds=1)
    assert reports[-1].failed == ([] if name in WEIGHTED_NAMES else ["partition:1"])


WEIGHTED_NAMES = ("FedAvg", "FedAdam", "FedAvgM")


def wrapped(name: str, reports: list):
    """Flower's strategy of this name around uniform selection, which tells of every round."""
    weights = "policy" if name in WEIGHTED_NAMES else "ignored"
    uniform = fedpick.policies.get("uniform")
    return with_policy(strategies()[name], uniform, seed=0, weights=weights, progress=reports.append)


def one_is_left_out(name: str, change) -> None:
    """Client 2 of 5 sends nonsense in the second of three rounds: it failed then, and the others completed."""
    grid, reports = with_targets(5), []
    odd = node_of(grid, 2)
    alter(odd, "train", lambda content: change(content) if odd.trained == 2 else None)
    result = start(wrapped(name, reports), grid, rounds=3)
    assert [report.failed for report in reports if report.over] == [[], ["partition:2"], []]
    assert np.isfinite(result.arrays["w"].numpy()).all()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("FedAvg", kind) for kind in UNUSABLE),
        *((name, kind) for name in ("FedAdam", "FedMedian", "private") for kind in ("complex", "no metrics")),
        *(("Krum", "text"), ("FedAvgM", "two metrics")),
    ],
)
def test_a_reply_that_is_of_no_use_failed_and_the_strategy_does_not_see_it(name, kind, caplog):
    one_is_left_out(name, UNUSABLE[kind])
    assert caplog.text.count("The reply of partition:2 counts as failed") == 1


@pytest.mark.parametrize("kind", HARMLESS)
@pytest.mark.parametrize("cohort", [2, 5])
def test_a_client_with_other_names_or_more_metrics_makes_no_reply_unusable(kind, cohort):
    grid, reports, seen = with_targets(cohort), [], []
    alter(node_of(grid, 0), "train", HARMLESS[kind])

    class Seeing(flower.FedAvg):
        def aggregate_train(self, server_round, replies):
            seen.extend(set(next(iter(reply.content.metric_records.values()))) for reply in replies)
            return super().aggregate_train(server_round, replies)

    start(with_policy(Seeing(), UNIFORM, progress=reports.append), grid, rounds=1)
    assert len(reports[-1].completed) == cohort
    expected = {"num-examples", "train_loss"}
    assert seen == [expected] * cohort


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("FedMedian", kind) for kind in NOT_WITHOUT_WEIGHTS), ("private", "negative size")],
)
def test_without_the_policys_weights_a_reply_needs_a_size(name, kind):
    one_is_left_out(name, NOT_WITHOUT_WEIGHTS[kind])


@pytest.mark.parametrize("change", [with_metric("train_loss", NAN), NO_LOSS])
def test_a_strategy_that_weighs_by_the_loss_needs_one(change):
    one_is_left_out("QFedAvg", change)


def aggregated(records, weight):
    """A user's function, which fails if a reply lacks a metric."""
    losses = [next(iter(record.metric_records.values()))["own"] for record in records]
    return MetricRecord({"own": float(np.mean(losses))})


def test_one_attacker_of_two_discards_no_honest_reply_and_breaks_no_metric():
    """60 rounds of one honest client and an attacker that sends other metrics in every one of them."""
    grid, reports = with_targets(2), []
    attacker, honest = node_of(grid, 0), node_of(grid, 1)
    alter(honest, "train", with_metric("own", 2.0))

    def attack(content):
        metrics = content["metrics"]
        rng = np.random.Generator(np.random.PCG64(attacker.trained))
        for key in ("own", "train_loss", "more", f"new-{attacker.trained}"):
            values = [None, 7.0, [1.0, 2.0], [1.0] * int(rng.integers(0, 4)), NAN]
            value = values[int(rng.integers(len(values)))]
            if value is None:
                metrics.pop(key, None)
            else:
                metrics[key] = value

    alter(
        attacker, "train", lambda content: attack(content) if attacker.trained > 1 else with_metric("own", 2.0)(content)
    )
    strategy = with_policy(flower.FedAvg(train_metrics_aggr_fn=aggregated), UNIFORM, progress=reports.append)
    result = start(strategy, grid, rounds=60)
    assert all("partition:1" in report.completed for report in reports if report.over)
    assert len(result.train_metrics_clientapp) == 60


def test_two_attackers_of_three_cannot_force_their_metrics_on_the_honest_reply():
    grid, reports = with_targets(3), []
    for attacker in (0, 1):
        alter(node_of(grid, attacker), "train", with_metric("more", 1.0))
    start(with_policy(flower.FedAvg(), UNIFORM, progress=reports.append), grid, rounds=1)
    assert reports[-1].failed == []


def test_a_missing_metric_is_the_mean_of_the_others():
    grid = with_targets(3)
    alter(node_of(grid, 2), "train", NO_LOSS)
    result = start(with_policy(flower.FedAvg(), fedpick.policies.get("uniform", weighting="equal")), grid, rounds=1)
    losses = [node_of(grid, place).target ** 2 for place in (0, 1)]
    assert result.train_metrics_clientapp[1]["train_loss"] == pytest.approx(np.mean(losses))


@pytest.mark.parametrize("name", ["FedAvg", "FedMedian", "private"])
def test_the_model_is_what_the_others_give(name):
    weights = "policy" if name in WEIGHTED_NAMES else "ignored"
    grid = with_targets(5)
    alter(node_of(grid, 2), "train", with_arrays(w=of_bytes(b"garbage")))
    strategy = with_policy(strategies()[name], fedpick.policies.get("uniform"), seed=0, weights=weights)
    got = start(strategy, grid, rounds=1).arrays["w"].numpy()
    grid = with_targets(5)
    node_of(grid, 2).mode = "gone"
    strategy = with_policy(strategies()[name], fedpick.policies.get("uniform"), seed=0, weights=weights)
    np.testing.assert_allclose(got, start(strategy, grid, rounds=1).arrays["w"].numpy(), atol=1e-12)


@pytest.mark.parametrize("name", [name for name in strategies() if "adaptive" not in name])  # that one adds noise
def test_whole_numbers_and_another_order_are_put_into_the_models_form(name):
    """Flower's strategies pair arrays by their place, and some compute in the arrays of the reply."""
    model = ArrayRecord({"w": Array(np.zeros(3, np.float32)), "b": Array(np.zeros(2, np.float32))})
    found = []
    for tidy in (True, False):
        grid = with_targets(5)
        for node in grid.nodes.values():
            whole = {"b": Array(np.full(2, node.partition)), "w": Array(np.full(3, 2 * node.partition))}
            plain = {key: Array(whole[key].numpy().astype(np.float32)) for key in ("w", "b")}
            alter(node, "train", with_arrays(**(plain if tidy or node.partition != 2 else whole)))
        strategy = with_policy(
            strategies()[name],
            fedpick.policies.get("uniform"),
            seed=0,
            weights="policy" if name in WEIGHTED_NAMES else "ignored",
        )
        messages = strategy.configure_train(1, model, ConfigRecord(), grid)
        arrays, _ = strategy.aggregate_train(1, list(grid.send_and_receive(messages)))
        found.append({key: array.numpy() for key, array in arrays.items()})
    for key in ("w", "b"):
        np.testing.assert_array_equal(found[0][key], found[1][key])


@pytest.mark.parametrize("name", strategies())
@pytest.mark.parametrize("usable", [0, 1, 2])
def test_few_or_no_usable_replies_end_nothing(name, usable):
    grid, reports = with_targets(5), []
    for node in grid.nodes.values():
        if node.partition >= usable:
            alter(node, "train", no_metrics if node.partition % 2 else with_arrays(w=of_bytes(b"garbage")))
    with pytest.raises(TrainingFailed) if usable == 0 else nullcontext():
        try:
            start(wrapped(name, reports), grid, rounds=2)
        except TrainingFailed:  # a strategy may decline to aggregate one or two replies
            if usable == 0 or any(report.completed for report in reports):
                raise
    assert [len(report.completed) for report in reports if report.over] in ([usable] * 2, [0, 0])


def test_examples_of_nobody_make_no_step_where_the_strategy_weighs():
    grid = federation(3)
    for node in grid.nodes.values():
        alter(node, "train", with_metric("num-examples", 0))
        alter(node, "evaluate", with_metric("num-examples", 0))
    strategy = with_policy(flower.FedMedian(), fedpick.policies.get("uniform"), weights="ignored")
    with pytest.raises(TrainingFailed, match="None of 2 rounds changed the model"):
        start(strategy, grid, rounds=2)
    assert strategy.session.round == 2


@pytest.mark.parametrize("kind", ["no metrics", "two metrics", "config", "size is a list", "no loss"])
def test_an_evaluation_that_makes_no_sense_is_left_out(kind):
    changes = {**UNUSABLE, "no loss": without("eval_loss")}  # its loss is the mean of the others
    grid = federation(4)
    alter(node_of(grid, 1), "evaluate", changes[kind])
    result = start(with_policy(flower.FedAvg(), fedpick.policies.get("uniform")), grid, rounds=2)
    assert [metrics["eval_loss"] for metrics in result.evaluate_metrics_clientapp.values()] == pytest.approx([1, 1])


@pytest.mark.parametrize("size", [NAN, -33, INFINITY])
def test_an_evaluation_without_a_size_is_left_out(size):
    grid = federation(4)
    alter(node_of(grid, 1), "evaluate", with_metric("num-examples", size))
    alter(node_of(grid, 1), "evaluate", with_metric("eval_loss", 100.0))
    result = start(with_policy(flower.FedAvg(), fedpick.policies.get("uniform")), grid, rounds=1)
    assert result.evaluate_metrics_clientapp[1]["eval_loss"] == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numbers_near_the_largest_one_raise_nothing(dtype):
    grid = federation(4)
    largest = np.full(3, np.finfo(dtype).max)
    alter(node_of(grid, 3), "train", with_arrays(w=Array(largest)))
    strategy = with_policy(flower.FedAvg(fraction_evaluate=0.0), fedpick.policies.get("unbiased"), seed=0)
    model = ArrayRecord({"w": Array(np.full(3, -np.finfo(dtype).max / 2, dtype))})
    messages = strategy.configure_train(1, model, ConfigRecord(), grid)
    with np.errstate(all="ignore"):  # what the wrapped strategy computes is its own affair
        strategy.aggregate_train(1, list(grid.send_and_receive(messages)))
    assert strategy.session.round == 1
