"""with_policy: a Flower strategy whose cohorts and weights come from a fedpick policy. By composition, not inheritance.

In each round: see who is online, ask newcomers who they are, let the policy probe and choose, let the wrapped strategy
build its messages on a view of the grid that shows only the cohort, then give the policy's weights to the replies and
let the wrapped strategy aggregate; only then is the policy told, and its state saved. Unnormalised weights a_i with sum
c are exact, too: every reply w_i is replaced by w + c (w_i - w) before the strategy takes its normalised mean, which is
then w + sum of a_i (w_i - w).
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

from fedpick.core.errors import InvalidInput, MissingSignal, StateFileError
from fedpick.core.policy import Policy, Signal
from fedpick.core.rng import Purpose, stream
from fedpick.core.sampling import sample_uniform
from fedpick.core.session import Session
from fedpick.core.types import Clients, Outcome, Selection, aggregation_weights
from fedpick.flower.attendance import Attendance
from fedpick.flower.exchange import CohortGrid, attribute, moved
from fedpick.flower.introduction import usable_size
from fedpick.flower.probing import Prober
from fedpick.flower.progress import Diary, RoundReport
from fedpick.flower.replies import Updates, metrics_of, number, squared_norm, usable_together, usable_updates
from fedpick.flower.roster import KeyFunction, Roster
from fedpick.flower.settings import (
    PROVIDES,
    REPORTS,
    Settings,
    refuse_unusable_policy,
    seconds,
    writable_directory,
)
from fedpick.flower.wrapped import (
    everybody,
    layers,
    refuse_unsuitable,
    train_messages,
    weight_key,
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
    """Let a policy choose the cohorts, and their weights, of any Flower strategy.

    Args:
        strategy: any Flower strategy; what it says about fractions and minimum numbers of nodes is overruled.
        policy: what chooses; an object, such as `fedpick.policies.get("pow-d")`.
        budget: the largest cohort; None: everybody available.
        seed: of all random choices.
        state: a directory where the policy's state is saved after each round and resumed from; made if need be.
        key: (NodeInfo, what the client reported) -> identity that survives restarts; None: the authenticated name,
            else the reported partition id, else the node id. Where it gives nothing, or the same to several nodes
            at once, the node id counts.
        weights: "policy", or "ignored" for strategies that cannot use weights (median, Krum, ...).
        min_clients: wait until so many are online ...
        wait: ... but for no more than so many seconds; then go on with whoever is there.
        probe_timeout: seconds clients have to answer a question.
        train_timeout: seconds clients have to train; who is late counts as failed, and busy until it answers.
        reports: Outcome field -> key in the train replies' metrics.
        progress: called when a cohort is chosen and when its round is over, with who completed, who failed, and how
            long each exchange took. What it raises is logged, and ends nothing.
    """
    if isinstance(strategy, PolicyStrategy):
        raise InvalidInput(
            "This strategy already has a policy. Wrap the strategy that was given to with_policy the first time."
        )
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
    if state is not None:  # last: whoever is refused for another reason finds no new directory
        settings.path = writable_directory(state)
    return PolicyStrategy(strategy, policy, settings)


class PolicyStrategy(Strategy):
    """A Flower strategy whose cohorts come from a fedpick policy; made by `with_policy`."""

    def __init__(self, inner: Strategy, policy: Policy[Any], settings: Settings) -> None:
        self.inner = inner
        self.policy = policy
        self.history: list[Selection] = []
        """The selections of this process's rounds, for analysis."""
        self.session: Session | None = None
        self.roster = Roster()
        self._settings = settings
        self._selection: Selection | None = None  # asked, and not told yet
        self._messages: list[Message] = []
        self._evaluations: list[Message] = []
        self._arrays = ArrayRecord()
        self._warned: set[str] = set()
        self._diary = Diary(settings.progress)
        if settings.path is not None:
            self._resume(settings.path)
        self._attendance = Attendance(
            self.roster,
            key=settings.key,
            min_clients=settings.min_clients,
            wait=settings.wait,
            probe_timeout=settings.probe_timeout,
        )

    def _resume(self, path: Path) -> None:
        """Go on from what is saved; without a session a roster is looked at only so as not to overwrite another's."""
        saved = (path / "session.json").exists()
        session = Session.load(path, policy=self.policy, provides=PROVIDES) if saved else None
        roster = Roster.load(path) if saved or (path / "roster.json").exists() else None
        if session is None or roster is None:
            return
        if session.seed != self._settings.seed:
            raise InvalidInput(
                f"The state in {path} was saved with seed={session.seed}. Got seed={self._settings.seed}: "
                "pass the same seed to go on, or another directory to start anew."
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
        """Run the federation; `timeout` defaults to the train_timeout given to `with_policy`."""
        if timeout is not None:
            self._settings.train_timeout = seconds(timeout, "timeout")
        return super().start(
            grid, initial_arrays, num_rounds, self._settings.train_timeout, train_config, evaluate_config, evaluate_fn
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose the cohort and let the wrapped strategy write to it."""
        if self._selection is not None:  # the last round was broken off: its updates never entered the model
            self._tell(self._selection, np.zeros(len(self._selection.clients), dtype=bool))
        self._arrays, self._messages = arrays, []
        grid = self._diary.open(grid)
        online = self._attendance.meet(grid)
        if not self.roster.keys:
            return []  # nobody has ever been seen: there is no table to ask a policy about
        clients = self.roster.clients()
        if self.session is None:
            if self._waits_for_labels(clients):
                return []
            self.session = Session(self.policy, clients, self._settings.seed, provides=PROVIDES)
        elif not _same_table(self.session.clients, clients):
            self.session.grow(clients)
        prober = Prober(
            inner=self.inner,
            attendance=self._attendance,
            arrays=arrays,
            server_round=server_round,
            config=config,
            grid=grid,
            seed=self._settings.seed,
            probe_timeout=self._settings.probe_timeout,
            train_timeout=self._settings.train_timeout,
        )
        available = self._attendance.available(online)
        selection = self.session.ask(available=available, budget=self._settings.budget, measure=prober.measure)
        self._selection = selection
        nodes = [self.roster.node_of[int(index)] for index in selection.clients]
        self._messages = train_messages(self.inner, nodes, server_round, arrays, config, grid)
        self.history.append(selection)
        keys = self.roster.keys
        self._diary.chosen(
            self.session.round,
            (keys[index] for index in np.flatnonzero(available)),
            (keys[index] for index in selection.clients),
        )
        return self._messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Put the policy's weights on the replies, let the wrapped strategy aggregate, then tell the policy.

        In this order, so that a state on disk never holds a step that was not made: if aggregation raises, the saved
        state and the caller's model are both those before the round, and the round is asked again after a restart.
        """
        if self._selection is None:
            return None, None
        replies, selection = list(replies), self._selection
        self._diary.answered(len(self._messages), len(replies), self._settings.train_timeout)
        by_node = attribute(self._messages, replies)
        self._attendance.note_silence(self._messages, by_node)
        answers = [by_node.get(self.roster.node_of[int(index)]) for index in selection.clients]
        updates, wrong = usable_updates(
            answers,
            self._arrays,
            self.inner,
            use_weights=self._settings.use_weights,
            scalars=self._settings.reports.values(),
        )
        for place, reason in wrong.items():
            _LOG.warning(
                "The reply of %s counts as failed: %s.", self.roster.keys[int(selection.clients[place])], reason
            )
        completed = np.array([update is not None for update in updates], dtype=bool)
        self._note_sizes(selection, answers)
        reports = self._reported(answers, updates)
        weights = aggregation_weights(selection, completed, self.roster.clients())
        bad = [reply for reply in replies if reply.has_error()]
        if not completed.any() or (self._settings.use_weights and not weights.sum() > 0):
            # No step. The strategy is not asked: some of Flower's divide by the number of replies.
            if bad and not completed.any():
                _LOG.warning("Nobody completed the round; the first error: %s.", bad[0].error.reason)
            self._tell(selection, completed, **reports)
            return None, None
        good = [
            reply for reply, update in zip(answers, updates, strict=True) if reply is not None and update is not None
        ]
        if self._settings.use_weights:
            steps = [update for update in updates if update is not None]
            good = self._weighted(good, steps, weights[completed])
        new, metrics = self.inner.aggregate_train(server_round, [*good, *bad])
        if new is None:  # the strategy declined: nobody's update entered the model
            completed = np.zeros(len(completed), dtype=bool)
        self._tell(selection, completed, **reports)
        return new, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the wrapped strategy has it, but seeded, and never waiting for nodes that are not there."""
        self._evaluations = []
        fraction = min((getattr(inner, "fraction_evaluate", 1.0) for inner in layers(self.inner)), default=1.0)
        busy = self._attendance.busy_nodes()
        online = [node for node in grid.get_node_ids() if node not in busy]
        order = sorted(online, key=lambda node: (self.roster.index_of_node.get(node, len(self.roster.keys)), node))
        least = max((getattr(inner, "min_evaluate_nodes", 0) for inner in layers(self.inner)), default=0)
        count = min(max(int(len(order) * fraction), least), len(order))
        if fraction == 0.0 or count == 0:
            return []
        # The session's round, not Flower's: that one starts at 1 again after every restart.
        index = self.session.round if self.session is not None else 0
        rng = stream(self._settings.seed, index, Purpose.MEASURE)
        chosen = [order[place] for place in np.sort(sample_uniform(np.ones(len(order), dtype=bool), count, rng))]
        with everybody(self.inner, len(chosen)):
            self._evaluations = list(
                self.inner.configure_evaluate(
                    server_round, arrays, ConfigRecord(dict(config)), CohortGrid(grid, chosen)
                )
            )
        return self._evaluations

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As the wrapped strategy has it, on the replies that it can aggregate."""
        replies = list(replies)
        self._attendance.note_silence(self._evaluations, attribute(self._evaluations, replies))
        weight = weight_key(self.inner)
        usable = usable_together(replies, weight=weight, numbers=() if weight is None else (weight,))
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
        """As the wrapped strategy has it."""
        self.inner.summary()

    def _waits_for_labels(self, clients: Clients) -> bool:
        """No table without labels for a policy that needs them: wait where clients do tell them, however badly."""
        if clients.label_histogram is not None or Signal.LABEL_HISTOGRAM not in self.policy.needs:
            return False
        name = type(self.policy).__name__
        if "label-histogram" not in self._attendance.unusable_fields:
            raise MissingSignal(
                f"{name} needs the clients' label histograms, but no client told one.\n\n"
                "hint: have them tell it with fedpick.flower.answer_probes(app, label_histogram=...), raise "
                "min_clients to wait for those that do, or choose a policy or options that do without"
            )
        _LOG.warning("%s needs label histograms, and there is no usable label histogram yet: nobody is chosen.", name)
        return True

    def _tell(self, selection: Selection, completed: NDArray[np.bool_], **reports: NDArray[np.float64]) -> None:
        """Commit the round, and save it."""
        assert self.session is not None
        outcome = Outcome(index=self.session.round, clients=selection.clients, completed=completed, **reports)
        self.session.tell(outcome)
        self._selection = None
        self._warn_of_missing_reports(outcome)
        if self._settings.path is not None:
            self.roster.save(self._settings.path)
            self.session.save(self._settings.path)
        self._diary.over(completed.tolist())

    def _warn_of_missing_reports(self, outcome: Outcome) -> None:
        """Without its report a policy still chooses, but not as its name promises: say so, once."""
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
        """Training replies say how many examples there are: the last word on a client's size."""
        key = weight_key(self.inner) or ""
        for index, reply in zip(selection.clients, answers, strict=True):
            size = usable_size(metrics_of(reply).get(key))
            if not np.isnan(size):
                self.roster.num_examples[int(index)] = size

    def _reported(self, answers: Sequence[Message | None], updates: Updates) -> dict[str, NDArray[np.float64]]:
        columns = {
            name: np.array([number(metrics_of(reply).get(key)) for reply in answers], dtype=np.float64)
            for name, key in self._settings.reports.items()
        }
        squares = [np.nan if update is None else squared_norm(update) for update in updates]
        return {**columns, "update_norm": np.sqrt(np.array(squares, dtype=np.float64))}

    def _weighted(
        self, replies: list[Message], updates: Sequence[Mapping[str, NDArray[Any]]], weights: NDArray[np.float64]
    ) -> list[Message]:
        """The replies with the policy's weights, and stretched updates where the weights do not sum to 1."""
        key = weight_key(self.inner)
        assert key is not None  # with_policy refuses strategies without one
        total = float(weights.sum())
        for reply, update, weight in zip(replies, updates, weights, strict=True):
            next(iter(reply.content.metric_records.values()))[key] = float(weight)
            if abs(total - 1.0) > 1e-12:
                name = next(iter(reply.content.array_records))
                reply.content[name] = moved(self._arrays, [(total, update)])
        return replies


def _same_table(old: Clients, new: Clients) -> bool:
    if len(old) != len(new) or not np.array_equal(old.num_examples, new.num_examples):
        return False
    if old.label_histogram is None or new.label_histogram is None:
        return old.label_histogram is new.label_histogram
    return np.array_equal(old.label_histogram, new.label_histogram)
