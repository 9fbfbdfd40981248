"""Figures for papers: the charts of the report as PNG, SVG or PDF files, on white, in a column's width.

    from fedpick.report import write_figures
    write_figures("results/fedpick.sqlite", "figures")              # figures/accuracy.png, figures/accuracy.svg, ...

The page shows the same charts. The same store gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpick.core.arrays import FloatArray
from fedpick.core.errors import InvalidInput
from fedpick.experiments.store import Experiment, Store, opened
from fedpick.report.charts import sections_of
from fedpick.report.charts.chart import Chart, Style, styles_of, unpacked
from fedpick.report.figures.canvas import FORMATS, new_figure, require_matplotlib, save_figure
from fedpick.report.material import AVAILABLE, CHOSEN, EXCLUDED, FAILED, SHUT_OUT, read_material

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

__all__ = ["LINE_STYLES", "draw_cells", "write_figures"]

Styles = Mapping[str, Style]
Figures = Iterator[tuple[str, "Figure"]]
"""(file name without suffix, figure)."""

LINE_STYLES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
_AXES = {"round": "round", "bytes": "megabytes sent, both ways", "clock": "minutes on the clients' devices"}
_SCALES = {"round": 1.0, "bytes": 1e-6, "clock": 1 / 60}
_LONGEST_NAME = 50
"""Letters of a label in the name of a file; file systems take 255 bytes."""
_INK, _GREY = "#333333", "#767676"
_LESS, _MIDDLE, _MORE = "#1667A8", "#F7F7F5", "#C9590B"
_ABSENT, _PRESENT, _FAILED, _EXCLUDED, _SHUT_OUT = "#F3F4F5", "#C9D3DC", "#17212B", "#A8103A", "#F4D3DC"
_SETTINGS: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E3",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "svg.hashsalt": "fedpick",
    "svg.fonttype": "none",
    "text.parse_math": False,  # a "$" in a label is not a formula
}


def write_figures(
    store: Store | str | Path,
    folder: str | Path,
    formats: Sequence[str] = ("png", "svg"),
    experiment: Experiment | str | int | None = None,
    *,
    window: int = 1,
    against: str | None = None,
    grouping: str | None = None,
) -> list[Path]:
    """Write every figure of one experiment (None: the latest) in every format; return the files.

    `window`, `against` and `grouping` are those of `write_report`.
    """
    unknown = [form for form in formats if form not in FORMATS]
    if unknown:
        raise InvalidInput(f"Figures are written as {', '.join(FORMATS)}. Got {unknown[0]!r}.")
    matplotlib = require_matplotlib()
    with opened(store) as reader:
        material = read_material(reader, experiment, grouping=grouping)
        sections = sections_of(material, against=against, window=window)
    styles = styles_of([policy.label for policy in material.results.policies])
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(_SETTINGS):
        for name, figure in (
            pair
            for section in sections
            for chart in section.charts
            if chart.key != "diagnostics"  # for exploring, on the page
            for pair in _FIGURES[chart.kind](chart, styles)
        ):
            # Lay out once: a second layout moves things by fractions of a point, and the formats would differ.
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
            written += [save_figure(figure, target / f"{name}.{form}", dpi=200) for form in formats]
    return written


def _blank(width: float = 3.5, height: float = 2.5, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure = new_figure(width, height)
    return figure, list(figure.subplots(rows, columns, squeeze=False).ravel())


def _file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in text).strip(".") or "policy"


def _name(chart: Chart, measure: Mapping[str, Any]) -> str:
    """The file name of one measure of a chart; the first has the name of the chart."""
    first = measure["key"] == chart.data["measures"][0]["key"]
    return chart.key if first else f"{chart.key}-{_file_name(measure['key'])}"


def _percent(value: float, _: Any) -> str:
    return f"{100 * value:g} %"


# Lines


def _draw_line(axes: Axes, label: str, line: Mapping[str, Any], style: Style, x: str, dash: str | None = None) -> None:
    across, mean = np.array(line[x]) * _SCALES[x], np.array(line["mean"])
    axes.plot(
        across, mean, color=style.light, linestyle=dash or LINE_STYLES[style.dash], linewidth=1.3, label=label,
        marker="o" if len(mean) == 1 else None,
    )  # fmt: skip
    if "sd" in line:
        spread = np.array(line["sd"])
        axes.fill_between(across, mean - spread, mean + spread, color=style.light, alpha=0.15, linewidth=0)


def _line_figures(chart: Chart, styles: Styles) -> Figures:
    if chart.key == "importance-rounds":
        yield from _importance_figures(chart, styles)
        return
    for measure in chart.data["measures"]:
        for x in chart.data["axes"]:
            figure, (axes,) = _blank()
            for label, line in measure["series"].items():
                _draw_line(axes, label, line, styles[label], x)
            if measure["key"] == "accuracy":
                for target in chart.data["targets"]:
                    axes.axhline(target, color=_GREY, linewidth=0.8, linestyle=":")
            axes.set(xlabel=_AXES[x], ylabel=measure["name"])
            if measure.get("from_zero"):
                axes.set_ylim(bottom=0)
            if measure["percent"]:
                axes.yaxis.set_major_formatter(_percent)
            axes.legend()
            name = _name(chart, measure)
            yield (name if x == "round" else f"{name}-by-{x}"), figure


def _importance_figures(chart: Chart, styles: Styles) -> Figures:
    """The distance in one figure, the groups side by side in another."""
    distance, *groups = chart.data["measures"]
    yield from _line_figures(
        replace(chart, key=f"{chart.key}-distance", data={**chart.data, "measures": [distance]}), styles
    )
    columns = min(len(groups), 5)
    rows = -(-len(groups) // columns)
    figure, panels = _blank(max(3.5, min(7.2, 2.4 * columns)), 1.7 * rows + 0.5, rows, columns)
    for axes in panels[len(groups) :]:
        axes.axis("off")
    for axes, measure in zip(panels, groups, strict=False):
        for label, line in measure["series"].items():
            _draw_line(axes, label, line, styles[label], "round")
        axes.axhline(measure["reference"]["value"], color=_INK, linewidth=1, linestyle=":", label="target")
        axes.set_title(measure["name"].replace(", ", ",\n"), fontsize=8)
        axes.set(xlabel="round", ylim=(0, None))
        axes.yaxis.set_major_formatter(_percent)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 6))
    yield chart.key, figure


def _bounds_figures(chart: Chart, styles: Styles) -> Figures:
    """CA-Fed's two error terms, and below them the number of clients it leaves out."""
    series = {measure["key"]: measure["series"] for measure in chart.data["measures"]}
    figure, (above, below) = _blank(height=3.2, rows=2)
    for key, name, dash in (("epsilon_opt", "ε_opt", "-"), ("epsilon_bias", "ε_bias", ":")):
        for label, line in series[key].items():
            _draw_line(above, f"{label}: {name}", line, styles[label], "round", dash)
    for label, line in series["excluded"].items():
        _draw_line(below, label, line, styles[label], "round")
    above.legend()
    below.set(xlabel="round", ylabel="clients left out")
    yield chart.key, figure


def _client_figures(chart: Chart, styles: Styles) -> Figures:
    ranks = [position + 1 for position in chart.data["positions"]]
    for measure in chart.data["measures"]:
        figure, (axes,) = _blank()
        reference = measure["reference"]
        axes.plot(ranks, reference["ranked"], color=_GREY, linestyle=":", linewidth=1, label=reference["name"])
        for label, values in measure["ranked"].items():
            style = styles[label]
            shown = ranks[: len(values)]  # a policy may have been recorded with fewer clients
            axes.plot(shown, values, color=style.light, linestyle=LINE_STYLES[style.dash], linewidth=1.3, label=label)
        axes.set(xlabel="clients, most often chosen first", ylabel=measure["name"], ylim=(0, None))
        axes.yaxis.set_major_formatter(_percent)
        axes.legend()
        yield f"frequency-{measure['key']}", figure


# Comparisons


def _bar_figures(chart: Chart, styles: Styles) -> Figures:
    """Cost of reaching a target."""
    targets = chart.data["targets"]
    for measure in chart.data["measures"]:
        figure, (axes,) = _blank()
        scale = {"bytes": 1e-6, "clock": 1 / 60}.get(measure["key"], 1.0)
        width = 0.8 / max(len(measure["series"]), 1)
        for place, (label, cells) in enumerate(measure["series"].items()):
            across = [index - 0.4 + width * (place + 0.5) for index in range(len(targets))]
            heights = [(cell["mean"] or 0) * scale for cell in cells]
            axes.bar(across, heights, width * 0.92, color=styles[label].light, label=label)
            for at, cell, height in zip(across, cells, heights, strict=True):
                if cell["mean"] is None:
                    axes.text(at, 0, "N/A", ha="center", va="bottom", fontsize=6, rotation=90)
                elif cell["sd"]:
                    axes.errorbar(at, height, cell["sd"] * scale, color=_INK, linewidth=0.8, capsize=1.5)
        axes.set_xticks(range(len(targets)), targets)
        axes.grid(axis="x", visible=False)
        units = {"bytes": "megabytes sent", "clock": _AXES["clock"]}
        unit = units.get(measure["key"], measure["name"])
        axes.set(xlabel="target accuracy", ylabel=unit, ylim=(0, None))
        figure.legend(loc="outside upper center", ncols=4)
        yield f"{measure['key']}-to-target", figure


def _group_figures(chart: Chart, styles: Styles) -> Figures:
    """What groups of clients got, as bars; their targets, as lines across (CA-Fed, figure 1d)."""
    for measure in chart.data["measures"]:
        names = measure.get("groups", chart.data["groups"])
        few = len(names) <= 4
        series = measure["series"]
        figure, (axes,) = _blank(width=min(7.0, max(4.2, 0.17 * len(names) * len(series))), height=2.8)
        width = 0.84 / max(len(series), 1)
        for place, (label, cells) in enumerate(series.items()):
            across = [index - 0.42 + width * (place + 0.5) for index in range(len(names))]
            heights = [cell["mean"] or 0.0 for cell in cells]
            axes.bar(across, heights, width * 0.9, color=styles[label].light, label=label)
            for at, cell, height in zip(across, cells, heights, strict=True):
                if cell["sd"]:
                    ends = [[min(cell["sd"], height)], [cell["sd"]]]  # a share is never below 0
                    axes.errorbar(at, height, ends, color=_INK, linewidth=0.7, capsize=1)
        if "target" in measure:
            lefts, rights = [index - 0.46 for index in range(len(names))], [index + 0.46 for index in range(len(names))]
            axes.hlines(measure["target"], lefts, rights, color="black", linewidth=1.3, label="target")
        ticks = [name.replace(", ", ",\n") if few else name.removeprefix("cluster ") for name in names]
        axes.set_xticks(range(len(names)), ticks, fontsize=7)
        axes.grid(axis="x", visible=False)
        axes.set(ylabel=measure["name"], ylim=(0, None), xlabel="" if few else measure.get("by", chart.data["by"]))
        axes.yaxis.set_major_formatter(_percent)
        figure.legend(loc="outside upper center", ncols=min(len(series) + 1, 3 if few else 6))
        yield _name(chart, measure), figure


def _forest_figures(chart: Chart, styles: Styles) -> Figures:
    """For every policy, its difference to one policy and the confidence interval."""
    for measure in chart.data["measures"]:
        labels = list(measure["series"])
        figure, (axes,) = _blank(height=0.9 + 0.24 * len(labels))
        axes.axvline(0, color=_GREY, linewidth=0.9)
        for row, label in enumerate(labels):
            cell, colour = measure["series"][label], styles[label].light
            if cell["low"] is not None:
                axes.plot([cell["low"], cell["high"]], [row, row], color=colour, linewidth=1.6)
            axes.plot([cell["mean"]], [row], "s", color=colour, markersize=4.5)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"{measure['name']}\nminus {chart.data['baseline']}")
        yield _name(chart, measure), figure


def _sweep_figures(chart: Chart, styles: Styles) -> Figures:
    """Final accuracy against a hyper-parameter, and its best value by length of training (CA-Fed, figure 2)."""
    data, name = chart.data, _file_name(chart.key)
    scale = "log" if data["logarithmic"] else "linear"
    figure, (axes,) = _blank()
    for each in data["references"]:
        axes.axhline(each["mean"], color=styles[each["label"]].light, linestyle="--", linewidth=1, label=each["label"])
    known = [place for place, mean in enumerate(data["mean"]) if mean is not None]
    axes.errorbar(
        [data["values"][place] for place in known],
        [data["mean"][place] for place in known],
        [data["sd"][place] or 0.0 for place in known],
        color=_INK, marker="o", markersize=4, linewidth=1.2, capsize=2,
    )  # fmt: skip
    axes.set(xlabel=data["parameter"], ylabel="test accuracy at the end", xscale=scale)
    _ticks(axes.xaxis, data)
    axes.yaxis.set_major_formatter(_percent)
    if data["references"]:
        axes.legend()
    yield name, figure
    if len(data["measures"]) > 1:
        figure, (axes,) = _blank()
        axes.step(data["best"]["round"], data["best"]["value"], where="post", color=_INK, linewidth=1.3)
        axes.set(xlabel="length of training, rounds", ylabel=f"best {data['parameter']}", yscale=scale)
        _ticks(axes.yaxis, data)
        yield f"{name}-best", figure


def _ticks(axis: Axis, data: Mapping[str, Any]) -> None:
    """Mark the values that were tried, if there are few."""
    if len(data["values"]) <= 8:
        axis.set_ticks(data["values"], labels=[f"{value:g}" for value in data["values"]])
        axis.set_ticks([], minor=True)
    elif data["logarithmic"]:
        axis.set_major_formatter("{x:g}")  # the default writes powers of ten as formulas, which are off
        axis.set_minor_formatter("")


# Grids and maps


def _view_figures(
    draw: Callable[[Figure, Axes, Mapping[str, Any], Mapping[str, Any], str], None], width: float, height: float
) -> Callable[[Chart, Styles], Figures]:
    """One figure per policy: the view of its first seed."""

    def figures(chart: Chart, styles: Styles) -> Figures:
        seen: dict[str, str] = {}
        for view in chart.data["views"]:
            policy = view["policy"]
            if policy in seen:
                continue
            name = _file_name(policy)[:_LONGEST_NAME]
            # Labels may differ only in what a file name cannot hold.
            seen[policy] = name if name not in seen.values() else f"{name}-{len(seen) + 1}"
            figure, (axes,) = _blank(width, height)
            draw(figure, axes, chart.data, view, styles[policy].light)
            yield f"{chart.key}-{seen[policy]}", figure

    return figures


def _floats(values: Any) -> FloatArray:
    """Nested lists of a chart as an array; None becomes NaN."""
    return np.array(values, dtype=np.float64)


def _draw_raster(figure: Figure, axes: Axes, data: Mapping[str, Any], view: Mapping[str, Any], colour: str) -> None:
    """Clients x rounds: states if every client and round has a cell, else how many of a cell were chosen."""
    from matplotlib.colors import LinearSegmentedColormap

    axes.grid(visible=False)
    if "exact" in view:
        used = draw_cells(axes, view, colour)
        figure.legend(handles=used, loc="outside upper right", ncols=len(used))
    else:
        shares = unpacked(view["chosen"]) / 255 * (view["peak"] or 0)
        place = (0.5, shares.shape[1] * view["rounds_per_column"] + 0.5, 0, shares.shape[0] * view["clients_per_row"])
        shade = LinearSegmentedColormap.from_list("chosen", [_ABSENT, colour])
        image = axes.imshow(
            shares, cmap=shade, vmin=0, aspect="auto", interpolation="nearest", origin="lower", extent=place
        )
        figure.colorbar(image, ax=axes, label="chosen per round")
    axes.set(xlabel="round", ylabel="" if "order" in view else "client")
    axes.set_title(f"{view['policy']}, seed {view['seed']}", loc="left")


def draw_cells(axes: Axes, view: Mapping[str, Any], colour: str) -> list[Patch]:
    """Draw one cell per client and round, ordered by group (CA-Fed, figure 5); return the patches of the legend."""
    from matplotlib import patches
    from matplotlib.colors import ListedColormap

    codes = unpacked(view["exact"])
    colours = [_ABSENT, _PRESENT, colour, _FAILED, _EXCLUDED, _SHUT_OUT]
    if "order" in view:
        codes = codes[view["order"]]
        ends = np.cumsum(view["sizes"])
        centres = ends - np.array(view["sizes"]) / 2 - 0.5
        axes.set_yticks(centres.tolist(), [name.replace(", ", ",\n") for name in view["groups"]])
        axes.hlines(ends[:-1] - 0.5, 0.5, codes.shape[1] + 0.5, color="#17212B", linewidth=0.6)
    place = (0.5, codes.shape[1] + 0.5, -0.5, codes.shape[0] - 0.5)
    axes.imshow(
        codes, cmap=ListedColormap(colours), vmin=-0.5, vmax=5.5, aspect="auto", interpolation="nearest",
        origin="lower", extent=place,
    )  # fmt: skip
    words = {
        AVAILABLE: "available",
        CHOSEN: "chosen",
        FAILED: "chosen, did not complete",
        EXCLUDED: "available, excluded",
        SHUT_OUT: "not available, excluded",
    }
    return [patches.Patch(color=colours[code], label=word) for code, word in words.items() if (codes == code).any()]


def _draw_labels(figure: Figure, axes: Axes, data: Mapping[str, Any], view: Mapping[str, Any], colour: str) -> None:
    """Labels that the cohorts had more or less of than all clients."""
    from matplotlib.colors import LinearSegmentedColormap

    gaps = _floats(view["gaps"])
    largest = max(float(np.nanmax(np.abs(_floats(each["gaps"])), initial=0.0)) for each in data["views"]) or 1.0
    rounds = view["rounds"]
    step = rounds[1] - rounds[0] if len(rounds) > 1 else 1.0
    place = (rounds[0] - step / 2, rounds[-1] + step / 2, -0.5, len(gaps) - 0.5)
    image = axes.imshow(
        100 * gaps, cmap=LinearSegmentedColormap.from_list("gap", [_LESS, _MIDDLE, _MORE]), vmin=-100 * largest,
        vmax=100 * largest, aspect="auto", interpolation="nearest", origin="lower", extent=place,
    )  # fmt: skip
    axes.grid(visible=False)
    axes.set(xlabel="round", ylabel="label")
    axes.set_title(view["policy"], loc="left")
    figure.colorbar(image, ax=axes, label="percentage points")


def _draw_matrix(figure: Figure, axes: Axes, data: Mapping[str, Any], view: Mapping[str, Any], colour: str) -> None:
    """Correlations, ordered by cluster."""
    from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm

    matrix = _floats(view["matrix"])
    lowest = min(float(matrix.min()), -1e-3)
    image = axes.imshow(
        matrix, cmap=LinearSegmentedColormap.from_list("correlation", [_LESS, _MIDDLE, _MORE]),
        norm=TwoSlopeNorm(0.0, lowest, 1.0), interpolation="nearest",
    )  # fmt: skip
    axes.grid(visible=False)
    axes.set(xticks=[], yticks=[], xlabel="clients, ordered by cluster", ylabel="clients")
    axes.set_title(f"{view['policy']}, seed {view['seed']}", loc="left")
    figure.colorbar(image, ax=axes, label="correlation")


def _draw_points(figure: Figure, axes: Axes, data: Mapping[str, Any], view: Mapping[str, Any], colour: str) -> None:
    """The map of the clients."""
    chosen = _floats(view["chosen"])
    sizes = 8 + 50 * chosen / max(chosen.max(initial=0.0), 1.0)
    colours: Any = colour if view["labels"] is None else view["labels"]
    shown = axes.scatter(
        view["x"], view["y"], s=sizes, c=colours, cmap=None if view["labels"] is None else "turbo",
        edgecolors="white", linewidths=0.5,
    )  # fmt: skip
    axes.grid(visible=False)
    axes.set(xticks=[], yticks=[])
    axes.set_title(f"{view['policy']}, seed {view['seed']} ({view['method']})", loc="left")
    if view["labels"] is not None:
        figure.colorbar(shown, ax=axes, label="label a client has most of")


def _draw_round(figure: Figure, axes: Axes, data: Mapping[str, Any], view: Mapping[str, Any], colour: str) -> None:
    """What every client does in one round, and when the round ends."""
    in_time = np.array(view["status"]) == "in time"
    rows, left = np.arange(1, len(in_time) + 1), np.zeros(len(in_time))
    for name, each in (("receiving", "#8A97A3"), ("computing", colour), ("sending", "#17A398")):
        spent = _floats(view[name])
        axes.barh(rows[in_time], spent[in_time], 0.85, left[in_time], color=each, label=name)
        axes.barh(rows[~in_time], spent[~in_time], 0.85, left[~in_time], color=each, alpha=0.3)
        left += spent
    axes.axvline(view["end"], color=_INK, linewidth=1.0, linestyle=":")
    axes.legend(loc="lower right")
    axes.set(xlabel=f"seconds after the request, round {view['round']}", ylabel="selected clients, by speed")
    axes.grid(axis="y", visible=False)


_FIGURES: dict[str, Callable[[Chart, Styles], Figures]] = {
    "lines": _line_figures,
    "bounds": _bounds_figures,
    "clients": _client_figures,
    "bars": _bar_figures,
    "groups": _group_figures,
    "forest": _forest_figures,
    "sweep": _sweep_figures,
    "raster": _view_figures(_draw_raster, 7.0, 2.6),
    "labels": _view_figures(_draw_labels, 7.0, 2.2),
    "matrix": _view_figures(_draw_matrix, 3.5, 3.1),
    "points": _view_figures(_draw_points, 3.5, 3.1),
    "round": _view_figures(_draw_round, 3.5, 3.5),
}
