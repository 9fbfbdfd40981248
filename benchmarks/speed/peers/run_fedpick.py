"""Another checkout of fedpick at the same work: its `src` comes first on the path, the harness stays this one."""

from __future__ import annotations

import sys

from benchmarks.speed import jobs
from benchmarks.speed.peers.turns import Turns, Work
from fedpick.sim import simulate


def main(folder: str, name: str) -> None:
    """Take turns until there are none left."""
    turns, work = Turns(), Work(folder)
    job = jobs.find(work.job["name"])
    sim = jobs.simulator(job, jobs.federation(job))
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
    work.finish(name, jobs.flat(sim.params))


if __name__ == "__main__":
    main(*sys.argv[1:])
