"""The figures that compare: groups of clients, paired differences, one hyper-parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedpick.report.charts_palette import Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = ["draw_best", "draw_forest", "draw_groups", "draw_sweep"]

_INK, _GREY = "#333333", "#767676"


def _percent(value: float, _: Any) -> str:
    return f"{100 * value:g} %"


def draw_groups(
    figure: Figure, axes: Axes, data: Mapping[str, Any], measure: Mapping[str, Any], styles: Mapping[str, Style]
) -> None:
    """What groups of clients got, in bars; what they should have had, across them (CA-Fed, figure 1d)."""
    names, width = data["groups"], 0.84 / max(len(measure["series"]), 1)
    for place, (label, cells) in enumerate(measure["series"].items()):
        across = [index - 0.42 + width * (place + 0.5) for index in range(len(names))]
        heights = [cell["mean"] or 0.0 for cell in cells]
        axes.bar(across, heights, width * 0.9, color=styles[label].light, label=label)
        for at, cell, height in zip(across, cells, heights, strict=True):
            if cell["sd"]:
                # A share is never below 0, whatever its deviation.
                ends = [[min(cell["sd"], height)], [cell["sd"]]]
                axes.errorbar(at, height, ends, color=_INK, linewidth=0.7, capsize=1)
    if "target" in measure:
        lefts, rights = [index - 0.46 for index in range(len(names))], [index + 0.46 for index in range(len(names))]
        axes.hlines(measure["target"], lefts, rights, color="black", linewidth=1.3, label="target")
    few = len(names) <= 4
    axes.set_xticks(
        range(len(names)),
        [name.replace(", ", ",\n") if few else name.removeprefix("cluster ") for name in names],
        fontsize=7,
    )
    axes.grid(axis="x", visible=False)
    axes.set(ylabel=measure["name"], ylim=(0, None), xlabel="" if few else data["by"])
    axes.yaxis.set_major_formatter(_percent)
    figure.legend(loc="outside upper center", ncols=min(len(measure["series"]) + 1, 3 if few else 6))


def draw_forest(axes: Axes, data: Mapping[str, Any], measure: Mapping[str, Any], styles: Mapping[str, Style]) -> None:
    """A line for each policy: its difference to one policy and the confidence interval."""
    labels = list(measure["series"])
    axes.axvline(0, color=_GREY, linewidth=0.9)
    for row, label in enumerate(labels):
        cell, colour = measure["series"][label], styles[label].light
        if cell["low"] is not None:
            axes.plot([cell["low"], cell["high"]], [row, row], color=colour, linewidth=1.6)
        axes.plot([cell["mean"]], [row], "s", color=colour, markersize=4.5)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"{measure['name']}\nminus {data['baseline']}")


def _scale(data: Mapping[str, Any]) -> str:
    return "log" if data["logarithmic"] else "linear"


def _ticks(axis: Axis, data: Mapping[str, Any]) -> None:
    """The values that were tried, where they are few."""
    if len(data["values"]) <= 8:
        axis.set_ticks(data["values"], labels=[f"{value:g}" for value in data["values"]])
        axis.set_ticks([], minor=True)
    elif data["logarithmic"]:
        axis.set_major_formatter("{x:g}")  # powers of ten as formulas: texts are never read as such here
        axis.set_minor_formatter("")


def draw_sweep(axes: Axes, data: Mapping[str, Any], styles: Mapping[str, Style]) -> None:
    """Accuracy at the end against a hyper-parameter (CA-Fed, figure 2)."""
    for each in data["references"]:
        axes.axhline(each["mean"], color=styles[each["label"]].light, linestyle="--", linewidth=1, label=each["label"])
    known = [place for place, mean in enumerate(data["mean"]) if mean is not None]
    axes.errorbar(
        [data["values"][place] for place in known],
        [data["mean"][place] for place in known],
        [data["sd"][place] or 0.0 for place in known],
        color=_INK, marker="o", markersize=4, linewidth=1.2, capsize=2,
    )  # fmt: skip
    axes.set(xlabel=data["parameter"], ylabel="test accuracy at the end", xscale=_scale(data))
    _ticks(axes.xaxis, data)
    axes.yaxis.set_major_formatter(_percent)
    if data["references"]:
        axes.legend()


def draw_best(axes: Axes, data: Mapping[str, Any]) -> None:
    """The best value of a hyper-parameter against the length of the training (CA-Fed, figure 2b)."""
    axes.step(data["best"]["round"], data["best"]["value"], where="post", color=_INK, linewidth=1.3)
    axes.set(xlabel="length of training, rounds", ylabel=f"best {data['parameter']}", yscale=_scale(data))
    _ticks(axes.yaxis, data)
