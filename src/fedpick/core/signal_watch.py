"""Warnings about signals that do not arrive. Without them a policy that learns nothing would look like a bad policy."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedpick.core import registry
from fedpick.core.errors import FedpickWarning
from fedpick.core.policy import Policy, Signal
from fedpick.core.types import Measurement, Outcome, Probe

__all__ = ["HINTS", "PATIENCE", "SignalWatch"]

PATIENCE = 3
"""Rounds in a row without a usable value before the warning: clients may fail in one round."""
HINTS = {
    Signal.SKETCH: "Under secure aggregation the server sees no single update: use herd with "
    'source="labels", "features" or "none"'
}
"""What else to do about a signal that is missing."""


class SignalWatch:
    """Counts the rounds in a row in which a needed signal did not arrive. Warns once per signal.

    `stated`: the driver states that it provides these signals, so the caller of the session is not to blame.
    """

    def __init__(self, policy: Policy[Any], *, stated: bool = False) -> None:
        self._policy = policy
        self._stated = stated
        self._reports = tuple(signal for signal in sorted(policy.needs) if signal.startswith("outcome."))
        self._answered: dict[Signal, bool] = {}
        self._missed: Counter[Signal] = Counter()
        self._warned: set[Signal] = set()

    def asked(self, probes: Sequence[Probe], measurements: Sequence[Measurement]) -> None:
        """Note which probes got an answer. If a round is asked again, the last answers count."""
        self._answered = {}
        untried: Measurement | None = None
        for probe, answers in zip(probes, measurements, strict=True):
            if len(probe.clients) == 0:
                continue
            came = not np.isnan(answers.values).all()
            self._answered[probe.signal] = self._answered.get(probe.signal, False) or came
            if probe.trial is None:
                untried = answers
            elif came and untried is not None:
                # A trial whose clients all fail changes nothing: the losses are equal in that round.
                self._answered[Signal.TRIAL] = not _same(answers, untried)

    def told(self, outcome: Outcome) -> None:
        """Count the signals of the round. A round in which no client completed says nothing about reports."""
        arrived = self._answered
        if outcome.completed.any():
            reports = {signal: getattr(outcome, _field(signal))[outcome.completed] for signal in self._reports}
            arrived = arrived | {signal: not np.isnan(values).all() for signal, values in reports.items()}
        for signal, came in arrived.items():
            self._missed[signal] = 0 if came else self._missed[signal] + 1
            if self._missed[signal] >= PATIENCE and signal not in self._warned:
                self._warned.add(signal)
                name = registry.name_of(self._policy) or type(self._policy).__name__
                words = f"{name} {self._sentence(signal)}, or choose a policy that does without."
                words += f" {HINTS[signal]}." if signal in HINTS else ""
                warnings.warn(words, FedpickWarning, stacklevel=3)  # the caller of Session.tell

    def _sentence(self, signal: Signal) -> str:
        if signal is Signal.TRIAL:
            return (
                f"asks for losses after a trial cohort, and `measure` returned the losses of the current model "
                f"{PATIENCE} times. Where probe.trial is not None, train probe.trial.clients, measure the resulting "
                "model and discard it"
            )
        stated = ", which the driver states that it provides" if self._stated else ""
        if signal in self._reports:
            name = _field(signal)
            advice = "Let the clients report it" if stated else f"Report it with session.tell(Outcome(..., {name}=...))"
            return f"needs Outcome.{name}{stated}, and no client reported it in {PATIENCE} rounds. {advice}"
        advice = (
            "Let the clients answer" if stated else "Let `measure` return one finite value per client in probe.clients"
        )
        return f"asks clients for {signal.value!r}{stated}, and none answered in {PATIENCE} rounds. {advice}"


def _field(signal: Signal) -> str:
    return signal.partition(".")[2]


def _same(first: Measurement, second: Measurement) -> bool:
    return np.array_equal(first.clients, second.clients) and np.array_equal(first.values, second.values, equal_nan=True)
