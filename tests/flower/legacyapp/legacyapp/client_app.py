"""A NumPyClient that knows nothing of fedpick but for its properties."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.client import ClientApp, NumPyClient
from flwr.common import Context


class Client(NumPyClient):
    def __init__(self, partition: int, seconds: float, marks: str) -> None:
        self.partition, self.seconds, self.marks = partition, seconds, Path(marks)

    def get_properties(self, config):
        return {"partition-id": self.partition, "num-examples": 10 + self.partition}

    def fit(self, parameters, config):
        mark = self.marks / f"training-{self.partition}.json"
        partial = mark.with_suffix(".partial")
        partial.write_text(json.dumps({"since": time.time()}))
        partial.replace(mark)
        time.sleep(self.seconds)
        mark.unlink()
        new = [array + 0.5 * (self.partition - array) for array in parameters]
        return new, 10 + self.partition, {"train_loss": 1.0}

    def evaluate(self, parameters, config):
        return float(np.mean((parameters[0] - self.partition) ** 2)), 10 + self.partition, {}


def client_fn(context: Context):
    options = context.run_config
    return Client(int(context.node_config["partition-id"]), float(options["seconds"]), options["marks"]).to_client()


app = ClientApp(client_fn)
