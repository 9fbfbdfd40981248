"""Charts of whom a policy chose: frequency, fairness, rasters, groups of clients, weights and labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedpick.core.arrays import FloatArray
from fedpick.report.analysis import PolicyResults, Quantity, RunResults
from fedpick.report.charts.chart import Chart, Measure, cell, column, line_chart, numbers, packed, shared_rounds
from fedpick.report.groups import GroupAccount
from fedpick.report.material import EXCLUDED, Material, Raster, RunHistory, population_of

__all__ = ["group_charts", "raster_chart", "selection_charts", "weight_charts"]

_MOST_POINTS = 500
_MOST_COLUMNS = 200


def selection_charts(material: Material) -> list[Chart | None]:
    """The section "choices"."""
    return [_frequency(material), _fairness(material), raster_chart(material)]


# How often


def _means(values: FloatArray) -> FloatArray:
    """At most 500 values: means of neighbours if there are more."""
    if len(values) <= _MOST_POINTS:
        return values
    starts = np.arange(_MOST_POINTS, dtype=np.int64) * len(values) // _MOST_POINTS
    return np.asarray(np.add.reduceat(values, starts) / np.diff(starts, append=len(values)))


def _mean_by_rank(values: Sequence[FloatArray]) -> FloatArray:
    """The mean of the seeds' largest values, then of their second largest, and so on. Seeds may have fewer clients."""
    ranked = np.full((len(values), max(map(len, values))), np.nan)
    for row, each in zip(ranked, values, strict=True):
        row[: len(each)] = np.sort(each)[::-1]
    return np.asarray(np.nanmean(ranked, axis=0))


def _frequency(material: Material) -> Chart | None:
    """How often each client was chosen and how much weight it had; ranked, or client by client."""
    runs = material.all_begun()
    # Clients may join a recorded session: one seed then has more of them than another.
    known = [material.federations[run.run.id] for run in runs if run.run.id in material.federations]
    federation = max(known, key=lambda each: each.num_clients, default=None)
    if federation is None or federation.num_clients == 0:
        return None

    def chosen(run: RunResults) -> FloatArray:
        return np.asarray(run.counts / max(len(run.rounds["round"]), 1))

    def weight_share(run: RunResults) -> FloatArray:
        weight = material.histories[run.run.id].weight_per_client
        return weight / weight.sum() if weight.sum() > 0 else weight

    even = np.full(federation.num_clients, np.mean([chosen(run).mean() for run in runs]))
    importance = federation.num_examples / max(federation.num_examples.sum(), 1e-300)
    measures = []
    for key, name, value, reference, level in (
        ("chosen", "share of rounds chosen", chosen, "even choice", even),
        ("weight", "share of all weight", weight_share, "its examples", importance),
    ):
        policies = [(policy.label, mine) for policy in material.results.policies if (mine := material.begun(policy))]
        measures.append(
            {
                "key": key,
                "name": name,
                "ranked": {
                    label: numbers(_means(_mean_by_rank([value(run) for run in mine]))) for label, mine in policies
                },
                "single": {label: numbers(_means(value(mine[0]))) for label, mine in policies},
                "reference": {
                    "name": reference,
                    "ranked": numbers(_means(np.sort(level)[::-1])),
                    "single": numbers(_means(level)),
                },
            }
        )
    caption = (
        "A flat line is an even choice; a steep one favours few. Dotted: all alike, or as many examples as each has. "
    )
    if federation.num_clients > _MOST_POINTS:
        caption += f"Each of {_MOST_POINTS} points is the mean of {federation.num_clients / _MOST_POINTS:,.0f} clients."
    else:
        caption += f"By client: seed {runs[0].run.seed} only, because seeds may partition the data differently."
    positions = numbers(_means(np.arange(federation.num_clients, dtype=np.float64)), 7)
    return Chart(
        key="frequency",
        title="How often each client was chosen",
        caption=caption,
        kind="clients",
        data={"measures": measures, "positions": positions},
    )


def _fairness(material: Material) -> Chart | None:
    measures = [
        Measure("jain", "Jain's index", column("jain"), from_zero=True),
        Measure("coverage", "clients reached", column("coverage"), percent=True, from_zero=True),
        Measure("variance", "variance of counts", column("variance"), from_zero=True),
    ]
    caption = (
        "How evenly the choices so far are spread. Jain's index is 1 if all clients were chosen equally "
        "often, and 1/N if one client had all the places."
    )
    return line_chart(material, measures, key="fairness", title="Fairness over time", caption=caption)


# Rasters


def _raster_data(raster: Raster) -> dict[str, Any]:
    if raster.exact is not None:
        return {"exact": packed(raster.exact), "excludes": bool((raster.exact >= EXCLUDED).any())}
    # 256 levels are all that the eye sees, and one byte per cell keeps the file small.
    peak = float(raster.chosen.max(initial=0.0))
    return {
        "available": packed(np.round(255 * raster.available).astype(np.uint8)),
        "chosen": packed(np.round(255 * raster.chosen / (peak or 1.0)).astype(np.uint8)),
        "peak": numbers(peak),
        "clients_per_row": numbers(raster.clients_per_row),
        "rounds_per_column": numbers(raster.rounds_per_column),
    }


def raster_chart(material: Material) -> Chart | None:
    """Clients x rounds: available, chosen, and chosen but not completed."""
    views: list[dict[str, Any]] = []
    left_out = 0
    for policy, run in material.by_turns():
        raster = material.histories[run.run.id].raster
        if raster is None:
            left_out += run.run.id in material.federations
            continue
        view = {"policy": policy.label, "seed": run.run.seed, **_raster_data(raster)}
        account = material.accounts.get(run.run.id)
        if account is not None and raster.exact is not None:
            groups = account.groups
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
        caption += " Excluded: the policy excluded the client, available or not."
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


# Groups


def group_charts(material: Material) -> list[Chart | None]:
    """Importance by group at the end (CA-Fed, figure 1d) and over the rounds; empty if clients are not grouped."""
    accounts = material.accounts.values()
    names = sorted({name for account in accounts for name in account.target})
    if not names:
        return []
    # Seeds may differ in the target of a group, policies may not.
    targets = {
        name: float(np.mean([account.target[name] for account in accounts if name in account.target])) for name in names
    }
    bars = _group_bars(material, targets) if any(account.realized for account in accounts) else None
    return [bars, _importance_lines(material, targets)]


def _group_bars(material: Material, targets: dict[str, float]) -> Chart:
    measured: list[tuple[str, str, Callable[[GroupAccount, str], float | None]]] = [
        ("importance", "share of all weight", lambda account, group: account.realized.get(group)),
        ("left-out", "left out while available", lambda account, group: account.left_out.get(group, (None,))[0]),
        (
            "wholly-left-out",
            "wholly left out while available",
            lambda account, group: account.left_out.get(group, (None, None))[1],
        ),
        ("excluded", "excluded, available or not", lambda account, group: account.excluded.get(group, (None,))[0]),
    ]
    measures = []
    for key, name, value in measured:
        series = {}
        for policy in material.results.policies:
            accounts = [material.accounts[run.run.id] for run in policy.runs if run.run.id in material.accounts]
            # A seed without the group, or in which it was never available, does not count.
            cells = [
                cell(Quantity(tuple(each for account in accounts if (each := value(account, group)) is not None)))
                for group in targets
            ]
            if any(each["mean"] is not None for each in cells):
                series[policy.label] = cells
        if series:
            measures.append({"key": key, "name": name, "series": series})
    measures[0]["target"] = numbers(list(targets.values()))
    return Chart(
        key="importance",
        title="What each group of clients got",
        caption="Share of all weight with which updates entered the model; lines across the bars: the target, the "
        "group's share of the examples. Or how often its clients were available and not chosen; wholly: "
        "at least one client of the group was available and none was chosen.",
        kind="groups",
        data={"groups": list(targets), "measures": measures, "by": material.grouping, "menu": True},
    )


def _importance_lines(material: Material, targets: dict[str, float]) -> Chart | None:
    accounts = material.accounts

    def share(group: str) -> Measure:
        def value(run: RunResults, _: RunHistory) -> FloatArray:
            account = accounts[run.run.id]
            return account.cumulative[:, account.groups.names.index(group)]

        def applies(run: RunResults) -> bool:
            return run.run.id in accounts and group in accounts[run.run.id].target

        return Measure(group, group, value, percent=True, applies=applies, reference=("target", targets[group]))

    def distance(run: RunResults, _: RunHistory) -> FloatArray:
        return accounts[run.run.id].distance

    far = Measure("distance", "distance to the target", distance, applies=lambda run: run.run.id in accounts)
    return line_chart(
        material,
        [far, *(share(group) for group in targets)],
        key="importance-rounds",
        title="Importance so far",
        caption="Total-variation distance between the importance that all clients have had so far and their target: "
        "0 if they agree, 1 if all weight went to clients whose target is 0. Or a group's share; dotted: its target.",
        menu=True,
    )


# Weights and labels


def weight_charts(material: Material) -> list[Chart | None]:
    """The section "weights"."""
    measures = [
        Measure("effective", "effective cohort", column("effective"), from_zero=True),
        Measure("weight_sum", "sum of weights", column("weight_sum"), from_zero=True),
        Measure("weight_max", "largest weight", column("weight_max"), from_zero=True),
    ]
    caption = (
        "The effective cohort is (Σw)² / Σw²: the number of clients with equal weights that would vary as much. "
        "A sum below 1 means a shortened step."
    )
    weights = line_chart(material, measures, key="weight", title="Weights given over time", caption=caption)
    return [weights, *_labels(material)]


def _label_gaps(material: Material, policy: PolicyResults) -> tuple[FloatArray, FloatArray] | None:
    """(L, columns) mean share of each label minus its share of all data, and the round of each column."""
    runs = [run for run in material.begun(policy) if material.histories[run.run.id].labels is not None]
    if not runs:
        return None
    shared = shared_rounds([run.kept for run in runs])
    length = len(shared)
    stacked = np.stack([_gap(material, run)[np.isin(run.kept, shared)] for run in runs])
    known = np.asarray(np.isfinite(stacked).all(axis=2))
    mean = np.where(known[:, :, None], stacked, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)[:, None]
    filled = np.asarray(known.any(axis=0))
    columns = min(length, _MOST_COLUMNS)
    starts = np.arange(columns, dtype=np.int64) * length // columns
    sizes = np.diff(starts, append=length)
    sums = np.add.reduceat(np.where(filled[:, None], mean, 0.0), starts, axis=0)
    present = np.add.reduceat(filled.astype(np.float64), starts)
    grouped = np.where(present[:, None] > 0, sums / np.maximum(present, 1)[:, None], np.nan)
    middle = (shared[starts] + shared[starts + sizes - 1]) / 2 + 1
    return grouped.T, middle


def _gap(material: Material, run: RunResults) -> FloatArray:
    """(P, L) share of each label in the cohorts minus its share of all data."""
    labels, population = material.histories[run.run.id].labels, population_of(material.federations.get(run.run.id))
    assert labels is not None and population is not None
    return labels - population


def _labels(material: Material) -> list[Chart | None]:
    """Distance of the cohorts' labels from the labels of all data: as one number, and label by label."""

    measures = [
        Measure("so_far", "all cohorts so far", column("label_distance_so_far")),
        Measure("distance", "each cohort", column("label_distance")),
    ]
    lines = line_chart(
        material,
        measures,
        key="label-distance",
        title="Distance to the labels of all data",
        caption="Total variation distance: 0 if every label is as frequent as in the whole data, 1 if no label is "
        "common to both. The mean of all cohorts so far shows whether a policy evens out.",
    )
    if lines is None:
        return []
    found = {policy.label: _label_gaps(material, policy) for policy in material.results.policies}
    views = [
        {"policy": label, "rounds": numbers(pair[1]), "gaps": numbers(pair[0], 3)}
        for label, pair in found.items()
        if pair is not None
    ]
    population = population_of(material.shared_federation())
    return [
        lines,
        Chart(
            key="labels",
            title="Label mix of the cohorts",
            caption="Orange: more of this label than in the whole data; blue: less. Mean over the seeds.",
            kind="labels",
            data={"views": views, "population": numbers(population if population is not None else [], 3)},
            wide=True,
        ),
    ]
