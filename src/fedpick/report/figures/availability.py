"""Pictures of availability: raster, rates and autocorrelation of a process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpick import availability
from fedpick.availability.process import Trace
from fedpick.availability.statistics import TraceStatistics, measure_trace
from fedpick.core.errors import InvalidInput
from fedpick.core.rng import Purpose, stream
from fedpick.core.types import Clients
from fedpick.report.figures.canvas import new_figure, picture_format, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_availability", "example_clients", "show_availability"]

# Blue and orange of Okabe and Ito, which colour-blind readers can tell apart.
_BLUE, _ORANGE, _GREY = "#0072B2", "#D55E00", "#767676"
_MOST_ROWS = 400


def draw_availability(
    trace: Trace, clients: Clients, rounds: int, path: str | Path, *, title: str = "", start: int = 0
) -> TraceStatistics:
    """Draw raster, histogram of rates and autocorrelation of `rounds` rounds; return the numbers drawn.

    The raster is that of FedGS's figure 8 and CA-Fed's figure 5: one row per client, one column per round. It shows
    at most 400 clients, evenly spaced; the other panels use all clients.
    """
    picture_format(path)  # fail before the work
    if trace.num_clients != len(clients):
        raise InvalidInput(
            f"The trace has {trace.num_clients} clients, the table {len(clients)}. Start it with that table."
        )
    if rounds < 2:
        raise InvalidInput(f"A picture of availability needs at least 2 rounds. Got {rounds}.")
    measured = measure_trace(trace, rounds, start=start, max_lag=min(50, rounds // 2))
    rows = np.unique(np.linspace(0, len(clients) - 1, min(len(clients), _MOST_ROWS)).astype(np.int64))
    raster = np.stack([trace.mask(start + step)[rows] for step in range(rounds)], axis=1)

    figure = new_figure(11, 6.4)
    grid = figure.add_gridspec(2, 2, height_ratios=(2, 1))
    _draw_raster(figure.add_subplot(grid[0, :]), raster, len(clients), start)
    _draw_histogram(figure.add_subplot(grid[1, 0]), trace, measured)
    _draw_autocorrelation(figure.add_subplot(grid[1, 1]), measured)
    summary = f"{len(clients):,} clients, {measured.rates.mean():.1%} available on average"
    if measured.empty_rounds:
        summary += f", no client in {measured.empty_rounds} of {rounds} rounds"
    figure.suptitle(f"{title}: {summary}" if title else summary)
    save_figure(figure, path, dpi=110)
    return measured


def _draw_raster(axes: Axes, raster: np.ndarray, num_clients: int, start: int) -> None:
    from matplotlib.colors import ListedColormap

    axes.imshow(
        raster,
        aspect="auto",
        interpolation="nearest",
        cmap=ListedColormap(["#F1F1EE", _BLUE]),
        vmin=0,
        vmax=1,
        origin="lower",
        extent=(start - 0.5, start + raster.shape[1] - 0.5, -0.5, num_clients - 0.5),
    )
    axes.set(xlabel="round", ylabel="client", title="available (blue) or not")


def _draw_histogram(axes: Axes, trace: Trace, measured: TraceStatistics) -> None:
    bins = np.linspace(0, 1, 21).tolist()
    axes.hist(measured.rates, bins=bins, color=_BLUE, label="share of these rounds")
    axes.hist(trace.availability, bins=bins, histtype="step", color=_ORANGE, linewidth=1.6, label="true availability")
    axes.set(xlabel="how often a client is available", ylabel="clients", xlim=(0, 1))
    axes.legend(frameon=False, fontsize=8)


def _draw_autocorrelation(axes: Axes, measured: TraceStatistics) -> None:
    values = measured.autocorrelation
    axes.axhline(0, color=_GREY, linewidth=0.8)
    if np.isfinite(values).all():
        axes.plot(np.arange(len(values)), values, color=_BLUE, marker="o", markersize=2.5, linewidth=1)
        axes.set_ylim(min(-0.1, float(values.min()) - 0.05), 1.05)
    else:
        axes.text(0.5, 0.5, "no client ever changes", ha="center", va="center", transform=axes.transAxes, color=_GREY)
    axes.set(xlabel="rounds later", ylabel="correlation with itself")


def example_clients(num_clients: int, seed: int = 0, num_labels: int = 10) -> Clients:
    """An example table: log-normal sizes, two labels per client, neighbouring labels for neighbouring clients."""
    if num_clients < 1:
        raise InvalidInput(f"There must be at least one client. Got {num_clients}.")
    sizes = 50 + stream(seed, 0, Purpose.PARTITION).lognormal(4, 1, num_clients).round()
    histogram = np.zeros((num_clients, num_labels))
    first = np.arange(num_clients) * num_labels // num_clients
    histogram[np.arange(num_clients), first] = sizes / 2
    histogram[np.arange(num_clients), (first + 1) % num_labels] = sizes / 2
    return Clients(num_examples=sizes, label_histogram=histogram)


def show_availability(
    name: str,
    path: str | Path,
    *,
    num_clients: int = 100,
    rounds: int = 200,
    seed: int = 0,
    parameters: Mapping[str, Any] | None = None,
    clients: Clients | None = None,
) -> TraceStatistics:
    """Draw a registered process on the given table or on an example; return the numbers drawn."""
    process = availability.get(name, **(parameters or {}))
    table = example_clients(num_clients, seed) if clients is None else clients
    return draw_availability(process.start(table, seed), table, rounds, path, title=name)
