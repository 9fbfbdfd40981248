"""The cost of FedCor's Gaussian process as the federation grows: of a selection, and of an update (training by Adam).

Every round of FedCor selects; every `interval` rounds it also updates. Both are timed on random numbers, with all
clients available and with half of them: samples with different clients need one matrix per set of clients. The time to
measure losses is not included.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.speed import machine
from fedpick.core.rng import Purpose, stream
from fedpick.policies import _gp as gaussian
from fedpick.policies.fedcor import FedCor

__all__ = ["as_markdown", "command", "measure"]

_TIMED_ITERATIONS = 5


def _seconds(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def measure(num_clients: int, cohort: int, repeats: int, seed: int) -> dict[str, Any]:
    """Median seconds of a selection, of one iteration of an update, and of a whole update."""
    policy = FedCor()
    rng = stream(seed, 0, Purpose.ANALYSIS)
    embedding = rng.normal(size=(policy.dimension, num_clients)) / np.sqrt(policy.dimension)
    importance = rng.lognormal(size=num_clients)
    importance /= importance.sum()
    confidence = policy.beta ** rng.integers(0, 5, num_clients).astype(float)
    half = np.flatnonzero(rng.random(num_clients) < 0.5)
    samples = rng.normal(size=(policy.history + 1, num_clients))
    partial = np.where(rng.random(samples.shape) < 0.5, samples, np.nan)
    weights = policy.theta ** np.arange(len(samples), dtype=float)

    def select(candidates: Any) -> Callable[[], object]:
        return lambda: gaussian.select_greedy(
            embedding,
            importance,
            confidence,
            cohort,
            noise=policy.noise,
            rule=policy.selection_noise,
            candidates=candidates,
        )

    def fit(answers: Any, iterations: int) -> Callable[[], object]:
        rate = policy.learning_rate
        return lambda: gaussian.fit(
            embedding, answers, weights, noise=policy.noise, iterations=iterations, learning_rate=rate
        )

    row: dict[str, Any] = {
        "clients": num_clients,
        "cohort": cohort,
        "select_seconds": _seconds(select(None), repeats),
        "select_half_seconds": _seconds(select(half), repeats),
    }
    for name, answers in (("iteration_seconds", samples), ("iteration_half_seconds", partial)):
        # Subtract the cost that does not grow with the iterations; it would be counted once per iteration.
        none, some = (_seconds(fit(answers, count), repeats) for count in (0, _TIMED_ITERATIONS))
        row[name] = max(some - none, 0.0) / _TIMED_ITERATIONS
    row["update_seconds"] = row["iteration_seconds"] * policy.iterations
    row["update_half_seconds"] = row["iteration_half_seconds"] * policy.iterations
    return row


def command(
    largest: Annotated[int, typer.Option(help="10^2, 10^3, ... clients up to this many.")] = 1_000_000,
    cohort: Annotated[int, typer.Option(help="Clients picked.")] = 100,
    repeats: Annotated[int, typer.Option(help="Measurements of each.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 0,
    folder: machine.FolderOption = None,
) -> None:
    """FedCor's Gaussian process: seconds per selection and per update as the federation grows."""
    sizes = [10**power for power in range(2, 10) if 10**power <= largest]
    rows = [measure(size, min(cohort, size), repeats, seed) for size in sizes]
    results = {"machine": machine.describe(), "rows": rows}
    machine.publish("gp", as_markdown(rows), results, folder)


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """One line per size."""
    policy = FedCor()
    lines = [
        f"Rank {policy.dimension}, {policy.history + 1} samples, cohort of {rows[-1]['cohort']}; an update is "
        f"{policy.iterations} iterations of Adam, computed from {_TIMED_ITERATIONS} that were timed.",
        "",
        "| clients | selection, all available | half available | one iteration, all answered | half answered "
        "| an update, all answered | half answered |",
        "|---|---|---|---|---|---|---|",
    ]
    keys = ("select", "select_half", "iteration", "iteration_half")
    for row in rows:
        cells = " | ".join(f"{1000 * row[f'{key}_seconds']:.3g} ms" for key in keys)
        updates = f"{row['update_seconds']:.3g} s | {row['update_half_seconds']:.3g} s"
        lines.append(f"| {row['clients']:,} | {cells} | {updates} |")
    return "\n".join(lines)
