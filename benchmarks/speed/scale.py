"""What must not depend on the size of a federation: the cost of a round, the start of a run, the memory.

`python -m benchmarks.speed.scale start|million` measures in a fresh process and prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speed import jobs
from fedpick import data, policies
from fedpick.core.errors import InvalidInput
from fedpick.core.session import Session
from fedpick.sim import LocalTraining, Simulator
from fedpick.sim.examples import aligned, frozen

__all__ = ["MEASUREMENTS", "made_up"]

COMPILED = "compiled"
"""The folder of compiled programs within the cache."""


def first_round() -> dict[str, Any]:
    """Load the data of J1, build its simulator and train one round."""
    job = jobs.find("j1")
    sim = jobs.simulator(job, jobs.federation(job))
    session = jobs.session(sim)
    sim.train(session.ask(budget=job.cohort))
    # Wall-clock time: the parent process reads the same clock.
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
    """Memory of this process in bytes: VmRSS now, VmHWM at its peak."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = [line for line in status.read_text().splitlines() if line.startswith(field + ":")]
    return int(found[0].split()[1]) * 1024


def measure_million(
    num_clients: int = 1_000_000, per_client: int = 10, width: int = 20, rounds: int = 5
) -> dict[str, Any]:
    """A million clients with ten million examples in total: memory above the interpreter, seconds per round."""
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


def unselected(few: int = 100, many: int = 100_000, per_client: int = 10, repeats: int = 15) -> dict[str, Any]:
    """Train the same cohort out of few and out of many clients, in turns.

    Every client has equally many examples: the two differ only in the clients that are not selected.
    """
    sims, sessions = [], []
    for num_clients in (few, many):
        local = LocalTraining(lr=0.1, steps=20, batch_size=10, sampling="replacement")
        sims.append(Simulator(made_up(num_clients, per_client, 60), "mlp", local=local))
        sessions.append(Session(policies.get("uniform"), sims[-1].clients, 0))
    training, whole = np.empty((2, repeats, 2))
    for repeat in range(-2, repeats):  # do not count the first two
        for which, (sim, session) in enumerate(zip(sims, sessions, strict=True)):
            before, start = sim.timings.train, time.perf_counter()
            for _ in range(10):
                session.tell(sim.train(session.ask(budget=50)))
            if repeat >= 0:
                whole[repeat, which] = (time.perf_counter() - start) / 10
                training[repeat, which] = (sim.timings.train - before) / 10
    return {
        "few": few,
        "repeats": repeats,
        "many": many,
        "train_seconds_few": float(np.median(training[:, 0])),
        "train_seconds_many": float(np.median(training[:, 1])),
        "train_ratio": float(np.median(training[:, 1] / training[:, 0])),
        "round_seconds_few": float(np.median(whole[:, 0])),
        "round_seconds_many": float(np.median(whole[:, 1])),
        "round_ratio": float(np.median(whole[:, 1] / whole[:, 0])),
    }


def _in_fresh_process(what: str, **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.speed.scale", what]
    said = subprocess.run(command, stdout=subprocess.PIPE, env={**os.environ, **environment}, check=True).stdout
    return dict(json.loads(said))


def start(repeats: int = 3) -> dict[str, Any]:
    """Seconds from the start of the program to J1's first trained round, compile cache empty and full."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        mine = Path(folder) / "fedpick"
        mine.mkdir()
        kept = data.cache_directory()
        for entry in kept.iterdir() if kept.exists() else ():
            if entry.name != COMPILED:  # keep the downloaded data
                (mine / entry.name).symlink_to(entry.resolve())
        for _ in range(1 + repeats):
            begun = time.time()
            said = _in_fresh_process("start", XDG_CACHE_HOME=folder)
            seconds.append((said["trained_at"] - begun, said["evaluated_at"] - begun))
            _require_compiled(mine / COMPILED)
    again = np.median(seconds[1:], axis=0)
    return {
        "first_trained_seconds": seconds[0][0],
        "first_evaluated_seconds": seconds[0][1],
        "again_trained_seconds": float(again[0]),
        "again_evaluated_seconds": float(again[1]),
        "load": os.getloadavg()[0],
    }


def _require_compiled(folder: Path) -> None:
    """Raise if the compile cache is elsewhere: the first start would look like the second."""
    if not folder.is_dir() or not any(folder.iterdir()):
        raise InvalidInput(
            f"The first start cannot be timed: it compiled nothing into {folder}. "
            "Unset JAX_COMPILATION_CACHE_DIR and leave the compile cache switched on."
        )


def million() -> dict[str, Any]:
    """Memory and time with a million clients, in a fresh process."""
    return _in_fresh_process("million")


MEASUREMENTS: dict[str, Callable[[], dict[str, Any]]] = {"unselected": unselected, "start": start, "million": million}


if __name__ == "__main__":
    result = {"start": first_round, "million": measure_million}[sys.argv[1]]()
    os.write(1, (json.dumps(result) + "\n").encode())
