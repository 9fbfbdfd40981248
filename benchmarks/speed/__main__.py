"""bench: every module of `benchmarks.speed` is a command, found by its file name."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

__all__ = ["app"]

_PACKAGE = "benchmarks.speed"


class _SpeedGroup(TyperGroup):
    """Imports a benchmark only when it is called for."""

    def list_commands(self, ctx: typer.Context) -> list[str]:
        """See click."""
        package = importlib.import_module(_PACKAGE)
        return sorted(item.name for item in pkgutil.iter_modules(package.__path__) if not item.name.startswith("_"))

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:
        """See click."""
        if cmd_name not in self.list_commands(ctx):
            return None
        function = importlib.import_module(f"{_PACKAGE}.{cmd_name}").command
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(cmd_name)(_printing(function))
        return get_command(single)


def _printing(function: Any) -> Any:
    """The benchmark with one more option, --json, and its results printed."""
    import inspect

    @functools.wraps(function)
    def command(*arguments: Any, json_file: Path | None = None, **options: Any) -> None:
        results = function(*arguments, **options)
        for name, value in results.items():
            if isinstance(value, (dict, list)):
                continue  # in the table that the benchmark itself prints
            typer.echo(f"{name.replace('_', ' ')}: {value:.6g}" if isinstance(value, float) else f"{name}: {value}")
        if json_file is not None:
            from fedpick.core.writing import write_atomically
            from fedpick.experiments.encoding import to_json

            write_atomically(json_file, to_json(results, sort_keys=False, indent=1) + "\n")

    option = Annotated[Path | None, typer.Option("--json", help="Also write the results to this file.")]
    own = inspect.signature(function, eval_str=True)
    extra = inspect.Parameter("json_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
    signature = own.replace(parameters=[*own.parameters.values(), extra], return_annotation=None)
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    return command


app = typer.Typer(
    cls=_SpeedGroup, help="Speed and scale on this machine, as ratios measured side by side.", no_args_is_help=True
)


@app.callback()
def _root() -> None:
    pass
