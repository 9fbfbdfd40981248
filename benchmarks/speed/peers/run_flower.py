"""Flower's simulation engine (Ray, one worker per core) with its federated averaging, on the given rows.

Only the choice of clients is not Flower's. The server measures the losses; clients only take their steps.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterable
from typing import Any


def _nodes(grid: Any, count: int) -> list[int]:
    """The nodes in order. Wait until there are `count`: in the first round some may still be connecting."""
    for _ in range(6000):
        if len(nodes := sorted(grid.get_node_ids())) >= count:
            return nodes
        time.sleep(0.01)
    raise RuntimeError(f"Only {len(nodes)} of {count} nodes connected within a minute.")


def _strategy(work: Any) -> Any:
    from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import FedAvg

    weights = work.array("weights")

    class GivenCohort(FedAvg):
        """Federated averaging with a given cohort: each message names the client whose steps to take."""

        def configure_train(
            self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
        ) -> Iterable[Message]:
            """One message per member of the cohort."""
            index = server_round - 1
            nodes = _nodes(grid, len(weights[index]))
            messages = []
            for place, weight in enumerate(weights[index]):
                settings = ConfigRecord({"round": index, "place": place, "weight": float(weight)})
                content = RecordDict({"arrays": arrays, "config": settings})
                messages.append(Message(content, dst_node_id=nodes[place], message_type=MessageType.TRAIN))
            return messages

    return GivenCohort(fraction_evaluate=0.0, weighted_by_key="weight")


def main(folder: str) -> None:
    """Take turns until there are none left."""
    from benchmarks.speed.peers.turns import Turns, Work

    turns = Turns()
    os.environ.update(
        FEDPICK_BENCH_FOLDER=folder,
        FLWR_TELEMETRY_ENABLED="0",
        FLWR_DISABLE_UPDATE_CHECK="1",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    )
    try:
        # Flower imports Ray later, in another process: notice now if it is missing.
        import ray  # noqa: F401
        from flwr.app import Array, ArrayRecord, Context
        from flwr.serverapp import Grid, ServerApp
        from flwr.simulation import run_simulation
    except ImportError as error:
        turns.missing(error)
        return
    from benchmarks.speed.peers import flower_client
    from benchmarks.speed.peers.step import Stepper, nested
    from fedpick.sim.jax_engine.setup import require_jax

    logging.getLogger("flwr").setLevel(logging.WARNING)
    work = Work(folder)
    stepper, put = Stepper(work.job), require_jax().device_put
    x, y, test_x, test_y = (put(work.array(name)) for name in ("x", "y", "test_x", "test_y"))
    app = ServerApp()

    class Enough(Exception):
        """The last turn is over."""

    def look(server_round: int, arrays: ArrayRecord) -> None:
        if server_round == 0:
            going = turns.begin()
        else:
            accuracy, params = None, nested({name: array.numpy() for name, array in arrays.items()})
            if work.evaluated(server_round - 1):
                accuracy = float(stepper.accuracy(params, test_x, test_y))
            if work.measured(server_round - 1):
                float(stepper.loss(params, x, y))
            going = turns.done(accuracy)
        if not going:
            work.finish("flower", {name: array.numpy() for name, array in arrays.items()})
            raise Enough

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        start = ArrayRecord({name: Array(value) for name, value in work.initial().items()})
        try:
            _strategy(work).start(grid=grid, initial_arrays=start, num_rounds=work.job["rounds"] + 1, evaluate_fn=look)
        except Enough:
            return

    run_simulation(
        server_app=app,
        client_app=flower_client.app,
        num_supernodes=work.job["num_clients"],
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0}},
    )


if __name__ == "__main__":
    main(sys.argv[1])
