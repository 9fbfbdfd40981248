"""How long masks take and how much memory they need: one million clients, one thousand rounds, round by round.

    python benchmarks/availability-scale.py [clients] [rounds]

Prints, for each process, the time to start, the mean time per round, and the largest memory held beyond the table.
"""

from __future__ import annotations

import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np

from fedpick import availability
from fedpick.core.types import Clients


def _example_logs(path: Path) -> None:
    rng = np.random.default_rng(0)
    times = np.sort(rng.integers(0, 6 * 86_400, (300, 40)), axis=1)
    np.savez(path, offsets=np.arange(301) * 40, t=times.ravel(), state=np.tile([2, 0], (300, 20)).ravel())


def main(num_clients: int = 1_000_000, rounds: int = 1000) -> None:
    """Time every process on the same table."""
    rng = np.random.default_rng(0)
    histogram = np.zeros((num_clients, 10))
    histogram[np.arange(num_clients), rng.integers(0, 10, num_clients)] = 1
    clients = Clients(num_examples=rng.integers(10, 500, num_clients), label_histogram=histogram)
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder) / "logs.npz"
        _example_logs(logs)
        print("| process | start, s | per round, ms | memory, MB |")
        print("|---|---|---|---|")
        for name in availability.names():
            process = availability.get(name, **({"path": str(logs)} if name == "trace" else {}))
            tracemalloc.start()
            begin = time.perf_counter()
            trace = process.start(clients, seed=0)
            started = time.perf_counter() - begin
            begin = time.perf_counter()
            for round in range(rounds):
                trace.mask(round)
            spent = time.perf_counter() - begin
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            print(f"| {name} | {started:.2f} | {1000 * spent / rounds:.1f} | {peak / 1e6:.0f} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
