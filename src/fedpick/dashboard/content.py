"""What the dashboard shows, as plain values for JSON: the experiments with their progress, and curves that grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedpick.core.arrays import FloatArray
from fedpick.core.errors import InvalidInput
from fedpick.experiments.store import Experiment, Progress, Store
from fedpick.report.charts.chart import numbers, styles_of

__all__ = ["MEASURES", "curves", "overview"]

MEASURES = {
    "accuracy": "test accuracy",
    "local_accuracy": "accuracy on clients' own test data",
    "loss": "test loss",
    "objective": "loss of all clients",
    "train_loss": "training loss of the cohort",
}
"""Column of the table `rounds` -> what it is called."""
_MOST_POINTS = 400
_MOST_EXPERIMENTS = 20


def overview(store: Store) -> list[dict[str, Any]]:
    """Every experiment, the latest first: progress, the state of its runs and the latest accuracy of each policy."""
    progress = store.overview()
    running = [each.run_id for runs in progress.values() for each in runs if each.status == "running"]
    held = store.holders(running) if running else {}
    return [_summary(experiment, progress.get(experiment.id, []), held) for experiment in store.experiments()]


def _summary(experiment: Experiment, runs: Sequence[Progress], held: Mapping[int, str]) -> dict[str, Any]:
    wanted = experiment.rounds
    states = [_state(each, wanted, held) for each in runs]
    policies: dict[str, list[Progress]] = {}
    for each in runs:
        policies.setdefault(each.label, []).append(each)
    done = sum(min(each.rounds_done, wanted) for each in runs)
    return {
        "id": experiment.id,
        "hash": experiment.hash[:8],
        "title": experiment.title,
        "touched_at": experiment.touched_at,
        "recorded": experiment.recorded,
        "rounds": wanted,
        "done": done,
        "wanted": wanted * len(runs),
        "states": {state: states.count(state) for state in dict.fromkeys(states)},
        "policies": [{"label": label, **_latest(mine)} for label, mine in policies.items()],
    }


def _state(run: Progress, wanted: int, held: Mapping[int, str]) -> str:
    """Like the status in the store, but a run whose process has ended is "interrupted"."""
    if run.rounds_done >= wanted and run.status == "done":
        return "done"
    if run.status == "running":
        return "running" if run.run_id in held else "interrupted"
    return "waiting" if run.status in ("new", "done") else run.status


def _latest(runs: Sequence[Progress]) -> dict[str, Any]:
    known = [each.accuracy for each in runs if each.accuracy is not None]
    return {"seeds": len(runs), "accuracy": numbers(np.mean(known)) if known else None}


def curves(store: Store, experiments: Sequence[int], measure: str) -> dict[str, Any]:
    """One line per experiment and policy: the mean over the seeds, by round and by bytes, and the latest values."""
    if measure not in MEASURES:
        raise InvalidInput(f"The measures are {', '.join(MEASURES)}. Got {measure!r}.")
    if len(experiments) > _MOST_EXPERIMENTS:
        raise InvalidInput(f"Up to {_MOST_EXPERIMENTS} experiments can be compared. Got {len(experiments)}.")
    progress = store.overview()
    known = {each.id: each for each in store.experiments()}
    lines = []
    for number in experiments:
        if number not in known:
            raise InvalidInput(f"There is no experiment {number} in this store.")
        experiment, groups = known[number], dict[str, list[int]]()
        for run in progress.get(number, []):
            groups.setdefault(run.label, []).append(run.run_id)
        columns = store.curves([run for runs in groups.values() for run in runs], measure, limit=experiment.rounds)
        for label, runs in groups.items():
            line = _line([columns[run] for run in runs if run in columns])
            if line is not None:
                lines.append({"experiment": number, "title": experiment.title, "label": label, **line})
    names = [f"{line['experiment']} {line['label']}" for line in lines]
    for line, style in zip(lines, styles_of(names).values(), strict=True):
        line |= {"light": style.light, "dark": style.dark, "dash": style.dash}
    return {"measure": measure, "name": MEASURES[measure], "percent": "accuracy" in measure, "lines": lines}


def _line(runs: Sequence[FloatArray]) -> dict[str, Any] | None:
    """Means over the seeds that have begun, in the rounds that all of them have; None if nothing was measured.

    `runs` are (T, 3): round, value, bytes.
    """
    length = min((len(run) for run in runs), default=0)
    stacked = np.stack([run[:length] for run in runs]) if runs else np.empty((0, 0, 3))
    measured = np.flatnonzero(np.isfinite(stacked[:, :, 1]).all(axis=0)) if length else np.empty(0, np.int64)
    if len(measured) == 0:
        return None
    if len(measured) > _MOST_POINTS:
        measured = measured[np.unique(np.linspace(0, len(measured) - 1, _MOST_POINTS).astype(np.int64))]
    rounds, values, sent = np.moveaxis(stacked[:, measured], 2, 0)
    latest = values[:, -1]
    return {
        "round": numbers(rounds[0] + 1),
        "bytes": numbers(sent.mean(axis=0), 7),
        "mean": numbers(values.mean(axis=0)),
        "seeds": len(runs),
        "latest": numbers(latest.mean()),
        "sd": numbers(latest.std(ddof=1)) if len(runs) > 1 else None,
    }
