"""A picture of a partition: one stacked bar per client, one colour per label."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedpick.core.arrays import FloatArray
from fedpick.data.types import Federation
from fedpick.report.figures.canvas import new_figure, picture_format, save_figure

__all__ = ["draw_partition"]

_MOST_BARS = 200
_MOST_LABELS = 20
_OMITTED = ("attempts", "proposals")  # limits of a search


def draw_partition(federation: Federation, path: str | Path, *, title: str | None = None) -> Path:
    """Draw how many examples of each label every client has; save it as PNG, SVG or PDF, by the suffix of the name.

    Up to 200 clients have one bar each, largest first. More clients are sorted by size and drawn as 200 bars, each the
    mean of neighbours; the axis says so. Data without labels, or with more than 20, is drawn by size alone.
    """
    picture_format(path)  # fail before the work
    heights, group = _bars(federation)
    figure = new_figure(10, 4.2)
    axes = figure.add_subplot()
    _draw_bars(axes, heights)
    axes.set_title(title or _title(federation), loc="left", fontsize=10)
    axes.set_ylabel("examples" if federation.stated_sizes is None else "stated size")
    axes.set_xlabel(
        "clients, largest first" if group == 1 else f"clients, largest first; a bar is a mean of about {group}"
    )
    axes.set_xlim(-0.5, len(heights) - 0.5)
    axes.set_xticks(_ticks(len(heights)), [f"{round(tick * group):,}" for tick in _ticks(len(heights))])
    axes.spines[["top", "right"]].set_visible(False)
    if heights.shape[1] > 1:
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(
            handles[::-1], labels[::-1], title="label", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False
        )
    return save_figure(figure, path, dpi=150)


def _bars(federation: Federation) -> tuple[FloatArray, int]:
    """(bars, labels) heights, and the number of clients per bar."""
    table = federation.clients()
    heights = table.num_examples[:, None]
    if table.label_histogram is not None and table.label_histogram.shape[1] <= _MOST_LABELS:
        heights = table.label_histogram
    heights = heights[np.argsort(-table.num_examples, kind="stable")]
    if len(heights) <= _MOST_BARS:
        return heights, 1
    starts = np.arange(_MOST_BARS) * len(heights) // _MOST_BARS
    lengths = np.diff(starts, append=len(heights))
    return np.add.reduceat(heights, starts, axis=0) / lengths[:, None], round(len(heights) / _MOST_BARS)


def _draw_bars(axes: Any, heights: FloatArray) -> None:
    from matplotlib import colormaps

    bars, labels = heights.shape
    palette = colormaps["tab10" if labels <= 10 else "tab20"]
    base = np.zeros(bars)
    for label in range(labels):
        axes.bar(np.arange(bars), heights[:, label], bottom=base, width=0.9, color=palette(label), label=str(label))
        base += heights[:, label]


def _title(federation: Federation) -> str:
    sizes = federation.clients().num_examples
    options = ", ".join(
        f"{name}={value}"
        for name, value in federation.info.items()
        if name not in _OMITTED and (value or name == "seed")
    )
    return (
        f"{federation.name}, {federation.partition} ({options}): {federation.num_clients:,} clients, "
        f"sizes {sizes.min():,.4g} to {sizes.max():,.4g}, median {np.median(sizes):,.4g}"
    )


def _ticks(bars: int) -> list[int]:
    step = max(1, -(-bars // 10))
    return list(range(0, bars, step))
