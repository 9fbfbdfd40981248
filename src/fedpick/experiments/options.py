"""Which sections and keys a spec may have: read off the very signatures that will be called, so they cannot drift.

Only cheap modules are imported here (never JAX): a typo must be refused at once.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union

from fedpick.core import registry
from fedpick.core.errors import FedpickError, MissingDependency

__all__ = [
    "Option",
    "Problem",
    "Registries",
    "alternatives",
    "build_settings",
    "check_options",
    "expected",
    "first_error",
    "fits",
    "nearest",
    "options_of",
]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a spec, and where."""

    path: tuple[str | int, ...]
    message: str
    value: bool = False
    """Of a value that was understood; otherwise a section, name, key or type is wrong."""


@dataclass(frozen=True)
class Option:
    """One key that a section may have."""

    name: str
    hint: Any = Any
    required: bool = False


def nearest(name: str, known: Iterable[str]) -> str:
    """ " Did you mean 'x'?", or nothing where no name is near."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def _hints(target: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(target)
    except Exception:  # a name only known to type checkers: go without types, the callee still checks values
        return {}


def options_of(target: Any, skip: Iterable[str] = ()) -> list[Option] | None:
    """The keyword options of a dataclass or function; None where it takes any (`**options`)."""
    skipped = {*skip, "self", "cls"}
    if is_dataclass(target):
        hints = _hints(target)
        return [
            Option(item.name, hints.get(item.name, Any), item.default is MISSING and item.default_factory is MISSING)
            for item in fields(target)
            if item.init and item.name not in skipped
        ]
    parameters = inspect.signature(target).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    hints = _hints(target)
    return [
        Option(parameter.name, hints.get(parameter.name, Any), parameter.default is parameter.empty)
        for parameter in parameters
        if parameter.name not in skipped and parameter.kind is not parameter.VAR_POSITIONAL
    ]


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the hint alone."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return tuple(part for alternative in typing.get_args(hint) for part in alternatives(alternative))
    return (hint,)


def fits(value: Any, hint: Any) -> bool:
    """Whether a TOML value can stand for an argument of this type; True where the type says nothing checkable."""
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
            not inner or all(any(fits(item, part) for part in inner) for item in value)
        )
    if origin in (dict, Mapping) or hint in (dict, Mapping):
        return isinstance(value, Mapping)
    return True


def expected(hint: Any) -> str:
    """What a value of this type looks like, in words."""
    return " or ".join(dict.fromkeys(_words(part) for part in alternatives(hint) if part not in (None, type(None))))


def _words(hint: Any) -> str:
    plain = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
    origin = typing.get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(repr(value) for value in typing.get_args(hint))
    if hint in plain:
        return plain[hint]
    if is_dataclass(hint):
        return "a table with " + ", ".join(item.name for item in fields(hint) if item.init)
    if origin in (list, tuple, Sequence) or hint in (list, tuple):
        inner = [part for part in typing.get_args(hint) if part is not ...]
        return f"a list of {_words(inner[0])}s".replace("text s", "texts") if inner else "a list"
    return "a value"


def check_options(
    owner: str, given: Mapping[str, Any], known: list[Option] | None, path: tuple[str | int, ...]
) -> list[Problem]:
    """What is wrong with some options: unknown keys, wrong types, missing ones."""
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
        elif not fits(value, by_name[key].hint):
            problems.append(
                Problem(
                    (*path, key),
                    f"{owner}: {key!r} must be {expected(by_name[key].hint)}. Got {value!r}.",
                )
            )
        elif isinstance(value, Mapping):
            nested = [part for part in alternatives(by_name[key].hint) if is_dataclass(part)]
            if nested:
                problems += check_options(f"{owner}.{key}", value, options_of(nested[0]), (*path, key))
    for option in known:
        if option.required and option.name not in given:
            problems.append(Problem(path, f"{owner} needs the key {option.name!r}: {expected(option.hint)}."))
    return problems


_SIMULATOR_OPTIONS = [
    Option("losses_on", Literal["train", "validation", "test", "all"]),
    Option("shards", int),
    Option("group", int),
    Option("sketch", int),
    Option("noise_examples", int),
]


@dataclass(frozen=True)
class Registries:
    """The names there are and the options each takes. Tests put their own in place."""

    names: Mapping[str, Callable[[], Sequence[str]]]
    """section -> names: data, partition, task, availability, policies."""
    options: Mapping[str, Callable[[str], list[Option] | None]]
    """section -> (name -> its options); sections without names (local, server, faults, simulator) ignore the name."""
    build_policy: Callable[..., Any] = registry.get
    build: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """section -> constructor that checks values: local, server, faults, availability, simulator, data, partition,
    task. The last three are asked last: they may import packages that a mistyped name need not wait for."""

    @classmethod
    def installed(cls) -> Registries:
        """Everything that this installation of fedpick knows."""
        return cls(
            names={
                "data": lambda: _module("fedpick.data").names(),
                "partition": lambda: _module("fedpick.data").partition_names(),
                "task": lambda: _module("fedpick.sim.tasks").names(),
                "availability": lambda: _module("fedpick.availability").names(),
                "policies": registry.names,
            },
            options={
                "data": _data_options,
                "partition": _partition_options,
                "task": _task_options,
                "availability": lambda name: options_of(_module("fedpick.availability").load(name)),
                "policies": lambda name: options_of(registry.load(name)),
                "local": lambda _: options_of(_module("fedpick.sim.settings").LocalTraining),
                "server": lambda _: options_of(_module("fedpick.sim.settings").ServerStep),
                "faults": lambda _: options_of(_module("fedpick.sim.faults").Faults),
                "simulator": lambda _: _SIMULATOR_OPTIONS,
            },
            build={
                "local": lambda **options: _settings("fedpick.sim.settings", "LocalTraining", options),
                "server": lambda **options: _settings("fedpick.sim.settings", "ServerStep", options),
                "faults": lambda **options: _settings("fedpick.sim.faults", "Faults", options),
                "availability": lambda name, **options: _module("fedpick.availability").get(name, **options),
                "simulator": lambda **options: _module("fedpick.experiments.values").check_simulator(**options),
                "data": lambda name, **options: _module("fedpick.experiments.values").check_data(name, **options),
                "partition": lambda name, **options: _module("fedpick.experiments.values").check_partition(
                    name, **options
                ),
                "task": lambda name, **options: _module("fedpick.experiments.values").check_task(name, **options),
            },
        )


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("fedpick"):
            raise
        raise MissingDependency(
            f"Experiments need {error.name!r}, which is not installed. Install it with: pip install 'fedpick[sim]'"
        ) from error


def _data_options(name: str) -> list[Option] | None:
    return options_of(_module("fedpick.data.registry").loader_of(name), skip=["seed"])


def _task_options(name: str) -> list[Option] | None:
    """The one check that needs JAX: asked last. The data decide the input's shape and the number of classes."""
    return options_of(_module("fedpick.sim.tasks").builder_of(name), skip=["input_shape", "num_classes"])


_PARTITION_OPTIONS = [Option("holdout", float), Option("split", list[float])]


def _partition_options(name: str) -> list[Option] | None:
    """What every partition takes, and the keyword-only options of the dealer behind this one."""
    dealer = _module("fedpick.data.partition").dealer_of(name)
    fixed = set(getattr(dealer, "keywords", {}))
    function = getattr(dealer, "func", dealer)
    own = [
        option
        for option in options_of(function) or []
        if inspect.signature(function).parameters[option.name].kind is inspect.Parameter.KEYWORD_ONLY
        and option.name not in fixed
    ]
    clients = Option("num_clients", int, required=name != "natural")
    return [clients, *_PARTITION_OPTIONS, *own]


def _settings(module: str, class_name: str, options: Mapping[str, Any]) -> Any:
    """A settings dataclass from TOML values: nested tables become their own dataclasses."""
    settings_class = getattr(_module(module), class_name)
    return build_settings(settings_class, options)


def build_settings(settings_class: Any, options: Mapping[str, Any]) -> Any:
    """A dataclass from a TOML table, with nested tables built where the field's type is a dataclass."""
    hints = _hints(settings_class)
    values: dict[str, Any] = {}
    for key, value in options.items():
        nested = [part for part in alternatives(hints.get(key, Any)) if is_dataclass(part)]
        if nested and isinstance(value, Mapping):
            values[key] = build_settings(nested[0], value)
        else:
            values[key] = tuple(value) if isinstance(value, list) else value
    return settings_class(**values)


def first_error(build: Callable[..., Any], *arguments: Any, **options: Any) -> str | None:
    """Why something cannot be built, or None."""
    try:
        build(*arguments, **options)
    except MissingDependency:
        raise
    except (FedpickError, TypeError, ValueError) as error:
        return str(error)
    return None
