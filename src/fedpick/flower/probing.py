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
from fedpick.core.types import Probe
from fedpick.flower.inner import messages_to
from fedpick.flower.membership import Membership
from fedpick.flower.messages import (
    LOG,
    Arrays,
    all_finite,
    apply_updates,
    arrays_of,
    difference,
    metrics_of,
    number,
    queries,
    reason_of,
    replies_by_node,
    sketches,
)
from fedpick.flower.settings import REPORTS, Settings

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
    evaluate_config: ConfigRecord
    grid: Grid

    def measure(self, probe: Probe) -> NDArray[np.float64]:
        """One value, or one vector, for every probed client; NaN for a client that did not answer in time."""
        if probe.signal is Signal.UPDATE:
            return self._updates(probe)
        arrays = self.arrays
        if probe.trial is not None:
            updates = self._trial_updates(probe.trial.clients)
            completed = np.array([update is not None for update in updates], dtype=bool)
            weights = self.settings.aggregation_weights(probe.trial, completed, self.membership.roster.clients())
            usable = [update for update in updates if update is not None]
            arrays = apply_updates(self.model, usable, weights[completed], self.settings.buffers)
        return self._losses(probe, arrays)

    def _losses(self, probe: Probe, arrays: ArrayRecord) -> NDArray[np.float64]:
        nodes = self._nodes(probe.clients)
        if self.settings.probe == "evaluate":
            return self._evaluated(nodes, arrays)
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
                "Clients answer after fedpick.flower.answer_probes(app, loss=...). With with_policy(..., "
                'probe="evaluate") their evaluate function answers.',
                *(len(nodes), reasons[0]),
            )
        return values

    def _evaluated(self, nodes: list[int], arrays: ArrayRecord) -> NDArray[np.float64]:
        """The losses that the clients' evaluate function reports."""
        config = ConfigRecord(dict(self.evaluate_config))  # a copy, as for trials
        messages = messages_to(nodes, "evaluate", self.inner, self.server_round, arrays, config, self.grid)
        replies = self._exchange(messages, self.settings.probe_timeout)
        key = self.settings.reports.get("eval_loss", REPORTS["eval_loss"])
        metrics = [metrics_of(replies.get(node)) for node in nodes]
        values = np.array([number(found.get(key)) for found in metrics])
        if len(values) and np.isnan(values).all():
            reasons = [reason for reply in replies.values() if (reason := reason_of(reply))]
            reasons += [f"their metrics are {sorted(found)}" for found in metrics if found]
            LOG.warning(
                "None of %d evaluations has a usable %r among its metrics, so the policy chooses without losses: %s. "
                'Name the right key: with_policy(..., reports={"eval_loss": ...}).',
                *(len(nodes), key, (reasons or ["no answer in time"])[0]),
            )
        return values

    def _updates(self, probe: Probe) -> NDArray[np.float64]:
        return sketches(self._trial_updates(probe.clients), "count-sketch", self.settings.seed)

    def _trial_updates(self, chosen: NDArray[np.int64]) -> list[dict[str, NDArray[Any]] | None]:
        """Updates that do not enter the model; None for a client that did not answer in time."""
        nodes = self._nodes(chosen)
        config = ConfigRecord(dict(self.config))  # a copy: what the strategy writes must not reach the real round
        messages = messages_to(nodes, "train", self.inner, self.server_round, self.arrays, config, self.grid)
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
