"""The latest sketch of every client's update: the state of policies that compare clients by their updates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.core.types import Outcome

__all__ = ["LatestSketches", "no_sketches", "remember"]


@dataclass(frozen=True)
class LatestSketches:
    """The clients whose latest update is known, and a sketch of that update."""

    known: IntArray
    """(K,) the clients, ascending; clients never change their number, so a larger table needs no change here."""
    vectors: FloatArray
    """(K, s) their sketches, none of them zero."""

    def is_known(self, num_clients: int) -> BoolArray:
        """(N,) mask of the clients with a sketch."""
        mask = np.zeros(num_clients, dtype=bool)
        mask[self.known] = True
        return mask

    def rows(self, clients: IntArray) -> FloatArray:
        """(n, s) the sketches of clients that are known."""
        rows: FloatArray = self.vectors[np.searchsorted(self.known, clients)]
        return rows


def no_sketches() -> LatestSketches:
    """Return the state before the first round."""
    return LatestSketches(known=np.empty(0, dtype=np.int64), vectors=np.empty((0, 0)))


def remember(state: LatestSketches, outcome: Outcome) -> LatestSketches:
    """Replace the sketches of the clients that were selected.

    A client that did not complete, or whose sketch is missing or zero, has no sketch until it sends one again.
    Otherwise a client that died would be selected for its last update for ever. If the sketches have a new length, the
    model is another one, and the old sketches are dropped.
    """
    width = outcome.sketch.shape[1]
    if width == 0:
        return state
    usable = outcome.completed & ((outcome.sketch**2).sum(axis=1) > 0)  # NaN is not larger than 0
    kept = ~np.isin(state.known, outcome.clients) & (state.vectors.shape[1] == width)
    known = np.concatenate([state.known[kept], outcome.clients[usable]])
    vectors = np.concatenate([state.vectors[kept].reshape(-1, width), outcome.sketch[usable]])
    order = np.argsort(known, kind="stable")
    return LatestSketches(known=known[order], vectors=vectors[order])
