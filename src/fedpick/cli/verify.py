"""The command `verify`: search a store for damage, and repair it."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from fedpick.cli import FAILURE, INTERRUPTED, interrupts
from fedpick.cli.experiments import ProcessesOption, QuietOption, StoreOption
from fedpick.experiments import DEFAULT_STORE

if TYPE_CHECKING:
    from fedpick.experiments.verify import Findings

__all__ = ["verify"]


def verify(
    store: StoreOption = DEFAULT_STORE,
    repair: Annotated[bool, typer.Option("--repair", help="Drop what is damaged and compute it again.")] = False,
    processes: ProcessesOption = None,
    quiet: QuietOption = False,
) -> None:
    """Verify every round in the store: rows, checksums, checkpoints, status. Exit code 1 if something is wrong."""
    from fedpick.experiments import verify as checks
    from fedpick.experiments.executors import StopFlag
    from fedpick.experiments.progress import make_progress
    from fedpick.experiments.store import open_store

    with closing(open_store(store)) as opened:
        found = checks.verify(opened)
    _print(found)
    if repair and found.sentences:
        with closing(open_store(store, create=True)) as opened:
            progress, stop = make_progress(quiet=quiet), StopFlag(interrupts.finishing)
            reports = checks.repair(opened, found, processes=processes, progress=progress, stop=stop)
            for name, reason in (item for report in reports for item in report.failures.items()):
                typer.echo(f"failed: {name}: {reason}", err=True)
            if any(report.stopped for report in reports):
                typer.echo("Stopped. The same command resumes the repair.", err=True)
                raise typer.Exit(INTERRUPTED)
            found = checks.verify(opened)
        typer.echo("After the repair:")
        _print(found)
    if found.sentences:
        raise typer.Exit(FAILURE)


def _print(found: Findings) -> None:
    for sentence in found.sentences:
        typer.echo(sentence)
    wrong = len(found.sentences)
    state = "Nothing is damaged." if not wrong else f"{wrong} {'problem' if wrong == 1 else 'problems'}."
    typer.echo(f"{found.runs} runs, {found.rounds} rounds. {state}")
    if found.unverified:
        typer.echo(f"{found.unverified} rounds have no checksum: they were stored before checksums existed.")
