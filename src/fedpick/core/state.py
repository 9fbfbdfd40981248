"""Policy states: how their fields follow the clients, and which of them are saved.

A state is a frozen dataclass whose fields are arrays or plain values (int, float, bool, str, None). The declaration of
a field says what happens to it when the table of clients grows, and whether it is saved:

    counts: NDArray = per_client()            # one row per client
    embedding: NDArray = per_client(axis=1)   # clients along the second axis
    running: NDArray = derived()              # a function of the table alone: recomputed by init, never saved
    temperature: float                        # belongs to no client: kept as it is
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedpick.core.errors import InvalidInput, StateFileError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["Stateless", "carry_over", "derived", "fields_of", "join", "per_client", "split"]

AnyState = TypeVar("AnyState", bound="DataclassInstance")


@dataclass(frozen=True)
class Stateless:
    """The state of a policy without memory."""


_AXIS = "fedpick.client_axis"
_DERIVED = "fedpick.derived"


def per_client(axis: int = 0) -> Any:
    """Declare a field with one entry per client along `axis`."""
    return field(metadata={_AXIS: axis})


def derived() -> Any:
    """Declare a field that `init` computes from the table of clients. Load and growth recompute it."""
    return field(metadata={_DERIVED: True})


def fields_of(state: Any) -> tuple[Field[Any], ...]:
    """Return the fields of a state. Raise if it is not a dataclass."""
    if not is_dataclass(state) or isinstance(state, type):
        raise InvalidInput(
            f"A policy's state must be an instance of a frozen dataclass, so that it can be saved. Got {state!r:.60}. "
            "Its fields may be arrays, numbers, strings and None; `Stateless` is the state of a policy without memory."
        )
    return fields(state)


def carry_over(old: AnyState, fresh: AnyState) -> AnyState:
    """Return `fresh`, a state for a larger table, with the rows of the `old` state copied into it."""
    changes: dict[str, Any] = {}
    for item in fields_of(old):
        if item.metadata.get(_DERIVED):
            continue
        value = getattr(old, item.name)
        axis = item.metadata.get(_AXIS)
        if axis is not None and value is not None:
            target = getattr(fresh, item.name)
            if target is None:
                raise InvalidInput(f"{type(old).__name__}.{item.name} is per client, but init left it None.")
            value = _rows_copied(value, np.array(target), axis)
        changes[item.name] = value
    return replace(fresh, **changes)


def _rows_copied(old: NDArray[Any], target: NDArray[Any], axis: int) -> NDArray[Any]:
    rows: list[slice] = [slice(None)] * target.ndim
    rows[axis] = slice(0, old.shape[axis])
    target[tuple(rows)] = old
    return target


def split(state: DataclassInstance) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Return the saved part of a state as (arrays, plain values)."""
    arrays: dict[str, NDArray[Any]] = {}
    plain: dict[str, Any] = {}
    for item in fields_of(state):
        value = getattr(state, item.name)
        if item.metadata.get(_DERIVED):
            continue
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                raise InvalidInput(
                    f"{type(state).__name__}.{item.name} holds Python objects. A state holds numbers only."
                )
            arrays[item.name] = value
        elif value is None or isinstance(value, (bool, int, float, str)):
            plain[item.name] = value
        elif isinstance(value, np.generic):
            plain[item.name] = value.item()
        else:
            raise InvalidInput(
                f"{type(state).__name__}.{item.name} is a {type(value).__name__}. A state holds arrays, numbers, "
                "strings and None only, so that it can be saved without pickle."
            )
    return arrays, plain


def join(fresh: AnyState, arrays: Mapping[str, NDArray[Any]], plain: Mapping[str, Any]) -> AnyState:
    """Return `fresh` with every saved field set; the inverse of `split`."""
    saved = {**arrays, **plain}
    wanted = {item.name for item in fields_of(fresh) if not item.metadata.get(_DERIVED)}
    if wanted != set(saved):
        raise StateFileError(
            f"The saved state has the fields {sorted(saved)}, but {type(fresh).__name__} has {sorted(wanted)}: "
            "it was written by another version of this policy."
        )
    for item in fields(fresh):
        axis, here = item.metadata.get(_AXIS), getattr(fresh, item.name)
        if item.name not in saved or here is None or saved[item.name] is None:
            continue
        if _kind(here) != _kind(saved[item.name]):
            raise StateFileError(
                f"The saved {type(fresh).__name__}.{item.name} is {_kind(saved[item.name])} instead of {_kind(here)}."
            )
        there = arrays.get(item.name)
        if axis is None or there is None:
            continue
        if there.ndim != here.ndim or there.shape[axis] != here.shape[axis]:
            raise StateFileError(
                f"The saved {type(fresh).__name__}.{item.name} has the shape {there.shape}, which is not for the "
                f"{here.shape[axis]} clients of this session. Restore it into a session with the same clients."
            )
    return replace(fresh, **saved)


def _kind(value: object) -> str:
    if isinstance(value, np.ndarray):
        return "an array of text" if value.dtype.kind in "US" else "an array of numbers"
    if isinstance(value, str):
        return "text"
    return "a number" if isinstance(value, (bool, int, float, np.number, np.bool_)) else f"a {type(value).__name__}"
