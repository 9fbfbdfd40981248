"""Rounds ahead of their records: decided beforehand, trained in one program, evaluated while earlier ones are told.

Where a policy neither learns from outcomes nor asks the clients, its next decisions are known already, and between two
rounds of a small model nothing needs the host. Session and simulator still go on one round at a time, when its record
is due: whoever looks at them between two records sees nothing of what comes next, and if he changes them, what was
computed ahead is thrown away. Which rounds share a program has no influence on the numbers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedpick.availability.process import Trace
from fedpick.core.session import Decision, Session
from fedpick.core.types import BoolArray, Outcome, Selection
from fedpick.sim.accounts import Timings
from fedpick.sim.faults import Faults
from fedpick.sim.plan import ROUNDS_AT_ONCE, Plan
from fedpick.sim.simulator import Simulator

__all__ = ["Ahead", "Done"]

SHORT_SECONDS = 0.05
"""More rounds are taken together while they are waited for no longer: a progress bar and Ctrl-C should not wait."""


@dataclass(frozen=True, eq=False)
class Done:
    """A round that session and simulator have been told."""

    selection: Selection
    outcome: Outcome
    mask: BoolArray | None
    evaluation: tuple[float, float] | None = None
    """(loss, accuracy) on the test set, if that was computed with it."""


@dataclass(frozen=True, eq=False)
class _Planned:
    decision: Decision
    mask: BoolArray | None
    faults: Faults | None
    plan: Plan
    piece: Any
    seconds: float
    """That the decision took."""


@dataclass(frozen=True, eq=False)
class _Running:
    rounds: list[_Planned]
    states: list[Any]
    """(params, velocity) before the first round and after each."""
    reports: Any
    evaluations: list[Any]
    """None where there is none."""


@dataclass(frozen=True, eq=False)
class _Trained:
    planned: _Planned
    before: Any
    after: Any
    report: Any
    evaluation: tuple[float, float] | None
    waits: Timings


class Ahead:
    """The rounds that are computed ahead for one `simulate`.

    Args:
        simulator, session, rounds, budget, availability: those of `simulate`.
        evaluated: whether the test set is to be evaluated after a round.
    """

    def __init__(
        self,
        simulator: Simulator,
        session: Session,
        *,
        rounds: int,
        budget: int | None,
        availability: Any,
        evaluated: Callable[[int], bool],
    ) -> None:
        self.simulator, self.session = simulator, session
        self.rounds, self.budget, self.availability, self.evaluated = rounds, budget, availability, evaluated
        # What somebody made himself may do more in `ask` or `train`, and his masks may depend on what happened before.
        plain = type(session) is Session and type(simulator) is Simulator
        self._possible = plain and simulator.fuses and (availability is None or isinstance(availability, Trace))
        self._size = 1
        self._planned: deque[_Planned] = deque()
        self._running: _Running | None = None
        self._trained: deque[_Trained] = deque()

    def next(self) -> Done | None:
        """Commit the next round; None where it cannot be known ahead."""
        if not self._possible:
            return None
        if not self._trained:
            self._compute()
        if self._trained and not self._fits(self._trained[0]):
            self._planned.clear()
            self._trained.clear()
            self._running = None
            self._compute()
        return self._commit(self._trained.popleft()) if self._trained else None

    def _fits(self, trained: _Trained) -> bool:
        """Whether session and simulator are where this round began."""
        simulator, (params, velocity) = self.simulator, trained.before
        unchanged = simulator.params is params and simulator.velocity is velocity
        in_step = simulator.round == self.session.round and simulator.faults is trained.planned.faults
        return unchanged and in_step and self.session.expects(trained.planned.decision)

    def _compute(self) -> None:
        """Wait for the rounds that are running; the next ones run while the records of these are handed out."""
        start = time.perf_counter()
        running = self._running or self._run((self.simulator.params, self.simulator.velocity), None)
        self._running = None
        if running is None:
            return
        waiting = time.perf_counter()
        reports = np.asarray(running.reports)
        trained = time.perf_counter()
        evaluations = [None if values is None else self.simulator.test_means(values) for values in running.evaluations]
        evaluated = time.perf_counter()
        count = len(running.rounds)
        waits = Timings(train=(trained - waiting) / count, evaluate=(evaluated - trained) / count)
        for place, planned in enumerate(running.rounds):
            before, after = running.states[place : place + 2]
            self._trained.append(_Trained(planned, before, after, reports[place], evaluations[place], waits))
        short = evaluated - start < SHORT_SECONDS
        self._size = min(2 * self._size, ROUNDS_AT_ONCE) if short else max(1, self._size // 2)
        self._running = self._run(running.states[-1], running.rounds[-1].decision)

    def _run(self, state: Any, after: Decision | None) -> _Running | None:
        """Set the next rounds off, and decide those after them meanwhile; None where nobody can know them."""
        self._plan(after)
        rounds = self._together()
        if not rounds:
            return None
        works, pieces = [planned.plan.work for planned in rounds], [planned.piece for planned in rounds]
        params, velocity = state
        states, reports = self.simulator.programs.train_rounds(params, velocity, works, pieces)
        evaluations = [self._evaluation(planned, params) for planned, (params, _) in zip(rounds, states, strict=True)]
        self._plan(rounds[-1].decision)
        return _Running(rounds, [state, *states], reports, evaluations)

    def _plan(self, after: Decision | None) -> None:
        """Decide as many rounds as are to be taken together."""
        while len(self._planned) < self._size:
            planned = self._foresee(self._planned[-1].decision if self._planned else after)
            if planned is None:
                return
            self._planned.append(planned)

    def _foresee(self, after: Decision | None) -> _Planned | None:
        simulator, session = self.simulator, self.session
        index = session.round if after is None else after.context.index + 1
        if index >= self.rounds:
            return None
        start = time.perf_counter()
        try:
            mask = None if self.availability is None else self.availability.mask(index)
            decision = session.foresee(available=mask, budget=self.budget, after=after)
        except Exception:
            return None  # the round is asked for again when its time comes, and says why it cannot be decided
        if decision is None:
            return None
        seconds = time.perf_counter() - start
        plan = simulator.plan(decision.selection, index)
        (piece,) = simulator.programs.pieces(plan.work)
        return _Planned(decision, mask, simulator.faults, plan, piece, seconds)

    def _together(self) -> list[_Planned]:
        """The next planned rounds that one program can train."""
        rounds: list[_Planned] = []
        while self._planned and (not rounds or self._planned[0].piece.kind == rounds[0].piece.kind):
            rounds.append(self._planned.popleft())
        return rounds

    def _evaluation(self, planned: _Planned, params: Any) -> Any:
        """The evaluation of a model, in the making."""
        rows = self.simulator.rows
        if len(rows.test_y) == 0 or not self.evaluated(planned.decision.context.index):
            return None
        return self.simulator.programs.measure_later(params, rows.test_x, rows.test_y)

    def _commit(self, trained: _Trained) -> Done:
        simulator, planned, (params, velocity) = self.simulator, trained.planned, trained.after
        start = time.perf_counter()
        selection = self.session.take(planned.decision)
        outcome = simulator.commit(planned.plan, params, velocity, *planned.piece.in_order(trained.report))
        self.session.tell(outcome)
        thinking = Timings(select=planned.seconds + time.perf_counter() - start)
        simulator.timings = simulator.timings.plus(trained.waits).plus(thinking)
        return Done(selection, outcome, planned.mask, trained.evaluation)
