"""Measure what a policy probes: the loss of the current model or of a trial's model, and sketches of updates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedpick.core.policy import Signal
from fedpick.core.types import Probe, aggregation_weights
from fedpick.flower.inner import train_messages
from fedpick.flower.membership import Membership
from fedpick.flower.messages import (
    LOG,
    Arrays,
    all_finite,
    apply_updates,
    arrays_of,
    difference,
    number,
    queries,
    reason_of,
    replies_by_node,
    sketches,
)
from fedpick.flower.settings import Settings

__all__ = ["Prober"]


@dataclass(frozen=True, kw_only=True)
class Prober:
    """What the probes of one round need."""

    inner: Strategy
    membership: Membership
    settings: Settings
    arrays: ArrayRecord
    model: Arrays
    """The same, decoded."""
    server_round: int
    config: ConfigRecord
    grid: Grid

    def measure(self, probe: Probe) -> NDArray[np.float64]:
        """One value, or one vector, for every probed client; NaN for a client that did not answer in time."""
        if probe.signal is Signal.UPDATE:
            return self._updates(probe)
        arrays = self.arrays
        if probe.trial is not None:
            updates = self._trial_updates(probe.trial.clients)
            completed = np.array([update is not None for update in updates], dtype=bool)
            weights = aggregation_weights(probe.trial, completed, self.membership.roster.clients())
            usable = [update for update in updates if update is not None]
            arrays = apply_updates(self.model, usable, weights[completed], self.settings.buffers)
        return self._losses(probe, arrays)

    def _losses(self, probe: Probe, arrays: ArrayRecord) -> NDArray[np.float64]:
        nodes = self._nodes(probe.clients)
        messages = queries(nodes, {"kind": "loss", "batch-size": probe.batch_size or 0}, arrays)
        # Without a function for queries, each would only fill a client's log with a traceback.
        answers = self.membership.answers_queries
        replies = self._exchange(messages, self.settings.probe_timeout) if answers else {}
        values = np.array([_loss(replies.get(node)) for node in nodes])
        if len(values) and np.isnan(values).all():
            reasons = [reason for reply in replies.values() if (reason := reason_of(reply))]
            reasons += ["no usable answer in time" if answers else "the ClientApp has no function for queries"]
            LOG.warning(
                "None of %d clients answered with a loss, so the policy chooses without losses: %s. "
                "Clients answer after fedpick.flower.answer_probes(app, loss=...).",
                *(len(nodes), reasons[0]),
            )
        return values

    def _updates(self, probe: Probe) -> NDArray[np.float64]:
        return sketches(self._trial_updates(probe.clients), "count-sketch", self.settings.seed)

    def _trial_updates(self, chosen: NDArray[np.int64]) -> list[dict[str, NDArray[Any]] | None]:
        """Updates that do not enter the model; None for a client that did not answer in time."""
        nodes = self._nodes(chosen)
        config = ConfigRecord(dict(self.config))  # a copy: what the strategy writes must not reach the real round
        messages = train_messages(self.inner, nodes, self.server_round, self.arrays, config, self.grid)
        replies = self._exchange(messages, self.settings.train_timeout)
        return [self._update_of(replies.get(node)) for node in nodes]

    def _update_of(self, reply: Message | None) -> dict[str, NDArray[Any]] | None:
        new = arrays_of(reply, self.model)
        update = None if new is None else difference(new, self.model)
        return update if update is None or all_finite(update) else None

    def _exchange(self, messages: list[Message], timeout: float) -> dict[int, Message]:
        if not messages:
            return {}
        replies = replies_by_node(messages, self.grid.send_and_receive(messages=messages, timeout=timeout))
        self.membership.mark_busy(messages, replies)
        return replies

    def _nodes(self, clients: NDArray[np.int64]) -> list[int]:
        return [self.membership.roster.node_of[int(index)] for index in clients]


def _loss(reply: Message | None) -> float:
    if reply is None or reply.has_error():
        return math.nan
    record = reply.content.get("answer")
    return number(record.get("value")) if isinstance(record, MetricRecord) else math.nan
