"""Charts about clients: how often each was chosen, who was there, and which labels the cohorts brought."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedpick.core.arrays import FloatArray
from fedpick.experiments.store_read import FederationFacts
from fedpick.report.analysis import PolicyResults, RunResults
from fedpick.report.charts_base import Chart, Material, Measure, bytes_of, line_data, numbers
from fedpick.report.charts_collect import EXCLUDED, Raster, RunTrace

__all__ = ["frequency_chart", "label_charts", "raster_chart"]

_MOST_POINTS = 500
_MOST_COLUMNS = 200
_MOST_RASTER_CELLS = 1_500_000


def _groups(values: FloatArray) -> FloatArray:
    """At most 500 values: means of neighbours where there are more."""
    if len(values) <= _MOST_POINTS:
        return values
    starts = np.arange(_MOST_POINTS, dtype=np.int64) * len(values) // _MOST_POINTS
    return np.asarray(np.add.reduceat(values, starts) / np.diff(starts, append=len(values)))


def _positions(size: int) -> list[float]:
    """The client that stands in the middle of each group."""
    return list(numbers(_groups(np.arange(size, dtype=np.float64)), 7))


def _chosen(material: Material, run: RunResults) -> FloatArray:
    return np.asarray(run.counts / max(len(run.rounds["round"]), 1))


def _weight_share(material: Material, run: RunResults) -> FloatArray:
    weight = material.traces[run.run.id].weight_per_client
    return weight / weight.sum() if weight.sum() > 0 else weight


def _all_begun(material: Material) -> list[RunResults]:
    return [run for policy in material.results.policies for run in material.begun(policy)]


def frequency_chart(material: Material) -> Chart | None:
    """How often each client was chosen and how much weight it had; ranked, or client by client."""
    first = next(iter(_all_begun(material)), None)
    federation = None if first is None else material.federations.get(first.run.id)
    if first is None or federation is None or federation.num_clients == 0:
        return None
    measures = []
    for key, name, value in (
        ("chosen", "share of rounds chosen", _chosen),
        ("weight", "share of all weight", _weight_share),
    ):
        ranked: dict[str, Any] = {}
        single: dict[str, Any] = {}
        for policy in material.results.policies:
            runs = material.begun(policy)
            if runs:
                ordered = np.mean([np.sort(value(material, run))[::-1] for run in runs], axis=0)
                ranked[policy.label] = numbers(_groups(ordered))
                single[policy.label] = numbers(_groups(value(material, runs[0])))
        measures.append({"key": key, "name": name, "ranked": ranked, "single": single})
    importance = federation.num_examples / max(federation.num_examples.sum(), 1e-300)
    even = np.full(federation.num_clients, np.mean([_chosen(material, run).mean() for run in _all_begun(material)]))
    for measure, name, reference in ((measures[0], "even choice", even), (measures[1], "its examples", importance)):
        measure["reference"] = {
            "name": name,
            "ranked": numbers(_groups(np.sort(reference)[::-1])),
            "single": numbers(_groups(reference)),
        }
    grouped = federation.num_clients > _MOST_POINTS
    caption = (
        "A flat line is an even choice; a steep one favours few. Dotted: all alike, or as many examples as each has. "
    )
    if grouped:
        caption += f"Each of {_MOST_POINTS} points is the mean of {federation.num_clients / _MOST_POINTS:,.0f} clients."
    else:
        caption += f"By client: seed {first.run.seed}, because every seed may deal the data anew."
    return Chart(
        key="frequency",
        title="How often each client was chosen",
        caption=caption,
        kind="clients",
        data={"measures": measures, "positions": _positions(federation.num_clients)},
    )


def _raster_data(raster: Raster) -> dict[str, Any]:
    if raster.exact is not None:
        return {"exact": bytes_of(raster.exact), "excludes": bool((raster.exact >= EXCLUDED).any())}
    # Shares in 256 steps: the eye sees no more, and a byte per cell keeps the file small.
    peak = float(raster.chosen.max(initial=0.0))
    return {
        "available": bytes_of(np.round(255 * raster.available).astype(np.uint8)),
        "chosen": bytes_of(np.round(255 * raster.chosen / (peak or 1.0)).astype(np.uint8)),
        "peak": numbers(peak),
        "clients_per_row": numbers(raster.clients_per_row),
        "rounds_per_column": numbers(raster.rounds_per_column),
    }


def raster_chart(material: Material) -> Chart | None:
    """Clients x rounds: who was available, chosen, and who did not complete."""
    views: list[dict[str, Any]] = []
    cells, left_out = 0, 0
    # All policies' first seeds before anybody's second: where space runs out every policy is still there.
    turns = [(turn, policy) for turn in range(_most_seeds(material)) for policy in material.results.policies]
    for turn, policy in turns:
        runs = material.begun(policy)
        if turn >= len(runs) or len(material.traces[runs[turn].run.id].available_per_client) == 0:
            continue
        raster = material.traces[runs[turn].run.id].raster
        cells += raster.available.size * (1 if raster.exact is not None else 2)
        if turn > 0 and cells > _MOST_RASTER_CELLS:
            left_out += 1
            continue
        view = {"policy": policy.label, "seed": runs[turn].run.seed, **_raster_data(raster)}
        groups = material.groups.get(runs[turn].run.id)
        if groups is not None and raster.exact is not None:
            view |= {"order": groups.order.tolist(), "groups": list(groups.names), "sizes": groups.sizes.tolist()}
        views.append(view)
    if not views:
        return None
    caption = "One row per client, one column per round."
    if any("exact" not in view for view in views):
        caption = "Neighbouring clients and rounds share a cell. Above: share available; below: how many were chosen."
    if any("order" in view for view in views):
        caption += f" By group: clients ordered by {material.grouping}, then by how correlated their presence is."
    if any(view.get("excludes") for view in views):
        caption += " Excluded: the policy decided to do without the client, whether it was there or not."
    if left_out:
        caption += " To keep this file small, only the first seeds are here."
    return Chart(
        key="raster",
        title="Who was available, who was chosen",
        caption=caption,
        kind="raster",
        data={"views": views},
        wide=True,
    )


def _most_seeds(material: Material) -> int:
    return max((len(policy.runs) for policy in material.results.policies), default=0)


def _population(federation: FederationFacts | None) -> FloatArray | None:
    if federation is None or federation.label_histogram is None:
        return None
    total = federation.label_histogram.sum(axis=0, dtype=np.int64).astype(np.float64)
    return total / total.sum() if total.sum() > 0 else None


def _label_columns(material: Material, policy: PolicyResults) -> tuple[FloatArray, FloatArray] | None:
    """(L, columns) mean share of each label minus its share of all data, and the round of each column."""
    gaps = []
    for run in material.begun(policy):
        labels = material.traces[run.run.id].labels
        population = _population(material.federations.get(run.run.id))
        if labels is not None and population is not None:
            gaps.append(labels - population)
    if not gaps:
        return None
    length = min(len(gap) for gap in gaps)
    stacked = np.stack([gap[:length] for gap in gaps])
    known = np.asarray(np.isfinite(stacked).all(axis=2))
    mean = np.where(known[:, :, None], stacked, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)[:, None]
    mean[~known.any(axis=0)] = np.nan
    columns = min(length, _MOST_COLUMNS)
    starts = np.arange(columns, dtype=np.int64) * length // columns
    sizes = np.diff(starts, append=length)
    filled = np.isfinite(mean).all(axis=1)
    sums = np.add.reduceat(np.where(filled[:, None], mean, 0.0), starts, axis=0)
    present = np.add.reduceat(filled.astype(np.float64), starts)
    grouped = np.where(present[:, None] > 0, sums / np.maximum(present, 1)[:, None], np.nan)
    return grouped.T, starts + (sizes - 1) / 2 + 1


def label_charts(material: Material) -> list[Chart | None]:
    """How far the cohorts' labels are from everybody's: in one number, and label by label."""

    def distance(run: RunResults, trace: RunTrace) -> FloatArray:
        population = _population(material.federations.get(run.run.id))
        if trace.labels is None or population is None:
            return np.full(len(run.rounds["round"]), np.nan)
        return np.asarray(np.abs(trace.labels - population).sum(axis=1) / 2)

    def distance_so_far(run: RunResults, trace: RunTrace) -> FloatArray:
        population = _population(material.federations.get(run.run.id))
        if trace.labels is None or population is None:
            return np.full(len(run.rounds["round"]), np.nan)
        known = np.asarray(np.isfinite(trace.labels).all(axis=1))
        total = np.cumsum(np.where(known[:, None], trace.labels, 0.0), axis=0)
        mean = total / np.maximum(np.cumsum(known), 1)[:, None]
        return np.where(np.cumsum(known) > 0, np.abs(mean - population).sum(axis=1) / 2, np.nan)

    measures = [Measure("so_far", "all cohorts so far", distance_so_far), Measure("distance", "each cohort", distance)]
    data = line_data(material, measures)
    if data is None:
        return []
    views = []
    for policy in material.results.policies:
        found = _label_columns(material, policy)
        if found is not None:
            views.append({"policy": policy.label, "rounds": numbers(found[1]), "gaps": numbers(found[0], 3)})
    federation = material.shared_federation()
    population = _population(federation)
    return [
        Chart(
            key="label-distance",
            title="Distance to everybody's labels",
            caption="Total variation distance: 0 where every label is as frequent as in the whole data, "
            "1 where no label is common to both. The mean of all cohorts so far tells whether a policy evens out.",
            kind="lines",
            data=data,
        ),
        Chart(
            key="labels",
            title="Label mix of the cohorts",
            caption="Orange: more of this label than in the whole data; blue: less. Mean over the seeds.",
            kind="labels",
            data={"views": views, "population": numbers(population if population is not None else [], 3)},
            wide=True,
        ),
    ]
