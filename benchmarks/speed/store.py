"""The cost of writing a round to the store: checkouts of fedpick in turns.

Each turn is a process of its own that writes rounds of one run, with a checkpoint in each, to a new SQLite file. The
clock is the CPU time of the process: other programs do not count, and neither does waiting for the disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.speed import machine
from fedpick.core.errors import InvalidInput

__all__ = ["command"]

# Runs in any checkout: it uses only what all of them have.
PROGRAM = """
import dataclasses, json, sys, time
import numpy as np
from fedpick.core.types import Outcome, Selection
try:
    from fedpick.core.record import Counters, RoundRecord, Timings
    from fedpick.experiments.spec import Named, PolicySpec, Spec
    from fedpick.experiments.store import Store
except ModuleNotFoundError:  # before 0.1.0
    from fedpick.bench.records import RoundRecord
    from fedpick.bench.spec import Named, PolicySpec, Spec
    from fedpick.bench.store import Store
    Counters = Timings = None

path, rounds, clients, budget = sys.argv[1], *map(int, sys.argv[2:])
rng = np.random.default_rng(0)
checkpoint = rng.bytes(100_000)
sent = dict.fromkeys(("models_down", "updates_up", "scalars_up", "bytes_down", "bytes_up"), 7)
seconds = {"select": 0.1, "measure": 0.1, "train": 0.1, "evaluate": 0.1}

def record_of(index):
    there = rng.random(clients) < 0.6
    chosen = rng.choice(np.flatnonzero(there), budget, replace=False)
    done, losses = np.ones(budget, bool), rng.random(budget)
    reports = {"loss": losses, "train_loss": losses, "duration": losses, "update_norm": losses}
    told = {"candidates": 20, "cut": 0.5}
    shared = {"index": index, "weights": done / budget, "available": there, "test_accuracy": 0.5, "test_loss": 1.0}
    if Counters is None:
        return RoundRecord(
            clients=chosen, given_weights=None, completed=done, counters=sent, seconds=seconds, diagnostics=told,
            **reports, **shared,
        )
    return RoundRecord(
        selection=Selection(clients=chosen, diagnostics=told),
        outcome=Outcome(index=index, clients=chosen, completed=done, **reports),
        counters=Counters(**sent), seconds=Timings(**seconds), **shared,
    )

values = {
    "title": "speed", "data": Named(name="toy"), "partition": Named(name="iid"), "task": Named(name="toy"),
    "availability": Named(name="ideal"), "rounds": rounds, "budget": budget, "seeds": (0,), "evaluate_every": 1,
    "policies": (PolicySpec(name="uniform", label="uniform", parameters={}),), "targets": (),
    "losses_every": None, "local_accuracy_every": None,
}
for item in dataclasses.fields(Spec):
    if item.default is item.default_factory is dataclasses.MISSING:
        values.setdefault(item.name, {})
store = Store(path)
run = store.runs(store.register(Spec(**values)))[0]
if hasattr(store, "take"):
    store.take(run.id)
spent = []
for record in [record_of(index) for index in range(rounds)]:
    start = time.process_time()
    store.write_round(run.id, record, checkpoint=checkpoint)
    spent.append(time.process_time() - start)
print(json.dumps(spent[rounds // 5:]))
"""


def command(
    checkout: Annotated[list[Path], typer.Option(help="Folder of a checkout of fedpick (repeatable).")],
    rounds: Annotated[int, typer.Option(help="Rounds of one turn.")] = 300,
    turns: Annotated[int, typer.Option(help="Turns of each checkout.")] = 5,
    clients: Annotated[int, typer.Option(help="Clients of the federation.")] = 1000,
    budget: Annotated[int, typer.Option(help="Clients chosen in each round.")] = 10,
    folder: machine.FolderOption = None,
) -> None:
    """The CPU time of one round in the store, of several checkouts in turns."""
    for each in checkout:
        if not (each / "src/fedpick").is_dir():
            raise InvalidInput(f"A checkout of fedpick has a folder src/fedpick. {each} has none.")
    found: dict[Path, list[float]] = {each: [] for each in checkout}
    for _ in range(turns):
        for each in checkout:
            found[each].append(float(np.median(_turn(each, rounds, clients, budget))))
    first = np.array(found[checkout[0]])
    lines = [
        "| checkout | ms per round, median of the turns | fastest turn | ratio to the first |",
        "|---|---|---|---|",
    ]
    for each, medians in found.items():
        ratio = float(np.median(np.array(medians) / first))
        lines.append(f"| {each} | {1000 * np.median(medians):.3f} | {1000 * min(medians):.3f} | {ratio:.2f} |")
    rows = [{"checkout": str(each), "seconds": medians} for each, medians in found.items()]
    machine.publish("store", "\n".join(lines), {"machine": machine.describe(), "rows": rows}, folder)


def _turn(checkout: Path, rounds: int, clients: int, budget: int) -> list[float]:
    with tempfile.TemporaryDirectory() as directory:
        numbers = map(str, (rounds, clients, budget))
        said = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(Path(directory) / "a.sqlite"), *numbers],
            env={**os.environ, "PYTHONPATH": str(checkout.resolve() / "src")},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    return [float(value) for value in json.loads(said)]
