"""FedGS, table 3 and figure 3: how well graphs that models reveal agree with the graph of the data.

    python benchmarks/fedgs-graphs.py benchmarks/specs/fedgs-table2-{synthetic,fmnist,cifar10}.toml#IDL
    python benchmarks/fedgs-graphs.py --draw docs/figures/fedgs-graph.png       # figure 3 alone

Every client of a spec's federation trains from the initial model for the spec's local steps (or --steps). Edges by the
cosine of the updates, and by the cosine of the mean outputs on common noise, are compared with the oracle's: label
shares, or the true parameters for Synthetic, at epsilon = 0.1. As in the paper each kind takes the best of five
thresholds. "everybody linked" is what a graph with all edges scores: F1 says little where the oracle has many edges.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.theory.fedgs import best_edge_scores, draw_graph, edge_scores, graph_similarities
from fedpick import data
from fedpick.core.policy import Signal
from fedpick.core.types import Clients, Probe
from fedpick.experiments.run import FederatedRun, build
from fedpick.experiments.spec import load_spec

FIGURE = Path(__file__).parents[1] / "docs/figures/fedgs-graph.png"
BLOCK = 10
"""Clients asked at a time: whole updates of large models are large."""


def oracle_features(clients: Clients) -> np.ndarray:
    """What the oracle knows: true parameters where they are given, else the share of each label."""
    if clients.features is not None:
        return clients.features
    if clients.label_histogram is None:
        raise SystemExit("This federation has neither features nor labels for an oracle.")
    return clients.label_histogram / clients.label_histogram.sum(axis=1, keepdims=True)


def revealed(run: FederatedRun, signal: Signal) -> np.ndarray:
    """(N, s) what everybody's training from the initial model gives, as directions in single precision."""
    everybody = np.arange(len(run.session.clients))
    parts = []
    for start in range(0, len(everybody), BLOCK):
        values = run.simulator.measure(Probe(clients=everybody[start : start + BLOCK], signal=signal))
        parts.append((values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32))
    return np.concatenate(parts)


def products(directions: np.ndarray) -> np.ndarray:
    """(N, N) cosines, in double precision, a slice of the vector at a time."""
    total = np.zeros((len(directions), len(directions)))
    for start in range(0, directions.shape[1], 100_000):
        part = directions[:, start : start + 100_000].astype(np.float64)
        total += part @ part.T
    return total


def compare(settings: Mapping[str, Any], title: str) -> None:
    """Print the rows of one federation."""
    run = build(settings)
    features = oracle_features(run.session.clients)
    kinds = {
        "functional": products(revealed(run, Signal.OUTPUTS)),
        "cosine": products(revealed(run, Signal.UPDATE)),
    }
    steps = settings["local"].get("steps", "?")
    for name, directed in (("inner products", False), ("cosines", True)):
        oracle = graph_similarities(features, cosine=directed) >= 0.1
        count = len(oracle)
        share = np.triu(oracle, 1).sum() / (count * (count - 1) / 2)
        all_linked = edge_scores(np.ones_like(oracle), oracle)
        row = f"| {title} | {steps} | {name}, {share:.0%} linked |"
        for kind, cosines in kinds.items():
            epsilon, scores = best_edge_scores(np.maximum(cosines, 0.0), oracle)
            print(f"{row} {kind} | {epsilon:g} | {scores.precision:.4f} | {scores.recall:.4f} | {scores.f1:.4f} |")
        print(
            f"{row} everybody linked | | {all_linked.precision:.4f} | {all_linked.recall:.4f} | {all_linked.f1:.4f} |",
            flush=True,
        )


def picture(path: Path, name: str, num_clients: int, seed: int) -> None:
    """Figure 3: the oracle's graph of a few clients with two labels each."""
    clients = data.partition(data.load(name), "two-labels", num_clients=num_clients, seed=seed).clients()
    shares = oracle_features(clients)
    draw_graph(path, graph_similarities(shares) >= 0.1, shares)


def main(arguments: list[str] | None = None) -> None:
    """Compare and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="*", type=Path)
    parser.add_argument("--steps", type=int, help="local steps; default: the spec's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draw", type=Path, nargs="?", const=FIGURE, help="draw figure 3")
    parser.add_argument("--data", default="cifar10", help="of figure 3")
    parser.add_argument("--clients", type=int, default=20, help="of figure 3")
    options = parser.parse_args(arguments)
    if options.specs:
        print("| federation | local steps | oracle | graph from | epsilon | precision | recall | F1 |")
        print("|---|---|---|---|---|---|---|---|")
    for path in options.specs:
        spec = load_spec(path)
        settings = spec.settings_of(spec.policies[0], options.seed)
        if options.steps:
            kept = {key: value for key, value in settings["local"].items() if key != "epochs"}
            settings["local"] = {**kept, "steps": options.steps}
        compare(settings, spec.data.name)
    if options.draw:
        picture(options.draw, options.data, options.clients, options.seed)


if __name__ == "__main__":
    main()
