"""A spec as TOML text. Python reads TOML but does not write it; specs need only a little of the language."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from fedpick.core.errors import InvalidInput

__all__ = ["toml_text"]

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def toml_text(content: Mapping[str, Any]) -> str:
    """Plain values first, then a section per table and a [[section]] per entry of a list of tables; empty ones go.

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
    return key if _BARE.fullmatch(key) else json.dumps(key)


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
