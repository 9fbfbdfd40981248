"""One pass over a run's selections: everything that the figures about clients need, in memory O(N), never rounds x N.

Rasters are exact while they fit (one cell per client and round); beyond that neighbouring clients and rounds share a
cell, and the cell holds the share of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import FloatArray
from fedpick.experiments.store_read import FederationFacts, Reader
from fedpick.report import accounting
from fedpick.report.analysis import RunResults

__all__ = ["ABSENT", "AVAILABLE", "CHOSEN", "EXCLUDED", "FAILED", "SHUT_OUT", "Raster", "RunTrace", "collect"]


# Of a client in a round. EXCLUDED: available, and the policy says that it excluded the client; SHUT_OUT: so, but not
# available either, so that nobody would notice. AVAILABLE: available, and for whatever other reason not chosen.
ABSENT, AVAILABLE, CHOSEN, FAILED, EXCLUDED, SHUT_OUT = 0, 1, 2, 3, 4, 5
_EXACT_CLIENTS, _EXACT_ROUNDS = 250, 400
_GROUPED_CLIENTS, _GROUPED_ROUNDS = 100, 200


@dataclass(frozen=True, kw_only=True, eq=False)
class Raster:
    """Who was available and who was chosen: rows are clients, columns are rounds."""

    exact: NDArray[np.uint8] | None
    """What became of each client in each round (ABSENT, ...); None where cells had to be shared."""
    available: FloatArray
    """Share of the cell's clients and rounds that were available."""
    chosen: FloatArray
    """Mean number of the cell's clients chosen in one round."""
    clients_per_row: float
    rounds_per_column: float


@dataclass(frozen=True, kw_only=True, eq=False)
class RunTrace:
    """What one run did, round by round (T,) and client by client (N,)."""

    jain: FloatArray
    """(T,) Jain's index of the selection counts so far: 1 where all are equal, 1/N where one client has them all."""
    variance: FloatArray
    """(T,) variance of the selection counts so far."""
    coverage: FloatArray
    """(T,) share of the clients chosen at least once so far."""
    weight_sum: FloatArray
    """(T,) sum of the weights that entered the model."""
    weight_max: FloatArray
    """(T,) the largest of them."""
    effective: FloatArray
    """(T,) (sum of weights)^2 / sum of squares: how many clients the round's model really rests on."""
    labels: FloatArray | None
    """(T, L) share of each label among the examples of those who completed; NaN where nobody did."""
    weight_per_client: FloatArray
    """(N,) sum over the rounds."""
    available_per_client: FloatArray
    """(N,) share of the rounds."""
    raster: Raster


class _RasterBuilder:
    """Fills the raster column by column."""

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

    def add(self, step: int, available: NDArray[np.bool_], clients: NDArray[np.int64], done: NDArray[np.bool_]) -> None:
        column = step * self.columns // self.num_rounds
        self.per_column[column] += 1
        if self.exact is not None:
            self.exact[:, column] = np.where(available, AVAILABLE, ABSENT)
            self.exact[clients, column] = np.where(done, CHOSEN, FAILED)
        if len(self.row_starts):
            self.available[:, column] += np.add.reduceat(available, self.row_starts, dtype=np.int64) / self.row_sizes
            rows = np.searchsorted(self.row_starts, clients, side="right") - 1
            self.chosen[:, column] += np.bincount(rows, minlength=len(self.row_starts))

    def exclude(self, column: int, mask: NDArray[np.bool_]) -> None:
        """Mark those whom the policy excluded; whoever was chosen all the same stays chosen."""
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


def collect(store: Reader, results: RunResults, federation: FederationFacts | None) -> RunTrace:
    """Read the selections of one run."""
    num_rounds = len(results.rounds["round"])
    num_clients = 0 if federation is None else federation.num_clients
    histogram = None if federation is None else federation.label_histogram
    columns = {name: np.full(num_rounds, np.nan) for name in _PER_ROUND}
    labels = None if histogram is None else np.full((num_rounds, histogram.shape[1]), np.nan)
    raster = _RasterBuilder(num_clients, num_rounds)
    counts = np.zeros(num_clients, np.int64)
    weight_per_client, available_per_client = np.zeros(num_clients), np.zeros(num_clients)
    # Sums are kept up to date by the cohort alone: a round costs O(k), not O(N).
    total = squares = covered = 0
    for step, row in enumerate(store.selections(results.run.id, limit=results.wanted)):
        if step >= num_rounds:
            break  # a run that is still going: the rounds were read a moment earlier
        before = counts[row.clients]
        counts[row.clients] = before + 1
        total += len(before)
        squares += int((2 * before + 1).sum())
        covered += int(np.count_nonzero(before == 0))
        _fairness(columns, step, num_clients, total, squares, covered)
        _weights(columns, step, row.weights)
        np.add.at(weight_per_client, row.clients, row.weights)
        available_per_client += row.available
        raster.add(step, row.available, row.clients, row.completed)
        if labels is not None and histogram is not None:
            mix = histogram[row.clients[row.completed]].sum(axis=0, dtype=np.int64)
            if mix.sum() > 0:
                labels[step] = mix / mix.sum()
    if raster.is_exact:
        for index, mask in store.arrays(results.run.id, accounting.EXCLUDED, limit=num_rounds):
            raster.exclude(index, np.asarray(mask, bool))
    return RunTrace(
        **columns,
        labels=labels,
        weight_per_client=weight_per_client,
        available_per_client=available_per_client / max(num_rounds, 1),
        raster=raster.finish(),
    )


_PER_ROUND = ("jain", "variance", "coverage", "weight_sum", "weight_max", "effective")


def _fairness(columns: dict[str, Any], step: int, num_clients: int, total: int, squares: int, covered: int) -> None:
    if num_clients == 0:
        return
    mean = total / num_clients
    columns["variance"][step] = max(squares / num_clients - mean**2, 0.0)
    columns["coverage"][step] = covered / num_clients
    if squares:
        columns["jain"][step] = total**2 / (num_clients * squares)


def _weights(columns: dict[str, Any], step: int, weights: FloatArray) -> None:
    columns["weight_sum"][step] = weights.sum()
    columns["weight_max"][step] = weights.max(initial=0.0)
    squares = float((weights**2).sum())
    columns["effective"][step] = float(weights.sum()) ** 2 / squares if squares > 0 else 0.0
