"""What a client says of itself, checked on arrival: a field that makes no sense is unknown, the others count.

Clients fail and lie. Nothing that one of them says may end the federation or change what is known of another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["EXPECTED", "checked_facts", "usable_histogram", "usable_size"]

_LARGEST = 2.0**53
"""Beyond this a count is absurd; sums of millions of such counts are still finite."""


def usable_size(value: Any) -> float:
    """A reported number of examples; NaN for one that makes no sense."""
    return float(value) if _is_count(value) else math.nan


def usable_histogram(value: Any) -> list[float] | None:
    """Reported examples per label; None for what makes no sense."""
    if not isinstance(value, list) or not value or not all(map(_is_count, value)):
        return None
    return [float(count) for count in value]


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= _LARGEST  # NaN is not


def _partition(value: Any) -> int | None:
    return int(value) if _is_count(value) and value == int(value) else None


def _size(value: Any) -> float | None:
    return None if math.isnan(size := usable_size(value)) else size


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "num-examples": _size,
    "label-histogram": usable_histogram,
    "partition-id": _partition,
}
EXPECTED: Mapping[str, str] = {
    "num-examples": "a number of at least 0",
    "label-histogram": "a list of numbers of at least 0",
    "partition-id": "a whole number of at least 0",
}
"""What each field of an introduction must be, in words."""


def checked_facts(reported: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(what can be used, the names of the fields that cannot). Fields that fedpick does not know stay as they are."""
    facts: dict[str, Any] = {}
    unusable: list[str] = []
    for name, value in reported.items():
        read = _READERS.get(name)
        checked = value if read is None else read(value)
        if checked is None:
            unusable.append(name)
        else:
            facts[name] = checked
    return facts, unusable
