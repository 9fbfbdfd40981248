"""A client that reports whatever identity its node config claims."""

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedpick.flower import answer_probes

app = ClientApp()
# The partition id of the node config is a claim as well; answer_probes reports it.
answer_probes(app, num_examples=10, facts=lambda context: {"name": str(context.node_config["claims"])})


@app.train()
def train(message: Message, context: Context) -> Message:
    model = {name: Array(array.numpy() + 1.0) for name, array in message.content["arrays"].items()}
    content = {"arrays": ArrayRecord(model), "metrics": MetricRecord({"num-examples": 10})}
    return Message(RecordDict(content), reply_to=message)
