"""The cost of a decision as the federation grows: `ask` + `tell` of every policy, from a hundred clients to a million.

Only the policy and its session are timed: half of the clients are available in each round, all chosen clients complete
and report everything, and the answers to probes come from an array. The first rounds, in which policies create their
state or draw at random, are not timed. Policies that compare the latest updates of clients know those of all of them:
the costly case, which a run reaches after many rounds.
"""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.speed import machine
from fedpick import policies
from fedpick.core.errors import InvalidInput, unknown_name
from fedpick.core.policy import Signal
from fedpick.core.rng import Purpose, stream
from fedpick.core.session import Session
from fedpick.core.types import Clients, Outcome, Probe
from fedpick.policies._sketches import LatestSketches
from fedpick.report.figures.canvas import new_figure, save_figure

__all__ = ["command", "exponent", "measure"]

# Fit the Gaussian process once, briefly: the timed rounds are decisions of a trained model.
PARAMETERS: dict[str, dict[str, Any]] = {
    "fedcor": {"warmup": 2, "interval": 1000, "warmup_iterations": 2},
    "fedgp": {"warmup": 2, "interval": 1000, "warmup_iterations": 2},
}
SETTLING_ROUNDS = 4
VECTOR_WIDTH = 8
SKETCH_WIDTH = 10


class _World:
    """Made-up clients with stored answers to probes."""

    def __init__(self, num_clients: int, seed: int) -> None:
        rng = stream(seed, 0, Purpose.ANALYSIS)
        self.clients = Clients(
            num_examples=np.floor(rng.lognormal(4.0, 1.0, num_clients)) + 10,
            label_histogram=rng.multinomial(50, np.full(10, 0.1), num_clients).astype(float),
            availability=np.full(num_clients, 0.5),
            correlation=rng.random(num_clients) * 0.5,
        )
        self.answers = 1.0 + rng.random((num_clients, VECTOR_WIDTH))
        self.sketches = rng.normal(size=(num_clients, SKETCH_WIDTH))
        self.masks = rng.random((3, num_clients)) < 0.5
        self.measuring = 0.0

    def measure(self, probe: Probe) -> NDArray[np.float64]:
        start = time.process_time()
        answers = self.answers[probe.clients, 0] if probe.signal is Signal.LOSS else self.answers[probe.clients]
        if probe.trial is not None:
            answers = answers * 0.9
        self.measuring += time.process_time() - start
        return answers

    def play(self, session: Session, budget: int) -> float:
        """Play one round; return its seconds without the look-up of answers."""
        mask = self.masks[session.round % len(self.masks)]
        self.measuring = 0.0
        start = time.process_time()
        selection = session.ask(available=mask, budget=budget, measure=self.measure)
        middle = time.process_time()
        reports = self.answers[selection.clients, 0]
        done = np.ones(len(selection.clients), dtype=bool)
        outcome = Outcome(
            index=session.round,
            clients=selection.clients,
            completed=done,
            loss=reports,
            train_loss=reports,
            loss_rms=reports,
            duration=reports,
            update_norm=reports,
            sketch=self.sketches[selection.clients],
        )
        again = time.process_time()
        session.tell(outcome)
        return time.process_time() - again + middle - start - self.measuring


def measure(
    name: str, num_clients: int, budget: int, rounds: int, seed: int, world: _World | None = None
) -> dict[str, Any]:
    """Median, fastest and slowest seconds of a round, and the peak of memory beyond the inputs.

    Memory is traced until the first settled round; time is measured after that, without tracing.
    """
    world = world or _World(num_clients, seed)
    tracemalloc.start()
    session = Session(policies.get(name, **PARAMETERS.get(name, {})), world.clients, seed)
    if isinstance(session.state, LatestSketches):
        known = {"known": np.arange(num_clients), "vectors": world.sketches}
        session.restore(known, {}, round=0)
    for _ in range(SETTLING_ROUNDS + 1):
        world.play(session, budget)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    seconds = [world.play(session, budget) for _ in range(rounds)]
    return {
        "policy": name,
        "clients": num_clients,
        "cohort": budget,
        "seconds": float(np.median(seconds)),
        "fastest_seconds": min(seconds),
        "slowest_seconds": max(seconds),
        "peak_mebibytes": peak / 2**20,
    }


def exponent(rows: list[dict[str, Any]], name: str, budget: int, of: str = "seconds") -> float:
    """The slope of log seconds over log clients from 10^4 clients on; 1 is linear.

    `of="fastest_seconds"` fits the fastest rounds, which a busy machine disturbs least.
    """
    mine = [row for row in rows if row["policy"] == name and row["cohort"] == budget and row["clients"] >= 10_000]
    if len(mine) < 2:
        return float("nan")
    clients, seconds = (np.log([row[key] for row in mine]) for key in ("clients", of))
    return float(np.polyfit(clients, seconds, 1)[0])


def command(
    only: Annotated[str, typer.Option(help="Policies, separated by commas; all by default.")] = "",
    largest: Annotated[int, typer.Option(help="10^2, 10^3, ... clients up to this many.")] = 1_000_000,
    cohorts: Annotated[str, typer.Option(help="Cohort sizes, separated by commas.")] = "10,100",
    rounds: Annotated[int, typer.Option(help="Timed rounds of each policy.")] = 7,
    seed: Annotated[int, typer.Option(help="Of clients and choices.")] = 0,
    folder: machine.FolderOption = None,
) -> None:
    """The cost of a decision as the federation grows: time, memory and growth of every policy."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    names = [name.strip() for name in only.split(",") if name.strip()] or list(policies.names())
    for name in names:
        if name not in policies.names():
            raise unknown_name("policy", name, policies.names())
    budgets = _sizes(cohorts)
    if largest < 100:
        raise InvalidInput(f"--largest must be at least 100, the smallest federation. Got {largest}.")
    if rounds < 1:
        raise InvalidInput(f"--rounds must be at least 1. Got {rounds}.")
    sizes = [10**power for power in range(2, 10) if 10**power <= largest]
    rows: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=len(names) * len(sizes) * len(budgets))
        for num_clients in sizes:
            world = _World(num_clients, seed)
            for name in names:
                for budget in budgets:
                    progress.update(task, description=f"{name}, {num_clients:,} clients")
                    rows.append(measure(name, num_clients, budget, rounds, seed, world))
                    progress.advance(task)
    results = {"machine": machine.describe(), "rows": rows}
    for of, title in (("seconds", "exponents"), ("fastest_seconds", "exponents_of_fastest")):
        growth = {(name, size): exponent(rows, name, size, of) for name in names for size in budgets}
        results[title] = {f"{name}, cohort {size}": None if np.isnan(a) else a for (name, size), a in growth.items()}
    machine.publish("select", as_markdown(rows, names, sizes, budgets), results, folder)
    if folder is not None:
        draw(rows, names, budgets[-1], folder / "select.png")


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise InvalidInput(f"--cohorts takes whole numbers of at least 1, separated by commas. Got {text!r}.")
    return sizes


def as_markdown(rows: list[dict[str, Any]], names: list[str], sizes: list[int], budgets: list[int]) -> str:
    """One line per policy and cohort: milliseconds per round at each size, memory at the largest, growth."""
    found = {(row["policy"], row["clients"], row["cohort"]): row for row in rows}
    heads = " | ".join(f"{size:,}" for size in sizes)
    lines = [
        f"| policy | cohort | {heads} | fastest at {sizes[-1]:,} | MiB there | exponent | of the fastest |",
        "|---|---" + "|---" * len(sizes) + "|---|---|---|---|",
    ]
    for name in names:
        for budget in budgets:
            cells = " | ".join(f"{1000 * found[name, size, budget]['seconds']:.3g} ms" for size in sizes)
            last = found[name, sizes[-1], budget]
            slopes = [exponent(rows, name, budget, of) for of in ("seconds", "fastest_seconds")]
            growth = " | ".join("" if np.isnan(slope) else format(slope, ".2f") for slope in slopes)
            best = f"{1000 * last['fastest_seconds']:.3g} ms | {last['peak_mebibytes']:.0f}"
            lines.append(f"| {name} | {budget} | {cells} | {best} | {growth} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], names: list[str], budget: int, path: Path) -> None:
    """Seconds per round over clients, both on log scales."""
    figure = new_figure(9, 5)
    axes = figure.add_subplot()
    markers = "osv^D<>pPX*hd"
    for place, name in enumerate(names):
        mine = [row for row in rows if row["policy"] == name and row["cohort"] == budget]
        axes.loglog(
            [row["clients"] for row in mine],
            [row["seconds"] for row in mine],
            marker=markers[place % len(markers)],
            markersize=4,
            label=name,
        )
    axes.set(xlabel="clients", ylabel="seconds per round, ask + tell", title=f"Cost of a decision, cohort of {budget}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save_figure(figure, path, dpi=110)
