"""Charts of what the clients get in the end: the accuracy of the final model for each of them."""

from __future__ import annotations

from typing import Any

from fedpick.report.analysis import PolicyResults, Quantity
from fedpick.report.charts.chart import Chart, cell
from fedpick.report.fairness import PARTS, Fairness, tenths
from fedpick.report.material import Material

__all__ = ["charts"]

_TENTHS = ("worst", "2", "3", "4", "5", "6", "7", "8", "9", "best")
_FEWEST_FOR_TENTHS = 10


def charts(material: Material) -> list[Chart | None]:
    """The section "outcome"."""
    found = material.fairness
    if not found:
        return []
    ranked = {number: _ranked(fairness) for number, fairness in found.items()}
    measures = [_measure(material, "tenths", "tenths of the clients", ranked)]
    for by, name in (("size", "by size"), ("availability", "by availability"), ("label", "by main label")):
        means = {number: dict(fairness.groups.get(by, {})) for number, fairness in found.items()}
        measures.append(_measure(material, by, name, means))
    present = [measure for measure in measures if measure is not None]
    if not present:
        return []
    measured = " or ".join(sorted({PARTS[fairness.part] for fairness in found.values()}))
    return [
        Chart(
            key="outcome",
            title="Accuracy of the final model for its clients",
            caption=f"Of each client on {measured}: means of tenths of the clients, or of groups. A policy is fair if "
            "its bars are equally high. By size: thirds of the clients; by availability: halves; by main label: the "
            "label a client has most of.",
            kind="groups",
            data={"groups": present[0]["groups"], "measures": present, "by": present[0]["by"], "menu": True},
            wide=True,
        )
    ]


def _ranked(fairness: Fairness) -> dict[str, float]:
    if len(fairness.known) < _FEWEST_FOR_TENTHS:
        return {}
    return dict(zip(_TENTHS, tenths(fairness.known).tolist(), strict=True))


def _measure(material: Material, key: str, name: str, means: dict[int, dict[str, float]]) -> dict[str, Any] | None:
    """The bars of one grouping: a cell for every policy and group."""
    groups = list(dict.fromkeys(group for each in means.values() for group in each))
    if len(groups) < 2:
        return None

    def value(policy: PolicyResults, group: str) -> Quantity:
        runs = [means[run.run.id] for run in policy.runs if run.run.id in means]
        return Quantity(tuple(each[group] for each in runs if group in each))

    if key == "label":
        groups.sort(key=lambda group: int(group.removeprefix("label ")))
    series = {policy.label: [cell(value(policy, group)) for group in groups] for policy in material.results.policies}
    known = {label: cells for label, cells in series.items() if any(each["seeds"] for each in cells)}
    return {"key": key, "name": f"accuracy, {name}", "by": name, "groups": groups, "series": known}
