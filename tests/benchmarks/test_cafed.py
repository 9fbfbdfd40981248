"""The data sets and the policy behind the question why CA-Fed's gain does not appear."""

from __future__ import annotations

import numpy as np

from benchmarks.cafed import WithoutCorrelated, augmented, clustered
from fedpick import availability
from fedpick.core.types import Clients, RoundContext
from fedpick.data import partition
from fedpick.testing import check_policy


def test_labels_of_the_second_half_are_flipped():
    data = clustered(num_clients=4, train_examples=4000, test_examples=10, flipped=0.2, seed=1)
    x, y = data.train_x.reshape(4, 4000, 10), data.train_y.reshape(4, 4000)
    weights = np.linalg.lstsq(x[0], 2.0 * y[0] - 1, rcond=None)[0]
    kept, *others = ((x @ weights > 0) == (y == 1)).mean(axis=1)
    np.testing.assert_allclose(others, [kept, *[0.8 * kept + 0.2 * (1 - kept)] * 2], atol=0.03)


def test_more_available_clients_have_ten_times_the_examples():
    data = augmented(num_clients=20, num_examples=2200, seed=2)
    federation = partition(data, "natural")
    assert (federation.sizes[:10] == 180).all() and (federation.sizes[10:] == 18).all()
    assert len(data.test_y) == 10 * (20 + 2)
    process = availability.get("correlated-population", variant="authors", order="blocks")
    trace = process.start(federation.clients(), seed=0)
    assert ((trace.availability > 0.5) == (federation.sizes > 100)).all()


def test_exactly_the_less_available_correlated_clients_are_left_out():
    clients = Clients(
        num_examples=np.full(4, 10.0),
        availability=np.array([0.9, 0.9, 0.1, 0.1]),
        correlation=np.array([0.9, 0.0, 0.9, 0.0]),
    )
    policy = WithoutCorrelated(estimates="oracle")
    context = RoundContext(index=0, budget=4, available=np.ones(4, bool), clients=clients, measurements=())
    rng = np.random.default_rng(0)
    selection, _ = policy.select(policy.init(clients, rng), context, rng)
    assert selection.clients.tolist() == [0, 1, 3]
    np.testing.assert_allclose(selection.weights, [0.25 / 0.9, 0.25 / 0.9, 0.25 / 0.1])


def test_the_policy_conforms():
    check_policy(WithoutCorrelated())
