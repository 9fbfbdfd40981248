"""Clients that say or send what makes no sense: the run goes on without it, and the log says what was left out."""

from __future__ import annotations

import io
import logging
import zipfile

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedpick[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import strategy as flower

import fedpick
from fedpick.core.errors import MissingSignal
from fedpick.flower import with_policy
from fedpick.flower.roster import Roster
from tests.flower.fake_grid import FakeGrid, FakeNode, federation, start

logging.getLogger("flwr").setLevel(logging.ERROR)

NAN, INFINITY = float("nan"), float("inf")


def alter(node: FakeNode, kind: str, change) -> None:
    """Let `change` have its way with the content of a node's replies: "hello", "loss", "train" or "evaluate"."""
    app = node.app

    def call(message, context):
        reply = app(message, context)
        asked = message.metadata.message_type
        if kind == (message.content["config"]["kind"] if asked == "query.fedpick" else asked):
            change(reply.content)
        return reply

    node.app = call


def node_of(grid: FakeGrid, partition: int) -> FakeNode:
    return next(node for node in grid.nodes.values() if node.partition == partition)


def with_targets(count: int) -> FakeGrid:
    """Clients of which none finds the first model, 0, perfect."""
    grid = federation(count)
    for node in grid.nodes.values():
        node.target = node.partition + 1.0
    return grid


def labelled(count: int = 4) -> FakeGrid:
    """Clients that tell their labels: partition k has 10 + k examples, all with label k % 2."""
    grid = federation(count)
    for node in grid.nodes.values():
        row = [0.0, 0.0]
        row[node.partition % 2] = 10.0 + node.partition
        alter(node, "hello", lambda content, row=row: content["answer"].update({"label-histogram": row}))
    return grid


@pytest.mark.parametrize(
    "histogram",
    [[NAN, 1.0], [-1.0, 2.0], [INFINITY, 0.0], [1e300, 0.0], [1.0, 2.0, 3.0], [1], [], 5.0, 3],
    ids=str,
)
def test_a_label_histogram_that_makes_no_sense_is_unknown(histogram, caplog):
    grid = labelled()
    alter(node_of(grid, 0), "hello", lambda content: content["answer"].update({"label-histogram": histogram}))
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("fedgs"), budget=2, seed=0)
    start(strategy, grid, rounds=3)
    assert strategy.session.round == 3
    table = strategy.session.clients
    # Nobody else's histogram is touched, and the unknown one counts as the mean of the others.
    np.testing.assert_allclose(table.label_histogram, [[4, 8], [0, 11], [12, 0], [0, 13]])
    assert table.num_examples.tolist() == [10, 11, 12, 13]
    said = [record.getMessage() for record in caplog.records if "label-histogram" in record.getMessage()]
    assert len(said) == 1 and "partition:0" in said[0]


@pytest.mark.parametrize("size", [[1, 2], NAN, -3, -1.0, INFINITY, 1e300, []], ids=str)
def test_a_size_that_makes_no_sense_is_unknown(size, caplog):
    grid = federation(4)
    alter(node_of(grid, 3), "hello", lambda content: content["answer"].update({"num-examples": size}))
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("md"), seed=0)
    grid_model = ArrayRecord({"w": Array(np.zeros(1))})
    strategy.configure_train(1, grid_model, ConfigRecord(), grid)
    assert strategy.session.clients.num_examples.tolist() == [10, 11, 12, 11]  # the mean of the others
    said = [record.getMessage() for record in caplog.records if "num-examples" in record.getMessage()]
    assert len(said) == 1 and "partition:3" in said[0]


@pytest.mark.parametrize("size", [[1, 2], NAN, -3, 1e300], ids=str)
def test_a_size_in_a_train_reply_that_makes_no_sense_changes_nothing(size):
    grid = federation(4)
    alter(node_of(grid, 3), "train", lambda content: content["metrics"].update({"num-examples": size}))
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("uniform"), seed=0)
    result = start(strategy, grid, rounds=2)
    assert strategy.roster.clients().num_examples.tolist() == [10, 11, 12, 13]
    assert np.isfinite(result.arrays["w"].numpy()).all()


@pytest.mark.parametrize("partition", [NAN, INFINITY, [1], 1.5, -1, []], ids=str)
def test_a_partition_id_that_makes_no_sense_is_no_identity(partition, caplog):
    grid = federation(4)
    odd_id, odd = next(item for item in grid.nodes.items() if item[1].partition == 2)
    alter(odd, "hello", lambda content: content["answer"].update({"partition-id": partition}))
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("uniform"), seed=0)
    start(strategy, grid, rounds=2)
    assert strategy.roster.keys == [f"node:{odd_id}", "partition:0", "partition:1", "partition:3"]
    assert all(len(selection.clients) == 4 for selection in strategy.history)
    assert caplog.text.count("partition-id") == 1


def test_an_introduction_that_is_no_metric_record_says_nothing(caplog):
    grid = federation(3)
    odd_id, odd = next(item for item in grid.nodes.items() if item[1].partition == 1)
    alter(odd, "hello", lambda content: content.update({"answer": ConfigRecord({"partition-id": 1})}))
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("uniform"), seed=0)
    start(strategy, grid, rounds=1)
    assert f"node:{odd_id}" in strategy.roster.keys
    assert caplog.text.count("MetricRecord") == 1


def test_the_width_of_histograms_is_that_of_most_clients():
    roster = Roster()
    roster.admit({1: ("partition:0", {"label-histogram": [1, 2, 3]})})
    np.testing.assert_array_equal(roster.clients().label_histogram, [[1, 2, 3]])
    roster.admit({n: (f"partition:{n}", {"label-histogram": [4 * n, 0]}) for n in (2, 3)})
    np.testing.assert_array_equal(roster.clients().label_histogram, [[10, 0], [8, 0], [12, 0]])
    roster.admit({4: ("partition:4", {"label-histogram": [3, 2, 1]})})  # as many as the others: the first that came
    np.testing.assert_array_equal(roster.clients().label_histogram, [[1, 2, 3], [2, 2, 2], [2, 2, 2], [3, 2, 1]])


def test_a_policy_that_needs_labels_waits_where_only_nonsense_was_told_and_is_refused_where_nothing_was(caplog):
    grid = labelled(3)
    for node in grid.nodes.values():
        alter(node, "hello", lambda content: content["answer"].update({"label-histogram": [NAN, 1.0]}))
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("fedgs"), budget=2, seed=0)
    start(strategy, grid, rounds=2)
    assert strategy.history == []
    assert "no usable label histogram" in caplog.text
    grid.nodes[77] = FakeNode(9)
    alter(grid.nodes[77], "hello", lambda content: content["answer"].update({"label-histogram": [1.0, 1.0]}))
    start(strategy, grid, rounds=2)
    assert len(strategy.history) == 2
    with pytest.raises(MissingSignal, match=r"answer_probes\(app, label_histogram="):
        start(with_policy(flower.FedAvg(), fedpick.policies.get("fedgs"), budget=2), federation(3))


def zipped() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, w=np.zeros(3))
    return buffer.getvalue()


def header_of_a_giant() -> bytes:
    """Announces more numbers than there is memory for."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<f8", "fortran_order": False, "shape": (2**58,)})
    return buffer.getvalue()


def empty_zip() -> bytes:
    buffer = io.BytesIO()
    zipfile.ZipFile(buffer, "w").close()
    return buffer.getvalue()


def of_bytes(data: bytes, stype: str = "numpy.ndarray") -> Array:
    return Array(dtype="float64", shape=(3,), stype=stype, data=data)


UNREADABLE = {
    "garbage": of_bytes(b"garbage"),
    "nothing": of_bytes(b""),
    "truncated": of_bytes(Array(np.zeros(3)).data[:-5]),
    "no NumPy": of_bytes(Array(np.zeros(3)).data, stype="torch.tensor"),
    "zip": of_bytes(zipped()),
    "empty zip": of_bytes(empty_zip()),
    "giant": of_bytes(header_of_a_giant()),
    "complex": Array(np.zeros(3) + 1j),
    "text": Array(np.array(["1.0", "2.0", "3.0"])),
    "dates": Array(np.zeros(3, dtype="datetime64[s]")),
    "records": Array(np.zeros(3, dtype=[("a", "f8")])),
    "scalar": Array(np.array(1.0)),
    "infinite": Array(np.array([0.0, INFINITY, 0.0])),
}


def with_arrays(**arrays):
    return lambda content: content.update({"arrays": ArrayRecord(arrays)})


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


def with_metric(name, value):
    return lambda content: content["metrics"].update({name: value})


UNUSABLE = {
    **{name: with_arrays(w=array) for name, array in UNREADABLE.items()},
    "other names": with_arrays(v=Array(np.zeros(3))),
    "more names": with_arrays(w=Array(np.zeros(3)), v=Array(np.zeros(3))),
    "no arrays": lambda content: content.pop("arrays"),
    "two arrays": two_arrays,
    "renamed arrays": renamed_arrays,
    "nothing at all": lambda content: content.clear(),
    "no metrics": no_metrics,
    "two metrics": two_metrics,
    "renamed metrics": renamed_metrics,
    "config": config_in_place_of_metrics,
    "loss is a list": with_metric("train_loss", [1.0, 2.0]),
    "size is a list": with_metric("num-examples", [1, 2]),
    "no loss": without("train_loss"),
    "more metrics": with_metric("accuracy", 0.5),
}
NOT_WITHOUT_WEIGHTS = {
    "no size": without("num-examples"),
    "size NaN": with_metric("num-examples", NAN),
    "negative size": with_metric("num-examples", -60),
    "infinite size": with_metric("num-examples", INFINITY),
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
        weights="policy" if name in WEIGHTED else "ignored",
        progress=reports.append,
    )
    node_of(grid, 0).target = 5.0
    start(strategy, grid, rounds=1)
    assert reports[-1].failed == ([] if name in WEIGHTED else ["partition:1"])


WEIGHTED = ("FedAvg", "FedAdam", "FedAvgM")


def wrapped(name: str, reports: list):
    """Flower's strategy of this name around uniform selection, which tells of every round."""
    weights = "policy" if name in WEIGHTED else "ignored"
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
        *(
            (name, kind)
            for name in ("FedAdam", "FedMedian", "private")
            for kind in ("complex", "no metrics", "no loss")
        ),
        *(("Krum", "text"), ("QFedAvg", "no loss"), ("FedAvgM", "two metrics")),
    ],
)
def test_a_reply_that_is_of_no_use_failed_and_the_strategy_does_not_see_it(name, kind, caplog):
    one_is_left_out(name, UNUSABLE[kind])
    assert caplog.text.count("The reply of partition:2 counts as failed") == 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("FedMedian", kind) for kind in NOT_WITHOUT_WEIGHTS), ("private", "negative size")],
)
def test_without_the_policys_weights_a_reply_needs_a_size(name, kind):
    one_is_left_out(name, NOT_WITHOUT_WEIGHTS[kind])


def test_a_strategy_that_weighs_by_the_loss_needs_one():
    one_is_left_out("QFedAvg", with_metric("train_loss", NAN))


@pytest.mark.parametrize("name", ["FedAvg", "FedMedian", "private"])
def test_the_model_is_what_the_others_give(name):
    weights = "policy" if name in WEIGHTED else "ignored"
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
            weights="policy" if name in WEIGHTED else "ignored",
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
    start(wrapped(name, reports), grid, rounds=2)
    assert [len(report.completed) for report in reports if report.over] in ([usable] * 2, [0, 0])


def test_examples_of_nobody_make_no_step_where_the_strategy_weighs():
    grid = federation(3)
    for node in grid.nodes.values():
        alter(node, "train", with_metric("num-examples", 0))
        alter(node, "evaluate", with_metric("num-examples", 0))
    strategy = with_policy(flower.FedMedian(), fedpick.policies.get("uniform"), weights="ignored")
    result = start(strategy, grid, rounds=2)
    assert strategy.session.round == 2
    assert not result.evaluate_metrics_clientapp


@pytest.mark.parametrize(
    "kind", ["no metrics", "two metrics", "renamed metrics", "config", "size is a list", "no loss"]
)
def test_an_evaluation_that_makes_no_sense_is_left_out(kind):
    changes = {**UNUSABLE, "no loss": without("eval_loss")}
    grid = federation(4)
    alter(node_of(grid, 1), "evaluate", changes[kind])
    result = start(with_policy(flower.FedAvg(), fedpick.policies.get("uniform")), grid, rounds=2)
    assert [metrics["eval_loss"] for metrics in result.evaluate_metrics_clientapp.values()] == [1.0, 1.0]


@pytest.mark.parametrize("size", [NAN, -33, INFINITY])
def test_an_evaluation_without_a_size_is_left_out(size):
    grid = federation(4)
    alter(node_of(grid, 1), "evaluate", with_metric("num-examples", size))
    alter(node_of(grid, 1), "evaluate", with_metric("eval_loss", 100.0))
    result = start(with_policy(flower.FedAvg(), fedpick.policies.get("uniform")), grid, rounds=1)
    assert result.evaluate_metrics_clientapp[1]["eval_loss"] == pytest.approx(1.0)


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


def test_keys_that_look_like_numbers_but_are_none_can_be_sorted():
    roster = Roster()
    roster.admit({1: ("key:²", {}), 2: ("key:" + "7" * 5000, {}), 3: ("key:10", {}), 4: ("key:9", {})})
    assert roster.keys.index("key:9") < roster.keys.index("key:10")
