"""Liars that come back under a fresh identity in every round ("sybils").

A session knows identities, the rows of its table; a simulator knows clients. Before round t the table has N + t L rows,
for N clients of which L lie: the honest ones keep their row, and liar j appears as row N + (t - 1) L + j and never
again. Everything is a function of the round, so that a resumed run needs no record of identities.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.core.session import Session
from fedpick.core.types import Clients, Outcome, Probe, Selection
from fedpick.sim.simulator import Simulator

__all__ = ["Sybils", "grown_table"]


def _client_of(lying: BoolArray, round: int) -> IntArray:
    """(R,) the client behind every row of the table of this round."""
    return np.concatenate([np.arange(len(lying)), np.tile(np.flatnonzero(lying), round)])


def grown_table(simulator: Simulator, round: int) -> Clients:
    """The table of a session in this round; without sybils it is the simulator's."""
    clients = simulator.clients
    if not simulator.has_sybils or round == 0:
        return clients
    rows = _client_of(simulator.lying, round)
    given: dict[str, Any] = {
        name: None if (values := getattr(clients, name)) is None else values[rows]
        for name in ("num_examples", "label_histogram", "features", "availability", "correlation", "group")
    }
    return Clients(**given, importance=clients.importance[rows] / clients.importance[rows].sum())


def _named(rows: list[int], client_of: IntArray) -> list[int]:
    """The clients behind some rows, each once."""
    clients: list[int] = np.unique(client_of[rows]).tolist()
    return clients


class Sybils:
    """A session as a simulator with sybils sees it: asks and answers name clients, and the session sees their rows."""

    def __init__(self, session: Session, simulator: Simulator) -> None:
        self.session, self.simulator = session, simulator

    def ask(
        self, *, available: BoolArray | None, budget: int | None, measure: Callable[[Probe], FloatArray]
    ) -> Selection:
        """`Session.ask` for a mask over clients; returns clients."""
        client_of, row_of = self._rows()
        mask = np.zeros(len(client_of), bool)
        mask[row_of] = True if available is None else available

        def named(selection: Selection) -> Selection:
            return replace(selection, clients=client_of[selection.clients])

        def answer(probe: Probe) -> FloatArray:
            trial = None if probe.trial is None else named(probe.trial)
            return measure(replace(probe, clients=client_of[probe.clients], trial=trial))

        selection = named(self.session.ask(available=mask, budget=budget, measure=answer))
        if "distrusted" in selection.diagnostics:
            distrusted = _named(selection.diagnostics["distrusted"], client_of)
            selection = replace(selection, diagnostics={**selection.diagnostics, "distrusted": distrusted})
        return selection

    def judge(self, outcome: Outcome) -> Outcome:
        """`Session.judge` for an outcome of clients."""
        rows = self._rows()[1][outcome.clients]
        return replace(self.session.judge(replace(outcome, clients=rows)), clients=outcome.clients)

    def tell(self, outcome: Outcome) -> Mapping[str, Any]:
        """`Session.tell` for an outcome of clients. Afterwards the table has the rows of the next round."""
        client_of, row_of = self._rows()
        notes = self.session.tell(replace(outcome, clients=row_of[outcome.clients]))
        self.session.grow(grown_table(self.simulator, self.session.round))
        return {name: _named(value, client_of) if isinstance(value, list) else value for name, value in notes.items()}

    def _rows(self) -> tuple[IntArray, IntArray]:
        """(R,) the client behind every row, and (N,) the row of every client in this round."""
        lying, client_of = self.simulator.lying, _client_of(self.simulator.lying, self.session.round)
        row_of = np.arange(len(lying))
        if self.session.round:
            row_of[lying] = np.arange(len(client_of) - np.count_nonzero(lying), len(client_of))
        return client_of, row_of
