"""What can be wrong with the values in a spec, each with its own line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedpick.bench.schema import Problem

__all__ = ["finite_problems"]

Path = tuple[str | int, ...]


def finite_problems(owner: str, table: Mapping[str, Any], path: Path) -> list[Problem]:
    """NaN and infinity, at any depth: for sections where no key has a meaning for them."""
    problems: list[Problem] = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            problems += finite_problems(f"{owner}.{key}", value, (*path, key))
            continue
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                problems.append(Problem((*path, key), f"{owner}: {key!r} must be finite. Got {value}."))
                break
    return problems
