"""Who can be reached in each round.

A *process* holds hyper-parameters only: `get("log-normal", beta=0.5)`. Started on a table of clients with a seed it
gives a *trace*: one boolean mask per round, independent of every other random number, so that all policies face the
same one.

    process = fedpick.availability.get("correlated-population")
    trace = process.start(clients, seed=3)
    trace.mask(0), trace.mask(999)             # (N,) bool, read-only; any round, in any order, always the same
    trace.availability, trace.correlation      # (N,) the true pi_k and lambda_k
    clients = trace.oracle(clients)            # the table with both filled in, for policies that are told them

| name                                                          | module | from                                  |
|---------------------------------------------------------------|--------|---------------------------------------|
| ideal, homogeneous, more-data-first, less-data-first,         | modes  | FedGS, table 1 and appendix C         |
| y-max-first, y-cycle, log-normal, sin-log-normal              |        |                                       |
| markov, correlated-population, clustered                      | markov | CA-Fed, sections III-D, V-A and V-B e |
| alternating-groups                                            | groups | Power-of-Choice, appendix G.3         |
| trace                                                         | replay | real device logs: FLASH, FedScale, own |

Masks are made round by round: a million clients for a thousand rounds never need the whole matrix. A round in which
nobody can be reached is an answer like any other (all False); the driver skips it, counts it and goes on.

`estimators` turns the masks seen so far into estimates of pi_k and lambda_k that any policy can use; `statistics` sums
up a trace. Nothing here needs more than numpy.

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
from dataclasses import fields
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
from fedpick.availability.groups import AlternatingGroups
from fedpick.availability.logs import DeviceLogs, read_logs
from fedpick.availability.markov import Clustered, CorrelatedPopulation, Markov
from fedpick.availability.modes import (
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
from fedpick.availability.replay import Replay
from fedpick.core.errors import InvalidInput, unknown_name

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


def load(name: str) -> type[AvailabilityProcess]:
    """The class behind a name."""
    if name not in _BUILT_IN:
        raise unknown_name("availability process", name, _BUILT_IN, "`fedpick list availability` shows them all")
    return _BUILT_IN[name]


def summary(name: str) -> str:
    """One line about a process."""
    return (inspect.getdoc(load(name)) or "").partition("\n")[0]


def get(name: str, **parameters: Any) -> AvailabilityProcess:
    """Build a process by its name; parameters are plain values, as they come from a TOML file.

    >>> get("log-normal", beta=0.3)
    LogNormal(beta=0.3, redraw=False)
    """
    process_class = load(name)
    # Every process is a dataclass; the protocol cannot say so.
    known = [item.name for item in fields(process_class) if item.init]  # type: ignore[arg-type]
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        raise InvalidInput(
            f"The availability process {name!r} has no parameter {unknown[0]!r}. "
            f"It has: {', '.join(known) or 'none at all'}."
        )
    if name == "trace" and "path" not in parameters:
        raise InvalidInput("The availability process 'trace' needs path, the file of device logs to replay.")
    return process_class(**parameters)
