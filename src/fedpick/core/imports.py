"""Import paths: `package.module:attribute`, which users write in the place of a registered name.

Python finds the module as usual, and also in the working directory and in the directory of the spec that names it. Both
are appended to `sys.path`, so that they hide no installed module. Worker processes get the same path.
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

__all__ = ["accepts", "build_object", "importable_directories", "is_import_path", "load_object", "make_importable"]

_directories: list[str] = []
"""The directories that `make_importable` appended in this process."""


def is_import_path(name: str) -> bool:
    """Whether a name is an import path: it has a colon, which no registered name has."""
    return ":" in name


def make_importable(directory: Path) -> None:
    """Let Python import the modules of this directory, after all others of the same name."""
    path = str(directory.resolve())
    if path not in _directories:
        _directories.append(path)
    if path not in sys.path:
        sys.path.append(path)


def importable_directories() -> tuple[str, ...]:
    """Return the directories of `make_importable`, for workers that start with another path."""
    return tuple(_directories)


def _refuse_namesakes(kind: str, name: str, module_name: str) -> None:
    """Raise if two directories hold a module of this name: Python would import the first and never the second."""
    top = module_name.partition(".")[0]
    specs = [PathFinder.find_spec(top, [directory]) for directory in _directories]
    files = sorted({spec.origin for spec in specs if spec is not None and spec.origin is not None})
    if len(files) > 1:
        raise InvalidInput(
            f"The {kind} {name!r} could be in {' or in '.join(files)}, and one process imports only one of them. "
            "Rename one of them, or use one process for each."
        )


def load_object(kind: str, name: str) -> Callable[..., Any]:
    """Import the function or class at an import path. `kind` names it in messages, such as "policy"."""
    module_name, _, attribute = name.partition(":")
    is_file = module_name.endswith(".py")
    if is_file or not all(part.isidentifier() for part in [*module_name.split("."), *attribute.split(".")]):
        hint = " Leave out the .py." if is_file else ""
        raise InvalidInput(
            f"The {kind} {name!r} is not an import path: expected 'package.module:function', with dots between "
            f"folders.{hint}"
        )
    make_importable(Path.cwd())
    importlib.invalidate_caches()  # the file may be newer than the last import
    _refuse_namesakes(kind, name, module_name)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # user code may raise anything
        raise InvalidInput(f"The {kind} {name!r} cannot be imported: {_why(error, module_name)}") from error
    try:
        found: Callable[..., Any] = operator.attrgetter(attribute)(module)
    except AttributeError as error:
        kinds = (inspect.isfunction, inspect.isclass)
        known = [
            key
            for key, value in vars(module).items()
            if any(is_kind(value) for is_kind in kinds) and not key.startswith("_")
        ]
        own = [key for key in known if getattr(module, key).__module__ == module.__name__]
        # An installed module of the same name hides the user's: say which file was imported.
        file = getattr(module, "__file__", None) or ""
        where = "" if any(file.startswith(directory) for directory in _directories) else f" ({file or 'built in'})"
        raise unknown_name(
            f"function or class in {module.__name__}{where}", attribute, own or known or ["(none)"]
        ) from error
    if not callable(found):
        raise InvalidInput(f"The {kind} {name!r} must be a function or a class. It is a {type(found).__name__}.")
    return found


def _why(error: Exception, module_name: str) -> str:
    missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
    if missing and (module_name == missing or module_name.startswith(f"{missing}.")):
        return (
            f"there is no module {missing!r} in {Path.cwd()}, in the directory of the spec, or among the installed "
            "packages."
        )
    return _place(error, module_name)


def _place(error: Exception, module_name: str) -> str:
    """Describe the error in a sentence, with the last line of the module that ran."""
    stem = module_name.rpartition(".")[2]
    frames = [each for each in traceback.extract_tb(error.__traceback__) if Path(each.filename).stem == stem]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}."


def accepts(function: Callable[..., Any], option: str) -> bool:
    """Whether a function accepts this keyword argument, by name or through `**options`."""
    parameters = inspect.signature(function).parameters
    return option in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def build_object(kind: str, name: str, function: Callable[..., Any], wanted: type, options: Mapping[str, Any]) -> Any:
    """Call the function at an import path with these options. Raise unless it returns a `wanted`."""
    try:
        result = function(**options)
    except FedpickError:
        raise
    except Exception as error:  # user code may raise anything
        raise InvalidInput(f"The {kind} {name!r} raised an error: {_place(error, name.partition(':')[0])}") from error
    if not isinstance(result, wanted):
        raise InvalidInput(
            f"The {kind} {name!r} must return a {wanted.__module__.rpartition('.')[0]}.{wanted.__name__}. "
            f"Got {type(result).__name__}."
        )
    return result
