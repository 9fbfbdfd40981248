"""The client side: answer what a policy asks before it chooses. Works with any framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

__all__ = ["ACTION", "answer_probes"]

ACTION = "fedpick"
"""The query action that carries the adapter's questions."""


def answer_probes(
    app: ClientApp,
    *,
    loss: Callable[[ArrayRecord, Context, int | None], float] | None = None,
    num_examples: Callable[[Context], int] | int | None = None,
    label_histogram: Callable[[Context], Sequence[float]] | None = None,
) -> None:
    """Let a ClientApp answer fedpick's questions.

    Args:
        app: the ClientApp.
        loss: `loss(arrays, context, batch_size)`, the mean loss of the model in `arrays` on the local data; on one
            random mini-batch where `batch_size` is a number.
        num_examples: how many local examples there are, or a function of the context that tells.
        label_histogram: examples per label, for policies that use it; leave it out to keep it private.
    """

    @app.query(ACTION)
    def answer(message: Message, context: Context) -> Message:
        question = message.content["config"]
        assert isinstance(question, ConfigRecord)
        if question["kind"] == "hello":
            return Message(RecordDict({"answer": _introduction(context)}), reply_to=message)
        if loss is None:
            raise ValueError("This client was asked for its loss: pass loss=... to fedpick.flower.answer_probes.")
        arrays = message.content["arrays"]
        assert isinstance(arrays, ArrayRecord)
        batch_size = int(question["batch-size"])  # type: ignore[arg-type]
        value = float(loss(arrays, context, batch_size or None))
        return Message(RecordDict({"answer": MetricRecord({"value": value})}), reply_to=message)

    def _introduction(context: Context) -> MetricRecord:
        facts: dict[str, int | float | list[int] | list[float]] = {}
        size = num_examples(context) if callable(num_examples) else num_examples
        if size is not None:
            facts["num-examples"] = int(size)
        if label_histogram is not None:
            facts["label-histogram"] = [float(count) for count in label_histogram(context)]
        if "partition-id" in context.node_config:
            facts["partition-id"] = int(context.node_config["partition-id"])
        return MetricRecord(facts)
