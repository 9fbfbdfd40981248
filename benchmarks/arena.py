"""The arena: every policy with its defaults in every setting of the papers that two cores can do.

    python -m benchmarks.arena run                  # hours; resumes, also on another machine
    python -m benchmarks.arena run --only synthetic-mdf --seeds 100,101 --policies herd,uniform --scores mine.json
    python -m benchmarks.arena table --page docs/arena.md --picture docs/figures/arena.png

A setting is a variant of a spec of a paper with its own data, model, rates, availability and budget; the policies are
those of the registry, each with its defaults. A policy that needs what a setting does not have, such as labels, is left
out there. Scores are compared seed by seed: a difference whose 95 % interval holds 0 is a tie.

The rounds of all runs go into a store, the scores into a small file. A run whose score is in that file is not computed
again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import numpy as np
from scipy.stats import rankdata

from benchmarks.pages import fill
from fedpick import policies
from fedpick.core.errors import FedpickError, unknown_name
from fedpick.experiments.progress import make_progress
from fedpick.experiments.run import refuse_early
from fedpick.experiments.runner import run
from fedpick.experiments.spec import PolicySpec, Spec, load_spec
from fedpick.experiments.store import Store
from fedpick.report import analysis
from fedpick.report.analysis import Difference, Quantity, Results, RunResults
from fedpick.report.figures.canvas import new_figure, save_figure

SPECS = Path(__file__).parent / "specs"
SCORES = Path(__file__).parents[1] / "docs" / "results" / "arena.json"
OURS = "herd"


@dataclass(frozen=True)
class Setting:
    """One setting: a spec, how long, and what counts."""

    spec: str
    rounds: int
    score: str
    """"accuracy": mean test accuracy of the last ten evaluations; "loss": lowest test loss; "objective": the last."""
    only: tuple[str, ...] = ()
    """The policies that take part; empty: all. A setting with few policies does not count for ranks."""
    evaluate_every: int | None = None
    """None: such that there are at least 200 evaluations, if there are as many rounds."""

    def load(self, name: str, chosen: Sequence[str], seeds: Sequence[int]) -> Spec:
        """Return the spec with these policies, each with its defaults."""
        spec = load_spec(SPECS / self.spec)
        entries = tuple(PolicySpec(name=each, label=each) for each in chosen if not self.only or each in self.only)
        every = self.evaluate_every or max(1, self.rounds // 200)
        return replace(
            spec,
            title=f"arena: {name}",
            policies=entries,
            rounds=self.rounds,
            seeds=tuple(seeds),
            guard="mild",
            evaluate_every=every,
            targets=(),
            loss_targets=(),
            local_accuracy_every=None,
            validation_every=None,
            losses_every=every if self.score == "objective" else None,
        )


_CNN = ("uniform", "pow-d", "fedgs", "fedcbs", "clustered-updates", "herd")
"""A round of FedGS's CNN takes two seconds: few policies, few rounds."""
SETTINGS = {
    "fmnist-2spc": Setting("fedcor-fmnist.toml#2SPC", 150, "accuracy"),
    "fmnist-1spc": Setting("fedcor-fmnist.toml#1SPC", 150, "accuracy"),
    "fmnist-dir": Setting("fedcor-fmnist.toml#Dir", 150, "accuracy"),
    "fmnist-dirichlet-0.3": Setting("power-of-choice-fmnist.toml#alpha0.3-c0.03", 150, "accuracy"),
    "poc-synthetic-1": Setting("power-of-choice-synthetic.toml#1", 400, "objective"),
    "poc-synthetic-3": Setting("power-of-choice-synthetic.toml#3", 400, "objective"),
    "quadratic-30": Setting("arena-quadratic.toml", 5000, "objective"),
    "synthetic-idl": Setting("fedgs-table2-synthetic.toml#IDL", 1000, "loss"),
    "synthetic-ldf": Setting("fedgs-table2-synthetic.toml#LDF-0.7", 1000, "loss"),
    "synthetic-mdf": Setting("fedgs-table2-synthetic.toml#MDF-0.7", 1000, "loss"),
    "synthetic-ln": Setting("fedgs-table2-synthetic.toml#LN-0.5", 1000, "loss"),
    "synthetic-sln": Setting("fedgs-table2-synthetic.toml#SLN-0.5", 1000, "loss"),
    "fmnist-cnn-idl": Setting("fedgs-table2-fmnist.toml#IDL", 40, "loss", _CNN, 5),
    "fmnist-cnn-yc": Setting("fedgs-table2-fmnist.toml#YC-0.9", 40, "loss", _CNN, 5),
    "fmnist-cnn-ymf": Setting("fedgs-table2-fmnist.toml#YMF-0.9", 40, "loss", _CNN, 5),
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


@dataclass(frozen=True)
class Score:
    """What a run is judged by; larger is better. None: it has no finite score."""

    by_round: float | None
    """After all rounds."""
    by_models: float | None
    """After as many models as `uniform` sent in the whole run of the same seed."""
    models: float
    """Models sent per round."""


Scores = dict[str, dict[str, dict[int, Score]]]
"""Setting -> policy -> seed -> score."""


def read_scores(file: Path) -> Scores:
    """Read the scores; none if there is no such file."""
    if not file.exists():
        return {}
    return {
        setting: {
            policy: {int(seed): Score(*values) for seed, values in seeds.items()} for policy, seeds in policies.items()
        }
        for setting, policies in json.loads(file.read_text()).items()
    }


def write_scores(file: Path, scores: Scores) -> None:
    """Write the scores, one line per policy, six digits per number."""

    def number(value: float | None) -> float | None:
        return None if value is None else float(f"{value:.6g}")

    settings = []
    for setting in sorted(scores):
        lines = [
            f"  {json.dumps(policy)}: "
            + json.dumps({str(seed): [number(value) for value in astuple(seeds[seed])] for seed in sorted(seeds)})
            for policy, seeds in scores[setting].items()
        ]
        settings.append(f"{json.dumps(setting)}: {{\n" + ",\n".join(lines) + "\n}")
    scratch = file.with_suffix(".new")
    scratch.write_text("{\n" + ",\n".join(settings) + "\n}\n")
    scratch.replace(file)


def _within(results: RunResults, models: float) -> RunResults:
    """The run up to the round in which it had sent this many models; its first round at least."""
    kept = max(1, int(np.searchsorted(results.rounds["models_down"], models, side="right")))
    return replace(results, rounds={name: column[:kept] for name, column in results.rounds.items()})


def judge(kind: str, results: Results, known: Mapping[str, Mapping[int, Score]]) -> dict[str, dict[int, Score]]:
    """Policy -> seed -> score of the finished runs. `known` has `uniform`, where the results do not."""
    wanted = max(each.wanted for policy in results.policies for each in policy.runs)
    thrifty = {seed: score.models * wanted for seed, score in known.get("uniform", {}).items()}
    for policy in results.policies:
        if policy.label == "uniform":
            finished = [each for each in policy.runs if each.complete]
            thrifty |= {each.run.seed: float(each.rounds["models_down"][-1]) for each in finished}
    return {
        policy.label: {
            each.run.seed: Score(
                by_round=_score(kind, each),
                by_models=_score(kind, _within(each, thrifty.get(each.run.seed, np.inf))),
                models=float(each.rounds["models_down"][-1]) / len(each.rounds["round"]),
            )
            for each in policy.runs
            if each.complete
        }
        for policy in results.policies
    }


def compute(names: Sequence[str], chosen: Sequence[str], seeds: Sequence[int], where: str, file: Path) -> None:
    """Run what the file of scores lacks of these settings."""
    scores = read_scores(file)
    with closing(Store(where)) as store:
        for name in names:
            known = scores.setdefault(name, {})
            spec = usable(SETTINGS[name].load(name, chosen, seeds))
            policies = [each for each in spec.policies if set(seeds) - known.get(each.label, {}).keys()]
            missing = [seed for seed in seeds if any(seed not in known.get(each.label, {}) for each in policies)]
            if not policies:
                continue
            report = run(replace(spec, policies=tuple(policies), seeds=tuple(missing)), store, progress=make_progress())
            for run_name, reason in report.failures.items():
                print(f"{name}: {run_name}: {reason}")
            found = judge(SETTINGS[name].score, analysis.load_results(store, report.experiment), known)
            for label, of_seed in found.items():
                known[label] = known.get(label, {}) | of_seed
            write_scores(file, scores)


@dataclass(frozen=True)
class Standing:
    """How a policy did against the best other policy of a setting."""

    mean: float
    rank: float
    """Among all policies; equal ones share the mean of their places."""
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


def standings(scores: Mapping[str, Mapping[int, Score]], value: Callable[[Score], float | None]) -> dict[str, Standing]:
    """Compare every policy with the best of the others, over the seeds that all policies have."""
    seeds = common_seeds(scores)
    values = {label: Quantity(tuple(value(scores[label][seed]) for seed in seeds)) for label in scores}
    means = {label: -np.inf if own.mean is None else own.mean for label, own in values.items()}
    ranks = dict(zip(means, rankdata([-mean for mean in means.values()]), strict=True))

    def compare(label: str, other: str) -> tuple[tuple[float, float] | None, str]:
        pairs = zip(values[label].values, values[other].values, strict=True)
        gaps = tuple(None if own is None or its is None else own - its for own, its in pairs)
        interval = Difference(gaps).interval
        lowest, highest = interval or (0.0, 0.0)
        lost = highest < 0 or not np.isfinite(means[label])
        return interval, "win" if lowest > 0 else "loss" if lost else "tie"

    found = {}
    for label in scores:
        best = max((other for other in scores if other != label), key=lambda other: means[other], default=label)
        interval, verdict = compare(label, best)
        found[label] = Standing(
            mean=means[label],
            rank=float(ranks[label]),
            best=best,
            difference=means[label] - means[best],
            interval=interval,
            verdict=verdict,
            against_ours=compare(label, OURS)[1] if OURS in scores and label != OURS else None,
            models=float(np.mean([scores[label][seed].models for seed in seeds])),
        )
    return found


def common_seeds(scores: Mapping[str, Mapping[int, Score]]) -> list[int]:
    """The seeds that every policy of a setting has finished."""
    return sorted(set.intersection(*(set(seeds) for seeds in scores.values())))


@dataclass(frozen=True)
class Arena:
    """The standings of all settings."""

    by_round: Mapping[str, Mapping[str, Standing]]
    by_models: Mapping[str, Mapping[str, Standing]]
    """The same, but every policy stops when it has sent as many models as `uniform` in the whole run."""
    seeds: Mapping[str, Sequence[int]]
    reduced: Mapping[str, Mapping[str, Standing]]
    """After all rounds, of the settings in which few policies take part."""

    @property
    def labels(self) -> list[str]:
        """The policies, best mean rank first."""
        found = {label for standing in self.by_round.values() for label in standing}
        return sorted(found, key=lambda label: (mean_rank(self.by_round, label), label))


def mean_rank(settings: Mapping[str, Mapping[str, Standing]], label: str) -> float:
    """The mean rank of a policy over the settings that it took part in."""
    return float(np.mean([found[label].rank for found in settings.values() if label in found]))


def arena_of(scores: Scores) -> Arena:
    """Compare the policies in every setting in which all of them have a seed in common."""
    usable = {name: scores[name] for name in SETTINGS if scores.get(name) and common_seeds(scores[name])}
    by_round = {name: standings(of, lambda score: score.by_round) for name, of in usable.items()}
    by_models = {name: standings(of, lambda score: score.by_models) for name, of in usable.items()}
    full = [name for name in usable if not SETTINGS[name].only]
    return Arena(
        {name: by_round[name] for name in full},
        {name: by_models[name] for name in full},
        {name: common_seeds(of) for name, of in usable.items()},
        {name: by_round[name] for name in usable if SETTINGS[name].only},
    )


def tables(arena: Arena) -> dict[str, str]:
    """The tables of the page as Markdown, by the names of their places."""
    named = {
        "leaderboard": _leaderboard(arena),
        "best": _against_the_best(arena, OURS),
        "scores": _all_scores(arena),
    }
    return {name: "\n".join(lines) for name, lines in named.items()}


def _leaderboard(arena: Arena) -> list[str]:
    lines = [
        f"| policy | mean rank | worst rank | against the best other: wins / ties / losses | against `{OURS}` | "
        "models per round | by models sent: mean rank | against the best other |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label in arena.labels:
        own = [found[label] for found in arena.by_round.values() if label in found]
        lines.append(
            f"| `{label}` | {mean_rank(arena.by_round, label):.1f} | {max(each.rank for each in own):.3g} | "
            f"{_count(each.verdict for each in own)} | {_count(each.against_ours for each in own)} | "
            f"{np.mean([each.models for each in own]):.1f} | {mean_rank(arena.by_models, label):.1f} | "
            f"{_count(found[label].verdict for found in arena.by_models.values() if label in found)} |"
        )
    return lines


def _all_scores(arena: Arena) -> list[str]:
    lines: list[str] = []
    for title, settings in (
        ("After all rounds", arena.by_round),
        ("After as many models", arena.by_models),
        ("After all rounds, few policies", arena.reduced),
    ):
        if not settings:
            continue
        lines += [f"{title} (accuracies in per cent; = ties with the best other policy, + wins):", ""]
        lines += ["| policy | " + " | ".join(settings) + " |", "|---" * (1 + len(settings)) + "|"]
        for label in (label for label in arena.labels if any(label in found for found in settings.values())):
            cells = [_cell(name, found[label]) if label in found else "" for name, found in settings.items()]
            lines.append(f"| `{label}` | " + " | ".join(cells) + " |")
        lines.append("")
    return lines[:-1]


def _against_the_best(arena: Arena, label: str) -> list[str]:
    """A table: one policy and the best of the others, setting by setting."""
    lines = [
        f"| setting | seeds | score | `{label}` | best other | its score | difference [95 % interval] | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in {**arena.by_round, **arena.reduced}.items():
        if label not in found:
            continue
        own, kind = found[label], SETTINGS[name].score
        factor = 100.0 if kind == "accuracy" else -1.0
        ends = "" if own.interval is None else " [{:+.3g}, {:+.3g}]".format(*sorted(factor * x for x in own.interval))
        lines.append(
            f"| {name} | {len(arena.seeds[name])} | {kind} | {factor * own.mean:.4g} | `{own.best}` | "
            f"{factor * found[own.best].mean:.4g} | {factor * own.difference:+.3g}{ends} | {own.verdict} |"
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
    parser.add_argument("--store", default="results/arena.sqlite", help="the rounds of all runs")
    parser.add_argument("--scores", type=Path, default=SCORES, help="the scores of finished runs")
    parser.add_argument("--page", type=Path, help="write the tables into their places in this Markdown file")
    parser.add_argument("--picture", type=Path, help="draw the ranks into this file, .png or .svg")
    given = parser.parse_args()
    names = given.only.split(",")
    for name in names:
        if name not in SETTINGS:
            raise SystemExit(str(unknown_name("setting of the arena", name, SETTINGS)))
    if given.command == "run":
        seeds = [int(seed) for seed in given.seeds.split(",")]
        compute(names, given.policies.split(","), seeds, given.store, given.scores)
    arena = arena_of(read_scores(given.scores))
    found = tables(arena)
    if given.page is None:
        print("\n\n".join(found.values()))
    else:
        given.page.write_text(fill(given.page.read_text(), found))
        print(given.page)
    if given.picture is not None:
        print(draw(arena, given.picture))


if __name__ == "__main__":
    main()
