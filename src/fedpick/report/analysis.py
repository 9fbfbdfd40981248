"""From the store to numbers: pure functions, one value per run, then mean and spread over the seeds.

Rounds are counted from 1 here, as in the papers' tables: a run whose first round already reaches the target took one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import FloatArray
from fedpick.core.errors import InvalidInput, unknown_name
from fedpick.experiments.store_read import Experiment, Reader, Run

__all__ = [
    "Difference",
    "PolicyResults",
    "Quantity",
    "Results",
    "RunResults",
    "best_accuracy",
    "bytes_to_target",
    "final_accuracy",
    "load_results",
    "lowest_loss",
    "models_to_target",
    "over_seeds",
    "paired_difference",
    "policy_named",
    "rounds_to_loss",
    "rounds_to_target",
    "seconds_per_round",
    "selection_variance",
    "smoothed",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class RunResults:
    """One run: its facts, its columns of `rounds` and how often each client was chosen."""

    run: Run
    rounds: Mapping[str, NDArray[Any]]
    counts: NDArray[np.int64]
    """(N,)"""
    wanted: int
    """Rounds the experiment asks for."""

    @property
    def complete(self) -> bool:
        """It has all its rounds."""
        return len(self.rounds["round"]) >= self.wanted

    @property
    def evaluated(self) -> NDArray[np.intp]:
        """Positions of the rounds with a test accuracy."""
        return np.flatnonzero(~np.isnan(self.rounds["accuracy"]))


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyResults:
    """One line of a table: a policy with all its seeds."""

    label: str
    policy: str
    runs: tuple[RunResults, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Results:
    """An experiment with everything that tables need."""

    experiment: Experiment
    policies: tuple[PolicyResults, ...]

    @property
    def incomplete(self) -> list[str]:
        """The runs that lack rounds."""
        return [
            f"{policy.label}, seed {each.run.seed} ({len(each.rounds['round'])} of {each.wanted} rounds)"
            for policy in self.policies
            for each in policy.runs
            if not each.complete
        ]


def load_results(store: Reader, experiment: Experiment) -> Results:
    """Read an experiment; runs that have gone further for another one are cut to its own number of rounds."""
    grouped: dict[str, list[RunResults]] = {}
    for run in store.runs(experiment.id):
        results = RunResults(
            run=run,
            rounds=store.rounds(run.id, limit=experiment.rounds),
            counts=store.selection_counts(run.id, limit=experiment.rounds),
            wanted=experiment.rounds,
        )
        grouped.setdefault(run.label, []).append(results)
    policies = [
        PolicyResults(label=label, policy=runs[0].run.policy, runs=tuple(runs)) for label, runs in grouped.items()
    ]
    return Results(experiment=experiment, policies=tuple(policies))


@dataclass(frozen=True)
class Quantity:
    """A value per seed, summed up. `mean` is None where some seed has no value: the papers' N/A."""

    values: tuple[float | None, ...] = field(default=())

    @property
    def known(self) -> list[float]:
        """The seeds that have one."""
        return [value for value in self.values if value is not None]

    @property
    def mean(self) -> float | None:
        """Over all seeds; None where one of them has no value."""
        return float(np.mean(self.known)) if self.values and len(self.known) == len(self.values) else None

    @property
    def sd(self) -> float | None:
        """Sample standard deviation (n - 1); None for fewer than two seeds or where the mean is None."""
        return float(np.std(self.known, ddof=1)) if self.mean is not None and len(self.values) > 1 else None


@dataclass(frozen=True)
class Difference(Quantity):
    """One policy minus another, seed by seed. The seeds share data, model and availability, so the pairs say more than
    the two means do."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the mean (Student's t); None for fewer than two pairs or an unknown mean."""
        if self.mean is None or self.sd is None:
            return None
        from scipy import stats

        count = len(self.values)
        half = float(stats.t.ppf(0.975, count - 1)) * self.sd / count**0.5
        return self.mean - half, self.mean + half


def policy_named(results: Results, name: str) -> PolicyResults:
    """The policy with this label, or the only one with this registry name."""
    labelled = [policy for policy in results.policies if policy.label == name]
    found = labelled or [policy for policy in results.policies if policy.policy == name]
    if len(found) > 1:
        raise InvalidInput(f"{len(found)} lines are {name!r}: name one by its label, {_labels(found)}.")
    if not found:
        raise unknown_name("policy in this experiment", name, [policy.label for policy in results.policies])
    return found[0]


def _labels(policies: Iterable[PolicyResults]) -> str:
    return ", ".join(repr(policy.label) for policy in policies)


def paired_difference(
    policy: PolicyResults, baseline: PolicyResults, measure: Callable[[RunResults], float | None]
) -> Difference:
    """The policy minus the baseline for every seed that both have; None for a seed in which either has no value."""
    others = {run.run.seed: run for run in baseline.runs}
    values = []
    for run in policy.runs:
        if run.run.seed in others:
            own, other = measure(run), measure(others[run.run.seed])
            values.append(None if own is None or other is None else float(own - other))
    return Difference(tuple(values))


def over_seeds(policy: PolicyResults, measure: Callable[[RunResults], float | None]) -> Quantity:
    """One value per seed of a policy."""
    return Quantity(tuple(measure(run) for run in policy.runs))


def smoothed(values: FloatArray, window: int) -> FloatArray:
    """Mean of the latest `window` values; NaN until there are so many.

    >>> smoothed(np.array([1.0, 2.0, 3.0]), 2)
    array([nan, 1.5, 2.5])
    """
    if window <= 1 or len(values) == 0:
        return values
    result = np.full(len(values), np.nan)
    if len(values) >= window:
        result[window - 1 :] = np.lib.stride_tricks.sliding_window_view(values, window).mean(axis=1)
    return result


def _reached(results: RunResults, target: float, window: int) -> int | None:
    """Position of the first round whose (smoothed) accuracy is at least the target."""
    evaluated = results.evaluated
    accuracy = smoothed(results.rounds["accuracy"][evaluated], window)
    with np.errstate(invalid="ignore"):
        hits = np.flatnonzero(accuracy >= target)
    return int(evaluated[hits[0]]) if len(hits) else None


def rounds_to_target(results: RunResults, target: float, window: int = 1) -> int | None:
    """How many rounds it took; None: never. `window`: of the mean over so many evaluations."""
    position = _reached(results, target, window)
    return None if position is None else int(results.rounds["round"][position]) + 1


def rounds_to_loss(results: RunResults, target: float) -> int | None:
    """How many rounds until the global training loss (`objective`) was at or below the target; None: never."""
    with np.errstate(invalid="ignore"):
        hits = np.flatnonzero(results.rounds["objective"] <= target)
    return int(results.rounds["round"][hits[0]]) + 1 if len(hits) else None


def _spent(results: RunResults, target: float, columns: Iterable[str], window: int) -> float | None:
    position = _reached(results, target, window)
    return None if position is None else float(sum(results.rounds[column][position] for column in columns))


def models_to_target(results: RunResults, target: float, window: int = 1) -> float | None:
    """Models sent down and updates sent up until the target was reached; probes and trials included."""
    return _spent(results, target, ("models_down", "updates_up"), window)


def bytes_to_target(results: RunResults, target: float, window: int = 1) -> float | None:
    """Bytes sent, both ways, until the target was reached."""
    return _spent(results, target, ("bytes_down", "bytes_up"), window)


def final_accuracy(results: RunResults, window: int = 1) -> float | None:
    """Of the last evaluation, or the mean of the last `window` ones."""
    accuracy = results.rounds["accuracy"][results.evaluated]
    return float(accuracy[-window:].mean()) if len(accuracy) else None


def best_accuracy(results: RunResults) -> float | None:
    """The highest of all evaluations."""
    accuracy = results.rounds["accuracy"][results.evaluated]
    return float(accuracy.max()) if len(accuracy) else None


def lowest_loss(results: RunResults) -> float | None:
    """The lowest test loss over the rounds (the measure of FedGS)."""
    loss = results.rounds["loss"]
    return float(np.nanmin(loss)) if np.isfinite(loss).any() else None


def selection_variance(results: RunResults) -> float | None:
    """Variance over the clients of how often each was chosen: 0 where all were chosen equally often."""
    return float(results.counts.var()) if len(results.counts) else None


def seconds_per_round(results: RunResults, part: str) -> float | None:
    """Mean seconds per round for "select", "measure", "train" or "evaluate", over the second half of the rounds.

    The first ones compile; a median would hide what happens every ten rounds only.
    """
    seconds = results.rounds[f"{part}_seconds"]
    later = seconds[len(seconds) // 2 :]
    return float(np.nanmean(later)) if np.isfinite(later).any() else None


def parts_of_a_round() -> Sequence[str]:
    """Into what the time of a round is split."""
    return ("select", "measure", "train", "evaluate")
