"""The client side of the job in Flower, in a module that Ray's workers import, so that they keep the compiled step."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from benchmarks.speed.jobs import flat
from benchmarks.speed.peers.step import Stepper, nested
from benchmarks.speed.peers.turns import Work
from fedpick.sim.jax_engine.setup import require_jax

__all__ = ["FOLDER", "app"]

FOLDER = "FEDPICK_BENCH_FOLDER"
app = ClientApp()


@lru_cache(maxsize=1)
def prepared() -> tuple[Any, ...]:
    """What a worker keeps between messages."""
    work = Work(os.environ[FOLDER])
    put = require_jax().device_put
    x, y = put(work.array("x")), put(work.array("y"))
    return Stepper(work.job), x, y, work.array("batches")


@app.train()
def train(message: Message, context: Context) -> Message:
    """The steps of one client in one round."""
    stepper, x, y, batches = prepared()
    config = message.content["config"]
    # Flower's records hold one of many types each; these were written by run_flower.py.
    index, place = int(config["round"]), int(config["place"])  # type: ignore[arg-type]
    arrays: Any = message.content["arrays"]
    params = nested({name: array.numpy() for name, array in arrays.items()})
    for rows in batches[index, place]:
        params = stepper.step(params, x, y, rows)
    content = {
        "arrays": ArrayRecord({name: Array(value) for name, value in flat(params).items()}),
        "metrics": MetricRecord({"weight": float(config["weight"])}),  # type: ignore[arg-type]  # as above
    }
    # Records of two kinds: the dict's type is not exactly the one that RecordDict names.
    return Message(RecordDict(content), reply_to=message)  # type: ignore[arg-type]
