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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from fedpick.core import registry, validation
from fedpick.core.errors import InvalidInput, StateFileError, TrainingFailed
from fedpick.core.policy import Policy, Signal
from fedpick.core.rng import Purpose, stream
from fedpick.core.sampling import sample_uniform
from fedpick.core.session import SESSION_FILE, Session
from fedpick.core.types import Clients, Outcome, Selection
from fedpick.core.writing import claim
from fedpick.flower.inner import (
    divides_by_norm,
    driven_by,
    layers,
    messages_to,
    needed_numbers,
    refuse_unsuitable,
    taking_all,
    weight_key,
)
from fedpick.flower.membership import ROSTER_FILE, Membership, Roster
from fedpick.flower.messages import (
    LOG,
    Arrays,
    CohortGrid,
    SketchFunction,
    all_finite,
    count,
    decoded,
    difference,
    head,
    make_consistent,
    metrics_of,
    number,
    reason_of,
    replies_by_node,
    scaled,
    sketches,
    squared_norm,
    usable_replies,
)
from fedpick.flower.probing import Prober
from fedpick.flower.progress import RoundProgress, RoundReport
from fedpick.flower.settings import (
    PROVIDES,
    REPORTS,
    Eligible,
    KeyFunction,
    Settings,
    WeightsFunction,
    refuse_unusable_policy,
    writable_directory,
)

__all__ = ["PolicyStrategy", "with_policy"]


def with_policy(
    strategy: Strategy,
    policy: Policy[Any],
    *,
    budget: float | None = None,
    seed: int = 0,
    state: str | Path | None = None,
    key: KeyFunction | None = None,
    eligible: Eligible | None = None,
    weights: str | WeightsFunction = "policy",
    min_clients: int = 1,
    wait: float = 60.0,
    ready_timeout: float = 3600.0,
    probe: str = "query",
    probe_timeout: float = 60.0,
    train_timeout: float = 3600.0,
    reports: Mapping[str, str] = REPORTS,
    sketch: str | SketchFunction = "head",
    buffers: Callable[[str], bool] | None = None,
    progress: Callable[[RoundReport], None] | None = None,
) -> PolicyStrategy:
    """Let a policy choose the cohorts, and their weights, of a Flower strategy.

    Args:
        strategy: a Flower strategy. Its fractions and minimum numbers of nodes are overruled.
        policy: a policy object, such as `fedpick.policies.get("pow-d")`.
        budget: the largest cohort, or, between 0 and 1, its fraction of the ready clients; None for no limit.
        seed: seed of all random choices.
        state: a directory in which the policy's state is saved after each round and from which it is resumed; created
            if missing. None saves nothing.
        key: (NodeInfo, what the client reported) -> an identity that survives restarts. None: the authenticated name,
            else the reported partition id, else the node id. If the function returns nothing, or the same for several
            nodes at once, the node id is used.
        eligible: (NodeInfo, what the client reported) -> whether the client may take part, asked once for every node;
            or the identities of the clients that may. None: all may.
        weights: "policy", "ignored" for strategies that cannot use weights (median, Krum, ...), or a function with the
            arguments of `fedpick.aggregation_weights` that returns one weight for every selected client.
        min_clients: start a round once this many clients have described themselves ...
        wait: ... or after this many seconds, with those that have.
        ready_timeout: seconds without any ready client after which the run ends with an error.
        probe: who answers when a policy asks clients for the loss of a model: "query", the function that
            `answer_probes` registered; or "evaluate", the ClientApp's evaluate function.
        probe_timeout: seconds that clients have to answer a query.
        train_timeout: seconds that clients have to train. A late client counts as failed, and as busy until it answers.
        reports: Outcome field -> metric of the train replies; "eval_loss" -> metric of the evaluate replies.
        sketch: how the server describes an update for policies that learn from it: "head" (the update of the last
            layer's bias), "count-sketch" (512 numbers of the whole update), or a function (arrays of the update) ->
            vector.
        buffers: (name of an array) -> whether it holds statistics instead of parameters. Statistics are averaged with
            weights that sum to 1. Arrays of integers, and those that PyTorch's batch normalisation names
            running_mean, running_var and num_batches_tracked, are always statistics.
        progress: called when a cohort is chosen and when its round ends, with the clients that completed and failed,
            and the duration of each exchange. An exception it raises is logged and does not end the run.
    """
    if isinstance(strategy, PolicyStrategy):
        raise InvalidInput("This strategy already has a policy. Wrap the strategy that was first given to with_policy.")
    refuse_unusable_policy(policy)
    settings = Settings(
        budget=budget,
        seed=seed,
        path=None,
        key=key,
        eligible=eligible,
        weights=weights,
        min_clients=min_clients,
        wait=wait,
        ready_timeout=ready_timeout,
        probe=probe,
        probe_timeout=probe_timeout,
        train_timeout=train_timeout,
        reports=reports,
        sketch=sketch,
        buffers=buffers,
        progress=progress,
    )
    refuse_unsuitable(strategy, type(policy).__name__, use_weights=settings.use_weights)
    if state is not None:  # last: a call that is refused creates no directory
        settings.path = writable_directory(state)
    return PolicyStrategy(strategy, policy, settings)


class PolicyStrategy(Strategy):
    """A Flower strategy whose cohorts come from a fedpick policy; made by `with_policy`."""

    def __init__(self, inner: Strategy, policy: Policy[Any], settings: Settings) -> None:
        self.inner = inner
        self.policy = policy
        self.history: list[Selection] = []
        """The selections of this process's rounds, without arrays in their diagnostics."""
        self.session: Session | None = None
        self.roster = Roster()
        self._settings = settings
        self._selection: Selection | None = None  # of the round that is asked and not told yet
        self._messages: list[Message] = []
        self._evaluations: list[Message] = []
        self._model: Arrays = {}  # that was sent
        self._evaluate_config = ConfigRecord()
        self._trained = False  # whether a step was made since `start`
        self._warned: set[str] = set()
        self._progress = RoundProgress(settings.progress)
        if settings.path is not None:
            self._resume(settings.path)
        labels_for = type(policy).__name__ if Signal.LABEL_HISTOGRAM in policy.needs else None
        self._membership = Membership(self.roster, settings, labels_for=labels_for)

    def _resume(self, path: Path) -> None:
        """Load the saved session and roster. A roster without a session is loaded only to refuse a foreign file."""
        saved = (path / SESSION_FILE).exists()
        session = Session.load(path, policy=self.policy, provides=PROVIDES) if saved else None
        roster = Roster.load(path) if saved or (path / ROSTER_FILE).exists() else None
        if session is None or roster is None:
            return
        if session.seed != self._settings.seed:
            raise InvalidInput(
                f"The state in {path} was saved with seed={session.seed}. Got seed={self._settings.seed}: "
                "pass the same seed to resume, or another directory to start anew."
            )
        if len(roster.keys) < len(session.clients):
            raise StateFileError(
                f"The files in {path} do not belong together: {ROSTER_FILE} has {len(roster.keys)} clients, the "
                f"session {len(session.clients)}. Restore the right ones, or choose another directory to start anew."
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
        **others: Any,
    ) -> Result:
        """Run the federation; raise if no round trained. A `start` that the wrapped strategy overrides is used.

        `timeout` defaults to the train_timeout of `with_policy`; `others` are for an overridden `start`.
        """
        if timeout is not None:
            self._settings.train_timeout = validation.number("start", "timeout", "[0, inf]", value=timeout)
        others |= {"train_config": train_config, "evaluate_config": evaluate_config, "evaluate_fn": evaluate_fn}
        given = {name: value for name, value in others.items() if value is not None}
        self._evaluate_config = evaluate_config or ConfigRecord()
        self._trained, timeout = False, self._settings.train_timeout
        overridden = type(self.inner).start is not Strategy.start
        run = driven_by(self, self.inner).start if overridden else super().start
        result = run(grid, initial_arrays, num_rounds=num_rounds, timeout=timeout, **given)
        if num_rounds > 0 and not self._trained:
            raise TrainingFailed(
                f"None of {num_rounds} rounds changed the model: no client completed one with a usable reply.\n\n"
                "hint: the warnings above say why each reply failed; the logs of the SuperNodes hold client errors"
            )
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose the cohort and let the wrapped strategy write its messages."""
        if self._selection is not None:  # the last round was aborted: its updates never entered the model
            self._tell(self._selection, np.zeros(len(self._selection.clients), dtype=bool))
        self._messages = []
        grid = self._progress.start(grid)
        available = self._membership.refresh(grid)
        self._model = decoded(arrays)
        clients = self.roster.clients()
        if self.session is None:
            self.session = Session(self.policy, clients, self._settings.seed, provides=PROVIDES)
        elif not _same_table(self.session.clients, clients):
            self.session.grow(clients)
        prober = Prober(
            inner=self.inner,
            membership=self._membership,
            settings=self._settings,
            arrays=arrays,
            model=self._model,
            server_round=server_round,
            config=config,
            evaluate_config=self._evaluate_config,
            grid=grid,
        )
        budget = self._settings.cohort_limit(int(np.count_nonzero(available)))
        selection = self.session.ask(available=available, budget=budget, measure=prober.measure)
        self._selection = selection
        nodes = [self.roster.node_of[int(index)] for index in selection.clients]
        self._messages = messages_to(nodes, "train", self.inner, server_round, arrays, config, grid)
        small = {name: value for name, value in selection.diagnostics.items() if not isinstance(value, np.ndarray)}
        self.history.append(replace(selection, diagnostics=small))
        keys = self.roster.keys
        if not self._messages:
            LOG.warning("The policy chose none of %d ready clients.", np.count_nonzero(available))
        self._progress.chosen(
            self.session.round + 1,
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
        errors = self._errors(by_node)
        self._note_sizes(selection, answers)
        reports = self._reported(answers)  # before metrics that few replies have are dropped
        use_weights = self._settings.use_weights
        trained, wrong = usable_replies(
            answers,
            self._model,
            weight=weight_key(self.inner),
            numbers=needed_numbers(self.inner, use_weights=use_weights),
            refuse_zero=divides_by_norm(self.inner),
        )
        if Signal.UPDATE_NORM in self.policy.needs:
            squares = [np.nan if new is None else squared_norm(difference(new, self._model)) for new in trained]
            reports["update_norm"] = np.sqrt(np.array(squares, dtype=np.float64))
        if Signal.SKETCH in self.policy.needs:
            reports["sketch"] = self._sketches(trained)
        weights = self._put_weights(selection, answers, trained, wrong)
        for place, reason in wrong.items():
            LOG.warning(
                "The reply of %s counts as failed: %s.", self.roster.keys[int(selection.clients[place])], reason
            )
        completed = np.array([new is not None for new in trained], dtype=bool)
        if not completed.any() or (use_weights and not weights.sum() > 0):
            # No step. The strategy is not called: some of Flower's divide by the number of replies.
            if errors and not completed.any():
                LOG.warning("No client completed the round; the first error: %s.", reason_of(errors[0]))
            self._tell(selection, completed, **reports)
            return None, None
        good = [reply for reply, done in zip(answers, completed, strict=True) if reply is not None and done]
        new, metrics = self.inner.aggregate_train(server_round, [*good, *errors])
        if new is not None and not all_finite(decoded(new)):
            LOG.warning("The aggregated model of round %d is not finite: the round makes no step.", server_round)
            new = None
        if new is None:  # no update entered the model
            completed = np.zeros(len(completed), dtype=bool)
        self._trained = self._trained or new is not None
        self._tell(selection, completed, **reports)
        return new, metrics

    def _sketches(self, trained: Sequence[Arrays | None]) -> NDArray[np.float64]:
        how, model = self._settings.sketch, self._model
        if how == "head":
            model = head(model, self._settings.buffers)
        updates = (None if new is None else difference(new, model) for new in trained)
        return sketches(updates, how, self._settings.seed)

    def _errors(self, by_node: Mapping[int, Message]) -> list[Message]:
        """The error replies, in the name of the node that failed: the SuperLink writes its own id, 1."""
        errors = []
        for message in self._messages:
            reply = by_node.get(message.metadata.dst_node_id)
            if reply is not None and reply.has_error():
                errors.append(Message(reply.error, reply_to=message))
                if "secagg" in reason_of(reply):
                    others = (
                        'In a loop of your own, herd works without updates: source="labels", "features" or "none". '
                        if Signal.SKETCH in self.policy.needs
                        else ""
                    )
                    raise InvalidInput(
                        "The ClientApp uses secure aggregation (secaggplus_mod), which hides the clients' updates; "
                        "fedpick weighs and checks each update. Remove the mod, or train without a policy. "
                        f"{others}The client said: {reason_of(reply)}"
                    )
        return errors

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As in the wrapped strategy, but with a seeded sample and without waiting for more nodes."""
        self._evaluations = []
        fraction = min((getattr(inner, "fraction_evaluate", 1.0) for inner in layers(self.inner)), default=1.0)
        least = max((getattr(inner, "min_evaluate_nodes", 0) for inner in layers(self.inner)), default=0)
        busy, members = self._membership.busy_nodes(), self.roster.index_of_node
        online = [node for node in grid.get_node_ids() if node not in busy]
        if self._settings.eligible is not None:
            online = [node for node in online if node in members]
        order = sorted(online, key=lambda node: (members.get(node, len(self.roster.keys)), node))
        size = min(max(int(len(order) * fraction), least), len(order))
        if fraction == 0.0 or size == 0:
            return []
        # The session's round, not Flower's, which starts at 1 again after every restart.
        index = self.session.round if self.session is not None else 0
        rng = stream(self._settings.seed, index, Purpose.MEASURE)
        chosen = [order[place] for place in np.sort(sample_uniform(np.ones(len(order), dtype=bool), size, rng))]
        with taking_all(self.inner, len(chosen)):
            messages = self.inner.configure_evaluate(server_round, arrays, config, CohortGrid(grid, chosen))
            self._evaluations = list(messages)
        return self._evaluations

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As in the wrapped strategy, on the replies that it can aggregate."""
        replies = list(replies)
        self._membership.mark_busy(self._evaluations, replies_by_node(self._evaluations, replies))
        weight = weight_key(self.inner)
        usable = make_consistent(replies, weight=weight, numbers=() if weight is None else (weight,))
        left_out = sum(not good and not reply.has_error() for reply, good in zip(replies, usable, strict=True))
        if left_out:
            LOG.warning(
                "%d of %d evaluations are left out: a reply must hold one MetricRecord with every metric that most "
                "replies have, in the same form, and its weight under %r.",
                *(left_out, len(replies), weight),
            )
        kept = [reply for reply, good in zip(replies, usable, strict=True) if good or reply.has_error()]
        return self.inner.aggregate_evaluate(server_round, kept)

    def summary(self) -> None:
        """Log the policy, and the summary of the wrapped strategy."""
        name = registry.name_of(self.policy) or type(self.policy).__name__
        LOG.info("\t├──> Policy: %s, %r", name, self.policy)
        budget = "none" if self._settings.budget is None else self._settings.budget
        LOG.info("\t│\t└──> budget: %s, seed: %d, weights of: %s", budget, self._settings.seed, self._weighing())
        if self.session is not None:
            LOG.info("\t│\t└──> resumed after round %d with %d clients", self.session.round, len(self.session.clients))
        self.inner.summary()

    def _weighing(self) -> str:
        if callable(self._settings.weights):
            return getattr(self._settings.weights, "__name__", "a function")
        return "the policy" if self._settings.use_weights else type(self.inner).__name__

    def _tell(self, selection: Selection, completed: NDArray[np.bool_], **reports: NDArray[np.float64]) -> None:
        """Commit the round, save it and report it."""
        assert self.session is not None
        outcome = Outcome(index=self.session.round, clients=selection.clients, completed=completed, **reports)
        self.session.tell(outcome)
        self._selection = None
        self._warn_of_missing_reports(outcome)
        if self._settings.path is not None:
            claim(self._settings.path, self)  # before the roster is written: another process may save here
            self.roster.save(self._settings.path)
            self.session.save(self._settings.path)
        self._progress.finish(completed.tolist())

    def _warn_of_missing_reports(self, outcome: Outcome) -> None:
        """Warn once if a policy gets no report from which it learns: it still chooses, but not as its name promises."""
        for signal in (Signal.OUTCOME_LOSS, Signal.TRAIN_LOSS, Signal.LOSS_RMS):
            name = signal.value.removeprefix("outcome.")
            reported = getattr(outcome, name)[outcome.completed]
            if signal in self.policy.needs and len(reported) and np.isnan(reported).all() and name not in self._warned:
                self._warned.add(name)
                LOG.warning(
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

    def _reported(self, answers: Sequence[Message | None]) -> dict[str, NDArray[np.float64]]:
        return {
            name: np.array([number(metrics_of(reply).get(key)) for reply in answers], dtype=np.float64)
            for name, key in self._settings.reports.items()
            if name != "eval_loss"
        }

    def _put_weights(
        self,
        selection: Selection,
        answers: Sequence[Message | None],
        trained: list[dict[str, NDArray[Any]] | None],
        wrong: dict[int, str],
    ) -> NDArray[np.float64]:
        """Write the policy's weights into the replies, and scale the updates if the weights do not sum to 1.

        An update that overflows when it is scaled counts as failed, which may change the weights of the others.
        """
        clients = self.roster.clients()
        while True:
            completed = np.array([new is not None for new in trained], dtype=bool)
            weights = self._settings.aggregation_weights(selection, completed, clients)
            total = float(weights.sum())
            if not self._settings.use_weights or not total > 0 or abs(total - 1.0) <= 1e-12:
                scaled_arrays = {}
                break
            scaled_arrays = {
                place: scaled(new, self._model, total, self._settings.buffers)
                for place, new in enumerate(trained)
                if new is not None
            }
            overflowing = [place for place, arrays in scaled_arrays.items() if arrays is None]
            if not overflowing:
                break
            for place in overflowing:
                trained[place] = None
                wrong[place] = "its update, times the sum of the policy's weights, is not finite"
        key = weight_key(self.inner)
        for place, reply in enumerate(answers):
            if reply is None or trained[place] is None or key is None or not self._settings.use_weights:
                continue
            next(iter(reply.content.metric_records.values()))[key] = float(weights[place])
            if (arrays := scaled_arrays.get(place)) is not None:
                reply.content[next(iter(reply.content.array_records))] = arrays
        return weights


def _same_table(old: Clients, new: Clients) -> bool:
    if len(old) != len(new) or not np.array_equal(old.num_examples, new.num_examples):
        return False
    if old.label_histogram is None or new.label_histogram is None:
        return old.label_histogram is new.label_histogram
    return np.array_equal(old.label_histogram, new.label_histogram)
