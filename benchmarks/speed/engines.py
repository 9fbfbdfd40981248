"""fedpick's own tasks on both engines, in turns: a cohort trains on random examples of the usual shape."""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.speed import machine
from fedpick.core.types import Selection
from fedpick.data import Federation
from fedpick.sim import LocalTraining, Simulator, tasks

__all__ = ["command", "measure"]

CLIENTS, EXAMPLES = 4, 64
STEPS, BATCH = 4, 32


def _federation(shape: tuple[int, ...], num_classes: int) -> Federation:
    rng = np.random.Generator(np.random.PCG64(0))
    total = CLIENTS * EXAMPLES
    ends = np.arange(1, CLIENTS + 1) * EXAMPLES
    return Federation(
        name="random",
        partition="equal",
        x=rng.standard_normal((total, *shape)).astype(np.float32),
        y=rng.integers(num_classes, size=total).astype(np.int32),
        indices=np.arange(total),
        offsets=np.arange(CLIENTS + 1) * EXAMPLES,
        train_ends=ends,
        validation_ends=ends,
        test_x=np.zeros((0, *shape), np.float32),
        test_y=np.zeros(0, np.int32),
        num_classes=num_classes,
    )


def measure(name: str, turns: int) -> dict[str, Any]:
    """Seconds of a round on the clock and of the processor, turn by turn, for both engines."""
    settings: Any = tasks.settings(name)
    federation = _federation(settings.usual_shape, settings.usual_classes)
    local = LocalTraining(lr=0.01, steps=STEPS, batch_size=BATCH)
    both = {engine: Simulator(federation, name, local=local, engine=engine) for engine in ("jax", "torch")}
    everybody = Selection(clients=np.arange(CLIENTS))
    for simulator in both.values():
        simulator.train(everybody)  # compiles
    clock: dict[str, list[float]] = {engine: [] for engine in both}
    processor: dict[str, list[float]] = {engine: [] for engine in both}
    for _ in range(turns):
        for engine, simulator in both.items():
            start, busy = time.perf_counter(), time.process_time()
            simulator.train(everybody)
            clock[engine].append(time.perf_counter() - start)
            processor[engine].append(time.process_time() - busy)
    ratios = np.array(clock["jax"]) / np.array(clock["torch"])
    return {
        "task": name,
        "parameters": both["torch"].engine.num_parameters,
        "turns": turns,
        "jax_seconds": float(np.median(clock["jax"])),
        "torch_seconds": float(np.median(clock["torch"])),
        "ratio": float(np.median(ratios)),
        "ratio_lowest": float(ratios.min()),
        "ratio_highest": float(ratios.max()),
        "processor_ratio": float(np.median(processor["jax"]) / np.median(processor["torch"])),
        "load": os.getloadavg()[0],
    }


def command(
    names: Annotated[str, typer.Option("--tasks", help="Names of tasks, separated by commas.")] = (
        "cnn-mcmahan-fmnist,cnn-mcmahan-cifar,cnn-fedcor,cnn-power-of-choice,mlp,logistic"
    ),
    turns: Annotated[int, typer.Option(min=1, help="Rounds of both engines that count.")] = 7,
    folder: machine.FolderOption = None,
) -> None:
    """The engines side by side: how many times as fast PyTorch trains fedpick's own tasks as JAX."""
    results = [measure(name.strip(), turns) for name in names.split(",")]
    lines = [
        f"{CLIENTS} clients, {STEPS} steps of {BATCH}; {turns} turns. Above 1, PyTorch is faster.",
        "",
        "| task | parameters | JAX, s | PyTorch, s | ratio (lowest to highest) | ratio of processor time | load |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each['task']} | {each['parameters']:,} | {each['jax_seconds']:.3g} | {each['torch_seconds']:.3g} "
        f"| {each['ratio']:.2f} ({each['ratio_lowest']:.2f} to {each['ratio_highest']:.2f}) "
        f"| {each['processor_ratio']:.2f} | {each['load']:.1f} |"
        for each in results
    ]
    machine.publish("engines", "\n".join(lines), {"machine": machine.describe(), "tasks": results}, folder)
