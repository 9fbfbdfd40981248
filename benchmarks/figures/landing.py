"""The picture of the landing page: accuracy by models sent, for a few policies in one experiment of a store.

python -m benchmarks.figures.landing arena.sqlite docs/figures/landing.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from fedpick.experiments.store import open_store
from fedpick.report import analysis
from fedpick.report.analysis import PolicyResults
from fedpick.report.charts.chart import styles_of
from fedpick.report.figures.canvas import new_figure, save_figure

__all__ = ["draw"]

POLICIES = ("herd", "fedcor", "fedgs", "uniform", "pow-d")
WINDOW = 15
"""Evaluations in a moving mean: with two label shards per client, the accuracy jumps from round to round."""


def draw(policies: Sequence[PolicyResults], path: Path) -> Path:
    """Draw the accuracy of each policy: the mean over the seeds, and the range between them."""
    figure = new_figure(4.6, 3.2)
    axis = figure.add_subplot()
    for policy in policies:
        curves = [np.convolve(run.rounds["accuracy"], np.full(WINDOW, 1 / WINDOW), mode="valid") for run in policy.runs]
        sent = policy.runs[0].rounds["models_down"][WINDOW - 1 :]
        colour = styles_of(POLICIES)[policy.label].light
        axis.plot(sent, 100 * np.mean(curves, axis=0), label=policy.label, color=colour, linewidth=1.8)
        axis.fill_between(sent, 100 * np.min(curves, axis=0), 100 * np.max(curves, axis=0), color=colour, alpha=0.15)
    axis.set(xlabel="models sent to clients (logarithmic)", ylabel="test accuracy, %", xscale="log")
    axis.set_xticks([100, 200, 500, 1000, 2000, 5000])
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower right")
    return save_figure(figure, path, dpi=160)


def main(arguments: list[str] | None = None) -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("store")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--title", default="arena: fmnist-2spc", help="title of the experiment")
    options = parser.parse_args(arguments)
    with closing(open_store(options.store)) as store:
        titled = [each for each in store.experiments() if each.title == options.title]
        experiment = max(titled, key=lambda each: len(store.runs(each.id)))  # the one with the most seeds
        results = analysis.load_results(store, experiment)
    found = {policy.label: policy for policy in results.policies}
    print(draw([found[label] for label in POLICIES], options.picture))


if __name__ == "__main__":
    main()
