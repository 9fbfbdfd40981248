"""The settings that all adapters share, validated before any client trains."""

from __future__ import annotations

import inspect
import logging
import math
import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpick.adapter.report import RoundReport
from fedpick.core.errors import InvalidInput, MissingSignal
from fedpick.core.guard import Guard, guard_of
from fedpick.core.policy import Policy, Signal
from fedpick.core.record import Callback
from fedpick.core.sketches import CHOICES, SketchFunction, is_sketch
from fedpick.core.types import Clients, Selection, aggregation_weights, as_floats
from fedpick.core.validation import is_whole, number, whole

__all__ = [
    "PROVIDES",
    "REPORTS",
    "Eligible",
    "Groups",
    "KeyFunction",
    "Options",
    "Settings",
    "WeightsFunction",
    "refuse_unusable_policy",
    "writable_directory",
]

KeyFunction = Callable[[Any, Mapping[str, Any]], "str | int"]
"""(what the framework knows of the node, what the client reported) -> a key that survives a restart."""

Eligible = Callable[[Any, Mapping[str, Any]], bool] | Collection[str]
"""(what the framework knows of the node, what the client reported) -> whether it may take part; or the identities and
tags of those that may."""

Groups = Callable[[Any, Mapping[str, Any]], "str | int | None"] | Mapping[str, "str | int"]
"""(what the framework knows of the node, what the client reported) -> the client's group; or identities and tags ->
their group."""

WeightsFunction = Callable[[Selection, NDArray[np.bool_], Clients], ArrayLike]
"""(Selection, (k,) mask of the clients that completed, all clients) -> (k,) weights of their updates."""

_IDENTITIES = ("key:", "name:", "partition:", "node:", "tag:")

PROVIDES = frozenset(
    {
        Signal.LOSS,
        Signal.TRIAL,
        Signal.UPDATE,
        Signal.OUTCOME_LOSS,
        Signal.TRAIN_LOSS,
        Signal.DURATION,
        Signal.UPDATE_NORM,
        Signal.LOSS_RMS,
        Signal.SKETCH,
    }
)
"""What clients can report. OUTPUTS is missing: a client cannot train and keep the model without sending it."""

REPORTS: Mapping[str, str] = {
    "loss": "loss",
    "train_loss": "train_loss",
    "loss_rms": "loss_rms",
    "duration": "train-time",
    "eval_loss": "eval_loss",
}
"""Outcome field -> the metric of a train reply that reports it; eval_loss -> the metric of an evaluate reply."""


class Options(TypedDict, total=False):
    """The options of every adapter; `fedpick.flower.with_policy` documents them, `Settings` holds their defaults."""

    budget: float | None
    seed: int
    guard: Guard | str | Mapping[str, Any]
    key: KeyFunction | None
    eligible: Eligible | None
    exclude: Collection[str]
    groups: Groups | None
    audit: str | Path | None
    cooldown: int
    max_share: float
    weights: str | WeightsFunction
    min_clients: int
    wait: float
    ready_timeout: float
    overcommit: float
    quorum: float
    probe_timeout: float
    train_timeout: float
    clip_norms: float | None
    reports: Mapping[str, str]
    sketch: str | SketchFunction
    buffers: Callable[[str], bool] | None
    progress: Callable[[RoundReport], None] | None
    record: Callback | None


@dataclass(kw_only=True)
class Settings:
    """Validated options; `path`, `probe`, `caller` and `log` are the adapter's own."""

    budget: float | None = None
    seed: int = 0
    guard: Guard | str | Mapping[str, Any] = "mild"
    path: Path | None = None
    key: KeyFunction | None = None
    eligible: Eligible | None = None
    exclude: Collection[str] = ()
    groups: Groups | None = None
    audit: str | Path | None = None
    cooldown: int = 0
    max_share: float = 1.0
    weights: str | WeightsFunction = "policy"
    min_clients: int = 1
    wait: float = 60.0
    ready_timeout: float = 3600.0
    overcommit: float = 1.0
    quorum: float = 1.0
    probe: str = "query"
    probe_timeout: float = 60.0
    train_timeout: float = 3600.0
    clip_norms: float | None = None
    reports: Mapping[str, str] = field(default_factory=lambda: REPORTS)
    sketch: str | SketchFunction = "head"
    buffers: Callable[[str], bool] | None = None
    progress: Callable[[RoundReport], None] | None = None
    record: Callback | None = None
    caller: str = "with_policy"
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("fedpick"))

    def __post_init__(self) -> None:
        if isinstance(self.budget, Real) and 0 < self.budget < 1:
            self.budget = float(self.budget)
        elif self.budget is not None and not is_whole(self.budget, 1):
            raise InvalidInput(
                "budget must be a whole number of at least 1, a fraction of the ready clients between 0 and 1, or None "
                f"for no limit. Got {self.budget!r}."
            )
        self.guard = guard_of(self.guard)
        if self.probe not in ("query", "evaluate"):
            raise InvalidInput(f"probe must be 'query' or 'evaluate'. Got {self.probe!r}.")
        for name in ("seed", "min_clients", "cooldown"):
            setattr(self, name, whole(self.caller, name, 0, value=getattr(self, name)))
        for name, interval in _INTERVALS.items():
            setattr(self, name, number(self.caller, name, interval, value=getattr(self, name)))
        if self.overcommit > 1 and self.budget is None:
            raise InvalidInput(
                f"overcommit={self.overcommit:g} asks more clients than the budget, but budget is None. Set a budget."
            )
        if self.record is not None and not isinstance(self.record, Callback):
            raise InvalidInput(
                "record must be a Callback, such as fedpick.experiments.recorder.Recorder(...), or None. "
                f"Got {self.record!r}."
            )
        for name, arguments in (("key", "node_info, reported"), ("buffers", "name"), ("progress", "report")):
            if (value := getattr(self, name)) is not None and not callable(value):
                raise InvalidInput(f"{name} must be a function, {name}({arguments}), or None. Got {value!r}.")
        if not is_sketch(self.sketch):
            raise InvalidInput(f"sketch must be {CHOICES}. Got {self.sketch!r}.")
        if not callable(self.weights) and self.weights not in ("policy", "ignored"):
            raise InvalidInput(
                "weights must be 'policy', 'ignored' or a function, weights(selection, completed, clients). "
                f"Got {self.weights!r}."
            )
        if self.eligible is not None and not callable(self.eligible):
            expected = (
                "eligible must be a function, eligible(node_info, reported), a list of identities and tags, or None"
            )
            if not self.eligible:
                raise InvalidInput(f"{expected}. Got {self.eligible!r}.")
            self.eligible = _checked_identities(self.eligible, expected)
        self.exclude = _checked_identities(self.exclude, "exclude must be a list of identities and tags")
        if self.groups is not None and not callable(self.groups):
            expected = (
                "groups must be a function, groups(node_info, reported), a table from identities and tags to groups"
            )
            if not isinstance(self.groups, Mapping) or not all(
                isinstance(group, (str, int)) for group in self.groups.values()
            ):
                raise InvalidInput(f"{expected}, or None. Got {self.groups!r}.")
            _checked_identities(self.groups, expected)
        if self.clip_norms is not None:
            self.clip_norms = number(self.caller, "clip_norms", "(0, inf)", value=self.clip_norms)
        if self.audit is not None and not (isinstance(self.audit, (str, os.PathLike)) and os.fspath(self.audit)):
            raise InvalidInput(f"audit must be the path of a file, or None to write none. Got {self.audit!r}.")
        self.reports = _checked_reports(self.reports)

    @classmethod
    def of(cls, options: Options, **own: Any) -> Settings:
        """The settings of these options; refuse options that do not exist."""
        if unknown := sorted(set(options) - set(Options.__annotations__)):
            known = ", ".join(sorted(Options.__annotations__))
            raise InvalidInput(f"with_policy has no option {unknown[0]!r}. It has: {known}.")
        return cls(**options, **own)

    @property
    def use_weights(self) -> bool:
        """Whether the replies get weights from here, not from the wrapped strategy."""
        return self.weights != "ignored"

    def aggregation_weights(
        self, selection: Selection, completed: NDArray[np.bool_], clients: Clients
    ) -> NDArray[np.float64]:
        """(k,) the policy's weights, or those of the user's function; 0 for a client that did not complete."""
        if not callable(self.weights) or not completed.any():
            return aggregation_weights(selection, completed, clients)
        given = as_floats(self.weights(selection, completed, clients), "What weights returns")
        if given.shape != completed.shape or not (np.isfinite(given).all() and (given >= 0).all()):
            raise InvalidInput(
                "weights(selection, completed, clients) must return one finite number of at least 0 for each of the "
                f"{len(completed)} selected clients. Got {given!r}."
            )
        return np.where(completed, given, 0.0)

    def cohort_limit(self, ready: int) -> int | None:
        """The largest cohort of this many ready clients."""
        if self.budget is None or self.budget >= 1:
            return None if self.budget is None else int(self.budget)
        return max(1, round(self.budget * ready))

    def asked(self, limit: int | None) -> int | None:
        """How many clients are asked, so that the first `limit` answers make the round."""
        return None if limit is None else math.ceil(limit * self.overcommit - 1e-9)


_INTERVALS = {
    **dict.fromkeys(("wait", "ready_timeout", "probe_timeout", "train_timeout"), "[0, inf]"),
    "max_share": "(0, 1]",
    "quorum": "(0, 1]",
    "overcommit": "[1, inf)",
}


def _checked_identities(identities: Any, expected: str) -> frozenset[str]:
    if isinstance(identities, str) or not isinstance(identities, Collection):
        raise InvalidInput(f"{expected}. Got {identities!r}.")
    for identity in identities:
        if not isinstance(identity, str) or not identity.startswith(_IDENTITIES):
            raise InvalidInput(
                f"{expected}. They are as in the log, such as 'name:clinic-a', 'partition:7' or 'tag:gpu'. "
                f"Got {identity!r}."
            )
    return frozenset(identities)


def _checked_reports(reports: Any) -> dict[str, str]:
    """The user's names of reports, and the usual ones of the others."""
    expected = f"reports must map {', '.join(map(repr, REPORTS))} to keys of the train replies' metrics"
    if not isinstance(reports, Mapping):
        raise InvalidInput(f"{expected}, as in {dict(REPORTS)!r}. Got {reports!r}.")
    for name, key in reports.items():
        if name not in REPORTS or not isinstance(key, str):
            raise InvalidInput(f"{expected}. Got {name!r}: {key!r}.")
    # With {"train_loss": "loss"} the metric "loss" is no longer the report "loss".
    taken = {key for name, key in reports.items() if name != "eval_loss"}
    usual = {name: key for name, key in REPORTS.items() if name == "eval_loss" or key not in taken}
    return {**usual, **reports}


def refuse_unusable_policy(policy: Any, framework: str = "Flower") -> None:
    """Refuse anything but a policy, and a policy that needs what clients cannot report."""
    if not isinstance(policy, Policy):
        hint = f"fedpick.policies.get({policy if isinstance(policy, str) else 'uniform'!r})"
        if inspect.isclass(policy) and issubclass(policy, Policy):
            raise InvalidInput(f"{policy.__name__} is a class: pass a policy object, such as {policy.__name__}().")
        raise InvalidInput(f"policy must be a policy object, such as {hint}. Got {policy!r}.")
    # Label histograms come with the clients' descriptions, in the first round.
    if missing := sorted(policy.needs - PROVIDES - {Signal.LABEL_HISTOGRAM}):
        raise MissingSignal(
            f"{type(policy).__name__} needs {', '.join(repr(signal.value) for signal in missing)}, which {framework}'s "
            f"clients cannot report (they can report: {', '.join(sorted({*PROVIDES, Signal.LABEL_HISTOGRAM}))}).\n\n"
            "hint: choose a policy or options that do not need it"
        )


def writable_directory(state: Any) -> Path:
    """The directory for the policy's state, created if missing and checked by writing to it."""
    if not isinstance(state, (str, os.PathLike)) or not isinstance(os.fspath(state), str) or not os.fspath(state):
        raise InvalidInput(f"state must be the path of a directory, or None to save nothing. Got {state!r}.")
    path = Path(state)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, ValueError) as error:
        reason = "it is a file" if path.is_file() else getattr(error, "strerror", None) or str(error)
        raise InvalidInput(
            f"state must be a directory that can be written. Got {str(path)!r}: {reason}. "
            "Choose another directory, or make this one writable."
        ) from error
    return path
