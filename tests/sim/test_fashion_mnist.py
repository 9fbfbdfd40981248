"""The simulator on real data, against what is published about the same model."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed: pip install 'fedpick[sim]'")

import fedpick
from fedpick import data
from fedpick.core.errors import DataError
from fedpick.sim import LearningRate, LocalTraining, Simulator, simulate, tasks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fashion_mnist():
    try:
        return data.load("fmnist")
    except DataError as error:
        pytest.skip(f"Fashion-MNIST is not here (Debian's dataset-fashion-mnist has it): {error}")


def network(federation):
    return tasks.get("mlp", input_shape=federation.x.shape[1:], num_classes=10, dropout="fedcor")


def test_centralised_training_reaches_the_papers_accuracy_within_a_point(fashion_mnist):
    """FedCor, section 5.1: 85.92 %. One client that holds everything is centralised training."""
    federation = data.partition(fashion_mnist, "iid", num_clients=1, seed=0)
    local = LocalTraining(lr=0.05, epochs=1, batch_size=64, weight_decay=1e-4)
    simulator = Simulator(federation, network(federation), local=local, seed=1)
    accuracies = []
    for _ in range(60):
        simulator.train(fedpick.Selection(clients=np.array([0])))
        accuracies.append(simulator.evaluate()[1])
    assert np.mean(accuracies[-10:]) == pytest.approx(0.8592, abs=0.01)


def test_random_cohorts_on_two_shards_do_as_the_authors_code_did(fashion_mnist):
    """Mean accuracy of rounds 91 to 100; the authors' own program gave 61.1 and 55.8 % with two seeds.

    Seeds differ by about 4 points, so five of ours are held to that range give or take two standard errors of theirs
    and ours together (4 / sqrt(2) and 4 / sqrt(5)): 3.4 points.
    """
    means = []
    for seed in range(1, 6):
        federation = data.partition(fashion_mnist, "2spc", num_clients=100, seed=seed, holdout=0.2)
        rate = LearningRate(initial=0.005, milestones=(150, 300))
        local = LocalTraining(lr=rate, epochs=3, batch_size=64, weight_decay=1e-4)
        simulator = Simulator(federation, network(federation), local=local, seed=seed, losses_on="validation")
        session = fedpick.Session(fedpick.policies.get("uniform", weighting="equal"), simulator.clients, seed)
        records = list(simulate(simulator, session, rounds=100, budget=5))
        means.append(np.mean([record.test_accuracy for record in records[90:]]))
    print("rounds 91 to 100, five seeds:", np.round(means, 3))
    assert 0.558 - 0.034 < np.mean(means) < 0.611 + 0.034
