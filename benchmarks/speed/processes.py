"""The demo's grid of runs in one process against several, from start to end, in turns."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.speed import machine
from fedpick.core.errors import InvalidInput
from fedpick.experiments import presets
from fedpick.experiments.runner import run
from fedpick.experiments.spec import Spec
from fedpick.experiments.store import Store

__all__ = ["command", "measure"]


def _seconds(spec: Spec, processes: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory) / "store.sqlite")
        start = time.perf_counter()
        report = run(spec, store, processes=processes)
        seconds = time.perf_counter() - start
        store.close()
    if not report.complete:
        raise InvalidInput(f"The timed runs did not finish: {report.failures}.")
    return seconds


def measure(processes: int, rounds: int, seeds: int, repeats: int) -> dict[str, Any]:
    """Median seconds of the grid with one process and with several. Both run once first, to fill the caches."""
    if processes < 2 or repeats < 1:
        raise InvalidInput(f"Compare at least 2 processes, at least once. Got {processes} and {repeats}.")
    spec = presets.demo(("uniform", "pow-d"), seeds=seeds, rounds=rounds)
    _seconds(spec, processes), _seconds(spec, 1)
    times = np.array([(_seconds(spec, 1), _seconds(spec, processes)) for _ in range(repeats)])
    one, several = np.median(times, axis=0)
    return {
        "runs": 2 * seeds,
        "rounds": rounds,
        "processes": processes,
        "repeats": repeats,
        "one_process_seconds": float(one),
        "several_processes_seconds": float(several),
        "ratio": float(one / several),
        "load": os.getloadavg()[0],
    }


def command(
    processes: Annotated[int, typer.Option(help="Processes to compare with one.")] = os.cpu_count() or 2,
    rounds: Annotated[int, typer.Option(help="Rounds per run.")] = 200,
    seeds: Annotated[int, typer.Option(help="Seeds; two policies have one run per seed each.")] = 4,
    repeats: Annotated[int, typer.Option(help="Measurements of each, in turns.")] = 3,
    folder: machine.FolderOption = None,
) -> None:
    """A grid of runs in one process against several; a ratio above 1 means that several are faster."""
    results = measure(processes, rounds, seeds, repeats)
    machine.publish("processes", machine.listing(results), results, folder)
