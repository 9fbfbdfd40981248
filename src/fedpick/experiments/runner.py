"""Run an experiment: a grid of policies x seeds, resumed where it stopped."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fedpick.core.errors import InvalidInput
from fedpick.experiments.executors import Executor, Inline, Processes, RayCluster, StopFlag
from fedpick.experiments.input_files import refuse_changed_files
from fedpick.experiments.progress import Progress, RunLine
from fedpick.experiments.run import refuse_early
from fedpick.experiments.spec import Spec
from fedpick.experiments.store import Experiment, Store

__all__ = ["Report", "default_processes", "make_executor", "run"]


@dataclass(frozen=True)
class Report:
    """How a call of `run` ended."""

    experiment: Experiment
    finished: int
    stopped: int
    failures: dict[str, str]
    """Run -> why it failed."""

    @property
    def complete(self) -> bool:
        """Every run has all its rounds."""
        return not self.stopped and not self.failures


_SHORT_GRID = 2000
"""Rounds up to which starting more processes costs more than they save; see docs/guides/experiments.md."""


def default_processes(num_runs: int, rounds_left: int) -> int:
    """One run per core at a time; for a short grid, one process."""
    return 1 if rounds_left < _SHORT_GRID else max(1, min(num_runs, os.cpu_count() or 1))


def make_executor(
    name: str, *, processes: int | None, address: str | None, num_runs: int, rounds_left: int = 0
) -> Executor:
    """Return the executor of that name; `processes` None: as many as suit the work that is left."""
    if processes is not None and processes < 1:
        raise InvalidInput(f"The number of processes must be at least 1. Got {processes}.")
    if name == "ray":
        return RayCluster(address=address, count=processes)
    if name != "processes":
        raise InvalidInput(f"The engine is 'processes' or 'ray'. Got {name!r}.")
    if address is not None:
        raise InvalidInput("--address belongs to the executor 'ray': add --engine ray.")
    count = processes or default_processes(num_runs, rounds_left)
    return Inline() if count == 1 or num_runs == 1 else Processes(count)


def run(
    spec: Spec,
    store: Store,
    *,
    engine: str = "processes",
    processes: int | None = None,
    address: str | None = None,
    restart: bool = False,
    latest: bool = True,
    progress: Progress | None = None,
    stop: StopFlag | None = None,
) -> Report:
    """Bring every run of the spec to its number of rounds. Rounds in the store are not computed again.

    Ctrl-C, or `stop.set()`, ends it after the rounds being computed. Call it again to resume. `latest` False: it does
    not become the latest experiment of the store.
    """
    refuse_early([spec.settings_of(policy, spec.seeds[0]) for policy in spec.policies])
    if not restart:
        # Finished runs too: one table must not hold two traces under one name.
        keys = [spec.run_key(policy, seed) for policy in spec.policies for seed in spec.seeds]
        for known in store.runs_with(keys):
            refuse_changed_files(known.manifest, known.settings)
    experiment = store.experiment(store.register(spec, latest=latest))
    members = store.runs(experiment.id)
    if restart:
        for run_id in {member.id for member in members}:
            store.restart(run_id)
        members = store.runs(experiment.id)
    lines = {
        member.id: RunLine(member.id, member.label, member.seed, spec.rounds, min(member.rounds_done, spec.rounds))
        for member in members
    }
    todo = sorted(
        (line for line in lines.values() if line.done < line.rounds), key=lambda line: spec.seeds.index(line.seed)
    )
    left = sum(line.rounds - line.done for line in todo)
    executor = make_executor(engine, processes=processes, address=address, num_runs=len(todo), rounds_left=left)
    results: dict[int, str] = {}
    with stop or StopFlag() as flag, progress or Progress() as shown:
        shown.start(list(lines.values()))
        if todo:
            results = executor(store, todo, shown, flag)
    failures = {lines[run_id].name: text for run_id, text in results.items() if text not in ("done", "stopped")}
    return Report(
        experiment=experiment,
        finished=len(lines) - len(todo) + sum(result == "done" for result in results.values()),
        stopped=sum(result == "stopped" for result in results.values()),
        failures=failures,
    )
