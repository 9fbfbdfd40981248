"""TOML beyond `tomllib`: the line of every key, and writing."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from fedpick.core.errors import InvalidInput

__all__ = ["KeyPath", "key_lines", "toml_text"]

KeyPath = tuple[str | int, ...]

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_KEY = r"(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')"
_DOTTED = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
_TABLE = re.compile(rf"^\s*\[\s*({_DOTTED})\s*\]\s*(?:#.*)?$")
_TABLE_ARRAY = re.compile(rf"^\s*\[\[\s*({_DOTTED})\s*\]\]\s*(?:#.*)?$")
_ASSIGNMENT = re.compile(rf"^\s*({_DOTTED})\s*=")
_TRIPLE = re.compile(r"\"\"\"|'''")


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in re.findall(_KEY, dotted))


def key_lines(text: str) -> dict[KeyPath, int]:
    """Line (from 1) of every table header and `key =` of a valid TOML text; entries of an array of tables are numbered.

    >>> key_lines("[run]\\nrounds = 3\\n[[policies]]\\nname = 'uniform'")
    {('run',): 1, ('run', 'rounds'): 2, ('policies', 0): 3, ('policies', 0, 'name'): 4}
    """
    found: dict[KeyPath, int] = {}
    entries: Counter[tuple[str, ...]] = Counter()
    table: KeyPath = ()
    in_text = False
    for number, line in enumerate(text.split("\n"), start=1):
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


def _below_latest(parts: tuple[str, ...], entries: Counter[tuple[str, ...]]) -> KeyPath:
    """`[policies.local]` after a `[[policies]]` belongs to the latest entry of that array."""
    for size in range(len(parts), 0, -1):
        if count := entries[parts[:size]]:
            return (*parts[:size], count - 1, *parts[size:])
    return parts


def toml_text(content: Mapping[str, Any]) -> str:
    """Write plain values first, then a section per table and a [[section]] per entry of a list of tables.

    Empty tables and None are left out.

    >>> print(toml_text({"title": "a", "run": {"rounds": 3, "seeds": [0, 1]}, "policies": [{"name": "md"}]}))
    title = "a"
    <BLANKLINE>
    [run]
    rounds = 3
    seeds = [0, 1]
    <BLANKLINE>
    [[policies]]
    name = "md"
    <BLANKLINE>
    """
    blocks = ["\n".join(_lines({key: value for key, value in content.items() if not _is_section(value)}))]
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            blocks.append("\n".join([f"[{_key(key)}]", *_lines(value)]))
        elif _is_section(value):
            blocks += ["\n".join([f"[[{_key(key)}]]", *_lines(entry)]) for entry in value]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _is_section(value: Any) -> bool:
    tables = isinstance(value, (list, tuple)) and bool(value) and all(isinstance(each, Mapping) for each in value)
    return isinstance(value, Mapping) or tables


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(key)} = {_value(value)}" for key, value in table.items() if value is not None]


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return "nan" if math.isnan(value) else repr(value)  # repr of infinity is TOML's "inf"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(each) for each in value) + "]"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {_value(each)}" for key, each in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    raise InvalidInput(f"A spec holds numbers, texts, lists and tables. Got {value!r}.")
