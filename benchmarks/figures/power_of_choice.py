"""Power-of-Choice, figures 1, 2 and 8: losses, selection profile and selection skew on quadratics.

    fedpick run benchmarks/specs/power-of-choice-quadratic.toml#toy
    python -m benchmarks.figures.power_of_choice toy
    fedpick run benchmarks/specs/power-of-choice-quadratic.toml#30 --rounds 25000
    python -m benchmarks.figures.power_of_choice quadratic
    python -m benchmarks.figures.power_of_choice skew --clients 30 --candidates 6 15 30

**toy** (figure 1). Prints the global loss after some rounds: median over the seeds (quartiles).

**quadratic** (figures 2 (a), (b), 8). Prints the excess of the global loss over its minimum, in per cent of the
minimum: mean over the seeds (lowest to highest). Then, seed by seed, the round in which each policy first reaches the
level that rand has at some rounds. Then the share of all selections of the most and the least selected clients.

**skew** (figure 2 (d)). Prints rho-bar and rho-tilde / rho-bar of rand and pow-d on the quadratics of appendix F. The
paper only says of its grid that it is "a large range of possible w, w'". Here w and w' come from a box around the
origin, where training starts, and w* is added to the w'. The last column is the smallest skew with w' = w.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import FOLDER
from benchmarks.figures.drawing import draw_loss_curves, draw_over
from fedpick import Clients, Policy, data, policies
from fedpick.core.arrays import FloatArray
from fedpick.data.synthetic import quadratic_optimum
from fedpick.experiments.store import opened
from fedpick.theory.pow_d import grid, objective_gap, quadratics, skew_extremes

LOOKS = (2500, 5000, 10_000, 15_000, 25_000)
LEVELS = (5000, 10_000, 15_000)
TOY = (1, 2, 3, 5, 10, 20)
Curves = dict[str, dict[int, tuple[FloatArray, FloatArray]]]
Profiles = dict[str, FloatArray]


def excess_losses(store: str, name: str | None) -> tuple[str, Curves]:
    """The title, and by label and seed the rounds and (F - F*) / F* there."""
    curves: Curves = {}
    with opened(store) as reader:
        experiment = reader.experiment(name)
        for run in reader.runs(experiment.id):
            columns = reader.rounds(run.id)
            known = np.isfinite(columns["objective"])
            options = {key: value for key, value in run.settings["data"].items() if key != "name"}
            lowest = quadratic_optimum(data.load("quadratic", **{"seed": run.seed, **options}))[1]
            curve = columns["round"][known] + 1.0, columns["objective"][known] / lowest - 1
            curves.setdefault(run.label, {})[run.seed] = curve
    return experiment.title, curves


def toy(options: argparse.Namespace) -> None:
    """Figure 1."""
    found: dict[str, list[FloatArray]] = {}
    with opened(options.store) as reader:
        for run in reader.runs(reader.experiment(options.experiment).id):
            found.setdefault(run.label, []).append(reader.rounds(run.id)["objective"])
    print("| after round |" + "".join(f" {look} |" for look in TOY) + "\n|---|" + "---|" * len(TOY))
    for label, rows in found.items():
        quartiles = np.percentile(np.stack(rows), [50, 25, 75], axis=0).T
        cells = ("{:.1f} ({:.1f} to {:.1f})".format(*quartiles[look - 1]) for look in TOY)
        print(f"| {label} | " + " | ".join(cells) + " |")


def selection_profiles(store: str, name: str | None) -> Profiles:
    """By label, (S, K) shares of all places, the most selected client of each seed first (figure 8)."""
    found: dict[str, list[FloatArray]] = {}
    with opened(store) as reader:
        for run in reader.runs(reader.experiment(name).id):
            counts = np.sort(reader.selection_counts(run.id))[::-1]
            found.setdefault(run.label, []).append(counts / counts.sum())
    return {label: np.stack(rows) for label, rows in found.items()}


def print_profiles(profiles: Profiles) -> None:
    """A line per policy."""
    print(
        "\n| policy | the most selected client | a tenth of the clients | the less selected half |\n|---|---|---|---|"
    )
    for label, shares in profiles.items():
        size = shares.shape[1]
        parts = (shares[:, 0], shares[:, : size // 10].sum(axis=1), shares[:, size // 2 :].sum(axis=1))
        print(
            f"| {label} |"
            + "".join(f" {100 * p.mean():.1f} ({100 * p.min():.1f} to {100 * p.max():.1f}) |" for p in parts)
        )


def first_below(curve: tuple[FloatArray, FloatArray], level: float) -> str:
    """The first round at which the loss was measured to be at most this; "never"."""
    below = np.flatnonzero(curve[1] <= level)
    return f"{int(curve[0][below[0]]):,}" if len(below) else "never"


def quadratic(options: argparse.Namespace) -> None:
    """Figures 2 (a), (b) and 8."""
    title, curves = excess_losses(options.store, options.experiment)
    looks = [look for look in LOOKS if all(look <= curve[0][-1] for each in curves.values() for curve in each.values())]
    print("| policy |" + "".join(f" round {look:,} |" for look in looks) + "\n|---|" + "---|" * len(looks))
    for label, each in curves.items():
        values = [[100 * np.interp(look, *curve) for curve in each.values()] for look in looks]
        print(f"| {label} |" + "".join(f" {np.mean(v):.3g} ({min(v):.3g} to {max(v):.3g}) |" for v in values))
    levels = [level for level in LEVELS if level in looks]
    print(
        "\n| policy |"
        + "".join(f" {options.against} at {level:,} |" for level in levels)
        + "\n|---|"
        + "---|" * len(levels)
    )
    for label, each in curves.items():
        hits = [
            ", ".join(
                first_below(curve, float(np.interp(level, *curves[options.against][seed])))
                for seed, curve in each.items()
            )
            for level in levels
        ]
        print(f"| {label} |" + "".join(f" {hit} |" for hit in hits))
    drawn = {
        label: (next(iter(each.values()))[0], np.maximum(np.stack([curve[1] for curve in each.values()]), 1e-7))
        for label, each in curves.items()
    }
    print(
        draw_loss_curves(
            {title.split(": ")[-1]: drawn}, options.folder / "power-of-choice-quadratic.png", ylabel="(F - F*) / F*"
        )
    )
    profiles = selection_profiles(options.store, options.experiment)
    print_profiles(profiles)
    ranked = {
        label: list(zip(range(shares.shape[1]), shares.mean(axis=0), shares.std(axis=0), strict=True))
        for label, shares in profiles.items()
    }
    print(
        draw_over(
            ranked,
            options.folder / "power-of-choice-profile.png",
            xlabel="clients, the most selected first",
            ylabel="share of all places",
        )
    )


def skew(options: argparse.Namespace) -> None:
    """Figure 2 (d)."""
    chosen: dict[str, Policy[Any]] = {"rand": policies.get("md")}
    chosen |= {f"pow-d, d = {d}": policies.get("pow-d", num_candidates=d) for d in options.candidates}
    corner = [options.range] * 5
    points = list(grid([-value for value in corner], corner, options.per_axis))
    evaluated = list(grid([-value for value in corner], corner, options.evaluated_per_axis))
    print(f"{'policy':<16} {'seed':>4} {'Gamma':>9} {'rho-bar':>8} {'rho-tilde':>9} {'ratio':>8} {'same w':>8}")
    for seed in range(options.seeds):
        drawn = data.load("quadratic", num_clients=options.clients, seed=seed)
        assert drawn.client_sizes is not None
        task = quadratics(drawn.train_x[:, 0, 0], drawn.train_x[:, 1], Clients(num_examples=drawn.client_sizes))
        for label, policy in chosen.items():
            found = skew_extremes(
                policy,
                task,
                points,
                evaluated=evaluated,
                budget=options.clients // 10,
                samples=options.samples,
                seed=seed,
            )
            print(
                f"{label:<16} {seed:>4} {objective_gap(task):>9.4g} {found.rho_bar:>8.3f} {found.rho_tilde:>9.3f} "
                f"{found.ratio:>8.3f} {found.rho_same:>8.3f}",
                flush=True,
            )


def main(arguments: list[str] | None = None) -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("toy", help="figure 1")
    command.add_argument("--store", default="results/fedpick.sqlite")
    command.add_argument("--experiment", help="title, id or hash; default: the latest")
    command.set_defaults(run=toy)
    command = commands.add_parser("quadratic", help="figures 2 (a), (b) and 8")
    command.add_argument("--store", default="results/fedpick.sqlite")
    command.add_argument("--experiment", help="title, id or hash; default: the latest")
    command.add_argument("--against", default="rand", help="label of the policy that the others are compared with")
    command.add_argument("--folder", type=Path, default=FOLDER, help="for the pictures")
    command.set_defaults(run=quadratic)
    command = commands.add_parser("skew", help="figure 2 (d)")
    command.add_argument("--clients", type=int, default=30, help="K; the cohort is a tenth of it")
    command.add_argument("--candidates", type=int, nargs="+", default=[6, 15, 30], help="values of d")
    command.add_argument("--seeds", type=int, default=5, help="federations")
    command.add_argument("--range", type=float, default=200.0, help="half the side of the box")
    command.add_argument("--per-axis", type=int, default=2, help="points per axis for w, in 5 dimensions")
    command.add_argument("--evaluated-per-axis", type=int, default=5, help="points per axis for w'")
    command.add_argument("--samples", type=int, default=10_000, help="cohorts drawn at every w")
    command.set_defaults(run=skew)
    options = parser.parse_args(arguments)
    options.run(options)


if __name__ == "__main__":
    main()
