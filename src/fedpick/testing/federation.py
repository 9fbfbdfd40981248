"""A made-up federation for checks. Its answers depend on (seed, round, client) only; nothing is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedpick.core.arrays import BoolArray, FloatArray
from fedpick.core.policy import Signal
from fedpick.core.rng import Purpose, stream
from fedpick.core.session import Session
from fedpick.core.types import Clients, Outcome, Probe, Selection

__all__ = ["FakeFederation"]


@dataclass(frozen=True, kw_only=True)
class FakeFederation:
    """A federation that answers everything a policy may ask, without training."""

    num_clients: int = 20
    """Clients in the table."""
    seed: int = 0
    """The seed of all answers."""
    reports: str = "good"
    """"good": some silence; "equal": all clients report 1; "silent": all NaN; "absurd": infinite and huge ones too."""
    dropout: float = 0.2
    """Probability that a selected client does not complete."""
    dead: tuple[int, ...] = ()
    """Clients that never complete and never report."""

    def clients(self, count: int | None = None) -> Clients:
        """Return the table, with what an oracle would know. The first rows do not depend on the number of clients."""
        rng = stream(self.seed, 0, Purpose.ANALYSIS)
        size = count or self.num_clients
        uniform = rng.random((max(size, self.num_clients + 5), 16))[:size]
        return Clients(
            num_examples=np.floor(uniform[:, 0] * 90) + 10,
            label_histogram=np.floor(uniform[:, 1:6] ** 3 * 20) + 1,
            features=uniform[:, 6:10],
            availability=0.2 + 0.7 * uniform[:, 10],
            correlation=0.8 * uniform[:, 11],
        )

    def available(self, round: int, count: int) -> BoolArray:
        """Return a mask of about 60 % of the clients; every seventh round is empty."""
        if round % 7 == 6:
            return np.zeros(count, dtype=bool)
        return stream(self.seed, round, Purpose.AVAILABILITY).random(count) < 0.6

    def measure(self, round: int, count: int) -> Callable[[Probe], FloatArray]:
        """Return the function that answers the probes of one round."""

        def answer(probe: Probe) -> FloatArray:
            rng = stream(self.seed, round, Purpose.MEASURE)
            width = () if probe.signal is Signal.LOSS else (8,)
            values = 1.0 + rng.random((count, *width))
            if probe.trial is not None:
                values = values - 0.1 * rng.random((count, *width))
            return self._reported(values, rng)[probe.clients]

        return answer

    def _reported(self, values: FloatArray, rng: np.random.Generator) -> FloatArray:
        if self.reports == "equal":
            return np.ones_like(values)
        if self.reports == "silent":
            return np.full_like(values, np.nan)
        kind = rng.random(len(values))
        values[kind < 0.1] = np.nan
        if self.reports == "absurd":
            values[(kind >= 0.1) & (kind < 0.3)] = np.inf
            values[(kind >= 0.3) & (kind < 0.5)] = 1e30
            values[(kind >= 0.5) & (kind < 0.6)] = -1e30
        return values

    def outcome(self, round: int, selection: Selection) -> Outcome:
        """Return the outcome of a round: some clients drop out after their report, the dead ones never report."""
        rng = stream(self.seed, round, Purpose.FAULTS)
        size = len(selection.clients)
        dead = np.isin(selection.clients, self.dead)
        completed = (rng.random(size) >= self.dropout) & ~dead
        reports: dict[str, Any] = {
            name: self._reported(0.5 + rng.random(size), rng)
            for name in ("loss", "train_loss", "duration", "update_norm", "loss_rms")
        }
        reports["sketch"] = self._reported(rng.standard_normal((size, 8)), rng)
        for values in reports.values():
            values[dead] = np.nan
        return Outcome(index=round, clients=selection.clients, completed=completed, **reports)

    def play(self, session: Session, rounds: int, budget: int | None = 4) -> list[Selection]:
        """Run a session for some rounds and return its selections."""
        chosen = []
        for _ in range(rounds):
            count, index = len(session.clients), session.round
            selection = session.ask(
                available=self.available(index, count), budget=budget, measure=self.measure(index, count)
            )
            session.tell(self.outcome(index, selection))
            chosen.append(selection)
        return chosen
