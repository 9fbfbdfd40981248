"""Availability: which clients can be reached in each round.

A *process* holds hyper-parameters only: `get("log-normal", beta=0.5)`. Started on a table of clients with a seed, it
returns a *trace*: one boolean mask per round. A trace has its own random numbers, so all policies face the same one.

    process = fedpick.availability.get("correlated-population")
    trace = process.start(clients, seed=3)
    trace.mask(0), trace.mask(999)             # (N,) bool, read-only; any round, in any order, always the same
    trace.availability, trace.correlation      # (N,) the true pi_k and lambda_k
    clients = trace.oracle(clients)            # the table with both filled in, for policies that use the truth

| name                                                          | module | from                                  |
|---------------------------------------------------------------|--------|---------------------------------------|
| ideal, homogeneous, more-data-first, less-data-first,         | modes  | FedGS, table 1 and appendix C         |
| y-max-first, y-cycle, log-normal, sin-log-normal              |        |                                       |
| markov, correlated-population, clustered                      | markov | CA-Fed, sections III-D, V-A and V-B e |
| alternating-groups                                            | modes  | Power-of-Choice, appendix G.3         |
| trace                                                         | logs   | device logs: FLASH, FedScale, others  |

Masks are computed round by round: a million clients for a thousand rounds never need the whole matrix. A round without
any reachable client is valid (all False): the driver counts it and continues.

`estimators` turns the observed masks into estimates of pi_k and lambda_k for policies. `statistics` summarises a trace.
The package needs NumPy only.

>>> import numpy as np
>>> from fedpick.core.types import Clients
>>> trace = get("alternating-groups", excluded=0.0).start(Clients(num_examples=np.ones(4)), seed=0)
>>> trace.mask(1)
array([False, False,  True,  True])
>>> trace.availability
array([0.5, 0.5, 0.5, 0.5])
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fedpick.availability.estimators import (
    AvailabilityCounts,
    estimate_availability,
    estimate_correlation,
    estimate_stationary_availability,
    estimate_transitions,
    no_counts,
    update_counts,
)
from fedpick.availability.logs import DeviceLogs, Replay, read_logs
from fedpick.availability.markov import Clustered, CorrelatedPopulation, Markov
from fedpick.availability.modes import (
    AlternatingGroups,
    Homogeneous,
    Ideal,
    LessDataFirst,
    LogNormal,
    MoreDataFirst,
    SinLogNormal,
    YCycle,
    YMaxFirst,
)
from fedpick.availability.process import AvailabilityProcess, Trace
from fedpick.core.errors import InvalidInput, unknown_name
from fedpick.core.imports import accepts, build_object, is_import_path, load_object

__all__ = [
    "AvailabilityCounts",
    "AvailabilityProcess",
    "DeviceLogs",
    "Trace",
    "estimate_availability",
    "estimate_correlation",
    "estimate_stationary_availability",
    "estimate_transitions",
    "get",
    "load",
    "names",
    "no_counts",
    "read_logs",
    "summary",
    "update_counts",
]

_BUILT_IN: dict[str, type[AvailabilityProcess]] = {
    "ideal": Ideal,
    "homogeneous": Homogeneous,
    "more-data-first": MoreDataFirst,
    "less-data-first": LessDataFirst,
    "y-max-first": YMaxFirst,
    "y-cycle": YCycle,
    "log-normal": LogNormal,
    "sin-log-normal": SinLogNormal,
    "markov": Markov,
    "correlated-population": CorrelatedPopulation,
    "clustered": Clustered,
    "alternating-groups": AlternatingGroups,
    "trace": Replay,
}


def names() -> tuple[str, ...]:
    """Every registered process."""
    return tuple(_BUILT_IN)


def load(name: str) -> Callable[..., AvailabilityProcess]:
    """Return the class that is registered under a name, or the function or class at an import path."""
    if is_import_path(name):
        return load_object("availability process", name)
    if name not in _BUILT_IN:
        hint = "`fedpick list availability` shows them all; your own is named 'package.module:function'"
        raise unknown_name("availability process", name, _BUILT_IN, hint)
    return _BUILT_IN[name]


def summary(name: str) -> str:
    """Return the first line of the process's docstring."""
    return (inspect.getdoc(load(name)) or "").partition("\n")[0]


def get(name: str, **parameters: Any) -> AvailabilityProcess:
    """Build a process by name. Parameters are plain values, as a TOML file gives them.

    `package.module:function` is your own: the function, or class, is called with the parameters and returns an
    `AvailabilityProcess`.

    >>> get("log-normal", beta=0.3)
    LogNormal(beta=0.3, redraw=False)
    """
    source = load(name)
    unknown = sorted(each for each in parameters if not accepts(source, each))
    if unknown:
        known = ", ".join(inspect.signature(source).parameters)
        raise InvalidInput(
            f"The availability process {name!r} has no parameter {unknown[0]!r}. It has: {known or 'no parameters'}."
        )
    if is_import_path(name):
        own: AvailabilityProcess = build_object("availability process", name, source, AvailabilityProcess, parameters)
        return own
    if name == "trace" and "path" not in parameters:
        raise InvalidInput("The availability process 'trace' needs path, the file of device logs to replay.")
    return source(**parameters)
