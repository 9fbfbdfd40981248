"""Validation of hyper-parameters, settings and arguments, with one sentence for all of them.

The `owner` is the object that holds the parameter, usually a dataclass in its `__post_init__`. For an argument of a
function, the owner is the name of the function, and the `value` is passed as well.

>>> whole("train", "epochs", 1, value=0)
Traceback (most recent call last):
fedpick.core.errors.InvalidInput: The 'epochs' parameter of train must be a whole number of at least 1. Got 0 instead.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any, Final, Literal, overload

from fedpick.core.errors import InvalidInput

__all__ = ["assign", "choice", "flag", "is_whole", "number", "require", "whole"]

_LARGEST = 2**63 - 1
ATTRIBUTE: Final = object()
"""Default of `value`: read the attribute of the owner that has the parameter's name."""


def assign(record: object, **values: object) -> None:
    """Set fields of a frozen dataclass in its `__post_init__`."""
    for name, value in values.items():
        object.__setattr__(record, name, value)


def require(condition: bool, owner: object, name: str, expected: str, *, value: Any = ATTRIBUTE) -> None:
    """Raise unless `condition` holds. `expected` completes the sentence "must be ..."."""
    if not condition:
        holder = owner if isinstance(owner, str) else type(owner).__name__
        raise InvalidInput(
            f"The {name!r} parameter of {holder} must be {expected}. Got {_value(owner, name, value)!r} instead."
        )


def _value(owner: object, name: str, value: Any) -> Any:
    return getattr(owner, name) if value is ATTRIBUTE else value


def number(owner: object, name: str, interval: str, *, value: Any = ATTRIBUTE) -> float:
    """Return the parameter as a float. Raise unless it is a number in the interval, written as in mathematics.

    NaN is in no interval. Infinity is in those that end in "inf]" only.

    >>> number("train", "momentum", "[0, 1)", value=0.9)
    0.9
    """
    given = _value(owner, name, value)
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    is_number = isinstance(given, Real) and not isinstance(given, bool)
    inside = (
        is_number
        and low <= given <= high
        and not (interval[0] == "(" and given == low)
        and not (interval[-1] == ")" and given == high)
    )
    if math.isinf(low) and math.isinf(high):
        expected = "a finite number" if interval[-1] == ")" else "a number"
    elif high == math.inf:
        finite = "finite " if interval[-1] == ")" else ""
        expected = f"a {finite}number {'larger than' if interval[0] == '(' else 'of at least'} {low:g}"
    else:
        expected = f"a number in {interval}"
    require(inside, owner, name, expected, value=given)
    try:
        result = float(given)
    except OverflowError as error:  # a whole number of more than 308 digits
        raise InvalidInput(f"The {name!r} parameter is a number too large to compute with.") from error
    if value is ATTRIBUTE and isinstance(given, int) and abs(given) > _LARGEST:
        assign(owner, **{name: result})  # NumPy has no such whole number
    return result


def is_whole(value: object, least: int) -> bool:
    """Whether the value is a whole number of at least `least`. True and False are not numbers."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


@overload
def whole(
    owner: object, name: str, least: int, *, most: int = ..., optional: Literal[False] = False, value: Any = ATTRIBUTE
) -> int: ...


@overload
def whole(
    owner: object, name: str, least: int, *, most: int = ..., optional: Literal[True], value: Any = ATTRIBUTE
) -> int | None: ...


def whole(
    owner: object, name: str, least: int, *, most: int = 2**63 - 1, optional: bool = False, value: Any = ATTRIBUTE
) -> int | None:
    """Return the parameter as an int. Raise unless it is a whole number from `least` to `most`, or None if `optional`.

    The default of `most` is the largest whole number of NumPy's signed arrays.
    """
    given = _value(owner, name, value)
    absent = optional and given is None
    bounds = f"of at least {least}" if most == 2**63 - 1 and not is_whole(given, most) else f"from {least} to {most:,}"
    expected = f"a whole number {bounds}{', or None' if optional else ''}"
    require(absent or (is_whole(given, least) and given <= most), owner, name, expected, value=given)
    return None if absent else int(given)


def choice(owner: object, name: str, allowed: Collection[str], *, value: Any = ATTRIBUTE) -> None:
    """Raise unless the parameter is one of the allowed strings."""
    given = _value(owner, name, value)
    *others, last = map(repr, allowed)
    expected = f"{', '.join(others)} or {last}" if others else last
    require(isinstance(given, str) and given in allowed, owner, name, expected, value=given)


def flag(owner: object, name: str, *, value: Any = ATTRIBUTE) -> None:
    """Raise unless the parameter is True or False."""
    given = _value(owner, name, value)
    require(isinstance(given, bool), owner, name, "true or false", value=given)
