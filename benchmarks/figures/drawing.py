"""Drawing: every function takes plain arrays, writes one picture and returns its path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.theory.fedcor import Components, Normality
from fedpick.availability.statistics import EstimationErrors
from fedpick.core.arrays import FloatArray
from fedpick.core.errors import InvalidInput
from fedpick.report.charts.chart import styles_of
from fedpick.report.figures.canvas import new_figure, save_figure
from fedpick.report.figures.experiment import LINE_STYLES, draw_cells

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

__all__ = [
    "draw_choices",
    "draw_components",
    "draw_counts",
    "draw_decisions",
    "draw_estimation_errors",
    "draw_loss_curves",
    "draw_over",
    "draw_picks",
    "draw_rasters",
    "draw_similarities",
]


_BLUE, _ORANGE, _GREEN, _GREY = "#0072B2", "#D55E00", "#00876A", "#767676"


def _colours(labels: Sequence[str]) -> dict[str, str]:
    return {label: style.light for label, style in styles_of(labels).items()}


def draw_components(
    settings: Mapping[str, tuple[Components, Sequence[Normality]]], path: str | Path, *, title: str = ""
) -> Path:
    """Histograms of principal components with the Gaussian of the same mean and variance (FedCor, figures 2, 12).

    One row per setting, one column per component.
    """
    columns = max(len(found) for _, found in settings.values())
    figure = new_figure(2.4 * columns + 0.4, 2.1 * len(settings) + 0.4)
    grid = figure.subplots(len(settings), columns, squeeze=False)
    for axes_row, (name, (components, found)) in zip(grid, settings.items(), strict=True):
        for column, axes in enumerate(axes_row):
            if column >= len(found):
                axes.axis("off")
                continue
            _draw_histogram(axes, components.scores[:, column])
            share, measured = components.share[column], found[column]
            axes.set_title(f"component {column + 1}: {share:.0%} of variance", fontsize=8)
            axes.text(0.03, 0.95, f"W = {measured.shapiro:.3f}", transform=axes.transAxes, fontsize=7, va="top")
            axes.tick_params(labelsize=7)
        axes_row[0].set_ylabel(f"{name}\ndensity", fontsize=8)
    if title:
        figure.suptitle(title, fontsize=10)
    return save_figure(figure, path, dpi=110)


def _draw_histogram(axes: Axes, values: FloatArray) -> None:
    axes.hist(values, bins=30, density=True, color=_BLUE, alpha=0.65)
    mean, spread = values.mean(), values.std(ddof=1)
    where = np.linspace(min(values.min(), mean - 3 * spread), max(values.max(), mean + 3 * spread), 200)
    density = np.exp(-(((where - mean) / spread) ** 2) / 2) / (spread * np.sqrt(2 * np.pi))
    axes.plot(where, density, color=_ORANGE, linewidth=1.5)
    axes.set_yticks([])


def draw_similarities(
    settings: Mapping[str, tuple[FloatArray, FloatArray, FloatArray]], path: str | Path, *, title: str = ""
) -> Path:
    """Similarity of covariances over rounds (FedCor, figures 3, 9).

    For every setting: the R rounds, the R - 1 similarities of each to the next, and R similarities of two halves of one
    round's samples (dashed), which show the effect of sampling alone.
    """
    figure = new_figure(6.2, 3.6)
    axes = figure.add_subplot()
    colours = _colours(list(settings))
    for name, (rounds, later, halves) in settings.items():
        axes.plot(rounds[:-1], later, "o-", color=colours[name], markersize=4, label=name)
        axes.plot(rounds, halves, "--", color=colours[name], linewidth=1)
    axes.plot([], [], "--", color=_GREY, linewidth=1, label="two halves, same round")
    axes.set(xlabel="round", ylabel="similarity to the next covariance", ylim=(0, 1.03), title=title)
    axes.grid(color="#E4E4E0", linewidth=0.6)
    axes.legend(frameon=False, fontsize=8)
    return save_figure(figure, path, dpi=110)


def draw_choices(
    points: FloatArray,
    labels: NDArray[np.int64],
    choices: Mapping[str, tuple[NDArray[np.int64], FloatArray, float]],
    path: str | Path,
) -> Path:
    """Clients with one example each, the chosen clients, and the classifier they lead to (FedCor, figure 1).

    Args:
        points: (N, 2) examples.
        labels: (N,) 0 or 1.
        choices: for every name the chosen clients, the line (w1, w2, b) of the model and its global loss.
        path: of the picture.
    """
    figure = new_figure(6.4, 4.6)
    axes = figure.add_subplot()
    for label, (colour, marker) in enumerate((("#9CC3DE", "o"), ("#EDB793", "s"))):
        of_label = points[labels == label]
        axes.scatter(of_label[:, 0], of_label[:, 1], s=22, c=colour, marker=marker, label=f"clients of class {label}")
    low, high = points.min(axis=0) - 0.4, points.max(axis=0) + 0.4
    colours = _colours(list(choices))
    rings = (90, 190, 310, 450)
    for ring, (name, (chosen, line, loss)) in zip(rings, choices.items(), strict=False):
        # The point of the line nearest to the origin, and its direction.
        normal, length = line[:2], max(float(np.hypot(*line[:2])), 1e-12)
        foot = -line[2] * normal / length**2
        reach = np.array([[-20.0], [20.0]]) * np.array([-normal[1], normal[0]]) / length
        axes.plot(*(foot + reach).T, color=colours[name], linewidth=1.6, label=f"{name}: loss {loss:.3f}")
        axes.scatter(
            points[chosen, 0], points[chosen, 1], s=ring, facecolors="none", edgecolors=colours[name], linewidths=1.6
        )
    axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), xlabel="x1", ylabel="x2")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return save_figure(figure, path, dpi=110)


def draw_picks(
    means: FloatArray,
    spreads: FloatArray,
    picks: NDArray[np.int64],
    others: NDArray[np.int64],
    predictions: FloatArray,
    values: FloatArray,
    path: str | Path,
) -> Path:
    """The picks of algorithm 1, one after another (FedGP, figure 1).

    Args:
        means: (m + 1, 2, N) before pick i: the posterior means after the pick and after the other candidate; the last
            entry is the final mean, twice.
        spreads: (m + 1, 2, N) mean and standard deviation before pick i; the last: after all picks.
        picks: (m,) chosen clients.
        others: (m,) a candidate that was not chosen.
        predictions: (m, 2) predicted loss change of the pick and of the other candidate.
        values: (m, 2) mean loss change that they would lead to; lower is better.
        path: of the picture.
    """
    steps = len(picks)
    figure = new_figure(3.1 * (steps + 1), 3.1)
    panels = figure.subplots(1, steps + 1, sharey=True)
    clients = np.arange(means.shape[2])
    for step, axes in enumerate(panels):
        mean, spread = spreads[step]
        axes.fill_between(clients, mean - spread, mean + spread, color=_BLUE, alpha=0.18, linewidth=0)
        axes.plot(clients, mean, color=_BLUE, linewidth=1.2, label="mean ± sd" if step == 0 else None)
        axes.axhline(0, color=_GREY, linewidth=0.6)
        axes.set_xlabel("client")
        if step == steps:
            axes.scatter(picks, mean[picks], marker="x", color=_ORANGE, zorder=3)
            axes.set_title("after the picks", fontsize=9)
            continue
        pairs = ((picks[step], _ORANGE), (others[step], "black"))
        for place, (client, colour) in enumerate(pairs):
            predicted = predictions[step, place]
            text = f"{client}: {values[step, place]:.3f}"
            axes.plot(clients, means[step, place], color=colour, linewidth=1, label=text)
            axes.annotate("", (client, predicted), (client, mean[client]), arrowprops={"arrowstyle": "->"})
            axes.scatter([client], [predicted], marker="x", color=colour, zorder=3)
        axes.set_title(f"pick {step + 1}: client {picks[step]}", fontsize=9)
        axes.legend(frameon=False, fontsize=7, loc="lower center")
    panels[0].set_ylabel("loss change")
    return save_figure(figure, path, dpi=110)


def draw_counts(settings: Mapping[str, Mapping[str, NDArray[np.int64]]], path: str | Path) -> Path:
    """How often each client was selected: one panel per setting, one histogram per policy (FedGS, figure 4)."""
    names = list(dict.fromkeys(label for counts in settings.values() for label in counts))
    if not names:
        raise InvalidInput("There are no counts to draw.")
    colours = _colours(names)
    figure = new_figure(4.2 * len(settings) + 0.2, 3.4)
    for axes, (name, counts) in zip(figure.subplots(1, len(settings), squeeze=False)[0], settings.items(), strict=True):
        largest = max(int(values.max(initial=0)) for values in counts.values())
        bins = np.arange(0, largest + 2 + largest // 40, max(1, largest // 40)) - 0.5
        for label, values in counts.items():
            text = f"{label}: sd {values.std(ddof=1):.1f}"
            axes.hist(values, bins=bins.tolist(), color=colours[label], alpha=0.6, label=text)
        axes.set(xlabel="times selected", ylabel="clients", title=name)
        axes.legend(frameon=False, fontsize=8)
    return save_figure(figure, path, dpi=110)


def draw_loss_curves(
    settings: Mapping[str, Mapping[str, tuple[FloatArray, FloatArray]]],
    path: str | Path,
    *,
    smooth: int = 1,
    ylabel: str = "test loss",
) -> Path:
    """Loss by round: one panel per setting, one line per policy from (rounds, (S, R) losses) (FedGS, figure 5).

    The line is the mean over the seeds, of `smooth` neighbouring values; the band spans the seeds.
    """
    figure = new_figure(4.4 * len(settings) + 0.2, 3.4)
    from matplotlib.ticker import LogLocator, NullFormatter

    names = list(dict.fromkeys(label for curves in settings.values() for label in curves))
    colours = _colours(names)
    panels = figure.subplots(1, len(settings), squeeze=False)[0]
    for axes, (name, curves) in zip(panels, settings.items(), strict=True):
        for label, (rounds, losses) in curves.items():
            kernel = np.ones(smooth) / smooth
            lines = np.stack([np.convolve(row, kernel, mode="valid") for row in losses])
            where = rounds[smooth - 1 :]
            low, high = lines.min(axis=0), lines.max(axis=0)
            axes.fill_between(where, low, high, color=colours[label], alpha=0.12, linewidth=0)
            axes.plot(where, lines.mean(axis=0), color=colours[label], linewidth=1.2, label=label)
        axes.set(xlabel="round", ylabel=ylabel, title=name, yscale="log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1,) if high > 1000 * low else (1, 2, 3, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(which="both", color="#E4E4E0", linewidth=0.5)
        axes.legend(frameon=False, fontsize=8)
    return save_figure(figure, path, dpi=110)


def draw_rasters(rasters: Mapping[str, NDArray[np.bool_]], path: str | Path) -> Path:
    """Availability: one panel per name, one row per client, one column per round (FedGS, figure 8)."""
    columns = min(4, len(rasters))
    rows = -(-len(rasters) // columns)
    figure = new_figure(2.7 * columns, 2.3 * rows)
    from matplotlib.colors import ListedColormap

    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in panels[len(rasters) :]:
        axes.axis("off")
    for axes, (name, raster) in zip(panels, rasters.items(), strict=False):
        colours = ListedColormap(["#F1F1EE", _BLUE])
        axes.imshow(raster, aspect="auto", interpolation="nearest", cmap=colours, vmin=0, vmax=1, origin="lower")
        axes.set_title(f"{name}: {raster.mean():.0%}", fontsize=9)
        axes.set(xlabel="round", ylabel="client")
        axes.tick_params(labelsize=7)
    return save_figure(figure, path, dpi=110)


def draw_over(
    lines: Mapping[str, Sequence[tuple[float, float, float]]],
    path: str | Path,
    *,
    xlabel: str,
    ylabel: str = "test accuracy at the end",
) -> Path:
    """A measure against one setting; every label has (value, mean, deviation) (CA-Fed, figures 3, 4b)."""
    if not any(lines.values()):
        raise InvalidInput("There are no points to draw.")
    figure = new_figure(6.2, 3.6)
    axes = figure.add_subplot()
    places = sorted({value for points in lines.values() for value, _, _ in points})
    logarithmic = places[0] > 0 and places[-1] >= 20 * places[0]
    for label, style in styles_of(list(lines)).items():
        values, means, spreads = np.array(sorted(lines[label])).reshape(-1, 3).T
        axes.errorbar(
            values, means, spreads, color=style.light, linestyle=LINE_STYLES[style.dash], marker="o", markersize=3.5,
            linewidth=1.3, capsize=2, elinewidth=0.8, label=label,
        )  # fmt: skip
    axes.set(xlabel=xlabel, ylabel=ylabel, xscale="log" if logarithmic else "linear")
    if not logarithmic and len(places) <= 8:
        axes.set_xticks(places)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    axes.grid(color="#E4E4E0", linewidth=0.6)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return save_figure(figure, path, dpi=110)


def draw_decisions(views: Mapping[str, Mapping[str, Any]], path: str | Path) -> Path:
    """Available, chosen and excluded clients: a panel per view of the report's raster (CA-Fed, figure 5)."""
    if not views:
        raise InvalidInput("There are no decisions to draw.")
    figure = new_figure(3.6 * len(views) + 0.6, 3.6)
    panels = figure.subplots(1, len(views), squeeze=False)[0]
    used: dict[str, Patch] = {}
    for axes, (name, view) in zip(panels, views.items(), strict=True):
        used |= {str(patch.get_label()): patch for patch in draw_cells(axes, view, _BLUE)}
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("round")
        axes.tick_params(labelsize=7)
    figure.legend(handles=list(used.values()), loc="outside lower center", ncols=len(used), frameon=False, fontsize=8)
    return save_figure(figure, path, dpi=110)


def draw_estimation_errors(errors: EstimationErrors, path: str | Path) -> Path:
    """Mean absolute error of pi and lambda against the rounds observed (CA-Fed, figure 4a); bars span the seeds."""
    figure = new_figure(6.2, 4.2)
    axes = figure.add_subplot()
    series = (
        ("λ, correlation", errors.correlation, _ORANGE, "s-"),
        ("π, frequency", errors.availability, _BLUE, "o-"),
        ("π, from the estimated chain", errors.stationary, _GREEN, "^--"),
    )
    for label, values, colour, style in series:
        mean = values.mean(axis=0)
        spread = np.stack([mean - values.min(axis=0), values.max(axis=0) - mean])
        axes.errorbar(
            errors.observations, mean, yerr=spread, fmt=style, color=colour, label=label, markersize=4, capsize=2
        )
    axes.set(
        xscale="log", yscale="log", xlabel="rounds observed", ylabel="mean absolute error", title="Estimation errors"
    )
    axes.grid(which="both", color="#E4E4E0", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False)
    return save_figure(figure, path, dpi=110)
