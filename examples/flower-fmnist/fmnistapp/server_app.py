"""The server: FedAvg, with the cohorts chosen by the policy that the run's config names."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import fedpick
from fedpick.flower import RoundReport, with_policy
from fmnistapp import model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings = context.run_config
    dataset, seed = str(settings["dataset"]), int(settings["seed"])
    count = int(settings["num-partitions"])
    x, y = model.test_examples(dataset, count)
    policy = fedpick.policies.get(str(settings["policy"]), **parameters(str(settings["policy-parameters"])))
    record = Record(str(settings["output"]))
    strategy = with_policy(
        FedAvg(fraction_evaluate=0.0),
        policy,
        probe=str(settings["probe"]),
        budget=int(settings["budget"]),
        seed=seed,
        state=str(settings["state"]) or None,
        audit=str(settings["audit"]) or None,
        min_clients=int(settings["min-clients"]),
        wait=float(settings["wait"]),
        probe_timeout=float(settings["probe-timeout"]),
        train_timeout=float(settings["train-timeout"]),
        quorum=float(settings["quorum"]),
        overcommit=float(settings["overcommit"]),
        progress=record.note_round,
    )

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        loss, accuracy = model.loss_and_accuracy({name: array.numpy() for name, array in arrays.items()}, x, y)
        record.note_accuracy(accuracy)
        return MetricRecord({"test_loss": loss, "test_accuracy": accuracy})

    start = model.initial(x.shape[1], model.num_classes(dataset, count), seed)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord({name: Array(value) for name, value in start.items()}),
        num_rounds=int(settings["num-server-rounds"]),
        evaluate_fn=evaluate,
    )


def parameters(text: str) -> dict[str, object]:
    """Hyper-parameters from "name=value,name=value"; a value that is no number, true, false or null is a string."""
    found: dict[str, object] = {}
    for pair in filter(None, text.split(",")):
        name, _, value = pair.partition("=")
        try:
            found[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            found[name.strip()] = value.strip()
    return found


class Record:
    """What happened so far, in a JSON file that is complete at every moment."""

    def __init__(self, output: str) -> None:
        self.output = output
        self.rounds: list[dict[str, object]] = []
        self.running: dict[str, object] | None = None
        self.accuracy: list[float] = []

    def note_round(self, report: RoundReport) -> None:
        if report.over:
            self.rounds.append(asdict(report))
            self.running = None
        else:
            self.running = {**asdict(report), "chosen_at": time.time()}
        self.write()

    def note_accuracy(self, accuracy: float) -> None:
        self.accuracy.append(accuracy)
        self.write()

    def write(self) -> None:
        if not self.output:
            return
        content = {
            "chosen": [report["cohort"] for report in self.rounds],
            "accuracy": self.accuracy,
            "running": self.running,
            "rounds": self.rounds,
        }
        partial = Path(self.output).with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1))
        partial.replace(self.output)
