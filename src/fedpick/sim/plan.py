"""What training a selection in some round means, before anybody has trained: who will answer, and what is random."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedpick.core.rng import Purpose
from fedpick.core.types import Clients, Selection, aggregation_weights
from fedpick.sim import hashing
from fedpick.sim.faults import FaultDraw, Faults
from fedpick.sim.jax_engine.training import LocalTraining
from fedpick.sim.server import ServerStep

__all__ = ["ROUNDS_AT_ONCE", "Plan", "Work", "plan_round", "round_key"]

ROUNDS_AT_ONCE = 16
"""Rounds that one program trains at most, where nothing needs the host between them."""


class Work(NamedTuple):
    """What is to be trained in one round."""

    key: hashing.Key
    """Of the mini-batches; with a client's number it gives the client's own."""
    clients: NDArray[np.int64]
    """(k,) those who are expected to answer."""
    weights: NDArray[np.float64]
    """(k,) of their updates."""
    poisoned: NDArray[np.bool_]
    """(k,) who returns NaN."""
    renormalize: bool
    """Whether the others take over the share of an update that is not finite."""
    lr: float
    server_lr: float


class Plan(NamedTuple):
    """One round: the selection, what goes wrong, and what is left to be trained."""

    selection: Selection
    draw: FaultDraw
    expected: NDArray[np.bool_]
    """(k,) which of the selected will answer in time."""
    work: Work


def plan_round(
    selection: Selection,
    round: int,
    *,
    clients: Clients,
    sizes: NDArray[np.int64],
    local: LocalTraining,
    server: ServerStep,
    faults: Faults | None,
    seed: int,
) -> Plan:
    """The plan for a round; `sizes` is (N,) how many rows each client trains on."""
    chosen = selection.clients
    if faults is None:
        nobody = np.zeros(len(chosen), bool)
        draw = FaultDraw(nobody, nobody, nobody, np.full(len(chosen), np.nan))
    else:
        rows = sizes[chosen]
        examples = local.num_steps(rows) * np.minimum(rows, local.batch_size or rows.max(initial=0))
        draw = faults.draw(seed, round, chosen, examples)
    expected = ~(draw.dropped | draw.late)
    work = Work(
        key=round_key(seed, round),
        clients=chosen[expected],
        weights=aggregation_weights(selection, expected, clients)[expected],
        poisoned=draw.poisoned[expected],
        renormalize=selection.renormalize or selection.weights is None,
        lr=local.lr_at(round),
        server_lr=server.lr_at(round),
    )
    return Plan(selection, draw, expected, work)


def round_key(seed: int, round: int) -> hashing.Key:
    """The key of all mini-batches of a round."""
    return hashing.key_from(seed, int(Purpose.BATCHES), round)
