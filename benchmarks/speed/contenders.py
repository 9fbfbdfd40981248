"""Contenders that do a written-out job in turns: fedpick, the sequential loop, and programs in other processes."""

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

from benchmarks.speed import jobs, peers
from benchmarks.speed.jobs import Job
from benchmarks.speed.peers.step import Stepper, nested
from benchmarks.speed.peers.turns import Work
from fedpick.core.errors import FedpickError, InvalidInput
from fedpick.sim import Simulator, simulate
from fedpick.sim.jax_engine.setup import require_jax

__all__ = ["PEERS", "Contender", "ContenderMissing", "Fedpick", "Program", "Sequential", "Turn", "build"]

_ROOT = Path(__file__).parents[2]
_PATIENCE_SECONDS = 900
PEERS = {
    "sequential": "one client after another, one compiled call per mini-batch (JAX)",
    "torch": "the same in PyTorch",
    "fedpick-torch": "fedpick's PyTorch engine",
    "flower": "Flower's simulation engine (Ray)",
    "pfl": "pfl-research, simulated backend",
    "fedjax": "FedJAX, federated averaging",
}


class ContenderMissing(FedpickError):
    """The library of a contender is not installed, or it cannot do this job."""


@dataclass(frozen=True)
class Turn:
    """The result of one turn."""

    seconds: float
    first: float
    """Seconds of its first round."""
    accuracy: float | None


class Contender(Protocol):
    """Does the rounds of a job, some at a time."""

    start_seconds: float
    """Until it is ready for the first round; NaN if that cannot be separated from the others."""

    def turn(self, rounds: int) -> Turn:
        """Do the next rounds."""
        ...

    def finish(self) -> dict[str, np.ndarray]:
        """Return the model after the last turn."""
        ...


class Fedpick:
    """The simulator, driven by `simulate` as in an experiment."""

    start_seconds = float("nan")

    def __init__(self, job: Job, sim: Simulator) -> None:
        self.job, self.simulator, self.session = job, sim, jobs.session(sim)

    def turn(self, rounds: int) -> Turn:
        """Do the next rounds in a new loop, so that nothing is computed ahead during the turn of another contender."""
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
        """Return the model."""
        return jobs.flat(self.simulator.params)


class Sequential:
    """The usual way: one client after another, one compiled call per mini-batch, data already on the device."""

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
        """Do the next rounds."""
        start, first, accuracy = time.perf_counter(), 0.0, None
        for _ in range(rounds):
            accuracy = self._round(self.index)
            self.index += 1
            first = first or time.perf_counter() - start
        return Turn(time.perf_counter() - start, first, accuracy)

    def finish(self) -> dict[str, np.ndarray]:
        """Return the model."""
        return jobs.flat(self.params)


class Program:
    """A contender in another process (see `peers.turns`). Its output goes to a file beside the job."""

    def __init__(self, name: str, work: Work, python: str, checkout: Path | None = None) -> None:
        self.work = work
        self.name = name if checkout is None else f"{name}{str(checkout).replace(os.sep, '-')}"
        script = Path(peers.__file__).parent / f"run_{name.replace('-', '_')}.py"
        # By file name: the environment of a peer need not have fedpick.
        command = [python, str(script), str(work.folder), self.name]
        paths = [*([str(checkout / "src")] if checkout else []), str(_ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self.log = work.folder / f"{self.name}.log"
        start = time.perf_counter()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, text=True
            )
        try:
            self._hear()
        except ContenderMissing:
            self._end()
            raise
        self.start_seconds = time.perf_counter() - start

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(60)
            tail = self.log.read_text(errors="replace").strip().splitlines()[-1:] or ["nothing"]
            raise ContenderMissing(
                f"{self.name} ended with code {self.process.returncode}; the last line of its output: {tail[0]}"
            )
        said: dict[str, Any] = json.loads(line)
        if "missing" in said:
            raise ContenderMissing(said["missing"])
        return said

    def turn(self, rounds: int) -> Turn:
        """Do the next rounds."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{rounds}\n")
        self.process.stdin.flush()
        return Turn(**self._hear())

    def finish(self) -> dict[str, np.ndarray]:
        """End the process and return the model."""
        self._end()
        path = self.work.folder / f"final-{self.name}.npz"
        if not path.exists():
            raise ContenderMissing(f"{self.name} wrote no model; see {self.log}")
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


def build(name: str, job: Job, sim: Simulator, work: Work, python: str) -> Contender:
    """Start the contender of this name: "fedpick", one of PEERS, or the folder of another checkout of fedpick."""
    if name == "fedpick":
        return Fedpick(job, sim)
    if name == "sequential":
        return Sequential(work)
    if name in PEERS:
        return Program(name, work, sys.executable if name in ("flower", "fedpick-torch") else python)
    checkout = Path(name).resolve()
    if not (checkout / "src/fedpick").is_dir():
        raise InvalidInput(f"A checkout of fedpick has a folder src/fedpick. {name} has none.")
    return Program("fedpick", work, sys.executable, checkout)
