"""Groups of clients: the importance that a run gave each group, against the importance it should have given (CA-Fed).

The store does not hold true availabilities. `groups_of` therefore rebuilds the availability process of a run from the
stored settings, seed and client table, and groups the clients by it:

- "availability": more available (pi_k of at least 1/2) or less available, and correlated (|lambda_k| above 0.1) or
  weakly correlated, as in CA-Fed's population;
- "cluster": the clusters of the process `clustered`.

Everything else here comes from the stored rounds. Importance is the weight with which updates entered the model; its
target is the client's share of the examples. "Excluded" clients are those that the policy reports (`excluded_mask`,
ca-fed only), available or not. "Left out" clients were available and not chosen, under any policy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick import availability
from fedpick.availability.statistics import GROUPINGS, groups_of_trace
from fedpick.core.arrays import FloatArray, IntArray
from fedpick.core.errors import FedpickError, InvalidInput
from fedpick.core.types import Clients
from fedpick.experiments.input_files import refuse_changed_files
from fedpick.experiments.settings import availability_of
from fedpick.experiments.store import Choices, Run, Store
from fedpick.report.analysis import Results
from fedpick.theory.ca_fed import chi_square_divergence

__all__ = [
    "EXCLUDED",
    "GROUPINGS",
    "Accounting",
    "GroupAccount",
    "Groups",
    "account_groups",
    "accounts_of",
    "find_groups",
    "groups_of",
    "groups_of_runs",
]

EXCLUDED = "policy/excluded_mask"
"""Name of the stored array in which a policy reports the clients it excludes."""
_MOST_GROUPS = 20
_NAMES = (
    "less available, correlated",
    "less available, weakly correlated",
    "more available, correlated",
    "more available, weakly correlated",
)


@dataclass(frozen=True, eq=False)
class Groups:
    """The group of every client."""

    by: str
    """The grouping, one of GROUPINGS."""
    names: tuple[str, ...]
    """Of the groups that have clients, in order."""
    member: IntArray
    """(N,) position of the client's group in `names`."""
    correlation: FloatArray
    """(N,) lambda_k; orders the clients within a group."""

    @property
    def sizes(self) -> IntArray:
        """(G,) clients in each group."""
        return np.bincount(self.member, minlength=len(self.names)).astype(np.int64)

    @property
    def order(self) -> IntArray:
        """(N,) the clients group by group; within a group by correlation, then by number."""
        return np.lexsort((np.abs(self.correlation), self.member)).astype(np.int64)

    def sums(self, values: NDArray[Any]) -> FloatArray:
        """(G,) sum over the clients of each group."""
        return np.bincount(self.member, weights=values, minlength=len(self.names)).astype(np.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupAccount:
    """What the groups of one run should have had and what they got."""

    groups: Groups
    target: Mapping[str, float]
    realized: Mapping[str, float]
    """Shares of all weight; they sum to 1. Empty if no update entered the model."""
    excluded: Mapping[str, tuple[float, float]]
    """(share of its client-rounds excluded, share of rounds in which all of it was excluded).

    Empty if the policy stores no `excluded_mask`: all but ca-fed, and ca-fed with too many clients.
    """
    left_out: Mapping[str, tuple[float, float]]
    """(share of its available client-rounds not chosen, share of rounds with an available client but none chosen).

    A group that was never available is missing.
    """
    cumulative: FloatArray
    """(P, G) share of all weight that each group has had up to each kept round; NaN before the first weight."""
    distance: FloatArray
    """(P,) total variation between the target and the importance up to each round, over all clients; NaN likewise."""
    chi_square: float | None
    """Divergence over all clients at the end; infinite if a client with data never entered the model."""

    @property
    def total_variation(self) -> float | None:
        """Distance at the end; None if no update entered the model."""
        return float(self.distance[-1]) if self.realized else None


def groups_of(store: Store, run: Run, grouping: str) -> Groups:
    """Group the clients of a run; the module describes the groupings."""
    if grouping not in GROUPINGS:
        raise InvalidInput(f"Clients are grouped by {' or '.join(sorted(GROUPINGS))}. Got {grouping!r}.")
    found = _grouped(_rebuilt_trace(store, run), grouping)
    if found is None:
        name = run.settings["availability"]["name"]
        raise InvalidInput(
            f"The availability {name!r} has no clusters: only 'clustered' has. Group by availability instead."
        )
    return found


def find_groups(store: Store, run: Run, most: int = _MOST_GROUPS) -> Groups | None:
    """Group by cluster if there are clusters, else by availability.

    None if all clients are in one group, or if the process cannot be rebuilt: its file is missing or has changed, or
    the process is not registered here.
    """
    try:
        trace = _rebuilt_trace(store, run)
        for grouping in GROUPINGS:
            found = _grouped(trace, grouping)
            if found is not None and 2 <= len(found.names) <= most:
                return found
    except (FedpickError, OSError):
        pass
    return None


def _grouped(trace: availability.Trace, grouping: str) -> Groups | None:
    numbers = groups_of_trace(trace, grouping)
    if numbers is None:
        return None
    known, member = np.unique(numbers, return_inverse=True)
    if grouping == "cluster":
        width = len(str(known.max()))
        names = tuple(f"cluster {number:0{width}d}" for number in known)
    else:
        names = tuple(_NAMES[number] for number in known)
    return Groups(grouping, names, member.astype(np.int64), np.asarray(trace.correlation, np.float64))


def _rebuilt_trace(store: Store, run: Run) -> availability.Trace:
    """The availability of the run, from its settings, its seed and the sizes and labels of its clients."""
    if run.federation_id is None:
        raise InvalidInput(
            f"The run of {run.label} with seed {run.seed} has not begun: it has no clients to group yet."
        )
    if "availability" not in run.settings:
        raise InvalidInput(f"The run of {run.label} was recorded: the process of its availability is not known.")
    facts = store.federation(run.federation_id)
    histogram = None if facts.label_histogram is None else facts.label_histogram.astype(np.float64)
    clients = Clients(num_examples=facts.num_examples, label_histogram=histogram)
    refuse_changed_files(run.manifest, run.settings, ["availability"])
    process = run.settings["availability"]
    if "name" not in process:
        raise InvalidInput(f"The settings of {run.label} name no availability. Run `fedpick verify` on the store.")
    return availability_of(process).start(clients, process.get("seed", run.seed))


def accounts_of(store: Store, results: Results, grouping: str | None = None) -> dict[int, GroupAccount]:
    """The account of every run of `groups_of_runs`, by run id."""
    grouped = groups_of_runs(store, results, grouping)
    return {
        each.run.id: account_groups(store, each.run, grouped[each.run.id], each.kept)
        for policy in results.policies
        for each in policy.runs
        if each.run.id in grouped
    }


def groups_of_runs(store: Store, results: Results, grouping: str | None = None) -> dict[int, Groups]:
    """The groups of every run that has begun, by run id. `grouping` None: see `find_groups`; runs may be missing."""
    # Policies share the availability of a seed: rebuild it once.
    known: dict[str, Groups | None] = {}
    by = grouping
    grouped = {}
    for each in (each for policy in results.policies for each in policy.runs if len(each.rounds["round"])):
        run = each.run
        key = json.dumps([run.settings.get("availability"), run.seed, run.federation_id], sort_keys=True)
        if key not in known:
            known[key] = find_groups(store, run) if grouping is None else groups_of(store, run, grouping)
        groups = known[key]
        if groups is not None and groups.by == (by or groups.by):
            by = groups.by
            grouped[run.id] = groups
    return grouped


def account_groups(store: Store, run: Run, groups: Groups, kept: IntArray | None = None) -> GroupAccount:
    """The account of one run up to the last of the `kept` rounds, with values over time for these (None: all)."""
    if run.federation_id is None:
        raise InvalidInput(f"The run of {run.label} with seed {run.seed} has not begun: it has no rounds yet.")
    sizes = store.federation(run.federation_id).num_examples
    accounting = Accounting(groups, sizes, np.arange(run.rounds_done) if kept is None else kept)
    for choices in store.choices(run.id, accounting.limit):
        accounting.add(choices)
    return accounting.finish(store, run)


class Accounting:
    """The account of one run, batch by batch of its rounds up to the last of the `kept` ones."""

    def __init__(self, groups: Groups, num_examples: FloatArray, kept: IntArray) -> None:
        self.groups, self.kept = groups, kept
        self.limit = int(kept[-1]) + 1 if len(kept) else 0
        count = len(groups.names)
        self._target = num_examples / num_examples.sum()
        self._order = np.argsort(groups.member, kind="stable")
        self._starts = np.searchsorted(groups.member[self._order], np.arange(count))
        self._weight = np.zeros(len(groups.member))
        self._present, self._chosen, self._met, self._passed = np.zeros((4, count))
        self._cumulative, self._distance = np.full((len(kept), count), np.nan), np.full(len(kept), np.nan)

    def add(self, choices: Choices) -> None:
        """Add the next rounds."""
        groups, order, starts = self.groups, self._order, self._starts
        rounds, count = len(choices.available), len(groups.names)
        there = np.add.reduceat(choices.available[:, order], starts, axis=1, dtype=np.int64)
        cells = choices.row * count + groups.member[choices.clients]
        taken = np.bincount(cells, minlength=rounds * count).reshape(rounds, count)
        self._present += there.sum(axis=0)
        self._chosen += taken.sum(axis=0)
        self._met += (there > 0).sum(axis=0)
        self._passed += ((there > 0) & (taken == 0)).sum(axis=0)
        # The weights between two kept rounds of this batch, then up to each of them.
        place = slice(*np.searchsorted(self.kept, (choices.first, choices.first + rounds)))
        part = np.searchsorted(self.kept[place], choices.first + choices.row)
        shape = (place.stop - place.start + 1, len(self._weight))
        added = np.bincount(part * shape[1] + choices.clients, choices.weights, shape[0] * shape[1]).reshape(shape)
        weights = self._weight + np.cumsum(added, axis=0)
        self._weight = weights[-1]
        total = weights[:-1].sum(axis=1)
        shares = np.full((len(total), shape[1]), np.nan)
        np.divide(weights[:-1], total[:, None], out=shares, where=total[:, None] > 0)
        self._cumulative[place] = np.add.reduceat(shares[:, order], starts, axis=1)
        self._distance[place] = np.abs(shares - self._target).sum(axis=1) / 2

    def finish(self, store: Store, run: Run) -> GroupAccount:
        """The account, with the exclusions that the policy of the run stored."""
        groups, weight = self.groups, self._weight
        weighted = weight.sum() > 0
        return GroupAccount(
            groups=groups,
            target=_by_name(groups, groups.sums(self._target)),
            realized=_by_name(groups, self._cumulative[-1]) if weighted else {},
            excluded=_excluded(store, run, groups, self.limit),
            left_out={
                name: (float(1 - self._chosen[at] / self._present[at]), float(self._passed[at] / self._met[at]))
                for at, name in enumerate(groups.names)
                if self._met[at] > 0
            },
            cumulative=self._cumulative,
            distance=self._distance,
            chi_square=chi_square_divergence(self._target, weight / weight.sum()) if weighted else None,
        )


def _by_name(groups: Groups, values: FloatArray) -> dict[str, float]:
    return {name: float(value) for name, value in zip(groups.names, values, strict=True)}


def _excluded(store: Store, run: Run, groups: Groups, limit: int | None) -> dict[str, tuple[float, float]]:
    """See `GroupAccount.excluded`."""
    sizes = groups.sizes
    some, whole, count = np.zeros(len(sizes)), np.zeros(len(sizes)), 0
    for _, mask in store.arrays(run.id, EXCLUDED, limit):
        excluded = groups.sums(mask)
        some += excluded / sizes
        whole += excluded == sizes
        count += 1
    if count == 0:
        return {}
    return {name: (float(some[place] / count), float(whole[place] / count)) for place, name in enumerate(groups.names)}
