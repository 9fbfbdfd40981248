"""Charts about groups of clients: the importance they got against what they should have had (CA-Fed, figure 1d)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedpick.core.arrays import FloatArray
from fedpick.report.accounting import GroupAccount, ImportanceHistory, importance_history
from fedpick.report.analysis import Quantity, RunResults
from fedpick.report.charts_base import Chart, Material, Measure, line_data, numbers
from fedpick.report.charts_collect import RunTrace

__all__ = ["group_charts"]

Histories = Mapping[int, ImportanceHistory]


def group_charts(material: Material) -> list[Chart | None]:
    """Importance by group: at the end, and as it adds up. Nothing where clients are not in groups."""
    limit = material.results.experiment.rounds
    runs = [run for policy in material.results.policies for run in material.begun(policy)]
    histories = {
        run.run.id: importance_history(material.store, run.run, material.groups[run.run.id], limit)
        for run in runs
        if run.run.id in material.groups
    }
    names = sorted({name for history in histories.values() for name in history.groups})
    if not names:
        return []
    targets = [_target(histories, name) for name in names]
    bars = _in_bars(material, names, targets) if any(each.realized for each in material.accounts.values()) else None
    return [bars, _over_rounds(material, histories, names)]


def _place(history: ImportanceHistory, group: str) -> int | None:
    return history.groups.index(group) if group in history.groups else None


def _target(histories: Histories, group: str) -> float:
    """Mean over the runs that have the group: what it should have may differ between seeds, never between policies."""
    places = [(history, _place(history, group)) for history in histories.values()]
    return float(np.mean([history.target[place] for history, place in places if place is not None]))


def _cell(quantity: Quantity) -> dict[str, Any]:
    return {
        "mean": None if quantity.mean is None else numbers(quantity.mean),
        "sd": None if quantity.sd is None else numbers(quantity.sd),
        "seeds": len(quantity.values),
    }


def _measures() -> list[tuple[str, str, Callable[[GroupAccount, str], float | None]]]:
    """(key, name, value of a group in one run; None: there is none)."""

    def share(account: GroupAccount, group: str) -> float | None:
        return account.realized.get(group)

    def pair(field: str, place: int) -> Callable[[GroupAccount, str], float | None]:
        def value(account: GroupAccount, group: str) -> float | None:
            found = getattr(account, field).get(group)
            return None if found is None else float(found[place])

        return value

    return [
        ("importance", "share of all weight", share),
        ("left-out", "left out while available", pair("left_out", 0)),
        ("wholly-left-out", "wholly left out while available", pair("left_out", 1)),
        ("excluded", "excluded, available or not", pair("excluded", 0)),
    ]


def _in_bars(material: Material, names: list[str], targets: list[float]) -> Chart:
    measures = []
    for key, name, value in _measures():
        series: dict[str, Any] = {}
        for policy in material.results.policies:
            accounts = [material.accounts[run.run.id] for run in policy.runs if run.run.id in material.accounts]
            known = [[value(account, group) for account in accounts] for group in names]
            # A seed in which a group is not there, or never was available, has nothing to say about it.
            cells = [_cell(Quantity(tuple(each for each in found if each is not None))) for found in known]
            if any(cell["mean"] is not None for cell in cells):
                series[policy.label] = cells
        if series:
            measures.append({"key": key, "name": name, "series": series})
    measures[0]["target"] = [numbers(target) for target in targets]
    return Chart(
        key="importance",
        title="What each group of clients got",
        caption="Share of all weight with which updates entered the model; lines across the bars: what the group "
        "should have had, its share of the examples. Or how often its clients were available and not chosen; wholly: "
        "somebody of it was available and nobody of it was chosen.",
        kind="groups",
        data={"groups": names, "measures": measures, "by": material.grouping, "menu": True},
    )


def _over_rounds(material: Material, histories: Histories, names: list[str]) -> Chart | None:
    def share(group: str) -> Any:
        def value(run: RunResults, _: RunTrace) -> FloatArray:
            history = histories[run.run.id]
            return history.cumulative[:, history.groups.index(group)]

        return value

    def distance(run: RunResults, _: RunTrace) -> FloatArray:
        return histories[run.run.id].total_variation

    def has(group: str) -> Any:
        return lambda run: run.run.id in histories and group in histories[run.run.id].groups

    measures = [
        Measure(
            name, name, share(name), percent=True, applies=has(name), reference=("target", _target(histories, name))
        )
        for name in names
    ]
    far = Measure("distance", "distance to the target", distance, applies=lambda run: run.run.id in histories)
    data = line_data(material, [far, *measures])
    if data is None:
        return None
    return Chart(
        key="importance-rounds",
        title="Importance so far",
        caption="Total-variation distance between the importance that all clients have had so far and their target: "
        "0 where they agree, 1 where all weight went to clients that should have none. Or a group's share; "
        "dotted: its target.",
        kind="lines",
        data={**data, "menu": True},
    )
