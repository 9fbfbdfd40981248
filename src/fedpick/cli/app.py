"""The tree of commands. Each command imports the libraries it needs when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from fedpick.cli import advise, audit, dashboard, experiments, export, inventory, tune, verify

__all__ = ["app"]

app = typer.Typer(
    name="fedpick",
    help="Who should train next? Client selection for federated learning: compare policies, reproduce papers.\n\n"
    "Start with [bold]fedpick demo[/bold]. Exit codes: 0 success, 1 a run failed, 2 wrong input, "
    "3 interrupted (the same command resumes), 130 interrupted twice.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        import fedpick

        typer.echo(f"fedpick {fedpick.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command("demo")(experiments.demo)
app.command("compare")(experiments.compare)
app.command("advise")(advise.advise)
app.command("run")(experiments.run)
app.command("tune")(tune.tune)
app.command("show")(experiments.show)
app.command("report")(experiments.report)
app.command("export")(export.export)
app.command("dashboard")(dashboard.dashboard)
app.command("verify")(verify.verify)
app.command("audit")(audit.audit)
app.command("check")(inventory.check)
app.add_typer(inventory.list_app, name="list")
app.add_typer(inventory.data_app, name="data")
app.add_typer(inventory.availability_app, name="availability")
