"""CA-Fed, figures 3, 4 and 5: accuracy against one setting, errors of estimates, and decisions side by side.

    for value in 0 0.25 0.5 0.75 1; do fedpick run benchmarks/specs/cafed-kappa2.toml#$value; done
    python -m benchmarks.figures.ca_fed over data.alpha "figure 3" --xlabel heterogeneity
    python -m benchmarks.figures.ca_fed over availability.history "figure 4b: availability" --xlabel "rounds observed"
    python -m benchmarks.figures.ca_fed decisions "figure 5" --policy ca-fed
    python -m benchmarks.figures.ca_fed estimation
    python -m benchmarks.figures.ca_fed schedule clustered

Name experiments by id, hash, title or a part of the title; of several with one title the latest counts.
`fedpick report --figures` draws figures 1, 2 and 5d, which show one experiment. **over** takes any setting with a
number, such as policy.kappa2 or partition.alpha, and prints the table that it draws. **decisions** prints how often
each group was left out. **estimation** measures how fast availability and correlation are learned from masks (figure
4a): the paper's population of 100 clients (g = 0.4, nu = 0.9, epsilon = 0.01), 10 to 10,000 rounds, ten seeds.
**schedule** compares averages of the accuracy: over the rounds that the authors' program logs, more than half of them
among the first 40, over all rounds, and over the last five of the rounds that it logs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.figures import FOLDER
from benchmarks.figures.drawing import draw_decisions, draw_estimation_errors, draw_over
from fedpick import availability
from fedpick.availability.statistics import estimation_error_curve
from fedpick.core.arrays import FloatArray, IntArray
from fedpick.core.types import Clients
from fedpick.experiments.store import Experiment, Store, opened
from fedpick.report.analysis import (
    Difference,
    Quantity,
    RunResults,
    load_results,
    over_seeds,
    over_setting,
    paired_difference,
    policy_named,
)
from fedpick.report.charts.choices import raster_chart
from fedpick.report.material import read_material
from fedpick.report.tables import group_table, to_markdown


def chosen(reader: Store, names: Sequence[str]) -> list[Experiment]:
    """The experiments of these names, each title once, sorted by title."""
    found: dict[str, Experiment] = {}
    for name in names:
        part = [each for each in reader.experiments() if name in each.title]
        for each in part or [reader.experiment(name)]:
            found.setdefault(each.title, each)
    return [found[title] for title in sorted(found)]


def over(options: argparse.Namespace) -> None:
    """Figures 3 and 4b."""
    with opened(options.store) as reader:
        lines = over_setting(reader, chosen(reader, options.experiments), options.setting)
    wanted = {label: points for label, points in lines.items() if not options.labels or label in options.labels}
    values = sorted({value for points in wanted.values() for value, _ in points})
    print(f"| {options.setting} |" + "".join(f" {value:g} |" for value in values))
    print("|---|" + "---:|" * len(values))
    drawn = {}
    for label, points in wanted.items():
        drawn[label] = [
            (value, quantity.mean, quantity.sd or 0.0) for value, quantity in points if quantity.mean is not None
        ]
        cells = {value: f"{100 * mean:.2f} ± {100 * sd:.2f}" for value, mean, sd in drawn[label]}
        print(f"| {label} | " + " | ".join(cells.get(value, "") for value in values) + " |")
    name = options.name or f"cafed-over-{options.setting.replace('.', '-')}"
    print(draw_over(drawn, options.folder / f"{name}.png", xlabel=options.xlabel or options.setting))


def decisions(options: argparse.Namespace) -> None:
    """Figures 5a to 5c."""
    views = {}
    with opened(options.store) as reader:
        for experiment in chosen(reader, options.experiments):
            material = read_material(reader, experiment.id)
            chart = raster_chart(material)
            found = [view for view in (chart.data["views"] if chart else []) if view["policy"] == options.policy]
            seeds = [view for view in found if view["seed"] == options.seed] if options.seed is not None else found
            if not seeds or "exact" not in seeds[0]:
                print(f"{experiment.title}: nothing to draw of {options.policy}, or too many clients or rounds")
                continue
            views[experiment.title.rpartition(": ")[2]] = seeds[0]
            if material.accounts:
                print(f"{experiment.title}\n")
                print(to_markdown(group_table(material.results, material.accounts)))
    print(draw_decisions(views, options.folder / f"{options.name or 'cafed-decisions'}.png"))


def estimation(options: argparse.Namespace) -> None:
    """Figure 4a."""
    process = availability.get("correlated-population")
    curve = estimation_error_curve(process, Clients(num_examples=np.ones(100)), seeds=range(options.seeds))
    print("| rounds observed | error of pi (frequency) | error of pi (chain) | error of lambda |")
    print("|---|---|---|---|")
    for column, rounds in enumerate(curve.observations):
        cells = [
            f"{values[:, column].mean():.4f} ± {values[:, column].std(ddof=1):.4f}"
            for values in (curve.availability, curve.stationary, curve.correlation)
        ]
        print(f"| {rounds:,} | {' | '.join(cells)} |")
    print(draw_estimation_errors(curve, options.folder / f"{options.name or 'cafed-figure-4a'}.png"))


def logged_rounds(rounds: int) -> IntArray:
    """The rounds, counted from 1, after which the authors' program logs the accuracy.

    >>> logged_rounds(60)
    array([ 2,  5,  8, 10, 11, 14, 17, 20, 23, 26, 29, 30, 32, 35, 38, 40, 50,
           60])
    """
    number = np.arange(rounds)
    return np.asarray(number[((number < 40) & (number % 3 == 1)) | (number % 10 == 9)] + 1)


def schedule(options: argparse.Namespace) -> None:
    """What the choice of the evaluated rounds does to the ranking."""

    def of(choose: Callable[[FloatArray], FloatArray]) -> Callable[[RunResults], float]:
        return lambda run: 100 * float(choose(run.rounds["accuracy"]).mean())

    averages = {
        "last five logged": of(lambda accuracy: accuracy[logged_rounds(len(accuracy))[-5:] - 1]),
        "logged rounds": of(lambda accuracy: accuracy[logged_rounds(len(accuracy)) - 1]),
        "all rounds": of(lambda accuracy: accuracy),
    }
    with opened(options.store) as reader:
        for experiment in chosen(reader, options.experiments):
            results = load_results(reader, experiment)
            baseline = policy_named(results, options.against)
            print(f"{experiment.title}, {len(baseline.runs)} seeds; in brackets minus {options.against}, paired\n")
            print("| | " + " | ".join(averages) + " |")
            print("|---|" + "---|" * len(averages))
            for policy in results.policies:
                cells = [
                    f"{_with_spread(over_seeds(policy, average))} "
                    f"({_with_interval(paired_difference(policy, baseline, average))})"
                    for average in averages.values()
                ]
                print(f"| {policy.label} | " + " | ".join(cells) + " |")
            print()


def _with_spread(quantity: Quantity) -> str:
    return "N/A" if quantity.mean is None else f"{quantity.mean:.2f} ± {quantity.sd or 0.0:.2f}"


def _with_interval(difference: Difference) -> str:
    if difference.mean is None or difference.interval is None:
        return "N/A"
    low, high = difference.interval
    return f"{difference.mean:+.2f} [{low:+.2f}, {high:+.2f}]"


def main(arguments: list[str] | None = None) -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for the pictures")
    parser.add_argument("--store", default="results/fedpick.sqlite")
    parser.add_argument("--name", help="of the picture, without .png")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("over", help="figures 3 and 4b")
    command.add_argument("setting", help="section.key, such as data.alpha, availability.history or policy.kappa2")
    command.add_argument("experiments", nargs="+", help="ids, hashes, titles or parts of titles")
    command.add_argument("--labels", nargs="+", help="only these lines")
    command.add_argument("--xlabel")
    command.set_defaults(run=over)
    command = commands.add_parser("decisions", help="figures 5a to 5c")
    command.add_argument("experiments", nargs="+", help="ids, hashes, titles or parts of titles")
    command.add_argument("--policy", default="ca-fed", help="its label")
    command.add_argument("--seed", type=int, help="default: the first")
    command.set_defaults(run=decisions)
    command = commands.add_parser("estimation", help="figure 4a")
    command.add_argument("--seeds", type=int, default=10)
    command.set_defaults(run=estimation)
    command = commands.add_parser("schedule", help="which rounds count, after figure 1")
    command.add_argument("experiments", nargs="+", help="ids, hashes, titles or parts of titles")
    command.add_argument("--against", default="unbiased", help="the policy that the others are compared with")
    command.set_defaults(run=schedule)
    options = parser.parse_args(arguments)
    options.run(options)


if __name__ == "__main__":
    main()
