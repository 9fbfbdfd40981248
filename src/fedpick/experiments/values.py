"""What can be wrong with the values in a spec, each with its own line, before any data are read.

Values are checked by what they are given to. Where that needs data or random numbers it gets stand-ins, and goes as far
as the first use of one: every data set and every partition looks at its options before that. What depends on the data
(more clients than examples, say) is found when the first run is built.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from fedpick.core.errors import InvalidInput
from fedpick.core.imports import is_import_path
from fedpick.experiments.options import Problem, first_error

__all__ = [
    "check_data",
    "check_partition",
    "check_simulator",
    "check_task",
    "finite_problems",
    "value_problems",
]

Path = tuple[str | int, ...]
MANY_CLIENTS = 1_000_000


def value_problems(
    owner: str,
    build: Callable[..., Any],
    given: Mapping[str, Any],
    path: Path,
    good: Mapping[str, Any] | None = None,
) -> list[Problem]:
    """Why something cannot be built from these options: every one that is refused by itself, with its own line.

    `good` are options with which it can be built, to try every single one with; None: they are not tried singly.
    """
    error = first_error(build, **given)
    if error is None:
        return []
    refused: dict[str, str] = {}
    if good is not None and first_error(build, **good) is None:
        alone = {key: first_error(build, **{**good, key: value}) for key, value in given.items()}
        refused = {key: text for key, text in alone.items() if text is not None}
    if refused:
        return [Problem((*path, key), f"{owner}: {text}", value=True) for key, text in refused.items()]
    named = [key for key in given if re.search(rf"\b{re.escape(key)}\b", error)]
    return [Problem((*path, named[0]) if len(named) == 1 else path, f"{owner}: {error}", value=True)]


def finite_problems(owner: str, table: Mapping[str, Any], path: Path) -> list[Problem]:
    """NaN and infinity, at any depth: for sections where no key has a meaning for them."""
    problems: list[Problem] = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            problems += finite_problems(f"{owner}.{key}", value, (*path, key))
            continue
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                problems.append(Problem((*path, key), f"{owner}: {key!r} must be finite. Got {value}.", value=True))
                break
    return problems


class _ReachedError(Exception):
    """A check came to where data or random numbers are used: the options are good as far as they can be judged."""


def _reached(*_: Any, **__: Any) -> NoReturn:
    raise _ReachedError


class _StandIn:
    """In place of a seed, a directory, a random generator or a data set: any use of it ends the check."""

    __getattr__ = __lt__ = __index__ = __int__ = __fspath__ = __format__ = __str__ = _reached


class _Labels:
    """In place of labels: more of them than anybody asks for, and any look at one ends the check."""

    __getitem__ = __iter__ = __array__ = _reached

    def __len__(self) -> int:
        return 2**62


def check_data(name: str, **options: Any) -> None:
    """Refuse options of a data set of ours; somebody's own is not called before it is needed."""
    from fedpick.data.registry import loader_of

    if is_import_path(name):
        return
    loader = loader_of(name)
    parameters = inspect.signature(loader).parameters
    stand_ins = {key: _StandIn() for key in ("seed", "directory") if key in parameters}
    with suppress(_ReachedError):
        loader(**{**options, **stand_ins})


def check_partition(name: str, **options: Any) -> None:
    """Refuse options of a partition."""
    from fedpick.data.partition import dealer_of, partition

    shared = {key: options.pop(key) for key in ("num_clients", "holdout", "split") if key in options}
    dataset: Any = _StandIn()
    with suppress(_ReachedError):
        partition(dataset, name, **shared)
    if options:
        # MemoryError: as many shards as one likes, of more examples than there are.
        with suppress(_ReachedError, MemoryError):
            dealer_of(name)(_Labels(), shared.get("num_clients", MANY_CLIENTS), _StandIn(), **options)


def check_task(name: str, **options: Any) -> None:
    """Refuse options of a task of ours, built for data of its usual shape."""
    from fedpick.sim import tasks

    if not is_import_path(name):
        tasks.builder_of(name)(**options)


def check_simulator(**options: Any) -> None:
    """Refuse options of the simulator."""
    for name, value in options.items():
        if isinstance(value, int) and value < 1:
            raise InvalidInput(f"{name!r} must be a whole number of at least 1. Got {value}.")
