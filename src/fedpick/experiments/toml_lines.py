"""Where each key of a TOML text stands. `tomllib` parses, but does not say on which line a value was."""

from __future__ import annotations

import re
from collections import Counter

__all__ = ["key_lines", "line_of"]

Path = tuple[str | int, ...]

_KEY = r"(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')"
_DOTTED = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
_TABLE = re.compile(rf"^\s*\[\s*({_DOTTED})\s*\]\s*(?:#.*)?$")
_TABLE_ARRAY = re.compile(rf"^\s*\[\[\s*({_DOTTED})\s*\]\]\s*(?:#.*)?$")
_ASSIGNMENT = re.compile(rf"^\s*({_DOTTED})\s*=")
_TRIPLE = re.compile(r"\"\"\"|'''")


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in re.findall(_KEY, dotted))


def key_lines(text: str) -> dict[Path, int]:
    """Line (from 1) of every table header and `key =` of a valid TOML text; entries of an array of tables are numbered.

    >>> key_lines("[run]\\nrounds = 3\\n[[policies]]\\nname = 'uniform'")
    {('run',): 1, ('run', 'rounds'): 2, ('policies', 0): 3, ('policies', 0, 'name'): 4}
    """
    found: dict[Path, int] = {}
    entries: Counter[tuple[str, ...]] = Counter()
    table: Path = ()
    in_text = False
    for number, line in enumerate(text.splitlines(), start=1):
        opened = in_text
        if len(_TRIPLE.findall(line)) % 2:
            in_text = not in_text
        if opened:
            continue
        if match := _TABLE_ARRAY.match(line):
            parts = _parts(match.group(1))
            table = (*parts, entries[parts])
            entries[parts] += 1
            found.setdefault(table, number)
        elif match := _TABLE.match(line):
            table = _below_latest(_parts(match.group(1)), entries)
            found.setdefault(table, number)
        elif match := _ASSIGNMENT.match(line):
            found.setdefault((*table, *_parts(match.group(1))), number)
    return found


def _below_latest(parts: tuple[str, ...], entries: Counter[tuple[str, ...]]) -> Path:
    """`[policies.local]` after a `[[policies]]` belongs to the latest entry of that array."""
    for size in range(len(parts), 0, -1):
        if count := entries[parts[:size]]:
            return (*parts[:size], count - 1, *parts[size:])
    return parts


def line_of(lines: dict[Path, int], path: Path) -> int | None:
    """The line of a path, or of the nearest thing around it that has one."""
    for size in range(len(path), 0, -1):
        if path[:size] in lines:
            return lines[path[:size]]
    return None
