"""The charts of an experiment, in the order of the report."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedpick.core.arrays import FloatArray
from fedpick.report import analysis
from fedpick.report.analysis import RunResults
from fedpick.report.charts_base import AXES, Chart, Material, Measure, Section, line_data, numbers
from fedpick.report.charts_clients import frequency_chart, label_charts, raster_chart
from fedpick.report.charts_collect import RunTrace
from fedpick.report.charts_compare import forest_chart, sweep_charts
from fedpick.report.charts_groups import group_charts
from fedpick.report.charts_learned import embedding_chart, matrix_chart

__all__ = ["sections_of"]


def sections_of(material: Material, *, against: str | None = None, window: int = 1) -> tuple[Section, ...]:
    """Every section that has something to show. `against`: the policy to which others are compared pair by pair."""
    results = [_accuracy(material), _loss(material), _targets(material), *sweep_charts(material)]
    wanted = (
        ("results", "Results", [*results, forest_chart(material, against, window)]),
        ("choices", "Who was chosen", [frequency_chart(material), _fairness(material), raster_chart(material)]),
        ("groups", "Groups of clients", group_charts(material)),
        ("weights", "Weights and labels", [_weights(material), *label_charts(material)]),
        (
            "learned",
            "Inside the policies",
            [matrix_chart(material), embedding_chart(material), _bounds(material), _diagnostics(material)],
        ),
    )
    sections = []
    for key, title, charts in wanted:
        present = tuple(chart for chart in charts if chart is not None)
        if present:
            sections.append(Section(key=key, title=title, charts=present))
    return tuple(sections)


def _column(name: str) -> Any:
    def value(run: RunResults, _: RunTrace) -> FloatArray:
        return np.asarray(run.rounds[name], np.float64)

    return value


def _traced(name: str) -> Any:
    def value(_: RunResults, trace: RunTrace) -> FloatArray:
        return np.asarray(getattr(trace, name), np.float64)

    return value


def _spread(material: Material) -> str:
    several = max((len(material.begun(policy)) for policy in material.results.policies), default=0) > 1
    return " Lines are means over the seeds, bands one standard deviation." if several else ""


def _lines(key: str, title: str, caption: str, data: dict[str, Any] | None, kind: str = "lines") -> Chart | None:
    return None if data is None else Chart(key=key, title=title, caption=caption, kind=kind, data=data)


def _accuracy(material: Material) -> Chart | None:
    measures = [
        Measure("accuracy", "test accuracy", _column("accuracy"), percent=True),
        Measure("local_accuracy", "accuracy on clients' own test data", _column("local_accuracy"), percent=True),
    ]
    data = line_data(material, measures, axes=AXES, each_seed=True, targets=material.results.experiment.targets)
    caption = "How good the model is after each round." + _spread(material)
    if data and material.results.experiment.targets:
        caption += " Dotted: the targets."
    return _lines("accuracy", "Accuracy", caption, data)


def _loss(material: Material) -> Chart | None:
    measures = [
        Measure("loss", "test loss", _column("loss")),
        Measure("objective", "objective (all clients)", _column("objective")),
        Measure("train_loss", "training loss of the cohort", _column("train_loss")),
    ]
    data = line_data(material, measures, axes=AXES, each_seed=True)
    caption = "Lower is better. The cohort's own loss says little where a policy seeks clients with a high loss."
    return _lines("loss", "Loss", caption, data)


def _targets(material: Material) -> Chart | None:
    results = material.results
    if not results.experiment.targets or not material.traces:
        return None
    measures = []
    for key, name, measure in (
        ("rounds", "rounds", analysis.rounds_to_target),
        ("models", "models sent", analysis.models_to_target),
        ("bytes", "bytes sent", analysis.bytes_to_target),
    ):
        series: dict[str, Any] = {}
        for policy in results.policies:
            cells = []
            for target in results.experiment.targets:
                quantity = analysis.over_seeds(policy, lambda run, t=target, m=measure: m(run, t))  # type: ignore[misc]
                cells.append(
                    {
                        "mean": None if quantity.mean is None else numbers(quantity.mean),
                        "sd": None if quantity.sd is None else numbers(quantity.sd),
                        "reached": len(quantity.known),
                        "seeds": len(quantity.values),
                    }
                )
            series[policy.label] = cells
        measures.append({"key": key, "name": name, "series": series})
    return Chart(
        key="targets",
        title="Cost of reaching a target",
        caption="Until the test accuracy first reaches the target: shorter is better. "
        "N/A: some seed never got there. Probes and trial rounds count as models sent.",
        kind="bars",
        data={"measures": measures, "targets": [f"{100 * target:g} %" for target in results.experiment.targets]},
        wide=True,
    )


def _fairness(material: Material) -> Chart | None:
    measures = [
        Measure("jain", "Jain's index", _traced("jain")),
        Measure("coverage", "clients reached", _traced("coverage"), percent=True),
        Measure("variance", "variance of counts", _traced("variance")),
    ]
    data = line_data(material, measures)
    caption = (
        "How evenly the choices so far are spread. Jain's index is 1 where all clients were chosen equally "
        "often, and 1/N where one client had all the places."
    )
    return _lines("fairness", "Fairness over time", caption, data)


def _weights(material: Material) -> Chart | None:
    measures = [
        Measure("effective", "effective cohort", _traced("effective")),
        Measure("weight_sum", "sum of weights", _traced("weight_sum")),
        Measure("weight_max", "largest weight", _traced("weight_max")),
    ]
    data = line_data(material, measures)
    caption = (
        "The effective cohort is (Σw)² / Σw²: how many clients the step really rests on. "
        "A sum below 1 means a shortened step."
    )
    return _lines("weight", "Weights given over time", caption, data)


def _numeric_diagnostics(material: Material) -> list[str]:
    """Names of the plain numbers that policies reported, in order of appearance."""
    names: dict[str, None] = {}
    for policy in material.results.policies:
        for run in material.begun(policy):
            for record in run.rounds["diagnostics"]:
                for name, value in record.items():
                    if isinstance(value, (int, float)) and not isinstance(value, bool):
                        names.setdefault(name)
    return list(names)


def _diagnostic(name: str) -> Any:
    def value(run: RunResults, _: RunTrace) -> FloatArray:
        found = [record.get(name) for record in run.rounds["diagnostics"]]
        return np.array([item if isinstance(item, (int, float)) else np.nan for item in found], np.float64)

    return value


def _diagnostics(material: Material) -> Chart | None:
    names = _numeric_diagnostics(material)
    data = line_data(material, [Measure(name, name.replace("_", " "), _diagnostic(name)) for name in names])
    data = None if data is None else {**data, "menu": True}
    caption = "Every number that a policy says about its own decisions, for the policies that say it."
    return _lines("diagnostics", "What policies report", caption, data)


def _bounds(material: Material) -> Chart | None:
    """CA-Fed's two error terms and whom it leaves out."""
    names = ("epsilon_opt", "epsilon_bias", "excluded")
    if not set(names) <= set(_numeric_diagnostics(material)):
        return None
    data = line_data(material, [Measure(name, name, _diagnostic(name)) for name in names])
    caption = (
        "ε_opt falls and ε_bias rises when clients are left out; CA-Fed minimises their sum. "
        "Below: how many clients it leaves out."
    )
    return _lines("bounds", "CA-Fed's balance", caption, data, kind="bounds")
