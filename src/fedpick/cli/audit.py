"""The command `audit`: check the log of a federation's decisions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedpick.cli import FAILURE

__all__ = ["audit"]


def audit(
    file: Annotated[Path, typer.Argument(help="The log that an adapter wrote: with_policy(..., audit=FILE).")],
) -> None:
    """Check the hash chain of an audit log. Exit code 1 if a line was changed, lost or inserted."""
    from fedpick.adapter.audit import check

    chain = check(file)
    if chain.sentence:
        typer.echo(f"{file}: {chain.sentence}")
        raise typer.Exit(FAILURE)
    typer.echo(
        f"{file}: {chain.lines} lines, {chain.rounds} rounds. The chain is unbroken; its last hash is {chain.hash}."
    )
