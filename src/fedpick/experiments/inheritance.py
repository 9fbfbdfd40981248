"""Spec files that extend others and list variants of themselves; see `fedpick.experiments.spec` for the format.

A file resolves to one experiment per variant: the content, and the place (file and line) of every key in it, so that a
mistake is reported where it stands.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedpick.experiments.toml import KeyPath, key_lines
from fedpick.experiments.validation import SHARED_KEYS, Place, SpecError, nearest

__all__ = ["Resolved", "experiment_names", "merge", "place_of", "resolve", "split_variant"]

Places = Mapping[KeyPath, Place]


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """An experiment, or a part of one, as a file gives it."""

    source: str
    content: Mapping[str, Any] = field(default_factory=dict)
    places: Places = field(default_factory=dict)
    variant: str = ""

    def under(self, over: Resolved) -> Resolved:
        """This with `over` merged over it."""
        content, places = dict(self.content), dict(self.places)
        for key, value in over.content.items():
            if key == "policies":
                continue
            old = content.get(key)
            if isinstance(old, Mapping) and isinstance(value, Mapping):
                if key in SHARED_KEYS and value.get("name", old.get("name")) != old.get("name"):
                    old = {name: item for name, item in old.items() if name in SHARED_KEYS[key]}
                value = _merged(old, value)
            content[key] = value
        places |= {path: place for path, place in over.places.items() if path[0] != "policies"}
        if "policies" in over.content:
            entries = _policies(self, over)
            content["policies"] = [entry for entry, _ in entries]
            places = {path: place for path, place in places.items() if path[0] != "policies"}
            for number, (_, own) in enumerate(entries):
                places |= {("policies", number, *path): place for path, place in own.items()}
        return Resolved(source=over.source, content=content, places=places, variant=over.variant)


def merge(base: Mapping[str, Any], changes: Mapping[str, Any], source: str = "") -> dict[str, Any]:
    """The content of a spec with changes, merged as a file is merged over the one that it extends.

    `source` is where the changes come from, for error messages.

    >>> merge({"task": {"name": "mlp", "rate": 0.1}, "run": {"rounds": 3}}, {"task": {"name": "logistic"}})
    {'task': {'name': 'logistic'}, 'run': {'rounds': 3}}
    """
    return dict(Resolved(source="", content=base).under(Resolved(source=source, content=changes)).content)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _policies(base: Resolved, over: Resolved) -> list[tuple[Any, Places]]:
    """Every policy of `over` merged over `base`, with the places of its keys.

    A list replaces the inherited policies, and text in it is the label of one of them. A table adjusts inherited
    policies by label, or adds new ones.
    """
    inherited: dict[str, tuple[Any, Places]] = {}
    for number, table in enumerate(base.content.get("policies", [])):
        if isinstance(table, Mapping):
            label = table.get("label", table.get("name"))
            inherited[str(label)] = (table, _below(base.places, ("policies", number)))
    given = over.content["policies"]
    if isinstance(given, Mapping):
        for label, table in given.items():
            places = _below(over.places, ("policies", label))
            if not isinstance(table, Mapping):
                message = f"policies.{label} must be a table of hyper-parameters. Got {table!r}."
                raise SpecError([(places.get((), Place(over.source)), message)])
            if label in inherited:
                old, old_places = inherited[label]
                inherited[label] = (_merged(old, table), {**old_places, **places})
            elif "name" in table:
                inherited[label] = ({"label": label, **table}, places)
            else:
                message = f"There is no policy {label!r} to adjust.{nearest(label, inherited)} A new one needs a name."
                raise SpecError([(places.get((), Place(over.source)), message)])
        return list(inherited.values())
    entries: list[tuple[Any, Places]] = []
    for number, entry in enumerate(given if isinstance(given, list) else [given]):
        if not isinstance(entry, str):
            entries.append((entry, _below(over.places, ("policies", number))))
        elif entry in inherited:
            entries.append(inherited[entry])
        else:
            message = f"There is no inherited policy {entry!r}.{nearest(entry, inherited)}"
            raise SpecError([(place_of(over.places, ("policies",)) or Place(over.source), message)])
    return entries


def _below(places: Places, prefix: KeyPath) -> dict[KeyPath, Place]:
    """The places of everything below a path, as paths from there."""
    size = len(prefix)
    return {path[size:]: place for path, place in places.items() if path[:size] == prefix}


def place_of(places: Places, path: KeyPath) -> Place | None:
    """The place of a path, or of the nearest table around it."""
    for size in range(len(path), 0, -1):
        if path[:size] in places:
            return places[path[:size]]
    return None


def split_variant(path: str | Path) -> tuple[Path, str | None]:
    """FILE.toml#VARIANT -> the file and the variant.

    >>> split_variant("papers/fedcor.toml#2spc")
    (PosixPath('papers/fedcor.toml'), '2spc')
    """
    file, found, variant = str(path).partition(".toml#")
    return (Path(f"{file}.toml"), variant) if found else (Path(path), None)


def experiment_names(path: str | Path) -> list[str]:
    """The experiments of a file as `FILE.toml#VARIANT`, or the file itself if it has no variants."""
    file, _ = split_variant(path)
    return [f"{file}#{each.variant}" if each.variant else str(file) for each in resolve(path)]


def resolve(path: str | Path) -> list[Resolved]:
    """The experiments of a file: its variants, or itself; of `FILE.toml#VARIANT`, that one."""
    file, variant = split_variant(path)
    return [_named(each) for each in _select(*_read_chain(file), variant).values()]


def _named(experiment: Resolved) -> Resolved:
    """The experiment with the name of its variant filled into the title."""
    title = experiment.content.get("title")
    if not isinstance(title, str):
        return experiment
    return replace(experiment, content={**experiment.content, "title": title.replace("{variant}", experiment.variant)})


def _select(top: Resolved, variants: dict[str, Resolved], variant: str | None) -> dict[str, Resolved]:
    """All variants, or one of them, or the file itself if it has no variants."""
    if variant is None:
        return variants or {"": top}
    if variant not in variants:
        known = ", ".join(variants) or "none"
        message = f"There is no variant {variant!r}.{nearest(variant, variants)} Known: {known}."
        raise SpecError([(Place(top.source), message)])
    return {variant: variants[variant]}


def _read_chain(file: Path, extending: tuple[Path, ...] = ()) -> tuple[Resolved, dict[str, Resolved]]:
    """A file merged over those it extends, and its variants; `extending` are the files that extend it.

    Extending a file with variants extends every variant of it.
    """
    if file.resolve() in extending:
        circle = [*extending[extending.index(file.resolve()) :], file]
        names = ", which extends ".join(each.name for each in circle)
        raise SpecError([(Place(str(file)), f"The files extend each other in a circle: {names}.")])
    content, places = _read(file)
    source = str(file)
    extends, tables = content.pop("extends", None), content.pop("variants", {})
    if not isinstance(extends, str | None):
        message = f"extends must be the path of a file, as text. Got {extends!r}."
        raise SpecError([(places[("extends",)], message)])
    if not isinstance(tables, dict) or not all(isinstance(each, dict) for each in tables.values()):
        message = "variants must be tables: [variants.NAME] with the keys that differ."
        raise SpecError([(place_of(places, ("variants",)) or Place(source), message)])
    base, variants = Resolved(source=source), dict[str, Resolved]()
    if extends is not None:
        base_file, variant = split_variant(file.parent / extends)
        if not base_file.is_file():
            raise SpecError([(places[("extends",)], f"extends: there is no file {base_file}.")])
        base, variants = _read_chain(base_file, (*extending, file.resolve()))
        if variant is not None:
            base, variants = _select(base, variants, variant)[variant], {}
    own_places = {path: place for path, place in places.items() if path[0] not in ("extends", "variants")}
    own = Resolved(source=source, content=content, places=own_places)
    top = base.under(own)
    variants = {name: replace(each.under(own), variant=name) for name, each in variants.items()}
    for name, table in tables.items():
        below = {path: place for path, place in _below(places, ("variants", name)).items() if path}
        changes = Resolved(source=source, content=table, places=below, variant=name)
        variants[name] = variants.get(name, top).under(changes)
    return replace(top, variant=""), variants


def _read(file: Path) -> tuple[dict[str, Any], dict[KeyPath, Place]]:
    """The content of a TOML file and the place of every key."""
    source = str(file)
    try:
        text = file.read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except OSError as error:
        raise SpecError([(Place(source), f"the spec cannot be read: {error.strerror or error}.")]) from error
    except UnicodeDecodeError as error:
        raise SpecError([(Place(source), f"the spec is not UTF-8 text: {error}.")]) from error
    except tomllib.TOMLDecodeError as error:
        digits = str(error).partition("at line ")[2].partition(",")[0]  # tomllib says "(at line 3, column 5)"
        line = int(digits) if digits.isdigit() else None
        raise SpecError([(Place(source, line), f"not valid TOML: {error}.")]) from error
    except RecursionError as error:
        raise SpecError([(Place(source), "the spec nests tables or lists too deeply.")]) from error
    except ValueError as error:  # such as a number of more than 4,300 digits
        raise SpecError([(Place(source), f"the spec cannot be read: {error}.")]) from error
    return content, {path: Place(source, line) for path, line in key_lines(text).items()}
