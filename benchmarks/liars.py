"""How many places liars capture, and what they cost: the tables of docs/results/liars.md.

    python -m benchmarks.liars run --seeds 10                   # appends to docs/results/liars.jsonl; resumes
    python -m benchmarks.liars run --data fmnist --seeds 3
    python -m benchmarks.liars tables                           # writes the tables into docs/results/liars.md
    python -m benchmarks.liars sybils --seeds 10                # fresh identities in every round; prints a table
    python -m benchmarks.liars factors --seeds 5                # smaller lies, seeds 100 and up; prints a table
    python -m benchmarks.liars small --seeds 10                 # honest clients with little data; prints a table
    python -m benchmarks.liars sizes                            # a false number of examples; prints a table
    python -m benchmarks.liars cost                             # the guard's time for a million clients; a table

Two shards per client, 5 clients per round, 100 rounds. Accuracy is the mean over the last ten rounds. "absent" is no
attack: the clients that would lie are never available, so that no guard could do better without their data. All runs of
one call share one process and its compiled programs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.pages import fill
from fedpick import Clients, Outcome, Session, aggregation_weights, data, policies
from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.data.types import Federation
from fedpick.sim import Attacks, LocalTraining, ServerStep, Simulator, simulate

__all__ = ["CONDITIONS", "POLICIES", "cost", "main", "one_run", "sizes", "small", "sybils", "tables"]

POLICIES = {
    # cpow-d is pow-d here: no client holds more losses than one mini-batch. tifl hears no loss.
    "digits": ("uniform", "pow-d", "rpow-d", "adapow-d", "afl", "fedcor", "fedgp", "oort", "ca-fed", "herd"),
    "fmnist": ("pow-d", "fedcor", "herd"),
}
CLIENTS = {"digits": 50, "fmnist": 100}
LOCAL = {
    "digits": LocalTraining(lr=0.05, epochs=3, batch_size=8),
    "fmnist": LocalTraining(lr=0.005, epochs=3, batch_size=64, weight_decay=1e-4),
}
CONDITIONS: tuple[dict[str, Any], ...] = (
    {"attack": None, "share": 0.2, "guard": "off"},
    {"attack": None, "share": 0.2, "guard": "strict"},
    *(
        {"attack": attack, "share": share, "guard": "strict"}
        for share in (0.2, 0.3, 0.1)
        for attack in ("inflate-flip", "inflate")
    ),
    *({"attack": attack, "share": 0.2, "guard": "off"} for attack in ("inflate-flip", "inflate")),
    *({"attack": "absent", "share": share, "guard": "off"} for share in (0.2, 0.3, 0.1)),
)
"""What is measured for every policy, and more of it on the digits."""
MORE: tuple[dict[str, Any], ...] = (
    *({"attack": attack, "share": 0.2, "guard": "mild"} for attack in (None, "inflate", "inflate-flip")),
    *(
        {"attack": attack, "share": 0.2, "guard": guard}
        for attack in ("inflate-drop", "scale", "flip-scale")
        for guard in ("strict", "off")
    ),
    *(
        {"attack": attack, "share": share, "guard": "off"}
        for share in (0.3, 0.1)
        for attack in ("inflate-flip", "inflate")
    ),
)
ROBUST_POLICIES = ("uniform", "pow-d", "herd")
RULES = ("mean", "trimmed-mean", "multi-krum", "geometric-median")
ROBUST: tuple[dict[str, Any], ...] = tuple(
    {"attack": attack, "share": 0.2, "guard": "strict", "aggregation": rule}
    for rule in RULES
    for attack in (None, "flip")
)
"""Flipped updates with true losses, and what the rules cost without an attack."""
_FILE = Path(__file__).parents[1] / "docs" / "results" / "liars.jsonl"
PAGE = _FILE.with_suffix(".md")
_LAST = 10
_HARD = 0.2
"""Of the clients, those with the largest mean loss in the honest run: the hard data."""


@cache
def _federation(name: str, seed: int) -> Federation:
    if name == "digits-unequal":
        return data.partition(
            data.load("digits"), "dirichlet-lognormal", num_clients=CLIENTS["digits"], sigma=1.0, seed=seed, holdout=0.2
        )
    return data.partition(data.load(name), "2spc", num_clients=CLIENTS[name], seed=seed, holdout=0.2)


@dataclass(frozen=True)
class _There:
    """The same clients are available in every round."""

    clients: BoolArray

    def mask(self, round: int) -> BoolArray:
        """(N,) who is available."""
        return self.clients


def one_run(
    policy: str, condition: dict[str, Any], seed: int, name: str = "digits", rounds: int = 100
) -> dict[str, Any]:
    """Run one policy under one condition; return what the tables need."""
    federation, kind = _federation(name, seed), condition["attack"]
    lies = kind not in (None, "absent")
    attacks = Attacks(kind=kind if lies else "inflate", share=condition["share"], factor=condition.get("factor", 100.0))
    simulator = Simulator(
        federation,
        "mlp",
        local=LOCAL[name.partition("-")[0]],
        attacks=attacks if lies else None,
        server=ServerStep(aggregation=condition.get("aggregation", "mean")),
        losses_on="validation",
        seed=seed,
    )
    options = {"provides": simulator.provides, "guard": condition["guard"]}
    session = Session(policies.get(policy), simulator.clients, seed=seed, **options)
    count = federation.num_clients
    places, losses = np.zeros(count), np.zeros(count)
    ever, accuracies = np.zeros(count, bool), list[float]()
    honest = kind is None and condition["guard"] == "off"
    lying = attacks.liars(seed, count) & (kind is not None)
    there = _There(~lying) if kind == "absent" else None
    every = 10 if honest else None
    for record in simulate(simulator, session, rounds=rounds, budget=5, losses_every=every, availability=there):
        places[record.selection.clients] += 1
        ever |= session.credibility < 0.5
        accuracies.append(record.test_accuracy or 0.0)
        losses += 0.0 if record.losses is None else record.losses
    return {
        "data": name,
        "policy": policy,
        "seed": seed,
        **condition,
        "accuracy": round(float(np.mean(accuracies[-_LAST:])), 5),
        **({"places": places.astype(int).tolist()} if kind is None else {}),
        **({"losses": np.round(losses, 3).tolist()} if honest else {}),
        "captured": round(float(places[lying].sum() / places.sum()), 4),
        "found": float(ever[lying].mean()) if lying.any() else None,
        "false_alarms": round(float(ever[~lying].mean()), 4),
    }


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    names = ("data", "policy", "seed", "attack", "share", "guard")
    return (*(row[name] for name in names), row.get("aggregation", "mean"))


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def run(file: Path, name: str, seeds: int) -> None:
    """Compute what the file lacks, condition by condition."""
    done = {_key(row) for row in _rows(file)}
    wanted = [(condition, POLICIES[name]) for condition in CONDITIONS]
    if name == "digits":
        wanted += [(condition, POLICIES[name]) for condition in MORE]
        wanted += [(condition, ROBUST_POLICIES) for condition in ROBUST]
    for condition, chosen in wanted:
        for seed in range(seeds):
            for policy in chosen:
                if (key := _key({"data": name, "policy": policy, "seed": seed, **condition})) not in done:
                    done.add(key)
                    row = one_run(policy, condition, seed, name)
                    with file.open("a") as out:
                        out.write(json.dumps(row) + "\n")


def _some(rows: list[dict[str, Any]], policy: str, **condition: Any) -> list[dict[str, Any]]:
    wanted = {"policy": policy, "aggregation": "mean", **condition}
    return [row for row in rows if all({"aggregation": "mean", **row}[key] == wanted[key] for key in wanted)]


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    return float(np.mean([row[name] for row in rows])) if rows else float("nan")


def _paired(rows: list[dict[str, Any]], base: list[dict[str, Any]]) -> str:
    """Difference of accuracy in points over the seeds that both have: mean and 95 % interval."""
    mine, theirs = ({row["seed"]: row["accuracy"] for row in each} for each in (rows, base))
    gap = [100 * (mine[seed] - theirs[seed]) for seed in sorted(set(mine) & set(theirs))]
    if len(gap) < 2:
        return "".join(f"{value:+.1f}" for value in gap)
    half = stats.t.ppf(0.975, len(gap) - 1) * np.std(gap, ddof=1) / np.sqrt(len(gap))
    return f"{np.mean(gap):+.1f} ± {half:.1f}"


def _hard_share(rows: list[dict[str, Any]], base: list[dict[str, Any]]) -> float:
    """Places of the hard clients over their places in the honest, unguarded run of the same seed."""
    mine, theirs = ({row["seed"]: row for row in each} for each in (rows, base))
    taken = {"mine": 0, "theirs": 0}
    for seed in set(mine) & set(theirs):
        losses = theirs[seed]["losses"]
        hard = np.argsort(losses)[-round(_HARD * len(losses)) :]
        taken["mine"] += np.take(mine[seed]["places"], hard).sum()
        taken["theirs"] += np.take(theirs[seed]["places"], hard).sum()
    return taken["mine"] / taken["theirs"] if taken["theirs"] else float("nan")


def tables(rows: list[dict[str, Any]]) -> dict[str, str]:
    """The tables of the page in Markdown, by the names of their places."""
    named = {}
    for name in POLICIES:
        own = [row for row in rows if row["data"] == name]
        for table, lines in _tables_of(own, name).items():
            named[f"{name}: {table}"] = "\n".join(lines)
    return named


def _tables_of(rows: list[dict[str, Any]], name: str) -> dict[str, list[str]]:
    """The tables of one data set."""

    def found(policy: str, attack: str | None, guard: str, share: float = 0.2) -> list[dict[str, Any]]:
        return _some(rows, policy, attack=attack, guard=guard, share=share)

    def cell(policy: str, attack: str, guard: str, share: float = 0.2) -> str:
        these = found(policy, attack, guard, share)
        places = "" if attack == "absent" else f"x {_mean(these, 'captured') / share:.2f}, "
        return places + _paired(these, found(policy, None, "off"))

    def beyond(policy: str, attack: str, share: float) -> str:
        """The points that the guard costs on top of the missing data."""
        return _paired(found(policy, attack, "strict", share), found(policy, "absent", "off", share))

    def honest(policy: str) -> list[str]:
        base, strict = found(policy, None, "off"), found(policy, None, "strict")
        mild = [_paired(found(policy, None, "mild"), base)] if name == "digits" else []
        return [
            f"{100 * _mean(base, 'accuracy'):.1f}",
            *mild,
            _paired(strict, base),
            f"x {_hard_share(strict, base):.2f}",
            f"{100 * _mean(strict, 'false_alarms'):.1f}",
            f"{len(strict)}",
        ]

    def table(columns: list[str], lines: dict[str, list[str]]) -> list[str]:
        head = [f"| policy | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
        return head + [f"| {policy} | {' | '.join(cells)} |" for policy, cells in lines.items()]

    everyone, shares, lies = POLICIES[name], (0.1, 0.2, 0.3), ("inflate", "inflate-flip")
    percents = [f"{100 * share:.0f} %" for share in shares]
    columns = ["honest %", *(["mild: points"] if name == "digits" else []), "strict: points"]
    columns += ["hard clients' places", "false alarms %", "seeds"]
    out = {
        "honest": table(columns, {each: honest(each) for each in everyone}),
        "absent": table(percents, {each: [cell(each, "absent", "off", s) for s in shares] for each in everyone}),
        "beyond": table(
            [f"`{attack}`, {percent}" for attack in lies for percent in percents],
            {each: [beyond(each, attack, s) for attack in lies for s in shares] for each in everyone},
        ),
    }
    for attack in lies:
        wanted = [("off", share) for share in (shares if name == "digits" else (0.2,))]
        wanted += [("mild", 0.2)] if name == "digits" else []
        wanted += [("strict", share) for share in shares]
        out[attack] = table(
            [f"{_SHOWN[guard]}, {100 * share:.0f} %" for guard, share in wanted],
            {each: [cell(each, attack, guard, share) for guard, share in wanted] for each in everyone},
        )
    if name == "digits":
        others = [(attack, guard) for attack in ("inflate-drop", "scale", "flip-scale") for guard in ("off", "strict")]
        out["others"] = table(
            [f"`{attack}`, {_SHOWN[guard]}" for attack, guard in others],
            {each: [cell(each, attack, guard) for attack, guard in others] for each in everyone},
        )
        out["flip"] = table(list(RULES), {each: _robust(rows, each) for each in ROBUST_POLICIES})
    return out


_SHOWN = {"off": "no guard", "mild": "mild", "strict": "strict"}


def _robust(rows: list[dict[str, Any]], policy: str) -> list[str]:
    """Points of accuracy of every rule of the server step, without an attack and with flipped updates."""
    base = _some(rows, policy, attack=None, guard="off")
    return [
        ", ".join(
            _paired(_some(rows, policy, attack=attack, guard="strict", aggregation=rule), base)
            for attack in (None, "flip")
        )
        for rule in RULES
    ]


_SYBILS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("uniform", {}),
    ("rpow-d", {}),
    ("rpow-d", {"num_candidates": "all"}),
    ("fedgs", {"alpha": 0.0}),
    ("f3ast", {}),
    ("refl", {}),
    ("tifl", {}),
    ("herd", {}),
)


def sybils(seeds: int) -> Iterator[str]:
    """5 of 30 clients come back under a fresh identity in each of 60 rounds: their share of the places, in percent."""
    yield "| policy | no guard | strict |"
    yield "|---|---|---|"
    for name, options in _SYBILS:
        cells = []
        for guard in ("off", "strict"):
            shares = []
            for seed in range(seeds):
                dealt = data.partition(data.load("digits"), "2spc", num_clients=30, seed=seed)
                attacks = Attacks(kind="sybils", share=5 / 30)
                simulator = Simulator(dealt, "logistic", local=LOCAL["digits"], attacks=attacks, seed=seed)
                session = Session(policies.get(name, **options), simulator.clients, seed=seed, guard=guard)
                rounds = simulate(simulator, session, rounds=60, budget=5, evaluate_every=None)
                chosen = np.concatenate([record.selection.clients for record in rounds][1:])
                shares.append(100 * simulator.lying[chosen].mean())
            cells.append(f"{np.mean(shares):.0f}")
        yield f"| {name} {options or ''} | {' | '.join(cells)} |"


_FACTORS = (3.0, 10.0, 100.0)


def factors(seeds: int) -> Iterator[str]:
    """`inflate` by several factors, 20 % of liars: places of liars over their fair share, and points of accuracy."""
    yield f"| policy | guard | hard clients' places | {' | '.join(f'factor {factor:g}' for factor in _FACTORS)} |"
    yield "|---|---|---|" + "---|" * len(_FACTORS)
    chosen = range(100, 100 + seeds)
    for policy in ("pow-d", "rpow-d", "adapow-d", "afl", "fedcor", "fedgp", "oort"):
        base = [one_run(policy, {"attack": None, "share": 0.2, "guard": "off"}, seed) for seed in chosen]
        for guard in ("off", "mild", "strict"):
            honest = [one_run(policy, {"attack": None, "share": 0.2, "guard": guard}, seed) for seed in chosen]
            cells = []
            for factor in _FACTORS:
                lie = {"attack": "inflate", "share": 0.2, "guard": guard, "factor": factor}
                these = [one_run(policy, lie, seed) for seed in chosen]
                cells.append(f"x {_mean(these, 'captured') / 0.2:.2f}, {_paired(these, base)}")
            yield f"| {policy} | {guard} | x {_hard_share(honest, base):.2f} | {' | '.join(cells)} |"


def small(seeds: int) -> Iterator[str]:
    """Honest clients of very unequal sizes, strict guard: what the tenth with the least data gets."""
    yield "| policy | places of the ten smallest clients | places of the ten largest | points | false alarms % |"
    yield "|---|---|---|---|---|"
    for policy in POLICIES["digits"]:
        runs: dict[str, list[dict[str, Any]]] = {
            guard: [
                one_run(policy, {"attack": None, "share": 0.2, "guard": guard}, seed, "digits-unequal")
                for seed in range(seeds)
            ]
            for guard in ("off", "strict")
        }
        ratios = []
        for ends in (slice(None, 10), slice(-10, None)):
            taken = {
                guard: sum(np.take(row["places"], _by_size(row["seed"])[ends]).sum() for row in rows)
                for guard, rows in runs.items()
            }
            ratios.append(f"x {taken['strict'] / taken['off']:.2f}")
        alarms = 100 * _mean(runs["strict"], "false_alarms")
        yield f"| {policy} | {' | '.join(ratios)} | {_paired(runs['strict'], runs['off'])} | {alarms:.1f} |"


def _by_size(seed: int) -> IntArray:
    """The clients of unequal size, the smallest first."""
    return np.argsort(_federation("digits-unequal", seed).sizes, kind="stable")


def sizes(rounds: int = 200) -> Iterator[str]:
    """One of 21 equal clients says that it has 2^53 examples: its places over its fair share, and its weight.

    No model is trained: all losses and updates are alike.
    """
    yield "| policy | no guard | mild | strict |"
    yield "|---|---|---|---|"
    table, k = Clients(num_examples=np.append(np.full(20, 100.0), 2.0**53)), 5
    for name in ("uniform", "md", "pow-d", "fedcor", "herd"):
        cells = []
        for guard in ("off", "mild", "strict"):
            session = Session(policies.get(name), table, guard=guard)
            session.watch = None
            rng, places, weight = np.random.default_rng(0), 0, 0.0
            for index in range(rounds):
                selection = session.ask(budget=k, measure=lambda probe: np.ones(len(probe.clients)))
                liar, count = selection.clients == 20, len(selection.clients)
                everybody = np.ones(count, dtype=bool)
                places += int(liar.sum())
                weight += float(aggregation_weights(selection, everybody, session.clients)[liar].sum())
                alike = np.ones(count)
                outcome = Outcome(
                    index=index,
                    clients=selection.clients,
                    completed=everybody,
                    loss=alike,
                    train_loss=alike,
                    update_norm=alike,
                    sketch=rng.normal(size=(count, 4)),
                )
                session.tell(outcome)
            cells.append(f"x {places / rounds / k * 21:.1f}, {100 * weight / rounds:.0f} %")
        yield f"| {name} | {' | '.join(cells)} |"


def cost(num_clients: int = 1_000_000, rounds: int = 8) -> Iterator[str]:
    """The processor time of one round, `ask` and `tell`, in ms: the least of some rounds, the guards in turns."""
    yield "| policy | no guard | mild | strict |"
    yield "|---|---|---|---|"
    losses = np.exp(np.random.default_rng(0).normal(size=num_clients))
    clients, budget = Clients(num_examples=np.full(num_clients, 10.0)), min(100, num_clients)
    for name in ("pow-d", "adapow-d"):
        sessions = [Session(policies.get(name), clients, guard=guard) for guard in ("off", "mild", "strict")]
        least = np.full(len(sessions), np.inf)
        for _ in range(rounds):
            for place, session in enumerate(sessions):
                least[place] = min(least[place], _round_seconds(session, budget, losses))
        yield f"| {name} | {' | '.join(f'{1000 * seconds:.1f}' for seconds in least)} |"


def _round_seconds(session: Session, budget: int, losses: FloatArray) -> float:
    """Play one round in which everybody tells the truth; return the seconds of the session alone."""
    start = time.process_time()
    selection = session.ask(budget=budget, measure=lambda probe: losses[probe.clients])
    asked = time.process_time() - start
    told = losses[selection.clients]
    outcome = Outcome(
        index=session.round,
        clients=selection.clients,
        completed=np.ones(len(told), dtype=bool),
        loss=told,
        train_loss=0.6 * told,
        update_norm=np.sqrt(told),
    )
    start = time.process_time()
    session.tell(outcome)
    return asked + time.process_time() - start


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "tables", "sybils", "factors", "small", "sizes", "cost"))
    parser.add_argument("--data", choices=tuple(POLICIES), default="digits")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--file", type=Path, default=_FILE)
    given = parser.parse_args()
    if given.what == "run":
        run(given.file, given.data, given.seeds)
        return
    if given.what == "tables":
        PAGE.write_text(fill(PAGE.read_text(), tables(_rows(given.file))))
        return
    lines: dict[str, Callable[[], Iterator[str]]] = {
        "sybils": lambda: sybils(given.seeds),
        "factors": lambda: factors(given.seeds),
        "small": lambda: small(given.seeds),
        "sizes": sizes,
        "cost": cost,
    }
    for line in lines[given.what]():
        print(line, flush=True)


if __name__ == "__main__":
    main()
