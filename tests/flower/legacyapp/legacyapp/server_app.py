"""server_fn with a strategy of its own, as in Flower's baselines, and a policy."""

import json
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
from flwr.common import Context, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg

import fedpick
from fedpick.flower.legacy import server_of, with_policy


class Own(FedAvg):
    """A baseline's strategy: it counts what it aggregates."""

    def aggregate_fit(self, server_round, results, failures):
        print(f"Own aggregates {len(results)} results in round {server_round}")
        return super().aggregate_fit(server_round, results, failures)


def server_fn(context: Context) -> ServerAppComponents:
    options, rounds = context.run_config, []

    def note(report) -> None:
        if report.over:
            rounds.append(asdict(report))
        running = None if report.over else {**asdict(report), "chosen_at": time.time()}
        partial = Path(options["output"]).with_suffix(".partial")
        partial.write_text(json.dumps({"rounds": rounds, "running": running, "accuracy": [0, *rounds]}))
        partial.replace(options["output"])

    strategy = with_policy(
        Own(initial_parameters=ndarrays_to_parameters([np.zeros(3)]), fraction_evaluate=0.0),
        fedpick.policies.get("pow-d", num_candidates=4),
        budget=int(options["budget"]),
        seed=7,
        min_clients=int(options["min-clients"]),
        wait=120.0,
        train_timeout=float(options["train-timeout"]),
        state=options["state"],
        progress=note,
    )
    return ServerAppComponents(
        server=server_of(strategy), config=ServerConfig(num_rounds=int(options["num-server-rounds"]))
    )


app = ServerApp(server_fn=server_fn)
