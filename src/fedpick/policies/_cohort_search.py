"""The solver of FedGS: a cohort of fixed size that maximises a sum of single values and of values of pairs.

Problem: from n candidates choose m, maximising

    sum over the chosen i of value_i  +  sum over the chosen pairs i < j of pair[prototype_i, prototype_j].

Candidates of one prototype differ only in their value, so an optimal cohort takes the best ones of each prototype. The
search therefore decides only *how many* candidates of each prototype to take: a problem with a million candidates is as
large as the number of its prototypes, and the optimum is the same. The search builds cohorts greedily from different
first members, and improves each by the best swap of one member until no swap helps. All cohorts advance together, as
rows of the same arrays, and every step updates running sums instead of adding them up again.

The limit on work counts operations, not time: equal problems give equal cohorts on every machine. The generator that is
passed in breaks ties.

`objectives_reference` is the objective as printed above, for any cohorts: the tests enumerate all of them with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import FloatArray, IntArray

__all__ = ["WORK_LIMIT", "Cohort", "best_cohort", "objectives_reference"]


WORK_LIMIT = 30_000_000
"""Approximate number of array elements that the search may read: about a tenth of a second."""
_MOST_STARTS = 128
# A swap must gain more than a rounding error. Otherwise the search could swap two members back and forth for ever.
_TOLERANCE = 1e-12


@dataclass(frozen=True)
class Cohort:
    """The result of a search."""

    positions: IntArray
    """(m,) positions of the chosen candidates."""
    objective: float
    starts: int
    swaps: int


@dataclass(frozen=True)
class _Candidates:
    """All candidates, grouped by prototype, the best value of each prototype first."""

    order: IntArray  # (n,) position of each candidate in the caller's arrays
    values: FloatArray  # (n,)
    offset: IntArray  # (P,) where the candidates of a prototype begin
    size: IntArray  # (P,) how many candidates a prototype has
    pair: FloatArray  # (P, P)

    def value_at(self, prototypes: IntArray, rank: IntArray | np.int64) -> FloatArray:
        """The value of the candidate with this rank in its prototype (0: the best); -inf beyond the last."""
        position = self.offset[prototypes] + np.minimum(rank, self.size[prototypes] - 1)
        return np.where(rank < self.size[prototypes], self.values[position], -np.inf)


@dataclass
class _Batch:
    """K cohorts under construction."""

    taken: IntArray  # (K, P) how many candidates of each prototype
    pair_sum: FloatArray  # (K, P) sum of the pair values of a prototype with the members of the cohort
    next_value: FloatArray  # (K, P) value of the best candidate not taken, -inf if all are taken
    last_value: FloatArray  # (K, P) value of the worst candidate taken, +inf if none is
    members: IntArray  # (K, R) prototypes of which a swap may remove a candidate

    def only(self, kept: NDArray[Any]) -> _Batch:
        """The batch with only these cohorts."""
        return _Batch(
            self.taken[kept], self.pair_sum[kept], self.next_value[kept], self.last_value[kept], self.members[kept]
        )


def best_cohort(
    values: FloatArray,
    prototype: IntArray,
    pair: FloatArray,
    size: int,
    rng: np.random.Generator,
    work: int = WORK_LIMIT,
) -> Cohort:
    """Choose `size` of the n candidates.

    Args:
        values: (n,) value of each candidate on its own.
        prototype: (n,) the row of `pair` that belongs to each candidate.
        pair: (P, P) symmetric; the diagonal is for two candidates of the same prototype.
        size: how many to choose.
        rng: breaks ties.
        work: limit on the number of array elements read.

    >>> far = np.array([[0.0, 9.0, 1.0], [9.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    >>> best_cohort(np.zeros(3), np.arange(3), far, 2, np.random.default_rng(0)).objective
    9.0
    """
    count = len(values)
    if size >= count:
        return Cohort(np.arange(count, dtype=np.int64), _objective(values, prototype, pair), starts=0, swaps=0)
    if size <= 0:
        return Cohort(np.empty(0, dtype=np.int64), 0.0, starts=0, swaps=0)
    candidates = _grouped(values, prototype, pair, rng)
    cohorts, swaps = _improve(candidates, _construct(candidates, size, work), size, work)
    objectives = _objectives(candidates, cohorts)
    taken = cohorts[int(np.argmax(objectives))]
    positions = np.sort(candidates.order[_taken_rows(candidates, taken)])
    return Cohort(positions, float(objectives.max()), starts=len(cohorts), swaps=swaps)


def objectives_reference(values: FloatArray, pair: FloatArray, cohorts: IntArray) -> FloatArray:
    """The objective of each row of (S, m) cohorts of n candidates, with (n, n) pair values."""
    total: FloatArray = values[cohorts].sum(axis=1)
    for i, j in combinations(range(cohorts.shape[1]), 2):
        total += pair[cohorts[:, i], cohorts[:, j]]
    return total


def _objective(values: FloatArray, prototype: IntArray, pair: FloatArray) -> float:
    taken = np.bincount(prototype, minlength=len(pair)).astype(np.float64)
    return float(values.sum() + (taken @ pair @ taken - taken @ np.diagonal(pair)) / 2)


def _grouped(values: FloatArray, prototype: IntArray, pair: FloatArray, rng: np.random.Generator) -> _Candidates:
    # Shuffled before the stable sort, so that equal candidates have equal chances.
    order = rng.permutation(len(values))
    order = order[np.lexsort((-values[order], prototype[order]))]
    present, offset, size = np.unique(prototype[order], return_index=True, return_counts=True)
    # The search takes the first of several equally good prototypes: shuffled for the same reason.
    shuffled = rng.permutation(len(present))
    present = present[shuffled]
    return _Candidates(
        order=order,
        values=values[order],
        offset=offset[shuffled].astype(np.int64),
        size=size[shuffled].astype(np.int64),
        pair=np.ascontiguousarray(pair[np.ix_(present, present)]),
    )


def _construct(candidates: _Candidates, size: int, work: int) -> _Batch:
    """Greedy cohorts that differ in their first one or two members."""
    prototypes = len(candidates.offset)
    per_start = size * prototypes * (1 + min(size, prototypes))
    first, second = _first_members(candidates, size, int(np.clip(work // per_start, 1, _MOST_STARTS)))
    starts = len(first)
    rows = np.arange(starts)
    picks = np.empty((starts, size), dtype=np.int64)
    taken = np.zeros((starts, prototypes), dtype=np.int64)
    pair_sum = np.zeros((starts, prototypes))
    next_value = np.tile(candidates.values[candidates.offset], (starts, 1))
    for place in range(size):
        chosen = first if place == 0 else np.argmax(next_value + pair_sum, axis=1)
        if place == 1:
            chosen = np.where(second >= 0, second, chosen)
        picks[:, place] = chosen
        taken[rows, chosen] += 1
        pair_sum += candidates.pair[chosen]
        next_value[rows, chosen] = candidates.value_at(chosen, taken[rows, chosen])
    all_prototypes = np.broadcast_to(np.arange(prototypes), taken.shape)
    last_value = np.where(taken > 0, candidates.value_at(all_prototypes, np.maximum(taken - 1, 0)), np.inf)
    # The shorter of two lists that contain every prototype in the cohort. A prototype outside the cohort is never
    # removed, because its last_value is infinite.
    members = picks if size <= prototypes else all_prototypes.copy()
    # Many starts lead to the same cohort. Each is improved once.
    _, distinct = np.unique(
        (taken.astype(np.uint64) * _multipliers(prototypes)).sum(axis=1, dtype=np.uint64), return_index=True
    )
    batch = _Batch(taken=taken, pair_sum=pair_sum, next_value=next_value, last_value=last_value, members=members)
    return batch.only(distinct)


def _multipliers(count: int) -> NDArray[np.uint64]:
    """Odd numbers. The sum of their multiples is a hash of the factors."""
    result: NDArray[np.uint64] = (np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(
        1
    )
    return result ^ (result >> np.uint64(31))


def _first_members(candidates: _Candidates, size: int, starts: int) -> tuple[IntArray, IntArray]:
    """(first, second) prototype of each start: the best single ones, then the best pairs; -1: chosen greedily."""
    top = candidates.values[candidates.offset]
    prototypes = len(top)
    first = np.argsort(-top, kind="stable")[:starts]
    second = np.full(len(first), -1, dtype=np.int64)
    if starts <= prototypes or size < 2:
        return first, second
    together = candidates.pair + top[:, None] + top
    np.fill_diagonal(
        together, np.diagonal(candidates.pair) + top + candidates.value_at(np.arange(prototypes), np.int64(1))
    )
    left, right = np.triu_indices(prototypes)
    value = together[left, right]
    best = np.argsort(-value, kind="stable")[: starts - prototypes]
    best = best[np.isfinite(value[best])]  # a pair of the same prototype needs two candidates
    return np.concatenate([first, left[best]]), np.concatenate([second, right[best]])


def _improve(candidates: _Candidates, batch: _Batch, size: int, work: int) -> tuple[IntArray, int]:
    """Make the best swap in every cohort until no swap gains anything: (cohorts (K, P), number of swaps)."""
    own = np.diagonal(candidates.pair)
    pairs = candidates.pair[batch.members]  # (K, R, P): what the pair_sum of each prototype loses with this member
    scale = np.abs(candidates.values).max() + size * np.abs(candidates.pair).max()
    finished: list[IntArray] = []
    swaps, left = 0, 4 * work
    while left > 0 or swaps == 0:
        left -= pairs.size
        rows = np.arange(len(batch.taken))
        removed = (batch.last_value + batch.pair_sum - own)[rows[:, None], batch.members]  # (K, R)
        change = (batch.next_value + batch.pair_sum)[:, None, :] - pairs  # (K, R, P)
        change -= removed[:, :, None]
        flat = change.reshape(len(rows), -1)
        best = flat.argmax(axis=1)
        improved = flat[rows, best] > _TOLERANCE * scale
        if not improved.all():
            finished.append(batch.taken[~improved])
            if not improved.any():
                return np.concatenate(finished), swaps
            batch, pairs, best = batch.only(improved), pairs[improved], best[improved]
        rows = np.arange(len(best))
        member, new = np.divmod(best, len(candidates.offset))
        _swap(candidates, batch, batch.members[rows, member], new)
        swaps += len(rows)
        if size <= len(candidates.offset):
            batch.members[rows, member] = new
            pairs[rows, member] = candidates.pair[new]
    return np.concatenate([*finished, batch.taken]), swaps


def _swap(candidates: _Candidates, batch: _Batch, old: IntArray, new: IntArray) -> None:
    """Replace a candidate of prototype `old` by one of `new` in every cohort, in place."""
    rows = np.arange(len(old))
    batch.pair_sum += candidates.pair[new] - candidates.pair[old]
    batch.taken[rows, old] -= 1
    batch.taken[rows, new] += 1
    for changed in (old, new):
        taken = batch.taken[rows, changed]
        batch.next_value[rows, changed] = candidates.value_at(changed, taken)
        batch.last_value[rows, changed] = np.where(
            taken > 0, candidates.value_at(changed, np.maximum(taken - 1, 0)), np.inf
        )


def _objectives(candidates: _Candidates, taken: IntArray) -> FloatArray:
    """The objective of every cohort, added up again, because the running sums contain rounding errors."""
    amounts = taken.astype(np.float64)
    pairs = ((amounts @ candidates.pair) * amounts).sum(axis=1) - amounts @ np.diagonal(candidates.pair)
    singles = [candidates.values[_taken_rows(candidates, row)].sum() for row in taken]
    result: FloatArray = np.array(singles) + pairs / 2
    return result


def _taken_rows(candidates: _Candidates, taken: IntArray) -> IntArray:
    """The rows of `candidates` that a cohort takes."""
    used = np.flatnonzero(taken)
    amounts = taken[used]
    rank = np.arange(amounts.sum()) - np.repeat(np.cumsum(amounts) - amounts, amounts)
    rows: IntArray = np.repeat(candidates.offset[used], amounts) + rank
    return rows
