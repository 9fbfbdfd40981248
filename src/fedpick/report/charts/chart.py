"""What all charts share: the types, numbers as JSON, lines over the rounds, and one colour per policy."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import FloatArray, IntArray
from fedpick.report.analysis import PolicyResults, Quantity, RunResults
from fedpick.report.material import Material, RunHistory

__all__ = [
    "Chart",
    "Measure",
    "Section",
    "Style",
    "cell",
    "column",
    "line_chart",
    "line_data",
    "numbers",
    "shared_rounds",
    "styles_of",
]

PerRound = Callable[[RunResults, RunHistory], FloatArray]
"""A value for every round of a run, or for every kept one."""

_MOST_POINTS, _FEWEST_POINTS = 500, 100
_MOST_NUMBERS = 20_000
"""Of one measure, over the seeds of all policies."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure of the report."""

    key: str
    title: str
    caption: str
    kind: str
    """The function that draws it: "lines", "bars", "clients", "raster", "labels", "matrix", "points", "bounds",
    "groups", "forest", "sweep" or "round"."""
    data: Mapping[str, Any]
    wide: bool = False
    """Takes the whole width of the page."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Figures that belong together."""

    key: str
    title: str
    charts: tuple[Chart, ...]


def numbers(values: Any, digits: int = 5) -> Any:
    """Nested lists for JSON, rounded to significant digits; None and values that are not finite become null.

    >>> numbers(np.array([1 / 3, np.nan, 2.0]))
    [0.33333, None, 2]
    """
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, (list, tuple)):
        return [numbers(value, digits) for value in values]
    number = math.nan if values is None else float(values)
    if not math.isfinite(number):
        return None
    if number.is_integer() and abs(number) < 1e15:
        return int(number)
    return float(f"{number:.{digits}g}")


def cell(quantity: Quantity) -> dict[str, Any]:
    """A value over the seeds, for a bar."""
    return {"mean": numbers(quantity.mean), "sd": numbers(quantity.sd), "seeds": len(quantity.values)}


def packed(matrix: NDArray[np.uint8]) -> dict[str, Any]:
    """A matrix of bytes in base64."""
    return {"shape": list(matrix.shape), "bytes": base64.b64encode(np.ascontiguousarray(matrix).tobytes()).decode()}


def unpacked(matrix: Mapping[str, Any]) -> NDArray[np.uint8]:
    """The inverse of `packed`."""
    return np.frombuffer(base64.b64decode(matrix["bytes"]), np.uint8).reshape(matrix["shape"])


# Lines over the rounds


@dataclass(frozen=True)
class Measure:
    """Something with a value in every round."""

    key: str
    name: str
    value: PerRound
    percent: bool = False
    applies: Callable[[RunResults], bool] = lambda run: True
    """Whether a run has this measure; the mean is over the runs that do."""
    reference: tuple[str, float] | None = None
    """(name, value) of a level to compare with."""
    from_zero: bool = False
    """Whether the axis begins at 0: a narrow range would magnify differences that mean nothing."""


def column(name: str) -> PerRound:
    """Read a column of the table `rounds`, or a field of the history."""

    def value(run: RunResults, history: RunHistory) -> FloatArray:
        found = run.rounds[name] if name in run.rounds else getattr(history, name)
        return np.asarray(found, np.float64)

    return value


def line_chart(
    material: Material,
    measures: Sequence[Measure],
    *,
    key: str,
    title: str,
    caption: str,
    kind: str = "lines",
    menu: bool = False,
    **options: Any,
) -> Chart | None:
    """A chart of `line_data`. `menu`: choose the measure from a list, not by buttons."""
    data = line_data(material, measures, **options)
    if data is None:
        return None
    return Chart(key=key, title=title, caption=caption, kind=kind, data={**data, "menu": True} if menu else data)


def line_data(
    material: Material,
    measures: Sequence[Measure],
    *,
    axes: Sequence[str] = ("round",),
    each_seed: bool = False,
    targets: Sequence[float] = (),
) -> dict[str, Any] | None:
    """Mean and standard deviation over the seeds for every policy and measure; None if nothing was measured."""
    drawn = []
    for measure in measures:
        lines = {
            policy.label: _line(material, policy, measure, axes, each_seed) for policy in material.results.policies
        }
        series = {label: line for label, line in lines.items() if line is not None}
        if series:
            made = {"key": measure.key, "name": measure.name, "percent": measure.percent, "series": series}
            if measure.from_zero:
                made["from_zero"] = True
            if measure.reference is not None:
                made["reference"] = {"name": measure.reference[0], "value": numbers(measure.reference[1])}
            drawn.append(made)
    return {"measures": drawn, "axes": list(axes), "targets": list(targets)} if drawn else None


def _line(
    material: Material, policy: PolicyResults, measure: Measure, axes: Sequence[str], each_seed: bool
) -> dict[str, Any] | None:
    runs = [run for run in material.begun(policy) if measure.applies(run)]
    if not runs:
        return None
    found = [measure.value(run, material.histories[run.run.id]) for run in runs]
    rounds = [
        np.arange(len(values)) if len(values) == len(run.rounds["round"]) else run.kept
        for run, values in zip(runs, found, strict=True)
    ]
    # Only rounds that all seeds have can be averaged.
    shared = shared_rounds(rounds)
    values = np.stack([each[np.isin(steps, shared)] for each, steps in zip(found, rounds, strict=True)])
    known = np.flatnonzero(np.isfinite(values).all(axis=0))
    if len(known) == 0:
        return None
    most = _most_points(material) if each_seed else _MOST_POINTS
    if len(known) > most:
        known = known[np.unique(np.linspace(0, len(known) - 1, most).astype(np.int64))]
    values = values[:, known]
    line: dict[str, Any] = {
        axis: numbers(np.mean([_steps(run, axis)[shared[known]] for run in runs], axis=0)) for axis in axes
    }
    line |= {"mean": numbers(values.mean(axis=0)), "seeds": [run.run.seed for run in runs]}
    if len(runs) > 1:
        line["sd"] = numbers(values.std(axis=0, ddof=1))
        if each_seed:
            line["each"] = [numbers(row) for row in values]
    return line


def _most_points(material: Material) -> int:
    """Points of a line in a chart that shows every seed: fewer if there are many seeds."""
    return max(_FEWEST_POINTS, min(_MOST_POINTS, _MOST_NUMBERS // max(len(material.histories), 1)))


def shared_rounds(rounds: Sequence[IntArray]) -> IntArray:
    """The rounds that all of these have, ascending."""
    distinct = {(len(each), int(each[-1])): each for each in rounds}  # most seeds have the same rounds
    return reduce(partial(np.intersect1d, assume_unique=True), distinct.values())


def _steps(run: RunResults, axis: str) -> FloatArray:
    """A horizontal axis: rounds from 1, bytes sent both ways, or seconds of virtual time."""
    if axis == "clock":
        return run.clock
    rounds = run.rounds
    return rounds["round"] + 1.0 if axis == "round" else (rounds["bytes_down"] + rounds["bytes_up"]).astype(np.float64)


# Colours

# The hues of Okabe and Ito, which colour-blind readers can tell apart, darkened or lightened to a contrast of at least
# 3 to 1 with the page.
_COLOURS = (
    ("#0072B2", "#4AA3E8"),  # blue
    ("#D55E00", "#F5854A"),  # vermilion
    ("#00876A", "#2FC49B"),  # green
    ("#B8478F", "#E68FC4"),  # purple
    ("#A97900", "#E5B83B"),  # amber
    ("#3C8FB5", "#8FD6F2"),  # sky
    ("#5A5A5A", "#BDBDBD"),  # grey
    ("#7A3B2E", "#C98F7E"),  # brown
)
# With more policies than colours, the colours repeat in another line style.
_DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True)
class Style:
    """How a policy is drawn in every figure, on light and on dark paper."""

    light: str
    dark: str
    dash: str


def styles_of(labels: Sequence[str]) -> dict[str, Style]:
    """A style per label, by position in the experiment.

    >>> styles_of(["uniform", "fedcor"])["fedcor"].light
    '#D55E00'
    """
    return {
        label: Style(*_COLOURS[position % len(_COLOURS)], _DASHES[position // len(_COLOURS) % len(_DASHES)])
        for position, label in enumerate(labels)
    }
