"""Engines that do a written-out job in turns: fedpick itself, the sequential loop, and programs of their own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.speed import _jobs, _peers
from benchmarks.speed._jobs import Job
from benchmarks.speed._peers.step import Stepper, nested
from benchmarks.speed._peers.turns import Work
from fedpick.core.errors import FedpickError
from fedpick.sim import simulate
from fedpick.sim.jax_engine.setup import require_jax
from fedpick.sim.simulator import Simulator

__all__ = ["ENGINES", "Engine", "EngineMissing", "Fedpick", "Program", "Sequential", "Turn"]

_PATIENCE_SECONDS = 900


class EngineMissing(FedpickError):
    """The engine's library is not installed, or it cannot do this job."""


@dataclass(frozen=True)
class Turn:
    """What an engine did in one turn."""

    seconds: float
    first: float
    """Seconds of its first round."""
    accuracy: float | None


class Engine(Protocol):
    """Does the rounds of a job, some at a time."""

    start_seconds: float
    """From nothing to being ready for the first round; NaN where that was not apart from the others."""

    def turn(self, rounds: int) -> Turn:
        """The next rounds."""
        ...

    def finish(self) -> dict[str, np.ndarray]:
        """The model after the last turn."""
        ...


class Fedpick:
    """The simulator, driven by `simulate` like any experiment."""

    start_seconds = float("nan")

    def __init__(self, job: Job, sim: Simulator) -> None:
        self.job, self.simulator, self.session = job, sim, _jobs.session(sim)

    def turn(self, rounds: int) -> Turn:
        """The next rounds. A loop of its own for each turn: nothing may be computed ahead in somebody else's."""
        start, first, accuracy = time.perf_counter(), 0.0, None
        for record in simulate(
            self.simulator,
            self.session,
            rounds=self.simulator.round + rounds,
            budget=self.job.cohort,
            evaluate_every=self.job.evaluate_every,
            losses_every=self.job.losses_every,
        ):
            first = first or time.perf_counter() - start
            accuracy = accuracy if record.test_accuracy is None else record.test_accuracy
        return Turn(time.perf_counter() - start, first, accuracy)

    def finish(self) -> dict[str, np.ndarray]:
        """The model."""
        return _jobs.flat(self.simulator.params)


class Sequential:
    """The usual way: client after client, one compiled call per mini-batch, data on the device already."""

    start_seconds = float("nan")

    def __init__(self, work: Work) -> None:
        self.work, self.index = work, 0
        self.jax = require_jax()
        self.stepper = Stepper(work.job)
        names = ("x", "y", "test_x", "test_y")
        self.x, self.y, self.test_x, self.test_y = (self.jax.device_put(work.array(name)) for name in names)
        self.weights, self.batches = work.array("weights").astype(np.float32), work.array("batches")
        self.params = self.jax.device_put(nested(work.initial()))

    def _round(self, index: int) -> float | None:
        total = self.jax.tree.map(np.zeros_like, self.params)
        for place, weight in enumerate(self.weights[index]):
            params = self.params
            for rows in self.batches[index, place]:
                params = self.stepper.step(params, self.x, self.y, rows)
            total = self.stepper.add(total, params, weight)
        self.params = total
        if self.work.measured(index):
            float(self.stepper.loss(self.params, self.x, self.y))
        if self.work.evaluated(index):
            return float(self.stepper.accuracy(self.params, self.test_x, self.test_y))
        self.jax.block_until_ready(self.params)
        return None

    def turn(self, rounds: int) -> Turn:
        """The next rounds."""
        start, first, accuracy = time.perf_counter(), 0.0, None
        for _ in range(rounds):
            accuracy = self._round(self.index)
            self.index += 1
            first = first or time.perf_counter() - start
        return Turn(time.perf_counter() - start, first, accuracy)

    def finish(self) -> dict[str, np.ndarray]:
        """The model."""
        return _jobs.flat(self.params)


class Program:
    """An engine in a process of its own (see `_peers.turns`); what it prints goes to a file beside the job."""

    def __init__(self, name: str, work: Work, python: str) -> None:
        self.name, self.work = name, work
        script = Path(_peers.__file__).parent / f"run_{name}.py"
        # By file name: an environment of its own need not have fedpick. Flower's workers, however, import theirs.
        command = [python, str(script), str(work.folder)]
        environment = {**os.environ, "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
        self.log = work.folder / f"{name}.log"
        start = time.perf_counter()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, text=True
            )
        try:
            self._hear()
        except EngineMissing:
            self._end()
            raise
        self.start_seconds = time.perf_counter() - start

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(60)
            tail = self.log.read_text(errors="replace").strip().splitlines()[-1:] or ["nothing"]
            raise EngineMissing(f"{self.name} ended with code {self.process.returncode}; its last words: {tail[0]}")
        said: dict[str, Any] = json.loads(line)
        if "missing" in said:
            raise EngineMissing(said["missing"])
        return said

    def turn(self, rounds: int) -> Turn:
        """The next rounds."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{rounds}\n")
        self.process.stdin.flush()
        return Turn(**self._hear())

    def finish(self) -> dict[str, np.ndarray]:
        """The model; the process ends."""
        self._end()
        path = self.work.folder / f"final-{self.name}.npz"
        if not path.exists():
            raise EngineMissing(f"{self.name} wrote no model; see {self.log}")
        with np.load(path) as archive:
            return {name: archive[name] for name in archive.files}

    def _end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def build(name: str, job: Job, sim: Simulator, work: Work, python: str) -> Engine:
    """The engine of this name, ready for its first round."""
    if name == "fedpick":
        return Fedpick(job, sim)
    if name == "sequential":
        return Sequential(work)
    return Program(name, work, sys.executable if name == "flower" else python)


ENGINES = {
    "sequential": "one client after another, one compiled call per mini-batch (JAX)",
    "torch": "the same in PyTorch",
    "flower": "Flower's simulation engine (Ray)",
    "pfl": "pfl-research, simulated backend",
    "fedjax": "FedJAX, federated averaging",
}
