"""with_policy for Flower's older API: strategies of `flwr.server.strategy` with `Client` and `NumPyClient`.

    from fedpick.flower.legacy import server_of, with_policy
    strategy = with_policy(FedAvg(...), fedpick.policies.get("pow-d"), budget=10, seed=7)
    # in server_fn: return ServerAppComponents(server=server_of(strategy), config=ServerConfig(num_rounds=100))

The clients do not change: their `evaluate` answers a policy's questions for losses, and their `get_properties`, if they
have one, says who they are. Flower's server runs the rounds. It waits until every client has answered, so it gets
stand-ins of the clients: a stand-in raises when the round ends before its client has answered.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from flwr.common import (
    Code,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetPropertiesIns,
    Parameters,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server import Server
from flwr.server.client_manager import ClientManager, SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.criterion import Criterion
from flwr.server.history import History
from flwr.server.strategy import Strategy
from numpy.typing import NDArray

from fedpick.adapter.arrays import Arrays, all_finite, count, in_form_of, number
from fedpick.adapter.driver import Driven, Driver
from fedpick.adapter.members import Members, Roster
from fedpick.adapter.report import Step
from fedpick.adapter.settings import Options, Settings
from fedpick.core.errors import InvalidInput
from fedpick.core.policy import Policy
from fedpick.flower.inner import layers, refuse_secure_aggregation, settings_of, taking_all
from fedpick.flower.messages import LOG

__all__ = ["PolicyStrategy", "server_of", "with_policy"]


def with_policy(
    strategy: Strategy, policy: Policy[Any], *, state: str | Path | None = None, **options: Unpack[Options]
) -> PolicyStrategy:
    """Let a policy choose the cohorts, and their weights, of a strategy of Flower's older API.

    Args:
        strategy: a strategy of `flwr.server.strategy`, or one derived from these. Its fractions and minimum numbers of
            clients are overruled.
        policy: a policy object, such as `fedpick.policies.get("pow-d")`.
        state: a directory in which the policy's state is saved after each round and from which it is resumed.
        options: `budget`, `seed` and the others of `fedpick.flower.with_policy`, with the same meaning. There is no
            `probe`: the clients' `evaluate` answers. `key`, `eligible` and `groups` get the ClientProxy and the
            properties. `buffers` gets the positions of arrays, "0", "1", and so on. Without it, two vectors of one
            length before an integer are statistics, as in the state_dict of PyTorch's batch normalisation.
    """
    settings = settings_of(strategy, policy, state, options, probe="evaluate", base=Strategy)
    return PolicyStrategy(strategy, policy, settings)


def server_of(strategy: PolicyStrategy) -> Server:
    """A server for `ServerAppComponents(server=...)` that ends with an error if no round changed the model.

    Flower's own server tells a strategy neither how many rounds there are nor that the last one is over, so a strategy
    alone cannot do this.
    """
    if not isinstance(strategy, PolicyStrategy):
        raise InvalidInput(f"server_of needs a strategy made by fedpick.flower.legacy.with_policy. Got {strategy!r}.")
    return _Server(client_manager=SimpleClientManager(), strategy=strategy)


class _Server(Server):
    """Flower's server; raises at the end if no round changed the model."""

    strategy: PolicyStrategy

    def fit(self, num_rounds: int, timeout: float | None) -> tuple[History, float]:
        """Run the rounds; raise if none of them changed the model."""
        with self.strategy._rounds(num_rounds):
            return super().fit(num_rounds, timeout)


class PolicyStrategy(Driven, Strategy):
    """A strategy of Flower's older API whose cohorts come from a fedpick policy; made by `with_policy`."""

    def __init__(self, inner: Strategy, policy: Policy[Any], settings: Settings) -> None:
        self.inner = inner
        self.policy = policy
        self._settings = settings
        self._driver = Driver(policy, settings)
        self._members = _Members(self._driver.roster, settings, labels_for=self._driver.labels_for)
        self._exchange = _Exchange(0, 0, math.inf)
        self._model: Arrays = {}  # that was sent
        self._statistics: set[str] = set()  # positions in the model
        if settings.buffers is None:
            settings.buffers = self._statistics.__contains__
        if settings.record is not None:
            atexit.register(self._driver.end)  # without `server_of`, nothing else tells that the last round is over

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters | None:
        """Log the policy; the parameters are those of the wrapped strategy."""
        self._driver.announce()
        return self.inner.initialize_parameters(client_manager)

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Choose the cohort and let the wrapped strategy write its instructions."""
        driver, settings = self._driver, self._settings
        driver.begin()
        ready = self._members.refresh(client_manager)
        self._model = _named(parameters_to_ndarrays(parameters))
        self._statistics |= _statistics(self._model)
        round = _Round(self.inner, self._members, driver, server_round, parameters, self._model, client_manager.all())
        selection = driver.choose(ready, self._model, round)
        if not len(selection.clients):  # Flower's server does not aggregate a round without clients
            driver.tell(selection, np.zeros(0, dtype=bool))
            return []
        self._exchange = _Exchange(len(selection.clients), driver.enough, settings.train_timeout)
        instructions = round.instructions("fit", selection.clients, parameters)
        return [(_StandIn(proxy, self._exchange), ins) for proxy, ins in instructions]

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Any]]:
        """Put the policy's weights on the results, let the wrapped strategy aggregate, then tell the policy."""
        driver, selection, exchange = self._driver, self._driver.selection, self._exchange
        if selection is None:
            return None, {}
        reasons = [str(failure) for failure in failures if isinstance(failure, BaseException)]
        refuse_secure_aggregation(reasons, self.policy)
        driver.progress.answered(exchange.asked, len(exchange.seconds), self._settings.train_timeout)
        driver.note_pace(
            list(exchange.proxies), dict(exchange.seconds), exchange.waited(), exchange.timeout, exchange.failed
        )
        nodes = self.roster.nodes(selection.clients)
        self._members.mark_busy(exchange.unfinished())
        by_node = {proxy.cid: result for proxy, result in results}
        in_time = [node for node in exchange.arrived if node in by_node][: driver.most]
        late = np.array([node not in in_time and node not in exchange.failed for node in nodes], dtype=bool)
        answers = [by_node[node] if node in in_time else None for node in nodes]
        sizes = [None if result is None else result.num_examples for result in answers]
        self.roster.note_sizes(selection.clients, sizes)
        replies = [None if result is None else _decoded(result.parameters) for result in answers]
        trained = [_in_form_of(self._model, reply) for reply in replies]
        # The model may be an average, whose counts are floats. Those of PyTorch's clients are integers.
        usable = [reply for reply, new in zip(replies, trained, strict=True) if reply is not None and new is not None]
        if usable:
            self._statistics |= set.intersection(*map(_statistics, usable))
        wrong = {
            place: "it must hold arrays in the model's order and shapes, with finite real numbers"
            for place, new in enumerate(trained)
            if new is None and answers[place] is not None
        }
        metrics: list[Mapping[str, Any]] = [{} if result is None else result.metrics or {} for result in answers]
        reports: dict[str, Any] = driver.reports(metrics, self._model, trained)
        weights, changed = driver.weigh(selection, self._model, trained, wrong)
        driver.warn_of(selection, wrong)
        completed = np.array([new is not None for new in trained], dtype=bool)
        told = {"weights": weights, "late": late, "answered": len(results), **reports}
        if not completed.any() or (self._settings.use_weights and not weights.sum() > 0):
            LOG.warning("No client completed the round: %s.", (reasons or ["no usable answer"])[0])
            driver.tell(selection, completed, **told)
            return None, {}
        proxies = exchange.proxies
        numbers = weights if self._settings.use_weights else driver.clients.num_examples[selection.clients]
        good = [
            (proxies[node], self._weighted(result, float(numbers[place]), changed.get(place)))
            for place, (node, result) in enumerate(zip(nodes, answers, strict=True))
            if result is not None and completed[place]
        ]
        new, aggregated = self.inner.aggregate_fit(server_round, good, failures)
        if new is not None and not all_finite(_named(parameters_to_ndarrays(new))):
            LOG.warning("The aggregated model of round %d is not finite: the round makes no step.", server_round)
            new = None
        if new is None:  # no update entered the model
            completed = np.zeros(len(completed), dtype=bool)
        self._trained = self._trained or new is not None
        driver.tell(selection, completed, **told)
        return new, aggregated

    def _weighted(self, result: FitRes, weight: float, changed: Arrays | None) -> FitRes:
        """The result with this weight in the place of its size, which Flower's strategies weigh by.

        If the policy's weights are ignored, it is the size that the guard allows.
        """
        if changed is not None:
            result = replace(result, parameters=ndarrays_to_parameters(list(changed.values())))
        if not self._settings.use_weights and not count(result.num_examples) > weight:
            return result
        return replace(result, num_examples=weight)  # type: ignore[arg-type]  # int by name only

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """As in the wrapped strategy, but with a seeded sample and without waiting for more clients."""
        fraction = min((getattr(inner, "fraction_evaluate", 1.0) for inner in layers(self.inner)), default=1.0)
        least = max((getattr(inner, "min_evaluate_clients", 0) for inner in layers(self.inner)), default=0)
        online = self._members.free(client_manager)
        chosen = self._driver.evaluators(online, fraction=fraction, least=least)
        if not chosen:
            return []
        with taking_all(self.inner, len(chosen)):
            cohort = _Cohort([online[node] for node in chosen])
            return list(self.inner.configure_evaluate(server_round, parameters, cohort))

    def aggregate_evaluate(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, EvaluateRes]],
        failures: list[tuple[ClientProxy, EvaluateRes] | BaseException],
    ) -> tuple[float | None, dict[str, Any]]:
        """As in the wrapped strategy, on results with a usable size."""
        usable = [(proxy, result) for proxy, result in results if count(result.num_examples) > 0]
        if len(usable) < len(results):
            LOG.warning("%d of %d evaluations are left out: num_examples must be a number above 0.",
                        len(results) - len(usable), len(results))  # fmt: skip
        return self.inner.aggregate_evaluate(server_round, usable, failures) if usable else (None, {})

    def evaluate(self, server_round: int, parameters: Parameters) -> tuple[float, dict[str, Any]] | None:
        """As in the wrapped strategy; the record of the round keeps loss and accuracy."""
        found = self.inner.evaluate(server_round, parameters)
        loss, metrics = found or (math.nan, {})
        if server_round > 0:
            self._driver.evaluated(loss=number(loss), accuracy=number(metrics.get("accuracy")))
        return found


def _named(arrays: Iterable[NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Arrays by their position: this API has no names."""
    return {str(place): array for place, array in enumerate(arrays)}


def _statistics(model: Arrays) -> set[str]:
    """The names of the statistics of PyTorch's batch normalisation.

    A state_dict holds them as two vectors of one length, the mean and the variance, and an integer, the count.
    """
    found = set[str]()
    for names in zip(model, list(model)[1:], list(model)[2:], strict=False):
        mean, variance, batches = (model[name] for name in names)
        vectors = mean.ndim == 1 and mean.shape == variance.shape and mean.dtype.kind == variance.dtype.kind == "f"
        if vectors and batches.ndim == 0 and batches.dtype.kind in "iu":
            found.update(names)
    return found


def _decoded(parameters: Parameters) -> dict[str, NDArray[Any]] | None:
    """The arrays of a result; None if they cannot be decoded."""
    try:
        return _named(parameters_to_ndarrays(parameters))
    except Exception:  # bytes from a client may fail in any way
        return None


def _in_form_of(model: Arrays, reply: Arrays | None) -> dict[str, NDArray[Any]] | None:
    """The trained model in a reply; None if it does not fit. Without names, a part of the model does not fit."""
    return in_form_of(model, reply) if reply is not None and len(reply) == len(model) else None


class _Call(threading.Thread):
    """One request to a client, in a thread of its own: a ClientProxy blocks until its client answers."""

    def __init__(self, function: Callable[[], Any], done: Callable[[_Call], None]) -> None:
        super().__init__(daemon=True)
        self.result: Any = None
        self.error: Exception | None = None
        self.over = False
        self._function, self._done = function, done
        self.start()

    def run(self) -> None:
        """Send the request, and report that it was answered."""
        try:
            self.result = self._function()
        except Exception as error:  # whatever a client, or the way to it, may raise
            self.error = error
        self._done(self)

    @property
    def good(self) -> bool:
        """Whether the client answered, and not with an error."""
        return self.over and self.error is None and self.result.status.code == Code.OK


class _Exchange:
    """Requests to several clients, with one deadline for all.

    Args:
        asked: the number of clients.
        enough: the number of good answers that end the exchange.
        timeout: seconds after the first request.
    """

    def __init__(self, asked: int, enough: int, timeout: float) -> None:
        self.asked = asked
        self.proxies: dict[str, ClientProxy] = {}
        self.arrived: list[str] = []
        """The clients with a good answer, in the order of arrival."""
        self.failed: set[str] = set()
        self.seconds: dict[str, float] = {}
        """Client id -> seconds until it answered, also with an error."""
        self.timeout = timeout
        self._enough, self._started = enough, math.inf
        self._calls: dict[str, _Call] = {}
        self._changed = threading.Condition()

    def send(self, proxy: ClientProxy, function: Callable[[], Any]) -> _Call | None:
        """Send a request, unless the exchange is over."""
        with self._changed:
            self.proxies[proxy.cid] = proxy
            if not self._calls:
                self._started = time.monotonic()
            if self._over():
                return None
            call = self._calls[proxy.cid] = _Call(function, lambda call: self._arrive(proxy.cid, call))
            return call

    def _arrive(self, cid: str, call: _Call) -> None:
        with self._changed:
            call.over = True
            self.seconds[cid] = self.waited()
            if call.good:
                self.arrived.append(cid)
            else:
                self.failed.add(cid)
            self._changed.notify_all()

    def waited(self) -> float:
        """Seconds since the first request."""
        return max(time.monotonic() - self._started, 0.0)

    def _over(self) -> bool:
        return len(self.arrived) >= self._enough or self.waited() >= self.timeout

    def wait(self, calls: Iterable[_Call]) -> None:
        """Wait until these have answered, or the exchange is over."""
        calls = list(calls)
        with self._changed:
            while not all(call.over for call in calls) and not self._over():
                self._changed.wait(min(self.timeout - self.waited(), threading.TIMEOUT_MAX))

    def unfinished(self) -> dict[str, _Call]:
        """Client id -> the request that it has not answered."""
        return {cid: call for cid, call in self._calls.items() if not call.over}


class _StandIn(ClientProxy):
    """A client of a cohort that answers with an error when the round ends before the real client has answered."""

    def __init__(self, proxy: ClientProxy, exchange: _Exchange) -> None:
        super().__init__(proxy.cid)
        self.properties = proxy.properties
        self._proxy, self._exchange = proxy, exchange

    def __getattr__(self, name: str) -> Any:  # what a strategy may expect of its kind of proxy
        return getattr(self.__dict__["_proxy"], name)

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        """Train; raise if the round is over before the client answers."""
        proxy = self._proxy
        call = self._exchange.send(proxy, lambda: proxy.fit(ins, timeout=timeout, group_id=group_id))
        if call is not None:
            self._exchange.wait([call])
        if call is None or not call.over:
            raise TimeoutError(f"the round ended before client {self.cid} answered")
        if call.error is not None:
            raise call.error
        result: FitRes = call.result
        return result

    def get_properties(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        """Passed through."""
        return self._proxy.get_properties(ins, timeout, group_id)

    def get_parameters(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        """Passed through."""
        return self._proxy.get_parameters(ins, timeout, group_id)

    def evaluate(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        """Passed through."""
        return self._proxy.evaluate(ins, timeout, group_id)

    def reconnect(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        """Passed through."""
        return self._proxy.reconnect(ins, timeout, group_id)


class _Cohort(ClientManager):
    """A client manager that shows only the chosen clients, so that a strategy can sample nothing but the cohort."""

    def __init__(self, proxies: Sequence[ClientProxy]) -> None:
        self._proxies = list(proxies)

    def num_available(self) -> int:
        """The size of the cohort."""
        return len(self._proxies)

    def register(self, client: ClientProxy) -> bool:
        """Nobody joins a cohort."""
        return False

    def unregister(self, client: ClientProxy) -> None:
        """Nobody leaves a cohort."""

    def all(self) -> dict[str, ClientProxy]:
        """The cohort, by client id."""
        return {proxy.cid: proxy for proxy in self._proxies}

    def wait_for(self, num_clients: int, timeout: int = 0) -> bool:
        """The cohort does not grow."""
        return num_clients <= len(self._proxies)

    def sample(
        self, num_clients: int, min_num_clients: int | None = None, criterion: Criterion | None = None
    ) -> list[ClientProxy]:
        """The whole cohort."""
        return list(self._proxies)


class _Members(Members):
    """Keeps the roster up to date with a client manager; see `Members` for the arguments."""

    def __init__(self, roster: Roster, settings: Settings, *, labels_for: str | None) -> None:
        super().__init__(roster, settings, labels_for=labels_for)
        self._asked: dict[str, _Call] = {}  # client id -> the request for its properties
        self._postponed: dict[str, tuple[float, float]] = {}  # client id -> (when it is asked again, the pause before)

    @property
    def labels_hint(self) -> str:
        """What to do if no client reports a label histogram."""
        return (
            'return it from the clients\' get_properties, as text: {"label-histogram": "[3, 0, 5]"}, '
            "or choose a policy or options that do not need it"
        )

    def refresh(self, manager: ClientManager) -> NDArray[np.bool_]:
        """Admit new clients, free those that answered, wait, and return the (N,) mask of the ready ones."""
        return self.wait_until_ready(lambda: self._update(manager.all()))

    def free(self, manager: ClientManager) -> dict[str, ClientProxy]:
        """The online clients that are not busy, by client id."""
        self._release()
        busy = set(self.roster.nodes(self.busy))
        return {cid: proxy for cid, proxy in manager.all().items() if cid not in busy}

    def mark_busy(self, unfinished: Mapping[str, _Call]) -> None:
        """Do not ask these clients until they have answered."""
        self.busy |= {self.roster.index_of_node[cid]: call for cid, call in unfinished.items()}

    def _release(self) -> None:
        self.busy = {index: call for index, call in self.busy.items() if not call.over}

    def _update(self, proxies: Mapping[str, ClientProxy]) -> list[str]:
        """Ask unknown clients for their properties, and admit those that answered.

        A client whose answer is an error stays out, and is asked again: under its node id it would remain in the table
        beside the client that it turns out to be.
        """
        self._release()
        asked = self._asked = {cid: call for cid, call in self._asked.items() if cid in proxies}
        self._postponed = {cid: when for cid, when in self._postponed.items() if cid in proxies}
        unknown = [cid for cid in proxies if cid not in self.ineligible and not self.roster.knows(cid, proxies)]
        now = time.monotonic()
        new = [cid for cid in unknown if cid not in asked and self._postponed.get(cid, (now, 0))[0] <= now]
        exchange = _Exchange(len(new), len(new), self.settings.probe_timeout)
        calls = {cid: exchange.send(proxies[cid], _asking(proxies[cid])) for cid in new}
        sent = {cid: call for cid, call in calls.items() if call is not None}
        asked |= sent
        if len(self.roster.indices(proxies)) < max(1, self.settings.min_clients):  # later, newcomers delay no round
            exchange.wait(sent.values())
        over = {cid: asked.pop(cid) for cid in unknown if cid in asked and asked[cid].over}
        for cid, call in over.items():
            if call.error is not None:
                self._postpone(cid, call.error)
        if reported := {cid: _properties(call) for cid, call in over.items() if call.error is None}:
            self.admit(reported, proxies, proxies)
        return list(proxies)

    def _postpone(self, cid: str, error: Exception) -> None:
        """Ask a client again after 1, 2, 4, ... seconds."""
        pause = 2 * self._postponed.get(cid, (0.0, 0.5))[1]
        self._postponed[cid] = (time.monotonic() + pause, pause)
        LOG.warning(
            "Client %s takes no part until its get_properties answers. It failed: %s. Asked again after %.0f s.",
            *(cid, error, pause),
        )


def _asking(proxy: ClientProxy) -> Callable[[], Any]:
    # Without a timeout, which Flower makes the message's time to live: a client that starts later would never get it.
    return lambda: proxy.get_properties(GetPropertiesIns({}), timeout=None, group_id=None)


def _properties(call: _Call) -> dict[str, Any]:
    """What a client said about itself; nothing for one without get_properties. Lists come as JSON text."""
    found = dict(call.result.properties or {}) if call.good else {}
    histogram = found.get("label-histogram")
    if isinstance(histogram, str):
        with contextlib.suppress(ValueError, RecursionError):
            found["label-histogram"] = json.loads(histogram)
    return found


@dataclass(frozen=True)
class _Round:
    """What the probes of one round need; see `fedpick.adapter.driver.Questions`."""

    inner: Strategy
    members: _Members
    driver: Driver
    server_round: int
    parameters: Parameters
    model: Arrays
    proxies: Mapping[str, ClientProxy]

    def instructions(self, kind: str, clients: Iterable[int], parameters: Parameters) -> list[tuple[ClientProxy, Any]]:
        """The strategy's fit or evaluate instructions for exactly these clients, in their order."""
        nodes = self.members.roster.nodes(clients)
        cohort = _Cohort([self.proxies[node] for node in nodes])
        configure: Any = self.inner.configure_fit if kind == "fit" else self.inner.configure_evaluate
        with taking_all(self.inner, len(nodes)):
            found = {proxy.cid: (proxy, ins) for proxy, ins in configure(self.server_round, parameters, cohort)}
        if set(found) != set(nodes):
            raise InvalidInput(
                f"{type(self.inner).__name__} instructs {len(found)} clients to {kind}, not the {len(nodes)} that the "
                f"policy chose, so it samples by itself in configure_{kind}; a policy cannot choose for it."
            )
        return [found[node] for node in nodes]

    def losses(self, clients: NDArray[np.int64], model: Arrays, batch_size: int | None) -> NDArray[np.float64]:
        """The losses that the clients' evaluate reports, always on all of their evaluation data."""
        same = model is self.model
        parameters = self.parameters if same else ndarrays_to_parameters(list(model.values()))
        results = self._gather("evaluate", clients, parameters, self.members.settings.probe_timeout)
        values = np.array([math.nan if result is None else number(result.loss) for result in results])
        if len(values) and np.isnan(values).all():
            LOG.warning(
                "None of %d clients answered with a loss, so the policy chooses without losses. "
                "Their evaluate must return (loss, num_examples, metrics).",
                len(values),
            )
        return values

    def train(self, clients: NDArray[np.int64]) -> list[dict[str, NDArray[Any]] | None]:
        """The models of a trial."""
        results = self._gather("fit", clients, self.parameters, self.members.settings.train_timeout)
        return [None if result is None else _in_form_of(self.model, _decoded(result.parameters)) for result in results]

    def _gather(self, kind: str, clients: Iterable[int], parameters: Parameters, timeout: float) -> list[Any]:
        """One good result for every client; None for a client that failed or did not answer in time."""
        instructions = self.instructions(kind, clients, parameters)
        exchange = _Exchange(len(instructions), len(instructions), timeout)
        calls = [exchange.send(proxy, self._request(proxy, kind, ins)) for proxy, ins in instructions]
        exchange.wait(call for call in calls if call is not None)
        self.members.mark_busy(exchange.unfinished())
        step = Step(
            kind="train" if kind == "fit" else kind,
            asked=len(calls),
            answered=len(exchange.seconds),
            seconds=exchange.waited(),
            deadline=timeout,
        )
        self.driver.note_pace(list(exchange.proxies), dict(exchange.seconds), step.seconds, timeout, exchange.failed)
        self.driver.progress.steps.append(step)
        return [call.result if call is not None and call.good else None for call in calls]

    def _request(self, proxy: ClientProxy, kind: str, ins: Any) -> Callable[[], Any]:
        # The exchange has the deadline. An expired message would free a client that still works on it.
        return lambda: getattr(proxy, kind)(ins, timeout=None, group_id=self.server_round)
