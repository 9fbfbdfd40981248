"""with_policy: a Flower strategy whose cohorts and weights come from a fedpick policy.

`PolicyStrategy` wraps the user's strategy. In each round it

1. lists the online nodes and asks new ones to describe themselves (`membership`),
2. lets the policy probe clients (`probing`) and choose the cohort,
3. lets the wrapped strategy write its train messages on a grid that shows only the cohort (`inner`),
4. puts the policy's weights on the usable replies (`messages`) and lets the wrapped strategy aggregate them,
5. tells the policy the outcome, saves its state and reports the round (`progress`).

Weights a_i that sum to c instead of 1 are applied exactly: each reply w_i becomes w + c (w_i - w) before the strategy
takes its normalised mean, which is then w + sum of a_i (w_i - w).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from fedpick.core import validation
from fedpick.core.errors import InvalidInput, MissingSignal, StateFileError
from fedpick.core.policy import Policy, Signal
from fedpick.core.rng import Purpose, stream
from fedpick.core.sampling import sample_uniform
from fedpick.core.session import SESSION_FILE, Session
from fedpick.core.types import Clients, Outcome, Selection, aggregation_weights
from fedpick.flower.inner import (
    divides_by_norm,
    layers,
    needed_numbers,
    refuse_unsuitable,
    taking_all,
    train_messages,
    weight_key,
)
from fedpick.flower.membership import KeyFunction, Membership, Roster
from fedpick.flower.messages import (
    CohortGrid,
    Updates,
    apply_updates,
    consistent_replies,
    count,
    metrics_of,
    number,
    replies_by_node,
    squared_norm,
    usable_updates,
)
from fedpick.flower.probing import Prober
from fedpick.flower.progress import RoundProgress, RoundReport
from fedpick.flower.settings import (
    PROVIDES,
    REPORTS,
    Settings,
    refuse_unusable_policy,
    writable_directory,
)

__all__ = ["PolicyStrategy", "with_policy"]

_LOG = logging.getLogger(__name__)


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
    progress: Callable[[RoundReport], None] | None = None,
) -> PolicyStrategy:
    """Let a policy choose the cohorts, and their weights, of a Flower strategy.

    Args:
        strategy: a Flower strategy. Its fractions and minimum numbers of nodes are overruled.
        policy: a policy object, such as `fedpick.policies.get("pow-d")`.
        budget: the largest cohort; None for no limit.
        seed: seed of all random choices.
        state: a directory in which the policy's state is saved after each round and from which it is resumed; created
            if missing. None saves nothing.
        key: (NodeInfo, what the client reported) -> an identity that survives restarts. None: the authenticated name,
            else the reported partition id, else the node id. If the function returns nothing, or the same for several
            nodes at once, the node id is used.
        weights: "policy", or "ignored" for strategies that cannot use weights (median, Krum, ...).
        min_clients: wait until this many clients are online ...
        wait: ... but at most this many seconds; then go on with those that are online.
        probe_timeout: seconds that clients have to answer a query.
        train_timeout: seconds that clients have to train. A late client counts as failed, and as busy until it answers.
        reports: Outcome field -> metric of the train replies.
        progress: called when a cohort is chosen and when its round ends, with the clients that completed and failed,
            and the duration of each exchange. An exception it raises is logged and does not end the run.
    """
    if isinstance(strategy, PolicyStrategy):
        raise InvalidInput("This strategy already has a policy. Wrap the strategy that was first given to with_policy.")
    refuse_unusable_policy(policy)
    if weights not in ("policy", "ignored"):
        raise InvalidInput(f"weights must be 'policy' or 'ignored'. Got {weights!r}.")
    refuse_unsuitable(strategy, type(policy).__name__, use_weights=weights == "policy")
    settings = Settings(
        budget=budget,
        seed=seed,
        path=None,
        key=key,
        use_weights=weights == "policy",
        min_clients=min_clients,
        wait=wait,
        probe_timeout=probe_timeout,
        train_timeout=train_timeout,
        reports=reports,
        progress=progress,
    )
    if state is not None:  # last: a call that is refused creates no directory
        settings.path = writable_directory(state)
    return PolicyStrategy(strategy, policy, settings)


class PolicyStrategy(Strategy):
    """A Flower strategy whose cohorts come from a fedpick policy; made by `with_policy`."""

    def __init__(self, inner: Strategy, policy: Policy[Any], settings: Settings) -> None:
        self.inner = inner
        self.policy = policy
        self.history: list[Selection] = []
        """The selections of this process's rounds."""
        self.session: Session | None = None
        self.roster = Roster()
        self._settings = settings
        self._selection: Selection | None = None  # of the round that is asked and not told yet
        self._messages: list[Message] = []
        self._evaluations: list[Message] = []
        self._arrays = ArrayRecord()
        self._warned: set[str] = set()
        self._progress = RoundProgress(settings.progress)
        if settings.path is not None:
            self._resume(settings.path)
        self._membership = Membership(
            self.roster,
            key=settings.key,
            min_clients=settings.min_clients,
            wait=settings.wait,
            probe_timeout=settings.probe_timeout,
        )

    def _resume(self, path: Path) -> None:
        """Load the saved session and roster. A roster without a session is loaded only to refuse a foreign file."""
        saved = (path / SESSION_FILE).exists()
        session = Session.load(path, policy=self.policy, provides=PROVIDES) if saved else None
        roster = Roster.load(path) if saved or (path / "roster.json").exists() else None
        if session is None or roster is None:
            return
        if session.seed != self._settings.seed:
            raise InvalidInput(
                f"The state in {path} was saved with seed={session.seed}. Got seed={self._settings.seed}: "
                "pass the same seed to resume, or another directory to start anew."
            )
        if len(roster.keys) < len(session.clients):
            raise StateFileError(
                f"The files in {path} do not belong together: roster.json has {len(roster.keys)} clients, the session "
                f"{len(session.clients)}. Restore the right ones, or choose another directory to start anew."
            )
        self.session, self.roster = session, roster

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
        """Run the federation; `timeout` defaults to the train_timeout of `with_policy`."""
        if timeout is not None:
            self._settings.train_timeout = validation.number("start", "timeout", "[0, inf]", value=timeout)
        return super().start(
            grid, initial_arrays, num_rounds, self._settings.train_timeout, train_config, evaluate_config, evaluate_fn
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose the cohort and let the wrapped strategy write its messages."""
        if self._selection is not None:  # the last round was aborted: its updates never entered the model
            self._tell(self._selection, np.zeros(len(self._selection.clients), dtype=bool))
        self._arrays, self._messages = arrays, []
        grid = self._progress.start(grid)
        online = self._membership.refresh(grid)
        if not self.roster.keys:
            return []  # no client has ever been online: there is no table for a session
        clients = self.roster.clients()
        if self.session is None:
            if self._waits_for_labels(clients):
                return []
            self.session = Session(self.policy, clients, self._settings.seed, provides=PROVIDES)
        elif not _same_table(self.session.clients, clients):
            self.session.grow(clients)
        prober = Prober(
            inner=self.inner,
            membership=self._membership,
            arrays=arrays,
            server_round=server_round,
            config=config,
            grid=grid,
            seed=self._settings.seed,
            probe_timeout=self._settings.probe_timeout,
            train_timeout=self._settings.train_timeout,
        )
        available = self._membership.available(online)
        selection = self.session.ask(available=available, budget=self._settings.budget, measure=prober.measure)
        self._selection = selection
        nodes = [self.roster.node_of[int(index)] for index in selection.clients]
        self._messages = train_messages(self.inner, nodes, server_round, arrays, config, grid)
        self.history.append(selection)
        keys = self.roster.keys
        self._progress.chosen(
            self.session.round,
            (keys[index] for index in np.flatnonzero(available)),
            (keys[index] for index in selection.clients),
        )
        return self._messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Put the policy's weights on the replies, let the wrapped strategy aggregate, then tell the policy.

        In this order, so that a saved state never holds a step that was not made: if aggregation raises, the saved
        state and the user's model are both those before the round, and the round is asked again after a restart.
        """
        if self._selection is None:
            return None, None
        replies, selection = list(replies), self._selection
        self._progress.answered(len(self._messages), len(replies), self._settings.train_timeout)
        by_node = replies_by_node(self._messages, replies)
        self._membership.mark_busy(self._messages, by_node)
        answers = [by_node.get(self.roster.node_of[int(index)]) for index in selection.clients]
        use_weights = self._settings.use_weights
        updates, wrong = usable_updates(
            answers,
            self._arrays,
            weight=weight_key(self.inner),
            numbers=needed_numbers(self.inner, use_weights=use_weights),
            scalars=self._settings.reports.values(),
            refuse_zero=divides_by_norm(self.inner),
        )
        for place, reason in wrong.items():
            _LOG.warning(
                "The reply of %s counts as failed: %s.", self.roster.keys[int(selection.clients[place])], reason
            )
        completed = np.array([update is not None for update in updates], dtype=bool)
        self._note_sizes(selection, answers)
        reports = self._reported(answers, updates)
        weights = aggregation_weights(selection, completed, self.roster.clients())
        errors = [reply for reply in replies if reply.has_error()]
        if not completed.any() or (use_weights and not weights.sum() > 0):
            # No step. The strategy is not called: some of Flower's divide by the number of replies.
            if errors and not completed.any():
                _LOG.warning("No client completed the round; the first error: %s.", errors[0].error.reason)
            self._tell(selection, completed, **reports)
            return None, None
        good = [
            reply for reply, update in zip(answers, updates, strict=True) if reply is not None and update is not None
        ]
        if use_weights:
            self._put_weights(good, [update for update in updates if update is not None], weights[completed])
        new, metrics = self.inner.aggregate_train(server_round, [*good, *errors])
        if new is None:  # the strategy declined: no update entered the model
            completed = np.zeros(len(completed), dtype=bool)
        self._tell(selection, completed, **reports)
        return new, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As in the wrapped strategy, but with a seeded sample and without waiting for more nodes."""
        self._evaluations = []
        fraction = min((getattr(inner, "fraction_evaluate", 1.0) for inner in layers(self.inner)), default=1.0)
        least = max((getattr(inner, "min_evaluate_nodes", 0) for inner in layers(self.inner)), default=0)
        busy = self._membership.busy_nodes()
        online = [node for node in grid.get_node_ids() if node not in busy]
        order = sorted(online, key=lambda node: (self.roster.index_of_node.get(node, len(self.roster.keys)), node))
        size = min(max(int(len(order) * fraction), least), len(order))
        if fraction == 0.0 or size == 0:
            return []
        # The session's round, not Flower's, which starts at 1 again after every restart.
        index = self.session.round if self.session is not None else 0
        rng = stream(self._settings.seed, index, Purpose.MEASURE)
        chosen = [order[place] for place in np.sort(sample_uniform(np.ones(len(order), dtype=bool), size, rng))]
        with taking_all(self.inner, len(chosen)):
            view = CohortGrid(grid, chosen)
            messages = self.inner.configure_evaluate(server_round, arrays, ConfigRecord(dict(config)), view)
            self._evaluations = list(messages)
        return self._evaluations

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As in the wrapped strategy, on the replies that it can aggregate."""
        replies = list(replies)
        self._membership.mark_busy(self._evaluations, replies_by_node(self._evaluations, replies))
        weight = weight_key(self.inner)
        usable = consistent_replies(replies, weight=weight, numbers=() if weight is None else (weight,))
        left_out = sum(not good and not reply.has_error() for reply, good in zip(replies, usable, strict=True))
        if left_out:
            _LOG.warning(
                "%d of %d evaluations are left out: a reply must hold one MetricRecord with the same keys as the "
                "others, a number where they have one, and its weight under %r.",
                *(left_out, len(replies), weight),
            )
        kept = [reply for reply, good in zip(replies, usable, strict=True) if good or reply.has_error()]
        return self.inner.aggregate_evaluate(server_round, kept)

    def summary(self) -> None:
        """As in the wrapped strategy."""
        self.inner.summary()

    def _waits_for_labels(self, clients: Clients) -> bool:
        """Delay the session until a usable label histogram arrives; raise if no client reports one."""
        if clients.label_histogram is not None or Signal.LABEL_HISTOGRAM not in self.policy.needs:
            return False
        name = type(self.policy).__name__
        if "label-histogram" not in self._membership.unusable_fields:
            raise MissingSignal(
                f"{name} needs the clients' label histograms, but no client reported one.\n\n"
                "hint: report it with fedpick.flower.answer_probes(app, label_histogram=...), raise min_clients to "
                "wait for clients that do, or choose a policy or options that do not need it"
            )
        _LOG.warning("%s needs label histograms, and there is no usable label histogram yet: the round is empty.", name)
        return True

    def _tell(self, selection: Selection, completed: NDArray[np.bool_], **reports: NDArray[np.float64]) -> None:
        """Commit the round, save it and report it."""
        assert self.session is not None
        outcome = Outcome(index=self.session.round, clients=selection.clients, completed=completed, **reports)
        self.session.tell(outcome)
        self._selection = None
        self._warn_of_missing_reports(outcome)
        if self._settings.path is not None:
            self.roster.save(self._settings.path)
            self.session.save(self._settings.path)
        self._progress.finish(completed.tolist())

    def _warn_of_missing_reports(self, outcome: Outcome) -> None:
        """Warn once if a policy gets no report from which it learns: it still chooses, but not as its name promises."""
        for signal, name in ((Signal.OUTCOME_LOSS, "loss"), (Signal.TRAIN_LOSS, "train_loss")):
            reported = getattr(outcome, name)[outcome.completed]
            if signal in self.policy.needs and len(reported) and np.isnan(reported).all() and name not in self._warned:
                self._warned.add(name)
                _LOG.warning(
                    "%s learns from %r, but no train reply has a usable %r among its metrics. Have the clients report "
                    'it, or name the right key: with_policy(..., reports={"%s": ...}).',
                    *(type(self.policy).__name__, name, self._settings.reports.get(name), name),
                )

    def _note_sizes(self, selection: Selection, answers: Sequence[Message | None]) -> None:
        """Take the clients' sizes from the train replies."""
        key = weight_key(self.inner) or ""
        for index, reply in zip(selection.clients, answers, strict=True):
            size = count(metrics_of(reply).get(key))
            if not np.isnan(size):
                self.roster.num_examples[int(index)] = size

    def _reported(self, answers: Sequence[Message | None], updates: Updates) -> dict[str, NDArray[np.float64]]:
        columns = {
            name: np.array([number(metrics_of(reply).get(key)) for reply in answers], dtype=np.float64)
            for name, key in self._settings.reports.items()
        }
        squares = [np.nan if update is None else squared_norm(update) for update in updates]
        return {**columns, "update_norm": np.sqrt(np.array(squares, dtype=np.float64))}

    def _put_weights(
        self, replies: Sequence[Message], updates: Sequence[Mapping[str, NDArray[Any]]], weights: NDArray[np.float64]
    ) -> None:
        """Write the policy's weights into the replies, and scale the updates if the weights do not sum to 1."""
        key = weight_key(self.inner)
        assert key is not None  # with_policy refuses strategies without one
        total = float(weights.sum())
        for reply, update, weight in zip(replies, updates, weights, strict=True):
            next(iter(reply.content.metric_records.values()))[key] = float(weight)
            if abs(total - 1.0) > 1e-12:
                name = next(iter(reply.content.array_records))
                reply.content[name] = apply_updates(self._arrays, [(total, update)])


def _same_table(old: Clients, new: Clients) -> bool:
    if len(old) != len(new) or not np.array_equal(old.num_examples, new.num_examples):
        return False
    if old.label_histogram is None or new.label_histogram is None:
        return old.label_histogram is new.label_histogram
    return np.array_equal(old.label_histogram, new.label_histogram)
