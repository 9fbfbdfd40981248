"""A grid without a network: nodes are functions from a message to a reply."""

from __future__ import annotations

import io
import uuid
import zipfile
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

import fedpick
from fedpick.flower import answer_probes

try:  # Flower refuses to make messages outside a run; releases before 1.41 have no such identity
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
except ImportError:
    pass

NAN, INFINITY = float("nan"), float("inf")
UNIFORM = fedpick.policies.get("uniform")


class FakeNode:
    """A client whose training moves every weight towards its own target, and whose loss is the squared distance."""

    def __init__(self, partition: int, num_examples: int = 10, *, reports_partition: bool = True) -> None:
        self.partition = partition
        self.num_examples = num_examples
        self.target = float(partition)
        self.mode = "good"  # or "late", "error", "gone", "nan"
        self.trained = 0
        self.eval_loss = lambda message, context: 1.0
        config: dict[str, Any] = {"partition-id": partition} if reports_partition else {}
        self.context = Context(run_id=1, node_id=0, node_config=config, state=RecordDict(), run_config={})
        self.app = ClientApp()
        answer_probes(self.app, loss=self.loss, num_examples=num_examples)
        self.app.train()(self.train)
        self.app.evaluate()(self.evaluate)

    def loss(self, arrays: ArrayRecord, context: Context, batch_size: int | None) -> float:
        if self.mode == "nan":
            return float("nan")
        return float(np.mean((arrays["w"].numpy() - self.target) ** 2)) + (0.0 if batch_size is None else 0.5)

    def train(self, message: Message, context: Context) -> Message:
        self.trained += 1
        weights = message.content["arrays"]["w"].numpy()
        new = weights + 0.5 * (self.target - weights)
        if self.mode == "nan":
            new = new * np.nan
        metrics = MetricRecord(
            {"num-examples": self.num_examples, "train_loss": float(np.mean((weights - self.target) ** 2))}
        )
        return Message(RecordDict({"arrays": ArrayRecord({"w": Array(new)}), "metrics": metrics}), reply_to=message)

    def evaluate(self, message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": self.num_examples, "eval_loss": self.eval_loss(message, context)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)


class FakeGrid(Grid):
    """Delivers messages to fake nodes at once. A late node answers when somebody pulls after its deadline passed."""

    def __init__(self, nodes: dict[int, FakeNode]) -> None:
        self.nodes = nodes
        self.sent: list[Message] = []
        self.waiting: dict[str, Message] = {}
        self.on_send: Callable[[Message], None] = lambda message: None

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [node_id for node_id, node in self.nodes.items() if node.mode != "gone"]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        identities = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid.uuid4())
            identities.append(message.metadata.message_id)
            self.sent.append(message)
            self.on_send(message)
            self.waiting[message.metadata.message_id] = message
        return identities

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for identity in list(message_ids):
            message = self.waiting.get(identity)
            if message is None:
                continue
            node = self.nodes[message.metadata.dst_node_id]
            if node.mode == "late":
                continue
            del self.waiting[identity]
            replies.append(self._reply(message, node))
        return replies

    def _reply(self, message: Message, node: FakeNode) -> Message:
        if node.mode == "error":
            reply = Message(Error(code=5, reason="node gone"), reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = 1  # as the SuperLink does
            return reply
        return node.app(message, node.context)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def kinds(self) -> list[str]:
        return [message.metadata.message_type for message in self.sent]


def federation(count: int = 12, **options) -> FakeGrid:
    # Node ids in an order that has nothing to do with the partitions, as in Flower's simulation.
    return FakeGrid({(7919 * (i + 3)) % 10007: FakeNode(i, 10 + i, **options) for i in range(count)})


def start(strategy, grid, rounds=4, width=3):
    return strategy.start(grid=grid, initial_arrays=ArrayRecord({"w": Array(np.zeros(width))}), num_rounds=rounds)


def alter(node: FakeNode, kind: str, change) -> None:
    """Let `change` have its way with the content of a node's replies: "describe", "loss", "train" or "evaluate"."""
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
        alter(node, "describe", lambda content, row=row: content["answer"].update({"label-histogram": row}))
    return grid


def of_bytes(data: bytes, stype: str = "numpy.ndarray") -> Array:
    return Array(dtype="float64", shape=(3,), stype=stype, data=data)


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


def with_metric(name, value):
    return lambda content: content["metrics"].update({name: value})


def errors_become_replies(app):
    """As SuperNodes do with an exception in the app."""

    def call(message, context):
        try:
            return app(message, context)
        except Exception as error:
            return Message(Error(code=2, reason=str(error)), reply_to=message)

    return call


def unaware(grid: FakeGrid) -> FakeGrid:
    """The same clients with a ClientApp that knows nothing of fedpick, and evaluates the model it gets."""
    for node in grid.nodes.values():
        app = ClientApp()
        app.train()(node.train)
        app.evaluate()(node.evaluate)
        node.eval_loss = lambda message, context, node=node: node.loss(message.content["arrays"], context, None)
        node.app = errors_become_replies(app)
    return grid


def describe_queries(grid) -> list[int]:
    return [
        message.metadata.dst_node_id
        for message in grid.sent
        if message.metadata.message_type == "query.fedpick" and message.content["config"]["kind"] == "describe"
    ]
