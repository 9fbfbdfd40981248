"""A trace recorded by the simulator's driver, replayed through the Flower adapter, gives the same selections."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed: pip install 'fedpick[sim]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

import fedpick
from fedpick import availability, data
from fedpick.adapter.settings import REPORTS
from fedpick.core.registry import BUILT_IN
from fedpick.flower import with_policy
from fedpick.sim import LocalTraining, Simulator, simulate
from fedpick.sim.faults import Faults
from tests.flower.fake_grid import FakeGrid

ROUNDS, BUDGET, CLIENTS = 24, 4, 14


@dataclass
class Trace:
    """What happened in the simulator, round by round."""

    masks: list[np.ndarray] = field(default_factory=list)
    answers: list[list[tuple[np.ndarray, np.ndarray]]] = field(default_factory=list)
    outcomes: list = field(default_factory=list)
    selections: list = field(default_factory=list)

    @property
    def width(self) -> int:
        return max(1, *(outcome.sketch.shape[1] for outcome in self.outcomes))


@pytest.fixture(scope="module")
def federation():
    return data.partition(data.load("synthetic", num_clients=CLIENTS), "natural", split=(0.8, 0.1, 0.1))


def record(federation, policy) -> Trace:
    simulator = Simulator(
        federation, "logistic", local=LocalTraining(lr=0.05, steps=3, batch_size=16), seed=2, faults=Faults(dropout=0.2)
    )
    trace, measure = Trace(), simulator.measure

    def noted(probe):
        values = measure(probe)
        trace.answers[-1].append((probe.clients, values))
        return values

    simulator.measure = noted
    masks = availability.get("homogeneous", beta=0.4).start(simulator.clients, seed=1)
    session = fedpick.Session(policy, simulator.clients, 5, provides=simulator.provides)
    trace.answers.append([])
    for item in simulate(simulator, session, rounds=ROUNDS, budget=BUDGET, availability=masks, evaluate_every=None):
        trace.masks.append(item.available)
        trace.outcomes.append(item.outcome)
        trace.selections.append(item.selection)
        trace.answers.append([])
    return trace


class ReplayGrid(FakeGrid):
    """Nodes that answer what the trace says; node ids run backwards, so that only keys can match them."""

    def __init__(self, trace: Trace, clients: fedpick.Clients) -> None:
        super().__init__({})
        self.trace, self.clients = trace, clients
        self.round, self.probe = -1, 0

    def client(self, message: Message) -> int:
        return 5000 - message.metadata.dst_node_id

    def get_node_ids(self) -> Iterable[int]:
        mask = np.ones(CLIENTS, bool) if self.round < 0 else self.trace.masks[self.round]
        return [5000 - int(client) for client in np.flatnonzero(mask)]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        messages = [self.waiting.pop(identity) for identity in list(message_ids)]
        if messages[0].metadata.message_type == "train":  # a trial: what it gives is in the next answers
            return [self.trained(message) for message in messages]
        if messages[0].content["config"]["kind"] == "describe":
            return [self.described(message) for message in messages]
        asked, values = self.trace.answers[self.round][self.probe]
        self.probe += 1
        known = dict(zip(asked.tolist(), values.tolist(), strict=True))
        return [
            Message(RecordDict({"answer": MetricRecord({"value": known[self.client(message)]})}), reply_to=message)
            for message in messages
        ]

    def described(self, message: Message) -> Message:
        client = self.client(message)
        facts = {
            "partition-id": client,
            "num-examples": int(self.clients.num_examples[client]),
            "label-histogram": self.clients.label_histogram[client].tolist(),
        }
        return Message(RecordDict({"answer": MetricRecord(facts)}), reply_to=message)

    def trained(self, message: Message, update: np.ndarray | None = None, **metrics: float) -> Message:
        update = np.ones(self.trace.width) if update is None else update
        numbers = {"num-examples": int(self.clients.num_examples[self.client(message)]), **metrics}
        content = {"arrays": ArrayRecord({"w": Array(update)}), "metrics": MetricRecord(numbers)}
        return Message(RecordDict(content), reply_to=message)

    def outcome(self, message: Message) -> Message:
        outcome = self.trace.outcomes[self.round]
        row = int(np.flatnonzero(outcome.clients == self.client(message))[0])
        if not outcome.completed[row]:
            return Message(Error(code=2, reason="dropped out"), reply_to=message)
        # The model that was sent is 0, so this update has the sketch, or the norm, that the simulator reported.
        update = outcome.sketch[row] if outcome.sketch.size else np.nan_to_num(outcome.update_norm[[row]], nan=1.0)
        reported = {name: key for name, key in REPORTS.items() if hasattr(outcome, name)}
        reports = {key: float(getattr(outcome, name)[row]) for name, key in reported.items()}
        return self.trained(message, update, **reports)


@pytest.mark.filterwarnings("ignore:The guard bounds the sizes")  # of the largest client
@pytest.mark.parametrize("name", BUILT_IN)
def test_every_policy_decides_the_same_in_simulation_and_under_flower(federation, name):
    short = {"warmup": 4, "interval": 4, "dimension": 3} if name in ("fedcor", "fedgp") else {}
    policy = fedpick.policies.get(name, **short)
    trace = record(federation, policy)
    grid = ReplayGrid(trace, federation.clients())
    strategy = with_policy(FedAvg(), policy, budget=BUDGET, seed=5, wait=0.0)
    strategy._membership.refresh(grid)  # everybody has been seen once, as in the simulator
    for round in range(ROUNDS):
        grid.round, grid.probe = round, 0
        arrays = ArrayRecord({"w": Array(np.zeros(trace.width))})
        messages = list(strategy.configure_train(round + 1, arrays, ConfigRecord(), grid))
        expected = trace.selections[round]
        got = strategy.history[-1]
        assert got.clients.tolist() == expected.clients.tolist(), f"round {round}"
        if expected.weights is not None:
            np.testing.assert_array_equal(got.weights, expected.weights)
        assert grid.probe == len(trace.answers[round])
        list(grid.push_messages(messages))
        strategy.aggregate_train(round + 1, [grid.outcome(message) for message in messages])
    assert sum(len(selection.clients) for selection in trace.selections) > ROUNDS
