"""The loop: ask the session, train, tell it the outcome, evaluate, and yield one record per round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fedpick.availability.process import AvailabilityProcess, Trace
from fedpick.core.arrays import BoolArray, FloatArray
from fedpick.core.errors import InvalidInput, OutOfOrder
from fedpick.core.policy import Policy, Signal
from fedpick.core.record import RoundRecord, Timings
from fedpick.core.session import Session, with_notes
from fedpick.core.types import Outcome, Selection, aggregation_weights
from fedpick.sim.simulator import Simulator
from fedpick.sim.sybils import Sybils, grown_table

__all__ = ["simulate"]

_REPORTS = frozenset(signal for signal in Signal if signal.startswith("outcome."))


class Masks(Protocol):
    """Who can be reached in each round, such as a trace of `fedpick.availability`."""

    def mask(self, round: int) -> BoolArray:
        """(N,) who is available in this round."""
        ...


@dataclass(frozen=True)
class _Schedule:
    """Every how many rounds something is measured; None: never."""

    evaluate_every: int | None
    losses_every: int | None
    local_accuracy_every: int | None
    validation_every: int | None
    last: int | None
    """Everything is also measured after this number of rounds."""

    def due(self, every: int | None, index: int) -> bool:
        """Whether something is measured after round `index`."""
        return every is not None and ((index + 1) % every == 0 or index + 1 == self.last)


def simulate(
    simulator: Simulator,
    session: Session,
    *,
    rounds: int,
    budget: int | None = None,
    availability: Masks | None = None,
    evaluate_every: int | None = 1,
    losses_every: int | None = None,
    local_accuracy_every: int | None = None,
    validation_every: int | None = None,
    evaluate_last: bool = True,
    on_round: Callable[[RoundRecord], None] | None = None,
) -> Iterator[RoundRecord]:
    """Run until `rounds` rounds are done and yield one record each. A session and a simulator that were loaded go on.

    Args:
        simulator: trains and measures.
        session: decides. It must be in the same round as the simulator.
        rounds: in total, including those before a resume.
        budget: at most this many clients per round; None: all available clients.
        availability: who can be reached in each round: a trace, `process.start(simulator.clients, seed)`; None: all. A
            round in which no client is available is asked and told like any other, with an empty selection.
        evaluate_every: measure the test accuracy every this many rounds; None: never. It is NaN for a federation
            without a test set.
        losses_every: measure the losses of all clients, likewise.
        local_accuracy_every: measure the accuracy on the clients' own test data, likewise; raises if there are none.
        validation_every: measure loss and accuracy on the clients' validation data, likewise.
        evaluate_last: also measure all of these after the final round.
        on_round: called with every record before it is yielded.
    """
    schedule = _Schedule(
        evaluate_every, losses_every, local_accuracy_every, validation_every, rounds if evaluate_last else None
    )
    _check(simulator, session, availability, schedule)
    session.watch = None  # what the simulator does not report does not exist, such as durations without devices
    return _rounds(simulator, session, rounds, budget, availability, schedule, on_round)


def _check(simulator: Simulator, session: Session, availability: Any, schedule: _Schedule) -> None:
    """Raise at the call what would otherwise fail, or measure nothing, in some round."""
    for name in ("evaluate_every", "losses_every", "local_accuracy_every", "validation_every"):
        every = getattr(schedule, name)
        if every is not None and every < 1:
            raise InvalidInput(f"{name} must be None or at least 1. Got {every}.")
    if schedule.local_accuracy_every is not None and not simulator.examples.has("test"):
        raise InvalidInput(
            "local_accuracy_every needs local test data, and no client has any. Deal the data with a share for it, "
            "such as data.partition(..., split=(0.8, 0.0, 0.2)), or leave local_accuracy_every out."
        )
    if schedule.validation_every is not None and not simulator.examples.has("validation"):
        raise InvalidInput(
            "validation_every needs validation data: set holdout = 0.2 in [partition], or a split with a share for "
            "validation."
        )
    if isinstance(availability, AvailabilityProcess):
        raise InvalidInput(
            f"{type(availability).__name__} is a process; simulate needs the trace that it gives for these clients: "
            "availability=process.start(simulator.clients, seed=0)."
        )
    if availability is not None and not callable(getattr(availability, "mask", None)):
        raise InvalidInput(
            "availability must be None or have a method mask(round), such as a trace of fedpick.availability. "
            f"Got {type(availability).__name__}."
        )
    if len(session.clients) != (count := len(grown_table(simulator, simulator.round))):
        raise InvalidInput(
            f"The session has {len(session.clients)} clients and the simulator {count}. "
            "Build the session with simulator.clients."
        )
    if session.round != simulator.round:
        raise OutOfOrder(
            f"The session is in round {session.round} and the simulator in round {simulator.round}. "
            "Save and load both at the same round."
        )


def _rounds(
    simulator: Simulator,
    session: Session,
    rounds: int,
    budget: int | None,
    availability: Masks | None,
    schedule: _Schedule,
    on_round: Callable[[RoundRecord], None] | None,
) -> Iterator[RoundRecord]:
    report = session.policy.needs & _REPORTS
    # Masks of another type may depend on what happened before: they are asked for in their round.
    foreseeable = (
        _decides_alone(session)
        and (availability is None or isinstance(availability, Trace))
        and simulator.waiting.late == "drop"
        and not simulator.has_sybils
    )
    seen = Sybils(session, simulator) if simulator.has_sybils else session
    ahead = copy(session)
    while simulator.round < rounds:
        index, before = simulator.round, simulator.timings
        busy = simulator.under_way.clients
        asked = simulator.waiting.asked(budget, running=len(busy))
        if foreseeable:
            if ahead.round != index + simulator.num_prepared:
                ahead = copy(session)  # prepared rounds were dropped
            first = ahead.round
            coming = _foresee(ahead, availability, asked, min(simulator.num_preparable, rounds - first))
            if coming:
                due = [schedule.due(schedule.evaluate_every, first + step) for step in range(len(coming))]
                simulator.prepare(coming, due, budget)
        mask = None if availability is None else availability.mask(index)
        if len(busy):
            mask = np.ones(len(simulator.clients), bool) if mask is None else mask.copy()
            mask[busy] = False
        start, measuring = time.perf_counter(), simulator.timings.measure
        selection = seen.ask(available=mask, budget=asked, measure=simulator.measure)
        deciding = time.perf_counter() - start - (simulator.timings.measure - measuring)
        outcome = simulator.train(selection, report=report, budget=budget, judge=seen.judge)
        start = time.perf_counter()
        selection = with_notes(selection, seen.tell(outcome))
        deciding += time.perf_counter() - start
        measured, own = _measure(simulator, schedule, index), outcome.of_selected()
        record = RoundRecord(
            index=index,
            selection=selection,
            outcome=own,
            weights=aggregation_weights(selection, own.completed, simulator.clients) * simulator.fresh_share,
            available=np.ones(len(simulator.clients), bool) if mask is None else mask,
            counters=simulator.counters,
            seconds=simulator.timings.since(before).plus(Timings(select=deciding)),
            clock=None if simulator.fleet is None else simulator.clock,
            **measured,
        )
        if on_round is not None:
            on_round(record)
        yield record


def _decides_alone(session: Session) -> bool:
    """Whether neither outcomes nor answers of clients change the decisions, so that these can be foreseen."""
    policy = session.policy
    asks = any(not signal.startswith("clients.") for signal in policy.needs)
    return not asks and type(policy).observe is Policy.observe and not session.guard.masks


def _foresee(ahead: Session, availability: Masks | None, budget: int | None, count: int) -> list[Selection]:
    """The next selections of a copy of the session, which runs ahead of it. (States are values: nothing is shared.)"""
    selections: list[Selection] = []
    try:
        while len(selections) < count:
            mask = None if availability is None else availability.mask(ahead.round)
            chosen = ahead.ask(available=mask, budget=budget)
            nobody = np.zeros(len(chosen.clients), bool)
            ahead.tell(Outcome(index=ahead.round, clients=chosen.clients, completed=nobody))
            selections.append(chosen)
    except Exception:  # raised again when the session itself is asked, after the records of the rounds before
        pass
    return selections


def _measure(simulator: Simulator, schedule: _Schedule, index: int) -> dict[str, Any]:
    """Everything that is measured for the record of round `index`."""
    measured: dict[str, Any] = {}
    evaluation: dict[str, FloatArray] = {}
    if schedule.due(schedule.evaluate_every, index):
        measured["test_loss"], measured["test_accuracy"] = simulator.evaluate()
    if schedule.due(schedule.validation_every, index):
        means = simulator.evaluate_clients("validation")
        evaluation["validation"] = np.array([simulator.weighted(values) for values in means])
    if schedule.due(schedule.losses_every, index):
        evaluation["losses"] = simulator.client_losses()
        measured["objective"] = simulator.weighted(evaluation["losses"])
    if schedule.due(schedule.local_accuracy_every, index):
        measured["local_accuracy"] = simulator.weighted(simulator.evaluate_clients()[1])
    if simulator.times is not None:
        evaluation["times"] = simulator.times
    if simulator.stale is not None:
        evaluation["stale"] = simulator.stale
    return {**measured, "evaluation": evaluation}
