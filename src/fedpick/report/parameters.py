"""How results depend on one parameter: of a policy within an experiment, or of the setting over several experiments.

A sweep is a policy that an experiment has with three or more values of one of its hyper-parameters, the others equal
(CA-Fed, figure 2). `over_setting` reads the same measure off several experiments that differ in one setting (figures 3
and 4b).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import FloatArray
from fedpick.core.errors import InvalidInput
from fedpick.experiments.store_read import Experiment, Reader, Run
from fedpick.report.analysis import (
    PolicyResults,
    Quantity,
    Results,
    RunResults,
    final_accuracy,
    load_results,
    over_seeds,
)

__all__ = ["Sweep", "best_by_round", "over_setting", "setting_of", "sweeps_of"]

_FEWEST = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Sweep:
    """One policy at several values of one hyper-parameter."""

    policy: str
    parameter: str
    values: tuple[float, ...]
    """Ascending."""
    lines: tuple[PolicyResults, ...]
    """One for each value."""


def _number(value: Any) -> float | None:
    """A finite number, but no truth value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def sweeps_of(results: Results) -> list[Sweep]:
    """Every hyper-parameter of which a policy is there with at least three values, all other ones equal.

    Settings of the optimiser may differ: each value may have had its own learning rates searched for it.
    """
    families: dict[tuple[str, str, str], dict[float, PolicyResults]] = {}
    for line in results.policies:
        parameters = line.runs[0].run.parameters
        for name, value in parameters.items():
            number = _number(value)
            if number is not None:
                others = json.dumps({key: item for key, item in parameters.items() if key != name}, sort_keys=True)
                families.setdefault((line.policy, name, others), {}).setdefault(number, line)
    return [
        Sweep(
            policy=policy,
            parameter=name,
            values=tuple(sorted(found)),
            lines=tuple(found[value] for value in sorted(found)),
        )
        for (policy, name, _), found in families.items()
        if len(found) >= _FEWEST
    ]


def best_by_round(sweep: Sweep) -> tuple[NDArray[np.int64], FloatArray]:
    """(rounds from 1, the value with the highest mean accuracy after so many): figure 2b.

    Only rounds in which every seed of every value was evaluated; the smaller value where two are level.
    """
    runs = [[run for run in line.runs if len(run.rounds["round"])] for line in sweep.lines]
    length = min((len(run.rounds["round"]) for line in runs for run in line), default=0)
    if length == 0 or not all(runs):
        return np.empty(0, np.int64), np.empty(0)
    means = np.stack([np.mean([run.rounds["accuracy"][:length] for run in line], axis=0) for line in runs])
    known = np.flatnonzero(np.isfinite(means).all(axis=0))
    return known + 1, np.array(sweep.values)[means[:, known].argmax(axis=0)]


def setting_of(run: Run, path: str) -> Any:
    """What a run has at a path such as "data.alpha", "availability.history" or "policy.kappa2"; None: nothing."""
    section, _, key = path.partition(".")
    if not key:
        raise InvalidInput(f"A setting is named section.key, such as data.alpha or policy.kappa2. Got {path!r}.")
    value: Any = run.parameters if section == "policy" else run.settings.get(section)
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def over_setting(
    store: Reader,
    experiments: Sequence[Experiment],
    path: str,
    measure: Callable[[RunResults], float | None] = final_accuracy,
) -> dict[str, list[tuple[float, Quantity]]]:
    """label -> (value of the setting, measure over the seeds), values ascending, over all these experiments.

    A label that is there twice with the same value is refused: it would be two points in one place.
    """
    found: dict[str, dict[float, Quantity]] = {}
    for experiment in experiments:
        for line in load_results(store, experiment).policies:
            value = _number(setting_of(line.runs[0].run, path))
            if value is None:
                continue
            points = found.setdefault(line.label, {})
            if value in points:
                raise InvalidInput(
                    f"{line.label} is there twice with {path} = {value:g}: take experiments that differ in it."
                )
            points[value] = over_seeds(line, measure)
    if not found:
        titles = ", ".join(repr(experiment.title) for experiment in experiments)
        raise InvalidInput(f"No run of {titles or 'no experiment'} has a number at {path!r}.")
    return {label: sorted(points.items()) for label, points in found.items()}
