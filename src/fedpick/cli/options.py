"""Parse options that hold several values, and complete names in the shell."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable
from typing import Any

from fedpick.core.errors import InvalidInput, unknown_name

__all__ = ["complete_from", "names_list", "numbers_list", "one_of", "seeds_option", "settings_list"]


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
        try:
            parsed = tomllib.loads(f"value = {value}")["value"]
        except (tomllib.TOMLDecodeError, RecursionError):
            parsed = value.strip()
        *tables, last = key.split(".")
        place = changes.setdefault(section, {})
        for name in tables:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise InvalidInput(f"--set sets {name!r} to a value and to a table of values. Got {text!r}.")
        place[last] = parsed
    return changes


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
