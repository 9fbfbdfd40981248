"""The latest sketch of every client's update: the state of policies that compare clients by their updates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.core.types import Outcome, RoundContext

__all__ = ["LatestSketches", "no_sketches", "places_for_unknown", "remember"]


@dataclass(frozen=True)
class LatestSketches:
    """The clients whose latest update is known, and a sketch of that update."""

    known: IntArray
    """(K,) the clients, ascending; clients never change their number, so a larger table needs no change here."""
    vectors: FloatArray
    """(K, s) their sketches, none of them zero."""

    def among(self, candidates: BoolArray) -> tuple[IntArray, FloatArray]:
        """Return the known clients of a mask (N,), ascending, and their sketches."""
        places = np.flatnonzero(candidates[self.known])
        return self.known[places], self.vectors.take(places, axis=0)


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


def places_for_unknown(unknown: BoolArray, context: RoundContext, rng: np.random.Generator) -> int:
    """Return how many places go to clients without a sketch: their share of the available clients, randomly rounded.

    So newcomers and clients that never answer get the share of a random selection, and no more.
    """
    available = int(np.count_nonzero(context.available))
    strangers = int(np.count_nonzero(context.available & unknown))
    places = min(context.budget, available)
    share = places * strangers / max(available, 1)
    rounded = int(share + rng.random())
    return min(max(rounded, places - (available - strangers)), strangers)
