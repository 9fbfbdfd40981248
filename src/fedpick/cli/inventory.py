"""The commands that describe what is installed: list, data, availability, check."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpick.cli.options import complete_from, settings_list
from fedpick.core.errors import InvalidInput

__all__ = ["availability_app", "check", "data_app", "list_app"]

list_app = typer.Typer(help="List what is installed, with a summary and the citation.", no_args_is_help=True)
data_app = typer.Typer(help="Fetch data sets and draw partitions.", no_args_is_help=True)
availability_app = typer.Typer(help="Draw the availability of clients over time.", no_args_is_help=True)

JsonOption = Annotated[bool, typer.Option("--json", help="As JSON.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="An option: --set beta=0.3 (repeatable).")]


def _details(name: str) -> dict[str, Any]:
    """The options of a policy with their defaults, and the signals that it needs with these."""
    from fedpick.core import registry

    policy = registry.get(name)
    return {"options": registry.parameters(policy), "needs": sorted(policy.needs)}


def _show(
    kind: str,
    entries: Iterable[tuple[str, str, str]],
    as_json: bool,
    details: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Print a table, or JSON; `details` are further facts by name."""
    rows: list[dict[str, Any]] = [
        {"name": name, "summary": summary, "citation": citation, **(details or {}).get(name, {})}
        for name, summary, citation in entries
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=kind, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("name", "what it is", "from"):
        table.add_column(heading, no_wrap=heading == "name", overflow="fold")
    for row in rows:
        table.add_row(Text(row["name"], style="bold"), Text(row["summary"]), Text(row["citation"], style="dim"))
        if details is not None:
            options = ", ".join(f"{key}={value!r}" for key, value in row["options"].items())
            table.add_row("", Text(f"options: {options or 'none'}\nneeds: {', '.join(row['needs']) or 'nothing'}"))
    Console().print(table)


def _short_citation(bibtex: str) -> str:
    """ "Author et al. (year)" from BibTeX; several references by semicolons."""
    found = []
    for entry in " ".join(bibtex.split()).split("@")[1:]:
        authors = re.search(r"author *= *[{\"](.+?)[}\"] *,? *(?:\w+ *=|}|$)", entry)
        year = re.search(r"year *= *[{\"]?(\d{4})", entry)
        if authors and year:
            people = authors.group(1).split(" and ")
            family = people[0].partition(",")[0] if "," in people[0] else people[0].split()[-1]
            found.append(f"{family}{' et al.' if len(people) > 1 else ''} ({year.group(1)})")
    return "; ".join(found)


@list_app.command("policies")
def list_policies(
    as_json: JsonOption = False,
    bibtex: Annotated[bool, typer.Option(help="Print the BibTeX of every policy.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also the options and what each needs.")] = False,
) -> None:
    """List the selection policies, plug-ins included."""
    from fedpick.core import registry

    if bibtex:
        typer.echo(registry.cite(*registry.names()))
        return
    usable = [name for name in registry.names() if name not in registry.broken()]
    entries = [(name, registry.summary(name), _short_citation(registry.load(name).reference)) for name in usable]
    _show("policies", entries, as_json, {name: _details(name) for name in usable} if verbose else None)
    for name, reason in registry.broken().items():
        typer.echo(f"not usable: {name}: {reason}", err=True)


@list_app.command("datasets")
def list_datasets(as_json: JsonOption = False) -> None:
    """List the data sets."""
    from fedpick import data

    _show("data sets", [(name, data.describe(name), data.cite(name)) for name in data.names()], as_json)


@list_app.command("partitions")
def list_partitions(as_json: JsonOption = False) -> None:
    """List the partitions: ways to deal examples to clients."""
    from fedpick import data

    _show("partitions", [(name, data.describe_partition(name), "") for name in data.partition_names()], as_json)


@list_app.command("availability")
def list_availability(as_json: JsonOption = False) -> None:
    """List the availability processes."""
    from fedpick import availability

    entries = [
        (name, availability.summary(name), _short_citation(getattr(availability.load(name), "reference", "")))
        for name in availability.names()
    ]
    _show("availability", entries, as_json)


@list_app.command("devices")
def list_devices(as_json: JsonOption = False) -> None:
    """List the models of devices: how fast clients compute and communicate."""
    from fedpick.sim import devices

    _show("devices", [(name, devices.summary(name), "") for name in devices.names()], as_json)


@list_app.command("tasks")
def list_tasks(as_json: JsonOption = False) -> None:
    """List the tasks: models and their losses."""
    from fedpick.sim import tasks

    _show("tasks", [(name, tasks.describe(name), "") for name in tasks.names()], as_json)


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(autocompletion=complete_from("data"), help="See: fedpick list datasets.")],
    directory: Annotated[Path | None, typer.Option(help="Folder for the files; default: the cache.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Fetch a data set and verify its checksums. Files that are present are only verified."""
    from fedpick import data

    paths = data.fetch(name, directory) if quiet else _with_bar(lambda bar: data.fetch(name, directory, bar))
    if not paths:
        typer.echo(f"{name} needs no files: it is generated or comes with a package.")
    for path in paths:
        typer.echo(str(path))


def _with_bar(fetch: Callable[[Callable[[int, int | None], None]], list[Path]]) -> list[Path]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("fetching"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("fetching", total=None)
        return fetch(lambda done, total: bars.update(task, completed=done, total=total))


@data_app.command("show")
def data_show(
    name: Annotated[str, typer.Argument(autocompletion=complete_from("data"), help="See: fedpick list datasets.")],
    partition: Annotated[
        str, typer.Option(autocompletion=complete_from("partition"), help="See: fedpick list partitions.")
    ] = "2spc",
    clients: Annotated[int | None, typer.Option(help="Number of clients; default 100 (natural, table: fixed).")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    set_: SetOption = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Picture: .png, .svg or .pdf.")] = None,
) -> None:
    """Deal a data set to clients; print and draw their sizes and labels."""
    import numpy as np

    from fedpick import data
    from fedpick.data.partition import OWN_CLIENTS
    from fedpick.report.figures.partition import draw_partition

    options = _options(set_)
    if clients is not None or partition not in OWN_CLIENTS:
        options["num_clients"] = 100 if clients is None else clients
    federation = data.partition(data.load(name), partition, seed=seed, **options)
    sizes = federation.sizes
    typer.echo(
        f"{name}, {partition}: {federation.num_clients} clients, {sizes.sum()} examples; per client "
        f"{sizes.min()} to {sizes.max()}, median {np.median(sizes):g}"
    )
    if federation.label_histogram is not None:
        labels = (federation.label_histogram > 0).sum(axis=1)
        typer.echo(f"labels per client: {labels.min()} to {labels.max()}, mean {labels.mean():.1f}")
    target = output or Path("results") / f"partition-{name}-{partition}.png"
    typer.echo(f"Picture: {draw_partition(federation, target)}")


def _options(texts: list[str] | None) -> dict[str, Any]:
    for text in texts or []:
        key, found, _ = text.partition("=")
        if not (found and all(key.strip().split("."))):
            raise InvalidInput(f"--set must look like key=value, such as beta=0.3. Got {text!r}.")
    return settings_list([f"options.{text}" for text in texts or []]).get("options", {})


@availability_app.command("show")
def availability_show(
    name: Annotated[
        str, typer.Argument(autocompletion=complete_from("availability"), help="fedpick list availability")
    ],
    clients: Annotated[int, typer.Option(help="Number of clients (made up: log-normal sizes, two labels each).")] = 100,
    rounds: Annotated[int, typer.Option(help="Rounds to draw.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the trace.")] = 0,
    set_: SetOption = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Picture: .png, .svg or .pdf.")] = None,
) -> None:
    """Draw who is available when, the rates and their autocorrelation; print the main numbers."""
    from fedpick import availability
    from fedpick.report.figures.availability import show_availability

    availability.load(name)
    target = output or Path("results") / f"availability-{name}.png"
    measured = show_availability(name, target, num_clients=clients, rounds=rounds, seed=seed, parameters=_options(set_))
    typer.echo(
        f"{name}: {clients} clients, {measured.rates.mean():.1%} available on average, "
        f"no client in {measured.empty_rounds} of {rounds} rounds"
    )
    typer.echo(f"Picture: {target}")


def check(
    name: Annotated[str, typer.Argument(autocompletion=complete_from("policies"), help="A registered policy.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A hyper-parameter: --set beta=0.9 (repeatable).")
    ] = None,
) -> None:
    """Run the conformance kit on a policy, plug-ins included."""
    from fedpick.core import registry
    from fedpick.testing import CHECKS, check_policy

    policy = registry.get(name, **_options(set_))

    def show(title: str, failure: str | None) -> None:
        typer.echo(f"  {'passed' if failure is None else 'FAILED'}  {title.replace('_', ' ')}", err=True)

    check_policy(policy, on_check=show)
    typer.echo(f"{name} keeps the contract: {len(CHECKS)} checks passed.")
