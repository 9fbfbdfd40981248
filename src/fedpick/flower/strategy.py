"""with_policy: a Flower strategy whose cohorts and weights come from a fedpick policy.

`PolicyStrategy` wraps the user's strategy. In each round it

1. lists the online nodes and asks new ones to describe themselves (`membership`),
2. lets the policy probe clients (`probing`) and choose the cohort,
3. lets the wrapped strategy write its train messages on a grid that shows only the cohort (`inner`),
4. puts the policy's weights on the usable replies (`messages`) and lets the wrapped strategy aggregate them,
5. tells the policy the outcome, saves its state and reports the round.

What does not concern Flower's messages is in `fedpick.adapter`: the policy's session, the weights, saving, reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedpick.adapter.arrays import Arrays, all_finite, number
from fedpick.adapter.driver import Driven, Driver
from fedpick.adapter.report import Step
from fedpick.adapter.settings import Options, Settings
from fedpick.core import validation
from fedpick.core.policy import Policy
from fedpick.flower.inner import (
    divides_by_norm,
    driven_by,
    layers,
    messages_to,
    needed_numbers,
    refuse_secure_aggregation,
    settings_of,
    taking_all,
    weight_key,
)
from fedpick.flower.membership import Membership
from fedpick.flower.messages import (
    LOG,
    CohortGrid,
    Form,
    GridView,
    decoded,
    exchange,
    make_consistent,
    metrics_of,
    reason_of,
    replies_by_node,
    usable_replies,
)
from fedpick.flower.probing import Prober

__all__ = ["PolicyStrategy", "with_policy"]


def with_policy(
    strategy: Strategy,
    policy: Policy[Any],
    *,
    state: str | Path | None = None,
    probe: str = "query",
    **options: Unpack[Options],
) -> PolicyStrategy:
    """Let a policy choose the cohorts, and their weights, of a Flower strategy.

    Args:
        strategy: a Flower strategy. Its fractions and minimum numbers of nodes are overruled.
        policy: a policy object, such as `fedpick.policies.get("pow-d")`.
        state: a directory in which the policy's state is saved after each round and from which it is resumed; created
            if missing. None saves nothing.
        probe: who answers when a policy asks clients for the loss of a model: "query", the function that
            `answer_probes` registered; or "evaluate", the ClientApp's evaluate function.
        options: the arguments below, by name.
        budget: the largest cohort, or, between 0 and 1, its fraction of the ready clients; None for no limit.
        seed: seed of all random choices.
        guard: what is done about reports that may be false: "off", "mild", "strict" or a `fedpick.Guard`, whose
            `most_places` bounds the places of every client and of every group.
        key: (NodeInfo, what the client reported) -> an identity that survives restarts. None: the authenticated name,
            else the reported partition id, else the node id. If the function returns nothing, or the same for several
            nodes at once, the node id is used.
        eligible: (NodeInfo, what the client reported) -> whether the client may take part, asked once for every node;
            or the identities of the clients that may, and the tags ("tag:gpu") of which they need one. None: all may.
        exclude: the identities and tags of clients that may not take part, such as "name:clinic-b".
        groups: which clients belong together: a table from identities and tags to names of groups, such as
            `{"name:clinic-a": "north", "tag:eu": "south"}`; or (NodeInfo, what the client reported) -> the name of the
            group. Clients without one are one group together. None: there are no groups.
        audit: a file to which every decision is appended, see `fedpick audit`; None writes none.
        cooldown: rounds that a client rests after a round for which it was selected.
        max_share: the largest share of all rounds for which a client is selected, rounded up to whole rounds.
        weights: "policy", "ignored" for strategies that cannot use weights (median, Krum, ...), or a function with the
            arguments of `fedpick.aggregation_weights` that returns one weight for every selected client.
        min_clients: start a round once this many clients have described themselves ...
        wait: ... or after this many seconds, with those that have.
        ready_timeout: seconds without any ready client after which the run ends with an error.
        overcommit: select this many times the budget, and end the round after as many answers as the budget says.
        quorum: end the round after this share of the cohort (with overcommit: of the budget) has answered. The other
            clients count as failed, and as busy until they answer.
        probe_timeout: seconds that clients have to answer a query.
        train_timeout: seconds that clients have to train. A late client counts as failed, and as busy until it answers.
        clip_norms: scale down updates that are longer than this many times the median length in the cohort; None: none.
        reports: Outcome field -> metric of the train replies; "eval_loss" -> metric of the evaluate replies. Fields
            that are not named keep their usual metrics.
        sketch: how the server describes an update for policies that learn from it: "head" (the update of the last
            layer's bias), "count-sketch" (512 numbers of the whole update), or a function (arrays of the update) ->
            vector.
        buffers: (name of an array) -> whether it holds statistics instead of parameters. Statistics are averaged with
            weights that sum to 1. Arrays of integers, and those that PyTorch's batch normalisation names
            running_mean, running_var and num_batches_tracked, are always statistics.
        progress: called when a cohort is chosen and when its round ends, with the clients that completed and failed,
            and the duration of each exchange. An exception it raises is logged and does not end the run.
        record: gets every round with its weights, reports, failures and times, such as a `Recorder` that writes them
            to fedpick's store. What `evaluate_fn` returns as "loss" and "accuracy" is recorded too.
    """
    return PolicyStrategy(strategy, policy, settings_of(strategy, policy, state, options, probe=probe, base=Strategy))


class PolicyStrategy(Driven, Strategy):
    """A Flower strategy whose cohorts come from a fedpick policy; made by `with_policy`."""

    def __init__(self, inner: Strategy, policy: Policy[Any], settings: Settings) -> None:
        self.inner = inner
        self.policy = policy
        self._settings = settings
        self._driver = Driver(policy, settings)
        self._membership = Membership(self._driver.roster, settings, labels_for=self._driver.labels_for)
        self._messages: list[Message] = []  # to the cohort
        self._evaluations: list[Message] = []
        self._model: Arrays = {}  # that was sent
        self._evaluate_config = ConfigRecord()
        self._usual: dict[str, set[Form]] = {  # metrics that replies hold
            "train": {(key, None) for name, key in settings.reports.items() if name != "eval_loss"},
            "evaluate": {(key, None) for name, key in settings.reports.items() if name == "eval_loss"},
        }

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
        if evaluate_fn is not None:
            given["evaluate_fn"] = self._recorded(evaluate_fn)
        self._evaluate_config = evaluate_config or ConfigRecord()
        timeout = self._settings.train_timeout
        overridden = type(self.inner).start is not Strategy.start
        run = driven_by(self, self.inner).start if overridden else super().start
        with self._rounds(num_rounds):
            return run(_WatchedGrid(grid, self), initial_arrays, num_rounds=num_rounds, timeout=timeout, **given)

    def _recorded(
        self, evaluate: Callable[[int, ArrayRecord], MetricRecord | None]
    ) -> Callable[[int, ArrayRecord], MetricRecord | None]:
        """The user's evaluation on the server, of which the record of the round keeps loss and accuracy."""

        def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            metrics = evaluate(server_round, arrays)
            found: Mapping[str, Any] = metrics or {}
            if server_round > 0:
                self._driver.evaluated(loss=number(found.get("loss")), accuracy=number(found.get("accuracy")))
            return metrics

        return evaluate_fn

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose the cohort and let the wrapped strategy write its messages."""
        driver = self._driver
        driver.begin()
        self._messages = []
        grid = _WatchedGrid(grid, self, driver.progress.steps)
        ready = self._membership.refresh(grid)
        self._model = decoded(arrays)
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
        selection = driver.choose(ready, self._model, prober)
        nodes = self.roster.nodes(selection.clients)
        self._messages = messages_to(nodes, "train", self.inner, server_round, arrays, config, grid)
        return self._messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Put the policy's weights on the replies, let the wrapped strategy aggregate, then tell the policy.

        In this order, so that a saved state never holds a step that was not made: if aggregation raises, the saved
        state and the user's model are both those before the round, and the round is asked again after a restart.
        """
        driver, selection = self._driver, self._driver.selection
        if selection is None:
            return None, None
        replies = list(replies)
        driver.progress.answered(len(self._messages), len(replies), self._settings.train_timeout)
        by_node = replies_by_node(self._messages, replies)
        self._membership.mark_busy(self._messages, by_node)
        nodes = self.roster.nodes(selection.clients)
        errors = self._errors(by_node)
        in_time = [node for node in by_node if not by_node[node].has_error()][: driver.most]
        late = np.array([node not in in_time and not _failed(by_node.get(node)) for node in nodes], dtype=bool)
        answers = [None if missed else by_node.get(node) for node, missed in zip(nodes, late, strict=True)]
        metrics = [dict(metrics_of(reply)) for reply in answers]  # as sent: the strategy gets the same ones of all
        weight = weight_key(self.inner)
        self.roster.note_sizes(selection.clients, [found.get(weight or "") for found in metrics])
        use_weights = self._settings.use_weights
        trained, wrong = usable_replies(
            answers,
            self._model,
            weight=weight,
            numbers=needed_numbers(self.inner, use_weights=use_weights),
            usual=self._usual["train"],
            refuse_zero=divides_by_norm(self.inner),
        )
        reports: dict[str, Any] = driver.reports(metrics, self._model, trained)
        weights, changed = driver.weigh(selection, self._model, trained, wrong)
        driver.warn_of(selection, wrong)
        completed = np.array([new is not None for new in trained], dtype=bool)
        told = {"weights": weights, "late": late, "answered": len(replies) - len(errors), **reports}
        if not completed.any() or (use_weights and not weights.sum() > 0):
            # No step. The strategy is not called: some of Flower's divide by the number of replies.
            if errors and not completed.any():
                LOG.warning("No client completed the round; the first error: %s.", reason_of(errors[0]))
            driver.tell(selection, completed, **told)
            return None, None
        good = []
        numbers = weights if use_weights else driver.clients.num_examples[selection.clients]
        for place, reply in enumerate(answers):
            if reply is not None and completed[place]:
                self._put_weight(reply, float(numbers[place]), changed.get(place))
                good.append(reply)
        new, aggregated = self.inner.aggregate_train(server_round, [*good, *errors])
        if new is not None and not all_finite(decoded(new)):
            LOG.warning("The aggregated model of round %d is not finite: the round makes no step.", server_round)
            new = None
        if new is None:  # no update entered the model
            completed = np.zeros(len(completed), dtype=bool)
        self._trained = self._trained or new is not None
        driver.tell(selection, completed, **told)
        return new, aggregated

    def _put_weight(self, reply: Message, weight: float, changed: Arrays | None) -> None:
        """Write the weight, and the clipped or scaled model if there is one, into a reply.

        If the policy's weights are ignored, the weight is the size that the guard allows.
        """
        key = weight_key(self.inner)
        if key is not None and (self._settings.use_weights or metrics_of(reply)[key] > weight):
            metrics_of(reply)[key] = weight
        if changed is not None:
            arrays = ArrayRecord({name: Array(array) for name, array in changed.items()})
            reply.content[next(iter(reply.content.array_records))] = arrays

    def _errors(self, by_node: Mapping[int, Message]) -> list[Message]:
        """The error replies, in the name of the node that failed: the SuperLink writes its own id, 1."""
        errors = []
        for message in self._messages:
            reply = by_node.get(message.metadata.dst_node_id)
            if reply is not None and reply.has_error():
                errors.append(Message(reply.error, reply_to=message))
        refuse_secure_aggregation(map(reason_of, errors), self.policy)
        return errors

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As in the wrapped strategy, but with a seeded sample and without waiting for more nodes."""
        self._evaluations = []
        fraction = min((getattr(inner, "fraction_evaluate", 1.0) for inner in layers(self.inner)), default=1.0)
        least = max((getattr(inner, "min_evaluate_nodes", 0) for inner in layers(self.inner)), default=0)
        busy = self._membership.busy_nodes()
        online = (node for node in grid.get_node_ids() if node not in busy)
        chosen = self._driver.evaluators(online, fraction=fraction, least=least)
        if not chosen:
            return []
        with taking_all(self.inner, len(chosen)):
            messages = self.inner.configure_evaluate(server_round, arrays, config, CohortGrid(grid, chosen))
            self._evaluations = list(messages)
        return self._evaluations

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As in the wrapped strategy, on the replies that it can aggregate."""
        replies = list(replies)
        self._membership.mark_busy(self._evaluations, replies_by_node(self._evaluations, replies))
        weight = weight_key(self.inner)
        numbers = () if weight is None else (weight,)
        usable = make_consistent(replies, weight=weight, numbers=numbers, usual=self._usual["evaluate"])
        left_out = sum(not good and not reply.has_error() for reply, good in zip(replies, usable, strict=True))
        if left_out:
            LOG.warning(
                "%d of %d evaluations are left out: a reply must hold one MetricRecord, with its weight under %r.",
                *(left_out, len(replies), weight),
            )
        kept = [reply for reply, good in zip(replies, usable, strict=True) if good or reply.has_error()]
        return self.inner.aggregate_evaluate(server_round, kept)

    def summary(self) -> None:
        """Log the policy, and the summary of the wrapped strategy."""
        self._driver.announce("\t├──> ", "\t│\t└──> ")
        self.inner.summary()


def _failed(reply: Message | None) -> bool:
    return reply is not None and reply.has_error()


class _WatchedGrid(GridView):
    """The whole grid; sees when each reply comes, and ends an exchange with a cohort when enough of it has answered."""

    def __init__(self, grid: Grid, strategy: PolicyStrategy, steps: list[Step] | None = None) -> None:
        super().__init__(grid)
        self._strategy, self._steps = strategy, steps

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for their replies."""
        sent, driver = list(messages), self._strategy._driver
        enough = driver.enough if sent == self._strategy._messages else len(sent)
        deadline = float("inf") if timeout is None else timeout
        replies, arrived, waited = exchange(self._grid, sent, enough, deadline)
        failed = {node for node, reply in replies_by_node(sent, replies).items() if reply.has_error()}
        driver.note_pace([message.metadata.dst_node_id for message in sent], arrived, waited, deadline, failed)
        if self._steps is not None:
            kind = sent[0].metadata.message_type if sent else ""
            self._steps.append(
                Step(kind=kind, asked=len(sent), answered=len(replies), seconds=waited, deadline=deadline)
            )
        return replies
