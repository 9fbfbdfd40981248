"""The client side: answer the adapter's queries. Independent of the machine-learning framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

__all__ = ["ACTION", "answer_probes"]

ACTION = "fedpick"
"""The action of the adapter's queries."""


def answer_probes(
    app: ClientApp,
    *,
    loss: Callable[[ArrayRecord, Context, int | None], float] | None = None,
    num_examples: Callable[[Context], int] | int | None = None,
    label_histogram: Callable[[Context], Sequence[float]] | None = None,
    facts: Callable[[Context], Mapping[str, Any]] | Mapping[str, Any] | None = None,
) -> None:
    """Register a query function that answers fedpick's queries.

    Args:
        app: the ClientApp.
        loss: `loss(arrays, context, batch_size)`, the mean loss of the model in `arrays` on the local data, or on one
            random mini-batch if `batch_size` is a number.
        num_examples: the number of local examples, or a function of the context that returns it.
        label_histogram: a function of the context that returns the examples per label, for policies that use it.
            Leave it out to keep it private.
        facts: anything else that `eligible` and `key` on the server should know, as names and values that a Flower
            ConfigRecord can hold, or a function of the context that returns them. `tags`, a list of texts, is the one
            that fedpick itself reads: with_policy(..., eligible=["tag:gpu"]).
    """

    @app.query(ACTION)
    def answer(message: Message, context: Context) -> Message:
        query = message.content["config"]
        assert isinstance(query, ConfigRecord)
        if query["kind"] == "describe":
            free = facts(context) if callable(facts) else facts
            content = RecordDict({"answer": _description(context), "facts": ConfigRecord(dict(free or {}))})
            return Message(content, reply_to=message)
        if loss is None:
            raise ValueError("The server asked for a loss: pass loss=... to fedpick.flower.answer_probes.")
        arrays, batch_size = message.content["arrays"], query["batch-size"]
        assert isinstance(arrays, ArrayRecord)
        assert isinstance(batch_size, int)
        value = float(loss(arrays, context, batch_size or None))
        return Message(RecordDict({"answer": MetricRecord({"value": value})}), reply_to=message)

    def _description(context: Context) -> MetricRecord:
        fields: dict[str, int | float | list[int] | list[float]] = {}
        size = num_examples(context) if callable(num_examples) else num_examples
        if size is not None:
            fields["num-examples"] = int(size)
        if label_histogram is not None:
            fields["label-histogram"] = [float(count) for count in label_histogram(context)]
        if "partition-id" in context.node_config:
            fields["partition-id"] = int(context.node_config["partition-id"])
        return MetricRecord(fields)
