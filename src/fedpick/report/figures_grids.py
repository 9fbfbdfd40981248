"""The figures that are grids or maps: rasters, label mixes, correlation matrices, embeddings."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedpick.report.charts_collect import AVAILABLE, CHOSEN, EXCLUDED, FAILED, SHUT_OUT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

__all__ = ["draw_cells", "draw_labels", "draw_matrix", "draw_points", "draw_raster"]

_LESS, _MIDDLE, _MORE = "#1667A8", "#F7F7F5", "#C9590B"
_ABSENT, _PRESENT, _FAILED, _EXCLUDED, _SHUT_OUT = "#F3F4F5", "#C9D3DC", "#17212B", "#A8103A", "#F4D3DC"


def _unpacked(packed: Mapping[str, Any]) -> NDArray[np.uint8]:
    return np.frombuffer(base64.b64decode(packed["bytes"]), np.uint8).reshape(packed["shape"])


def _floats(values: Any) -> NDArray[np.float64]:
    """Lists from JSON: None is NaN."""
    return np.array(values, dtype=np.float64)


def draw_raster(figure: Figure, axes: Axes, data: Mapping[str, Any], view: Mapping[str, Any], colour: str) -> None:
    """Clients x rounds, in categories where there is a cell for each, else how many of a cell were chosen."""
    from matplotlib.colors import LinearSegmentedColormap

    axes.grid(visible=False)
    if "exact" in view:
        used = draw_cells(axes, view, colour)
        figure.legend(handles=used, loc="outside upper right", ncols=len(used))
    else:
        shares = _unpacked(view["chosen"]) / 255 * (view["peak"] or 0)
        place = (0.5, shares.shape[1] * view["rounds_per_column"] + 0.5, 0, shares.shape[0] * view["clients_per_row"])
        shade = LinearSegmentedColormap.from_list("chosen", [_ABSENT, colour])
        image = axes.imshow(
            shares, cmap=shade, vmin=0, aspect="auto", interpolation="nearest", origin="lower", extent=place
        )
        figure.colorbar(image, ax=axes, label="chosen per round")
    axes.set(xlabel="round", ylabel="" if "order" in view else "client")
    axes.set_title(f"{view['policy']}, seed {view['seed']}", loc="left")


def draw_cells(axes: Axes, view: Mapping[str, Any], colour: str) -> list[Patch]:
    """A cell for each client and round, group by group where there are groups (CA-Fed, figure 5); for the legend."""
    from matplotlib import patches
    from matplotlib.colors import ListedColormap

    codes = _unpacked(view["exact"])
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


def draw_labels(figure: Figure, axes: Axes, data: Mapping[str, Any], view: Mapping[str, Any], colour: str) -> None:
    """Which labels the cohorts had more or less of than everybody."""
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


def draw_matrix(figure: Figure, axes: Axes, data: Mapping[str, Any], view: Mapping[str, Any], colour: str) -> None:
    """Correlations, clusters together."""
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


def draw_points(figure: Figure, axes: Axes, data: Mapping[str, Any], view: Mapping[str, Any], colour: str) -> None:
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
