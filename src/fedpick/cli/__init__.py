"""The command line. Each command reads its options, calls the library and prints the result.

Exit codes: 0 success; 1 a run failed; 2 wrong input, nothing was run; 3 interrupted, the same command resumes;
130 interrupted twice, which ends the program at once.
"""

from __future__ import annotations

import sys
from typing import Any

from fedpick.cli import interrupts
from fedpick.core.errors import FedpickError, MissingDependency, PolicyCheckFailed, plain_warnings

__all__ = ["main"]

FAILURE = 1
BAD_INPUT = 2
INTERRUPTED = 3


def main() -> None:
    """Run the program `fedpick`."""
    plain_warnings()
    with interrupts.watching():
        try:
            code = _call()
        except KeyboardInterrupt:
            sys.stderr.write("Interrupted. The same command resumes where it stopped.\n")
            code = INTERRUPTED
    sys.exit(code)


def _call() -> int:
    """Run the command of the command line, and return its exit code."""
    try:
        import typer

        from fedpick.cli.app import app
    except ModuleNotFoundError as error:
        sys.stderr.write(f"fedpick's commands need {error.name!r}. Install it with: pip install 'fedpick[cli]'\n")
        return FAILURE
    # Typer depends on click up to 0.25 and bundles it from 0.26 on. The base class of both is reached through Typer:
    # BadParameter, UsageError, ClickException.
    click_exception: Any = typer.BadParameter.__mro__[2]
    try:
        code = app(standalone_mode=False)
        if code == interrupts.KILLED:
            raise KeyboardInterrupt  # as Typer returns it
    except typer.Abort as error:
        raise KeyboardInterrupt from error  # as click returns it
    except click_exception as error:
        if "Did you mean" in error.message:
            error.possibilities = None  # newer versions of click append what Typer has suggested already
        error.show()
        code = BAD_INPUT
    except BrokenPipeError:
        sys.stderr.close()  # the reader, such as `head`, closed the pipe
        code = 0
    except (MissingDependency, PolicyCheckFailed) as error:
        sys.stderr.write(f"{error}\n")
        code = FAILURE
    except FedpickError as error:
        sys.stderr.write(f"error: {error}\n")
        code = BAD_INPUT
    except Exception as error:
        sentence = _environment_error(error)
        if sentence is None:
            raise  # a bug in fedpick: a bug report needs the traceback
        sys.stderr.write(f"error: {sentence}\n")
        code = FAILURE
    return code if isinstance(code, int) else 0


def _environment_error(error: Exception) -> str | None:
    """Describe a full disk, a missing permission or a damaged database in a sentence; None for other errors."""
    if isinstance(error, OSError):
        return f"{error.strerror or error}" + (f": {error.filename}." if error.filename is not None else ".")
    # Importing SQLAlchemy is slow, and a command that has not imported it cannot have raised its errors.
    if "sqlalchemy" in sys.modules:
        from sqlalchemy.exc import SQLAlchemyError

        from fedpick.experiments.store import in_a_sentence

        if isinstance(error, SQLAlchemyError):
            return in_a_sentence(error)
    return None
