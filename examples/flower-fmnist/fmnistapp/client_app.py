"""The client: trains, evaluates, and answers what a policy asks."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedpick.flower import answer_probes
from fmnistapp import model

app = ClientApp()


def local_data(context: Context):
    count = int(context.node_config.get("num-partitions", context.run_config["num-partitions"]))
    return model.local_examples(str(context.run_config["dataset"]), int(context.node_config["partition-id"]), count)


def params_of(arrays: ArrayRecord) -> model.Params:
    return {name: array.numpy() for name, array in arrays.items()}


def loss(arrays: ArrayRecord, context: Context, batch_size: int | None) -> float:
    x, y = local_data(context)
    if batch_size is not None:
        rows = np.random.default_rng().choice(len(y), size=min(batch_size, len(y)), replace=False)
        x, y = x[rows], y[rows]
    return model.loss_and_accuracy(params_of(arrays), x, y)[0]


# Policies that query clients, such as Power-of-Choice and FedCor, need this.
answer_probes(app, loss=loss, num_examples=lambda context: len(local_data(context)[1]))


@contextlib.contextmanager
def mark(folder: str, partition: int) -> Iterator[None]:
    """A file that is there while this client trains, and stays if it is killed meanwhile."""
    if not folder:
        yield
        return
    file = Path(folder) / f"training-{partition}.json"
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps({"since": time.time()}))
    partial.replace(file)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


@app.train()
def train(message: Message, context: Context) -> Message:
    with mark(str(context.run_config["marks"]), int(context.node_config["partition-id"])):
        return local_training(message, context)


def local_training(message: Message, context: Context) -> Message:
    x, y = local_data(context)
    settings = context.run_config
    if int(settings["slow-partition"]) in (-1, int(context.node_config["partition-id"])):
        time.sleep(float(settings["slow-seconds"]))
    round_seed = [
        int(settings["seed"]),
        int(message.content["config"]["server-round"]),
        int(context.node_config["partition-id"]),
    ]
    params, train_loss = model.train(
        params_of(message.content["arrays"]),
        x,
        y,
        steps=int(settings["local-steps"]),
        batch_size=int(settings["batch-size"]),
        learning_rate=float(settings["learning-rate"]),
        rng=np.random.default_rng(round_seed),
    )
    content = {
        "arrays": ArrayRecord({name: Array(value) for name, value in params.items()}),
        "metrics": MetricRecord({"num-examples": len(y), "train_loss": train_loss}),
    }
    return Message(RecordDict(content), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    x, y = local_data(context)
    value, accuracy = model.loss_and_accuracy(params_of(message.content["arrays"]), x, y)
    metrics = MetricRecord({"num-examples": len(y), "eval_loss": value, "eval_acc": accuracy})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
