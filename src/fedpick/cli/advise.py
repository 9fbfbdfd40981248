"""The command `advise`: which policy suits the user's clients."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from fedpick.cli import interrupts
from fedpick.cli.experiments import (
    ProcessesOption,
    QuietOption,
    ReportOption,
    RestartOption,
    StoreOption,
    exit_code,
    wide_console,
    write_html,
)
from fedpick.cli.options import complete_from, names_list, settings_list
from fedpick.experiments import DEFAULT_STORE

__all__ = ["advise"]


def advise(
    clients: Annotated[
        Path, typer.Argument(help="A table, CSV or Parquet: id, num_examples, label_NAME for each label.")
    ],
    budget: Annotated[int, typer.Option(help="Clients per round.")],
    availability: Annotated[
        Path | None, typer.Option(help="A log of who is available when: client, time, state. Default: always.")
    ] = None,
    round_seconds: Annotated[float, typer.Option(help="Length of a round in that log.")] = 600.0,
    devices: Annotated[
        Path | None, typer.Option(help="Speeds, a CSV: id, seconds_per_example, download, upload. Default: unknown.")
    ] = None,
    data: Annotated[
        str, typer.Option(autocompletion=complete_from("data"), help="The data set that stands in for yours.")
    ] = "digits",
    policies: Annotated[
        str | None,
        typer.Option(autocompletion=complete_from("policies"), help="Those to compare; default: a short list."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds per run.")] = 60,
    seeds: Annotated[int, typer.Option(help="Most seeds per policy; fewer where the answer is clear.")] = 10,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any other key of the spec, repeatable: --set local.lr=0.1")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The spec to write; default: NAME-advice.toml beside CLIENTS.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    processes: ProcessesOption = None,
    restart: RestartOption = False,
    write_report: ReportOption = True,
    quiet: QuietOption = False,
) -> None:
    """Say which policy suits your clients: a stand-in data set, dealt exactly as your table says, decides.

    Prints the verdict and the lines for Flower, and writes the spec that reproduces it. The same command resumes.
    """
    from rich.text import Text

    from fedpick import advice
    from fedpick.experiments.executors import StopFlag
    from fedpick.experiments.progress import make_progress
    from fedpick.experiments.store import open_store

    try:
        found = advice.advise(
            clients,
            budget=budget,
            availability=availability,
            round_seconds=round_seconds,
            devices=devices,
            data=data,
            policies=names_list(policies),
            rounds=rounds,
            seeds=seeds,
            changes=settings_list(set_ or []),
            store=store,
            output=output,
            processes=processes,
            restart=restart,
            progress=lambda: make_progress(quiet=quiet, as_json=False),
            stop=lambda: StopFlag(interrupts.finishing),
        )
    except advice.Unfinished as unfinished:
        raise typer.Exit(exit_code(unfinished.report)) from unfinished
    headline, _, rest = str(found).partition("\n")
    wide_console().print(Text(headline, style="bold"))
    wide_console().print(Text(rest))
    if write_report:
        with closing(open_store(store)) as opened:
            if path := write_html(opened, found.experiment, None, window=advice.WINDOW, by=advice.JUDGED_BY):
                typer.echo(f"Report: {path}")
