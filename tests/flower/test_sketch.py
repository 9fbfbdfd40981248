"""Sketches of the received updates, from which herd learns."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array
from flwr.serverapp import strategy as flower

import fedpick
from fedpick.adapter.arrays import head, sketches
from fedpick.core.session import Session
from fedpick.flower import with_policy
from tests.flower.fake_grid import alter, federation, node_of, start, unaware, with_arrays, with_targets

HERD = fedpick.policies.get("herd")


@pytest.fixture
def outcomes(monkeypatch):
    """What policies were told, round by round."""
    told, tell = [], Session.tell
    monkeypatch.setattr(Session, "tell", lambda session, outcome: told.append(outcome) or tell(session, outcome))
    return told


def test_herd_runs_with_clients_that_know_nothing_of_fedpick(outcomes):
    grid = unaware(with_targets(12))
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("herd"), budget=10)
    start(strategy, grid, rounds=3)
    assert [outcome.sketch.shape for outcome in outcomes] == [(10, 3)] * 3
    assert all(np.isfinite(outcome.sketch).all() for outcome in outcomes)
    assert len(strategy.session.state.known) == 12 and strategy.history[-1].diagnostics["known"] > 0
    assert sum(kind.startswith("query") for kind in grid.kinds()) == 1  # the describe query, to one node


def test_the_sketch_is_the_update_and_is_made_only_if_needed(outcomes):
    start(with_policy(flower.FedAvg(), HERD), with_targets(3), rounds=1)
    start(with_policy(flower.FedAvg(), fedpick.policies.get("uniform")), with_targets(3), rounds=1)
    herd, uniform = outcomes
    half_way = 0.5 * (herd.clients + 1.0)  # from 0 to the client's target
    np.testing.assert_allclose(herd.sketch, np.repeat(half_way[:, None], 3, axis=1))
    assert uniform.sketch.shape == (3, 0)


def test_the_head_is_the_last_bias_and_no_statistic():
    model = {
        "conv.weight": np.zeros((2, 3)),
        "fc.bias": np.zeros(2),
        "bn.running_var": np.zeros(2),
        "bn.num_batches_tracked": np.array(0),
        "mean": np.zeros(2),
    }
    assert list(head(model, lambda name: name == "mean")) == ["fc.bias"]
    assert list(head(model, None)) == ["mean"]
    assert list(head({"a": np.zeros((2, 3)), "b": np.zeros((3, 2))}, None)) == ["b"]
    assert list(head({"a": np.zeros(3, dtype=np.int64), "b": np.zeros(3, dtype=np.int64)}, None)) == ["b"]


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        ({"bias": np.array([1.0, 2.0])}, [1.0, 2.0]),
        ({"kernel": np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])}, [3.0, 4.0]),  # inputs first
        ({"fc.weight": np.array([[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]])}, [3.0, 4.0]),  # PyTorch: outputs first
        ({"scale": np.array(2.0)}, [2.0]),
    ],
    ids=["bias", "kernel", "PyTorch", "scalar"],
)
def test_an_array_without_bias_is_averaged_over_its_inputs(update, expected):
    assert sketches([update], "head", 0).tolist() == [expected]


def test_a_count_sketch_is_linear_and_keeps_lengths():
    rng = np.random.default_rng(0)
    one, two = ({"a": rng.normal(size=(50, 40)), "b": rng.normal(size=40)} for _ in range(2))
    both = {name: one[name] + two[name] for name in one}
    rows = sketches([one, None, two, both], "count-sketch", 3)
    assert rows.shape == (4, 512) and np.isnan(rows[1]).all()
    np.testing.assert_allclose(rows[0] + rows[2], rows[3], atol=1e-9)
    length = sum(float(np.sum(array**2)) for array in one.values())
    assert abs(rows[0] @ rows[0] / length - 1) < 0.3
    assert not np.allclose(sketches([one], "count-sketch", 4)[0], rows[0])  # another seed


def test_a_function_of_the_user_sketches(outcomes):
    start(with_policy(flower.FedAvg(), HERD, sketch=lambda update: [update["w"].sum(), 1.0]), with_targets(4), rounds=1)
    expected = [[1.5 * (client + 1), 1.0] for client in outcomes[0].clients]
    np.testing.assert_allclose(outcomes[0].sketch, expected)


@pytest.mark.parametrize(
    "broken",
    [
        lambda update: 1 / 0,
        lambda update: 3.0,
        lambda update: np.zeros((2, 2)),
        lambda update: ["a"],
        lambda update: [np.inf, 1.0],
        lambda update: [np.nan],
    ],
    ids=["raises", "number", "matrix", "text", "infinite", "nan"],
)
def test_a_sketch_that_cannot_be_used_is_no_sketch(broken):
    strategy = with_policy(flower.FedAvg(), HERD, budget=2, sketch=broken)
    start(strategy, with_targets(4), rounds=3)
    assert strategy.session.round == 3 and len(strategy.session.state.known) == 0


def test_a_client_with_an_unusable_reply_has_no_sketch():
    grid = with_targets(4)
    alter(node_of(grid, 2), "train", with_arrays(w=Array(np.full(3, np.nan))))
    alter(node_of(grid, 3), "train", with_arrays(w=Array(np.full(3, 1e200))))  # finite, beyond the guard's limit
    strategy = with_policy(flower.FedAvg(), HERD)
    start(strategy, grid, rounds=1)
    assert strategy.session.state.known.tolist() == [0, 1]


def test_a_round_without_any_usable_reply_leaves_the_known_sketches():
    grid = with_targets(4)
    strategy = with_policy(flower.FedAvg(), fedpick.policies.get("divfl"), budget=4)
    start(strategy, grid, rounds=1)
    assert strategy.session.state.known.tolist() == [0, 1, 2, 3]
    nobody = np.array([2, 3])
    told = sketches([None, None], "head", 0)
    state = strategy.policy.observe(
        strategy.session.state, fedpick.Outcome(index=1, clients=nobody, completed=np.zeros(2, bool), sketch=told)
    )
    assert state.known[:2].tolist() == [0, 1]


def test_the_root_mean_square_of_losses_is_read_from_replies(outcomes):
    grid = federation(3)
    for node in grid.nodes.values():
        alter(node, "train", lambda content, rms=node.partition + 0.5: content["metrics"].update({"loss_rms": rms}))
    start(with_policy(flower.FedAvg(), fedpick.policies.get("uniform")), grid, rounds=1)
    assert outcomes[0].loss_rms.tolist() == (outcomes[0].clients + 0.5).tolist()
