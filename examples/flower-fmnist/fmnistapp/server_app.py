"""The server: FedAvg, with the cohorts chosen by the policy that the run's config names."""

from __future__ import annotations

import json
from pathlib import Path

from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import fedpick
from fedpick.flower import with_policy
from fmnistapp import model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings = context.run_config
    dataset, seed = str(settings["dataset"]), int(settings["seed"])
    x, y = model.test_examples(dataset, int(settings["num-partitions"]))
    policy = fedpick.policies.get(str(settings["policy"]), **parameters(str(settings["policy-parameters"])))
    strategy = with_policy(
        FedAvg(fraction_evaluate=0.0),
        policy,
        budget=int(settings["budget"]),
        seed=seed,
        state=str(settings["state"]) or None,
        min_clients=int(settings["min-clients"]),
        wait=float(settings["wait"]),
        probe_timeout=float(settings["probe-timeout"]),
        train_timeout=float(settings["train-timeout"]),
    )
    accuracies: list[float] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        loss, accuracy = model.loss_and_accuracy({name: array.numpy() for name, array in arrays.items()}, x, y)
        accuracies.append(accuracy)
        record_progress(str(settings["output"]), strategy, accuracies)
        return MetricRecord({"test_loss": loss, "test_accuracy": accuracy})

    start = model.initial(x.shape[1], int(y.max()) + 1, seed)
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


def record_progress(output: str, strategy, accuracies: list[float]) -> None:
    if not output:
        return
    keys = strategy.roster.keys
    chosen = [[keys[int(client)] for client in selection.clients] for selection in strategy.history]
    first = (strategy.session.round if strategy.session else 0) - len(chosen)
    text = json.dumps({"first_round": first, "chosen": chosen, "accuracy": accuracies})
    partial = Path(output).with_suffix(".partial")
    partial.write_text(text)
    partial.replace(output)
