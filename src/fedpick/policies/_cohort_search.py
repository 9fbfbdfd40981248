"""The solver of FedGS: a cohort of fixed size that maximises a sum of single values and of values of pairs.

Problem: from n candidates choose m, maximising

    sum over the chosen i of value_i  +  sum over the chosen pairs i < j of pair[prototype_i, prototype_j].

Candidates of one prototype differ in their value only, so an optimal cohort takes the best ones of each prototype: what
has to be found is *how many* of each. That makes a problem with a million candidates as large as the number of its
prototypes, without giving anything away. The search builds cohorts greedily, each start from another beginning, and
improves each by the best exchange of one member until none is left. All starts advance together, as rows of the same
arrays, and every step updates the running gains instead of adding them up again.

The work is limited by counting operations, never by a clock: equal problems give equal cohorts on every machine. Ties
are broken by the generator that is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import FloatArray, IntArray

__all__ = ["WORK_LIMIT", "Cohort", "best_cohort"]


WORK_LIMIT = 30_000_000
"""Array elements the search may touch, roughly: about a tenth of a second."""
_MOST_STARTS = 128
# A swap must gain more than rounding errors can feign; it also rules out endless swapping back and forth.
_TOLERANCE = 1e-12


@dataclass(frozen=True)
class Cohort:
    """What the search found."""

    positions: IntArray
    """(m,) positions of the chosen candidates."""
    objective: float
    starts: int
    swaps: int


@dataclass(frozen=True)
class _Ladders:
    """The candidates of each prototype, best value first, one after the other in `values`."""

    order: IntArray  # (n,) position of each candidate in the caller's arrays
    values: FloatArray  # (n,)
    offset: IntArray  # (P,) where a prototype begins
    size: IntArray  # (P,) how many it has
    pair: FloatArray  # (P, P)

    def step(self, prototypes: IntArray, rung: IntArray | np.int64) -> FloatArray:
        """The value of the candidate on this rung, -inf above the last."""
        there = self.offset[prototypes] + np.minimum(rung, self.size[prototypes] - 1)
        return np.where(rung < self.size[prototypes], self.values[there], -np.inf)


@dataclass
class _Batch:
    """K cohorts under construction; `slots` are the prototypes that a swap may take from."""

    taken: IntArray  # (K, P) how many of each prototype
    pull: FloatArray  # (K, P) sum of pair values with the cohort
    ahead: FloatArray  # (K, P) value of the next candidate, -inf if there is none
    behind: FloatArray  # (K, P) value of the last one taken, +inf if there is none
    slots: IntArray  # (K, R)

    def only(self, kept: NDArray[Any]) -> _Batch:
        """Some of the cohorts."""
        return _Batch(self.taken[kept], self.pull[kept], self.ahead[kept], self.behind[kept], self.slots[kept])


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
        values: (n,) what each candidate is worth on its own.
        prototype: (n,) the row of `pair` that describes it.
        pair: (P, P) symmetric; the diagonal holds for two candidates of the same prototype.
        size: how many to choose.
        rng: breaks ties.
        work: limit on the number of array elements touched.

    >>> far = np.array([[0.0, 9.0, 1.0], [9.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    >>> best_cohort(np.zeros(3), np.arange(3), far, 2, np.random.default_rng(0)).objective
    9.0
    """
    count = len(values)
    if size >= count:
        everybody = np.arange(count, dtype=np.int64)
        return Cohort(everybody, _objective(values, prototype, pair), starts=0, swaps=0)
    if size <= 0:
        return Cohort(np.empty(0, dtype=np.int64), 0.0, starts=0, swaps=0)
    ladders = _ladders(values, prototype, pair, rng)
    cohorts, swaps = _improve(ladders, _construct(ladders, size, work), size, work)
    objectives = _objectives(ladders, cohorts)
    taken = cohorts[int(np.argmax(objectives))]
    return Cohort(_members(ladders, taken), float(objectives.max()), starts=len(cohorts), swaps=swaps)


def _objective(values: FloatArray, prototype: IntArray, pair: FloatArray) -> float:
    taken = np.bincount(prototype, minlength=len(pair)).astype(np.float64)
    return float(values.sum() + (taken @ pair @ taken - taken @ np.diagonal(pair)) / 2)


def _ladders(values: FloatArray, prototype: IntArray, pair: FloatArray, rng: np.random.Generator) -> _Ladders:
    # Shuffled before the stable sort: candidates that are equal in everything have equal chances.
    order = rng.permutation(len(values))
    order = order[np.lexsort((-values[order], prototype[order]))]
    present, offset, size = np.unique(prototype[order], return_index=True, return_counts=True)
    # The first of several equally good prototypes wins below: shuffled for the same reason.
    shuffled = rng.permutation(len(present))
    present = present[shuffled]
    return _Ladders(
        order=order,
        values=values[order],
        offset=offset[shuffled].astype(np.int64),
        size=size[shuffled].astype(np.int64),
        pair=np.ascontiguousarray(pair[np.ix_(present, present)]),
    )


def _construct(ladders: _Ladders, size: int, work: int) -> _Batch:
    """Greedy cohorts that differ in how they begin."""
    prototypes = len(ladders.offset)
    per_start = size * prototypes * (1 + min(size, prototypes))
    first, second = _beginnings(ladders, size, int(np.clip(work // per_start, 1, _MOST_STARTS)))
    starts = len(first)
    rows = np.arange(starts)
    picks = np.empty((starts, size), dtype=np.int64)
    taken = np.zeros((starts, prototypes), dtype=np.int64)
    pull = np.zeros((starts, prototypes))
    ahead = np.tile(ladders.values[ladders.offset], (starts, 1))
    for place in range(size):
        chosen = first if place == 0 else np.argmax(ahead + pull, axis=1)
        if place == 1:
            chosen = np.where(second >= 0, second, chosen)
        picks[:, place] = chosen
        taken[rows, chosen] += 1
        pull += ladders.pair[chosen]
        ahead[rows, chosen] = ladders.step(chosen, taken[rows, chosen])
    everything = np.broadcast_to(np.arange(prototypes), taken.shape)
    behind = np.where(taken > 0, ladders.step(everything, np.maximum(taken - 1, 0)), np.inf)
    # A cohort that is larger than the number of prototypes is described more briefly by all of them.
    slots = picks if size <= prototypes else everything.copy()
    # Many beginnings lead to the same cohort; each is improved once.
    _, distinct = np.unique(
        (taken.astype(np.uint64) * _multipliers(prototypes)).sum(axis=1, dtype=np.uint64), return_index=True
    )
    return _Batch(taken=taken, pull=pull, ahead=ahead, behind=behind, slots=slots).only(distinct)


def _multipliers(count: int) -> NDArray[np.uint64]:
    """Odd numbers that make the sum of their multiples a hash."""
    result: NDArray[np.uint64] = (np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(
        1
    )
    return result ^ (result >> np.uint64(31))


def _beginnings(ladders: _Ladders, size: int, starts: int) -> tuple[IntArray, IntArray]:
    """(first, second) prototype of each start: the best single ones, then the best pairs; second -1: left to greed."""
    top = ladders.values[ladders.offset]
    prototypes = len(top)
    first = np.argsort(-top, kind="stable")[:starts]
    second = np.full(len(first), -1, dtype=np.int64)
    if starts <= prototypes or size < 2:
        return first, second
    together = ladders.pair + top[:, None] + top
    np.fill_diagonal(together, np.diagonal(ladders.pair) + top + ladders.step(np.arange(prototypes), np.int64(1)))
    left, right = np.triu_indices(prototypes)
    worth = together[left, right]
    best = np.argsort(-worth, kind="stable")[: starts - prototypes]
    best = best[np.isfinite(worth[best])]  # a pair of the same prototype needs two candidates
    return np.concatenate([first, left[best]]), np.concatenate([second, right[best]])


def _improve(ladders: _Ladders, batch: _Batch, size: int, work: int) -> tuple[IntArray, int]:
    """Make the best swap in every cohort until no swap gains anything; (the cohorts (K, P), how many swaps)."""
    own = np.diagonal(ladders.pair)
    towards = ladders.pair[batch.slots]  # (K, R, P): what a newcomer loses of its pull when this slot leaves
    scale = np.abs(ladders.values).max() + size * np.abs(ladders.pair).max()
    finished: list[IntArray] = []
    swaps, left = 0, 4 * work
    while left > 0 or swaps == 0:
        left -= towards.size
        rows = np.arange(len(batch.taken))
        leaving = (batch.behind + batch.pull - own)[rows[:, None], batch.slots]  # (K, R)
        change = (batch.ahead + batch.pull)[:, None, :] - towards  # (K, R, P)
        change -= leaving[:, :, None]
        flat = change.reshape(len(rows), -1)
        best = flat.argmax(axis=1)
        moving = flat[rows, best] > _TOLERANCE * scale
        if not moving.all():
            finished.append(batch.taken[~moving])
            if not moving.any():
                return np.concatenate(finished), swaps
            batch, towards, best = batch.only(moving), towards[moving], best[moving]
        rows = np.arange(len(best))
        slot, new = np.divmod(best, len(ladders.offset))
        _exchange(ladders, batch, batch.slots[rows, slot], new)
        swaps += len(rows)
        if size <= len(ladders.offset):
            batch.slots[rows, slot] = new
            towards[rows, slot] = ladders.pair[new]
    return np.concatenate([*finished, batch.taken]), swaps


def _exchange(ladders: _Ladders, batch: _Batch, old: IntArray, new: IntArray) -> None:
    rows = np.arange(len(old))
    batch.pull += ladders.pair[new] - ladders.pair[old]
    batch.taken[rows, old] -= 1
    batch.taken[rows, new] += 1
    for changed in (old, new):
        taken = batch.taken[rows, changed]
        batch.ahead[rows, changed] = ladders.step(changed, taken)
        batch.behind[rows, changed] = np.where(taken > 0, ladders.step(changed, np.maximum(taken - 1, 0)), np.inf)


def _objectives(ladders: _Ladders, taken: IntArray) -> FloatArray:
    """The objective of every cohort, added up afresh: running sums only steer the search."""
    amounts = taken.astype(np.float64)
    pairs = ((amounts @ ladders.pair) * amounts).sum(axis=1) - amounts @ np.diagonal(ladders.pair)
    singles = [ladders.values[_rungs(ladders, row)].sum() for row in taken]
    result: FloatArray = np.array(singles) + pairs / 2
    return result


def _rungs(ladders: _Ladders, taken: IntArray) -> IntArray:
    """Where the members of a cohort stand in the ladders."""
    used = np.flatnonzero(taken)
    amounts = taken[used]
    within = np.arange(amounts.sum()) - np.repeat(np.cumsum(amounts) - amounts, amounts)
    places: IntArray = np.repeat(ladders.offset[used], amounts) + within
    return places


def _members(ladders: _Ladders, taken: IntArray) -> IntArray:
    return np.sort(ladders.order[_rungs(ladders, taken)])
