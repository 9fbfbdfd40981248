"""Reading options that are more than one word or number."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable
from typing import Any

from fedpick.core.errors import InvalidInput, unknown_name

__all__ = ["complete_from", "names_list", "numbers_list", "one_of", "seeds_option", "settings_list"]


def names_list(text: str | None) -> list[str] | None:
    """Names between commas."""
    if text is None:
        return None
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise InvalidInput("Give at least one name, several by commas.")
    return names


def numbers_list(text: str | None, option: str) -> list[float] | None:
    """Numbers between commas."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise InvalidInput(f"{option} must be numbers between commas, such as 0.6,0.7. Got {text!r}.") from error


def seeds_option(text: str | None) -> int | list[int] | None:
    """How many seeds ("3"), or which ones ("1,2,5"; "7," for the one seed 7)."""
    if text is None:
        return None
    try:
        seeds = [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise InvalidInput(f"--seeds must be a number of seeds, or seeds between commas. Got {text!r}.") from error
    if not seeds:
        raise InvalidInput(f"--seeds must be a number of seeds, or seeds between commas. Got {text!r}.")
    return seeds if "," in text else seeds[0]


def settings_list(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """`section.key=value`, the value as in TOML; a bare word is text."""
    changes: dict[str, dict[str, Any]] = {}
    for text in texts:
        path, found, value = text.partition("=")
        section, dot, key = path.strip().partition(".")
        if not (found and dot and key):
            raise InvalidInput(f"--set must look like section.key=value, such as partition.alpha=0.3. Got {text!r}.")
        try:
            parsed = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value.strip()
        changes.setdefault(section, {})[key] = parsed
    return changes


def one_of(value: str, known: Iterable[str], kind: str) -> None:
    """Refuse a word that is none of the known ones."""
    if value not in (names := list(known)):
        raise unknown_name(kind, value, names)


def complete_from(section: str) -> Callable[[str], list[str]]:
    """Names for the shell to complete; after a comma, the last one."""

    def complete(incomplete: str) -> list[str]:
        from fedpick.experiments.validation import names_of

        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names_of(section) if name.startswith(last)]

    return complete
