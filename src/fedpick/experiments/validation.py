"""Validate the content of a spec: sections, names, options, types and values, all problems at once.

Options are read from the dataclasses (or user functions) that will be built, and values are checked by building these.
No data are read and JAX is not imported, so a typo is reported at once. What depends on the data, such as more clients
than examples, is found when the first run is built.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedpick import availability, data
from fedpick.core import registry
from fedpick.core.errors import FedpickError, InvalidInput, MissingDependency
from fedpick.core.imports import is_import_path
from fedpick.data import loading
from fedpick.data.partition import OWN_CLIENTS, dealer_class
from fedpick.experiments import settings
from fedpick.experiments.encoding import has_control_characters
from fedpick.experiments.settings import RunSettings, alternatives, type_hints, typed
from fedpick.experiments.toml import KeyPath
from fedpick.sim import Attacks, Faults, LocalTraining, ServerStep, Waiting, devices, tasks
from fedpick.sim.settings import SimulatorSettings

__all__ = [
    "POLICY_KEYS",
    "SHARED_KEYS",
    "Option",
    "Place",
    "Problem",
    "SpecError",
    "content_problems",
    "names_of",
    "nearest",
    "options_of",
    "run_problems",
]

Table = Mapping[str, Any]


class Place(NamedTuple):
    """Where a key stands."""

    source: str
    line: int | None = None


class SpecError(InvalidInput):
    """A spec that cannot be run; `problems` holds (line or None, sentence) for every problem."""

    def __init__(self, problems: Sequence[tuple[Place, str]]) -> None:
        self.problems = tuple((place.line, text) for place, text in problems)
        super().__init__(
            "\n".join(
                f"{place.source}:{place.line}: {text}" if place.line else f"{place.source}: {text}"
                for place, text in problems
            )
        )


@dataclass(frozen=True)
class Problem:
    """One problem of a spec and the path of the key at fault."""

    path: KeyPath
    message: str


@dataclass(frozen=True)
class Option:
    """One key that a section may have."""

    name: str
    hint: Any = Any
    required: bool = False


_PLAIN: dict[str, type[Any]] = {
    "local": LocalTraining,
    "server": ServerStep,
    "faults": Faults,
    "attacks": Attacks,
    "simulator": SimulatorSettings,
    "waiting": Waiting,
}
_REQUIRED = ("data", "partition", "task", "local", "run", "policies")
_SECTIONS = ("title", "data", "partition", "task", *_PLAIN, "availability", "devices", "run", "policies")
# Keys of a section that are not options of the thing it names.
_SECTION_KEYS = {
    "data": [Option("name", str), Option("seed", int)],
    "partition": [Option("name", str), Option("seed", int)],
    "task": [Option("name", str)],
    "availability": [Option("name", str), Option("seed", int), Option("history", int), Option("clock", bool)],
    "devices": [Option("name", str)],
    "policies": [Option("name", str), Option("label", str), Option("local", dict), Option("server", dict)],
}
POLICY_KEYS = tuple(option.name for option in _SECTION_KEYS["policies"])
SHARED_KEYS = {
    "data": ("seed",),
    "partition": ("num_clients", "holdout", "split", "seed"),
    "task": (),
    "availability": ("seed", "history", "clock"),
    "devices": (),
}
"""Keys that do not depend on the name in a section."""
_KINDS = {
    "data": "data set",
    "policies": "policy",
    "availability": "availability process",
    "devices": "model of devices",
}
# Sections whose name may be `package.module:attribute`, and what that attribute is.
_TARGETS = {"data": "function", "task": "function", "availability": "function", "policies": "Class"}
# In the other sections some numbers may be infinite or NaN (kappa2, deadline); the classes there decide.
_FINITE = ("data", "partition", "task", "local", "server", "simulator", "devices")
_MANY_CLIENTS = 1_000_000


def names_of(section: str) -> tuple[str, ...]:
    """The registered names that a section may have."""
    known: dict[str, Callable[[], Sequence[str]]] = {
        "data": data.names,
        "partition": data.partition_names,
        "task": tasks.names,
        "availability": availability.names,
        "devices": devices.names,
        "policies": registry.names,
    }
    return tuple(known[section]())


def options_of(section: str, name: str = "") -> list[Option] | None:
    """The options of a section, for the thing it names; None where a user function takes any (`**options`)."""
    if section == "data":
        return _fields(loading.options_source(name), skip=["seed"])
    if section == "partition":
        shared = [
            Option("num_clients", int, name not in OWN_CLIENTS),
            Option("holdout", float),
            Option("split", list[float]),
        ]
        return [*shared, *(_fields(dealer_class(name)) or [])]
    if section == "task":
        return _fields(tasks.options_source(name), skip=["input_shape", "num_classes"])
    if section == "availability":
        return _fields(availability.load(name))
    if section == "devices":
        return _fields(devices.load(name))
    if section == "policies":
        return _fields(registry.load(name))
    return _fields(RunSettings if section == "run" else _PLAIN[section])


def _fields(target: Any, skip: Iterable[str] = ()) -> list[Option] | None:
    """The fields of a dataclass or the keyword arguments of a function."""
    hints, skipped = type_hints(target), set(skip)
    if is_dataclass(target):
        return [
            Option(
                item.name,
                item.metadata.get("toml", hints.get(item.name, Any)),
                item.default is MISSING and item.default_factory is MISSING,
            )
            for item in fields(target)
            if item.init and item.name not in skipped
        ]
    parameters = inspect.signature(target).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [
        Option(parameter.name, hints.get(parameter.name, Any), parameter.default is parameter.empty)
        for parameter in parameters
        if parameter.name not in skipped and parameter.kind is not parameter.VAR_POSITIONAL
    ]


def nearest(name: str, known: Iterable[str]) -> str:
    """ " Did you mean 'x'?", or nothing where no name is near."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


# The content of a spec, section by section.


def content_problems(content: Table) -> list[Problem]:
    """Every problem of a spec's content."""
    if problems := _section_problems(content):
        return problems
    for section in ("data", "partition", "availability", "devices"):
        if section in content:
            problems += _named_problems(section, content[section], (section,))
    for section in _PLAIN:
        if content.get(section) or section == "local":
            problems += _plain_problems(section, content.get(section, {}), (section,))
    problems += run_problems(content["run"])
    problems += _time_problems(content)
    problems += _policies_problems(content)
    # The module of a user's task may import JAX; other problems must not wait for that.
    name = content["task"].get("name")
    if not (problems and isinstance(name, str) and is_import_path(name)):
        problems += _named_problems("task", content["task"], ("task",))
    return problems


def _section_problems(content: Table) -> list[Problem]:
    """Sections that are unknown, missing or of the wrong kind."""
    problems = [
        Problem((key,), f"There is no section {key!r}.{nearest(key, _SECTIONS)} Known: {', '.join(_SECTIONS)}.")
        for key in content
        if key not in _SECTIONS
    ]
    problems += [Problem((key,), f"The section [{key}] is missing.") for key in _REQUIRED if key not in content]
    for key, value in content.items():
        if key == "title":
            if not isinstance(value, str):
                problems.append(Problem((key,), f"title must be text. Got {value!r}."))
            elif has_control_characters(value):
                problems.append(Problem((key,), f"title must do without control characters. Got {value!r}."))
        elif key == "policies":
            if not isinstance(value, list) or not value or not all(isinstance(entry, dict) for entry in value):
                problems.append(
                    Problem((key,), "policies must be tables, at least one: [[policies]] with name = '...'")
                )
        elif key in _SECTIONS and not isinstance(value, dict):
            problems.append(Problem((key,), f"{key} must be a section, [{key}]. Got {value!r}."))
    return problems


def _named_problems(section: str, table: Table, path: KeyPath) -> list[Problem]:
    """Problems of a section that names a registered thing or something of the user."""
    if problems := _name_problems(section, table, path):
        return problems
    name, owner = table["name"], f"[{section}] {table['name']}"
    own = {option.name for option in _SECTION_KEYS[section]}
    try:
        options = options_of(section, name)
    except MissingDependency:
        raise
    except FedpickError as reason:  # something of the user that cannot be imported
        return [Problem((*path, "name"), f"[{section}]: {reason}")]
    given = {key: value for key, value in table.items() if key not in own}
    problems = _option_problems(owner, {k: v for k, v in table.items() if k in own}, _SECTION_KEYS[section], path)
    problems += _option_problems(owner, given, options, path)
    if section in _FINITE:
        problems += _finite_problems(owner, given, path)
    if not problems:
        owner = f"policy {name}" if section == "policies" else owner
        problems = _value_problems(owner, partial(_build, section, name), given, path, _good(section, table))
    return problems + _least_problems(section, table, path)


def _name_problems(section: str, table: Table, path: KeyPath) -> list[Problem]:
    name = table.get("name")
    if not isinstance(name, str):
        return [Problem(path, f"[{section}] needs a name, as text. Got {name!r}.")]
    if section in _TARGETS and is_import_path(name):
        return []  # imported when its options are read
    if section == "policies" and name in registry.BUILT_IN:
        return []  # searching the plug-ins takes 10 ms or more
    known = names_of(section)
    if name in known:
        return []
    message = f"There is no {_KINDS.get(section, section)} named {name!r}.{nearest(name, known)}"
    message += f" Known: {', '.join(sorted(known))}."
    if section in _TARGETS:
        message += f" Your own is named 'package.module:{_TARGETS[section]}'."
    return [Problem((*path, "name"), message)]


def _build(section: str, name: str, options: Table) -> object:
    """Build what a section describes; raises where a value is refused."""
    table = {"name": name, **options}
    if section in ("data", "task", "availability") and is_import_path(name):
        return None  # the user's function is not called before its result is needed
    builders: dict[str, Callable[[Table], object]] = {
        "data": settings.data_of,
        "partition": settings.partition_of,
        "task": settings.task_of,
        "availability": settings.availability_of,
        "devices": settings.devices_of,
        "policies": settings.policy_of,
    }
    return builders[section](table)


def _good(section: str, table: Table) -> dict[str, Any]:
    """Options with which a section can be built, to try every given option with."""
    if section != "partition" or table["name"] in OWN_CLIENTS:
        return {}
    clients = table.get("num_clients", 0)
    return {"num_clients": clients if clients >= 1 else _MANY_CLIENTS}


def _least_problems(section: str, table: Table, path: KeyPath) -> list[Problem]:
    """A seed or a history below 0."""
    what = {"seed": "a whole number", "history": "a number of rounds"}
    return [
        Problem((*path, key), f"[{section}]: {key!r} must be {words} of at least 0. Got {table[key]}.")
        for key, words in what.items()
        if section != "policies" and isinstance(table.get(key), int) and table[key] < 0
    ]


def _plain_problems(section: str, table: Table, path: KeyPath) -> list[Problem]:
    """Problems of a section that is one dataclass, such as [local] or [waiting]."""
    owner = f"[{section}]"
    problems = _option_problems(owner, table, options_of(section), path)
    if section in _FINITE:
        problems += _finite_problems(owner, table, path)
    if problems:
        return problems
    # Local training has required options, so they cannot be tried one by one.
    good: dict[str, Any] | None = None if section == "local" else {}
    return _value_problems(owner, partial(typed, _PLAIN[section]), table, path, good)


def _time_problems(content: Table) -> list[Problem]:
    """Settings that need a clock, or a budget, where there is none."""
    problems = []
    if content.get("waiting") and "devices" not in content:
        problems.append(
            Problem(("waiting",), "[waiting] needs a clock: add the section [devices], such as name = 'phones'.")
        )
    overcommit = content.get("waiting", {}).get("overcommit", 1)
    if overcommit != 1 and "budget" not in content["run"]:
        problems.append(Problem(("waiting", "overcommit"), "[waiting]: overcommit needs a budget in [run]."))
    process = content.get("availability", {})
    if process.get("clock") and (process.get("name") != "trace" or "devices" not in content):
        message = "[availability]: clock = true needs device logs (name = 'trace') and the section [devices]."
        problems.append(Problem(("availability", "clock"), message))
    return problems


def run_problems(run: Table) -> list[Problem]:
    """Problems of the section [run]."""
    problems = _option_problems("[run]", run, options_of("run"), ("run",))
    return problems or _value_problems("[run]", settings.run_of, run, ("run",), {"rounds": 10**9, "losses_every": 1})


def _policies_problems(content: Table) -> list[Problem]:
    problems: list[Problem] = []
    labels: dict[str, int] = {}
    for position, table in enumerate(content["policies"]):
        path: KeyPath = ("policies", position)
        found = _named_problems("policies", table, path)
        for section in ("local", "server"):
            base = content.get(section, {})
            if not found and section in table and (not base or not _plain_problems(section, base, (section,))):
                found += _plain_problems(section, {**base, **table[section]}, (*path, section))
        problems += found
        label = table.get("label", table.get("name"))
        if isinstance(label, str) and "," in label:
            message = f"A label must do without commas, which separate names in --only. Got {label!r}."
            problems.append(Problem((*path, "label"), message))
        if isinstance(label, str) and has_control_characters(label):
            message = f"A label must do without control characters, which terminals obey. Got {label!r}."
            problems.append(Problem((*path, "label"), message))
        if isinstance(label, str) and labels.setdefault(label, position) != position:
            problems.append(
                Problem(path, f"Two policies are called {label!r}: give this one a label = '...' of its own.")
            )
    return problems


# Keys, types and values.


def _option_problems(owner: str, given: Table, known: list[Option] | None, path: KeyPath) -> list[Problem]:
    """Unknown keys, wrong types and missing keys."""
    if known is None:
        return []
    by_name = {option.name: option for option in known}
    problems = []
    for key, value in given.items():
        if key not in by_name:
            listing = ", ".join(by_name) or "none"
            problems.append(
                Problem((*path, key), f"{owner} has no key {key!r}.{nearest(key, by_name)} Known keys: {listing}.")
            )
        elif not _fits(value, by_name[key].hint):
            message = f"{owner}: {key!r} must be {_expected(by_name[key].hint)}. Got {value!r}."
            problems.append(Problem((*path, key), message))
        elif isinstance(value, Mapping):
            nested = [part for part in alternatives(by_name[key].hint) if is_dataclass(part)]
            if nested:
                problems += _option_problems(f"{owner}.{key}", value, _fields(nested[0]), (*path, key))
    for option in known:
        if option.required and option.name not in given:
            problems.append(Problem(path, f"{owner} needs the key {option.name!r}: {_expected(option.hint)}."))
    return problems


def _fits(value: Any, hint: Any) -> bool:
    """Whether a TOML value can stand for an argument of this type; True where the type cannot be checked."""
    return any(_fits_one(value, alternative) for alternative in alternatives(hint))


def _fits_one(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return value in typing.get_args(hint)
    if hint is Any or isinstance(hint, (str, typing.TypeVar)):
        return True
    if hint in (None, type(None)):
        return value is None
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint in (str, Path):
        return isinstance(value, str)
    if is_dataclass(hint):
        return isinstance(value, Mapping)
    if origin in (list, tuple, Sequence) or hint in (list, tuple, Sequence):
        inner = [part for part in typing.get_args(hint) if part is not ...]
        return isinstance(value, (list, tuple)) and (
            not inner or all(any(_fits(item, part) for part in inner) for item in value)
        )
    if origin in (dict, Mapping) or hint in (dict, Mapping):
        return isinstance(value, Mapping)
    return True


_WORDS: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "true or false"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    Path: ("a path", "paths"),
}


def _expected(hint: Any) -> str:
    """What a value of this type looks like, in words."""
    return " or ".join(dict.fromkeys(_words(part) for part in alternatives(hint) if part not in (None, type(None))))


def _words(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(repr(value) for value in typing.get_args(hint))
    if hint in _WORDS:
        return _WORDS[hint][0]
    if is_dataclass(hint):
        return "a table with " + ", ".join(item.name for item in fields(hint) if item.init)
    if origin in (list, tuple, Sequence) or hint in (list, tuple):
        inner = [part for part in typing.get_args(hint) if part is not ...]
        return f"a list of {_WORDS[inner[0]][1]}" if inner and inner[0] in _WORDS else "a list"
    return "a value"


def _finite_problems(owner: str, table: Table, path: KeyPath) -> list[Problem]:
    """NaN and infinity, at any depth."""
    problems: list[Problem] = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            problems += _finite_problems(f"{owner}.{key}", value, (*path, key))
            continue
        numbers = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            problems.append(Problem((*path, key), f"{owner}: {key!r} must be finite. Got {value}."))
    return problems


def _value_problems(
    owner: str, build: Callable[[Table], object], given: Table, path: KeyPath, good: Table | None
) -> list[Problem]:
    """Why something cannot be built: every option that is refused by itself, with its own path.

    `good` are options with which it can be built, to try every given one with; None: they are not tried singly.
    """
    error = _error(build, given)
    if error is None:
        return []
    if good is not None and _error(build, good) is None:
        alone = {key: _error(build, {**good, key: value}) for key, value in given.items()}
        if any(alone.values()):
            return [Problem((*path, key), f"{owner}: {text}") for key, text in alone.items() if text is not None]
    # The values are refused together: blame the option that the message starts with, or the only one it names.
    named = [key for key in given if re.search(rf"\b{re.escape(key)}\b", error)]
    first = [key for key in named if error.startswith(key)]
    blamed = first or named
    return [Problem((*path, blamed[0]) if len(blamed) == 1 else path, f"{owner}: {error}")]


def _error(build: Callable[[Table], object], options: Table) -> str | None:
    """Why something cannot be built, or None."""
    try:
        build(options)
    except MissingDependency:
        raise
    except (FedpickError, ArithmeticError, TypeError, ValueError) as error:  # OverflowError: 10^400 as a float
        return str(error)
    return None
