"""Mini-batches: which of a client's rows a local step uses, a function of (seed, round, client, step) alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedpick.sim import hashing
from fedpick.sim.settings import LocalTraining

__all__ = ["batch_positions"]

Array = Any


def batch_positions(
    local: LocalTraining, client_key: hashing.Key, step: Any, size: Any, batch: int, rolled: bool = False
) -> tuple[Array, Array]:
    """(batch,) positions among the client's training rows, and (batch,) which of them count, for one local step.

    Args:
        local: how batches are drawn.
        client_key: of the client in this round.
        step: uint32, NumPy or JAX; of shape (s, 1) for s steps at once, which gives (s, batch).
        size: uint32, the client's training rows.
        batch: local.batch_size, or the size of the largest client where that is None.
        rolled: see `hashing.permute`.
    """
    lane = step * np.uint32(0) + np.arange(batch, dtype=np.uint32)
    if local.batch_size is None:
        counts = lane < size
        return (lane * counts).astype(np.int32), counts
    if local.sampling == "replacement":
        return hashing.with_replacement(hashing.fold(client_key, step), lane, size), lane < np.uint32(batch)
    if local.sampling == "batch":
        return hashing.permute(hashing.fold(client_key, step), lane, size, rolled), lane < size
    per_epoch = (size + np.uint32(batch - 1)) // np.uint32(batch)
    epoch = step // per_epoch
    position = (step - epoch * per_epoch) * np.uint32(batch) + lane
    return hashing.permute(hashing.fold(client_key, epoch), position, size, rolled), position < size
