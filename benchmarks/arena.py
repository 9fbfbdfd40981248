"""The arena: every policy with its defaults in every setting of the papers that two cores can do.

    python -m benchmarks.arena run --seeds 0,1,2,3,4,5,6,7,8,9      # hours; the same command resumes
    python -m benchmarks.arena run --only synthetic-mdf,fmnist-2spc --seeds 100,101 --policies herd,uniform
    python -m benchmarks.arena table --output docs/arena.md

A setting is a variant of a spec of a paper with its own data, model, rates, availability and budget; the policies are
those of the registry, each with its defaults. A policy that needs what a setting does not have, such as labels, is left
out there. Scores are compared seed by seed: a difference whose 95 % interval holds 0 is a tie.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedpick import policies
from fedpick.core.errors import FedpickError, unknown_name
from fedpick.experiments.progress import make_progress
from fedpick.experiments.run import refuse_early
from fedpick.experiments.runner import run
from fedpick.experiments.spec import PolicySpec, Spec, load_spec
from fedpick.experiments.store import Experiment, Store, open_store
from fedpick.report import analysis
from fedpick.report.analysis import PolicyResults, Results, RunResults
from fedpick.report.figures.canvas import new_figure, save_figure

SPECS = Path(__file__).parent / "specs"
STORE = "results/arena.sqlite"
OURS = "herd"


@dataclass(frozen=True)
class Setting:
    """One setting: a spec, how long, and what counts."""

    spec: str
    rounds: int
    score: str
    """"accuracy": mean test accuracy of the last ten evaluations; "loss": lowest test loss; "objective": the last."""

    def load(self, name: str, chosen: Sequence[str], seeds: Sequence[int]) -> Spec:
        """Return the spec with these policies, each with its defaults."""
        spec = load_spec(SPECS / self.spec)
        entries = tuple(PolicySpec(name=each, label=each) for each in chosen)
        every = max(1, self.rounds // 200)
        return replace(
            spec,
            title=f"arena: {name}",
            policies=entries,
            rounds=self.rounds,
            seeds=tuple(seeds),
            evaluate_every=every,
            targets=(),
            loss_targets=(),
            local_accuracy_every=None,
            validation_every=None,
            losses_every=every if self.score == "objective" else None,
        )


SETTINGS = {
    "fmnist-2spc": Setting("fedcor-fmnist.toml#2SPC", 150, "accuracy"),
    "fmnist-1spc": Setting("fedcor-fmnist.toml#1SPC", 150, "accuracy"),
    "fmnist-dir": Setting("fedcor-fmnist.toml#Dir", 150, "accuracy"),
    "fmnist-dirichlet-0.3": Setting("power-of-choice-fmnist.toml#alpha0.3-c0.03", 150, "accuracy"),
    "poc-synthetic-1": Setting("power-of-choice-synthetic.toml#1", 400, "objective"),
    "poc-synthetic-3": Setting("power-of-choice-synthetic.toml#3", 400, "objective"),
    "quadratic-30": Setting("power-of-choice-quadratic.toml#30-brief", 5000, "objective"),
    "synthetic-idl": Setting("fedgs-table2-synthetic.toml#IDL", 1000, "loss"),
    "synthetic-ldf": Setting("fedgs-table2-synthetic.toml#LDF-0.7", 1000, "loss"),
    "synthetic-mdf": Setting("fedgs-table2-synthetic.toml#MDF-0.7", 1000, "loss"),
    "synthetic-ln": Setting("fedgs-table2-synthetic.toml#LN-0.5", 1000, "loss"),
    "synthetic-sln": Setting("fedgs-table2-synthetic.toml#SLN-0.5", 1000, "loss"),
    "fmnist-cnn-idl": Setting("fedgs-table2-fmnist.toml#IDL", 60, "loss"),
    "fmnist-cnn-yc": Setting("fedgs-table2-fmnist.toml#YC-0.9", 60, "loss"),
    "fmnist-cnn-ymf": Setting("fedgs-table2-fmnist.toml#YMF-0.9", 60, "loss"),
    "cafed-synthetic": Setting("cafed-synthetic.toml", 150, "accuracy"),
    "cafed-mnist": Setting("cafed-fig1.toml#mnist", 100, "accuracy"),
    "cafed-clusters": Setting("cafed-fig5.toml#between", 100, "accuracy"),
    "phones-hour": Setting("cafed-phones.toml#hour", 150, "accuracy"),
}


def _score(kind: str, results: RunResults) -> float | None:
    """One number per run, larger is better."""
    if kind == "accuracy":
        return analysis.final_accuracy(results, 10)
    if kind == "loss":
        lowest = analysis.lowest_loss(results)
        return None if lowest is None else -lowest
    measured = results.rounds["objective"]
    measured = measured[np.isfinite(measured)]
    return -float(measured[-1]) if len(measured) else None


def usable(spec: Spec) -> Spec:
    """Leave out the policies that this setting cannot serve."""
    kept = []
    for policy in spec.policies:
        try:
            refuse_early([spec.settings_of(policy, spec.seeds[0])])
        except FedpickError:
            continue
        kept.append(policy)
    return replace(spec, policies=tuple(kept))


def compute(names: Sequence[str], chosen: Sequence[str], seeds: Sequence[int], where: str) -> None:
    """Run what is missing of these settings."""
    with closing(Store(where)) as store:
        for name in names:
            spec = usable(SETTINGS[name].load(name, chosen, seeds))
            report = run(spec, store, progress=make_progress())
            for run_name, reason in report.failures.items():
                print(f"{name}: {run_name}: {reason}")


@dataclass(frozen=True)
class Standing:
    """How a policy did against the best other policy of a setting."""

    mean: float
    rank: float
    best: str
    """The best other policy."""
    difference: float
    """The score minus that of the best other policy, mean over the seeds; above 0 is better."""
    interval: tuple[float, float] | None
    """Its paired 95 % interval; None for one seed."""
    verdict: str
    """The result against the best other policy: "win", "tie" or "loss"."""
    against_ours: str | None
    """The same against `herd`; None where it did not take part."""
    models: float
    """Models sent per round."""


def _verdict(interval: tuple[float, float] | None) -> str:
    lowest, highest = interval or (0.0, 0.0)
    return "win" if lowest > 0 else "loss" if highest < 0 else "tie"


def _within(results: RunResults, models: float) -> RunResults:
    """The run up to the round in which it had sent this many models; its first round at least."""
    kept = max(1, int(np.searchsorted(results.rounds["models_down"], models, side="right")))
    return replace(results, rounds={name: column[:kept] for name, column in results.rounds.items()})


def standings(kind: str, results: Results, models: float = np.inf) -> dict[str, Standing]:
    """Compare every policy with the best of the others, seed by seed, each after sending at most `models` models."""

    def measure(each: RunResults) -> float | None:
        return _score(kind, _within(each, models))

    def mean_of(policy: PolicyResults) -> float:
        mean = analysis.over_seeds(policy, measure).mean
        return -np.inf if mean is None else mean

    means = {policy.label: mean_of(policy) for policy in results.policies}
    ordered = sorted(means.values(), reverse=True)
    found = {}
    for policy in results.policies:
        others = [other for other in results.policies if other is not policy] or [policy]
        best = max(others, key=lambda other: means[other.label])
        interval = analysis.paired_difference(policy, best, measure).interval
        own = [analysis.paired_difference(policy, other, measure).interval for other in others if other.label == OURS]
        sent = [float(each.rounds["models_down"][-1]) / len(each.rounds["round"]) for each in policy.runs]
        found[policy.label] = Standing(
            mean=means[policy.label],
            rank=1.0 + ordered.index(means[policy.label]),
            best=best.label,
            difference=means[policy.label] - means[best.label],
            interval=interval,
            verdict=_verdict(interval) if np.isfinite(means[policy.label]) else "loss",
            against_ours=None if not own else _verdict(own[0]) if np.isfinite(means[policy.label]) else "loss",
            models=float(np.mean(sent)),
        )
    return found


def models_of_uniform(results: Results) -> float:
    """What `uniform` sent in the whole run, mean of the seeds; without it, what the thriftiest policy sent."""
    sent = {
        policy.label: float(np.mean([each.rounds["models_down"][-1] for each in policy.runs]))
        for policy in results.policies
    }
    return sent.get("uniform", min(sent.values()))


@dataclass(frozen=True)
class Arena:
    """The standings of all settings in a store."""

    by_round: Mapping[str, Mapping[str, Standing]]
    by_models: Mapping[str, Mapping[str, Standing]]
    """The same, but every policy stops when it has sent as many models as `uniform` in the whole run."""
    seeds: tuple[int, ...]

    @property
    def labels(self) -> list[str]:
        """The policies, best mean rank first."""
        found = {label for standing in self.by_round.values() for label in standing}
        return sorted(found, key=lambda label: (mean_rank(self.by_round, label), label))


def mean_rank(settings: Mapping[str, Mapping[str, Standing]], label: str) -> float:
    """The mean rank of a policy over the settings that it took part in."""
    return float(np.mean([found[label].rank for found in settings.values() if label in found]))


def load(where: str) -> Arena:
    """Read the settings that every policy has finished, each with the most seeds."""
    by_round: dict[str, dict[str, Standing]] = {}
    by_models: dict[str, dict[str, Standing]] = {}
    seeds: set[int] = set()
    with closing(open_store(where)) as store:
        finished: dict[str, tuple[int, Experiment]] = {}  # setting -> its experiment with the most finished runs
        for experiment in store.experiments():
            name, runs = experiment.title.removeprefix("arena: "), store.runs(experiment.id)
            if all(each.status == "done" for each in runs) and len(runs) > finished.get(name, (0, None))[0]:
                finished[name] = (len(runs), experiment)
        for name in SETTINGS:
            if name not in finished:
                continue
            results = analysis.load_results(store, finished[name][1])
            seeds |= {each.run.seed for policy in results.policies for each in policy.runs}
            kind = SETTINGS[name].score
            by_round[name] = standings(kind, results)
            by_models[name] = standings(kind, results, models_of_uniform(results))
    return Arena(by_round, by_models, tuple(sorted(seeds)))


def leaderboard(arena: Arena) -> str:
    """The tables of all settings in the store, as Markdown."""
    lines = [f"Settings: {', '.join(arena.by_round)}. Seeds: {', '.join(map(str, arena.seeds))}.", ""]
    lines += [
        f"| policy | mean rank | worst rank | against the best other: wins / ties / losses | against `{OURS}` | "
        "models per round | by models sent: mean rank | against the best other |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label in arena.labels:
        own = [found[label] for found in arena.by_round.values() if label in found]
        lines.append(
            f"| `{label}` | {mean_rank(arena.by_round, label):.1f} | {max(each.rank for each in own):.0f} | "
            f"{_count(each.verdict for each in own)} | {_count(each.against_ours for each in own)} | "
            f"{np.mean([each.models for each in own]):.1f} | {mean_rank(arena.by_models, label):.1f} | "
            f"{_count(found[label].verdict for found in arena.by_models.values() if label in found)} |"
        )
    lines += ["", *_against_the_best(arena, OURS)]
    for title, settings in (("After all rounds", arena.by_round), ("After as many models", arena.by_models)):
        lines += ["", f"{title} (accuracies in per cent; = ties with the best other policy, + wins):", ""]
        lines += ["| policy | " + " | ".join(settings) + " |", "|---" * (1 + len(settings)) + "|"]
        for label in arena.labels:
            cells = [_cell(name, found[label]) if label in found else "" for name, found in settings.items()]
            lines.append(f"| `{label}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _against_the_best(arena: Arena, label: str) -> list[str]:
    """A table: one policy and the best of the others, setting by setting."""
    lines = [
        f"`{label}` and the best other policy. Accuracies are in points; of losses, the smaller one is better:",
        "",
        f"| setting | score | `{label}` | best other | its score | difference [95 % interval] | |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in arena.by_round.items():
        if label not in found:
            continue
        own, kind = found[label], SETTINGS[name].score
        factor = 100.0 if kind == "accuracy" else -1.0
        ends = "" if own.interval is None else " [{:+.3g}, {:+.3g}]".format(*sorted(factor * x for x in own.interval))
        lines.append(
            f"| {name} | {kind} | {factor * own.mean:.4g} | `{own.best}` | {factor * found[own.best].mean:.4g} | "
            f"{factor * own.difference:+.3g}{ends} | {own.verdict} |"
        )
    return lines


def _cell(setting: str, standing: Standing) -> str:
    if not np.isfinite(standing.mean):
        return "diverged"
    shown = f"{100 * standing.mean:.1f}" if SETTINGS[setting].score == "accuracy" else f"{-standing.mean:.4g}"
    return shown + {"win": " +", "tie": " =", "loss": ""}[standing.verdict]


def _count(verdicts: Iterable[str | None]) -> str:
    known = [verdict for verdict in verdicts if verdict is not None]
    return " / ".join(str(known.count(kind)) for kind in ("win", "tie", "loss")) if known else ""


def draw(arena: Arena, path: Path) -> Path:
    """Draw the rank of every policy in every setting."""
    settings, labels = list(arena.by_round), arena.labels
    ranks = np.array(
        [
            [arena.by_round[name][label].rank if label in arena.by_round[name] else np.nan for name in settings]
            for label in labels
        ]
    )
    figure = new_figure(2.5 + 0.75 * len(settings), 1.5 + 0.28 * len(labels))
    axis = figure.add_subplot()
    axis.imshow(ranks, cmap="viridis_r", aspect="auto")
    for row, column in np.argwhere(np.isfinite(ranks)):
        verdict = arena.by_round[settings[column]][labels[row]].verdict
        colour = "white" if ranks[row, column] > 0.6 * len(labels) else "black"
        text = f"{ranks[row, column]:.0f}" + ("" if verdict == "loss" else " =" if verdict == "tie" else " +")
        axis.text(column, row, text, ha="center", va="center", color=colour, fontsize=7)
    axis.set_xticks(range(len(settings)), settings, rotation=40, ha="right")
    axis.set_yticks(range(len(labels)), labels)
    axis.set_title("Rank in every setting;  = ties with the best other policy,  + wins")
    return save_figure(figure, path, dpi=120)


def main() -> None:
    """Run the arena, or print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("--only", default=",".join(SETTINGS), help="settings, by commas")
    parser.add_argument("--policies", default=",".join(policies.names()), help="policies, by commas")
    parser.add_argument("--seeds", default="0,1,2,3,4,5,6,7,8,9")
    parser.add_argument("--store", default=STORE)
    parser.add_argument("--output", type=Path, help="write the tables into this file")
    parser.add_argument("--picture", type=Path, help="draw the ranks into this file, .png or .svg")
    given = parser.parse_args()
    names = given.only.split(",")
    for name in names:
        if name not in SETTINGS:
            raise SystemExit(str(unknown_name("setting of the arena", name, SETTINGS)))
    if given.command == "run":
        compute(names, given.policies.split(","), [int(seed) for seed in given.seeds.split(",")], given.store)
    arena = load(given.store)
    text = leaderboard(arena)
    print(text)
    if given.output is not None:
        given.output.write_text(text)
    if given.picture is not None:
        print(draw(arena, given.picture))


if __name__ == "__main__":
    main()
