"""The three jobs that contenders are compared on, and a job written out so that all of them do the same work.

J1  Fashion-MNIST, 100 clients with 2 shards each, perceptron 784-64-30-10; a round: 10 clients take 20 steps of 64;
    test accuracy after every round, the losses of all clients after every tenth.
J2  Synthetic(1, 1) with lognormal sizes, 100 clients, logistic regression 60-10; a round: 50 clients take 5 steps of
    32; accuracy on all examples after every round.
J3  Fashion-MNIST as in J1, McMahan's CNN; a round: 10 clients take 10 steps of 32; no evaluation.

`write_work` fixes cohorts, rows and weights from fedpick's own random streams. Fedpick decides and draws them again
while it is timed; the other contenders read them from the files.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedpick import data, policies
from fedpick.core.errors import unknown_name
from fedpick.core.rng import Purpose
from fedpick.core.session import Session
from fedpick.core.types import Outcome, aggregation_weights
from fedpick.sim import LocalTraining, Simulator

__all__ = ["JOBS", "Job", "federation", "find", "flat", "session", "simulator", "write_work"]

SEED = 0
NUM_CLIENTS = 100
J1_GIGAFLOP = {10: 4.42, 5: 3.05}
"""Floating-point work of a J1 round by cohort size: training, the test set, and a tenth of all clients' losses."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One piece of work for all contenders."""

    name: str
    title: str
    task: str
    cohort: int
    steps: int
    batch: int
    lr: float
    turn: int
    """Rounds that a contender does in one turn."""
    evaluate_every: int | None = 1
    losses_every: int | None = None


JOBS = {
    job.name: job
    for job in (
        Job(
            name="j1",
            title="perceptron on Fashion-MNIST, 10 of 100 clients, 20 steps of 64",
            task="mlp",
            cohort=10,
            steps=20,
            batch=64,
            lr=0.05,
            turn=10,
            losses_every=10,
        ),
        Job(
            name="j2",
            title="logistic regression on Synthetic(1, 1), 50 of 100 clients, 5 steps of 32",
            task="logistic",
            cohort=50,
            steps=5,
            batch=32,
            lr=0.02,
            turn=60,
        ),
        Job(
            name="j3",
            title="CNN on Fashion-MNIST, 10 of 100 clients, 10 steps of 32",
            task="cnn-mcmahan-fmnist",
            cohort=10,
            steps=10,
            batch=32,
            lr=0.05,
            turn=1,
            evaluate_every=None,
        ),
    )
}


def find(name: str) -> Job:
    """The job of this name."""
    if name not in JOBS:
        raise unknown_name("job", name, JOBS)
    return JOBS[name]


def federation(job: Job, rows: int | None = None) -> data.Federation:
    """The data of a job. `rows`: keep only that many training and test examples."""
    if job.name == "j2":
        whole = data.load("synthetic", num_clients=NUM_CLIENTS, test_fraction=0.0, features=False, seed=SEED)
        # Accuracy on all examples: they are the test set, too.
        return data.partition(replace(whole, test_x=whole.train_x, test_y=whole.train_y), "natural", seed=SEED)
    images = data.load("fmnist")
    if rows is not None:
        images = replace(
            images,
            train_x=images.train_x[:rows],
            train_y=images.train_y[:rows],
            test_x=images.test_x[:rows],
            test_y=images.test_y[:rows],
        )
    return data.partition(images, "2spc", num_clients=NUM_CLIENTS, seed=SEED)


def simulator(job: Job, dealt: data.Federation, **options: Any) -> Simulator:
    """Fedpick's simulator for the job, at round 0."""
    local = LocalTraining(lr=job.lr, steps=job.steps, batch_size=job.batch, sampling="batch")
    return Simulator(dealt, job.task, local=local, seed=SEED, **options)


def session(sim: Simulator) -> Session:
    """Uniform selection with equal weights: every contender can do that."""
    return Session(policies.get("uniform", weighting="equal"), sim.clients, SEED)


def flat(tree: Any) -> dict[str, np.ndarray]:
    """Parameters by name, such as "dense0.weight" with shape (inputs, outputs)."""
    return {f"{layer}.{name}": np.asarray(leaf) for layer, leaves in tree.items() for name, leaf in leaves.items()}


def write_work(job: Job, sim: Simulator, rounds: int, folder: Path) -> None:
    """Write everything that a contender needs, as plain arrays.

    job.json; x, y, test_x, test_y (float32 rows in the order of the clients); cohorts (R, C), weights (R, C), batches
    (R, C, steps, batch) as row numbers; initial.npz, the model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chooser = session(sim)
    cohorts, weights, batches = [], [], []
    for index in range(rounds):
        selection = chooser.ask(budget=job.cohort)
        completed = np.ones(len(selection.clients), bool)
        cohorts.append(selection.clients)
        weights.append(aggregation_weights(selection, completed, sim.clients))
        batches.append([_rows(sim, index, int(client)) for client in selection.clients])
        chooser.tell(Outcome(index=index, clients=selection.clients, completed=completed))
    rows = sim.examples
    arrays: dict[str, Any] = {"x": rows.x, "y": rows.y, "test_x": rows.test_x, "test_y": rows.test_y}
    arrays |= {"cohorts": cohorts, "weights": weights, "batches": np.array(batches, np.int32)}
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", np.asarray(values))
    # NumPy's stub takes any keyword for its flag allow_pickle.
    np.savez(folder / "initial.npz", **flat(sim.params))  # type: ignore[arg-type]
    plain = {**asdict(job), "rounds": rounds, "num_clients": len(sim.clients), "shape": list(rows.shape)}
    (folder / "job.json").write_text(json.dumps(plain))


def _rows(sim: Simulator, index: int, client: int) -> np.ndarray:
    """(steps, batch) rows that a client trains on in a round: those that the simulator draws."""
    # Imported here: another checkout of fedpick may not have these modules, and does not need them.
    from fedpick.sim import hashing
    from fedpick.sim.batches import batch_positions

    assert sim.local.steps is not None and sim.local.batch_size is not None
    key = hashing.fold(hashing.key_from(sim.seed, int(Purpose.BATCHES), index), client)
    step = np.arange(sim.local.steps, dtype=np.uint32)[:, None]
    size = np.array([sim.examples.sizes[client]], np.uint32)
    positions = batch_positions(sim.local, key, step, size, sim.local.batch_size)[0]
    return np.asarray(sim.examples.starts[client] + positions)
