"""What importance a run really gave its clients, group by group, against what it should have given (CA-Fed).

Groups are read off the availability process of the run, which its settings and seed determine:

- "availability": more available (pi_k of at least 1/2) or less available, and correlated (|lambda_k| above 0.1) or
  weakly correlated, as in CA-Fed's population;
- "cluster": the clusters of the process `clustered`.

Importance is the weight with which updates entered the model, as stored; the target is the share of examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedpick import availability
from fedpick.bench.store_read import Reader, Run
from fedpick.core.errors import InvalidInput
from fedpick.core.types import Clients
from fedpick.theory.ca_fed import cumulative_importance, importance_by_group, total_variation

__all__ = [
    "GROUPINGS",
    "GroupAccount",
    "ImportanceHistory",
    "client_groups",
    "excluded_rounds",
    "group_accounts",
    "importance_history",
    "realized_importance",
    "target_importance",
]

FloatArray = NDArray[np.float64]

GROUPINGS = ("availability", "cluster")
_CORRELATED = 0.1
_EXCLUDED = "policy/excluded_mask"


def client_groups(store: Reader, run: Run, grouping: str) -> NDArray[np.str_]:
    """(N,) the name of every client's group; see the module for the groupings."""
    if grouping not in GROUPINGS:
        raise InvalidInput(f"Clients are grouped by {' or '.join(GROUPINGS)}. Got {grouping!r}.")
    trace = _trace(store, run)
    if grouping == "cluster":
        cluster: NDArray[np.int64] | None = getattr(trace, "cluster", None)
        if cluster is None:
            name = run.settings["availability"]["name"]
            raise InvalidInput(f"The availability {name!r} has no clusters: only 'clustered' does. Group by another.")
        width = len(str(cluster.max()))
        return np.array([f"cluster {number:0{width}d}" for number in cluster])
    presence = np.where(trace.availability >= 0.5, "more available", "less available")
    bursts = np.where(np.abs(trace.correlation) > _CORRELATED, "correlated", "weakly correlated")
    return np.char.add(np.char.add(presence, ", "), bursts)


def _trace(store: Reader, run: Run) -> availability.Trace:
    """The availability of the run: a function of its settings, its seed and the sizes and labels of its clients."""
    if run.federation_id is None:
        raise InvalidInput(f"The run of {run.label} with seed {run.seed} has not begun: there is nothing to group.")
    facts = store.federation(run.federation_id)
    histogram = None if facts.label_histogram is None else facts.label_histogram.astype(np.float64)
    clients = Clients(num_examples=facts.num_examples, label_histogram=histogram)
    options = {key: value for key, value in run.settings["availability"].items() if key != "history"}
    seed = options.pop("seed", run.seed)
    return availability.get(options.pop("name"), **options).start(clients, seed)


def target_importance(store: Reader, run: Run) -> FloatArray:
    """(N,) the importance that every client should have: its share of the examples."""
    if run.federation_id is None:
        return np.empty(0)
    sizes = store.federation(run.federation_id).num_examples
    share: FloatArray = sizes / sizes.sum()
    return share


def realized_importance(store: Reader, run: Run, limit: int | None = None) -> FloatArray:
    """(N,) the mean weight with which every client entered the model; its sum need not be 1 (figure 1d)."""
    size = len(target_importance(store, run))
    return cumulative_importance(((row.clients, row.weights) for row in store.selections(run.id, limit)), size)


@dataclass(frozen=True, kw_only=True, eq=False)
class ImportanceHistory:
    """How the importance of the groups adds up over the rounds, for drawing."""

    rounds: NDArray[np.int64]
    """(T,) counted from 1."""
    groups: tuple[str, ...]
    target: FloatArray
    """(G,) what each group should have."""
    cumulative: FloatArray
    """(T, G) share of all weight so far that each group has had; NaN before the first weight."""
    total_variation: FloatArray
    """(T,) distance between the target and the importance so far over all clients; NaN before the first weight."""


def importance_history(
    store: Reader, run: Run, groups: NDArray[np.str_], limit: int | None = None
) -> ImportanceHistory:
    """Cumulative importance by group and its distance from the target, round by round."""
    names, member = np.unique(groups, return_inverse=True)
    target = target_importance(store, run)
    sums = np.zeros(len(groups))
    rounds, shares, distances = [], [], []
    for row in store.selections(run.id, limit):
        sums[row.clients] += row.weights
        total = sums.sum()
        rounds.append(row.round + 1)
        if total > 0:
            shares.append(np.bincount(member, weights=sums / total, minlength=len(names)))
            distances.append(total_variation(target, sums / total))
        else:
            shares.append(np.full(len(names), np.nan))
            distances.append(np.nan)
    return ImportanceHistory(
        rounds=np.array(rounds, np.int64),
        groups=tuple(str(name) for name in names),
        target=np.bincount(member, weights=target, minlength=len(names)).astype(np.float64),
        cumulative=np.array(shares, np.float64).reshape(len(rounds), len(names)),
        total_variation=np.array(distances, np.float64),
    )


def excluded_rounds(
    store: Reader, run: Run, groups: NDArray[np.str_], limit: int | None = None
) -> dict[str, tuple[float, float]]:
    """group -> (share of its client-rounds excluded, share of rounds in which all of it was excluded).

    Empty for a policy that stores no `excluded_mask` (all but ca-fed), or too many clients for it to do so.
    """
    names, member, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    some, whole, count = np.zeros(len(names)), np.zeros(len(names)), 0
    for _, mask in store.arrays(run.id, _EXCLUDED, limit):
        excluded = np.bincount(member, weights=mask, minlength=len(names))
        some += excluded / sizes
        whole += excluded == sizes
        count += 1
    if count == 0:
        return {}
    return {str(name): (float(some[i] / count), float(whole[i] / count)) for i, name in enumerate(names)}


@dataclass(frozen=True, kw_only=True)
class GroupAccount:
    """One run: what its groups should have had and what they got."""

    sizes: Mapping[str, int]
    target: Mapping[str, float]
    realized: Mapping[str, float]
    """Shares of all weight; they sum to 1. Empty where nobody ever entered the model."""
    excluded: Mapping[str, tuple[float, float]]
    """See `excluded_rounds`."""
    total_variation: float | None
    """Between target and realised importance, over all clients; None where nobody ever entered the model."""


def group_accounts(store: Reader, run: Run, grouping: str, limit: int | None = None) -> GroupAccount:
    """The accounts of one run over its first `limit` rounds."""
    groups = client_groups(store, run, grouping)
    target, weight = target_importance(store, run), realized_importance(store, run, limit)
    names, sizes = np.unique(groups, return_counts=True)
    shares = weight / weight.sum() if weight.sum() > 0 else None
    return GroupAccount(
        sizes={str(name): int(size) for name, size in zip(names, sizes, strict=True)},
        target=importance_by_group(target, groups),
        realized={} if shares is None else importance_by_group(shares, groups),
        excluded=excluded_rounds(store, run, groups, limit),
        total_variation=None if shares is None else total_variation(target, shares),
    )
