"""Rounds ahead of their records: decided beforehand, trained in one program, while earlier records are handed out.

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
from typing import Any, NamedTuple

import numpy as np

from fedpick.availability.process import Trace
from fedpick.core.arrays import BoolArray
from fedpick.core.session import Decision, Session
from fedpick.core.types import Outcome, Selection
from fedpick.sim.accounts import Timings
from fedpick.sim.jax_engine.setup import require_jax
from fedpick.sim.plan import ROUNDS_AT_ONCE, Plan
from fedpick.sim.simulator import Simulator

__all__ = ["Ahead", "Done"]

SHORT_SECONDS = 0.05
"""More rounds are taken together while deciding and waiting for them takes no longer: a progress bar and Ctrl-C should
not wait, and the states of a million clients not pile up."""
LONGEST_PENALTY = 64
"""Rounds that are computed one at a time, after several in a row were thrown away."""


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
    setting: tuple[Any, ...]
    """Whatever else the round depends on, as it was."""
    plan: Plan
    piece: Any
    seconds: Timings


class _Results(NamedTuple):
    reports: Any
    evaluations: list[tuple[float, float] | None]
    waits: Timings
    """For all of the rounds."""


@dataclass(eq=False)
class _Running:
    rounds: list[_Planned]
    before: list[Any]
    """The arrays of the model and the momentum that the first round began with."""
    states: list[Any]
    """(params, velocity) after each round."""
    reports: Any
    evaluations: list[Any]
    """None where there is none."""
    handing_over: float
    """Seconds."""
    results: _Results | None = None


@dataclass(frozen=True, eq=False)
class _Trained:
    planned: _Planned
    before: list[Any]
    """The arrays of the model and the momentum that it began with."""
    after: Any
    report: Any
    evaluation: tuple[float, float] | None
    seconds: Timings


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
        self._planned: deque[_Planned] = deque()
        self._running: _Running | None = None
        self._trained: deque[_Trained] = deque()
        self._size, self._careful, self._penalty = 1, 0, 1

    def next(self) -> Done | None:
        """Commit the next round; None where it cannot be known ahead."""
        if not self._possible:
            return None
        if not self._undisturbed():
            self._planned.clear()
            self._trained.clear()
            self._running = None
            # Where that happens again and again, looking ahead is a waste.
            self._size, self._careful, self._penalty = 1, self._penalty, min(2 * self._penalty, LONGEST_PENALTY)
        if not self._trained:
            self._compute()
        return self._commit(self._trained.popleft()) if self._trained else None

    def settle(self) -> None:
        """Wait for what is running, because something else is to be computed now; it would wait for it anyway."""
        if self._running is not None and self._running.results is None:
            self._running.results = self._wait(self._running)

    def _undisturbed(self) -> bool:
        """Whether session and simulator are where the next round began."""
        if self._trained:
            planned, before = self._trained[0].planned, self._trained[0].before
        elif self._running is not None:
            planned, before = self._running.rounds[0], self._running.before
        else:
            return True
        simulator, session = self.simulator, self.session
        now = [*_arrays((simulator.params, simulator.velocity)), *self._setting()]
        then = [*before, *planned.setting]
        unchanged = len(now) == len(then) and all(new is old for new, old in zip(now, then, strict=True))
        return unchanged and simulator.round == session.round and session.expects(planned.decision)

    def _setting(self) -> tuple[Any, ...]:
        simulator, session = self.simulator, self.session
        return simulator.local, simulator.server, simulator.faults, simulator.seed, session.policy, session.seed

    def _compute(self) -> None:
        """Finish the rounds that are running; the next ones run while the records of these are handed out."""
        running = self._running or self._run((self.simulator.params, self.simulator.velocity), None)
        self._running = None
        if running is None:
            return
        reports, evaluations, waits = running.results or self._wait(running)
        count, waiting = len(running.rounds), running.handing_over + waits.train
        share = Timings(train=waiting / count, evaluate=waits.evaluate / count)
        before = running.before
        for planned, after, report, evaluation in zip(
            running.rounds, running.states, reports, evaluations, strict=True
        ):
            seconds = planned.seconds.plus(share)
            self._trained.append(_Trained(planned, before, after, report, evaluation, seconds))
            before = _arrays(after)
        if self._careful:
            self._careful -= 1
            return
        deciding = sum(planned.seconds.select + planned.seconds.train for planned in running.rounds)
        short = deciding + waiting + waits.evaluate < SHORT_SECONDS
        self._size = min(2 * self._size, ROUNDS_AT_ONCE) if short else max(1, self._size // 2)
        self._running = self._run(running.states[-1], running.rounds[-1].decision)

    def _wait(self, running: _Running) -> _Results:
        start = time.perf_counter()
        reports = np.asarray(running.reports)
        trained = time.perf_counter()
        evaluations = [None if values is None else self.simulator.test_means(values) for values in running.evaluations]
        end = time.perf_counter()
        return _Results(
            reports[: len(running.rounds)], evaluations, Timings(train=trained - start, evaluate=end - trained)
        )

    def _run(self, state: Any, after: Decision | None) -> _Running | None:
        """Set the next rounds off, and decide those after them meanwhile; None where nobody can know them."""
        self._plan(after)
        rounds = self._together()
        if not rounds:
            return None
        start, (params, velocity), before = time.perf_counter(), state, _arrays(state)
        works, pieces = [planned.plan.work for planned in rounds], [planned.piece for planned in rounds]
        states, reports = self.simulator.programs.train_rounds(params, velocity, works, pieces)
        evaluations = [self._evaluation(planned, params) for planned, (params, _) in zip(rounds, states, strict=True)]
        handing_over = time.perf_counter() - start
        if not self._careful:
            self._plan(rounds[-1].decision)
        return _Running(rounds, before, states, reports, evaluations, handing_over)

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
        try:
            mask = None if self.availability is None else self.availability.mask(index)
            start = time.perf_counter()
            decision = session.foresee(available=mask, budget=self.budget, after=after)
            decided = time.perf_counter()
            if decision is None:
                return None
            plan = simulator.plan(decision.selection, index)
            (piece,) = simulator.programs.pieces(plan.work)
        except Exception:
            return None  # the round is asked for again when its time comes, and says what is wrong with it
        seconds = Timings(select=decided - start, train=time.perf_counter() - decided)
        return _Planned(decision, mask, self._setting(), plan, piece, seconds)

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
        taken = time.perf_counter()
        outcome = simulator.commit(planned.plan, params, velocity, *planned.piece.in_order(trained.report))
        committed = time.perf_counter()
        self.session.tell(outcome)
        thinking = taken - start + time.perf_counter() - committed
        simulator.timings = simulator.timings.plus(trained.seconds).plus(
            Timings(select=thinking, train=committed - taken)
        )
        return Done(selection, outcome, planned.mask, trained.evaluation)


def _arrays(tree: Any) -> list[Any]:
    return list(require_jax().tree.leaves(tree))
