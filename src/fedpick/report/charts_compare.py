"""Charts that compare: paired differences to one policy, and results against one hyper-parameter."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedpick.report import analysis
from fedpick.report.analysis import Difference, PolicyResults
from fedpick.report.charts_base import Chart, Material, numbers
from fedpick.report.parameters import Sweep, best_by_round, sweeps_of
from fedpick.report.tables import DifferenceColumn, difference_columns

__all__ = ["forest_chart", "sweep_charts"]

_MOST_SWEEPS = 4


def forest_chart(material: Material, against: str | None, window: int = 1) -> Chart | None:
    """Every other policy minus the one called `against`, with confidence intervals."""
    if against is None:
        return None
    results = material.results
    baseline = analysis.policy_named(results, against)
    others = [policy for policy in results.policies if policy is not baseline]
    columns = list(difference_columns(results, window))
    # What most people ask first comes first; the table keeps its order.
    columns.sort(key=lambda column: not column.heading.startswith("final accuracy"))
    measures = [made for column in columns if (made := _forest_measure(column, others, baseline)) is not None]
    if not measures:
        return None
    return Chart(
        key="differences",
        title=f"Paired differences to {baseline.label}",
        caption=f"Each policy minus {baseline.label}, seed by seed: mean and 95 % confidence interval. "
        "An interval that does not reach 0 speaks for a difference; nothing is corrected for making many comparisons.",
        kind="forest",
        data={"measures": measures, "baseline": baseline.label, "menu": True},
        wide=True,
    )


def _forest_measure(
    column: DifferenceColumn, others: list[PolicyResults], baseline: PolicyResults
) -> dict[str, Any] | None:
    series = {}
    for policy in others:
        difference = analysis.paired_difference(policy, baseline, column.measure)
        mean, _, low, high = column.numbers(difference)
        if mean is not None:
            series[policy.label] = {
                "mean": numbers(mean),
                "low": None if low is None else numbers(low),
                "high": None if high is None else numbers(high),
                "pairs": len(difference.values),
                "text": column.text(Difference(difference.values)),
            }
    if not series:
        return None
    name = column.heading.removesuffix(" %") + (", percentage points" if column.heading.endswith(" %") else "")
    return {"key": column.heading, "name": name, "best": column.best, "series": series}


def sweep_charts(material: Material) -> list[Chart | None]:
    """Accuracy against a hyper-parameter (CA-Fed, figure 2), for every policy that is there with several values."""
    return [_sweep(material, sweep) for sweep in sweeps_of(material.results)[:_MOST_SWEEPS]]


def _sweep(material: Material, sweep: Sweep) -> Chart | None:
    points = [analysis.over_seeds(line, analysis.final_accuracy) for line in sweep.lines]
    if not any(point.mean is not None for point in points):
        return None
    labels = [line.label for line in sweep.lines]
    references = []
    for line in material.results.policies:
        mean = analysis.over_seeds(line, analysis.final_accuracy).mean
        if line.label not in labels and line.policy != sweep.policy and mean is not None:
            references.append({"label": line.label, "mean": numbers(mean)})
    rounds, best = best_by_round(sweep)
    low, high = sweep.values[0], sweep.values[-1]
    return Chart(
        key=f"sweep-{sweep.policy}-{sweep.parameter}",
        title=f"{sweep.policy}: accuracy against {sweep.parameter}",
        caption=f"Test accuracy at the end for each {sweep.parameter}, with one standard deviation over the seeds; "
        "across: the other policies. Or the value that was best after so many rounds.",
        kind="sweep",
        data={
            "measures": [
                {"key": "final", "name": "accuracy at the end"},
                *([{"key": "best", "name": f"best {sweep.parameter} by round"}] if len(rounds) > 1 else []),
            ],
            "parameter": sweep.parameter,
            "logarithmic": bool(low > 0 and high >= 20 * low),
            "values": numbers(np.array(sweep.values), 6),
            "labels": labels,
            "mean": [None if point.mean is None else numbers(point.mean) for point in points],
            "sd": [None if point.sd is None else numbers(point.sd) for point in points],
            "references": references,
            "best": {"round": rounds.tolist(), "value": numbers(best, 6)},
        },
    )
