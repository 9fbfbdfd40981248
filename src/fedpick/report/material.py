"""Everything that the tables and charts of one experiment are made of, read from the store in one go.

`read_history` passes once over a run's rounds and keeps O(N) numbers, never rounds x N. A raster is exact up to 250
clients and 400 rounds; beyond that, neighbouring clients and rounds share a cell that holds their mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.experiments.store import Experiment, FederationFacts, Store, open_store
from fedpick.report.analysis import PolicyResults, Results, RunResults, load_results
from fedpick.report.groups import EXCLUDED as EXCLUDED_MASK
from fedpick.report.groups import GroupAccount, accounts_of

__all__ = [
    "ABSENT",
    "AVAILABLE",
    "CHOSEN",
    "EXCLUDED",
    "FAILED",
    "SHUT_OUT",
    "Material",
    "Raster",
    "RunHistory",
    "opened",
    "read_history",
    "read_material",
]


# The state of a client in a round. EXCLUDED and SHUT_OUT: the policy reports that it excluded the client, which was
# available or not. AVAILABLE: available and not chosen for any other reason.
ABSENT, AVAILABLE, CHOSEN, FAILED, EXCLUDED, SHUT_OUT = range(6)
_EXACT_CLIENTS, _EXACT_ROUNDS = 250, 400
_GROUPED_CLIENTS, _GROUPED_ROUNDS = 100, 200


@dataclass(frozen=True, kw_only=True, eq=False)
class Raster:
    """Available and chosen clients: rows are clients, columns are rounds."""

    exact: NDArray[np.uint8] | None
    """The state of each client in each round (ABSENT, ...); None if clients or rounds share cells."""
    available: FloatArray
    """Share of the cell's clients and rounds that were available."""
    chosen: FloatArray
    """Mean number of the cell's clients chosen in one round."""
    clients_per_row: float
    rounds_per_column: float


@dataclass(frozen=True, kw_only=True, eq=False)
class RunHistory:
    """What one run did, round by round (T,) and client by client (N,)."""

    jain: FloatArray
    """(T,) Jain's index of the selection counts so far: 1 if all are equal, 1/N if one client has them all."""
    variance: FloatArray
    """(T,) variance of the selection counts so far."""
    coverage: FloatArray
    """(T,) share of the clients chosen at least once so far."""
    weight_sum: FloatArray
    """(T,) sum of the weights that entered the model."""
    weight_max: FloatArray
    """(T,) the largest of them."""
    effective: FloatArray
    """(T,) effective cohort: (sum of weights)^2 / sum of squares."""
    labels: FloatArray | None
    """(T, L) share of each label among the examples of the clients that completed; NaN if none did."""
    weight_per_client: FloatArray
    """(N,) sum over the rounds."""
    raster: Raster


@dataclass(frozen=True, kw_only=True, eq=False)
class Material:
    """Everything that the charts of one experiment are made of."""

    store: Store
    results: Results
    histories: Mapping[int, RunHistory]
    """By run id; only runs that have begun."""
    federations: Mapping[int, FederationFacts]
    """By run id."""
    accounts: Mapping[int, GroupAccount] = field(default_factory=dict)
    """By run id; empty if the clients are not grouped."""

    def begun(self, policy: PolicyResults) -> list[RunResults]:
        """The runs of a policy that have at least one round."""
        return [run for run in policy.runs if run.run.id in self.histories]

    def all_begun(self) -> list[RunResults]:
        """The runs of all policies that have at least one round."""
        return [run for policy in self.results.policies for run in self.begun(policy)]

    def by_turns(self) -> Iterator[tuple[PolicyResults, RunResults, int]]:
        """(policy, run, turn): the first seeds of all policies, then their second seeds, and so on."""
        for turn in range(max((len(policy.runs) for policy in self.results.policies), default=0)):
            for policy in self.results.policies:
                runs = self.begun(policy)
                if turn < len(runs):
                    yield policy, runs[turn], turn

    def shared_federation(self) -> FederationFacts | None:
        """The federation of the first run that has one."""
        return next(iter(self.federations.values()), None)

    @property
    def grouping(self) -> str:
        """The grouping of the clients, "" if they are not grouped."""
        return next((account.groups.by for account in self.accounts.values()), "")


@contextmanager
def opened(store: Store | str | Path) -> Iterator[Store]:
    """Open the store at a path or URL for the duration of the block; pass an open store through."""
    if isinstance(store, Store):
        yield store
        return
    own = open_store(store)
    try:
        yield own
    finally:
        own.close()


def read_material(
    store: Store, experiment: Experiment | str | int | None = None, *, grouping: str | None = None
) -> Material:
    """Read one experiment (None: the latest). `grouping`: one of GROUPINGS; None: the most telling one, if any."""
    which = experiment.id if isinstance(experiment, Experiment) else experiment
    results = load_results(store, store.experiment(which))
    known: dict[int, FederationFacts] = {}
    federations: dict[int, FederationFacts] = {}
    histories: dict[int, RunHistory] = {}
    for run in (run for policy in results.policies for run in policy.runs):
        number = run.run.federation_id
        if number is not None:
            if number not in known:
                known[number] = store.federation(number)
            federations[run.run.id] = known[number]
        if len(run.rounds["round"]):
            histories[run.run.id] = read_history(store, run, federations.get(run.run.id))
    accounts = accounts_of(store, results, grouping)
    return Material(store=store, results=results, histories=histories, federations=federations, accounts=accounts)


class _RasterBuilder:
    """Fill a raster round by round."""

    def __init__(self, num_clients: int, num_rounds: int) -> None:
        self.is_exact = num_clients <= _EXACT_CLIENTS and num_rounds <= _EXACT_ROUNDS
        rows = num_clients if self.is_exact else min(num_clients, _GROUPED_CLIENTS)
        columns = num_rounds if self.is_exact else min(num_rounds, _GROUPED_ROUNDS)
        self.exact = np.zeros((rows, columns), np.uint8) if self.is_exact else None
        self.row_starts = np.arange(rows, dtype=np.int64) * num_clients // max(rows, 1)
        self.row_sizes = np.diff(self.row_starts, append=num_clients)
        self.num_rounds, self.columns = num_rounds, columns
        self.num_clients = num_clients
        self.available = np.zeros((rows, columns))
        self.chosen = np.zeros((rows, columns))
        self.per_column = np.zeros(columns)

    def add(self, step: int, available: BoolArray, clients: IntArray, done: BoolArray) -> None:
        column = step * self.columns // self.num_rounds
        self.per_column[column] += 1
        if self.exact is not None:
            self.exact[:, column] = np.where(available, AVAILABLE, ABSENT)
            self.exact[clients, column] = np.where(done, CHOSEN, FAILED)
        if len(self.row_starts):
            self.available[:, column] += np.add.reduceat(available, self.row_starts, dtype=np.int64) / self.row_sizes
            rows = np.searchsorted(self.row_starts, clients, side="right") - 1
            self.chosen[:, column] += np.bincount(rows, minlength=len(self.row_starts))

    def exclude(self, column: int, mask: BoolArray) -> None:
        """Mark the clients that the policy excluded; a client chosen in spite of that stays chosen."""
        if self.exact is None or mask.shape != self.exact.shape[:1]:
            return
        codes = self.exact[:, column]
        codes[mask & (codes == AVAILABLE)] = EXCLUDED
        codes[mask & (codes == ABSENT)] = SHUT_OUT

    def finish(self) -> Raster:
        seen = np.maximum(self.per_column, 1)
        return Raster(
            exact=self.exact,
            available=self.available / seen,
            chosen=self.chosen / seen,
            clients_per_row=self.num_clients / max(len(self.row_starts), 1),
            rounds_per_column=self.num_rounds / max(self.columns, 1),
        )


def read_history(store: Store, results: RunResults, federation: FederationFacts | None) -> RunHistory:
    """Read the rounds of one run."""
    num_rounds = len(results.rounds["round"])
    num_clients = 0 if federation is None else federation.num_clients
    histogram = None if federation is None else federation.label_histogram
    names = ("jain", "variance", "coverage", "weight_sum", "weight_max", "effective")
    columns = {name: np.full(num_rounds, np.nan) for name in names}
    labels = None if histogram is None else np.full((num_rounds, histogram.shape[1]), np.nan)
    raster = _RasterBuilder(num_clients, num_rounds)
    counts = np.zeros(num_clients, np.int64)
    weight_per_client = np.zeros(num_clients)
    # Update the sums by the cohort alone: O(k) per round, not O(N).
    total = squares = covered = 0
    for step, choice in enumerate(store.choices(results.run.id, limit=results.wanted)):
        if step >= num_rounds:
            break  # the run is still going: `results` was read a moment earlier
        before = counts[choice.clients]
        counts[choice.clients] = before + 1
        total += len(before)
        squares += int((2 * before + 1).sum())
        covered += int(np.count_nonzero(before == 0))
        if num_clients:
            columns["variance"][step] = max(squares / num_clients - (total / num_clients) ** 2, 0.0)
            columns["coverage"][step] = covered / num_clients
        if squares:
            columns["jain"][step] = total**2 / (num_clients * squares)
        weight, weight_squares = float(choice.weights.sum()), float((choice.weights**2).sum())
        columns["weight_sum"][step] = weight
        columns["weight_max"][step] = choice.weights.max(initial=0.0)
        columns["effective"][step] = weight**2 / weight_squares if weight_squares > 0 else 0.0
        np.add.at(weight_per_client, choice.clients, choice.weights)
        raster.add(step, choice.available, choice.clients, choice.completed)
        if labels is not None and histogram is not None:
            mix = histogram[choice.clients[choice.completed]].sum(axis=0, dtype=np.int64)
            if mix.sum() > 0:
                labels[step] = mix / mix.sum()
    if raster.is_exact:
        for index, mask in store.arrays(results.run.id, EXCLUDED_MASK, limit=num_rounds):
            raster.exclude(index, np.asarray(mask, bool))
    return RunHistory(**columns, labels=labels, weight_per_client=weight_per_client, raster=raster.finish())
