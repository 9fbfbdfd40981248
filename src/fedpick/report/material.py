"""Everything that the tables and charts of one experiment are made of, read from the store in one go.

`read_material` passes once over the choices of a run and keeps O(N) numbers, never rounds x N. Beyond what a screen can
show it keeps less: values of at most 500 rounds and the last one, and a raster in which neighbouring clients and rounds
share a cell that holds their mean (exact up to 250 clients and 400 rounds). Rasters of later seeds are left out where
those of the first seeds fill the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.experiments.store import Choices, Experiment, FederationFacts, Store
from fedpick.report.analysis import PolicyResults, Results, RunResults, load_results
from fedpick.report.fairness import Fairness, fairness_of
from fedpick.report.groups import EXCLUDED as EXCLUDED_MASK
from fedpick.report.groups import Accounting, GroupAccount, groups_of_runs

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
    "population_of",
    "read_material",
]


# The state of a client in a round. EXCLUDED and SHUT_OUT: the policy reports that it excluded the client, which was
# available or not. AVAILABLE: available and not chosen for any other reason.
ABSENT, AVAILABLE, CHOSEN, FAILED, EXCLUDED, SHUT_OUT = range(6)
_EXACT_CLIENTS, _EXACT_ROUNDS = 250, 400
_GROUPED_CLIENTS, _GROUPED_ROUNDS = 100, 200
_MOST_RASTER_CELLS = 400_000


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
    availability: FloatArray
    """(N,) share of the rounds in which each client was available."""
    raster: Raster | None
    """None if there is no room for it on the page."""


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

    def by_turns(self) -> Iterator[tuple[PolicyResults, RunResults]]:
        """(policy, run): the first seeds of all policies that have begun, then their second seeds, and so on."""
        for _, policy, run in _by_turns(self.results):
            yield policy, run

    def shared_federation(self) -> FederationFacts | None:
        """The federation of the first run that has one."""
        return next(iter(self.federations.values()), None)

    @property
    def grouping(self) -> str:
        """The grouping of the clients, "" if they are not grouped."""
        return next((account.groups.by for account in self.accounts.values()), "")


def read_material(
    store: Store, experiment: Experiment | str | int | None = None, *, grouping: str | None = None
) -> Material:
    """Read one experiment (None: the latest). `grouping`: one of GROUPINGS; None: the most telling one, if any."""
    which = experiment.id if isinstance(experiment, Experiment) else experiment
    results = load_results(store, store.experiment(which), counted=False)
    known: dict[int, FederationFacts] = {}
    federations: dict[int, FederationFacts] = {}
    runs = [run for policy in results.policies for run in policy.runs]
    for run in runs:
        number = run.run.federation_id
        if number is not None:
            if number not in known:
                known[number] = store.federation(number)
            federations[run.run.id] = known[number]
    grouped = groups_of_runs(store, results, grouping)
    drawn = _with_raster(results, federations)
    counts: dict[int, IntArray] = {}
    histories: dict[int, RunHistory] = {}
    accounts: dict[int, GroupAccount] = {}
    for run in runs:
        number, count = run.run.id, len(run.rounds["round"])
        if not count:
            continue
        history = _History(run, federations.get(number), with_raster=number in drawn)
        accounting = None
        if number in grouped:
            accounting = Accounting(grouped[number], federations[number].num_examples, run.kept)
        # The run may still be going: `results` was read a moment earlier.
        for choices in store.choices(number, limit=count):
            history.add(choices)
            if accounting is not None:
                accounting.add(choices)
        counts[number], histories[number] = history.counts, history.finish(store)
        if accounting is not None:
            accounts[number] = accounting.finish(store, run.run)
    results = _with_counts(results, counts)
    return Material(
        store=store,
        results=results,
        histories=histories,
        federations=federations,
        accounts=accounts,
        fairness=fairness_of(store, results, {number: each.availability for number, each in histories.items()}),
    )


def _with_counts(results: Results, counts: Mapping[int, IntArray]) -> Results:
    def counted(run: RunResults) -> RunResults:
        return replace(run, counts=counts.get(run.run.id, run.counts))

    policies = (replace(policy, runs=tuple(map(counted, policy.runs))) for policy in results.policies)
    return replace(results, policies=tuple(policies))


def _by_turns(results: Results) -> Iterator[tuple[int, PolicyResults, RunResults]]:
    """(turn, policy, run) of the runs that have begun; see `Material.by_turns`."""
    begun = [(policy, [run for run in policy.runs if len(run.rounds["round"])]) for policy in results.policies]
    for turn in range(max((len(runs) for _, runs in begun), default=0)):
        yield from ((turn, policy, runs[turn]) for policy, runs in begun if turn < len(runs))


def _raster_shape(num_clients: int, num_rounds: int) -> tuple[int, int, bool]:
    """(rows, columns, whether every client and round has a cell of its own)."""
    if num_clients <= _EXACT_CLIENTS and num_rounds <= _EXACT_ROUNDS:
        return num_clients, num_rounds, True
    return min(num_clients, _GROUPED_CLIENTS), min(num_rounds, _GROUPED_ROUNDS), False


def _with_raster(results: Results, federations: Mapping[int, FederationFacts]) -> set[int]:
    """The runs whose raster has room on the page: the first seed of every policy, then as many as fit."""
    cells, drawn = 0, set()
    for turn, _, run in _by_turns(results):
        if run.run.id in federations:
            num_clients = federations[run.run.id].num_clients
            rows, columns, exact = _raster_shape(num_clients, len(run.rounds["round"]))
            cells += rows * columns * (1 if exact else 2)
            if rows and (turn == 0 or cells <= _MOST_RASTER_CELLS):
                drawn.add(run.run.id)
    return drawn


class _RasterBuilder:
    """Fill a raster round by round."""

    def __init__(self, num_clients: int, num_rounds: int) -> None:
        rows, columns, is_exact = _raster_shape(num_clients, num_rounds)
        self.exact = np.zeros((rows, columns), np.uint8) if is_exact else None
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
        sums = np.add.reduceat(choices.available, self.row_starts, axis=1, dtype=np.int64) / self.row_sizes
        first, size = np.unique(column, return_index=True)[1], column[-1] + 1
        self.available[:, column[0] : size] += np.add.reduceat(sums, first, axis=0).T
        rows = np.searchsorted(self.row_starts, choices.clients, side="right") - 1
        cells = np.bincount(rows * self.columns + column[choices.row], minlength=self.chosen.size)
        self.chosen += cells.reshape(self.chosen.shape)

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


class _History:
    """The history of one run, batch by batch of its rounds."""

    def __init__(self, results: RunResults, federation: FederationFacts | None, *, with_raster: bool) -> None:
        self.run_id, self.kept = results.run.id, results.kept
        self.num_rounds = len(results.rounds["round"])
        self.num_clients = num_clients = 0 if federation is None else federation.num_clients
        population = population_of(federation)
        names = ("jain", "variance", "coverage", "weight_sum", "weight_max", "effective")
        self.columns = {name: np.full(self.num_rounds, np.nan) for name in names}
        self.mixes = None
        if federation is not None and population is not None:
            self.mixes = _LabelMix(federation, population, self.num_rounds)
        width = 0 if population is None else len(population)
        self.labels, self.present = np.zeros((len(self.kept), width)), np.zeros(len(self.kept))
        self.raster = _RasterBuilder(num_clients, self.num_rounds) if with_raster else None
        self.counts, self.available = np.zeros((2, num_clients), np.int64)
        self.weight_per_client = np.zeros(num_clients)
        self.total = self.squares = self.covered = 0.0

    def add(self, choices: Choices) -> None:
        columns, num_clients, rounds = self.columns, self.num_clients, len(choices.available)
        steps = slice(choices.first, choices.first + rounds)
        # Update the sums by the cohort alone: O(k) per round, not O(N).
        before = self.counts[choices.clients] + _earlier(choices.clients)
        self.counts += np.bincount(choices.clients, minlength=num_clients)
        totals = self.total + np.cumsum(choices.per_round(np.ones(len(before))))
        square_sums = self.squares + np.cumsum(choices.per_round(2.0 * before + 1))
        covers = self.covered + np.cumsum(choices.per_round(before == 0))
        self.total, self.squares, self.covered = totals[-1], square_sums[-1], covers[-1]
        if num_clients:
            columns["variance"][steps] = np.maximum(square_sums / num_clients - (totals / num_clients) ** 2, 0.0)
            columns["coverage"][steps] = covers / num_clients
        columns["jain"][steps] = _ratio(totals**2, num_clients * square_sums, np.nan)
        weight = choices.per_round(choices.weights)
        columns["weight_sum"][steps], columns["weight_max"][steps] = weight, _largest(choices)
        columns["effective"][steps] = _ratio(weight**2, choices.per_round(choices.weights**2), 0.0)
        self.weight_per_client += np.bincount(choices.clients, choices.weights, num_clients)
        self.available += choices.available.sum(axis=0)
        if self.raster is not None:
            self.raster.add(choices)
        if self.mixes is not None:
            mix, known = self.mixes.add(choices)
            place, first = np.unique(np.searchsorted(self.kept, np.arange(steps.start, steps.stop)), return_index=True)
            self.labels[place] += np.add.reduceat(mix, first, axis=0)
            self.present[place] += np.add.reduceat(known, first, dtype=np.int64)

    def finish(self, store: Store) -> RunHistory:
        """The history, with what the policy reported."""
        unknown = np.full(self.num_rounds, np.nan)
        self.columns["label_distance"] = unknown if self.mixes is None else self.mixes.distance
        self.columns["label_distance_so_far"] = unknown if self.mixes is None else self.mixes.so_far
        if self.raster is not None and self.raster.exact is not None:
            for index, mask in store.arrays(self.run_id, EXCLUDED_MASK, limit=self.num_rounds):
                self.raster.exclude(index, np.asarray(mask, bool))
        return RunHistory(
            **{name: values[self.kept] for name, values in self.columns.items()},
            labels=None if self.mixes is None else _ratio(self.labels, self.present[:, None], np.nan),
            diagnostics=_numbers(store.diagnostics(self.run_id, self.num_rounds), self.num_rounds),
            weight_per_client=self.weight_per_client,
            availability=self.available / max(self.num_rounds, 1),
            raster=None if self.raster is None else self.raster.finish(),
        )


def _largest(choices: Choices) -> FloatArray:
    """(B,) the largest weight of each round, 0 for a round without choices."""
    filled, first = np.unique(choices.row, return_index=True)
    largest = np.zeros(len(choices.available))
    if len(filled):
        largest[filled] = np.maximum(np.maximum.reduceat(choices.weights, first), 0.0)
    return largest


def _ratio(above: FloatArray, below: FloatArray, otherwise: float) -> FloatArray:
    """above / below; `otherwise` where below is 0."""
    result = np.full(above.shape, otherwise)
    np.divide(above, below, out=result, where=below > 0)
    return result


def _numbers(reported: Mapping[int, Mapping[str, Any]], num_rounds: int) -> dict[str, FloatArray]:
    """Name -> (T,) the number of that name in each round, NaN where there is none; in order of appearance."""
    found: dict[str, FloatArray] = {}
    for index, values in reported.items():
        for name, value in values.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                if name not in found:
                    found[name] = np.full(num_rounds, np.nan)
                found[name][index] = value
    return found
