"""The command line: one command per measurement."""

from __future__ import annotations

import sys

import typer

from benchmarks.speed import availability, engines, flower, gp, processes, sampling, select, sim, store
from fedpick.core.errors import FedpickError

__all__ = ["app"]

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for module in (sim, engines, select, gp, sampling, availability, processes, store, flower):
    app.command(module.__name__.rpartition(".")[2])(module.command)


if __name__ == "__main__":
    try:
        app()
    except FedpickError as error:
        sys.exit(str(error))
