"""The loop: ask the session, train, tell it, look at the model, and hand out one record per round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedpick.availability.process import AvailabilityProcess
from fedpick.core.arrays import BoolArray, FloatArray
from fedpick.core.errors import InvalidInput, OutOfOrder
from fedpick.core.policy import Signal
from fedpick.core.session import Session
from fedpick.core.types import Outcome, Selection, aggregation_weights
from fedpick.sim.accounts import Counters, Timings
from fedpick.sim.ahead import Ahead, Done
from fedpick.sim.simulator import Simulator

__all__ = ["RoundRecord", "simulate"]


class Masks(Protocol):
    """Who can be reached: `fedpick.availability` traces have this shape."""

    def mask(self, round: int) -> BoolArray:
        """(N,) who is available in this round."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundRecord:
    """What happened in one round. All but `timings` is the same on every run of the same setting on one machine."""

    index: int
    selection: Selection
    outcome: Outcome
    weights: FloatArray
    """(k,) with which each update entered the model; 0 for those that did not."""
    available: BoolArray | None
    """(N,) the mask; None: everybody."""
    num_available: int
    test_loss: float | None
    """After the round, on the central test set; None when not evaluated in this round."""
    test_accuracy: float | None
    losses: FloatArray | None
    """(N,) everybody's loss after the round; None when not measured."""
    objective: float | None
    """Their mean weighted by importance: the global objective."""
    local_accuracy: float | None
    """Mean accuracy on the clients' own test data, weighted by importance; None when not measured."""
    counters: Counters
    """Communication since the start of the run."""
    timings: Timings
    """Seconds spent in this round."""

    @property
    def skipped(self) -> bool:
        """Nobody was selected."""
        return len(self.selection.clients) == 0


class Intervals(NamedTuple):
    """Every how many rounds something is looked at; None: never."""

    evaluate_every: int | None
    losses_every: int | None
    local_accuracy_every: int | None
    last: int | None
    """All of them after so many rounds as well."""


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
    also_the_last: bool = True,
    on_round: Callable[[RoundRecord], None] | None = None,
) -> Iterator[RoundRecord]:
    """Run until `rounds` rounds are done, one record each; a session and a simulator that were loaded go on.

    Args:
        simulator: trains and measures.
        session: decides. It must be in the same round as the simulator.
        rounds: total, those before a resume included.
        budget: at most so many clients per round; None: everybody available.
        availability: who can be reached in each round: a trace, `process.start(simulator.clients, seed)`; None:
            everybody. A round in which nobody can is asked and told like any other, with an empty selection.
        evaluate_every: test accuracy after every so many rounds; None: never. It is NaN for a federation without a test
            set.
        losses_every: the losses of everybody, likewise.
        local_accuracy_every: the accuracy on the clients' own test data, likewise; refused where nobody has any.
        also_the_last: look at all of these after the last round as well.
        on_round: called with every record before it is yielded.
    """
    intervals = Intervals(evaluate_every, losses_every, local_accuracy_every, rounds if also_the_last else None)
    _check(simulator, session, availability, intervals)
    return _rounds(simulator, session, rounds, budget, availability, intervals, on_round)


def _check(simulator: Simulator, session: Session, availability: Any, intervals: Intervals) -> None:
    """Refuse at the call what would fail, or measure nothing, in some round."""
    for name, every in intervals._asdict().items():
        if name != "last" and every is not None and every < 1:
            raise InvalidInput(f"{name} must be None or at least 1. Got {every}.")
    first, last = simulator.rows.ranges["test"]
    if intervals.local_accuracy_every is not None and not (last > first).any():
        raise InvalidInput(
            "local_accuracy_every needs local test data, and no client has any. Deal the data with a share for it, "
            "such as data.partition(..., split=(0.8, 0.0, 0.2)), or leave local_accuracy_every out."
        )
    if isinstance(availability, AvailabilityProcess):
        raise InvalidInput(
            f"{type(availability).__name__} is a process; simulate needs the trace that it gives for these clients: "
            "availability=process.start(simulator.clients, seed=0)."
        )
    if availability is not None and not callable(getattr(availability, "mask", None)):
        raise InvalidInput(
            "availability must be None or something that has a mask(round), such as a trace of fedpick.availability. "
            f"Got {type(availability).__name__}."
        )
    if len(session.clients) != len(simulator.clients):
        raise InvalidInput(
            f"The session has {len(session.clients)} clients and the simulator {len(simulator.clients)}. "
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
    intervals: Intervals,
    on_round: Callable[[RoundRecord], None] | None,
) -> Iterator[RoundRecord]:
    report = session.policy.needs & {Signal.OUTCOME_LOSS, Signal.TRAIN_LOSS, Signal.DURATION, Signal.UPDATE_NORM}

    def due(every: int | None, index: int) -> bool:
        return every is not None and ((index + 1) % every == 0 or index + 1 == intervals.last)

    ahead = Ahead(
        simulator,
        session,
        rounds=rounds,
        budget=budget,
        availability=availability,
        evaluated=partial(due, intervals.evaluate_every),
    )
    while simulator.round < rounds:
        index, before = simulator.round, simulator.timings
        done = ahead.next() or _one_round(simulator, session, availability, budget, report)
        losses, local = due(intervals.losses_every, index), due(intervals.local_accuracy_every, index)
        if losses or local:
            ahead.settle()
        evaluate = due(intervals.evaluate_every, index)
        looks = _look(simulator, done.evaluation, evaluate=evaluate, losses=losses, local_accuracy=local)
        record = RoundRecord(
            index=index,
            selection=done.selection,
            outcome=done.outcome,
            weights=aggregation_weights(done.selection, done.outcome.completed, simulator.clients),
            available=done.mask,
            num_available=len(session.clients) if done.mask is None else int(np.count_nonzero(done.mask)),
            counters=simulator.counters,
            timings=simulator.timings.since(before),
            **looks,
        )
        if on_round is not None:
            on_round(record)
        yield record


def _one_round(
    simulator: Simulator, session: Session, availability: Masks | None, budget: int | None, report: frozenset[Signal]
) -> Done:
    mask = None if availability is None else availability.mask(simulator.round)
    start, measured = time.perf_counter(), simulator.timings.measure
    selection = session.ask(available=mask, budget=budget, measure=simulator.measure)
    thinking = time.perf_counter() - start - (simulator.timings.measure - measured)
    outcome = simulator.train(selection, report=report)
    start = time.perf_counter()
    session.tell(outcome)
    thinking += time.perf_counter() - start
    simulator.timings = simulator.timings.plus(Timings(select=thinking))
    return Done(selection, outcome, mask)


def _look(
    simulator: Simulator,
    evaluation: tuple[float, float] | None,
    *,
    evaluate: bool,
    losses: bool,
    local_accuracy: bool,
) -> dict[str, Any]:
    test_loss, test_accuracy = evaluation or (simulator.evaluate() if evaluate else (None, None))
    everybody = simulator.client_losses() if losses else None
    return {
        "test_loss": test_loss,
        "test_accuracy": test_accuracy,
        "losses": everybody,
        "objective": None if everybody is None else simulator.weighted(everybody),
        "local_accuracy": simulator.weighted(simulator.evaluate_clients()[1]) if local_accuracy else None,
    }
