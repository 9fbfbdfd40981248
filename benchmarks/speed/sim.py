"""The simulator against peers and other checkouts of fedpick on identical work, in turns within one run.

All contenders do the same rounds: the same initial model, cohorts, rows in every mini-batch, weights and evaluations
(see `jobs`). They alternate, so that a busy machine disturbs all alike; compare ratios, not times. The first turn, in
which programs are compiled, does not count. At the end the models are compared.
"""

from __future__ import annotations

import os
import sys
import tempfile
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from benchmarks.speed import contenders, jobs, machine, scale
from benchmarks.speed.jobs import J1_GIGAFLOP, Job
from benchmarks.speed.peers.turns import Work
from fedpick.core.errors import InvalidInput, unknown_name

__all__ = ["as_markdown", "command", "compare"]


def compare(
    job_name: str, against: Sequence[str], repeats: int, python: str, say: Callable[[str], object] = print
) -> dict[str, Any]:
    """One job: rounds per second of every contender, turn by turn, and the differences of the final models."""
    job = jobs.find(job_name)
    rounds = job.turn * (repeats + 1)
    rates: list[float] = []
    results: dict[str, dict[str, Any]] = {}
    missing: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="fedpick-bench-") as folder:
        dealt = jobs.federation(job)
        sim = jobs.simulator(job, dealt)
        jobs.write_work(job, sim, rounds, Path(folder))
        work, started = Work(folder), {}
        for name in ("fedpick", *against):
            say(f"{job.name}: starting {name}")
            try:
                contender = contenders.build(name, job, sim, work, python)
                first = contender.turn(job.turn)
            except contenders.ContenderMissing as error:
                missing[name] = str(error)
                continue
            started[name] = contender
            results[name] = {"start_seconds": contender.start_seconds + first.first, "rates": []}
        before = sim.timings
        for repeat in range(repeats):
            say(f"{job.name}: turn {repeat + 1} of {repeats}")
            rates.append(machine.matrix_rate())
            order = list(started)[repeat % len(started) :] + list(started)[: repeat % len(started)]
            for name in order:
                turn = started[name].turn(job.turn)
                results[name]["rates"].append(job.turn / turn.seconds)
                results[name]["accuracy"] = turn.accuracy
        spent = sim.timings.since(before).as_dict()
        models = {name: contender.finish() for name, contender in started.items()}
    for name, result in results.items():
        result |= _summary(result["rates"], results["fedpick"]["rates"])
        ours = models["fedpick"]
        result["largest_difference"] = float(max(np.abs(models[name][leaf] - ours[leaf]).max() for leaf in ours))
        result["start_seconds"] = _number(result["start_seconds"])
    return {
        "title": job.title,
        "rounds_per_turn": job.turn,
        "turns": repeats,
        "contenders": results,
        "missing": missing,
        "largest_weight": float(max(np.abs(leaf).max() for leaf in models["fedpick"].values())),
        "milliseconds_per_round": {name: 1000 * value / (job.turn * repeats) for name, value in spent.items()},
        "gigaflop_per_second": max(rates),
        "gigaflop_per_second_lowest": min(rates),
        "load": os.getloadavg()[0],
        **_bound(job, results["fedpick"]["rates"], rates),
    }


def _number(value: float) -> float | None:
    return None if np.isnan(value) else value


def _summary(mine: list[float], ours: list[float]) -> dict[str, float]:
    ratios = np.array(ours) / np.array(mine)
    return {
        "rate": float(np.median(mine)),
        "rate_lowest": min(mine),
        "rate_highest": max(mine),
        "ratio": float(np.median(ratios)),
        "ratio_lowest": float(ratios.min()),
        "ratio_highest": float(ratios.max()),
        "ratio_of_best": max(ours) / max(mine),
    }


def _bound(job: Job, ours: list[float], rates: list[float]) -> dict[str, Any]:
    """The bound that the rate of matrix products sets for J1: at its highest, and within each turn."""
    if job.name != "j1":
        return {}
    bounds = np.array(rates) / J1_GIGAFLOP[job.cohort]
    return {
        "bound_rounds_per_second": float(bounds.max()),
        "percent_of_bound": float(100 * np.median(ours) / bounds.max()),
        # The speed of a virtual machine changes from turn to turn, and with it the rate of matrix products.
        "percent_of_bound_by_turn": (100 * np.array(ours) / bounds).tolist(),
    }


def _listed(text: str, known: Collection[str], kind: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise unknown_name(kind, name, known)
    return names


def command(
    jobs_: Annotated[str, typer.Option("--jobs", help="Of j1, j2, j3, separated by commas.")] = "j1,j2,j3",
    against: Annotated[
        str, typer.Option(help="Peers, separated by commas. Those not installed are left out.")
    ] = ",".join(contenders.PEERS),
    checkout: Annotated[
        list[Path] | None, typer.Option(help="Folder of another checkout of fedpick, to compare with (repeatable).")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Turns of every contender that count.")] = 5,
    also: Annotated[str, typer.Option(help="Other measurements, separated by commas.")] = ",".join(scale.MEASUREMENTS),
    peers_python: Annotated[
        str, typer.Option(help="The Python that has torch, pfl and fedjax installed.", show_default=False)
    ] = "",
    folder: machine.FolderOption = None,
) -> None:
    """The simulator against sequential loops, Flower, pfl-research, FedJAX and other checkouts, on identical work."""
    if repeats < 1:
        raise InvalidInput(f"--repeats must be at least 1. Got {repeats}.")
    chosen, extras = _listed(jobs_, jobs.JOBS, "job"), _listed(also, scale.MEASUREMENTS, "measurement")
    others = [*_listed(against, contenders.PEERS, "peer"), *map(str, checkout or [])]
    python = peers_python or sys.executable
    results: dict[str, Any] = {
        "machine": {**machine.describe(), "peer_packages": machine.versions(python)},
        "jobs": {},
    }
    with Console(stderr=True).status("starting") as status:
        for name in chosen:
            results["jobs"][name] = compare(name, others, repeats, python, status.update)
        for name in extras:
            status.update(name)
            results[name] = scale.MEASUREMENTS[name]()
    machine.publish("sim", as_markdown(results), results, folder)


def as_markdown(results: Mapping[str, Any]) -> str:
    """The tables of all measurements."""
    lines: list[str] = []
    for name, job in results["jobs"].items():
        lines += [*_job_lines(name, job), ""]
    if unselected := results.get("unselected"):
        lines.append(
            f"Clients that are not selected: {unselected['many']:,} against {unselected['few']:,} clients, the same "
            f"cohort of 50 and as many examples each: training takes {unselected['train_ratio']:.2f} times as long "
            f"({1000 * unselected['train_seconds_few']:.2f} and {1000 * unselected['train_seconds_many']:.2f} ms), the "
            f"whole round with the decision {unselected['round_ratio']:.2f} times.\n"
        )
    if start := results.get("start"):
        lines.append(
            f"Start: J1's first round is trained {start['first_trained_seconds']:.1f} s after the start of the program "
            f"with an empty compile cache, {start['again_trained_seconds']:.1f} s with a full one (with test set and "
            f"losses: {start['first_evaluated_seconds']:.1f} and {start['again_evaluated_seconds']:.1f} s); "
            f"load {start['load']:.1f}.\n"
        )
    if million := results.get("million"):
        lines.append(
            f"Memory: {million['clients']:,} clients with {million['examples']:,} examples, "
            f"{million['data_mebibytes']:.0f} MiB of data: {million['training_mebibytes']:.0f} MiB at most while "
            f"training, {million['with_losses_mebibytes']:.0f} MiB with the losses of all clients, both with the data; "
            f"{1000 * million['round_seconds']:.0f} ms per round of 100 clients.\n"
        )
    return "\n".join(map(_wrapped, lines)).rstrip()


def _wrapped(line: str) -> str:
    """Return a line of prose as lines of at most 120 characters; rows of tables stay."""
    return line if line.startswith("|") else textwrap.fill(line, 120) + "\n" * line.endswith("\n")


def _job_lines(title: str, job: dict[str, Any]) -> list[str]:
    lines = [
        f"{title.upper()}: {job['title']}. {job['turns']} turns of {job['rounds_per_turn']} rounds each.",
        "",
        "| contender | rounds/s (lowest to highest) | fedpick is faster by (lowest to highest) | best turns "
        "| start and first round | accuracy at the end | largest difference of a weight |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in job["contenders"].items():
        start = "" if found["start_seconds"] is None else f"{found['start_seconds']:.1f} s"
        accuracy = "" if found["accuracy"] is None else f"{100 * found['accuracy']:.2f} %"
        ratio = f"{found['ratio']:.2f} ({found['ratio_lowest']:.2f} to {found['ratio_highest']:.2f})"
        ratio += f" | {found['ratio_of_best']:.2f}"
        lines.append(
            f"| {name} | {found['rate']:.3g} ({found['rate_lowest']:.3g} to {found['rate_highest']:.3g}) "
            f"| {' | ' if name == 'fedpick' else ratio} | {start} | {accuracy} | {found['largest_difference']:.1e} |"
        )
    spent = ", ".join(f"{what} {value:.2f} ms" for what, value in job["milliseconds_per_round"].items() if value)
    lines += ["", f"Fedpick's time per round: {spent}."]
    lines.append(f"The largest weight is {job['largest_weight']:.2g}.")
    lines.append(f"Load of the machine at the end: {job['load']:.1f} on {os.cpu_count()} cores.")
    if "bound_rounds_per_second" in job:
        by_turn = ", ".join(f"{percent:.0f}" for percent in job["percent_of_bound_by_turn"])
        lines.append(
            f"Matrix products (2048 x 2048, float32) ran at {job['gigaflop_per_second_lowest']:.0f} to "
            f"{job['gigaflop_per_second']:.0f} GFLOP/s meanwhile, which bounds J1 at "
            f"{job['bound_rounds_per_second']:.1f} rounds/s: fedpick reaches {job['percent_of_bound']:.0f} %. "
            f"Against the rate of the same turn: {by_turn} %."
        )
    lines += [f"Left out: {peer} ({why})." for peer, why in job["missing"].items()]
    return lines
