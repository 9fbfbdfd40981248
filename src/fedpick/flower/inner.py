"""The wrapped strategy: refuse those that a policy cannot serve, and restrict the others to the cohort."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import isclass
from pathlib import Path
from types import new_class
from typing import Any, Literal

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.server import strategy as older_strategies
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower_strategies
from flwr.serverapp.strategy import Strategy

from fedpick.adapter.driver import Driven
from fedpick.adapter.settings import Options, Settings, refuse_unusable_policy, writable_directory
from fedpick.core.errors import InvalidInput
from fedpick.core.policy import Policy, Signal
from fedpick.flower.messages import LOG, CohortGrid

__all__ = [
    "divides_by_norm",
    "driven_by",
    "layers",
    "messages_to",
    "needed_numbers",
    "refuse_secure_aggregation",
    "settings_of",
    "taking_all",
    "weight_key",
]

# These compute the new model without the replies' weights, or calibrate noise for equal weights.
_IGNORE_WEIGHTS = {
    *("FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum", "Bulyan", "QFedAvg"),
    *(name for name in (*dir(flower_strategies), *dir(older_strategies)) if name.startswith(("Differential", "DPFed"))),
}
_SAMPLE_THEMSELVES = {"FedXgbCyclic"}
# Their model is a list of trees that grows in every round: there is no update, new - old.
_NO_UPDATES = {"FedXgbBagging", "FedXgbNnAvg"}
_APIS: dict[type, tuple[str, str]] = {
    Strategy: ("flwr.serverapp.strategy", "fedpick.flower.with_policy"),
    older_strategies.Strategy: ("flwr.server.strategy", "fedpick.flower.legacy.with_policy"),
}
"""Base class of each of Flower's two APIs -> (its module, the function of fedpick that takes its strategies)."""


def layers(strategy: Any) -> Iterator[Any]:
    """The strategy and the strategies that it wraps."""
    current: Any = strategy
    while isinstance(current, tuple(_APIS)):
        yield current
        current = getattr(current, "strategy", None)


def settings_of(
    strategy: Any, policy: Policy[Any], state: str | Path | None, options: Options, *, probe: str, base: type
) -> Settings:
    """The settings of a call of `with_policy`; refuse what cannot work. `base` is the class of the API's strategies."""
    if isinstance(strategy, Driven):
        raise InvalidInput("This strategy already has a policy. Wrap the strategy that was first given to with_policy.")
    refuse_unusable_policy(policy)
    settings = Settings.of(options, probe=probe, log=LOG)
    _refuse_unsuitable(strategy, type(policy).__name__, use_weights=settings.use_weights, base=base)
    if state is not None:  # last: a call that is refused creates no directory
        settings.path = writable_directory(state)
    return settings


def _refuse_unsuitable(strategy: Any, policy_name: str, *, use_weights: bool, base: type) -> None:
    """Refuse strategies for which a policy cannot choose, or whose aggregation would lose its weights."""
    if isclass(strategy) and issubclass(strategy, base):
        raise InvalidInput(f"{strategy.__name__} is a class: pass a strategy object, {strategy.__name__}(...).")
    module, _ = _APIS[base]
    for other, (others_module, function) in _APIS.items():
        if other is not base and isinstance(strategy, other):
            raise InvalidInput(
                f"{type(strategy).__name__} is a strategy of {others_module}, but this function takes those of "
                f"{module}. Use {function} instead."
            )
    if not isinstance(strategy, base):
        raise InvalidInput(f"strategy must be a Flower strategy object, such as {module}.FedAvg(). Got {strategy!r}.")
    for inner in layers(strategy):
        name = type(inner).__name__
        kinds = _kinds(inner)
        if kinds & _SAMPLE_THEMSELVES:
            raise InvalidInput(
                f"{name} chooses its clients itself, one after the other; a policy cannot choose for it."
            )
        if kinds & _NO_UPDATES:
            raise InvalidInput(
                f"{name} has no model of a fixed shape, so there are no updates that fedpick could read. "
                "Use it without a policy."
            )
        if getattr(inner, "accountant", None) is not None:
            raise InvalidInput(
                f"{name} accounts for privacy under uniform sampling with equal weights, which a policy would break. "
                "Use it without an accountant, or without a policy."
            )
        if kinds & _IGNORE_WEIGHTS and use_weights:
            raise InvalidInput(
                f"{name} does not aggregate by weights, so the weights of {policy_name} would be lost.\n\n"
                'hint: pass weights="ignored"; then the policy chooses the cohort and the strategy weighs the replies'
            )
    if use_weights and base is Strategy and weight_key(strategy) is None:
        raise InvalidInput(
            f"{type(strategy).__name__} has no 'weighted_by_key', so fedpick cannot give it the policy's weights.\n\n"
            'hint: pass weights="ignored"; then the policy chooses the cohort and the strategy weighs the replies'
        )


def refuse_secure_aggregation(reasons: Iterable[str], policy: Policy[Any]) -> None:
    """Raise if a client failed because its app uses secure aggregation; `reasons` are the clients' errors."""
    for reason in reasons:
        if "secagg" in reason:
            others = (
                'In a loop of your own, herd works without updates: source="labels", "features" or "none". '
                if Signal.SKETCH in policy.needs
                else ""
            )
            raise InvalidInput(
                "The ClientApp uses secure aggregation (secaggplus_mod), which hides the clients' updates; "
                "fedpick weighs and checks each update. Remove the mod, or train without a policy. "
                f"{others}The client said: {reason}"
            )


def weight_key(strategy: Any) -> str | None:
    """The metric in which the strategy finds a reply's weight; None for a strategy without weights."""
    return next((inner.weighted_by_key for inner in layers(strategy) if hasattr(inner, "weighted_by_key")), None)


def needed_numbers(strategy: Strategy, *, use_weights: bool) -> frozenset[str]:
    """The metrics of a train reply without which the strategy raises, or breaks the model.

    The weight is not among them if the policy provides it: the adapter writes it into the reply.
    """
    keys = set() if use_weights else {weight_key(strategy)}
    for inner in layers(strategy):
        keys.add(getattr(inner, "train_loss_key", None))  # QFedAvg
        if "DifferentialPrivacyClientSideAdaptiveClipping" in _kinds(inner):
            keys.add("norm_bit")
    return frozenset(key for key in keys if key is not None)


def divides_by_norm(strategy: Strategy) -> bool:
    """Whether the strategy clips updates on the server: it then divides by zero if an update is zero."""
    return any(kind.startswith("DifferentialPrivacyServerSide") for inner in layers(strategy) for kind in _kinds(inner))


def _kinds(strategy: Any) -> set[str]:
    """The names of the strategy's classes: a class derived from one of Flower's behaves like it."""
    return {base.__name__ for base in type(strategy).__mro__}


def messages_to(
    nodes: Sequence[int],
    kind: Literal["train", "evaluate"],
    strategy: Strategy,
    server_round: int,
    arrays: ArrayRecord,
    config: ConfigRecord,
    grid: Grid,
) -> list[Message]:
    """The strategy's train or evaluate messages to exactly these nodes, in their order; it may write into `config`."""
    if not nodes:
        return []
    configure = strategy.configure_train if kind == "train" else strategy.configure_evaluate
    with taking_all(strategy, len(nodes)):
        messages = list(configure(server_round, arrays, config, CohortGrid(grid, nodes)))
    if sorted(message.metadata.dst_node_id for message in messages) != sorted(nodes):
        raise InvalidInput(
            f"{type(strategy).__name__} sent {kind} messages to {len(messages)} nodes, not to the {len(nodes)} that "
            f"the policy chose, so it samples by itself in configure_{kind}; a policy cannot choose for it."
        )
    place = {node: index for index, node in enumerate(nodes)}  # Flower's strategies shuffle them, without a seed
    return sorted(messages, key=lambda message: place[message.metadata.dst_node_id])


def driven_by(driver: Strategy, strategy: Strategy) -> Strategy:
    """The strategy, with the rounds of `driver`: its own `start` then runs, but configures and aggregates as `driver`.

    It shares the strategy's attributes, so that what `start` stores is found on the user's object.
    """
    methods = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate", "summary")
    namespace = {name: staticmethod(getattr(driver, name)) for name in methods}
    kind = new_class(type(strategy).__name__, (type(strategy),), exec_body=lambda body: body.update(namespace))
    view: Strategy = object.__new__(kind)
    view.__dict__ = strategy.__dict__
    return view


@contextmanager
def taking_all(strategy: Any, count: int) -> Iterator[None]:
    """For one call, make a strategy sample all `count` nodes it sees, and wait for no more."""
    wanted = dict.fromkeys(("fraction_train", "fraction_fit", "fraction_evaluate"), 1.0)
    wanted |= dict.fromkeys(("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"), count)
    wanted |= dict.fromkeys(("min_fit_clients", "min_evaluate_clients", "min_available_clients"), count)
    before = [
        (inner, name, getattr(inner, name)) for inner in layers(strategy) for name in wanted if hasattr(inner, name)
    ]
    for inner, name, _ in before:
        setattr(inner, name, wanted[name])
    try:
        yield
    finally:
        for inner, name, value in before:
            setattr(inner, name, value)
