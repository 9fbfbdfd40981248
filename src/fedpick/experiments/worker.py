"""What one process does with one run: go on from the last committed round until enough rounds are in the store."""

from __future__ import annotations

import importlib
import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import metadata
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

import fedpick
from fedpick.core.errors import StateFileError
from fedpick.core.registry import parameters
from fedpick.experiments.input_files import refuse_changed_files
from fedpick.experiments.records import to_json, utc_now
from fedpick.experiments.simulation import Simulation
from fedpick.experiments.store import Store, StoreError

__all__ = ["DEFAULT_BUILD", "manifest_of", "work"]

DEFAULT_BUILD = "fedpick.experiments.simulation:build"
# A checkpoint is written when the rounds since the last one took this many times longer than writing it.
_CHECKPOINT_SHARE = 10.0


def _builder(target: str) -> Callable[[Mapping[str, Any]], Simulation]:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def manifest_of(simulation: Simulation) -> dict[str, Any]:
    """With what, where and when a run was made."""
    versions = {"fedpick": fedpick.__version__, "python": platform.python_version()}
    for package in ("numpy", "scipy", "jax", "jaxlib", "sqlalchemy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    host = {
        "system": platform.platform(),
        "machine": platform.machine(),
        "processor": platform.processor(),
        "cores": os.cpu_count(),
    }
    return {"versions": versions, "host": host, "started_at": utc_now(), **simulation.facts}


def work(
    store: Store,
    run_id: int,
    rounds: int,
    *,
    build: str = DEFAULT_BUILD,
    should_stop: Callable[[], bool] = lambda: False,
    on_round: Callable[[int, float | None], None] = lambda done, accuracy: None,
) -> str:
    """Bring one run to `rounds` rounds; "done", or "stopped" where `should_stop` said so after a round."""
    run = store.run(run_id)
    try:
        simulation = _builder(build)(run.settings)
        done, content = store.resume(run_id)
        if content is not None:
            refuse_changed_files(run.manifest, run.settings)
            _refuse_other_makers(run.manifest, simulation)
            simulation.restore(content)
        _describe(store, run_id, simulation, run.manifest)
        status = "done" if done >= rounds else _rounds(store, run_id, simulation, rounds, should_stop, on_round)
    except BaseException as error:
        # Ctrl-C in the middle of a round: the last committed one is where it goes on.
        stopped = isinstance(error, KeyboardInterrupt)
        text = f"{type(error).__name__}: {error}"
        with suppress(SQLAlchemyError):  # where the store is what failed, the first error says so
            store.update_run(run_id, status="stopped" if stopped else "failed", error=None if stopped else text)
        raise
    store.update_run(run_id, status=status)
    return status


def _refuse_other_makers(manifest: Mapping[str, Any], simulation: Simulation) -> None:
    """One run, one way to compute it: another version, or another split of the work, would give other rows."""
    begun = manifest.get("versions", {}).get("fedpick")
    if begun not in (None, fedpick.__version__):
        raise StoreError(
            f"This run was begun with fedpick {begun}; this is {fedpick.__version__}. Go on with that version, or "
            "start the run over with --restart."
        )
    for name, fact in simulation.facts.items():
        if name in manifest and name != "files" and to_json(manifest[name]) != to_json(fact):
            raise StoreError(
                f"This run was begun with the {name} {to_json(manifest[name])}; here it is {to_json(fact)}. Go on on a "
                "machine like the first (shards follow its cores), or start the run over with --restart."
            )


def _describe(store: Store, run_id: int, simulation: Simulation, manifest: Mapping[str, Any]) -> None:
    row = dict(simulation.federation)
    store.update_run(
        run_id,
        federation_id=store.put_federation(row.pop("key"), **row),
        parameters=to_json(parameters(simulation.policy), finite=False),
        reference=type(simulation.policy).reference,
        model_bytes=simulation.model_bytes,
        manifest=to_json(manifest or manifest_of(simulation)),
        status="running",
        error=None,
    )


def _rounds(
    store: Store,
    run_id: int,
    simulation: Simulation,
    rounds: int,
    should_stop: Callable[[], bool],
    on_round: Callable[[int, float | None], None],
) -> str:
    cost, latest, clock = 0.0, -float("inf"), time.perf_counter()
    accuracy: float | None = None
    for record in simulation.rounds(rounds):
        finished = record.index + 1 >= rounds
        stopping = should_stop() and not finished
        start = time.perf_counter()
        due = finished or stopping or start - latest >= _CHECKPOINT_SHARE * cost
        content = simulation.checkpoint() if due else None
        store.write_round(run_id, record, checkpoint=content, wall_seconds=start - clock)
        clock = time.perf_counter()
        if due:
            latest, cost = clock, clock - start
        accuracy = record.test_accuracy if record.test_accuracy is not None else accuracy
        on_round(record.index + 1, accuracy)
        if finished or stopping:
            return "done" if finished else "stopped"
    raise StateFileError("The simulation ended before the last round.")
