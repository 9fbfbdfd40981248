"""What can be wrong with the content of a spec: sections, names, options, values and their combinations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from fedpick.core.errors import FedpickError, MissingDependency
from fedpick.core.imports import is_import_path
from fedpick.experiments.options import Option, Problem, Registries, check_options, nearest
from fedpick.experiments.values import MANY_CLIENTS, finite_problems, value_problems

__all__ = ["POLICY_KEYS", "content_problems", "run_problems", "section_problems"]

Path = tuple[str | int, ...]

_SETTING = ("data", "partition", "task", "local", "server", "availability", "faults", "simulator")
_SECTIONS = ("title", *_SETTING, "run", "policies")
_RUN_KEYS = [
    Option("rounds", int, required=True),
    Option("budget", int),
    Option("seeds", int | list[int]),
    Option("evaluate_every", int),
    Option("losses_every", int),
    Option("local_accuracy_every", int),
    Option("validation_every", int),
    Option("targets", list[float]),
    Option("loss_targets", list[float]),
]
# Elsewhere some numbers may be infinite or unknown, and what they are given to says which: kappa2, deadline.
_FINITE = ("data", "partition", "task", "local", "server", "simulator")
# Sections whose name may be `package.module:attribute`, and what that is.
_TARGETS = {"data": "function", "task": "function", "policies": "Class"}
# Sections whose values are checked last.
_LATE = ("data", "partition", "task")
# Keys that are not handed to the thing itself.
_OWN_SEED = Option("seed", int)
_HISTORY = Option("history", int)
POLICY_KEYS = [Option("name", str), Option("label", str), Option("local", dict), Option("server", dict)]


def section_problems(content: Mapping[str, Any]) -> list[Problem]:
    """Sections that are unknown, missing or of the wrong kind."""
    problems = [
        Problem((key,), f"There is no section {key!r}.{nearest(key, _SECTIONS)} Known: {', '.join(_SECTIONS)}.")
        for key in content
        if key not in _SECTIONS
    ]
    for key in ("data", "partition", "task", "local", "run", "policies"):
        if key not in content:
            problems.append(Problem((key,), f"The section [{key}] is missing."))
    for key, value in content.items():
        if key == "title":
            if not isinstance(value, str):
                problems.append(Problem((key,), f"title must be text. Got {value!r}."))
        elif key == "policies":
            if not isinstance(value, list) or not value or not all(isinstance(entry, dict) for entry in value):
                problems.append(
                    Problem((key,), "policies must be tables, at least one: [[policies]] with name = '...'")
                )
        elif key in _SECTIONS and not isinstance(value, dict):
            problems.append(Problem((key,), f"{key} must be a section, [{key}]. Got {value!r}."))
    return problems


def content_problems(content: Mapping[str, Any], known: Registries) -> list[Problem]:
    """Everything wrong inside the sections."""
    # Names first, in every section: they are what is mistyped most.
    problems: list[Problem] = []
    for section in ("data", "partition", "availability"):
        if section in content:
            extra = [_OWN_SEED, _HISTORY] if section == "availability" else [_OWN_SEED]
            problems += _named_problems(section, content[section], known, (section,), extra=extra)
            problems += _own_seed_problems(section, content[section])
    problems += _history_problems(content.get("availability", {}))
    problems += _name_problems("task", content["task"], known, ("task",))
    for section in ("local", "server", "faults", "simulator"):
        options = content.get(section, {})
        if options or section == "local":
            problems += _settings_problems(section, options, known, (section,))
    problems += run_problems(content["run"])
    problems += _policy_problems(content, known)
    if not all(problem.value for problem in problems):
        return problems
    # What remains needs JAX and scikit-learn: a typo must not wait for them.
    for section in _LATE:
        problems += _late_problems(section, content[section], known)
    return problems


def _late_problems(section: str, table: Mapping[str, Any], known: Registries) -> list[Problem]:
    """What is wrong with the values of a section whose names and keys are good; of a task, with its keys, too."""
    problems: list[Problem] = []
    given = {key: value for key, value in table.items() if key not in ("name", "seed")}
    if section == "task":
        problems = _named_problems(section, table, known, (section,), extra=[])
    elif finite_problems("", given, ()):
        return []  # told already
    if problems or section not in known.build:
        return problems
    clients = table.get("num_clients", 0)
    good: dict[str, Any] = {"num_clients": clients if clients >= 1 else MANY_CLIENTS} if section == "partition" else {}
    if table["name"] == "natural":
        good = {}
    build = partial(known.build[section], table["name"])
    return value_problems(f"[{section}] {table['name']}", build, given, (section,), good)


def _name_problems(section: str, table: Mapping[str, Any], known: Registries, path: Path) -> list[Problem]:
    name = table.get("name")
    if not isinstance(name, str):
        return [Problem(path, f"[{section}] needs a name, as text. Got {name!r}.")]
    if section in _TARGETS and is_import_path(name):
        return []  # imported when its options are asked for
    names = list(known.names[section]())
    kind = {"data": "data set", "policies": "policy", "availability": "availability process"}.get(section, section)
    if name not in names:
        message = f"There is no {kind} named {name!r}.{nearest(name, names)} Known: {', '.join(sorted(names))}."
        if section in _TARGETS:
            message += f" Your own is named 'package.module:{_TARGETS[section]}'."
        return [Problem((*path, "name"), message)]
    return []


def _named_problems(
    section: str, table: Mapping[str, Any], known: Registries, path: Path, extra: list[Option]
) -> list[Problem]:
    if problems := _name_problems(section, table, known, path):
        return problems
    name = table["name"]
    own = [Option("name", str), *extra]
    skipped = {option.name for option in own}
    given = {key: value for key, value in table.items() if key not in skipped}
    try:
        options = known.options[section](name)
    except MissingDependency:
        raise
    except FedpickError as reason:  # something of one's own that cannot be imported
        return [Problem((*path, "name"), f"[{section}]: {reason}")]
    problems = check_options(f"[{section}] {name}", {k: table[k] for k in table if k in skipped}, own, path)
    problems += check_options(f"[{section}] {name}", given, options, path)
    if section in _FINITE:
        problems += finite_problems(f"[{section}] {name}", given, path)
    if not problems and section in known.build and section not in _LATE:
        problems = value_problems(f"[{section}] {name}", partial(known.build[section], name), given, path, {})
    return problems


def _own_seed_problems(section: str, table: Mapping[str, Any]) -> list[Problem]:
    seed = table.get("seed", 0)
    if isinstance(seed, int) and seed < 0:
        message = f"[{section}]: 'seed' must be a whole number of at least 0. Got {seed}."
        return [Problem((section, "seed"), message, value=True)]
    return []


def _history_problems(table: Mapping[str, Any]) -> list[Problem]:
    history = table.get("history", 0)
    if isinstance(history, int) and history < 0:
        message = f"[availability]: 'history' must be a number of rounds of at least 0. Got {history}."
        return [Problem(("availability", "history"), message, value=True)]
    return []


def _settings_problems(section: str, table: Mapping[str, Any], known: Registries, path: Path) -> list[Problem]:
    problems = check_options(f"[{section}]", table, known.options[section](""), path)
    if section in _FINITE:
        problems += finite_problems(f"[{section}]", table, path)
    if not problems and section in known.build:
        # Local training cannot do without some of its options: there they are not tried one by one.
        good: dict[str, Any] | None = None if section == "local" else {}
        problems = value_problems(f"[{section}]", known.build[section], table, path, good)
    return problems


def run_problems(run: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with the section [run]."""
    problems = check_options("[run]", run, _RUN_KEYS, ("run",))
    if problems:
        return problems

    def refuse(key: str, message: str) -> None:
        problems.append(Problem(("run", key), f"[run]: {message}", value=True))

    for key in ("rounds", "budget", "evaluate_every", "losses_every", "local_accuracy_every", "validation_every"):
        if key in run and run[key] < 1:
            refuse(key, f"{key!r} must be a whole number of at least 1. Got {run[key]}.")
    every = run.get("evaluate_every", 1)
    if not problems and every > run["rounds"]:
        refuse("evaluate_every", f"evaluate_every = {every} evaluates none of the {run['rounds']} rounds.")
    seeds = run.get("seeds", [0])
    if isinstance(seeds, int) and seeds < 1:
        refuse("seeds", f"'seeds' must be a number of at least 1 or a list of seeds. Got {seeds}.")
    if isinstance(seeds, list):
        if not seeds or min(seeds) < 0:
            refuse("seeds", f"'seeds' must be whole numbers of at least 0, at least one. Got {seeds}.")
        if len(set(seeds)) < len(seeds):
            refuse("seeds", f"every seed may be there once. Got {seeds}.")
    for target in run.get("targets", []):
        if not 0 < target <= 1:
            refuse("targets", f"a target is a test accuracy in (0, 1], such as 0.69. Got {target}.")
    for target in run.get("loss_targets", []):
        if not math.isfinite(target):
            refuse("loss_targets", f"a loss target is a finite number, such as 0.7. Got {target}.")
    if run.get("loss_targets") and "losses_every" not in run:
        refuse("loss_targets", "loss_targets need everybody's loss: set losses_every, such as losses_every = 1.")
    return problems


def _policy_problems(content: Mapping[str, Any], known: Registries) -> list[Problem]:
    problems: list[Problem] = []
    labels: dict[str, int] = {}
    for position, table in enumerate(content["policies"]):
        path = ("policies", position)
        found = _named_problems("policies", table, known, path, extra=POLICY_KEYS[1:])
        if not found:
            found = _policy_value_problems(content, table, known, path)
        problems += found
        label = table.get("label", table.get("name"))
        if isinstance(label, str) and "," in label:
            message = f"A label must do without commas, which separate names in --only. Got {label!r}."
            problems.append(Problem((*path, "label"), message))
        if isinstance(label, str) and labels.setdefault(label, position) != position:
            problems.append(
                Problem(path, f"Two policies are called {label!r}: give this one a label = '...' of its own.")
            )
    return problems


def _policy_value_problems(
    content: Mapping[str, Any], table: Mapping[str, Any], known: Registries, path: Path
) -> list[Problem]:
    own = {option.name for option in POLICY_KEYS}
    parameters = {key: value for key, value in table.items() if key not in own}
    build = partial(known.build_policy, table["name"])
    if problems := value_problems(f"policy {table['name']}", build, parameters, path, {}):
        return problems
    for section in ("local", "server"):
        if section in table:
            merged = {**content.get(section, {}), **table[section]}
            problems += _settings_problems(section, merged, known, (*path, section))
    return problems
