"""The command line: thin. Every command reads its options, calls the library and prints.

Exit codes: 0 everything went well; 1 something failed while running; 2 the input was wrong, nothing was run;
3 interrupted, and the same command goes on where it stopped.
"""

from __future__ import annotations

import sys
from typing import Any

from fedpick.core.errors import FedpickError, MissingDependency, PolicyCheckFailed

__all__ = ["main"]

FAILURE = 1
BAD_INPUT = 2
INTERRUPTED = 3


def main() -> None:
    """The entry point of the program `fedpick`."""
    try:
        import typer

        from fedpick.cli.app import app
    except ModuleNotFoundError as error:
        sys.stderr.write(f"fedpick's commands need {error.name!r}. Install it with: pip install 'fedpick[cli]'\n")
        sys.exit(FAILURE)
    # Typer is built on click up to 0.25 and carries its own copy from 0.26 on; its public classes lead to either.
    usage_error: Any = typer.BadParameter.__mro__[2]
    try:
        code = app(standalone_mode=False)
    except typer.Abort:
        code = INTERRUPTED
    except usage_error as error:
        error.show()
        code = BAD_INPUT
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted. The same command goes on where it stopped.\n")
        code = INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader, `head` perhaps, has seen enough
        code = 0
    except (MissingDependency, PolicyCheckFailed) as error:
        sys.stderr.write(f"{error}\n")
        code = FAILURE
    except FedpickError as error:
        sys.stderr.write(f"error: {error}\n")
        code = BAD_INPUT
    except Exception as error:
        sentence = _from_outside(error)
        if sentence is None:
            raise  # a mistake of ours: the traceback is what a report of it needs
        sys.stderr.write(f"error: {sentence}\n")
        code = FAILURE
    sys.exit(code if isinstance(code, int) else 0)


def _from_outside(error: Exception) -> str | None:
    """In a sentence: a full disk, a missing permission, a damaged database. None for anything else."""
    if isinstance(error, OSError):
        return f"{error.strerror or error}" + (f": {error.filename}." if error.filename is not None else ".")
    # Only where something has imported it: most commands do without.
    if "sqlalchemy" in sys.modules:
        from sqlalchemy.exc import SQLAlchemyError

        from fedpick.experiments.store import in_a_sentence

        if isinstance(error, SQLAlchemyError):
            return in_a_sentence(error)
    return None
