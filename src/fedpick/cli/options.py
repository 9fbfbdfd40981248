"""Parse options that hold several values, and complete names in the shell."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable
from typing import Any

from fedpick.core.errors import InvalidInput, unknown_name

__all__ = ["complete_from", "names_list", "numbers_list", "one_of", "seeds_option", "settings_list", "values_list"]


def names_list(text: str | None) -> list[str] | None:
    """Split names at commas."""
    if text is None:
        return None
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise InvalidInput("Give at least one name; separate several with commas.")
    return names


def numbers_list(text: str | None, option: str) -> list[float] | None:
    """Split numbers at commas."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise InvalidInput(f"{option} must be numbers separated by commas, such as 0.6,0.7. Got {text!r}.") from error


def seeds_option(text: str | None) -> int | list[int] | None:
    """Parse a number of seeds ("3") or a list of seeds ("1,2,5"; "7," is the single seed 7)."""
    if text is None:
        return None
    try:
        seeds = [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise InvalidInput(f"--seeds must be a number of seeds, or seeds separated by commas. Got {text!r}.") from error
    if not seeds:
        raise InvalidInput(f"--seeds must be a number of seeds, or seeds separated by commas. Got {text!r}.")
    return seeds if "," in text else seeds[0]


def settings_list(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Parse `section.key=value`; more dots are tables in tables. The value is TOML; a bare word is text."""
    changes: dict[str, dict[str, Any]] = {}
    for text in texts:
        path, found, value = text.partition("=")
        section, dot, key = path.strip().partition(".")
        if not (found and dot and all(key.split("."))):
            raise InvalidInput(f"--set must look like section.key=value, such as partition.alpha=0.3. Got {text!r}.")
        parsed = _toml_value(value)
        *tables, last = key.split(".")
        place = changes.setdefault(section, {})
        for name in tables:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise InvalidInput(f"--set sets {name!r} to a value and to a table of values. Got {text!r}.")
        if isinstance(place.get(last), dict):
            raise InvalidInput(f"--set sets {last!r} to a value and to a table of values. Got {text!r}.")
        place[last] = parsed
    return changes


def values_list(texts: Iterable[str]) -> dict[str, list[Any]]:
    """Parse `key=value,value`. The values are TOML; bare words are texts."""
    found: dict[str, list[Any]] = {}
    for text in texts:
        key, given, values = text.partition("=")
        key = key.strip()
        if not (given and key and values.strip()):
            raise InvalidInput(f"--try must look like key=value,value, such as num_candidates=4,8. Got {text!r}.")
        if key in found:
            raise InvalidInput(f"--try names {key} twice. Give all its values at once, separated by commas.")
        found[key] = [_toml_value(value) for value in values.split(",") if value.strip()]
    return found


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text.strip()


def one_of(value: str, known: Iterable[str], kind: str) -> None:
    """Raise unless the value is a known name."""
    if value not in (names := list(known)):
        raise unknown_name(kind, value, names)


def complete_from(section: str) -> Callable[[str], list[str]]:
    """Complete names in the shell; in a list, the name after the last comma."""

    def complete(incomplete: str) -> list[str]:
        from fedpick.experiments.validation import names_of

        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names_of(section) if name.startswith(last)]

    return complete
