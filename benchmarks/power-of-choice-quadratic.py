"""Power-of-Choice, figures 2 (a), (b) and 8: how far the global loss is above its minimum, and who is selected.

    fedpick run benchmarks/specs/power-of-choice-quadratic.toml#30 --rounds 25000
    python benchmarks/power-of-choice-quadratic.py

Prints, in per cent of the minimum, the mean over the seeds (least to most), and in which round each policy first is
where rand is at some rounds, seed by seed; then the shares of all places that the most and the least selected clients
have had.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from benchmarks.paper_figures import draw_loss_curves, draw_over
from fedpick import data
from fedpick.data.synthetic import quadratic_optimum
from fedpick.report.material import opened

FIGURE = Path(__file__).parent.parent / "docs/figures/power-of-choice-quadratic.png"
PROFILE = FIGURE.with_name("power-of-choice-profile.png")
LOOKS = (2500, 5000, 10_000, 15_000, 25_000)
LEVELS = (5000, 10_000, 15_000)
Curves = dict[str, dict[int, tuple[np.ndarray, np.ndarray]]]
Profiles = dict[str, np.ndarray]


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
            curve = columns["round"][known] + 1, columns["objective"][known] / lowest - 1
            curves.setdefault(run.label, {})[run.seed] = curve
    return experiment.title, curves


def selection_profiles(store: str, name: str | None) -> Profiles:
    """By label, (S, K) shares of all places, the most selected client of each seed first (figure 8)."""
    found: dict[str, list[np.ndarray]] = {}
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


def first_below(curve: tuple[np.ndarray, np.ndarray], level: float) -> str:
    """The first round at which the loss was measured to be at most this; "never"."""
    below = np.flatnonzero(curve[1] <= level)
    return f"{int(curve[0][below[0]]):,}" if len(below) else "never"


def main() -> None:
    """Print both tables and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="results/fedpick.sqlite")
    parser.add_argument("--experiment", help="title, id or hash; default: the latest")
    parser.add_argument("--against", default="rand", help="label of the policy whose levels count")
    parser.add_argument("--figure", type=Path, default=FIGURE)
    parser.add_argument("--profile", type=Path, default=PROFILE, help="where the picture of who is selected goes")
    options = parser.parse_args()
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
    print(draw_loss_curves({title.split(": ")[-1]: drawn}, options.figure, ylabel="(F - F*) / F*"))
    profiles = selection_profiles(options.store, options.experiment)
    print_profiles(profiles)
    ranked = {
        label: list(zip(range(shares.shape[1]), shares.mean(axis=0), shares.std(axis=0), strict=True))
        for label, shares in profiles.items()
    }
    print(draw_over(ranked, options.profile, xlabel="clients, the most selected first", ylabel="share of all places"))


if __name__ == "__main__":
    main()
