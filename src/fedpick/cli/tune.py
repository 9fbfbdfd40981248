"""The command `tune`: search learning rates and other settings for every policy of a spec."""

from __future__ import annotations

import shlex
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedpick.cli import interrupts
from fedpick.cli.experiments import (
    ProcessesOption,
    QuietOption,
    SeedsOption,
    SpecArgument,
    StoreOption,
    exit_code,
)
from fedpick.cli.options import names_list, numbers_list, one_of, seeds_option, values_list
from fedpick.experiments import DEFAULT_STORE

if TYPE_CHECKING:
    from fedpick.experiments.tuning import Choice

__all__ = ["tune"]


def tune(
    spec: SpecArgument,
    local_lr: Annotated[str | None, typer.Option(help="Local learning rates to try: 0.1,0.03,0.01")] = None,
    server_lr: Annotated[str | None, typer.Option(help="Server learning rates to try: 1,0.3,0.1")] = None,
    try_: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            help="Any other setting, repeatable: --try num_candidates=4,8 --try local.epochs=1,3",
        ),
    ] = None,
    seeds: SeedsOption = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds per run; default: those of the spec.")] = None,
    only: Annotated[str | None, typer.Option(help="Only these policies (names or labels): fedcor,uniform")] = None,
    score: Annotated[str, typer.Option(help="On validation data: accuracy or loss.")] = "accuracy",
    evaluations: Annotated[int, typer.Option(min=1, help="Score: the mean of this many last evaluations.")] = 5,
    holdout: Annotated[float, typer.Option(help="Validation share of every client, unless the spec sets one.")] = 0.2,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The new spec; default: SPEC-tuned.toml beside SPEC.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    processes: ProcessesOption = None,
    quiet: QuietOption = False,
) -> None:
    """Search learning rates and other settings: one grid, rounds and seeds for all policies, on validation data.

    Prints the scores and writes the spec with every policy's best settings. The same command resumes.
    """
    from fedpick.core.errors import InvalidInput
    from fedpick.core.writing import refuse_directory, write_atomically
    from fedpick.experiments import tuning as search
    from fedpick.experiments.executors import StopFlag
    from fedpick.experiments.inheritance import experiment_names, split_variant
    from fedpick.experiments.progress import make_progress
    from fedpick.experiments.runner import run
    from fedpick.experiments.spec import load_spec, parse_spec
    from fedpick.experiments.store import Store

    one_of(score, search.SCORES, "score")
    if len(names := experiment_names(spec)) > 1:
        if output is not None:
            raise InvalidInput(
                f"--output names one file, but {spec} holds {len(names)} experiments: {', '.join(names)}."
            )
        for name in names:
            tune(
                Path(name), local_lr=local_lr, server_lr=server_lr, try_=try_, seeds=seeds, rounds=rounds, only=only,
                score=score, evaluations=evaluations, holdout=holdout, store=store, processes=processes, quiet=quiet,
            )  # fmt: skip
        return
    file, variant = split_variant(spec)
    tuned = file.with_name(f"{file.stem}{f'-{variant}' if variant else ''}-tuned.toml")
    target = refuse_directory(output or tuned)  # before the search
    chosen = load_spec(spec).override(only=names_list(only))
    rates = numbers_list(local_lr, "--local-lr") or [], numbers_list(server_lr, "--server-lr") or []
    grid = search.candidates(*rates, values_list(try_ or []))
    searched = search.grid_spec(chosen.override(seeds=seeds_option(seeds), rounds=rounds), grid, holdout=holdout)
    parse_spec(searched.to_dict(), source="command line")  # refuses values that a policy does not take
    with closing(Store(store)) as opened:
        progress, stop = make_progress(quiet=quiet, as_json=False), StopFlag(interrupts.finishing)
        outcome = run(searched, opened, processes=processes, latest=False, progress=progress, stop=stop)
        if code := exit_code(outcome):
            raise typer.Exit(code)
        choices = search.choose(opened, outcome.experiment, chosen, grid, score=score, evaluations=evaluations)
    _print_scores(searched.title, choices, score, f"{searched.rounds} rounds, seeds {list(searched.seeds)}.")
    for choice in choices:
        if choice.at_edge:
            typer.echo(f"{choice.label}: {choice.best} is at the edge of the grid; a wider one may hold a better one.")
    # Only the options that decide the result: the file must not depend on where the search ran.
    given = {
        "--local-lr": local_lr, "--server-lr": server_lr, "--seeds": seeds, "--rounds": rounds, "--only": only,
        "--score": score, "--evaluations": evaluations, "--holdout": holdout,
    }  # fmt: skip
    words = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    words += [word for text in try_ or [] for word in ("--try", text)]
    command = shlex.join(["fedpick", "tune", spec.name if spec.is_absolute() else str(spec), *words])
    write_atomically(target, search.tuned_text(chosen, choices, command=command, searched=searched, score=score))
    typer.echo(f"Spec: {target}")


def _print_scores(title: str, choices: list[Choice], score: str, effort: str) -> None:
    from fedpick.cli.experiments import wide_console
    from fedpick.report import tables

    note = f"Mean {score} on validation data, weighted by importance; {effort} N/A: the model did not stay finite."
    wide_console().print(tables.to_rich(tables.search_table(title, choices, note)))
