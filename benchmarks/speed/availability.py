"""The cost of availability masks: a million clients, round by round."""

from __future__ import annotations

import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.speed import machine
from fedpick import availability
from fedpick.availability import AvailabilityProcess
from fedpick.core.types import Clients

__all__ = ["command", "measure"]


def _write_example_logs(path: Path) -> None:
    rng = np.random.default_rng(0)
    times = np.sort(rng.integers(0, 6 * 86_400, (300, 40)), axis=1)
    np.savez(path, offsets=np.arange(301) * 40, t=times.ravel(), state=np.tile([2, 0], (300, 20)).ravel())


def measure(process: AvailabilityProcess, clients: Clients, rounds: int) -> dict[str, float]:
    """Seconds to start, mean seconds per round, and the peak of memory beyond the table of clients."""
    tracemalloc.start()
    begin = time.perf_counter()
    trace = process.start(clients, seed=0)
    started = time.perf_counter()
    for index in range(rounds):
        trace.mask(index)
    ended = time.perf_counter()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "start_seconds": started - begin,
        "round_seconds": (ended - started) / rounds,
        "peak_megabytes": peak / 1e6,
    }


def command(
    clients: Annotated[int, typer.Option(help="Clients in the table.")] = 1_000_000,
    rounds: Annotated[int, typer.Option(help="Rounds of each process.")] = 1000,
    folder: machine.FolderOption = None,
) -> None:
    """Masks of every availability process: time to start, time per round, memory."""
    rng = np.random.default_rng(0)
    histogram = np.zeros((clients, 10))
    histogram[np.arange(clients), rng.integers(0, 10, clients)] = 1
    table = Clients(num_examples=rng.integers(10, 500, clients).astype(np.float64), label_histogram=histogram)
    results: dict[str, Any] = {}
    lines = ["| process | start, s | per round, ms | memory, MB |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as directory:
        logs = Path(directory) / "logs.npz"
        _write_example_logs(logs)
        for name in availability.names():
            process = availability.get(name, **({"path": str(logs)} if name == "trace" else {}))
            found = results[name] = measure(process, table, rounds)
            cells = (
                f"{found['start_seconds']:.2f} | {1000 * found['round_seconds']:.1f} | {found['peak_megabytes']:.0f}"
            )
            lines.append(f"| {name} | {cells} |")
    machine.publish("availability", "\n".join(lines), {"machine": machine.describe(), "processes": results}, folder)
