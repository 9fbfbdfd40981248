"""The answer of an experiment in sentences: which policy, by how much, at what cost, and who pays for it.

A policy is better than another only if the 95 % interval of their paired differences excludes 0. Otherwise it is a tie,
and the verdict says how many more seeds could decide it. Runs that lack rounds do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from fedpick.report import analysis
from fedpick.report.analysis import Difference, PolicyResults, Quantity, Results, RunMeasure, RunResults
from fedpick.report.fairness import Fairness
from fedpick.report.groups import GroupAccount
from fedpick.report.tables import NOT_REACHED, clock_unit

__all__ = ["Verdict", "plural", "verdict_of"]

_FEWEST_SEEDS = 2
_MOST_SEEDS = 100
_SMALLEST_GAP = 0.01
"""Of all weight: a group that lacks less than this pays nothing worth a sentence."""


@dataclass(frozen=True)
class Verdict:
    """A headline and the sentences that explain it."""

    headline: str
    details: tuple[str, ...] = ()
    choice: str | None = None
    """The label of the policy to use: the cheapest of the best, or the baseline if nothing is better; None: unknown."""

    @property
    def sentences(self) -> tuple[str, ...]:
        """All of them, the headline first."""
        return (self.headline, *self.details)


class _Yardstick(NamedTuple):
    """What policies are judged by."""

    name: str
    measure: RunMeasure
    sign: int
    """1 if high is better, -1 if low is."""
    unit: str = ""
    """Of a difference; accuracies differ by points."""

    def value(self, quantity: Quantity) -> str:
        if quantity.mean is None:
            return NOT_REACHED
        return f"{100 * quantity.mean:.1f} %" if self.sign > 0 else f"{quantity.mean:.4g}"

    def gap(self, difference: Difference) -> str:
        """+3.2 points (95 % interval +1.0 to +5.4)."""
        assert difference.mean is not None and difference.interval is not None
        numbers = (difference.mean, *difference.interval)
        mean, low, high = (f"{100 * each:+.1f}" if self.sign > 0 else f"{each:+.3g}" for each in numbers)
        return f"{mean}{' points' if self.sign > 0 else self.unit} (95 % interval {low} to {high})"


def verdict_of(
    results: Results,
    accounts: Mapping[int, GroupAccount] | None = None,
    fairness: Mapping[int, Fairness] | None = None,
    *,
    against: str | None = None,
    window: int = 1,
    by: str = "accuracy",
) -> Verdict:
    """Judge the finished runs of an experiment.

    `accounts` are those of `groups.accounts_of`, `fairness` that of `fairness.fairness_of`. `against` names the policy
    to compare with (default: uniform, or the first one). An accuracy is the mean of the last `window` evaluations.

    `by` is "accuracy"; "time", the virtual time to the highest target that all finished runs reached, if there is one;
    or "equal-time", the accuracy after the virtual time that all of them reached, if there is a clock.
    """
    named = None if against is None else analysis.policy_named(results, against).label
    policies = [
        replace(policy, runs=finished)
        for policy in results.policies
        if (finished := tuple(run for run in policy.runs if run.complete))
    ]
    unfinished = len(results.incomplete)
    notes = [f"{plural(unfinished, 'run')} not finished: not counted here."] if unfinished else []
    yardstick = _time_yardstick(by, policies, window, results) or _yardstick(policies, window)
    if yardstick is None:
        return Verdict("No verdict yet: no run has finished with an evaluation.", tuple(notes))
    if named is not None and all(policy.label != named for policy in policies):
        return Verdict(f"No verdict yet: no run of {named} has finished.", tuple(notes))
    baseline = next(
        (each for each in policies if (each.label == named if named else each.policy == "uniform")), policies[0]
    )
    others = [policy for policy in policies if policy is not baseline]
    if not others:
        value = yardstick.value(analysis.over_seeds(baseline, yardstick.measure))
        return Verdict(f"Only {baseline.label} has finished: {yardstick.name} {value}.", tuple(notes))
    rivals = _Rivals.of(baseline, others, yardstick)
    if rivals.seeds < _FEWEST_SEEDS:
        return Verdict(
            f"No verdict from one seed: it cannot tell a difference in {yardstick.name} from chance. "
            "Run at least three (--seeds 3).",
            tuple(notes),
        )
    made = _with_winner(rivals, accounts or {}, fairness or {}, results) if rivals.better else _without_winner(rivals)
    if rivals.worse:
        named_gaps = _names([f"{each.label} ({yardstick.gap(rivals.gaps[each.label])})" for each in rivals.worse])
        notes.insert(0, f"Worse than {baseline.label}: {named_gaps}.")
    if len(others) > 1 and (rivals.better or rivals.worse):
        notes.append(
            f"{len(others)} policies are compared with {baseline.label}; by chance, 1 in 20 such intervals excludes 0."
        )
    return replace(made, details=(*made.details, *notes))


def _time_yardstick(by: str, policies: Sequence[PolicyResults], window: int, results: Results) -> _Yardstick | None:
    """Virtual time to the highest target that all runs reached, or accuracy after the time that all runs reached."""
    unit, scale = clock_unit(results)
    if by == "equal-time" and (seconds := analysis.common_time(policies)) is not None:
        measured = partial(analysis.accuracy_at, seconds=seconds, window=window)
        return _Yardstick(f"accuracy after {seconds * scale:.3g} {unit}", measured, 1)
    if by != "time":
        return None
    for target in sorted(results.experiment.targets, reverse=True):

        def measure(run: RunResults, target: float = target) -> float | None:
            seconds = analysis.seconds_to_target(run, target)
            return None if seconds is None else seconds * scale

        if all(measure(run) is not None for policy in policies for run in policy.runs):
            return _Yardstick(f"{unit} to {100 * target:g} %", measure, -1, f" {unit}")
    return None


def _yardstick(policies: Sequence[PolicyResults], window: int) -> _Yardstick | None:
    """Final accuracy; without a test set, the loss of all clients, or the test loss."""
    for yardstick in (
        _Yardstick("final accuracy", partial(analysis.final_accuracy, window=window), 1),
        _Yardstick("final loss of all clients", partial(_last, column="objective"), -1),
        _Yardstick("final test loss", partial(_last, column="loss"), -1),
    ):
        if any(yardstick.measure(run) is not None for policy in policies for run in policy.runs):
            return yardstick
    return None


def _last(run: RunResults, column: str) -> float | None:
    """The last measured value of a column."""
    values = run.rounds.get(column, np.empty(0))
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else None


@dataclass(frozen=True, kw_only=True)
class _Rivals:
    """The baseline, and the other policies sorted by what their paired intervals show, the best mean first."""

    baseline: PolicyResults
    better: list[PolicyResults]
    tied: list[PolicyResults]
    worse: list[PolicyResults]
    gaps: Mapping[str, Difference]
    """label -> the policy minus the baseline."""
    yardstick: _Yardstick

    @classmethod
    def of(cls, baseline: PolicyResults, others: Sequence[PolicyResults], yardstick: _Yardstick) -> _Rivals:
        gaps = {each.label: analysis.paired_difference(each, baseline, yardstick.measure) for each in others}

        def gain(policy: PolicyResults) -> float:
            mean = gaps[policy.label].mean
            return -np.inf if mean is None else yardstick.sign * mean

        ranked = sorted(others, key=gain, reverse=True)
        shown = [each for each in ranked if gaps[each.label].shown]
        return cls(
            baseline=baseline,
            better=[each for each in shown if gain(each) > 0],
            tied=[each for each in ranked if each not in shown],
            worse=[each for each in shown if gain(each) < 0],
            gaps=gaps,
            yardstick=yardstick,
        )

    @property
    def seeds(self) -> int:
        return max(len(gap.values) for gap in self.gaps.values())


def _with_winner(
    rivals: _Rivals, accounts: Mapping[int, GroupAccount], fairness: Mapping[int, Fairness], results: Results
) -> Verdict:
    baseline, yardstick, gaps = rivals.baseline, rivals.yardstick, rivals.gaps
    leader = rivals.better[0]

    def ties_with_leader(policy: PolicyResults) -> bool:
        return not analysis.paired_difference(leader, policy, yardstick.measure).shown

    leading = [leader, *filter(ties_with_leader, rivals.better[1:])]
    unclear = [each.label for each in rivals.tied if ties_with_leader(each)]
    details = []
    chosen = leader
    if len(leading) == 1:
        # Over the seeds of the difference: one policy may have finished more of them than the other.
        shared = {run.run.seed for run in leader.runs} & {run.run.seed for run in baseline.runs}
        own, other = (
            Quantity(tuple(yardstick.measure(run) for run in each.runs if run.run.seed in shared))
            for each in (leader, baseline)
        )
        headline = (
            f"{leader.label} is better than {baseline.label}: {yardstick.name} {yardstick.value(own)} instead of "
            f"{yardstick.value(other)}, {yardstick.gap(gaps[leader.label])}, {len(shared)} seeds."
        )
    else:
        labels = _names([f"{each.label} ({yardstick.gap(gaps[each.label])})" for each in leading])
        headline = (
            f"{labels} are better than {baseline.label} in {yardstick.name}. They are tied: these {rivals.seeds} seeds "
            "cannot tell them apart."
        )
        if all(map(_bytes_sent, leading)):
            chosen = min(leading, key=_bytes_sent)
            if _bytes_sent(chosen) < 0.995 * max(map(_bytes_sent, leading)):
                details.append(f"Of these, {chosen.label} sends the fewest bytes.")
    if unclear:
        details.append(
            f"{_names(unclear)} cannot be told from {leader.label}, nor from {baseline.label}, with these seeds."
        )
    details += [*_cost(chosen, baseline, results), *_payers(chosen, baseline, accounts)]
    details += _worst_off(chosen, baseline, fairness)
    return Verdict(headline, tuple(details), chosen.label)


def _without_winner(rivals: _Rivals) -> Verdict:
    baseline, yardstick = rivals.baseline, rivals.yardstick
    if not rivals.tied:
        headline = f"No policy is better than {baseline.label} in {yardstick.name}: all others are worse."
        return Verdict(headline, choice=baseline.label)
    headline = (
        f"No difference in {yardstick.name} that these {rivals.seeds} seeds can show between {baseline.label} and "
        f"{_names([each.label for each in rivals.tied])}: a tie."
    )
    known = [each for each in rivals.tied if rivals.gaps[each.label].interval is not None]
    details = []
    if known:
        needed = {each.label: rivals.gaps[each.label].pairs_needed(_MOST_SEEDS) or np.inf for each in known}
        closest = min(needed, key=needed.__getitem__)
        gap = rivals.gaps[closest]
        if not any(any(rivals.gaps[each.label].known) for each in known):
            details.append("They are the same in every seed.")
        elif np.isfinite(needed[closest]):
            more = int(needed[closest]) - len(gap.values)
            details.append(
                f"The clearest difference is that of {closest}: {yardstick.gap(gap)}. About {plural(more, 'more seed')}"
                " would show it, if its size and spread stay the same."
            )
        else:
            details.append(
                f"The clearest difference is that of {closest}: {yardstick.gap(gap)}. To show it, more than "
                f"{_MOST_SEEDS} seeds would be needed."
            )
    tied = [baseline, *rivals.tied]
    cheapest, dearest = min(tied, key=_bytes_sent), max(tied, key=_bytes_sent)
    if 0 < _bytes_sent(cheapest) < 0.995 * _bytes_sent(dearest):
        low, high = _size(_bytes_sent(cheapest)), _size(_bytes_sent(dearest))
        details.append(f"Of these, {cheapest.label} sends the fewest bytes ({low}), {dearest.label} the most ({high}).")
    return Verdict(headline, tuple(details), baseline.label)


# What it costs


def _bytes_sent(policy: PolicyResults) -> float:
    """Mean over the seeds of all bytes, both ways; 0: a recorded training loop that does not count them."""
    return float(np.mean([run.rounds["bytes_down"][-1] + run.rounds["bytes_up"][-1] for run in policy.runs]))


def _cost(policy: PolicyResults, baseline: PolicyResults, results: Results) -> list[str]:
    own, other = _bytes_sent(policy), _bytes_sent(baseline)
    if not own or not other:
        return []
    rounds = plural(results.experiment.rounds, "round")
    ratio = own / other
    if abs(ratio - 1) < 0.005:
        sentences = [f"{policy.label} sends as many bytes as {baseline.label}: {_size(own)} in {rounds}."]
    else:
        share = f"{abs(ratio - 1):.0%}".replace("%", " %")
        more = f"{ratio:.1f} times" if ratio >= 2 else f"{share} more than" if ratio > 1 else f"{share} less than"
        sentences = [f"{policy.label} sends {_size(own)} in {rounds}, {more} {baseline.label} ({_size(other)})."]
    for target in sorted(results.experiment.targets, reverse=True):
        measure = partial(analysis.bytes_to_target, target=target)
        spent = [analysis.over_seeds(each, measure).mean for each in (policy, baseline)]
        if spent[0] is not None and spent[1] is not None:
            gap = analysis.paired_difference(policy, baseline, measure)
            tie = "" if gap.shown else ", a difference that these seeds cannot show"
            mine, theirs = map(_size, spent)
            sentences.append(
                f"To reach {100 * target:g} %, {policy.label} sends {mine}, {baseline.label} {theirs}{tie}."
            )
            break
    return sentences


# Who pays for it


def _payers(policy: PolicyResults, baseline: PolicyResults, accounts: Mapping[int, GroupAccount]) -> list[str]:
    own, other = (
        [accounts[run.run.id] for run in each.runs if run.run.id in accounts and accounts[run.run.id].realized]
        for each in (policy, baseline)
    )
    if not own:
        return [_least_chosen(policy, baseline)]
    lacking = {}
    for name in _groups(own):
        pairs = [_shares(account, name) for account in own]
        gap = Difference(tuple(realized - target for target, realized in pairs))
        if (gap.mean or 0.0) <= -_SMALLEST_GAP:
            lacking[name] = (gap, *np.mean(pairs, axis=0))
    if not lacking:
        return [f"No group of clients pays for it: under {policy.label} each gets its share of the weight."]
    shown = {name: each for name, each in lacking.items() if each[0].shown}
    name = min(shown or lacking, key=lambda each: lacking[each][0].mean or 0.0)
    _, target, realized = lacking[name]
    head = "Who pays for it" if shown else "Who pays for it is not shown with these seeds"
    who = f"clients of {name}" if name.startswith("cluster") else f"{name} clients"
    under = ""
    if other:
        under = f" (under {baseline.label}: {100 * np.mean([_shares(account, name)[1] for account in other]):.0f} %)"
    return [
        f"{head}: {who} get {100 * realized:.0f} % of the weight instead of {100 * target:.0f} %, "
        f"their share of the examples{under}."
    ]


def _worst_off(policy: PolicyResults, baseline: PolicyResults, fairness: Mapping[int, Fairness]) -> list[str]:
    """What the tenth of the clients with the lowest accuracy gets."""

    def worst(run: RunResults) -> float | None:
        return fairness[run.run.id].worst_tenth if run.run.id in fairness else None

    own, other = (analysis.over_seeds(each, worst).mean for each in (policy, baseline))
    if own is None or other is None:
        return []
    tie = "" if analysis.paired_difference(policy, baseline, worst).shown else ", a difference that is not shown"
    return [
        f"For the worst-off tenth of the clients, the final model is {100 * own:.0f} % accurate under {policy.label}, "
        f"{100 * other:.0f} % under {baseline.label}{tie}."
    ]


def _groups(accounts: Sequence[GroupAccount]) -> list[str]:
    """The groups in the fewest words that still tell two of them apart: "less available" before any correlation."""
    names = {name for account in accounts for name in account.target}
    short = {name.partition(",")[0] for name in names}
    return sorted(short if len(short) > 1 else names)


def _shares(account: GroupAccount, group: str) -> tuple[float, float]:
    """(target, realised) share of a group, or of all groups whose names begin like it."""
    names = [name for name in account.target if name == group or name.partition(",")[0] == group]
    return sum(account.target[name] for name in names), sum(account.realized[name] for name in names)


def _least_chosen(policy: PolicyResults, baseline: PolicyResults) -> str:
    def half(run: RunResults) -> float | None:
        """Share of all choices that the less often chosen half of the clients had."""
        counts = np.sort(run.counts)
        return float(counts[: len(counts) // 2].sum() / counts.sum()) if counts.sum() else None

    gap = analysis.paired_difference(policy, baseline, half)
    if not gap.shown:
        return f"{policy.label} spreads its choices over the clients as evenly as {baseline.label}, as far as is shown."
    own, other = (100 * (analysis.over_seeds(each, half).mean or 0.0) for each in (policy, baseline))
    who = "Who pays for it" if own < other else "Its choices are more even"
    return (
        f"{who}: under {policy.label}, the half of the clients chosen least often had {own:.0f} % of the places; "
        f"under {baseline.label}, {other:.0f} %."
    )


# Words


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def plural(number: int, noun: str) -> str:
    """Count things: "1 seed", "2 seeds"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _size(value: float | None) -> str:
    """Bytes with three digits.

    >>> _size(1234567.0)
    '1.23 MB'
    """
    value = value or 0.0
    power = min(4, max(0, int(np.floor(np.log10(max(value, 1.0)) / 3))))
    scaled = value / 1000**power
    return f"{scaled:.{max(0, 2 - int(np.log10(max(scaled, 1))))}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
