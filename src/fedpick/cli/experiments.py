"""The commands that run experiments and show results: demo, compare, run, report."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpick.cli import FAILURE, INTERRUPTED, interrupts
from fedpick.cli.options import complete_from, names_list, numbers_list, seeds_option, settings_list
from fedpick.experiments import DEFAULT_STORE

if TYPE_CHECKING:
    from rich.console import Console

    from fedpick.experiments.runner import Report
    from fedpick.experiments.spec import Spec
    from fedpick.experiments.store import Experiment, Store
    from fedpick.report.analysis import Results
    from fedpick.report.verdict import Verdict

__all__ = ["compare", "demo", "exit_code", "report", "run", "show", "write_html"]

_JUDGED_BY = ("accuracy", "time", "equal-time")

SpecArgument = Annotated[
    Path, typer.Argument(help="The experiment: a TOML file. FILE.toml#NAME is one variant of it.", metavar="SPEC")
]
StoreOption = Annotated[
    str,
    typer.Option(help="The store: a file, or a database URL such as postgresql://host/name."),
]
ProcessesOption = Annotated[
    int | None, typer.Option("--processes", "-p", help="Parallel runs; default: one per core, one for short grids.")
]
ExecutorOption = Annotated[str, typer.Option(help="processes (this machine) or ray (a cluster).")]
AddressOption = Annotated[str | None, typer.Option(help="Address of a Ray cluster; default: start a local one.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the tables.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON lines on standard output instead of bars and tables.")]
RestartOption = Annotated[bool, typer.Option("--restart", help="Discard the stored rounds and start over.")]
ReportOption = Annotated[bool, typer.Option("--report/--no-report", help="Write the HTML report at the end.")]
SeedsOption = Annotated[str | None, typer.Option(help="Number of seeds (3), or a list (1,2,5).")]
ByOption = Annotated[
    str,
    typer.Option(help="What decides: accuracy; with devices also time (to a target), equal-time (accuracy by then)."),
]
TargetsOption = Annotated[str | None, typer.Option(help="Test accuracies for the rounds-to-target table: 0.6,0.7")]


def run(
    spec: SpecArgument,
    seeds: SeedsOption = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds per run.")] = None,
    only: Annotated[str | None, typer.Option(help="Only these policies (names or labels): fedcor,uniform")] = None,
    targets: TargetsOption = None,
    store: StoreOption = DEFAULT_STORE,
    processes: ProcessesOption = None,
    executor: ExecutorOption = "processes",
    address: AddressOption = None,
    restart: RestartOption = False,
    write_report: ReportOption = True,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run an experiment grid, or resume one that was stopped; of a file with variants, one after the other.

    Rounds in the store are not computed again; more seeds or rounds are added to them.
    """
    from fedpick.experiments.spec import load_specs

    changes: dict[str, Any] = {
        "seeds": seeds_option(seeds), "rounds": rounds, "only": names_list(only),
        "targets": numbers_list(targets, "--targets"),
    }  # fmt: skip
    chosen = [each.override(**changes) for each in load_specs(spec)]
    _execute(
        chosen, store, processes=processes, executor=executor, address=address, restart=restart,
        write_report=write_report, quiet=quiet, as_json=as_json,
    )  # fmt: skip


def show(spec: SpecArgument) -> None:
    """Print the resolved experiments of a file: what it extends merged in, and defaults of the spec written out."""
    from fedpick.experiments.inheritance import experiment_names
    from fedpick.experiments.spec import load_specs
    from fedpick.experiments.toml import toml_text

    texts = [
        f"# {name}\n{toml_text(each.to_dict())}"
        for name, each in zip(experiment_names(spec), load_specs(spec), strict=True)
    ]
    typer.echo("\n".join(texts), nl=False)


def compare(
    dataset: Annotated[str, typer.Option(autocompletion=complete_from("data"), help="See: fedpick list datasets.")],
    policies: Annotated[
        str,
        typer.Option(
            autocompletion=complete_from("policies"), help="See: fedpick list policies. Commas between names."
        ),
    ] = "uniform,pow-d,afl,fedcor",
    partition: Annotated[
        str | None, typer.Option(autocompletion=complete_from("partition"), help="How examples are dealt to clients.")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    budget: Annotated[int | None, typer.Option(help="Clients per round.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds per run.")] = None,
    seeds: SeedsOption = None,
    targets: TargetsOption = None,
    availability: Annotated[
        str | None,
        typer.Option(autocompletion=complete_from("availability"), help="Default: every client is available."),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(autocompletion=complete_from("devices"), help="Give clients devices, so that rounds take time."),
    ] = None,
    by: ByOption = "accuracy",
    task: Annotated[str | None, typer.Option(autocompletion=complete_from("task"), help="The model.")] = None,
    lr: Annotated[float | None, typer.Option(help="Local learning rate.")] = None,
    attack: Annotated[
        str | None,
        typer.Option(
            help="Clients that lie: inflate, deflate, alternate, collude, flip, scale, drop, sybils; joined by hyphens."
        ),
    ] = None,
    share: Annotated[float | None, typer.Option(help="Share of clients that lie; with --attack.")] = None,
    guard: Annotated[str | None, typer.Option(help="Against false reports: off, mild or strict.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Any other key, repeatable: --set partition.alpha=0.3, --set policies.pow-d.num_candidates=8."
        ),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    processes: ProcessesOption = None,
    executor: ExecutorOption = "processes",
    address: AddressOption = None,
    restart: RestartOption = False,
    write_report: ReportOption = True,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare policies on one setting: like `run`, with flags instead of a file and defaults for every data set."""
    from fedpick.cli.options import one_of
    from fedpick.experiments import presets

    one_of(by, _JUDGED_BY, "by")
    changes: dict[str, dict[str, Any]] = settings_list(set_ or [])
    given = {
        ("partition", "num_clients"): clients,
        ("run", "budget"): budget,
        ("run", "rounds"): rounds,
        ("run", "targets"): numbers_list(targets, "--targets"),
        ("availability", "name"): availability,
        ("devices", "name"): devices,
        ("task", "name"): task,
        ("local", "lr"): lr,
        ("attacks", "kind"): attack,
        ("attacks", "share"): share,
        ("run", "guard"): guard,
    }
    for (section, key), value in given.items():
        if value is not None:
            changes.setdefault(section, {})[key] = value
    spec = presets.comparison(
        dataset=dataset, policies=names_list(policies) or [], partition=partition, changes=changes
    ).override(seeds=seeds_option(seeds))
    _execute(
        [spec], store, processes=processes, executor=executor, address=address, restart=restart,
        write_report=write_report, quiet=quiet, as_json=as_json, by=by,
    )  # fmt: skip


def demo(
    rounds: Annotated[int, typer.Option(help="Rounds per run.")] = 100,
    seeds: Annotated[int, typer.Option(help="Seeds per policy.")] = 3,
    store: StoreOption = "demo/fedpick.sqlite",
    processes: ProcessesOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare policies on handwritten digits, end to end: progress, tables, report. Needs no download."""
    from fedpick.core import registry
    from fedpick.experiments import presets

    policies = [name for name in presets.DEMO_POLICIES if name in registry.names()]
    spec = presets.demo(policies, seeds=seeds, rounds=rounds)
    _execute(
        [spec], store, processes=processes, executor="processes", address=None, restart=False, write_report=True,
        quiet=quiet, as_json=as_json,
    )  # fmt: skip


def _execute(
    specs: Sequence[Spec],
    where: str,
    *,
    processes: int | None,
    executor: str,
    address: str | None,
    restart: bool,
    write_report: bool,
    quiet: bool,
    as_json: bool,
    by: str = "accuracy",
) -> None:
    from fedpick.experiments.executors import StopFlag
    from fedpick.experiments.progress import make_progress
    from fedpick.experiments.runner import run as run_spec
    from fedpick.experiments.store import Store

    codes = []
    with closing(Store(where)) as store:
        for spec in specs:
            started = time.monotonic()
            progress = make_progress(quiet=quiet, as_json=as_json)
            outcome = run_spec(
                spec, store, executor=executor, processes=processes, address=address, restart=restart,
                progress=progress, stop=StopFlag(interrupts.finishing),
            )  # fmt: skip
            codes.append(_tell(store, outcome, started, write_report=write_report, as_json=as_json, by=by))
            if codes[-1] == INTERRUPTED:
                break
    if code := max(codes):
        raise typer.Exit(code)


def _tell(
    store: Store, outcome: Report, started: float, *, write_report: bool, as_json: bool, by: str = "accuracy"
) -> int:
    """Print the results, write the report and set the exit code."""
    if as_json:
        _print_json(store, outcome, time.monotonic() - started, by)
    elif not outcome.stopped:
        _print_results(store, outcome.experiment, by)
    code = exit_code(outcome, failures=not as_json)
    if code == INTERRUPTED:
        return code
    if write_report and (path := write_html(store, outcome.experiment, None, by=by)) and not as_json:
        typer.echo(f"Report: {path}")
    if not as_json:
        typer.echo(f"Results: {store.name} ({time.monotonic() - started:.0f} s)")
    return code


def exit_code(outcome: Report, *, failures: bool = True) -> int:
    """Print which runs failed, unless told otherwise, and how many were stopped; return the exit code."""
    for name, reason in outcome.failures.items() if failures else ():
        typer.echo(f"failed: {name}: {reason}", err=True)
    if outcome.stopped:
        typer.echo(f"Stopped; {outcome.stopped} runs are not finished. Go on with: {same_command()}", err=True)
        return INTERRUPTED
    return FAILURE if outcome.failures else 0


def same_command() -> str:
    """The command that resumes this one: without --restart, which would discard the rounds again, and passwords."""
    from fedpick.experiments.store import public_name

    words = ["fedpick"]
    for word in sys.argv[1:]:
        option, found, value = word.partition("=")
        if found and option.startswith("--"):
            words.append(f"{option}={public_name(value)}")
        elif word != "--restart":
            words.append(public_name(word))
    return shlex.join(words)


def _print_json(store: Store, outcome: Report, seconds: float, by: str) -> None:
    from fedpick.experiments.encoding import to_json
    from fedpick.report import analysis, tables
    from fedpick.report.fairness import fairness_of

    results = analysis.load_results(store, outcome.experiment)
    fairness = fairness_of(store, results)
    measured = {
        table.title: {
            label: {
                column.heading: {"mean": quantity.mean, "sd": quantity.sd, "values": list(quantity.values)}
                for column, quantity in zip(table.columns, quantities, strict=True)
            }
            for label, quantities in table.lines
        }
        for table in (
            *tables.tables_of(results, most_clients=None),
            *([tables.fairness_table(results, fairness)] if fairness else []),
        )
    }
    end = {
        "event": "end",
        "experiment": outcome.experiment.hash,
        "finished": outcome.finished,
        "stopped": outcome.stopped,
        "failures": outcome.failures,
        "seconds": round(seconds, 3),
        "verdict": _verdict(store, results, fairness=fairness, by=by).sentences,
        "tables": measured,
    }
    typer.echo(to_json(end, sort_keys=False))


def wide_console() -> Console:
    """Open standard output as a console, 200 columns wide where it is no terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200)


def _print_results(store: Store, experiment: Experiment, by: str) -> None:
    from fedpick.report import analysis, tables
    from fedpick.report.fairness import fairness_of

    results = analysis.load_results(store, experiment)
    fairness = fairness_of(store, results)
    _print_verdict(_verdict(store, results, fairness=fairness, by=by))
    shown = tables.tables_of(results)
    if fairness:
        shown.append(tables.fairness_table(results, fairness))
    for table in shown:
        wide_console().print(tables.to_rich(table))


def _verdict(store: Store, results: Results, **options: Any) -> Verdict:
    from fedpick.report.groups import accounts_of
    from fedpick.report.verdict import verdict_of

    return verdict_of(results, accounts_of(store, results), **options)


def _print_verdict(verdict: Verdict) -> None:
    from rich.text import Text

    console = wide_console()
    console.print(Text(verdict.headline, style="bold"))
    for sentence in verdict.details:
        console.print(Text(sentence))
    console.print()


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "experiment"


def _report_path(store: Store, experiment: Experiment) -> Path:
    database = Path(str(store.engine.url.database or "results"))
    directory = database.parent if store.engine.url.get_backend_name() == "sqlite" else Path("results")
    return directory / f"{_slug(experiment.title)}-{experiment.hash[:8]}.html"


def write_html(store: Store, experiment: Experiment, path: Path | None, **options: Any) -> Path | None:
    """Write the HTML report; without the packages it needs, print how to install them and return None."""
    from fedpick.core.errors import MissingDependency

    try:
        from fedpick.report import html
    except MissingDependency as error:
        typer.echo(f"No HTML report. {error}", err=True)
        return None
    try:
        return _shown(html.write_report(store, path or _report_path(store, experiment), experiment, **options))
    except OSError as error:
        if path is not None:
            raise
        where = f"{error.strerror}: {error.filename}"
        typer.echo(f"No HTML report: {where}. Name another place: fedpick report -o FILE.html", err=True)
        raise typer.Exit(FAILURE) from error


def _shown(path: Path) -> Path:
    """Shorten a path inside the working directory."""
    try:
        return path.absolute().relative_to(Path.cwd())
    except ValueError:
        return path


def report(
    store: StoreOption = DEFAULT_STORE,
    experiment: Annotated[
        str | None, typer.Option("--experiment", "-e", help="Id, title or hash; default: the latest.")
    ] = None,
    form: Annotated[str, typer.Option("--format", "-f", help="terminal, markdown, csv or latex.")] = "terminal",
    window: Annotated[int, typer.Option(help="Also report the mean over this many evaluations.")] = 1,
    against: Annotated[
        str | None, typer.Option(help="Also paired differences to this policy, with confidence intervals.")
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(help="Also a table of groups of clients, by availability or cluster, which the figures then use."),
    ] = None,
    by: ByOption = "accuracy",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The HTML file; default: beside the store.")
    ] = None,
    html: Annotated[bool, typer.Option("--html/--no-html", help="Write the HTML report.")] = True,
    figures: Annotated[Path | None, typer.Option(help="Also write the figures for papers into this folder.")] = None,
    figure_formats: Annotated[str, typer.Option(help="Figure formats: png, svg, pdf; commas between.")] = "png,svg",
    list_all: Annotated[bool, typer.Option("--list", help="Only list the experiments in the store.")] = False,
) -> None:
    """Print the verdict and the tables of an experiment in the store; write its HTML report and figures."""
    from fedpick.cli.options import one_of
    from fedpick.experiments.store import open_store
    from fedpick.report import analysis, tables
    from fedpick.report.fairness import fairness_of

    one_of(form, tables.FORMATS, "format")
    one_of(by, _JUDGED_BY, "by")
    with closing(open_store(store)) as opened:
        if list_all:
            for each in opened.experiments():
                labels = dict.fromkeys(run.label for run in opened.runs(each.id))
                typer.echo(f"{each.id}\t{each.hash[:8]}\t{each.title}\t{', '.join(labels)}")
            return
        chosen = opened.experiment(experiment)
        results = analysis.load_results(opened, chosen)
        limit = {"most_clients": None} if form == "csv" else {}  # a file for programs is complete
        shown = tables.tables_of(results, window, **limit)
        if against is not None:
            shown.append(tables.difference_table(results, against, window))
        if groups is not None:
            from fedpick.report.groups import accounts_of

            accounts = accounts_of(opened, results, groups)
            shown += [tables.group_table(results, accounts), tables.distance_table(results, accounts)]
        fairness = fairness_of(opened, results)
        if fairness:
            shown.append(tables.fairness_table(results, fairness))
        verdict = _verdict(opened, results, fairness=fairness, against=against, window=window, by=by)
        if form == "terminal":
            _print_verdict(verdict)
            for table in shown:
                wide_console().print(tables.to_rich(table))
        else:
            if form == "markdown":
                typer.echo("\n\n".join((f"**{verdict.headline}**", *verdict.details)) + "\n")
            typer.echo(tables.render(shown, form), nl=False)
        options: dict[str, Any] = {"window": window, "against": against, "grouping": groups}
        if html and (path := write_html(opened, chosen, output, by=by, **options)):
            typer.echo(f"Report: {path}", err=form != "terminal")
        if figures is not None:
            from fedpick.report import write_figures

            formats = names_list(figure_formats) or []
            written = write_figures(opened, figures, formats, chosen, **options)
            typer.echo(f"Figures: {len(written)} files in {figures}", err=form != "terminal")
