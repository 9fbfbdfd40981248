"""Advice: which policy suits a federation that the user describes by a table of clients.

`advise` deals a data set that stands in for the user's to clients with exactly the sizes and labels of the table, and
compares a short list of policies on it, all with their defaults and on the same seeds. It looks at the results after 3,
5 and 10 seeds. After a look it drops every policy that is worse than the best one by a point or more and by a paired
99 % interval. It stops when each policy that is left is worse than the best by a paired 95 % interval, or equal to it
within a point.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from fedpick.core.errors import InvalidInput, TrainingFailed
from fedpick.core.policy import Signal
from fedpick.core.validation import whole
from fedpick.core.writing import refuse_directory, write_atomically
from fedpick.data.client_table import ClientTable, read_clients
from fedpick.data.types import Federation
from fedpick.experiments import DEFAULT_STORE, presets
from fedpick.experiments.executors import StopFlag
from fedpick.experiments.progress import Progress
from fedpick.experiments.run import refuse_early
from fedpick.experiments.runner import Report, run
from fedpick.experiments.settings import build_settings, federation_of, policy_of
from fedpick.experiments.spec import PolicySpec, Spec
from fedpick.experiments.store import Experiment, Store
from fedpick.experiments.toml import toml_text
from fedpick.report import analysis
from fedpick.report.analysis import PolicyResults, Results
from fedpick.report.groups import accounts_of
from fedpick.report.tables import clock_unit
from fedpick.report.verdict import Verdict, verdict_of

__all__ = ["Advice", "Unfinished", "advise", "short_list"]

LOOKS = (3, 5, 10)
"""Numbers of seeds after which the results are tested."""
WINDOW = 5
"""The final accuracy is the mean of this many last evaluations."""
JUDGED_BY = "equal-time"
"""With devices, policies are compared after the same time; see `fedpick.report.verdict`."""
_DROP_CONFIDENCE = 0.99
_EQUAL = 0.01
"""Policies whose whole 95 % interval lies within this accuracy of the best are as good as it."""
_ROUNDS = 60
_LOCAL = {"steps": 20, "batch_size": 16}


class Unfinished(TrainingFailed):
    """Advice that was stopped, or of which a run failed; `report` says how far it came."""

    def __init__(self, report: Report) -> None:
        self.report = report
        failed = "; ".join(f"{name}: {reason}" for name, reason in report.failures.items())
        super().__init__(
            f"No advice: {failed}." if failed else f"No advice yet: {report.stopped} runs are not finished. Call again."
        )


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to use, why, and what this answer does not know."""

    policy: str | None
    """The registered name of the policy to use; None if the runs give no verdict."""
    verdict: Verdict
    """The comparison that the answer rests on."""
    dropped: tuple[str, ...]
    """A sentence on each policy that was dropped early."""
    unknown: tuple[str, ...]
    """What the answer cannot know, in sentences."""
    flower: str | None
    """The lines for a Flower ServerApp."""
    spec: Path
    """The experiments that were run: `fedpick run SPEC` reproduces them."""
    experiment: Experiment
    """The last one, in the store."""

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        if self.policy is None:
            return "No advice: these runs give no verdict."
        return f"Use {self.policy}." if self.policy != "uniform" else "Use uniform: nothing else is shown to be better."

    def __repr__(self) -> str:
        return f"Advice({self.policy!r}, spec={str(self.spec)!r})"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return f"<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        parts = [self.headline, *self.verdict.sentences, *self.dropped, "", "What this cannot know:"]
        parts += [f"- {sentence}" for sentence in self.unknown]
        if self.flower is not None:
            parts += ["", "In a Flower ServerApp:", "", *(f"    {line}" for line in self.flower.splitlines())]
        return "\n".join([*parts, "", f"Run again: fedpick run {shlex.quote(str(self.spec))}"])


def short_list(table: ClientTable, *, availability: bool = False, devices: bool = False) -> tuple[str, ...]:
    """The policies to compare: one of each idea that can use what is known of these clients."""
    names = ["uniform", "herd", "pow-d", "fedcor"]
    if table.histogram is not None:
        names += ["fedgs", "fedcbs"]
    if availability:
        names += ["fedau", "f3ast"]
    if devices:
        names += ["oort", "tifl"]
    return tuple(names)


def advise(
    clients: str | Path,
    *,
    budget: int,
    availability: str | Path | None = None,
    round_seconds: float = 600.0,
    devices: str | Path | None = None,
    data: str = "digits",
    policies: Sequence[str] | None = None,
    rounds: int = _ROUNDS,
    seeds: int = LOOKS[-1],
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    store: str | Path = DEFAULT_STORE,
    output: str | Path | None = None,
    processes: int | None = None,
    restart: bool = False,
    progress: Callable[[], Progress] = Progress,
    stop: Callable[[], StopFlag] = StopFlag,
) -> Advice:
    """Say which policy suits these clients.

    Args:
        clients: a table of clients, CSV or Parquet: `id`, `num_examples` and a column `label_NAME` per label.
        budget: clients per round.
        availability: a log of when each client is available, with their ids; None: always.
        round_seconds: the length of a round in that log.
        devices: the speeds of the clients, a CSV with `id`, `seconds_per_example`, `download` and `upload`. Policies
            are then compared after the same time instead of the same number of rounds.
        data: the data set that stands in for the clients' own; see `fedpick list datasets`.
        policies: those to compare; None: a short list. `uniform` is always one of them.
        rounds: rounds per run.
        seeds: the most seeds per policy; fewer are run where the answer is clear.
        changes: other keys of the spec, section by section, as in `fedpick compare --set`.
        store: where results are stored.
        output: the spec to write; None: NAME-advice.toml beside the table.
        processes: parallel runs; None: as many as suit the work.
        restart: discard stored rounds.
        progress: makes the display of each look.
        stop: makes the flag that stops each look.

    Raises:
        Unfinished: a run failed, or `stop` was set. Stored rounds stay: the same call continues.
    """
    whole("advise", "seeds", 2, value=seeds)
    whole("advise", "budget", 1, value=budget)
    if "seeds" in (changes or {}).get("run", {}):
        raise InvalidInput(
            "advise looks at seeds 0, 1, 2, ... in turn: give the most of them as --seeds, not run.seeds."
        )
    file = Path(clients)
    target = refuse_directory(Path(output) if output is not None else file.with_name(f"{file.stem}-advice.toml"))
    table = read_clients(clients)
    own = _own_settings(table, str(clients), budget, rounds, availability, round_seconds, devices)
    names = list(policies or short_list(table, availability=availability is not None, devices=devices is not None))
    if "uniform" not in names:
        names.insert(0, "uniform")  # what the others are compared with
    if "epochs" in (changes or {}).get("local", {}):
        del own["local"]["steps"]  # one of the two
    for section, values in (changes or {}).items():
        own[section] = {**own.get(section, {}), **values}
    first = presets.comparison(dataset=data, policies=names, partition="table", changes=own)
    refuse_early([first.settings_of(policy, 0) for policy in first.policies])  # before anything is written
    looks: list[Spec] = []
    dropped: list[str] = []
    with closing(Store(store)) as opened:
        spec = first
        for count in [*(look for look in LOOKS if look < seeds), seeds]:
            spec = replace(spec, title=_title(file, count), seeds=tuple(range(count)))
            looks.append(spec)
            report = run(spec, opened, processes=processes, restart=restart, progress=progress(), stop=stop())
            if not report.complete:
                raise Unfinished(report)
            restart = False  # the later looks continue the first
            results = analysis.load_results(opened, report.experiment)
            worse, clear = _judge(results)
            if clear or count == seeds:
                break
            dropped += _drop_sentences(worse, count)
            spec = replace(spec, policies=tuple(each for each in spec.policies if each.label not in worse))
        seconds = analysis.common_time(results.policies)
        verdict = verdict_of(results, accounts_of(opened, results), window=WINDOW, by=JUDGED_BY)
        write_atomically(target, _spec_text(looks))
        chosen = next((each for each in first.policies if each.label == verdict.choice), None)
        return Advice(
            policy=None if chosen is None else chosen.name,
            verdict=verdict,
            dropped=tuple(dropped),
            unknown=_unknown(
                first, table, availability is not None, None if seconds is None else _words(results, seconds)
            ),
            flower=None if chosen is None else _flower_lines(chosen, first.budget),
            spec=target,
            experiment=report.experiment,
        )


def _own_settings(
    table: ClientTable,
    path: str,
    budget: int,
    rounds: int,
    availability: str | Path | None,
    round_seconds: float,
    devices: str | Path | None,
) -> dict[str, dict[str, Any]]:
    """What the user's files say, as sections of a spec."""
    if budget > len(table):
        raise InvalidInput(f"A budget of {budget} is more than the {len(table)} clients of {path}.")
    sections: dict[str, dict[str, Any]] = {
        "partition": {"path": path, "holdout": 0.0},
        "local": dict(_LOCAL),
        "simulator": {"losses_on": "train"},
        "run": {"rounds": rounds, "budget": budget, "seeds": LOOKS[0]},
    }
    ids = list(table.ids)
    if availability is not None:
        log = {"name": "trace", "path": str(availability), "round_seconds": round_seconds, "ids": ids}
        sections["availability"] = log
    if devices is not None:
        sections["devices"] = {"name": "csv", "path": str(devices), "ids": ids}
    return sections


def _title(file: Path, seeds: int) -> str:
    return f"{file.stem}: which policy? (seeds-{seeds})"


def _judge(results: Results) -> tuple[dict[str, float], bool]:
    """Return the policies that are clearly worse than the best (label -> points), and whether the answer is clear.

    `uniform` is never among the worse ones: the others are compared with it.
    """
    seconds = analysis.common_time(results.policies)
    measure = (
        partial(analysis.final_accuracy, window=WINDOW)
        if seconds is None
        else partial(analysis.accuracy_at, seconds=seconds, window=WINDOW)
    )

    def mean(policy: PolicyResults) -> float:
        return analysis.over_seeds(policy, measure).mean or 0.0

    best = max(results.policies, key=mean)
    worse: dict[str, float] = {}
    clear = True
    for policy in results.policies:
        if policy is best:
            continue
        gap = analysis.paired_difference(policy, best, measure)
        low, high = gap.interval or (-1.0, 1.0)
        clear &= high < 0 or (low >= -_EQUAL and high <= _EQUAL)
        surely = gap.interval_at(_DROP_CONFIDENCE)
        mean_gap = gap.mean or 0.0
        if policy.policy != "uniform" and surely is not None and surely[1] < 0 and mean_gap <= -_EQUAL:
            worse[policy.label] = 100 * mean_gap
    return worse, clear


def _words(results: Results, seconds: float) -> str:
    unit, scale = clock_unit(results)
    return f"{seconds * scale:.3g} {unit}"


def _drop_sentences(worse: Mapping[str, float], seeds: int) -> list[str]:
    return [
        f"{label} was dropped after {seeds} seeds: {points:+.1f} points from the best one."
        for label, points in worse.items()
    ]


def _spec_text(looks: Sequence[Spec]) -> str:
    """A spec file whose variants are the looks, in order."""
    base = looks[0].to_dict()
    base["title"] = base["title"].replace(f"seeds-{len(looks[0].seeds)}", "{variant}")
    blocks = [toml_text(base)]
    for look in looks:
        labels = [policy.label for policy in look.policies]
        lines = toml_text({"run.seeds": list(look.seeds), "policies": labels}).replace('"run.seeds"', "run.seeds")
        blocks.append(f"[variants.seeds-{len(look.seeds)}]\n{lines}")
    return "\n".join(blocks)


def _unknown(spec: Spec, table: ClientTable, logged: bool, time: str | None) -> tuple[str, ...]:
    """What the answer cannot know."""
    settings = spec.settings_of(spec.policies[0], spec.seeds[0])
    federation, parts = federation_of(settings), build_settings(settings)
    sentences = [
        f"The data are a stand-in, {federation.name}{_reuse(federation)}. Yours may be harder, or differ in more than "
        "labels.",
        f"Model ({spec.task.name}), learning rate and {spec.rounds} rounds are fixed, the same for all policies, and "
        "not tuned to your task.",
    ]
    if table.histogram is None:
        sentences.append("The table has no labels: every client got the same mix, which hides what labels would tell.")
    if not logged:
        sentences.append("There is no availability log: every client was always available.")
    if parts.faults is None:
        sentences.append("No client failed in the middle of a round, and none sent a wrong update.")
    sentences.append(
        "Rounds are compared, not hours: the speeds of the clients are not known."
        if time is None
        else f"Policies are compared after {time} of your devices' time, with the stand-in's small model. "
        "A larger one takes longer to train and to send."
    )
    return tuple(sentences)


def _reuse(federation: Federation) -> str:
    asked, there = len(federation.indices), len(federation.x)
    if asked <= there:
        return ""
    return f", whose {there:,} examples were reused to make {asked:,}"


def _flower_lines(policy: PolicySpec, budget: int | None) -> str:
    """What a ServerApp needs to use a policy as it was compared."""
    needs = policy_of(policy.to_dict()).needs
    options = "".join(f", {name}={value!r}" for name, value in policy.parameters.items())
    probe = ', probe="evaluate"' if Signal.LOSS in needs else ""
    lines = [
        "import fedpick",
        "from fedpick.flower import with_policy",
        f'strategy = with_policy(FedAvg(), fedpick.policies.get("{policy.name}"{options}), budget={budget}{probe})',
    ]
    if Signal.LABEL_HISTOGRAM in needs:
        lines.append("# each ClientApp tells its labels: answer_probes(app, ..., label_histogram=...)")
    return "\n".join(lines)
