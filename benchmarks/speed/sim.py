"""The simulator against other engines on identical work, in turns within one run. Ratios are what to look at.

Each engine does the same rounds: the same initial model, cohorts, rows in every mini-batch, weights and evaluations
(see `_jobs`). Turns alternate, so that a busy machine disturbs all alike; the first turn, in which programs are
compiled, is not counted. At the end the models are compared.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from fedpick.core.errors import InvalidInput, unknown_name

__all__ = ["as_markdown", "command", "compare"]

ALSO = ("unselected", "start", "million")


def compare(job_name: str, against: list[str], repeats: int, python: str, say: Any = print) -> dict[str, Any]:
    """One job: rounds per second of every engine, turn by turn, and how far the models are apart at the end."""
    from benchmarks.speed import _engines, _jobs, _machine
    from benchmarks.speed._peers.turns import Work

    job = _jobs.find(job_name)
    rounds = job.turn * (repeats + 1)
    rates: list[float] = []
    results: dict[str, dict[str, Any]] = {}
    missing: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="fedpick-bench-") as folder:
        dealt = _jobs.federation(job)
        sim = _jobs.simulator(job, dealt)
        _jobs.write_work(job, sim, rounds, Path(folder))
        work, engines = Work(folder), {}
        for name in ("fedpick", *against):
            say(f"{job.name}: starting {name}")
            try:
                engine = _engines.build(name, job, sim, work, python)
                first = engine.turn(job.turn)
            except _engines.EngineMissing as error:
                missing[name] = str(error)
                continue
            engines[name] = engine
            results[name] = {"start_seconds": engine.start_seconds + first.first, "rates": []}
        before = sim.timings
        for repeat in range(repeats):
            say(f"{job.name}: turn {repeat + 1} of {repeats}")
            rates.append(_machine.matrix_rate())
            order = list(engines)[repeat % len(engines) :] + list(engines)[: repeat % len(engines)]
            for name in order:
                turn = engines[name].turn(job.turn)
                results[name]["rates"].append(job.turn / turn.seconds)
                results[name]["accuracy"] = turn.accuracy
        spent = sim.timings.since(before).as_dict()
        models = {name: engine.finish() for name, engine in engines.items()}
    for name, result in results.items():
        result |= _summary(result["rates"], results["fedpick"]["rates"])
        ours = models["fedpick"]
        result["largest_difference"] = float(max(np.abs(models[name][leaf] - ours[leaf]).max() for leaf in ours))
        result["start_seconds"] = _number(result["start_seconds"])
    return {
        "title": job.title,
        "rounds_per_turn": job.turn,
        "turns": repeats,
        "engines": results,
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


def _bound(job: Any, ours: list[float], rates: list[float]) -> dict[str, Any]:
    """What the machine's own matrix products would allow, for J1: at their best, and within each turn."""
    from benchmarks.speed._jobs import J1_GIGAFLOP

    if job.name != "j1":
        return {}
    bounds = np.array(rates) / J1_GIGAFLOP[job.cohort]
    return {
        "bound_rounds_per_second": float(bounds.max()),
        "percent_of_bound": float(100 * np.median(ours) / bounds.max()),
        # A virtual machine's speed changes from turn to turn, that of the matrix products with it.
        "percent_of_bound_by_turn": (100 * np.array(ours) / bounds).tolist(),
    }


def _listed(text: str, known: Any, kind: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise unknown_name(kind, name, known)
    return names


def command(
    jobs: Annotated[str, typer.Option(help="Of j1, j2, j3, separated by commas.")] = "j1,j2,j3",
    against: Annotated[
        str, typer.Option(help="Of sequential, torch, flower, pfl, fedjax; what is not installed is left out.")
    ] = "sequential,torch,flower,pfl,fedjax",
    repeats: Annotated[int, typer.Option(help="Counted turns of every engine.")] = 5,
    also: Annotated[str, typer.Option(help="Of unselected, start, million.")] = ",".join(ALSO),
    peers_python: Annotated[
        str, typer.Option(help="The Python in whose environment torch, pfl and fedjax are.", show_default=False)
    ] = "",
    folder: Annotated[Path | None, typer.Option(help="Write sim.md and sim.json there.")] = None,
) -> dict[str, Any]:
    """The simulator against the sequential loop, Flower, pfl-research and FedJAX on identical work."""
    import sys

    from rich.console import Console

    from benchmarks.speed import _jobs, _machine, _scale
    from benchmarks.speed._engines import ENGINES

    if repeats < 1:
        raise InvalidInput(f"bench sim needs at least 1 repeat. Got {repeats}.")
    chosen, engines = _listed(jobs, _jobs.JOBS, "job"), _listed(against, ENGINES, "engine")
    extras = _listed(also, ALSO, "measurement")
    python = peers_python or sys.executable
    results: dict[str, Any] = {
        "machine": {**_machine.describe(), "peer_packages": _machine.versions(python)},
        "jobs": {},
    }
    with Console(stderr=True).status("starting") as status:
        for name in chosen:
            results["jobs"][name] = compare(name, engines, repeats, python, status.update)
        for name in extras:
            status.update(name)
            results[name] = getattr(_scale, name)()
    text = as_markdown(results)
    typer.echo(text)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sim.md").write_text(text + "\n")
        (folder / "sim.json").write_text(json.dumps(results, indent=1) + "\n")
    return results


def as_markdown(results: dict[str, Any]) -> str:
    """Tables of everything that was measured."""
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
            f"with an empty compile cache, {start['again_trained_seconds']:.1f} s with a full one (test set and "
            f"everybody's loss: {start['first_evaluated_seconds']:.1f} and {start['again_evaluated_seconds']:.1f} s); "
            f"load {start['load']:.1f}.\n"
        )
    if million := results.get("million"):
        lines.append(
            f"Memory: {million['clients']:,} clients with {million['examples']:,} examples, "
            f"{million['data_mebibytes']:.0f} MiB of data: {million['training_mebibytes']:.0f} MiB at most while "
            f"training, {million['with_losses_mebibytes']:.0f} MiB with everybody's loss, both with the data; "
            f"{1000 * million['round_seconds']:.0f} ms per round of 100 clients.\n"
        )
    return "\n".join(lines).rstrip()


def _job_lines(name: str, job: dict[str, Any]) -> list[str]:
    lines = [
        f"{name.upper()}: {job['title']}. {job['turns']} turns of {job['rounds_per_turn']} rounds each.",
        "",
        "| engine | rounds/s (lowest to highest) | fedpick is faster by (lowest to highest) | best turns "
        "| start and first round | accuracy at the end | largest difference of a weight |",
        "|---|---|---|---|---|---|---|",
    ]
    for engine, found in job["engines"].items():
        start = "" if found["start_seconds"] is None else f"{found['start_seconds']:.1f} s"
        accuracy = "" if found["accuracy"] is None else f"{100 * found['accuracy']:.2f} %"
        ratio = f"{found['ratio']:.2f} ({found['ratio_lowest']:.2f} to {found['ratio_highest']:.2f})"
        ratio += f" | {found['ratio_of_best']:.2f}"
        lines.append(
            f"| {engine} | {found['rate']:.3g} ({found['rate_lowest']:.3g} to {found['rate_highest']:.3g}) "
            f"| {' | ' if engine == 'fedpick' else ratio} | {start} | {accuracy} | {found['largest_difference']:.1e} |"
        )
    spent = ", ".join(f"{what} {value:.2f} ms" for what, value in job["milliseconds_per_round"].items() if value)
    lines += ["", f"Fedpick's time per round, as far as it was waited for: {spent}."]
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
    lines += [f"Left out: {engine} ({why})." for engine, why in job["missing"].items()]
    return lines
