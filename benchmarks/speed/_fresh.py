"""What is measured in a process of its own: the start of a run, and the memory of a million clients.

python -m benchmarks.speed._fresh start|million prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from fedpick import data, policies
from fedpick.core.session import Session
from fedpick.sim.examples import aligned, frozen

__all__ = ["first_round", "made_up", "million"]


def first_round() -> dict[str, Any]:
    """Load J1's data, build its simulator and train one round."""
    from benchmarks.speed import _jobs

    job = _jobs.find("j1")
    sim = _jobs.simulator(job, _jobs.federation(job))
    session = _jobs.session(sim)
    sim.train(session.ask(budget=job.cohort))
    # The time of day: the process that started this one has no other clock in common with it.
    trained = time.time()
    sim.evaluate()
    sim.client_losses()
    return {"trained_at": trained, "evaluated_at": time.time()}


def made_up(num_clients: int, per_client: int, width: int) -> data.Federation:
    """Clients with `per_client` random examples each, in memory that JAX can share."""
    count = num_clients * per_client
    rng = np.random.Generator(np.random.PCG64(0))
    x, y = aligned((count, width), np.float32), aligned((count,), np.int32)
    rng.standard_normal(dtype=np.float32, out=x)
    y[:] = rng.integers(0, 10, count, dtype=np.int32)
    x, y = frozen(x), frozen(y)
    ends = np.arange(1, num_clients + 1, dtype=np.int64) * per_client
    return data.Federation(
        name="made-up",
        partition="natural",
        x=x,
        y=y,
        indices=np.arange(count, dtype=np.int32),
        offsets=np.append(0, ends),
        train_ends=ends,
        validation_ends=ends,
        test_x=x[:1000],
        test_y=y[:1000],
        num_classes=10,
    )


def _status(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = [line for line in status.read_text().splitlines() if line.startswith(field + ":")]
    return int(found[0].split()[1]) * 1024


def million(num_clients: int = 1_000_000, per_client: int = 10, width: int = 20, rounds: int = 5) -> dict[str, Any]:
    """A million clients with ten million examples in total: memory above the interpreter, seconds per round."""
    from fedpick.sim import LocalTraining, Simulator

    before = _status("VmRSS")
    dealt = made_up(num_clients, per_client, width)
    local = LocalTraining(lr=0.1, steps=5, batch_size=per_client)
    sim = Simulator(dealt, "logistic", local=local)
    session = Session(policies.get("uniform"), sim.clients, 0)
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        session.tell(sim.train(session.ask(budget=100)))
        seconds.append(time.perf_counter() - start)
    training = _status("VmHWM") - before
    sim.client_losses()
    return {
        "clients": num_clients,
        "examples": num_clients * per_client,
        "data_mebibytes": (dealt.x.nbytes + dealt.y.nbytes) / 2**20,
        "training_mebibytes": training / 2**20,
        "with_losses_mebibytes": (_status("VmHWM") - before) / 2**20,
        "round_seconds": float(np.median(seconds[1:])),
    }


if __name__ == "__main__":
    result = {"start": first_round, "million": million}[sys.argv[1]]()
    os.write(1, (json.dumps(result) + "\n").encode())
