"""FedAvg over registered clinics. One of them is excluded by its name."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import fedpick
from fedpick.flower import with_policy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings, rounds = context.run_config, []
    strategy = with_policy(
        FedAvg(fraction_evaluate=0.0),
        fedpick.policies.get("uniform"),
        exclude=["name:clinic-c"],
        groups={"name:clinic-a": "north", "name:clinic-b": "south", "partition:0": "claimed"},
        state=settings["state"],
        audit=settings["audit"],
        min_clients=int(settings["min-clients"]),
        wait=float(settings["wait"]),
        probe_timeout=240.0,  # the first query waits for a quarter of it, on a busy machine
        progress=lambda report: rounds.append(asdict(report)) if report.over else None,
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord({"w": Array(np.zeros(3))}),
        num_rounds=int(settings["num-server-rounds"]),
    )
    found = {
        "rounds": rounds,
        "standings": [asdict(row) for row in strategy.standings],
        "groups": dict(zip(strategy.roster.keys, strategy.roster.groups, strict=True)),
        # What the SuperLink tells a ServerApp of its nodes.
        "nodes": [
            {"id": info.node_id, "name": info.name, "key": info.public_key.decode(), "since": info.last_activated_at}
            for info in grid.get_nodes()
        ],
    }
    partial = Path(settings["output"]).with_suffix(".partial")
    partial.write_text(json.dumps(found))
    partial.replace(settings["output"])
