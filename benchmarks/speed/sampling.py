"""Weighted sampling without replacement: fedpick against NumPy, on the same weights and the same availability."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.speed import machine
from fedpick.core.errors import InvalidInput
from fedpick.core.rng import Purpose, stream
from fedpick.core.sampling import cumulative, sample_weighted

__all__ = ["command", "measure"]


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(num_clients: int, drawn: int, share: float, repeats: int, seed: int) -> dict[str, Any]:
    """Median seconds of both and their ratio. They take turns, so that a busy machine disturbs both alike."""
    if not (num_clients >= 1 and drawn >= 1 and 0 < share <= 1 and repeats >= 1):
        raise InvalidInput(
            "clients, drawn and repeats must be at least 1, and the available share in (0, 1]. "
            f"Got {num_clients}, {drawn}, {repeats} and {share}."
        )
    rng = stream(seed, 0, Purpose.ANALYSIS)
    weights = rng.lognormal(size=num_clients)
    available = rng.random(num_clients) < share
    running = cumulative(weights)  # kept by a policy between rounds
    if available.sum() < drawn:
        raise InvalidInput(f"Only {available.sum()} clients are available, fewer than the {drawn} to draw. Draw fewer.")

    def ours() -> object:
        return sample_weighted(weights, running, available, drawn, rng)

    def numpys() -> object:
        # Generator.choice needs probabilities that sum to 1: 0 for a client that is not available.
        reachable = np.where(available, weights, 0.0)
        return rng.choice(num_clients, size=drawn, replace=False, p=reachable / reachable.sum())

    ours(), numpys()
    times = np.array([(_seconds(ours), _seconds(numpys)) for _ in range(repeats)])
    ratios = times[:, 1] / times[:, 0]
    return {
        "clients": num_clients,
        "available": int(available.sum()),
        "drawn": drawn,
        "repeats": repeats,
        "fedpick_seconds": float(np.median(times[:, 0])),
        "generator_choice_seconds": float(np.median(times[:, 1])),
        "ratio": float(np.median(ratios)),
        "ratio_lowest": float(ratios.min()),
        "ratio_highest": float(ratios.max()),
    }


def command(
    clients: Annotated[int, typer.Option(help="Clients in the table.")] = 1_000_000,
    drawn: Annotated[int, typer.Option(help="Clients to draw.")] = 100,
    available: Annotated[float, typer.Option(help="Share of the clients that is available.")] = 0.5,
    repeats: Annotated[int, typer.Option(help="Measurements of each, in turns.")] = 21,
    seed: Annotated[int, typer.Option(help="Of weights and draws.")] = 0,
    folder: machine.FolderOption = None,
) -> None:
    """Weighted sampling without replacement against Generator.choice(p=..., replace=False)."""
    results = measure(clients, drawn, available, repeats, seed)
    machine.publish("sampling", machine.listing(results), results, folder)
