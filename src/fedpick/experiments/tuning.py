"""Settings by search: the same grid, rounds and seeds for every policy, judged on validation data.

The grid is of learning rates and of any other keys: `local.KEY`, `server.KEY`, or a hyper-parameter, which is tried
with the policies that have it. Every candidate is a policy of an ordinary experiment, so the search is stored and
resumed like any other. A candidate is scored by accuracy or loss on the clients' validation data (the hold-out of the
partition, never the test set), weighted by importance. The score is the mean of the last few evaluations, of which a
run has at least 20. A candidate whose loss is not finite in some seed has no score. The best mean over the seeds wins;
of equals, the first. With losses_on = "validation" in the spec, policies that select by losses see those of the same
data.

If the spec has no validation data, the search holds out a share of every client's examples; the tuned spec keeps the
original partition.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from fedpick.core import registry
from fedpick.core.errors import InvalidInput
from fedpick.experiments.spec import PolicySpec, Spec
from fedpick.experiments.store import Experiment, Run, Store
from fedpick.experiments.toml import toml_text

__all__ = ["SCORES", "Candidate", "Choice", "candidates", "choose", "grid_spec", "tuned_spec", "tuned_text"]

SCORES = ("accuracy", "loss")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One point of the grid; a rate of None keeps that of the spec."""

    local_lr: float | None = None
    server_lr: float | None = None
    others: tuple[tuple[str, Any], ...] = ()
    """(key, value) of every other setting: `local.KEY`, `server.KEY` or a hyper-parameter."""

    def applied_to(self, spec: Spec, policy: PolicySpec) -> PolicySpec:
        """The policy with these settings. Of a schedule only the initial rate changes."""
        local, server, parameters = dict(policy.local), dict(policy.server), dict(policy.parameters)
        for key, value in self.others:
            section, dot, name = key.partition(".")
            if dot:
                (local if section == "local" else server)[name] = value
            else:
                parameters[key] = value
        if self.local_lr is not None:
            local["lr"] = _with_initial({**spec.local, **policy.local}.get("lr"), self.local_lr)
        if self.server_lr is not None:
            server["lr"] = _with_initial({**spec.server, **policy.server}.get("lr"), self.server_lr)
        return replace(policy, local=local, server=server, parameters=parameters)

    @property
    def settings(self) -> dict[str, Any]:
        """What it sets, by name."""
        rates = {"local": self.local_lr, "server": self.server_lr}
        return {**{name: rate for name, rate in rates.items() if rate is not None}, **dict(self.others)}

    def __str__(self) -> str:
        shown = {key: f"{value:g}" if isinstance(value, float) else value for key, value in self.settings.items()}
        return " ".join(f"{key}={value}" for key, value in shown.items()) or "as in the spec"


def _with_initial(rate: Any, initial: float) -> Any:
    return {**rate, "initial": initial} if isinstance(rate, Mapping) else initial


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the search found for one policy."""

    label: str
    best: Candidate
    scores: tuple[tuple[Candidate, float | None], ...]
    """Mean over the seeds for every candidate, in the order of the grid; None: not finite in some seed."""

    @property
    def at_edge(self) -> bool:
        """Whether the best number is the smallest or largest one tried: a wider grid may hold a better one."""
        for key, own in self.best.settings.items():
            tried = [candidate.settings[key] for candidate, _ in self.scores]
            numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in tried)
            if numbers and min(tried) < max(tried) and own in (min(tried), max(tried)):
                return True
        return False


def candidates(
    local_lr: Sequence[float], server_lr: Sequence[float], others: Mapping[str, Sequence[Any]] | None = None
) -> list[Candidate]:
    """The grid; the local rate changes slowest. An empty list keeps the rates of the spec.

    `others` are values by key: `local.KEY`, `server.KEY` or a hyper-parameter.
    """
    for name, rates in (("--local-lr", local_lr), ("--server-lr", server_lr)):
        if not all(math.isfinite(rate) and rate > 0 for rate in rates):
            raise InvalidInput(f"{name} must be numbers above 0. Got {', '.join(f'{rate:g}' for rate in rates)}.")
        if len(set(rates)) < len(rates):
            raise InvalidInput(f"{name} names a rate twice: {', '.join(f'{rate:g}' for rate in rates)}.")
    for key, values in (others or {}).items():
        section, dot, _ = key.partition(".")
        if dot and section not in ("local", "server"):
            raise InvalidInput(f"--try names local.KEY, server.KEY or a hyper-parameter. Got {key!r}.")
        if not values or len({repr(value) for value in values}) < len(values):
            raise InvalidInput(f"--try {key} needs one or more values, each once. Got {list(values)}.")
    for key, option, rates in (("local.lr", "--local-lr", local_lr), ("server.lr", "--server-lr", server_lr)):
        if rates and key in (others or {}):
            raise InvalidInput(f"--try {key} and {option} set the same rate. Give one of them.")
    if not local_lr and not server_lr and not others:
        raise InvalidInput("There is nothing to search: give --local-lr, --server-lr or --try.")
    unchanged: list[float | None] = [None]
    lists = [[(key, value) for value in values] for key, values in (others or {}).items()]
    return [
        Candidate(local_lr=local, server_lr=server, others=tuple(rest))
        for local, server, *rest in itertools.product(local_lr or unchanged, server_lr or unchanged, *lists)
    ]


def _own_grid(policy: PolicySpec, grid: Sequence[Candidate]) -> list[Candidate]:
    """The grid without the hyper-parameters that the policy does not have; what is then equal, once."""
    policy_class: Any = registry.load(policy.name)
    known = {item.name for item in fields(policy_class) if item.init}
    own = [
        replace(each, others=tuple((key, value) for key, value in each.others if "." in key or key in known))
        for each in grid
    ]
    return [each for place, each in enumerate(own) if each not in own[:place]]  # values may be lists: no hashes


def _require_owners(spec: Spec, grid: Sequence[Candidate]) -> None:
    """Raise if a hyper-parameter belongs to no policy of the spec."""
    owned = {key for policy in spec.policies for each in _own_grid(policy, grid) for key, _ in each.others}
    for key, _ in grid[0].others:
        if key not in owned:
            labels = ", ".join(policy.label for policy in spec.policies)
            raise InvalidInput(f"--try: no policy of this spec has a hyper-parameter {key!r}. It has: {labels}.")


def grid_spec(spec: Spec, grid: Sequence[Candidate], *, holdout: float = 0.2) -> Spec:
    """The experiment to run: every policy with every candidate, evaluated on validation data.

    `holdout` is their share of every client's examples if the spec has none.
    """
    if not 0 < holdout < 1:
        raise InvalidInput(f"--holdout must be a share between 0 and 1. Got {holdout}.")
    partition = spec.partition
    split = partition.options.get("split")
    if not partition.options.get("holdout") and not (split and split[1] > 0):
        if split:
            raise InvalidInput(f"[partition]: the split {split} has no share for validation: the search needs one.")
        partition = replace(partition, options={**partition.options, "holdout": holdout})
    _require_owners(spec, grid)
    policies = [
        replace(candidate.applied_to(spec, policy), label=f"{policy.label} {candidate}")
        for policy in spec.policies
        for candidate in _own_grid(policy, grid)
    ]
    return replace(
        spec,
        title=f"{spec.title}: search for {'settings' if grid[0].others else 'learning rates'}",
        partition=partition,
        policies=tuple(policies),
        # A divisor of the rounds, so that the last round is evaluated.
        validation_every=math.gcd(spec.rounds, max(1, spec.rounds // 20)),
        evaluate_every=spec.rounds,
        losses_every=None,
        local_accuracy_every=None,
        targets=(),
        loss_targets=(),
    )


def choose(
    store: Store,
    experiment: Experiment,
    spec: Spec,
    grid: Sequence[Candidate],
    *,
    score: str = "accuracy",
    evaluations: int = 5,
) -> list[Choice]:
    """The best candidate for every policy of `spec`, from a finished search."""
    if score not in SCORES:
        raise InvalidInput(f"The score is {' or '.join(SCORES)}. Got {score!r}.")
    if evaluations < 1:
        raise InvalidInput(f"The number of evaluations to judge by must be at least 1. Got {evaluations}.")
    runs: dict[int, list[Run]] = {}
    for run in store.runs(experiment.id):
        runs.setdefault(run.position, []).append(run)
    choices = []
    first = 0
    for policy in spec.policies:
        own = _own_grid(policy, grid)
        scores = [
            _score(store, runs[first + place], experiment.rounds, score, evaluations) for place in range(len(own))
        ]
        first += len(own)
        known = [(value, place) for place, value in enumerate(scores) if value is not None]
        if not known:
            raise InvalidInput(f"No learning rate of the grid kept {policy.label} finite: search among smaller ones.")
        sign = -1 if score == "accuracy" else 1
        best = min(known, key=lambda pair: (sign * pair[0], pair[1]))[1]
        choices.append(Choice(label=policy.label, best=own[best], scores=tuple(zip(own, scores, strict=True))))
    return choices


def _score(store: Store, runs: Sequence[Run], rounds: int, score: str, evaluations: int) -> float | None:
    """Mean over the seeds and the last evaluations; None if a loss is not finite or a run is unfinished."""
    values = []
    for run in runs:
        measured = np.array([pair for _, pair in store.arrays(run.id, "evaluation/validation", rounds)])
        # Accuracy stays finite even if the model does not, so check the loss.
        if run.rounds_done < rounds or not len(measured) or not np.isfinite(measured[-evaluations:]).all():
            return None
        values.append(measured[-evaluations:, SCORES[::-1].index(score)].mean())
    return float(np.mean(values))


def tuned_spec(spec: Spec, choices: Sequence[Choice]) -> Spec:
    """The spec with the chosen settings in each policy."""
    by_label = {choice.label: choice.best for choice in choices}
    return replace(spec, policies=tuple(by_label[policy.label].applied_to(spec, policy) for policy in spec.policies))


def tuned_text(spec: Spec, choices: Sequence[Choice], *, command: str, searched: Spec, score: str) -> str:
    """A spec file with the chosen settings and, as comments, how they were found."""
    options = searched.partition.options
    share = f"holdout {options['holdout']:g}" if options.get("holdout") else f"split {options.get('split')}"
    lines = [
        "Settings found by:" if searched.title.endswith("settings") else "Learning rates found by:",
        f"  {command}",
        f"Judged by {score} on validation data ({share} of every client), {searched.rounds} rounds,",
        f"seeds {', '.join(map(str, searched.seeds))}; the same grid for every policy.",
    ]
    for choice in choices:
        lines.append(f"{choice.label}: {choice.best}{' (at the edge of the grid)' if choice.at_edge else ''}, of")
        for candidate, value in choice.scores:
            lines.append(f"  {candidate}: {'not finite' if value is None else f'{value:.4f}'}")
    return "\n".join(f"# {line}" for line in lines) + "\n" + toml_text(tuned_spec(spec, choices).to_dict())
