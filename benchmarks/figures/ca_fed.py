"""CA-Fed, figures 2 to 5: accuracy by round and against one setting, errors of estimates, and decisions side by side.

    for value in 0 0.25 0.5 0.75 1; do fedpick run benchmarks/specs/cafed-kappa2.toml#$value; done
    python -m benchmarks.figures.ca_fed over data.alpha "figure 3" --xlabel heterogeneity --against unbiased
    python -m benchmarks.figures.ca_fed over availability.history "4b: availability" --window 5 --against ca-fed-bayes
    python -m benchmarks.figures.ca_fed decisions "figure 5" --policy ca-fed
    python -m benchmarks.figures.ca_fed estimation
    python -m benchmarks.figures.ca_fed schedule clustered
    python -m benchmarks.figures.ca_fed schedule "figure 2" --rounds 40 100 200 500

Name experiments by id, hash, title or a part of the title; of several with one title the latest counts.
`fedpick report --figures` draws figures 1 and 5d, which show one experiment. **over** takes any setting with a number,
such as policy.kappa2 or partition.alpha, and prints the table that it draws. **decisions** prints how often
each group was left out. **estimation** measures how fast availability and correlation are learned from masks (figure
4a): the paper's population of 100 clients (g = 0.4, nu = 0.9, epsilon = 0.01), 10 to 10,000 rounds, ten seeds.
**schedule** compares averages of the accuracy: over the rounds that the authors' program logs, more than half of them
among the first 40, over all rounds, and over the last five of the rounds that it logs. With --rounds it prints and
draws the accuracy after these rounds instead (figure 2a).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
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
    PolicyResults,
    Quantity,
    RunMeasure,
    RunResults,
    final_accuracy,
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
    measure = partial(final_accuracy, window=options.window)
    with opened(options.store) as reader:
        experiments = chosen(reader, options.experiments)
        lines = over_setting(reader, experiments, options.setting, measure)
        differences: dict[tuple[str, float], Difference] = {}
        for experiment in experiments if options.against else []:
            minus = _minus(policy_named(load_results(reader, experiment), options.against), measure)
            for label, points in over_setting(reader, [experiment], options.setting, minus).items():
                differences |= {(label, value): Difference(quantity.values) for value, quantity in points}
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
        for value in cells:
            if (label, value) in differences and label != options.against:
                cells[value] += f" ({_with_interval(differences[label, value])})"
        print(f"| {label} | " + " | ".join(cells.get(value, "") for value in values) + " |")
    name = options.name or f"cafed-over-{options.setting.replace('.', '-')}"
    print(draw_over(drawn, options.folder / f"{name}.png", xlabel=options.xlabel or options.setting))


def _minus(baseline: PolicyResults, measure: RunMeasure) -> RunMeasure:
    """The measure, in points, minus that of the baseline with the same seed."""
    others = {run.run.seed: measure(run) for run in baseline.runs}

    def difference(run: RunResults) -> float | None:
        own, other = measure(run), others.get(run.run.seed)
        return None if own is None or other is None else 100 * (own - other)

    return difference


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
    """What the choice of the evaluated rounds does to the ranking, or the accuracy after some rounds (figure 2)."""

    def of(choose: Callable[[FloatArray], FloatArray]) -> Callable[[RunResults], float]:
        return lambda run: 100 * float(choose(run.rounds["accuracy"]).mean())

    averages = {
        "last five logged": of(lambda accuracy: accuracy[logged_rounds(len(accuracy))[-5:] - 1]),
        "logged rounds": of(lambda accuracy: accuracy[logged_rounds(len(accuracy)) - 1]),
        "all rounds": of(lambda accuracy: accuracy),
    }
    if options.rounds:
        averages = {f"round {number}": of(itemgetter(slice(number - 1, number))) for number in options.rounds}
    drawn: dict[str, list[tuple[float, float, float]]] = {}
    with opened(options.store) as reader:
        for experiment in chosen(reader, options.experiments):
            results = load_results(reader, experiment)
            baseline = policy_named(results, options.against)
            print(f"{experiment.title}, {len(baseline.runs)} seeds; in brackets minus {options.against}, paired\n")
            print("| | " + " | ".join(averages) + " |")
            print("|---|" + "---|" * len(averages))
            for policy in results.policies:
                if options.labels and policy.label not in options.labels:
                    continue
                found = [over_seeds(policy, average) for average in averages.values()]
                cells = [
                    f"{_with_spread(quantity)} ({_with_interval(paired_difference(policy, baseline, average))})"
                    for quantity, average in zip(found, averages.values(), strict=True)
                ]
                print(f"| {policy.label} | " + " | ".join(cells) + " |")
                drawn[policy.label] = [
                    (number, quantity.mean / 100, 0.0)
                    for number, quantity in zip(options.rounds or [], found, strict=False)
                    if quantity.mean is not None
                ]
            print()
    if options.rounds:
        path = options.folder / f"{options.name or 'cafed-figure-2'}.png"
        print(draw_over(drawn, path, xlabel="round", ylabel="test accuracy"))


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
    command.add_argument("--window", type=int, default=1, help="mean of this many last evaluations")
    command.add_argument("--against", help="add the paired differences to this policy")
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
    command = commands.add_parser("schedule", help="which rounds count, after figure 1; with --rounds, figure 2")
    command.add_argument("experiments", nargs="+", help="ids, hashes, titles or parts of titles")
    command.add_argument("--against", default="unbiased", help="the policy that the others are compared with")
    command.add_argument("--rounds", nargs="+", type=int, help="print and draw the accuracy after these rounds")
    command.add_argument("--labels", nargs="+", help="only these policies")
    command.set_defaults(run=schedule)
    options = parser.parse_args(arguments)
    options.run(options)


if __name__ == "__main__":
    main()
