"""A client that has never heard of policies: it trains, and reports how many examples it has."""

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from plainapp import task

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    x, y = task.examples(int(context.node_config["partition-id"]))
    model = task.train({name: array.numpy() for name, array in message.content["arrays"].items()}, x, y)
    content = {
        "arrays": ArrayRecord({name: Array(value) for name, value in model.items()}),
        "metrics": MetricRecord({"num-examples": len(y)}),
    }
    return Message(RecordDict(content), reply_to=message)
