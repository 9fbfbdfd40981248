"""From the store to numbers: one value per run, then mean and spread over the seeds.

Rounds count from 1, as in the papers' tables: a run whose first round reaches the target took one round.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import FloatArray, IntArray
from fedpick.core.errors import InvalidInput, StateFileError, unknown_name
from fedpick.experiments.store import Experiment, Run, Store
from fedpick.sim.clock import Status

__all__ = [
    "COLUMNS",
    "PARTS",
    "Difference",
    "PolicyResults",
    "Quantity",
    "Results",
    "RunResults",
    "Sweep",
    "accuracy_at",
    "best_accuracy",
    "best_by_round",
    "bytes_to_target",
    "final_accuracy",
    "leaders",
    "load_results",
    "lowest_loss",
    "models_to_target",
    "over_seeds",
    "over_setting",
    "paired_difference",
    "policy_named",
    "rounds_to_loss",
    "rounds_to_target",
    "seconds_per_round",
    "seconds_to_target",
    "selection_variance",
    "setting_of",
    "smoothed",
    "sweeps_of",
    "thrown_away",
    "virtual_seconds_per_round",
]

RunMeasure = Callable[["RunResults"], float | None]
"""One value of a run; None if it has none, such as the round in which it reached a target."""
PARTS = ("select", "measure", "train", "evaluate")
"""The parts of a round whose time is stored."""
COLUMNS = (
    *("round", "accuracy", "loss", "train_loss", "objective", "local_accuracy", "clock"),
    *("models_down", "updates_up", "bytes_down", "bytes_up"),
)
"""The columns of the table `rounds` that results hold."""
_MOST_KEPT = 500
_FEWEST_VALUES = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class RunResults:
    """One run: its facts, what its rounds measured and sent, and how often each client was chosen."""

    run: Run
    rounds: Mapping[str, NDArray[Any]]
    """The columns of COLUMNS, (T,) each."""
    counts: IntArray
    """(N,)"""
    wanted: int
    """Rounds that the experiment asks for."""
    seconds: Mapping[str, float | None] = field(default_factory=dict)
    """Mean seconds per round for each of PARTS, over the second half of the rounds."""
    thrown_away: float | None = None
    """Share of the clients' time that did not enter the model; None without a clock."""
    lost: Mapping[int, IntArray] = field(default_factory=dict)
    """Round -> the clients that the guard distrusted from this round on; only rounds with such clients."""
    regained: Mapping[int, IntArray] = field(default_factory=dict)
    """Likewise the clients that it trusted again."""

    def __repr__(self) -> str:
        return f"RunResults({self.run.label!r}, seed={self.run.seed}, {len(self.rounds['round']):,} rounds)"

    @property
    def complete(self) -> bool:
        """Whether it has all its rounds."""
        return len(self.rounds["round"]) >= self.wanted

    @property
    def clock(self) -> FloatArray:
        """(T,) virtual seconds since the start of the run; NaN without a clock."""
        return self.rounds.get("clock", np.full(len(self.rounds["round"]), np.nan))

    @property
    def kept(self) -> IntArray:
        """(P,) the rounds whose history is kept for charts: evenly spaced, at most 500, and the last one."""
        count, step = len(self.rounds["round"]), -(-self.wanted // _MOST_KEPT)
        return np.unique(np.append(np.arange(step - 1, count, step), count - 1)) if count else np.empty(0, np.int64)

    @property
    def evaluated(self) -> NDArray[np.intp]:
        """Positions of the rounds that have a test accuracy."""
        return np.flatnonzero(~np.isnan(self.rounds["accuracy"]))


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyResults:
    """A policy with all its seeds: one line of a table."""

    label: str
    policy: str
    runs: tuple[RunResults, ...]

    def __repr__(self) -> str:
        return f"PolicyResults({self.label!r}, {len(self.runs)} runs)"


@dataclass(frozen=True, kw_only=True, eq=False)
class Results:
    """An experiment with everything that the tables need."""

    experiment: Experiment
    policies: tuple[PolicyResults, ...]

    def __repr__(self) -> str:
        labels = ", ".join(policy.label for policy in self.policies)
        runs = sum(len(policy.runs) for policy in self.policies)
        return f"Results({self.experiment.title!r}, {runs} runs of {labels or 'no policy'})"

    def _repr_html_(self) -> str:
        """What a notebook shows: the tables."""
        from fedpick.report.tables import tables_of

        return "".join(table._repr_html_() for table in tables_of(self))

    @property
    def incomplete(self) -> list[str]:
        """The runs that lack rounds, in words."""
        return [
            f"{policy.label}, seed {each.run.seed} ({len(each.rounds['round'])} of {each.wanted} rounds)"
            for policy in self.policies
            for each in policy.runs
            if not each.complete
        ]


def load_results(store: Store, experiment: Experiment, *, counted: bool = True) -> Results:
    """Read an experiment. A run that another experiment continued is cut to this one's number of rounds.

    `counted` False leaves the selection counts empty, for a caller that reads the choices anyway.
    """
    grouped: dict[str, list[RunResults]] = {}
    known: dict[bytes, NDArray[Any]] = {}
    for run in store.runs(experiment.id):
        notes = ("diagnostics",) if run.settings.get("attacks") else ()
        columns = store.rounds(run.id, experiment.rounds, (*COLUMNS, *notes))
        done = len(columns["round"])
        results = RunResults(
            run=run,
            rounds={name: _compact(columns[name], known) for name in COLUMNS} | {name: columns[name] for name in notes},
            # The first half includes compilation; a median would hide work of every tenth round.
            seconds=store.mean_seconds(run.id, done // 2, experiment.rounds),
            counts=store.selection_counts(run.id, experiment.rounds) if counted else np.empty(0, np.int64),
            wanted=experiment.rounds,
            thrown_away=_thrown_away(store, run, experiment.rounds) if np.isfinite(columns["clock"]).any() else None,
            lost=_clients_by_round(store, run, "lost_credibility", experiment.rounds),
            regained=_clients_by_round(store, run, "regained_credibility", experiment.rounds),
        )
        grouped.setdefault(run.label, []).append(results)
    policies = [
        PolicyResults(label=label, policy=runs[0].run.policy, runs=tuple(runs)) for label, runs in grouped.items()
    ]
    return Results(experiment=experiment, policies=tuple(policies))


def _clients_by_round(store: Store, run: Run, name: str, limit: int) -> dict[int, IntArray]:
    """Round -> the clients that the guard named in it."""
    found: dict[int, IntArray] = {}
    for index, clients in store.arrays(run.id, f"policy/{name}", limit):
        if clients.ndim != 1 or clients.dtype.kind != "i" or clients.min(initial=0) < 0:
            raise StateFileError(f"The store is damaged: {name!r} in round {index} of {run.label} lists no clients.")
        found[index] = clients
    return found


def _thrown_away(store: Store, run: Run, limit: int) -> float | None:
    """Share of the time of all chosen clients that was spent for nothing: cancelled, late and not used, failed."""
    spent = wasted = 0.0
    kept = run.settings.get("waiting", {}).get("late", "drop") != "drop"
    for _, (*parts, status) in store.arrays(run.id, "evaluation/times", limit):
        seconds = np.sum(parts, axis=0)
        answered = status == Status.ANSWERED
        stopped = status == Status.CANCELLED
        seconds[stopped] = np.minimum(seconds[stopped], seconds[answered].max(initial=0.0))
        used = answered | ((status == Status.LATE) & kept)
        spent += float(seconds.sum())
        wasted += float(seconds[~used].sum())
    return wasted / spent if spent > 0 else None


def _compact(values: NDArray[Any], known: dict[bytes, NDArray[Any]]) -> NDArray[Any]:
    """The values; of a column that was never measured, one NaN that stands for all.

    Runs share equal whole numbers: all count the same rounds, and many send as much.
    """
    if values.dtype != np.float64:
        return known.setdefault(hashlib.blake2b(values.tobytes(), digest_size=16).digest(), values)
    return np.broadcast_to(np.float64(np.nan), values.shape) if np.isnan(values).all() else values


@dataclass(frozen=True)
class Quantity:
    """One value per seed, with mean and spread. `mean` is None if a seed has no value: the papers' N/A."""

    values: tuple[float | None, ...] = field(default=())
    seeds: tuple[int, ...] = field(default=(), compare=False)
    """Of the values; empty if they are not those of runs."""

    @property
    def known(self) -> list[float]:
        """The values of the seeds that have one."""
        return [value for value in self.values if value is not None]

    @property
    def mean(self) -> float | None:
        """Over all seeds; None if one of them has no value."""
        return float(np.mean(self.known)) if self.values and len(self.known) == len(self.values) else None

    @property
    def sd(self) -> float | None:
        """Sample standard deviation (n - 1); None for fewer than two seeds or if the mean is None."""
        return float(np.std(self.known, ddof=1)) if self.mean is not None and len(self.values) > 1 else None


@dataclass(frozen=True)
class Difference(Quantity):
    """One policy minus another, seed by seed.

    Both policies of a seed share data, model and availability, so the pairs tell more than the two means.
    """

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the mean (Student's t); None for fewer than two pairs or an unknown mean."""
        return self.interval_at(0.95)

    def interval_at(self, confidence: float) -> tuple[float, float] | None:
        """The confidence interval at another level."""
        if self.mean is None or self.sd is None:
            return None
        from scipy.special import stdtrit  # scipy.stats takes a second and 50 MB to import

        count = len(self.values)
        half = float(stdtrit(count - 1, (1 + confidence) / 2)) * self.sd / count**0.5
        return self.mean - half, self.mean + half

    @property
    def shown(self) -> bool:
        """Whether the interval excludes 0; otherwise it is a tie."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]

    def pairs_needed(self, most: int) -> int | None:
        """Pairs with which the interval would exclude 0 at the same mean and spread; None: more than `most`."""
        from scipy.special import stdtrit

        if self.mean is None or self.sd is None or self.mean == 0:
            return None
        counts = np.arange(2, most + 1)
        enough = stdtrit(counts - 1, 0.975) * self.sd / np.sqrt(counts) < abs(self.mean)
        return int(counts[enough.argmax()]) if enough.any() else None


def leaders(quantities: Mapping[str, Quantity], best: str) -> list[str]:
    """The label with the best mean, then those that its paired 95 % interval does not tell from it: a tie.

    `best` is "low" or "high". Quantities of other seeds, which cannot be paired, are a tie. Empty with fewer than two
    means.
    """
    known = {label: each for label, each in quantities.items() if each.mean is not None}
    if len(known) < 2:
        return []
    pick = min if best == "low" else max
    first = pick(known, key=lambda label: known[label].mean or 0.0)

    def beaten(other: Quantity) -> bool:
        own, values = known[first].known, other.known
        paired = len(own) == len(values) and known[first].seeds == other.seeds
        return paired and Difference(tuple(np.subtract(own, values).tolist())).shown

    return [first, *(label for label, each in known.items() if label != first and not beaten(each))]


def policy_named(results: Results, name: str) -> PolicyResults:
    """The policy with this label, or the only one with this registry name."""
    labelled = [policy for policy in results.policies if policy.label == name]
    found = labelled or [policy for policy in results.policies if policy.policy == name]
    if len(found) > 1:
        labels = ", ".join(repr(policy.label) for policy in found)
        raise InvalidInput(f"{len(found)} lines are {name!r}. Name one by its label: {labels}.")
    if not found:
        raise unknown_name("policy in this experiment", name, [policy.label for policy in results.policies])
    return found[0]


def paired_difference(policy: PolicyResults, baseline: PolicyResults, measure: RunMeasure) -> Difference:
    """The policy minus the baseline for every seed that both have; None for a seed in which one has no value."""
    others = {run.run.seed: run for run in baseline.runs}
    values = []
    for run in policy.runs:
        if run.run.seed in others:
            own, other = measure(run), measure(others[run.run.seed])
            values.append(None if own is None or other is None else float(own - other))
    return Difference(tuple(values))


def over_seeds(policy: PolicyResults, measure: RunMeasure) -> Quantity:
    """One value per seed of a policy."""
    return Quantity(tuple(measure(run) for run in policy.runs), tuple(run.run.seed for run in policy.runs))


def smoothed(values: FloatArray, window: int) -> FloatArray:
    """Mean of the latest `window` values; NaN for the first window - 1.

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
    """Rounds until the accuracy, averaged over `window` evaluations, reached the target; None: never."""
    position = _reached(results, target, window)
    return None if position is None else int(results.rounds["round"][position]) + 1


def rounds_to_loss(results: RunResults, target: float) -> int | None:
    """Rounds until the global training loss (`objective`) was at or below the target; None: never."""
    with np.errstate(invalid="ignore"):
        hits = np.flatnonzero(results.rounds["objective"] <= target)
    return int(results.rounds["round"][hits[0]]) + 1 if len(hits) else None


def _spent(results: RunResults, target: float, columns: Iterable[str], window: int) -> float | None:
    position = _reached(results, target, window)
    return None if position is None else float(sum(results.rounds[column][position] for column in columns))


def models_to_target(results: RunResults, target: float, window: int = 1) -> float | None:
    """Models sent down and updates sent up until the target was reached, including probes and trials."""
    return _spent(results, target, ("models_down", "updates_up"), window)


def bytes_to_target(results: RunResults, target: float, window: int = 1) -> float | None:
    """Bytes sent, both ways, until the target was reached."""
    return _spent(results, target, ("bytes_down", "bytes_up"), window)


def seconds_to_target(results: RunResults, target: float, window: int = 1) -> float | None:
    """Seconds of virtual time until the target was reached; None: never, or there is no clock."""
    position = _reached(results, target, window)
    spent = math.nan if position is None else float(results.clock[position])
    return spent if math.isfinite(spent) else None


def virtual_seconds_per_round(results: RunResults) -> float | None:
    """Mean length of a round on the virtual clock; None without one."""
    clock = results.clock
    return float(clock[-1] / len(clock)) if len(clock) and np.isfinite(clock[-1]) else None


def thrown_away(results: RunResults) -> float | None:
    """Share of the clients' time that did not enter the model; None without a clock."""
    return results.thrown_away


def final_accuracy(results: RunResults, window: int = 1) -> float | None:
    """Mean accuracy of the last `window` evaluations."""
    accuracy = results.rounds["accuracy"][results.evaluated]
    return float(accuracy[-window:].mean()) if len(accuracy) else None


def accuracy_at(results: RunResults, seconds: float, window: int = 1) -> float | None:
    """Mean of the last `window` evaluations up to this virtual time; None if the first one is later."""
    known = results.evaluated[results.rounds["clock"][results.evaluated] <= seconds]
    return float(results.rounds["accuracy"][known[-window:]].mean()) if len(known) else None


def common_time(policies: Sequence[PolicyResults]) -> float | None:
    """The virtual time, in seconds, that every run reached; None without devices."""
    ends = [run.clock[-1] if len(run.clock) else np.nan for policy in policies for run in policy.runs]
    return float(min(ends)) if ends and np.isfinite(ends).all() else None


def best_accuracy(results: RunResults) -> float | None:
    """The highest accuracy of all evaluations."""
    accuracy = results.rounds["accuracy"][results.evaluated]
    return float(accuracy.max()) if len(accuracy) else None


def lowest_loss(results: RunResults) -> float | None:
    """The lowest test loss over the rounds (the measure of FedGS)."""
    loss = results.rounds["loss"]
    return float(np.nanmin(loss)) if np.isfinite(loss).any() else None


def selection_variance(results: RunResults) -> float | None:
    """Variance over the clients of how often each was chosen: 0 if all were chosen equally often."""
    return float(results.counts.var()) if len(results.counts) else None


def seconds_per_round(results: RunResults, part: str) -> float | None:
    """Mean seconds per round for one of PARTS."""
    return results.seconds.get(part)


# Dependence on one parameter


@dataclass(frozen=True, kw_only=True, eq=False)
class Sweep:
    """A policy that an experiment has with three or more values of one hyper-parameter (CA-Fed, figure 2)."""

    policy: str
    parameter: str
    values: tuple[float, ...]
    """Ascending."""
    lines: tuple[PolicyResults, ...]
    """One per value."""


def _number(value: Any) -> float | None:
    """The value if it is a finite number and not a bool, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def sweeps_of(results: Results) -> list[Sweep]:
    """Every hyper-parameter of which a policy has at least three values, the other hyper-parameters being equal.

    Settings of the optimiser may differ: each value may have its own tuned learning rates.
    """
    families: dict[tuple[str, str, str], dict[float, PolicyResults]] = {}
    for line in results.policies:
        parameters = line.runs[0].run.parameters
        for name, value in parameters.items():
            number = _number(value)
            if number is not None:
                others = json.dumps({key: item for key, item in parameters.items() if key != name}, sort_keys=True)
                families.setdefault((line.policy, name, others), {}).setdefault(number, line)
    return [
        Sweep(
            policy=policy,
            parameter=name,
            values=tuple(sorted(found)),
            lines=tuple(found[value] for value in sorted(found)),
        )
        for (policy, name, _), found in families.items()
        if len(found) >= _FEWEST_VALUES
    ]


def best_by_round(sweep: Sweep) -> tuple[IntArray, FloatArray]:
    """(rounds from 1, the value with the highest mean accuracy after each of them): figure 2b.

    Only rounds in which every seed of every value was evaluated; of equally good values, the smallest.
    """
    runs = [[run for run in line.runs if len(run.rounds["round"])] for line in sweep.lines]
    length = min((len(run.rounds["round"]) for line in runs for run in line), default=0)
    if length == 0 or not all(runs):
        return np.empty(0, np.int64), np.empty(0)
    means = np.stack([np.mean([run.rounds["accuracy"][:length] for run in line], axis=0) for line in runs])
    known = np.flatnonzero(np.isfinite(means).all(axis=0))
    return known + 1, np.array(sweep.values)[means[:, known].argmax(axis=0)]


def setting_of(run: Run, path: str) -> Any:
    """The setting of a run at a path such as "data.alpha" or "policy.kappa2"; None if it has none."""
    section, _, key = path.partition(".")
    if not key:
        raise InvalidInput(f"A setting is named section.key, such as data.alpha or policy.kappa2. Got {path!r}.")
    value: Any = run.parameters if section == "policy" else run.settings.get(section)
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def over_setting(
    store: Store,
    experiments: Sequence[Experiment],
    path: str,
    measure: RunMeasure = final_accuracy,
) -> dict[str, list[tuple[float, Quantity]]]:
    """label -> (value of the setting, measure over the seeds), values ascending (CA-Fed, figures 3 and 4b).

    Raise if a label has the same value twice: two points would be in one place.
    """
    found: dict[str, dict[float, Quantity]] = {}
    for experiment in experiments:
        for line in load_results(store, experiment).policies:
            value = _number(setting_of(line.runs[0].run, path))
            if value is None:
                continue
            points = found.setdefault(line.label, {})
            if value in points:
                raise InvalidInput(
                    f"{line.label} is there twice with {path} = {value:g}. Name experiments that differ in it."
                )
            points[value] = over_seeds(line, measure)
    if not found:
        titles = ", ".join(repr(experiment.title) for experiment in experiments)
        raise InvalidInput(f"No run of {titles or 'no experiment'} has a number at {path!r}.")
    return {label: sorted(points.items()) for label, points in found.items()}
