"""The command `export`: stored results as a table for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedpick.cli.experiments import StoreOption
from fedpick.experiments import DEFAULT_STORE

__all__ = ["export"]


def export(
    experiment: Annotated[str | None, typer.Argument(help="Id, title or hash; default: the latest.")] = None,
    to: Annotated[Path, typer.Option("--to", "-o", help="The file to write: .csv or .parquet.")] = Path("rounds.csv"),
    table: Annotated[
        str, typer.Option(help="rounds (a row per run and round), selections (per selected client) or clients.")
    ] = "rounds",
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Write the results of an experiment as a CSV or Parquet table."""
    from fedpick.experiments.exporting import export as read

    found = read(store, experiment, table=table)
    typer.echo(f"{found.write(to)}: {found.num_rows:,} rows, {len(found)} columns")
