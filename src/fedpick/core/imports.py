"""Things of one's own: `package.module:attribute` where the name of a built-in would stand.

The module is found like any other, and also in the working directory and in the directory of the spec that names it.
Both are put at the end of `sys.path`, so that they hide nothing, and new processes start with the same path.
"""

from __future__ import annotations

import importlib
import inspect
import operator
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from fedpick.core.errors import FedpickError, InvalidInput, unknown_name

__all__ = ["call_target", "importable_directories", "is_target", "load_target", "make_importable", "takes"]

_directories: list[str] = []
"""Where modules of one's own were looked for in this process."""


def is_target(name: str) -> bool:
    """Whether this names something of one's own: it has a colon, which no registered name has."""
    return ":" in name


def make_importable(directory: Path) -> None:
    """Let modules in this directory be imported, unless something else has their name."""
    path = str(directory.resolve())
    if path not in _directories:
        _directories.append(path)
    if path not in sys.path:
        sys.path.append(path)


def importable_directories() -> tuple[str, ...]:
    """The directories of `make_importable`, for workers that do not start with this process's path."""
    return tuple(_directories)


def _refuse_namesakes(kind: str, name: str, module_name: str) -> None:
    """Python imports one module of a name and keeps it: a second one, beside another spec, would never be seen."""
    top = module_name.partition(".")[0]
    specs = [PathFinder.find_spec(top, [directory]) for directory in _directories]
    files = sorted({spec.origin for spec in specs if spec is not None and spec.origin is not None})
    if len(files) > 1:
        raise InvalidInput(
            f"The {kind} {name!r} could be in {' or in '.join(files)}, and one process imports only one of them. "
            "Rename one, or start Python anew for each."
        )


def load_target(kind: str, name: str) -> Callable[..., Any]:
    """The function or class that `package.module:attribute` names."""
    module_name, _, attribute = name.partition(":")
    is_file = module_name.endswith(".py")
    if is_file or not all(part.isidentifier() for part in [*module_name.split("."), *attribute.split(".")]):
        hint = " Leave out the .py." if is_file else ""
        raise InvalidInput(
            f"The {kind} {name!r} is not the name of something in Python: expected 'package.module:function', with "
            f"dots between folders.{hint}"
        )
    make_importable(Path.cwd())
    importlib.invalidate_caches()  # the file may have been written a moment ago
    _refuse_namesakes(kind, name, module_name)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # somebody else's import may fail in any way
        raise InvalidInput(f"The {kind} {name!r} cannot be imported: {_why(error, module_name)}") from error
    try:
        found = operator.attrgetter(attribute)(module)
    except AttributeError as error:
        kinds = (inspect.isfunction, inspect.isclass)
        known = [
            key
            for key, value in vars(module).items()
            if any(is_kind(value) for is_kind in kinds) and not key.startswith("_")
        ]
        own = [key for key in known if getattr(module, key).__module__ == module.__name__]
        # A module that came with something else may have hidden one's own.
        file = getattr(module, "__file__", None) or ""
        where = "" if any(file.startswith(directory) for directory in _directories) else f" ({file or 'built in'})"
        raise unknown_name(
            f"function or class in {module.__name__}{where}", attribute, own or known or ["(none)"]
        ) from error
    if not callable(found):
        raise InvalidInput(f"The {kind} {name!r} must be a function or a class. It is a {type(found).__name__}.")
    return found  # type: ignore[no-any-return]


def _why(error: Exception, module_name: str) -> str:
    missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
    if missing and (module_name == missing or module_name.startswith(f"{missing}.")):
        return (
            f"there is no module {missing!r} in {Path.cwd()}, in the directory of the spec, or among the installed "
            "packages."
        )
    return _place(error, module_name)


def _place(error: Exception, module_name: str) -> str:
    """The error in a sentence, with the last line of this module that was reached."""
    stem = module_name.rpartition(".")[2]
    frames = [each for each in traceback.extract_tb(error.__traceback__) if Path(each.filename).stem == stem]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}."


def takes(function: Callable[..., Any], option: str) -> bool:
    """Whether a function has this keyword argument, or takes any."""
    parameters = inspect.signature(function).parameters
    any_of_them = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return any_of_them or option in parameters


def call_target(kind: str, name: str, function: Callable[..., Any], wanted: type, options: Mapping[str, Any]) -> Any:
    """What the function behind a target gives, which must be a `wanted`."""
    try:
        result = function(**options)
    except FedpickError:
        raise
    except Exception as error:  # somebody else's code may fail in any way
        raise InvalidInput(f"The {kind} {name!r} could not be made: {_place(error, name.partition(':')[0])}") from error
    if not isinstance(result, wanted):
        raise InvalidInput(
            f"The {kind} {name!r} must return a {wanted.__module__.rpartition('.')[0]}.{wanted.__name__}. "
            f"Got {type(result).__name__}."
        )
    return result
