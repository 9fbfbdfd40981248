"""FedAvg with the policy herd."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import fedpick
from fedpick.flower import with_policy
from plainapp import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings, rounds, losses = context.run_config, [], []
    strategy = with_policy(
        FedAvg(fraction_evaluate=0.0),
        fedpick.policies.get("herd"),
        budget=int(settings["budget"]),
        min_clients=int(settings["min-clients"]),
        wait=float(settings["wait"]),
        probe_timeout=240.0,  # the first query waits for a quarter of it, on a busy machine
        progress=lambda report: rounds.append(asdict(report)) if report.over else None,
    )
    x, y = (np.concatenate(parts) for parts in zip(*map(task.examples, range(task.LABELS)), strict=True))

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        losses.append(task.loss({name: array.numpy() for name, array in arrays.items()}, x, y))
        return MetricRecord({"loss": losses[-1]})

    zeros = {"weight": np.zeros((task.LABELS, task.LABELS)), "bias": np.zeros(task.LABELS)}
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord({name: Array(value) for name, value in zeros.items()}),
        num_rounds=int(settings["num-server-rounds"]),
        evaluate_fn=evaluate,
    )
    known = [record.diagnostics["known"] for record in strategy.history]
    sketches = strategy.session.state.sketches.shape
    partial = Path(settings["output"]).with_suffix(".partial")
    partial.write_text(json.dumps({"rounds": rounds, "losses": losses, "known": known, "sketches": sketches}))
    partial.replace(settings["output"])
