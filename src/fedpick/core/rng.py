"""Random streams: a generator is derived from (seed, round, purpose) and never stored.

Resuming therefore needs only the state and the round number, and two purposes never share random numbers.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from fedpick.core.errors import InvalidInput

__all__ = ["Purpose", "stream"]


class Purpose(IntEnum):
    """The purpose of a random stream. Saved results depend on the numbers: add new ones, never renumber."""

    INIT = 0
    PROBE = 1
    SELECT = 2
    AVAILABILITY = 3
    DATA = 4
    PARTITION = 5
    MODEL = 6
    BATCHES = 7
    FAULTS = 8
    MEASURE = 9
    ANALYSIS = 10
    DEVICES = 11
    ATTACKS = 12
    GUARD = 13


def stream(seed: int, round: int, purpose: Purpose) -> np.random.Generator:
    """Return the generator for one purpose in one round. Equal arguments give equal streams on every machine."""
    if seed < 0 or round < 0:
        raise InvalidInput(f"A random stream needs a seed and a round of at least 0. Got seed={seed}, round={round}.")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(round, int(purpose)))))
