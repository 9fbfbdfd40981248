"""One round on the clients' devices: who receives, computes and sends, whose answers count, and when the round ends."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedpick.report.analysis import RunResults
from fedpick.report.charts.chart import Chart, numbers
from fedpick.report.material import Material
from fedpick.sim.clock import Status

__all__ = ["charts"]

_NAMES = {
    Status.ANSWERED: "in time",
    Status.FAILED: "failed",
    Status.LATE: "late",
    Status.CANCELLED: "cancelled",
}


def charts(material: Material) -> list[Chart | None]:
    """The section "time": the middle round of the first seed of every policy."""
    views = []
    for policy in material.results.policies:
        runs = [run for run in material.begun(policy) if np.isfinite(run.clock).any()]
        if runs:
            views.append({"policy": policy.label, **_view(material, runs[0])})
    if not views:
        return [None]
    caption = (
        "What every selected client does in one round, as if the round did not end before: receiving the model, "
        "computing, sending the update. The line marks the end of the round. Questions before the choice are left out."
    )
    return [Chart(key="round", title="One round", caption=caption, kind="round", data={"views": views}, wide=True)]


def _view(material: Material, run: RunResults) -> dict[str, Any]:
    index = int(run.rounds["round"][len(run.rounds["round"]) // 2])
    *parts, status = material.store.array(run.run.id, index, "evaluation/times")
    finish = np.sum(parts, axis=0)
    order = np.argsort(finish, kind="stable")
    clock = run.clock
    spent = float(clock[index] - (clock[index - 1] if index else 0.0))
    in_time = finish[status == Status.ANSWERED]
    # Questions come before the round: the end is the last answer, or the deadline.
    late = (status == Status.LATE).any() or not len(in_time)
    return {
        "seed": run.run.seed,
        "round": index + 1,
        "receiving": numbers(parts[0][order], 4),
        "computing": numbers(parts[1][order], 4),
        "sending": numbers(parts[2][order], 4),
        "status": [_NAMES[Status(int(each))] for each in status[order]],
        "end": numbers(min(spent, float(finish.max(initial=0.0))) if late else float(in_time.max()), 4),
        "asking": numbers(max(spent - float(in_time.max(initial=0.0)), 0.0), 4),
    }
