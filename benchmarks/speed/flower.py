"""What the Flower adapter adds to a round of plain FedAvg, in turns, on nodes without a network."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import typer
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy

import fedpick
from fedpick.flower import with_policy

__all__ = ["command"]


class _InstantGrid(Grid):
    """Nodes that answer a training after `seconds`, all at once, with the model that they got."""

    def __init__(self, nodes: int, seconds: float) -> None:
        self.nodes, self.seconds = nodes, seconds
        self.trained: list[tuple[float, float]] = []
        """When each training began, and the processor's time until then."""
        self._sent: dict[str, Message] = {}

    def set_run(self, run: Any) -> None:
        """Not needed."""

    @property
    def run(self) -> Any:
        """Not needed."""
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Not needed."""
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        """All nodes."""
        return range(1, self.nodes + 1)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Keep the messages until they are pulled."""
        identities, sent = [], list(messages)
        if sent and sent[0].metadata.message_type == "train":
            self.trained.append((time.perf_counter(), time.process_time()))
        for message in sent:
            message.metadata.__dict__["_message_id"] = f"{len(self.trained)}-{message.metadata.dst_node_id}"
            identities.append(message.metadata.message_id)
            self._sent[message.metadata.message_id] = message
        return identities

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Answer, once the time that training takes is over."""
        asked = [self._sent[identity] for identity in message_ids]
        training = any(message.metadata.message_type == "train" for message in asked)
        if training and time.perf_counter() < self.trained[-1][0] + self.seconds:
            return []
        return [self._reply(self._sent.pop(message.metadata.message_id)) for message in asked]

    def _reply(self, message: Message) -> Message:
        if message.metadata.message_type != "train":
            return Message(RecordDict({"answer": MetricRecord({"num-examples": 10})}), reply_to=message)
        (model,) = message.content.array_records.values()
        arrays = ArrayRecord({name: Array(array.numpy()) for name, array in model.items()})
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 10})}), reply_to=message)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Exchange without a look too many, unlike Flower's grids, which look every 0.1 or 3 s."""
        identities = list(self.push_messages(messages))
        while identities and not (replies := list(self.pull_messages(identities))):
            time.sleep(max(self.trained[-1][0] + self.seconds - time.perf_counter(), 0.0))
        return replies if identities else []


def _seconds_per_round(
    strategy: Strategy, nodes: int, parameters: int, rounds: int, seconds: float
) -> tuple[float, float]:
    """The median time from one training to the next: on the wall, and of the processor."""
    grid = _InstantGrid(nodes, seconds)
    # A model is a few arrays, of which one is large.
    arrays = ArrayRecord({"weight": Array(np.zeros(parameters, np.float32)), "bias": Array(np.zeros(10, np.float32))})
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds + 2, timeout=60.0)
    wall, processor = np.median(np.diff(grid.trained, axis=0)[1:], axis=0)  # the first round greets the nodes
    return float(wall), float(processor)


def command(
    nodes: int = typer.Option(20, help="How many nodes there are."),
    cohort: int = typer.Option(10, help="How many of them train in a round."),
    parameters: int = typer.Option(1_000, help="The size of the model."),
    train_seconds: float = typer.Option(0.2, help="How long training takes, on all nodes at once."),
    rounds: int = typer.Option(20, help="Rounds of each turn."),
    turns: int = typer.Option(5, help="How often the two take turns."),
    policy: str = typer.Option("uniform", help="The policy."),
) -> None:
    """What the Flower adapter adds to a round of FedAvg, in turns."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    try:  # Flower refuses to make messages outside a run; releases before 1.41 have no such identity
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    except ImportError:
        pass
    times: dict[str, list[tuple[float, float]]] = {"FedAvg": [], policy: []}
    for _ in range(turns):
        plain = FedAvg(fraction_train=cohort / nodes, fraction_evaluate=0.0)
        wrapped = with_policy(FedAvg(fraction_evaluate=0.0), fedpick.policies.get(policy), budget=cohort)
        for name, strategy in (("FedAvg", plain), (policy, wrapped)):
            times[name].append(_seconds_per_round(strategy, nodes, parameters, rounds, train_seconds))
    for place, clock in enumerate(("wall", "processor")):
        before, after = (1000 * np.array([turn[place] for turn in times[name]]) for name in ("FedAvg", policy))
        print(f"{clock}: FedAvg {before.round(1)}, {policy} {after.round(1)} ms per round in turns")
        added = float(np.median(after - before))
        print(f"{clock}: added {added:.1f} ms, {100 * added / float(np.median(before)):.1f} %")
