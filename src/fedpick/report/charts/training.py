"""Charts of how well the model was trained: accuracy, loss, cost of a target, sweeps and paired differences."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np

from fedpick.report import analysis
from fedpick.report.analysis import PolicyResults, Quantity, Sweep
from fedpick.report.charts.chart import Chart, Measure, cell, column, line_chart, numbers
from fedpick.report.material import Material
from fedpick.report.tables import DifferenceColumn, difference_columns

__all__ = ["charts"]

_MOST_SWEEPS = 4


def charts(material: Material, against: str | None, window: int) -> list[Chart | None]:
    """The section "results"."""
    sweeps: dict[str, Chart] = {}
    for sweep in analysis.sweeps_of(material.results)[:_MOST_SWEEPS]:
        if (chart := _sweep(material, sweep)) is not None:
            # Two families of one policy may vary the same hyper-parameter.
            key = chart.key if chart.key not in sweeps else f"{chart.key}-{len(sweeps) + 1}"
            sweeps[key] = replace(chart, key=key)
    forest = _forest(material, against, window)
    return [_accuracy(material), _loss(material), _targets(material), *sweeps.values(), forest]


def _axes(material: Material) -> tuple[str, ...]:
    counted = any(run.rounds["bytes_down"].any() for run in material.all_begun())
    timed = all(np.isfinite(run.clock).all() for run in material.all_begun())
    return ("round", *(("bytes",) if counted else ()), *(("clock",) if timed else ()))


def _accuracy(material: Material) -> Chart | None:
    targets = material.results.experiment.targets
    measures = [
        Measure("accuracy", "test accuracy", column("accuracy"), percent=True),
        Measure("local_accuracy", "accuracy on clients' own test data", column("local_accuracy"), percent=True),
    ]
    caption = "How good the model is after each round."
    if max((len(material.begun(policy)) for policy in material.results.policies), default=0) > 1:
        caption += " Lines are means over the seeds, bands one standard deviation."
    if targets:
        caption += " Dotted: the targets."
    return line_chart(
        material, measures, key="accuracy", title="Accuracy", caption=caption, axes=_axes(material), each_seed=True,
        targets=targets,
    )  # fmt: skip


def _loss(material: Material) -> Chart | None:
    measures = [
        Measure("loss", "test loss", column("loss")),
        Measure("objective", "objective (all clients)", column("objective")),
        Measure("train_loss", "training loss of the cohort", column("train_loss")),
    ]
    caption = "Lower is better. The cohort's own loss says little if a policy seeks clients with a high loss."
    return line_chart(
        material, measures, key="loss", title="Loss", caption=caption, axes=_axes(material), each_seed=True
    )


def _targets(material: Material) -> Chart | None:
    results = material.results
    if not results.experiment.targets or not material.histories:
        return None
    measures: list[dict[str, Any]] = []
    costs_of: list[tuple[str, str, Any]] = [
        ("rounds", "rounds", analysis.rounds_to_target),
        ("models", "models sent", analysis.models_to_target),
        ("bytes", "bytes sent", analysis.bytes_to_target),
    ]
    if "clock" in _axes(material):
        costs_of.append(("clock", "seconds on the clients' devices", analysis.seconds_to_target))
    for key, name, measure in costs_of:
        series = {}
        for policy in results.policies:
            costs = [
                Quantity(tuple(measure(run, target) for run in policy.runs)) for target in results.experiment.targets
            ]
            series[policy.label] = [{**cell(cost), "reached": len(cost.known)} for cost in costs]
        measures.append({"key": key, "name": name, "series": series})
    if not any(cost["mean"] is not None for costs in measures[0]["series"].values() for cost in costs):
        return None
    return Chart(
        key="targets",
        title="Cost of reaching a target",
        caption="Until the test accuracy first reaches the target: shorter is better. "
        "N/A: some seed did not reach it. Probes and trial rounds count as models sent.",
        kind="bars",
        data={"measures": measures, "targets": [f"{100 * target:g} %" for target in results.experiment.targets]},
        wide=True,
    )


def _sweep(material: Material, sweep: Sweep) -> Chart | None:
    """Accuracy against a hyper-parameter (CA-Fed, figure 2)."""
    points = [analysis.over_seeds(line, analysis.final_accuracy) for line in sweep.lines]
    if not any(point.mean is not None for point in points):
        return None
    others = {
        line.label: analysis.over_seeds(line, analysis.final_accuracy).mean
        for line in material.results.policies
        if line not in sweep.lines and line.policy != sweep.policy
    }
    rounds, best = analysis.best_by_round(sweep)
    low, high = sweep.values[0], sweep.values[-1]
    return Chart(
        # The names come from the store: the page and the files need them without markup.
        key=re.sub(r"[^\w.-]", "-", f"sweep-{sweep.policy}-{sweep.parameter}"),
        title=f"{sweep.policy}: accuracy against {sweep.parameter}",
        caption=f"Final test accuracy for each {sweep.parameter}, with one standard deviation over the seeds; "
        "horizontal lines: the other policies. Or the value that was best up to each round.",
        kind="sweep",
        data={
            "measures": [
                {"key": "final", "name": "accuracy at the end"},
                *([{"key": "best", "name": f"best {sweep.parameter} by round"}] if len(rounds) > 1 else []),
            ],
            "parameter": sweep.parameter,
            "logarithmic": bool(low > 0 and high >= 20 * low),
            "values": numbers(np.array(sweep.values), 6),
            "labels": [line.label for line in sweep.lines],
            "mean": [numbers(point.mean) for point in points],
            "sd": [numbers(point.sd) for point in points],
            "references": [
                {"label": label, "mean": numbers(mean)} for label, mean in others.items() if mean is not None
            ],
            "best": {"round": rounds.tolist(), "value": numbers(best, 6)},
        },
    )


def _forest(material: Material, against: str | None, window: int) -> Chart | None:
    """Every other policy minus the one called `against`, with confidence intervals."""
    if against is None:
        return None
    results = material.results
    baseline = analysis.policy_named(results, against)
    # Final accuracy first; the table keeps its own order.
    columns = sorted(
        difference_columns(results, window), key=lambda each: not each.heading.startswith("final accuracy")
    )
    measures = []
    for each in columns:
        series = {
            policy.label: made
            for policy in results.policies
            if policy is not baseline and (made := _difference(each, policy, baseline)) is not None
        }
        if series:
            name = each.heading.removesuffix(" %") + (", percentage points" if each.heading.endswith(" %") else "")
            measures.append({"key": each.heading, "name": name, "best": each.best, "series": series})
    if not measures:
        return None
    return Chart(
        key="differences",
        title=f"Paired differences to {baseline.label}",
        caption=f"Each policy minus {baseline.label}, seed by seed: mean and 95 % confidence interval. An interval "
        "that excludes 0 speaks for a difference; there is no correction for multiple comparisons.",
        kind="forest",
        data={"measures": measures, "baseline": baseline.label, "menu": True},
        wide=True,
    )


def _difference(column: DifferenceColumn, policy: PolicyResults, baseline: PolicyResults) -> dict[str, Any] | None:
    difference = analysis.paired_difference(policy, baseline, column.measure)
    mean, _, low, high = column.numbers(difference)
    if mean is None:
        return None
    return {
        "mean": numbers(mean),
        "low": numbers(low),
        "high": numbers(high),
        "pairs": len(difference.values),
        "text": column.text(difference),
    }
