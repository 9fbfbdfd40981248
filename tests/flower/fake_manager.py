"""Flower's own client manager with clients that are functions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from flwr.common import (
    Code,
    EvaluateRes,
    FitRes,
    GetPropertiesRes,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy

# np.load parses headers with `ast`, which raises SystemError now and then if several threads use it (CPython 3.11).
# Real clients are processes of their own.
_DECODING = threading.Lock()
OK, MISSING = Status(Code.OK, ""), Status(Code.GET_PROPERTIES_NOT_IMPLEMENTED, "not implemented")


class FakeProxy(ClientProxy):
    """A client of the older API: `train(arrays, config)` and `evaluate(arrays, config)` as in a NumPyClient."""

    def __init__(self, cid: str, train: Callable, evaluate: Callable, properties: dict[str, Any] | None = None) -> None:
        super().__init__(cid)
        self.train, self.test, self.own = train, evaluate, properties
        self.calls: list[str] = []

    def fit(self, ins, timeout, group_id):
        self.calls.append("fit")
        arrays, size, metrics = self.train(_decoded(ins), ins.config)
        return FitRes(OK, ndarrays_to_parameters(arrays), size, metrics)

    def evaluate(self, ins, timeout, group_id):
        self.calls.append("evaluate")
        loss, size, metrics = self.test(_decoded(ins), ins.config)
        return EvaluateRes(OK, loss, size, metrics)

    def get_properties(self, ins, timeout, group_id):
        self.calls.append("properties")
        return GetPropertiesRes(OK, self.own) if self.own is not None else GetPropertiesRes(MISSING, {})

    def get_parameters(self, ins, timeout, group_id):
        raise NotImplementedError

    def reconnect(self, ins, timeout, group_id):
        raise NotImplementedError


def _decoded(ins: Any) -> list[Any]:
    with _DECODING:
        return parameters_to_ndarrays(ins.parameters)


def manager_of(proxies: Iterable[ClientProxy]) -> SimpleClientManager:
    manager = SimpleClientManager()
    for proxy in proxies:
        manager.register(proxy)
    return manager
