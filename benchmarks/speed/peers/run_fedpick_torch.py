"""Fedpick's PyTorch engine at the same work, from the same initial weights."""

from __future__ import annotations

import sys

from benchmarks.speed import jobs
from benchmarks.speed.peers.run_fedpick import take_turns
from benchmarks.speed.peers.run_torch import build, params_of
from benchmarks.speed.peers.turns import Turns, Work
from fedpick.core.errors import MissingDependency


def main(folder: str, name: str) -> None:
    """Do the work of a folder."""
    turns, work = Turns(), Work(folder)
    job = jobs.find(work.job["name"])
    try:
        sim = jobs.simulator(job, jobs.federation(job), engine="torch")
    except MissingDependency as error:
        turns.missing(error)
        return
    initial = work.initial()
    module = build(initial, work.job["shape"])
    sim.params = sim.params._replace(weights=tuple(parameter.detach().clone() for parameter in module.parameters()))
    take_turns(turns, job, sim)
    for parameter, value in zip(module.parameters(), sim.params.weights, strict=True):
        parameter.data.copy_(value)
    work.finish(name, params_of(module, initial))


if __name__ == "__main__":
    main(*sys.argv[1:])
