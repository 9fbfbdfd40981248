"""with_policy: a Flower strategy whose cohorts and weights come from a fedpick policy. By composition, not inheritance.

In each round: see who is online, ask newcomers who they are, let the policy probe and choose, let the wrapped strategy
build its messages on a view of the grid that shows only the cohort, then give the policy's weights to the replies and
let the wrapped strategy aggregate. Unnormalised weights a_i with sum c are exact, too: every reply w_i is replaced by
w + c (w_i - w) before the strategy takes its normalised mean, which is then w + sum of a_i (w_i - w).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower_strategies
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from fedpick.core.errors import InvalidInput
from fedpick.core.policy import Policy, Signal
from fedpick.core.rng import Purpose, stream
from fedpick.core.sampling import sample_uniform
from fedpick.core.session import Session
from fedpick.core.types import Clients, Outcome, Probe, Selection, aggregation_weights
from fedpick.flower.exchange import CohortGrid, ask_nodes, attribute, moved, sketch, update_of
from fedpick.flower.roster import KeyFunction, Roster

__all__ = ["PROVIDES", "PolicyStrategy", "with_policy"]

PROVIDES = frozenset(
    {
        Signal.LOSS,
        Signal.TRIAL,
        Signal.UPDATE,
        Signal.OUTCOME_LOSS,
        Signal.TRAIN_LOSS,
        Signal.DURATION,
        Signal.UPDATE_NORM,
    }
)
"""What a Flower federation can report. `outputs` is missing: no client-side call trains without sending the model."""

REPORTS: Mapping[str, str] = {"loss": "loss", "train_loss": "train_loss", "duration": "train-time"}
"""Outcome field -> the key under which a train reply's MetricRecord may report it."""

# These compute the new model without the replies' weights, or calibrate noise for equal ones.
_IGNORE_WEIGHTS = {
    *("FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum", "Bulyan", "QFedAvg", "FedXgbBagging"),
    *(name for name in dir(flower_strategies) if name.startswith("DifferentialPrivacy")),
}
_SAMPLE_THEMSELVES = {"FedXgbCyclic"}
_POLL_SECONDS = 0.5


def with_policy(
    strategy: Strategy,
    policy: Policy[Any],
    *,
    budget: int | None = None,
    seed: int = 0,
    state: str | Path | None = None,
    key: KeyFunction | None = None,
    weights: str = "policy",
    min_clients: int = 1,
    wait: float = 60.0,
    probe_timeout: float = 60.0,
    train_timeout: float = 3600.0,
    reports: Mapping[str, str] = REPORTS,
) -> PolicyStrategy:
    """Let a policy choose the cohorts, and their weights, of any Flower strategy.

    Args:
        strategy: any Flower strategy; what it says about fractions and minimum numbers of nodes is overruled.
        policy: what chooses.
        budget: the largest cohort; None: everybody available.
        seed: of all random choices.
        state: a directory where the policy's state is saved after each round and resumed from.
        key: (NodeInfo, what the client reported) -> identity that survives restarts; None: the authenticated name,
            else the reported partition id, else the node id.
        weights: "policy", or "ignored" for strategies that cannot use weights (median, Krum, ...).
        min_clients: wait until so many are online ...
        wait: ... but for no more than so many seconds; then go on with whoever is there.
        probe_timeout: seconds clients have to answer a question.
        train_timeout: seconds clients have to train; who is late counts as failed, and busy until it answers.
        reports: Outcome field -> key in the train replies' metrics.
    """
    for inner in _layers(strategy):
        name = type(inner).__name__
        if name in _SAMPLE_THEMSELVES:
            raise InvalidInput(
                f"{name} chooses its clients itself, one after the other; a policy cannot choose for it."
            )
        if getattr(inner, "accountant", None) is not None:
            raise InvalidInput(
                f"{name} accounts for privacy under uniform sampling with equal weights, which a policy would break. "
                "Use it without an accountant, or without a policy."
            )
        if name in _IGNORE_WEIGHTS and weights == "policy":
            raise InvalidInput(
                f"{name} does not aggregate by weights, so the weights of {type(policy).__name__} would be lost.\n\n"
                'hint: pass weights="ignored" to let the policy choose who trains and the strategy how much each counts'
            )
    if weights not in ("policy", "ignored"):
        raise InvalidInput(f"weights must be 'policy' or 'ignored'. Got {weights!r}.")
    if budget is not None and budget < 1:
        raise InvalidInput(f"budget must be at least 1, or None for everybody available. Got {budget!r}.")
    return PolicyStrategy(
        strategy, policy, budget, seed, Path(state) if state is not None else None, key, weights == "policy",
        min_clients, wait, probe_timeout, train_timeout, reports,
    )  # fmt: skip


class PolicyStrategy(Strategy):
    """A Flower strategy whose cohorts come from a fedpick policy; made by `with_policy`."""

    def __init__(
        self,
        inner: Strategy,
        policy: Policy[Any],
        budget: int | None,
        seed: int,
        path: Path | None,
        key: KeyFunction | None,
        use_weights: bool,
        min_clients: int,
        wait: float,
        probe_timeout: float,
        train_timeout: float,
        reports: Mapping[str, str],
    ) -> None:
        self.inner = inner
        self.policy = policy
        self.history: list[Selection] = []
        """The selections of this process's rounds, for analysis."""
        self.session: Session | None = None
        self.roster = Roster()
        self._budget, self._seed, self._path, self._key = budget, seed, path, key
        self._use_weights, self._min_clients, self._wait = use_weights, min_clients, wait
        self._probe_timeout, self._train_timeout, self._reports = probe_timeout, train_timeout, dict(reports)
        self._selection: Selection | None = None
        self._messages: list[Message] = []
        self._arrays = ArrayRecord()
        self._busy: dict[int, str] = {}  # client index -> the message it has not answered yet
        if path is not None and (path / "session.json").exists():
            self.session = Session.load(path, policy=policy, provides=PROVIDES)
            self.roster = Roster.load(path)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the federation; `timeout` defaults to the train_timeout given to `with_policy`."""
        if timeout is not None:
            self._train_timeout = timeout
        return super().start(
            grid, initial_arrays, num_rounds, self._train_timeout, train_config, evaluate_config, evaluate_fn
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose the cohort and let the wrapped strategy write to it."""
        self._arrays = arrays
        self._selection, self._messages = None, []
        online = self._meet(grid)
        if not self.roster.keys:
            return []  # nobody has ever been seen: there is no table to ask a policy about
        clients = self.roster.clients()
        if self.session is None:
            self.session = Session(self.policy, clients, self._seed, provides=PROVIDES)
        elif not _same_table(self.session.clients, clients):
            self.session.grow(clients)
        available = np.zeros(len(clients), dtype=bool)
        available[self.roster.indices(online)] = True
        available[list(self._busy)] = False

        def measure(probe: Probe) -> NDArray[np.float64]:
            return self._measure(probe, server_round, config, grid)

        self._selection = self.session.ask(available=available, budget=self._budget, measure=measure)
        self.history.append(self._selection)
        self._messages = self._write(self._selection.clients, server_round, arrays, config, grid)
        return self._messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Tell the policy how it went, put its weights on the replies, and let the wrapped strategy aggregate."""
        if self._selection is None or self.session is None:
            return None, None
        replies = list(replies)
        chosen = self._selection.clients
        by_node = attribute(self._messages, replies)
        answers = [by_node.get(self.roster.node_of[int(index)]) for index in chosen]
        sent = {message.metadata.dst_node_id: message for message in self._messages}
        updates = [None if reply is None or reply.has_error() else update_of(reply, self._arrays) for reply in answers]
        completed = np.array([update is not None for update in updates], dtype=bool)
        for index, reply in zip(chosen, answers, strict=True):
            if reply is None:
                self._busy[int(index)] = sent[self.roster.node_of[int(index)]].metadata.message_id
        self._note_sizes(chosen, answers)
        weights = aggregation_weights(self._selection, completed, self.roster.clients())
        reports = self._reported(answers, updates, sent)
        self.session.tell(Outcome(index=self.session.round, clients=chosen, completed=completed, **reports))
        if self._path is not None:
            self.roster.save(self._path)
            self.session.save(self._path)
        good = [
            reply for reply, update in zip(answers, updates, strict=True) if reply is not None and update is not None
        ]
        bad = [reply for reply in replies if reply.has_error()]
        if self._use_weights:
            if not weights.sum() > 0:
                return None, None  # zero weight answered: no step
            steps = [update for update in updates if update is not None]
            good = self._weighted(good, steps, weights[completed])
        return self.inner.aggregate_train(server_round, [*good, *bad])

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the wrapped strategy has it, but seeded, and never waiting for nodes that are not there."""
        fraction = min((getattr(inner, "fraction_evaluate", 1.0) for inner in _layers(self.inner)), default=1.0)
        busy = {self.roster.node_of[index] for index in self._busy if index in self.roster.node_of}
        online = [node for node in grid.get_node_ids() if node not in busy]
        order = sorted(online, key=lambda node: (self.roster.index_of_node.get(node, len(self.roster.keys)), node))
        least = max((getattr(inner, "min_evaluate_nodes", 0) for inner in _layers(self.inner)), default=0)
        count = min(max(int(len(order) * fraction), least), len(order))
        if fraction == 0.0 or count == 0:
            return []
        rng = stream(self._seed, server_round, Purpose.MEASURE)
        chosen = [order[place] for place in np.sort(sample_uniform(np.ones(len(order), dtype=bool), count, rng))]
        with _everybody(self.inner, len(chosen)):
            return list(
                self.inner.configure_evaluate(
                    server_round, arrays, ConfigRecord(dict(config)), CohortGrid(grid, chosen)
                )
            )

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As the wrapped strategy has it."""
        return self.inner.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """As the wrapped strategy has it."""
        self.inner.summary()

    def _meet(self, grid: Grid) -> list[int]:
        """Wait, but not for ever, for enough nodes; learn who the new ones are and who has finished at last."""
        deadline = time.monotonic() + self._wait
        while len(online := list(grid.get_node_ids())) < self._min_clients and time.monotonic() < deadline:
            time.sleep(min(_POLL_SECONDS, self._wait))
        if self._busy:
            late = {message.metadata.reply_to_message_id for message in grid.pull_messages(set(self._busy.values()))}
            self._busy = {index: sent for index, sent in self._busy.items() if sent not in late}
        strangers = [node for node in online if node not in self.roster.index_of_node]
        if strangers:
            facts = ask_nodes(grid, strangers, {"kind": "hello"}, self._probe_timeout)
            nodes = {node.node_id: node for node in grid.get_nodes()}
            self.roster.admit(
                {
                    node: (self._key_of(node, nodes.get(node), facts.get(node, {})), facts.get(node, {}))
                    for node in strangers
                }
            )
            for node in strangers:  # a restarted client starts afresh: what its old process owed will never come
                self._busy.pop(self.roster.index_of_node[node], None)
        return online

    def _key_of(self, node_id: int, info: Any, facts: Mapping[str, Any]) -> str:
        if self._key is not None:
            return f"key:{self._key(info, facts)}"
        if name := getattr(info, "name", ""):
            return f"name:{name}"
        if "partition-id" in facts:
            return f"partition:{int(facts['partition-id'])}"
        return f"node:{node_id}"

    def _write(
        self, chosen: NDArray[np.int64], server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """The wrapped strategy's training messages to exactly these clients."""
        nodes = [self.roster.node_of[int(index)] for index in chosen]
        if not nodes:
            return []
        with _everybody(self.inner, len(nodes)):
            # A copy of the config: strategies write into the record they are given.
            view = CohortGrid(grid, nodes)
            messages = list(self.inner.configure_train(server_round, arrays, ConfigRecord(dict(config)), view))
        if sorted(message.metadata.dst_node_id for message in messages) != sorted(nodes):
            raise InvalidInput(
                f"{type(self.inner).__name__} wrote to other nodes than the cohort it was shown, so it samples by "
                "itself; a policy cannot choose for it."
            )
        return messages

    def _measure(self, probe: Probe, server_round: int, config: ConfigRecord, grid: Grid) -> NDArray[np.float64]:
        if probe.signal is Signal.UPDATE:
            return self._probe_updates(probe, server_round, config, grid)
        arrays = self._arrays
        if probe.trial is not None:
            updates = self._train_on_the_side(probe.trial.clients, server_round, config, grid)
            completed = np.array([update is not None for update in updates], dtype=bool)
            weights = aggregation_weights(probe.trial, completed, self.roster.clients())
            arrays = moved(
                arrays, [(float(w), update) for w, update in zip(weights, updates, strict=True) if update is not None]
            )
        question = {"kind": "loss", "batch-size": probe.batch_size or 0}
        nodes = [self.roster.node_of[int(index)] for index in probe.clients]
        answers = ask_nodes(grid, nodes, question, self._probe_timeout, arrays)
        return np.array([_number(answers[node].get("value")) if node in answers else np.nan for node in nodes])

    def _probe_updates(self, probe: Probe, server_round: int, config: ConfigRecord, grid: Grid) -> NDArray[np.float64]:
        updates = self._train_on_the_side(probe.clients, server_round, config, grid)
        rows = [None if update is None else sketch(update, self._seed) for update in updates]
        width = next((len(row) for row in rows if row is not None), 1)
        return np.array([np.full(width, np.nan) if row is None else row for row in rows])

    def _train_on_the_side(
        self, chosen: NDArray[np.int64], server_round: int, config: ConfigRecord, grid: Grid
    ) -> list[dict[str, NDArray[Any]] | None]:
        """Updates of a cohort whose model is thrown away; None for who did not answer in time."""
        messages = self._write(chosen, server_round, self._arrays, config, grid)
        replies = attribute(messages, grid.send_and_receive(messages=messages, timeout=self._train_timeout))
        sent = {message.metadata.dst_node_id: message.metadata.message_id for message in messages}
        updates: list[dict[str, NDArray[Any]] | None] = []
        for index in chosen:
            reply = replies.get(self.roster.node_of[int(index)])
            if reply is None:
                self._busy[int(index)] = sent[self.roster.node_of[int(index)]]
            updates.append(None if reply is None or reply.has_error() else update_of(reply, self._arrays))
        return updates

    def _note_sizes(self, chosen: NDArray[np.int64], answers: Sequence[Message | None]) -> None:
        """Training replies say how many examples there are: the last word on a client's size."""
        key = next((inner.weighted_by_key for inner in _layers(self.inner) if hasattr(inner, "weighted_by_key")), None)
        for index, reply in zip(chosen, answers, strict=True):
            size = _metrics(reply).get(key or "")
            if isinstance(size, (int, float)) and np.isfinite(size) and size >= 0:
                self.roster.num_examples[int(index)] = float(size)

    def _reported(
        self,
        answers: Sequence[Message | None],
        updates: Sequence[dict[str, NDArray[Any]] | None],
        sent: Mapping[int, Message],
    ) -> dict[str, NDArray[np.float64]]:
        columns = {
            name: np.array([_number(_metrics(reply).get(key)) for reply in answers])
            for name, key in self._reports.items()
        }
        if np.isnan(columns.get("duration", np.nan)).all():
            starts = {message.metadata.message_id: message.metadata.created_at for message in sent.values()}
            columns["duration"] = np.array(
                [
                    np.nan if reply is None else reply.metadata.created_at - starts[reply.metadata.reply_to_message_id]
                    for reply in answers
                ]
            )
        squares = [
            np.nan
            if update is None
            else sum(float(np.sum(np.square(array, dtype=np.float64))) for array in update.values())
            for update in updates
        ]
        return {**columns, "update_norm": np.sqrt(np.array(squares, dtype=np.float64))}

    def _weighted(
        self, replies: list[Message], updates: Sequence[Mapping[str, NDArray[Any]]], weights: NDArray[np.float64]
    ) -> list[Message]:
        """The replies with the policy's weights, and stretched updates where the weights do not sum to 1."""
        key = next((inner.weighted_by_key for inner in _layers(self.inner) if hasattr(inner, "weighted_by_key")), None)
        if key is None:
            raise InvalidInput(
                f"{type(self.inner).__name__} has no 'weighted_by_key', so fedpick cannot give it weights.\n\n"
                'hint: pass weights="ignored" to with_policy'
            )
        total = float(weights.sum())
        for reply, update, weight in zip(replies, updates, weights, strict=True):
            metrics = next(iter(reply.content.metric_records.values()), None)
            if metrics is None:
                raise InvalidInput("A train reply has no MetricRecord; Flower's strategies expect one with the weight.")
            metrics[key] = float(weight)
            if abs(total - 1.0) > 1e-12:
                name = next(iter(reply.content.array_records))
                reply.content[name] = moved(self._arrays, [(total, update)])
        return replies


def _layers(strategy: Strategy) -> Iterator[Any]:
    """The strategy and whatever strategies it wraps."""
    current: Any = strategy
    while isinstance(current, Strategy):
        yield current
        current = getattr(current, "strategy", None)


@contextmanager
def _everybody(strategy: Strategy, count: int) -> Iterator[None]:
    """For one call, make a strategy take all `count` nodes it sees, and wait for no more."""
    wanted = {"fraction_train": 1.0, "fraction_evaluate": 1.0}
    wanted |= dict.fromkeys(("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"), count)
    before = [
        (inner, name, getattr(inner, name)) for inner in _layers(strategy) for name in wanted if hasattr(inner, name)
    ]
    for inner, name, _ in before:
        setattr(inner, name, wanted[name])
    try:
        yield
    finally:
        for inner, name, value in before:
            setattr(inner, name, value)


def _same_table(old: Clients, new: Clients) -> bool:
    return len(old) == len(new) and np.array_equal(old.num_examples, new.num_examples)


def _metrics(reply: Message | None) -> Mapping[str, Any]:
    if reply is None or reply.has_error():
        return {}
    return next(iter(reply.content.metric_records.values()), {})


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")
