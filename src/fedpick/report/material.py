"""Everything that the tables and charts of one experiment are made of, read from the store in one go.

`read_history` passes once over a run's rounds and keeps O(N) numbers, never rounds x N. Beyond what a screen can show
it keeps less: values of at most 500 rounds and the last one, and a raster in which neighbouring clients and rounds
share a cell that holds their mean (exact up to 250 clients and 400 rounds).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.experiments.store import Choices, Experiment, FederationFacts, Store, open_store
from fedpick.report.analysis import PolicyResults, Results, RunResults, load_results
from fedpick.report.fairness import Fairness, fairness_of
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
    "population_of",
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
    available: NDArray[np.float32]
    """Share of the cell's clients and rounds that were available."""
    chosen: NDArray[np.float32]
    """Mean number of the cell's clients chosen in one round."""
    clients_per_row: float
    rounds_per_column: float


@dataclass(frozen=True, kw_only=True, eq=False)
class RunHistory:
    """What one run did: at its P kept rounds (`RunResults.kept`) and client by client (N,)."""

    jain: FloatArray
    """(P,) Jain's index of the selection counts so far: 1 if all are equal, 1/N if one client has them all."""
    variance: FloatArray
    """(P,) variance of the selection counts so far."""
    coverage: FloatArray
    """(P,) share of the clients chosen at least once so far."""
    weight_sum: FloatArray
    """(P,) sum of the weights that entered the model."""
    weight_max: FloatArray
    """(P,) the largest of them."""
    effective: FloatArray
    """(P,) effective cohort: (sum of weights)^2 / sum of squares."""
    label_distance: FloatArray
    """(P,) total variation between the labels of the clients that completed and those of all data; NaN if unknown."""
    label_distance_so_far: FloatArray
    """(P,) likewise for the mean label mix of all cohorts so far."""
    labels: FloatArray | None
    """(P, L) share of each label among the examples of the clients that completed, mean over the rounds since the kept
    round before; NaN if none completed."""
    diagnostics: Mapping[str, FloatArray]
    """The plain numbers that the policy reported, (T,) each; NaN in rounds without."""
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
    fairness: Mapping[int, Fairness] = field(default_factory=dict)
    """By run id; only runs whose final model was measured for each client."""

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
    return Material(
        store=store,
        results=results,
        histories=histories,
        federations=federations,
        accounts=accounts,
        fairness=fairness_of(store, results),
    )


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

    def add(self, choices: Choices) -> None:
        rounds = len(choices.available)
        column = (choices.first + np.arange(rounds)) * self.columns // self.num_rounds
        self.per_column += np.bincount(column, minlength=self.columns)
        if self.exact is not None:
            self.exact[:, column] = np.where(choices.available.T, AVAILABLE, ABSENT)
            self.exact[choices.clients, column[choices.row]] = np.where(choices.completed, CHOSEN, FAILED)
        if len(self.row_starts):
            sums = np.add.reduceat(choices.available, self.row_starts, axis=1, dtype=np.int64) / self.row_sizes
            first, size = np.unique(column, return_index=True)[1], column[-1] + 1
            self.available[:, column[0] : size] += np.add.reduceat(sums, first, axis=0).T
            rows = np.searchsorted(self.row_starts, choices.clients, side="right") - 1
            np.add.at(self.chosen, (rows, column[choices.row]), 1)

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
            available=(self.available / seen).astype(np.float32),
            chosen=(self.chosen / seen).astype(np.float32),
            clients_per_row=self.num_clients / max(len(self.row_starts), 1),
            rounds_per_column=self.num_rounds / max(self.columns, 1),
        )


def population_of(federation: FederationFacts | None) -> FloatArray | None:
    """(L,) share of each label in the data of all clients."""
    if federation is None or federation.label_histogram is None:
        return None
    total = federation.label_histogram.sum(axis=0, dtype=np.int64).astype(np.float64)
    return total / total.sum() if total.sum() > 0 else None


class _LabelMix:
    """The labels of the cohorts, batch by batch."""

    def __init__(self, federation: FederationFacts, population: FloatArray, num_rounds: int) -> None:
        assert federation.label_histogram is not None
        self.histogram, self.population = federation.label_histogram, population
        self.distance, self.so_far = np.full((2, num_rounds), np.nan)
        self.sum, self.count = np.zeros(len(population)), 0

    def add(self, choices: Choices) -> tuple[FloatArray, BoolArray]:
        """(B, L) the label mix of each round, 0 in rounds where no client completed, and (B,) whether one did."""
        done, rounds = choices.completed, len(choices.available)
        starts = np.searchsorted(choices.row[done], np.arange(rounds))
        padded = np.append(self.histogram[choices.clients[done]], np.zeros((1, len(self.population)), np.int32), axis=0)
        mix = np.add.reduceat(padded, starts, axis=0, dtype=np.int64).astype(np.float64)
        mix[np.bincount(choices.row[done], minlength=rounds) == 0] = 0  # reduceat returns the next row
        total = mix.sum(axis=1)
        known = np.asarray(total > 0, np.bool_)
        mix /= np.maximum(total, 1)[:, None]
        steps = slice(choices.first, choices.first + rounds)
        self.distance[steps] = np.where(known, np.abs(mix - self.population).sum(axis=1) / 2, np.nan)
        sums, counts = self.sum + np.cumsum(mix, axis=0), self.count + np.cumsum(known)
        means = sums / np.maximum(counts, 1)[:, None]
        self.so_far[steps] = np.where(counts > 0, np.abs(means - self.population).sum(axis=1) / 2, np.nan)
        self.sum, self.count = sums[-1], int(counts[-1])
        return mix, known


def _earlier(clients: IntArray) -> IntArray:
    """How often the same client stands before each place.

    >>> _earlier(np.array([3, 1, 3, 3]))
    array([0, 0, 1, 2])
    """
    order = np.argsort(clients, kind="stable")
    ordered = clients[order]
    starts = np.searchsorted(ordered, ordered)
    result = np.empty(len(clients), np.int64)
    result[order] = np.arange(len(clients)) - starts
    return result


def read_history(store: Store, results: RunResults, federation: FederationFacts | None) -> RunHistory:
    """Read the rounds of one run."""
    kept, num_rounds = results.kept, len(results.rounds["round"])
    num_clients = 0 if federation is None else federation.num_clients
    population = population_of(federation)
    names = ("jain", "variance", "coverage", "weight_sum", "weight_max", "effective")
    columns = {name: np.full(num_rounds, np.nan) for name in names}
    mixes = None if federation is None or population is None else _LabelMix(federation, population, num_rounds)
    labels, present = np.zeros((len(kept), 0 if population is None else len(population))), np.zeros(len(kept))
    raster = _RasterBuilder(num_clients, num_rounds)
    counts = np.zeros(num_clients, np.int64)
    weight_per_client = np.zeros(num_clients)
    total = squares = covered = 0.0
    # The run may still be going: `results` was read a moment earlier.
    for choices in store.choices(results.run.id, limit=num_rounds):
        rounds = len(choices.available)
        steps = slice(choices.first, choices.first + rounds)
        # Update the sums by the cohort alone: O(k) per round, not O(N).
        before = counts[choices.clients] + _earlier(choices.clients)
        counts += np.bincount(choices.clients, minlength=num_clients)
        totals = total + np.cumsum(choices.per_round(np.ones(len(before))))
        square_sums = squares + np.cumsum(choices.per_round(2.0 * before + 1))
        covers = covered + np.cumsum(choices.per_round(before == 0))
        total, squares, covered = totals[-1], square_sums[-1], covers[-1]
        if num_clients:
            columns["variance"][steps] = np.maximum(square_sums / num_clients - (totals / num_clients) ** 2, 0.0)
            columns["coverage"][steps] = covers / num_clients
        columns["jain"][steps] = _ratio(totals**2, num_clients * square_sums, np.nan)
        weight = choices.per_round(choices.weights)
        largest = np.zeros(rounds)
        np.maximum.at(largest, choices.row, choices.weights)
        columns["weight_sum"][steps], columns["weight_max"][steps] = weight, largest
        columns["effective"][steps] = _ratio(weight**2, choices.per_round(choices.weights**2), 0.0)
        weight_per_client += np.bincount(choices.clients, choices.weights, num_clients)
        raster.add(choices)
        if mixes is not None:
            mix, known = mixes.add(choices)
            place = np.searchsorted(kept, np.arange(steps.start, steps.stop))
            np.add.at(labels, place, mix)
            np.add.at(present, place, known)
    if raster.is_exact:
        for index, mask in store.arrays(results.run.id, EXCLUDED_MASK, limit=num_rounds):
            raster.exclude(index, np.asarray(mask, bool))
    unknown = np.full(num_rounds, np.nan)
    columns["label_distance"] = unknown if mixes is None else mixes.distance
    columns["label_distance_so_far"] = unknown if mixes is None else mixes.so_far
    return RunHistory(
        **{name: values[kept] for name, values in columns.items()},
        labels=None if mixes is None else _ratio(labels, present[:, None], np.nan),
        diagnostics=_numbers(store.rounds(results.run.id, num_rounds, ("diagnostics",))["diagnostics"]),
        weight_per_client=weight_per_client,
        raster=raster.finish(),
    )


def _ratio(above: FloatArray, below: FloatArray, otherwise: float) -> FloatArray:
    """above / below; `otherwise` where below is 0."""
    result = np.full(above.shape, otherwise)
    np.divide(above, below, out=result, where=below > 0)
    return result


def _numbers(reported: NDArray[np.object_]) -> dict[str, FloatArray]:
    """Name -> (T,) the number of that name in each round, NaN where there is none; in order of appearance."""
    found: dict[str, FloatArray] = {}
    for step, values in enumerate(reported):
        for name, value in values.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                if name not in found:
                    found[name] = np.full(len(reported), np.nan)
                found[name][step] = value
    return found
