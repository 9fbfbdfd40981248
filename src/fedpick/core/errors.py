"""The errors that fedpick raises on purpose, and its category of warnings.

FedpickError
├── InvalidInput (ValueError)        a value that cannot be used: what was expected, what came, what to do
│   └── InvalidSelection             a policy broke the contract in this round
├── UnknownName (LookupError)        no such policy, data set, ...; suggests the nearest name
├── MissingSignal (ValueError)       the policy needs a signal that this driver does not provide
├── MissingDependency (ImportError)  an optional part is not installed; holds the install line
├── OutOfOrder (RuntimeError)        tell before ask, growth in the middle of a round
├── StateFileError (ValueError)      a state file is missing, damaged, foreign or newer, or has another writer
├── DataError (RuntimeError)         a data set could not be found, fetched or verified
├── TrainingFailed (RuntimeError)    no client of a federation was ready, or none completed a round
├── PolicyCheckFailed (AssertionError)   the conformance kit found a policy that breaks the contract
└── AdapterCheckFailed (AssertionError)  the same, for an adapter to a framework

FedpickWarning (UserWarning)         training goes on, but probably not as the user meant
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable

__all__ = [
    "AdapterCheckFailed",
    "DataError",
    "FedpickError",
    "FedpickWarning",
    "InvalidInput",
    "InvalidSelection",
    "MissingDependency",
    "MissingSignal",
    "OutOfOrder",
    "PolicyCheckFailed",
    "StateFileError",
    "TrainingFailed",
    "UnknownName",
    "plain_warnings",
    "unknown_name",
]


class FedpickError(Exception):
    """The base class of every error that fedpick raises on purpose."""


class FedpickWarning(UserWarning):
    """Training goes on, but probably not as the user meant."""


class InvalidInput(FedpickError, ValueError):
    """A value that cannot be used."""


class InvalidSelection(InvalidInput):
    """A policy returned a selection that breaks the contract."""


class UnknownName(FedpickError, LookupError):
    """A name that is not registered."""


class MissingSignal(FedpickError, ValueError):
    """A policy needs a signal that the driver does not provide."""


class MissingDependency(FedpickError, ImportError):
    """An optional part of fedpick is not installed."""


class OutOfOrder(FedpickError, RuntimeError):
    """A call that does not fit the state the object is in."""


class StateFileError(FedpickError, ValueError):
    """A saved state that cannot be read or written."""


class DataError(FedpickError, RuntimeError):
    """A data set that could not be found, fetched or verified."""


class TrainingFailed(FedpickError, RuntimeError):
    """A federation in which no client was ready, or none completed a round."""


class PolicyCheckFailed(FedpickError, AssertionError):
    """A policy that breaks the contract."""


class AdapterCheckFailed(FedpickError, AssertionError):
    """The conformance kit found an adapter that does not decide, weigh or resume as a plain loop."""


def unknown_name(kind: str, name: str, known: Iterable[str], hint: str = "") -> UnknownName:
    """Return an error for `name` that suggests the nearest of the `known` names."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    guess = f" Did you mean {close[0]!r}?" if close else ""
    listing = f"\n\nhint: {hint}" if hint else ""
    return UnknownName(f"There is no {kind} named {name!r}.{guess} Known: {', '.join(known)}.{listing}")


_with_code = warnings.formatwarning


def _sentence(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    if issubclass(category, FedpickWarning):
        return f"warning: {message}\n"
    return _with_code(message, category, filename, lineno, line)


def plain_warnings() -> None:
    """Let this program print fedpick's warnings as sentences: a line of fedpick's code says nothing to its user."""
    warnings.formatwarning = _sentence
