"""What importance a run really gave its clients, group by group, against what it should have given (CA-Fed).

Groups are read off the availability process of the run, which its settings and seed determine:

- "availability": more available (pi_k of at least 1/2) or less available, and correlated (|lambda_k| above 0.1) or
  weakly correlated, as in CA-Fed's population;
- "cluster": the clusters of the process `clustered`.

Importance is the weight with which updates entered the model, as stored; the target is the share of examples.
"Excluded" is what a policy reports (`excluded_mask`, ca-fed only), whether or not the client was there; "left out" is
what anybody can see of any policy: available, yet not chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick import availability
from fedpick.core.arrays import FloatArray
from fedpick.core.errors import FedpickError, InvalidInput
from fedpick.core.types import Clients
from fedpick.experiments.input_files import refuse_changed_files
from fedpick.experiments.store_read import Reader, Run
from fedpick.theory.ca_fed import chi_square_divergence, cumulative_importance, total_variation

__all__ = [
    "EXCLUDED",
    "GROUPINGS",
    "GroupAccount",
    "Groups",
    "ImportanceHistory",
    "excluded_rounds",
    "find_groups",
    "group_accounts",
    "groups_of",
    "importance_history",
    "left_out_rounds",
    "realized_importance",
    "target_importance",
]


GROUPINGS = ("availability", "cluster")
EXCLUDED = "policy/excluded_mask"
"""The array in which a policy stores whom it excludes."""
_CORRELATED = 0.1
_NAMES = (
    "less available, correlated",
    "less available, weakly correlated",
    "more available, correlated",
    "more available, weakly correlated",
)


@dataclass(frozen=True, eq=False)
class Groups:
    """Which group every client is in."""

    names: tuple[str, ...]
    """Of the groups that have clients, in order."""
    member: NDArray[np.int64]
    """(N,) position of the client's group in `names`."""
    correlation: FloatArray | None = None
    """(N,) lambda_k, where it is known: for drawing the clients of a group in order."""

    @property
    def sizes(self) -> NDArray[np.int64]:
        """(G,) clients in each group."""
        return np.bincount(self.member, minlength=len(self.names)).astype(np.int64)

    @property
    def order(self) -> NDArray[np.int64]:
        """(N,) the clients group by group; within a group by correlation, then by number."""
        inner = np.zeros(len(self.member)) if self.correlation is None else np.abs(self.correlation)
        return np.lexsort((inner, self.member)).astype(np.int64)

    def sums(self, values: NDArray[Any]) -> FloatArray:
        """(G,) sum over the clients of each group."""
        return np.bincount(self.member, weights=values, minlength=len(self.names)).astype(np.float64)


def groups_of(store: Reader, run: Run, grouping: str) -> Groups:
    """The groups of a run's clients; see the module for the groupings."""
    if grouping not in GROUPINGS:
        raise InvalidInput(f"Clients are grouped by {' or '.join(GROUPINGS)}. Got {grouping!r}.")
    found = _grouped(_trace(store, run), grouping)
    if found is None:
        name = run.settings["availability"]["name"]
        raise InvalidInput(f"The availability {name!r} has no clusters: only 'clustered' does. Group by another.")
    return found


def _grouped(trace: availability.Trace, grouping: str) -> Groups | None:
    if grouping == "cluster":
        cluster: NDArray[np.int64] | None = getattr(trace, "cluster", None)
        if cluster is None:
            return None
        width = len(str(cluster.max()))
        known, member = np.unique(cluster, return_inverse=True)
        names = tuple(f"cluster {number:0{width}d}" for number in known)
    else:
        # Positions in _NAMES: codes first, names last, so that a million clients are no million words.
        codes = 2 * (trace.availability >= 0.5) + (np.abs(trace.correlation) <= _CORRELATED)
        known, member = np.unique(codes, return_inverse=True)
        names = tuple(_NAMES[code] for code in known)
    return Groups(names, member.astype(np.int64), np.asarray(trace.correlation, np.float64))


def find_groups(store: Reader, run: Run, most: int = 20) -> tuple[str, Groups] | None:
    """(grouping, groups) that tell most about a run: clusters where there are some, else by availability.

    None where all clients are in one group, or where the availability cannot be made again here: its file is
    elsewhere or has changed, or it is a process of somebody's own.
    """
    try:
        trace = _trace(store, run)
        for grouping in ("cluster", "availability"):
            found = _grouped(trace, grouping)
            if found is not None and 2 <= len(found.names) <= most:
                return grouping, found
    except (FedpickError, OSError):
        pass
    return None


def _trace(store: Reader, run: Run) -> availability.Trace:
    """The availability of the run: a function of its settings, its seed and the sizes and labels of its clients."""
    if run.federation_id is None:
        raise InvalidInput(f"The run of {run.label} with seed {run.seed} has not begun: there is nothing to group.")
    facts = store.federation(run.federation_id)
    histogram = None if facts.label_histogram is None else facts.label_histogram.astype(np.float64)
    clients = Clients(num_examples=facts.num_examples, label_histogram=histogram)
    refuse_changed_files(run.manifest, run.settings, ["availability"])
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


def importance_history(store: Reader, run: Run, groups: Groups, limit: int | None = None) -> ImportanceHistory:
    """Cumulative importance by group and its distance from the target, round by round."""
    target = target_importance(store, run)
    sums = np.zeros(len(groups.member))
    rounds, shares, distances = [], [], []
    for row in store.selections(run.id, limit):
        sums[row.clients] += row.weights
        total = sums.sum()
        rounds.append(row.round + 1)
        if total > 0:
            shares.append(groups.sums(sums / total))
            distances.append(total_variation(target, sums / total))
        else:
            shares.append(np.full(len(groups.names), np.nan))
            distances.append(np.nan)
    return ImportanceHistory(
        rounds=np.array(rounds, np.int64),
        groups=groups.names,
        target=groups.sums(target),
        cumulative=np.array(shares, np.float64).reshape(len(rounds), len(groups.names)),
        total_variation=np.array(distances, np.float64),
    )


def excluded_rounds(
    store: Reader, run: Run, groups: Groups, limit: int | None = None
) -> dict[str, tuple[float, float]]:
    """group -> (share of its client-rounds excluded, share of rounds in which all of it was excluded).

    Empty for a policy that stores no `excluded_mask` (all but ca-fed), or too many clients for it to do so.
    """
    sizes = groups.sizes
    some, whole, count = np.zeros(len(sizes)), np.zeros(len(sizes)), 0
    for _, mask in store.arrays(run.id, EXCLUDED, limit):
        excluded = groups.sums(mask)
        some += excluded / sizes
        whole += excluded == sizes
        count += 1
    if count == 0:
        return {}
    return {name: (float(some[i] / count), float(whole[i] / count)) for i, name in enumerate(groups.names)}


def left_out_rounds(
    store: Reader, run: Run, groups: Groups, limit: int | None = None
) -> dict[str, tuple[float, float]]:
    """group -> (share of its available client-rounds not chosen, share of rounds in which nobody of it was chosen).

    Only what was available counts: the second is among the rounds in which somebody of the group was there. A group
    that was never there is missing. Read off the selections, so every policy has it; where there is no budget, it is
    how often ca-fed excluded a group while available.
    """
    size = len(groups.names)
    present, chosen, met, passed = np.zeros(size), np.zeros(size), np.zeros(size), np.zeros(size)
    for row in store.selections(run.id, limit):
        there = groups.sums(row.available)
        taken = np.bincount(groups.member[row.clients], minlength=size)
        present += there
        chosen += taken
        met += there > 0
        passed += (there > 0) & (taken == 0)
    return {
        name: (float(1 - chosen[i] / present[i]), float(passed[i] / met[i]))
        for i, name in enumerate(groups.names)
        if met[i] > 0
    }


@dataclass(frozen=True, kw_only=True)
class GroupAccount:
    """One run: what its groups should have had and what they got."""

    sizes: Mapping[str, int]
    target: Mapping[str, float]
    realized: Mapping[str, float]
    """Shares of all weight; they sum to 1. Empty where nobody ever entered the model."""
    excluded: Mapping[str, tuple[float, float]]
    """See `excluded_rounds`."""
    left_out: Mapping[str, tuple[float, float]]
    """See `left_out_rounds`."""
    total_variation: float | None
    """Between target and realised importance, over all clients; None where nobody ever entered the model."""
    chi_square: float | None
    """Likewise; infinite where some client with data never entered the model."""


def group_accounts(store: Reader, run: Run, grouping: str | Groups, limit: int | None = None) -> GroupAccount:
    """The accounts of one run over its first `limit` rounds."""
    groups = groups_of(store, run, grouping) if isinstance(grouping, str) else grouping
    target, weight = target_importance(store, run), realized_importance(store, run, limit)
    shares = weight / weight.sum() if weight.sum() > 0 else None

    def by_group(importance: FloatArray) -> dict[str, float]:
        return {name: float(share) for name, share in zip(groups.names, groups.sums(importance), strict=True)}

    return GroupAccount(
        sizes={name: int(size) for name, size in zip(groups.names, groups.sizes, strict=True)},
        target=by_group(target),
        realized={} if shares is None else by_group(shares),
        excluded=excluded_rounds(store, run, groups, limit),
        left_out=left_out_rounds(store, run, groups, limit),
        total_variation=None if shares is None else total_variation(target, shares),
        chi_square=None if shares is None else chi_square_divergence(target, shares),
    )
