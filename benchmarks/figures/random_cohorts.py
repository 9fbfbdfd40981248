"""FedCor's random cohorts on Fashion-MNIST, with the settings of its program: in fedpick, or in a PyTorch loop.

    python -m benchmarks.figures.random_cohorts --seeds 30
    python -m benchmarks.figures.random_cohorts --seeds 30 --with torch     # needs PyTorch

2 shards per client, 5 of 100 clients, 3 epochs of 64 on 480 images, rate 0.005, dropout before both ReLUs. Prints the
mean test accuracy of rounds 91 to 100 for every seed, and mean, spread and standard error over the seeds. Both have the
same partition and draw everything else from generators of their own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

import fedpick
from fedpick import data

LAST = slice(90, 100)


def with_fedpick(federation: data.Federation, seed: int) -> list[float]:
    """Test accuracy after each of 100 rounds."""
    from fedpick.sim import LearningRate, LocalTraining, Simulator, simulate, tasks

    rate = LearningRate(initial=0.005, milestones=(150, 300))
    local = LocalTraining(lr=rate, epochs=3, batch_size=64, weight_decay=1e-4)
    network = tasks.get("mlp", input_shape=federation.x.shape[1:], num_classes=10, dropout="fedcor")
    simulator = Simulator(federation, network, local=local, seed=seed)
    session = fedpick.Session(fedpick.policies.get("uniform", weighting="equal"), simulator.clients, seed)
    return [record.test_accuracy or 0.0 for record in simulate(simulator, session, rounds=100, budget=5)]


def with_torch(federation: data.Federation, seed: int) -> list[float]:
    """The same in PyTorch; only the partition comes from fedpick."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    generator = np.random.default_rng(seed)
    x, test_x = (
        torch.from_numpy(federation.normalized(images)).flatten(1) for images in (federation.x, federation.test_x)
    )
    y, test_y = (torch.from_numpy(labels.astype(np.int64)) for labels in (federation.y, federation.test_y))
    first, last = federation.ranges("train")
    rows = [torch.from_numpy(federation.indices[a:b].astype(np.int64)) for a, b in zip(first, last, strict=True)]

    def network() -> nn.Sequential:
        hidden = [nn.Linear(784, 64), nn.Dropout(0.5), nn.ReLU(), nn.Linear(64, 30), nn.Dropout(0.5), nn.ReLU()]
        return nn.Sequential(*hidden, nn.Linear(30, 10))

    shared, accuracies = network(), []
    for _ in range(100):
        received = {name: values.clone() for name, values in shared.state_dict().items()}
        mean = {name: torch.zeros_like(values) for name, values in received.items()}
        for client in generator.choice(100, 5, replace=False):
            own = network().train()
            own.load_state_dict(received)
            optimizer = torch.optim.SGD(own.parameters(), lr=0.005, weight_decay=1e-4)
            for _ in range(3):
                for batch in rows[client][torch.randperm(len(rows[client]))].split(64):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(own(x[batch]), y[batch]).backward()
                    optimizer.step()
            for name, values in own.state_dict().items():
                mean[name] += values / 5
        shared.load_state_dict(mean)
        with torch.no_grad():
            accuracies.append(float((shared.eval()(test_x).argmax(1) == test_y).float().mean()))
    return accuracies


LOOPS: dict[str, Callable[[data.Federation, int], list[float]]] = {"fedpick": with_fedpick, "torch": with_torch}


def main(arguments: list[str] | None = None) -> None:
    """Run the seeds and print the accuracies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with", dest="loop", choices=LOOPS, default="fedpick")
    parser.add_argument("--seeds", type=int, default=30, help="seeds 1 to this one")
    options = parser.parse_args(arguments)
    images = data.load("fmnist")
    means = []
    for seed in range(1, options.seeds + 1):
        federation = data.partition(images, "2spc", num_clients=100, seed=seed, holdout=0.2)
        means.append(100 * np.mean(LOOPS[options.loop](federation, seed)[LAST]))
        print(f"seed {seed}: {means[-1]:.1f} %", flush=True)
    spread = np.std(means, ddof=1)
    print(f"mean {np.mean(means):.2f} %, spread {spread:.2f}, standard error {spread / np.sqrt(len(means)):.2f}")


if __name__ == "__main__":
    main()
