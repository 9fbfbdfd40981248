"""What must not depend on the size of a federation: the cost of a round, the start, the memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speed._fresh import made_up
from fedpick import policies
from fedpick.core.errors import InvalidInput
from fedpick.core.session import Session
from fedpick.data import cache_directory
from fedpick.sim import LocalTraining, Simulator

__all__ = ["million", "start", "unselected"]

COMPILED = "compiled"
"""The folder of compiled programs within the cache."""


def unselected(few: int = 100, many: int = 100_000, per_client: int = 10, repeats: int = 15) -> dict[str, Any]:
    """The same cohort out of few and out of many clients, taken in turns; every client has equally many examples.

    So the cohort touches as many rows in both, and what differs is nothing but those who are not in it.
    """
    sims, sessions = [], []
    for num_clients in (few, many):
        local = LocalTraining(lr=0.1, steps=20, batch_size=10, sampling="replacement")
        sims.append(Simulator(made_up(num_clients, per_client, 60), "mlp", local=local))
        sessions.append(Session(policies.get("uniform"), sims[-1].clients, 0))
    training, whole = np.empty((2, repeats, 2))
    for repeat in range(-2, repeats):  # the first two are not counted
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


def _fresh(what: str, **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.speed._fresh", what]
    said = subprocess.run(command, stdout=subprocess.PIPE, env={**os.environ, **environment}, check=True).stdout
    return dict(json.loads(said))


def start(repeats: int = 3) -> dict[str, Any]:
    """Seconds from the start of the program to J1's first trained round, compile cache empty and full."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        mine = Path(folder) / "fedpick"
        mine.mkdir()
        kept = cache_directory()
        for entry in kept.iterdir() if kept.exists() else ():
            if entry.name != COMPILED:  # downloaded data stay within reach
                (mine / entry.name).symlink_to(entry.resolve())
        for _ in range(1 + repeats):
            begun = time.time()  # the time of day, which the other process tells too
            said = _fresh("start", XDG_CACHE_HOME=folder)
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
    """Programs compiled elsewhere would make the first start look like the second."""
    if not folder.is_dir() or not any(folder.iterdir()):
        raise InvalidInput(
            f"The start of a program cannot be timed: it compiled nothing into {folder}. "
            "Unset JAX_COMPILATION_CACHE_DIR and leave the compile cache switched on."
        )


def million() -> dict[str, Any]:
    """Memory and time with a million clients, in a process of its own."""
    return _fresh("million")
