"""Answer a policy's probes: the loss of the current model or of a trial's model, and the models of a trial."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedpick.adapter.arrays import Arrays, number
from fedpick.adapter.settings import Settings
from fedpick.flower.inner import messages_to
from fedpick.flower.membership import Membership
from fedpick.flower.messages import LOG, arrays_of, metrics_of, queries, reason_of, replies_by_node

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

    def losses(self, clients: NDArray[np.int64], model: Arrays, batch_size: int | None) -> NDArray[np.float64]:
        """One loss for every client; NaN for a client that did not answer in time."""
        nodes = self.membership.roster.nodes(clients)
        arrays = self.arrays if model is self.model else ArrayRecord({name: Array(model[name]) for name in model})
        if self.settings.probe == "evaluate":
            return self._evaluated(nodes, arrays)
        messages = queries(nodes, {"kind": "loss", "batch-size": batch_size or 0}, arrays)
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
        key = self.settings.reports["eval_loss"]
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

    def train(self, clients: NDArray[np.int64]) -> list[dict[str, NDArray[Any]] | None]:
        """The models of a trial; None for a client that did not answer in time, or not with a usable model."""
        nodes = self.membership.roster.nodes(clients)
        config = ConfigRecord(dict(self.config))  # a copy: what the strategy writes must not reach the real round
        messages = messages_to(nodes, "train", self.inner, self.server_round, self.arrays, config, self.grid)
        replies = self._exchange(messages, self.settings.train_timeout)
        return [arrays_of(replies.get(node), self.model) for node in nodes]

    def _exchange(self, messages: list[Message], timeout: float) -> dict[int, Message]:
        if not messages:
            return {}
        replies = replies_by_node(messages, self.grid.send_and_receive(messages=messages, timeout=timeout))
        self.membership.mark_busy(messages, replies)
        return replies


def _loss(reply: Message | None) -> float:
    if reply is None or reply.has_error():
        return math.nan
    record = reply.content.get("answer")
    return number(record.get("value")) if isinstance(record, MetricRecord) else math.nan
