"""Figures for papers: the charts of the report as PNG and SVG files, on white, in a column's width.

    from fedpick.report import write_figures
    write_figures("results/fedpick.sqlite", "figures")              # figures/accuracy.png, figures/accuracy.svg, ...

The same data as the page draws (`charts`), drawn by matplotlib. The same store gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpick.core.errors import InvalidInput, MissingDependency
from fedpick.experiments.store_read import Experiment, Reader
from fedpick.report.charts import sections_of
from fedpick.report.charts_base import Chart, opened, read_material
from fedpick.report.charts_palette import Style, styles_of
from fedpick.report.figures_compare import draw_best, draw_forest, draw_groups, draw_sweep
from fedpick.report.figures_grids import draw_labels, draw_matrix, draw_points, draw_raster
from fedpick.report.files import PICTURES, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["FORMATS", "write_figures"]

FORMATS = PICTURES
_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
_AXES = {"round": "round", "bytes": "megabytes sent, both ways", "seconds": "wall time in seconds"}
_SCALES = {"round": 1.0, "bytes": 1e-6, "seconds": 1.0}
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
    "text.parse_math": False,  # labels are text: a "$" in one is no formula
    "figure.constrained_layout.use": True,
}


def write_figures(
    store: Reader | str | Path,
    folder: str | Path,
    formats: Sequence[str] = ("png", "svg"),
    experiment: Experiment | str | int | None = None,
    *,
    window: int = 1,
    against: str | None = None,
    grouping: str | None = None,
) -> list[Path]:
    """Write every figure of one experiment (None: the latest) in every format; returns the files.

    `window`, `against` and `grouping` are those of `write_report`.
    """
    unknown = [form for form in formats if form not in FORMATS]
    if unknown:
        raise InvalidInput(f"Figures are written as {', '.join(FORMATS)}. Got {unknown[0]!r}.")
    try:
        from matplotlib import rc_context
    except ModuleNotFoundError as error:
        raise MissingDependency("Figures need matplotlib. Install it with: pip install 'fedpick[report]'") from error
    which = experiment.id if isinstance(experiment, Experiment) else experiment
    with opened(store) as reader:
        material = read_material(reader, which, grouping=grouping)
        sections = sections_of(material, against=against, window=window)
        charts = [chart for section in sections for chart in section.charts]
    styles = styles_of([policy.label for policy in material.results.policies])
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    written = []
    with rc_context(_SETTINGS):
        for name, figure in _figures(charts, styles):
            # Laid out once: a second layout moves things by fractions of a point, and files would differ by formats.
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
            written += [save_figure(figure, target / f"{name}.{form}", dpi=200) for form in formats]
    return written


def _blank(width: float = 3.5, height: float = 2.5, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The object interface: no global state, no window, safe next to other figures.
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False)
    return figure, list(grid.ravel())


def _figures(charts: Sequence[Chart], styles: Mapping[str, Style]) -> Iterator[tuple[str, Figure]]:
    """(file name, figure) for everything there is to draw."""
    for chart in charts:
        if chart.key == "diagnostics":
            continue  # for exploring, on the page
        if chart.key == "importance-rounds":
            yield from _importance_figures(chart, styles)
        elif chart.kind == "lines":
            yield from _line_figures(chart, styles)
        elif chart.kind == "bars":
            yield from _bar_figures(chart, styles)
        elif chart.kind == "clients":
            yield from _client_figures(chart, styles)
        elif chart.kind == "bounds":
            yield chart.key, _bounds_figure(chart, styles)
        elif chart.kind in _COMPARISONS:
            yield from _COMPARISONS[chart.kind](chart, styles)
        else:
            draw = _GRIDS[chart.kind]
            for name, view in _first_views(chart):
                figure, axes = _blank(*_SIZES[chart.kind])
                draw(figure, axes[0], chart.data, view, styles[view["policy"]].light)
                yield f"{chart.key}-{name}", figure


def _forest_figures(chart: Chart, styles: Mapping[str, Style]) -> Iterator[tuple[str, Figure]]:
    for position, measure in enumerate(chart.data["measures"]):
        figure, (axes,) = _blank(height=0.9 + 0.24 * len(measure["series"]))
        draw_forest(axes, chart.data, measure, styles)
        yield (chart.key if position == 0 else f"{chart.key}-{_file_name(measure['key'])}"), figure


def _group_figures(chart: Chart, styles: Mapping[str, Style]) -> Iterator[tuple[str, Figure]]:
    for position, measure in enumerate(chart.data["measures"]):
        bars = len(chart.data["groups"]) * len(measure["series"])
        figure, (axes,) = _blank(width=min(7.0, max(4.2, 0.17 * bars)), height=2.8)
        draw_groups(figure, axes, chart.data, measure, styles)
        yield (chart.key if position == 0 else f"{chart.key}-{measure['key']}"), figure


def _importance_figures(chart: Chart, styles: Mapping[str, Style]) -> Iterator[tuple[str, Figure]]:
    """The distance by itself; the groups side by side."""
    for name, figure in _line_figures(
        replace(chart, data={**chart.data, "measures": chart.data["measures"][:1]}), styles
    ):
        yield f"{name}-distance", figure
    groups = chart.data["measures"][1:]
    columns = min(len(groups), 5)
    rows = -(-len(groups) // columns)
    figure, panels = _blank(
        width=max(3.5, min(7.2, 2.4 * columns)), height=1.7 * rows + 0.5, rows=rows, columns=columns
    )
    for axes in panels[len(groups) :]:
        axes.axis("off")
    for axes, measure in zip(panels, groups, strict=False):
        for label, line in measure["series"].items():
            _draw_line(axes, label, line, styles[label], "round")
        axes.axhline(measure["reference"]["value"], color="#333333", linewidth=1, linestyle=":", label="target")
        axes.set_title(measure["name"].replace(", ", ",\n"), fontsize=8)
        axes.set(xlabel="round", ylim=(0, None))
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 6))
    yield chart.key, figure


def _sweep_figures(chart: Chart, styles: Mapping[str, Style]) -> Iterator[tuple[str, Figure]]:
    name = _file_name(chart.key)
    figure, (axes,) = _blank()
    draw_sweep(axes, chart.data, styles)
    yield name, figure
    if len(chart.data["measures"]) > 1:
        figure, (axes,) = _blank()
        draw_best(axes, chart.data)
        yield f"{name}-best", figure


_COMPARISONS = {"forest": _forest_figures, "groups": _group_figures, "sweep": _sweep_figures}
_GRIDS: dict[str, Callable[..., None]] = {
    "raster": draw_raster,
    "labels": draw_labels,
    "matrix": draw_matrix,
    "points": draw_points,
}
_SIZES = {"raster": (7.0, 2.6), "labels": (7.0, 2.2), "matrix": (3.5, 3.1), "points": (3.5, 3.1)}


def _first_views(chart: Chart) -> Iterator[tuple[str, dict[str, Any]]]:
    """One view per policy: that of its first seed."""
    seen: dict[str, str] = {}
    for view in chart.data["views"]:
        if view["policy"] not in seen:
            name = _file_name(view["policy"])
            # Labels that differ only in what a file name cannot hold.
            seen[view["policy"]] = name if name not in seen.values() else f"{name}-{len(seen) + 1}"
            yield seen[view["policy"]], view


def _file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in text).strip(".") or "policy"


def _draw_line(axes: Axes, label: str, line: Mapping[str, Any], style: Style, x: str, dash: str | None = None) -> None:
    across = [value * _SCALES[x] for value in line[x]]
    mean = line["mean"]
    marker = "o" if len(mean) == 1 else None
    axes.plot(
        across,
        mean,
        color=style.light,
        linestyle=dash or _DASHES[style.dash],
        linewidth=1.3,
        label=label,
        marker=marker,
    )
    if "sd" in line:
        low = [value - spread for value, spread in zip(mean, line["sd"], strict=True)]
        high = [value + spread for value, spread in zip(mean, line["sd"], strict=True)]
        axes.fill_between(across, low, high, color=style.light, alpha=0.15, linewidth=0)


def _line_figures(chart: Chart, styles: Mapping[str, Style]) -> Iterator[tuple[str, Figure]]:
    for position, measure in enumerate(chart.data["measures"]):
        for x in chart.data["axes"]:
            figure, (axes,) = _blank()
            for label, line in measure["series"].items():
                _draw_line(axes, label, line, styles[label], x)
            if measure["key"] == "accuracy":
                for target in chart.data["targets"]:
                    axes.axhline(target, color="#767676", linewidth=0.8, linestyle=":")
            axes.set(xlabel=_AXES[x], ylabel=measure["name"])
            if measure["percent"]:
                axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
            axes.legend()
            name = chart.key if position == 0 else f"{chart.key}-{_file_name(measure['key'])}"
            yield (name if x == "round" else f"{name}-by-{x}"), figure


def _bar_figures(chart: Chart, styles: Mapping[str, Style]) -> Iterator[tuple[str, Figure]]:
    targets = chart.data["targets"]
    for measure in chart.data["measures"]:
        figure, (axes,) = _blank()
        scale = 1e-6 if measure["key"] == "bytes" else 1.0
        width = 0.8 / max(len(measure["series"]), 1)
        for place, (label, cells) in enumerate(measure["series"].items()):
            across = [index - 0.4 + width * (place + 0.5) for index in range(len(targets))]
            heights = [(cell["mean"] or 0) * scale for cell in cells]
            spread = [(cell["sd"] or 0) * scale for cell in cells]
            axes.bar(across, heights, width * 0.92, color=styles[label].light, label=label)
            for at, cell, height, error in zip(across, cells, heights, spread, strict=True):
                if cell["mean"] is None:
                    axes.text(at, 0, "N/A", ha="center", va="bottom", fontsize=6, rotation=90)
                elif error:
                    axes.errorbar(at, height, error, color="#333333", linewidth=0.8, capsize=1.5)
        axes.set_xticks(range(len(targets)), targets)
        axes.grid(axis="x", visible=False)
        unit = "megabytes sent" if measure["key"] == "bytes" else measure["name"]
        axes.set(xlabel="target accuracy", ylabel=unit, ylim=(0, None))
        figure.legend(loc="outside upper center", ncols=4)
        yield f"{measure['key']}-to-target", figure


def _client_figures(chart: Chart, styles: Mapping[str, Style]) -> Iterator[tuple[str, Figure]]:
    ranks = [position + 1 for position in chart.data["positions"]]
    for measure in chart.data["measures"]:
        figure, (axes,) = _blank()
        reference = measure["reference"]
        axes.plot(ranks, reference["ranked"], color="#767676", linestyle=":", linewidth=1, label=reference["name"])
        for label, values in measure["ranked"].items():
            style = styles[label]
            axes.plot(ranks, values, color=style.light, linestyle=_DASHES[style.dash], linewidth=1.3, label=label)
        axes.set(xlabel="clients, most often chosen first", ylabel=measure["name"], ylim=(0, None))
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
        axes.legend()
        yield f"frequency-{measure['key']}", figure


def _bounds_figure(chart: Chart, styles: Mapping[str, Style]) -> Figure:
    series = {measure["key"]: measure["series"] for measure in chart.data["measures"]}
    figure, (above, below) = _blank(height=3.2, rows=2)
    for label, line in series["epsilon_opt"].items():
        _draw_line(above, f"{label}: ε_opt", line, styles[label], "round", "-")
    for label, line in series["epsilon_bias"].items():
        _draw_line(above, f"{label}: ε_bias", line, styles[label], "round", ":")
    for label, line in series["excluded"].items():
        _draw_line(below, label, line, styles[label], "round")
    above.legend()
    below.set(xlabel="round", ylabel="clients left out")
    return figure
