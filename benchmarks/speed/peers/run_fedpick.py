"""Another checkout of fedpick at the same work: its `src` comes first on the path, the harness stays this one."""

from __future__ import annotations

import sys

from benchmarks.speed import jobs
from benchmarks.speed.peers.turns import Turns, Work
from fedpick.sim import Simulator, simulate


def take_turns(turns: Turns, job: jobs.Job, sim: Simulator) -> None:
    """Take turns until there are none left."""
    session = jobs.session(sim)
    going = turns.begin()
    while going:
        # A new loop per turn, so that nothing is computed ahead during the turn of another contender.
        for record in simulate(
            sim,
            session,
            rounds=sim.round + turns.left,
            budget=job.cohort,
            evaluate_every=job.evaluate_every,
            losses_every=job.losses_every,
        ):
            going = turns.done(record.test_accuracy)


def main(folder: str, name: str) -> None:
    """Do the work of a folder."""
    turns, work = Turns(), Work(folder)
    job = jobs.find(work.job["name"])
    sim = jobs.simulator(job, jobs.federation(job))
    take_turns(turns, job, sim)
    work.finish(name, jobs.flat(sim.params))


if __name__ == "__main__":
    main(*sys.argv[1:])
