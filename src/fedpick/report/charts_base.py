"""What a chart is: plain data with a title and a sentence. The page draws it with Plotly, papers with matplotlib."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.experiments.store import open_store
from fedpick.experiments.store_read import FederationFacts, Reader
from fedpick.report.accounting import GroupAccount, Groups, find_groups, group_accounts, groups_of
from fedpick.report.analysis import PolicyResults, Results, RunResults, load_results
from fedpick.report.charts_collect import RunTrace, collect

__all__ = [
    "Chart",
    "Material",
    "Measure",
    "Section",
    "bytes_of",
    "line_data",
    "numbers",
    "opened",
    "read_material",
    "steps_of",
]

_MOST_POINTS = 800
AXES = ("round", "bytes", "seconds")


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure of the report."""

    key: str
    title: str
    caption: str
    kind: str
    """Which function draws it: "lines", "bars", "clients", "raster", "labels", "matrix", "points", "bounds", "groups",
    "forest" or "sweep"."""
    data: Mapping[str, Any]
    wide: bool = False
    """Takes the whole width of the page."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Figures that belong together."""

    key: str
    title: str
    charts: tuple[Chart, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Material:
    """Everything that the charts of one experiment are made of."""

    store: Reader
    results: Results
    traces: Mapping[int, RunTrace]
    """By run id; only runs that have begun."""
    federations: Mapping[int, FederationFacts]
    """By run id."""
    grouping: str = ""
    """By what the clients are grouped; "": they are not."""
    groups: Mapping[int, Groups] = field(default_factory=dict)
    """By run id."""
    accounts: Mapping[int, GroupAccount] = field(default_factory=dict)
    """By run id: what the groups should have had and got."""

    def begun(self, policy: PolicyResults) -> list[RunResults]:
        """The seeds of a policy that have at least one round."""
        return [run for run in policy.runs if run.run.id in self.traces]

    def shared_federation(self) -> FederationFacts | None:
        """Of the first run that has one."""
        return next(iter(self.federations.values()), None)


@contextmanager
def opened(store: Reader | str | Path) -> Iterator[Reader]:
    """The store itself, or the one at a path or URL, closed again afterwards."""
    if isinstance(store, Reader):
        yield store
        return
    own = open_store(store)
    try:
        yield own
    finally:
        own.close()


def read_material(store: Reader, experiment: str | int | None = None, *, grouping: str | None = None) -> Material:
    """Read one experiment; None: the latest. `grouping`: of clients; None: what tells most, if anything does."""
    results = load_results(store, store.experiment(experiment))
    known: dict[int, FederationFacts] = {}
    federations: dict[int, FederationFacts] = {}
    traces: dict[int, RunTrace] = {}
    for run in (run for policy in results.policies for run in policy.runs):
        number = run.run.federation_id
        if number is not None:
            known.setdefault(number, store.federation(number))
            federations[run.run.id] = known[number]
        if len(run.rounds["round"]):
            traces[run.run.id] = collect(store, run, federations.get(run.run.id))
    runs = [run for policy in results.policies for run in policy.runs if run.run.id in traces]
    by, groups = _groups(store, runs, grouping)
    accounts = {
        run.run.id: group_accounts(store, run.run, groups[run.run.id], limit=run.wanted)
        for run in runs
        if run.run.id in groups
    }
    return Material(
        store=store, results=results, traces=traces, federations=federations,
        grouping=by, groups=groups, accounts=accounts,
    )  # fmt: skip


def _groups(store: Reader, runs: Sequence[RunResults], grouping: str | None) -> tuple[str, dict[int, Groups]]:
    """(by what, groups by run id). Policies share the availability of a seed, so it is made once."""
    known: dict[str, tuple[str, Groups] | None] = {}
    groups: dict[int, Groups] = {}
    by = grouping or ""
    for each in runs:
        run = each.run
        key = json.dumps([run.settings.get("availability"), run.seed, run.federation_id], sort_keys=True)
        if key not in known:
            known[key] = find_groups(store, run) if grouping is None else (grouping, groups_of(store, run, grouping))
        found = known[key]
        if found is not None and found[0] == (by or found[0]):
            by, groups[run.id] = found
    return by, groups


def numbers(values: Any, digits: int = 5) -> Any:
    """Nested lists for JSON: so many significant digits, null for what is not finite.

    >>> numbers(np.array([1 / 3, np.nan, 2.0]))
    [0.33333, None, 2]
    """
    if isinstance(values, (np.ndarray, list, tuple)):
        return [numbers(value, digits) for value in values]
    number = float(values)
    if not math.isfinite(number):
        return None
    if number.is_integer() and abs(number) < 1e15:
        return int(number)
    return float(f"{number:.{digits}g}")


def bytes_of(matrix: NDArray[np.uint8]) -> dict[str, Any]:
    """A matrix of small integers in base64."""
    return {"shape": list(matrix.shape), "bytes": base64.b64encode(np.ascontiguousarray(matrix).tobytes()).decode()}


def steps_of(run: RunResults) -> dict[str, NDArray[np.float64]]:
    """The horizontal axes of a run: rounds from 1, bytes sent both ways, seconds of computation."""
    rounds = run.rounds
    parts = [np.nan_to_num(rounds[f"{part}_seconds"]) for part in ("select", "measure", "train", "evaluate")]
    return {
        "round": rounds["round"].astype(np.float64) + 1,
        "bytes": (rounds["bytes_down"] + rounds["bytes_up"]).astype(np.float64),
        "seconds": np.cumsum(np.sum(parts, axis=0)) if len(rounds["round"]) else np.zeros(0),
    }


@dataclass(frozen=True)
class Measure:
    """Something with a value in every round."""

    key: str
    name: str
    value: Callable[[RunResults, RunTrace], NDArray[np.float64]]
    percent: bool = False
    applies: Callable[[RunResults], bool] = lambda run: True
    """Whether a run has such a thing at all; the mean is over those that do."""
    reference: tuple[str, float] | None = None
    """(name, value) of a level to compare with."""


def line_data(
    material: Material,
    measures: Sequence[Measure],
    *,
    axes: Sequence[str] = ("round",),
    each_seed: bool = False,
    targets: Sequence[float] = (),
) -> dict[str, Any] | None:
    """Mean and standard deviation over the seeds for every policy and measure; None where nothing was measured."""
    drawn = []
    for measure in measures:
        series = {}
        for policy in material.results.policies:
            line = _line(material, policy, measure, axes, each_seed)
            if line is not None:
                series[policy.label] = line
        if series:
            made = {"key": measure.key, "name": measure.name, "percent": measure.percent, "series": series}
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
    # Where seeds are at different rounds only the rounds that all of them have can be averaged.
    length = min(len(run.rounds["round"]) for run in runs)
    values = np.stack([measure.value(run, material.traces[run.run.id])[:length] for run in runs])
    known = np.flatnonzero(np.isfinite(values).all(axis=0))
    if len(known) == 0:
        return None
    if len(known) > _MOST_POINTS:
        known = known[np.unique(np.linspace(0, len(known) - 1, _MOST_POINTS).astype(np.int64))]
    values = values[:, known]
    mean = values.mean(axis=0)
    steps = [steps_of(run) for run in runs]
    line: dict[str, Any] = {
        axis: numbers(np.mean([step[axis][:length][known] for step in steps], axis=0)) for axis in axes
    }
    line |= {"mean": numbers(mean), "seeds": [run.run.seed for run in runs]}
    if len(runs) > 1:
        line["sd"] = numbers(values.std(axis=0, ddof=1))
        if each_seed:
            line["each"] = [numbers(row) for row in values]
    return line
