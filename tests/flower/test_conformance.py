"""Both of Flower's APIs pass the conformance kit for adapters."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import strategy as older
from flwr.server.server import Server
from flwr.serverapp import strategy as newer

from fedpick.flower import answer_probes, legacy, with_policy
from fedpick.testing import AdapterCase, AdapterRun, check_adapter
from tests.flower.fake_grid import FakeGrid, errors_become_replies
from tests.flower.fake_manager import FakeProxy, manager_of


class Node:
    """A node of the fake grid with one client of a case."""

    def __init__(self, client):
        self.client, self.mode = client, "good"
        self.context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
        app = ClientApp()
        answer_probes(app, loss=self.loss, facts={"name": client.name}, num_examples=client.num_examples)
        app.train()(self.train)
        self.app = errors_become_replies(app)

    def loss(self, arrays, context, batch_size):
        return self.client.loss({name: array.numpy() for name, array in arrays.items()})

    def train(self, message, context):
        model = {name: array.numpy() for name, array in message.content["arrays"].items()}
        new, metrics = self.client.train(model)
        arrays = ArrayRecord({name: Array(array) for name, array in new.items()})
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)}), reply_to=message)


def options(case: AdapterCase, reports: list) -> dict:
    return {
        "budget": case.budget,
        "seed": case.seed,
        "state": case.state,
        "key": lambda info, reported: reported["name"],
        "probe_timeout": 600.0,  # a busy machine is no wrong adapter
        "progress": lambda report: reports.append(report) if report.over else None,
    }


def outcome(reports: list, model) -> AdapterRun:
    return AdapterRun(
        cohorts=[[key.removeprefix("key:") for key in report.cohort] for report in reports],
        completed=[[key.removeprefix("key:") for key in report.completed] for report in reports],
        model=model,
    )


def run_newer(case: AdapterCase) -> AdapterRun:
    grid, reports = FakeGrid({100 - k: Node(client) for k, client in enumerate(case.clients)}), []
    strategy = with_policy(newer.FedAvg(fraction_evaluate=0.0), case.policy, **options(case, reports))
    arrays = ArrayRecord({name: Array(array) for name, array in case.model.items()})
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=case.rounds)
    return outcome(reports, {name: array.numpy() for name, array in result.arrays.items()})


def run_older(case: AdapterCase) -> AdapterRun:
    names, reports = list(case.model), []

    def proxy(place, client):
        def train(arrays, config):
            new, metrics = client.train(dict(zip(names, arrays, strict=True)))
            return [new[name] for name in names], int(metrics.pop("num-examples")), metrics

        def evaluate(arrays, config):
            return client.loss(dict(zip(names, arrays, strict=True))), client.num_examples, {}

        return FakeProxy(str(100 - place), train, evaluate, {"name": client.name})

    initial = ndarrays_to_parameters(list(case.model.values()))
    inner = older.FedAvg(fraction_evaluate=0.0, initial_parameters=initial)
    strategy = legacy.with_policy(inner, case.policy, **options(case, reports))
    server = Server(client_manager=manager_of([proxy(*item) for item in enumerate(case.clients)]), strategy=strategy)
    server.fit(num_rounds=case.rounds, timeout=None)
    arrays = parameters_to_ndarrays(server.parameters)
    return outcome(reports, dict(zip(names, arrays, strict=True)))


def test_the_message_api_conforms():
    check_adapter(run_newer)


def test_the_older_api_conforms():
    check_adapter(run_older)
