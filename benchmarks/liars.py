"""How many places liars capture, and what they cost: the tables of docs/results/liars.md.

    python -m benchmarks.liars run --seeds 10      # appends to docs/results/liars.jsonl; resumes
    python -m benchmarks.liars tables              # prints the tables in Markdown

Digits, two shards per client, 50 clients, 5 per round, 100 rounds. Accuracy is the mean over the last ten rounds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedpick import Session, data, policies
from fedpick.sim import Attacks, LocalTraining, ServerStep, Simulator, simulate

__all__ = ["CONDITIONS", "POLICIES", "main", "one_run", "tables"]

POLICIES = ("uniform", "pow-d", "cpow-d", "rpow-d", "adapow-d", "afl", "fedcor", "fedgp", "herd")
ROBUST = {"clip_norms": 1.0}
"""The server step against flipped updates."""
CONDITIONS: tuple[dict[str, Any], ...] = (
    {"attack": None, "share": 0.2, "guard": "off"},
    {"attack": None, "share": 0.2, "guard": "strict"},
    {"attack": "inflate", "share": 0.2, "guard": "strict"},
    {"attack": "inflate-flip", "share": 0.2, "guard": "strict", "server": ROBUST},
    {"attack": "inflate", "share": 0.2, "guard": "off"},
    {"attack": "inflate-flip", "share": 0.2, "guard": "off"},
    {"attack": "inflate", "share": 0.3, "guard": "strict"},
    {"attack": "inflate", "share": 0.1, "guard": "strict"},
    {"attack": "inflate-flip", "share": 0.3, "guard": "strict", "server": ROBUST},
    {"attack": "inflate-flip", "share": 0.1, "guard": "strict", "server": ROBUST},
    {"attack": None, "share": 0.2, "guard": "mild"},
)
_FILE = Path(__file__).parents[1] / "docs" / "results" / "liars.jsonl"
_LAST = 10
_HARD = 10
"""Clients with the largest mean loss of an honest run: the hard data."""


def one_run(policy: str, condition: dict[str, Any], seed: int, rounds: int = 100) -> dict[str, Any]:
    """Run one policy under one condition; return what the tables need."""
    federation = data.partition(data.load("digits"), "2spc", num_clients=50, seed=seed, holdout=0.2)
    kind, share = condition["attack"], condition["share"]
    simulator = Simulator(
        federation,
        "mlp",
        local=LocalTraining(lr=0.05, epochs=3, batch_size=8),
        server=ServerStep(**condition.get("server", {})),
        attacks=None if kind is None else Attacks(kind=kind, share=share),
        losses_on="validation",
        seed=seed,
    )
    options = {"provides": simulator.provides, "guard": condition["guard"]}
    session = Session(policies.get(policy), simulator.clients, seed=seed, **options)
    places, losses = np.zeros(50), np.zeros(50)
    ever, accuracies = np.zeros(50, bool), list[float]()
    for record in simulate(simulator, session, rounds=rounds, budget=5, losses_every=10):
        places[record.selection.clients] += 1
        ever |= session.credibility < 0.5
        accuracies.append(record.test_accuracy or 0.0)
        losses += 0.0 if record.losses is None else record.losses
    lying = simulator.lying
    return {
        "policy": policy,
        "seed": seed,
        **condition,
        "accuracy": float(np.mean(accuracies[-_LAST:])),
        "places": places.astype(int).tolist(),
        "losses": np.round(losses, 4).tolist(),
        "captured": float(places[lying].sum() / places.sum()),
        "found": float(ever[lying].mean()) if lying.any() else None,
        "false_alarms": float(ever[~lying].mean()),
    }


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["policy"], row["seed"], row["attack"], row["share"], row["guard"], json.dumps(row.get("server", {}))


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def run(file: Path, seeds: int) -> None:
    """Compute what the file lacks, seed by seed."""
    done = {_key(row) for row in _rows(file)}
    for seed in range(seeds):
        for condition in CONDITIONS:
            for policy in POLICIES:
                if _key({"policy": policy, "seed": seed, **condition}) not in done:
                    row = one_run(policy, condition, seed)
                    with file.open("a") as out:
                        out.write(json.dumps(row) + "\n")


def _some(rows: list[dict[str, Any]], policy: str, **condition: Any) -> list[dict[str, Any]]:
    wanted = {"policy": policy, **condition}
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    return float(np.mean([row[name] for row in rows])) if rows else float("nan")


def _paired(rows: list[dict[str, Any]], base: list[dict[str, Any]]) -> float:
    """Mean difference of accuracy over the seeds that both have, in points."""
    mine, theirs = ({row["seed"]: row["accuracy"] for row in each} for each in (rows, base))
    both = sorted(set(mine) & set(theirs))
    return float(np.mean([100 * (mine[seed] - theirs[seed]) for seed in both])) if both else float("nan")


def _hard_share(rows: list[dict[str, Any]], base: list[dict[str, Any]]) -> float:
    """Places of the hard clients over their places in the honest, unguarded run of the same seed."""
    theirs = {row["seed"]: row for row in base}
    ratios = []
    for row in rows:
        if row["seed"] in theirs:
            plain = theirs[row["seed"]]
            hard = np.argsort(plain["losses"])[-_HARD:]
            ratios.append(np.take(row["places"], hard).sum() / max(np.take(plain["places"], hard).sum(), 1))
    return float(np.mean(ratios)) if ratios else float("nan")


def tables(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The tables in Markdown, line by line."""
    yield "| policy | honest % | strict, honest: points | hard clients' places | false alarms % | seeds |"
    yield "|---|---|---|---|---|---|"
    for policy in POLICIES:
        base = _some(rows, policy, attack=None, guard="off")
        strict = _some(rows, policy, attack=None, guard="strict")
        yield (
            f"| {policy} | {100 * _mean(base, 'accuracy'):.1f} | {_paired(strict, base):+.1f} | "
            f"x {_hard_share(strict, base):.2f} | {100 * _mean(strict, 'false_alarms'):.1f} | {len(strict)} |"
        )
    for attack in ("inflate", "inflate-flip"):
        yield ""
        yield f"`{attack}`: places of liars over their fair share, and accuracy minus the honest, unguarded run, points"
        yield ""
        yield "| policy | no guard, 20 % | strict, 10 % | strict, 20 % | strict, 30 % | false alarms % (20 %) | seeds |"
        yield "|---|---|---|---|---|---|---|"
        for policy in POLICIES:
            base = _some(rows, policy, attack=None, guard="off")
            cells, counts = [], []
            for guard, share in (("off", 0.2), ("strict", 0.1), ("strict", 0.2), ("strict", 0.3)):
                these = _some(rows, policy, attack=attack, guard=guard, share=share)
                counts.append(len(these))
                value = f"x {_mean(these, 'captured') / share:.2f}, {_paired(these, base):+.1f}"
                cells.append(value if these else "not run")
            alarms = _some(rows, policy, attack=attack, guard="strict", share=0.2)
            told = f"{100 * _mean(alarms, 'false_alarms'):.1f}" if alarms else "not run"
            yield f"| {policy} | {' | '.join(cells)} | {told} | {', '.join(map(str, counts))} |"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "tables"))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--file", type=Path, default=_FILE)
    given = parser.parse_args()
    if given.what == "run":
        run(given.file, given.seeds)
    else:
        print("\n".join(tables(_rows(given.file))))


if __name__ == "__main__":
    main()
