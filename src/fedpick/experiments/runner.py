"""Run an experiment: a grid of policies x seeds, resumed where it stopped."""

from __future__ import annotations

import os
import time
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
    """The experiment in the store."""
    finished: int
    """The number of runs that have all their rounds."""
    stopped: int
    """The number of runs that were interrupted."""
    failures: dict[str, str]
    """Run -> why it failed."""

    @property
    def complete(self) -> bool:
        """Every run has all its rounds."""
        return not self.stopped and not self.failures


_POLL_SECONDS = 0.5
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
        if address is not None and processes is not None:
            raise InvalidInput(
                f"A cluster at an address runs as many runs at a time as it has processors. Got {processes} processes "
                f"for {address!r}. Leave the number of processes out, or the address for a local Ray."
            )
        return RayCluster(address=address, count=processes)
    if name != "processes":
        raise InvalidInput(f"The executor is 'processes' or 'ray'. Got {name!r}.")
    if address is not None:
        raise InvalidInput("--address belongs to the executor 'ray': add --executor ray.")
    count = processes or default_processes(num_runs, rounds_left)
    return Inline() if count == 1 or num_runs == 1 else Processes(count)


def run(
    spec: Spec,
    store: Store,
    *,
    executor: str = "processes",
    processes: int | None = None,
    address: str | None = None,
    restart: bool = False,
    latest: bool = True,
    progress: Progress | None = None,
    stop: StopFlag | None = None,
) -> Report:
    """Bring every run of the spec to its number of rounds. Rounds in the store are not computed again.

    Several processes may call this with the same spec and store: they share the runs, and each of them returns when
    all runs are finished. Ctrl-C, or `stop.set()`, ends it after the rounds being computed. Call it again to resume.
    `latest` False: the experiment does not become the latest of the store.
    """
    make_executor(executor, processes=processes, address=address, num_runs=1)  # refuse before anything is discarded
    refuse_early([spec.settings_of(policy, spec.seeds[0]) for policy in spec.policies])
    if not restart:
        # Finished runs too: one table must not hold two traces under one name.
        keys = [spec.run_key(policy, seed) for policy in spec.policies for seed in spec.seeds]
        for known in store.runs_with(keys):
            refuse_changed_files(known.manifest, known.settings)
    experiment = store.experiment(store.register(spec, latest=latest))
    members = store.runs(experiment.id)
    if restart:
        store.restart(*{member.id for member in members})
        members = store.runs(experiment.id)
    lines = {
        member.id: RunLine(member.id, member.label, member.seed, spec.rounds, min(member.rounds_done, spec.rounds))
        for member in members
    }
    # A run that has all its rounds is left alone, unless rows were lost or an accident left another status.
    torn = store.torn(list(lines))
    finished = {each.id for each in members if each.rounds_done >= spec.rounds and each.status == "done"} - torn
    todo = sorted(
        (line for line in lines.values() if line.run_id not in finished),
        key=lambda line: spec.seeds.index(line.seed),
    )
    results = dict.fromkeys(finished, "done")
    with stop or StopFlag() as flag, progress or Progress() as shown:
        shown.start(list(lines.values()))
        while todo:
            left = sum(line.rounds - line.done for line in todo)
            compute = make_executor(
                executor, processes=processes, address=address, num_runs=len(todo), rounds_left=left
            )
            results |= compute(store, todo, shown, flag)
            todo = _wait_for_others(
                store, [line for line in todo if results[line.run_id] == "busy"], results, shown, flag
            )
    failures = {lines[run_id].name: text for run_id, text in results.items() if text not in ("done", "stopped")}
    return Report(
        experiment=experiment,
        finished=sum(result == "done" for result in results.values()),
        stopped=sum(result == "stopped" for result in results.values()),
        failures=failures,
    )


def _wait_for_others(
    store: Store, busy: list[RunLine], results: dict[int, str], progress: Progress, stop: StopFlag
) -> list[RunLine]:
    """Follow the runs that other processes compute. Return those that were left unfinished, to be computed here."""
    if busy:
        who = sorted(set(store.holders([line.run_id for line in busy]).values()))
        progress.note(f"Waiting for {len(busy)} runs that other processes compute: {', '.join(who)}.")
    while busy and not stop():
        time.sleep(_POLL_SECONDS)
        ids = [line.run_id for line in busy]
        held, now = store.holders(ids), store.progress(ids)
        for line in busy:
            status, done, accuracy = now[line.run_id]
            progress.update(line.run_id, min(done, line.rounds), accuracy)
            if line.run_id not in held and status == "done" and done >= line.rounds:
                results[line.run_id] = "done"
                progress.finish(line.run_id, "done")
        busy = [line for line in busy if results[line.run_id] == "busy"]
        if free := [line for line in busy if line.run_id not in held]:
            return [*free, *(line for line in busy if line not in free)]
    results |= {line.run_id: "stopped" for line in busy}
    return []
