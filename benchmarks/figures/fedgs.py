"""FedGS, figures 3, 4, 5 and 8 and table 3: graphs, how often clients are selected, test loss, availability.

    python -m benchmarks.figures.fedgs counts \\
        benchmarks/specs/fedgs-table2-{fmnist.toml#YMF-0.9,cifar10.toml#LN-0.5} --rounds 500 1000
    fedpick run benchmarks/specs/fedgs-table2-synthetic.toml#LN-0.5 && python -m benchmarks.figures.fedgs curves
    python -m benchmarks.figures.fedgs availability
    python -m benchmarks.figures.fedgs graphs benchmarks/specs/fedgs-table2-{synthetic,fmnist,cifar10}.toml#IDL
    python -m benchmarks.figures.fedgs graphs --draw       # figure 3 alone

**counts** plays the availability of each spec with policies that need no losses, so nothing is trained. If `md` draws a
client twice, that counts twice. **curves** draws experiments of a store, named by their titles. **availability** takes
the modes and federations of the specs of table 2.

**graphs** (table 3): how well do graphs that models reveal agree with the graph of the data? Every client trains from
the initial model for the spec's local steps (or --steps). Edges by the cosine of the updates, and by the cosine of the
mean outputs on common noise, are compared with those of the oracle at epsilon = 0.1: label shares, or the true
parameters for Synthetic. As in the paper, each kind takes the best of five thresholds. "all linked" is the score
of a graph with all edges: F1 says little if the oracle has many edges.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import FOLDER, SPECS
from benchmarks.figures.drawing import draw_counts, draw_loss_curves, draw_rasters
from benchmarks.theory.fedgs import best_edge_scores, draw_graph, edge_scores, graph_similarities
from fedpick import data, policies
from fedpick.availability import Trace
from fedpick.core.arrays import FloatArray, IntArray
from fedpick.core.policy import Signal
from fedpick.core.session import Session
from fedpick.core.types import Clients, Outcome, Probe
from fedpick.experiments.run import FederatedRun, build, clients_and_trace
from fedpick.experiments.settings import build_settings, federation_of
from fedpick.experiments.spec import Spec, load_spec
from fedpick.experiments.store import opened

CURVES = ("UniformSample", "MDSample", "Power-of-Choice", "FedGS alpha=1")
COUNTED = ("UniformSample", "MDSample", "FedGS alpha=1")
MODES = (
    *("synthetic.toml#IDL", "synthetic.toml#LDF-0.7", "synthetic.toml#MDF-0.7", "cifar10.toml#LN-0.5"),
    *("cifar10.toml#SLN-0.5", "fmnist.toml#YMF-0.9", "fmnist.toml#YC-0.9"),
)


def setting(spec: Spec, seed: int) -> tuple[Clients, Trace]:
    """(clients, trace) of a spec, without a simulator."""
    settings = spec.settings_of(spec.policies[0], seed)
    return clients_and_trace(build_settings(settings), federation_of(settings))


def mode_name(spec: Spec) -> str:
    """Data set and mode, such as "fmnist, y-cycle"."""
    return f"{spec.data.name}, {spec.availability.name}"


def selection_counts(spec: Spec, seed: int, rounds: int) -> dict[str, IntArray]:
    """How often each client is selected, by policy."""
    clients, trace = setting(spec, seed)
    found = {}
    for each in spec.override(only=COUNTED).policies:
        session = Session(policies.get(each.name, **each.parameters), clients, seed)
        counts = np.zeros(len(clients), dtype=np.int64)
        for index in range(rounds):
            selection = session.ask(available=trace.mask(index), budget=spec.budget)
            draws = np.ones(len(selection.clients))
            if each.name == "md" and selection.weights is not None:
                draws = selection.weights * (spec.budget or len(clients))
            counts[selection.clients] += np.rint(draws).astype(np.int64)
            completed = np.ones(len(selection.clients), dtype=bool)
            session.tell(Outcome(index=index, clients=selection.clients, completed=completed))
        found[each.label] = counts
    return found


def counts(options: argparse.Namespace) -> None:
    """Figure 4."""
    drawn = {}
    print("| federation, mode | rounds | policy | least | median | most | sd |")
    print("|---|---|---|---|---|---|---|")
    for place, path in enumerate(options.specs):
        spec = load_spec(path)
        rounds = options.rounds[min(place, len(options.rounds) - 1)] if options.rounds else spec.rounds
        drawn[mode_name(spec)] = found = selection_counts(spec, options.seed, rounds)
        for label, values in found.items():
            print(
                f"| {mode_name(spec)} | {rounds} | {label} | {values.min()} | {np.median(values):g} | {values.max()} "
                f"| {values.std(ddof=1):.1f} |",
                flush=True,
            )
    draw_counts(drawn, options.folder / "fedgs-counts.png")


def curves(options: argparse.Namespace) -> None:
    """Figure 5."""
    drawn = {}
    with opened(options.store) as reader:
        for title in options.titles or [None]:
            experiment = reader.experiment(title)
            lines: dict[str, list[FloatArray]] = {}
            rounds = np.empty(0)
            for run in reader.runs(experiment.id):
                if run.label in options.policies:
                    columns = reader.rounds(run.id)
                    known = np.isfinite(columns["loss"])
                    rounds = columns["round"][known] + 1
                    lines.setdefault(run.label, []).append(columns["loss"][known])
            # Runs of an unfinished experiment may be at different rounds.
            shortest = min(len(line) for found in lines.values() for line in found)
            drawn[experiment.title] = {
                label: (rounds[:shortest], np.stack([line[:shortest] for line in found]))
                for label, found in lines.items()
            }
            print(f"{experiment.title}, {shortest} evaluations")
            print("| policy | seeds | lowest test loss | last test loss |\n|---|---|---|---|")
            for label, (_, values) in drawn[experiment.title].items():
                lowest, last = values.min(axis=1).mean(), values[:, -1].mean()
                print(f"| {label} | {len(values)} | {lowest:.3f} | {last:.3f} |")
    draw_loss_curves(drawn, options.folder / "fedgs-curves.png", smooth=options.smooth)


def drawing_order(clients: Clients, mode: str) -> IntArray:
    """The clients ordered by what the mode depends on: the smallest label, or the size."""
    if mode.startswith("y-") and clients.label_histogram is not None:
        return np.argsort((clients.label_histogram > 0).argmax(axis=1), kind="stable")
    return np.argsort(clients.num_examples, kind="stable")


def availability(options: argparse.Namespace) -> None:
    """Figure 8."""
    rasters = {}
    for mode in options.modes:
        spec = load_spec(SPECS / f"fedgs-table2-{mode}")
        clients, trace = setting(spec, options.seed)
        order = drawing_order(clients, spec.availability.name)
        rasters[mode_name(spec)] = np.stack([trace.mask(index)[order] for index in range(options.rounds)], axis=1)
        print(f"{mode_name(spec)}: {rasters[mode_name(spec)].mean():.1%} available", flush=True)
    draw_rasters(rasters, options.folder / "fedgs-availability.png")


BLOCK = 10
"""Clients that are asked at a time: the updates of large models are large."""


def oracle_features(clients: Clients) -> FloatArray:
    """The features of the oracle: true parameters if they are given, else the share of each label."""
    if clients.features is not None:
        return clients.features
    if clients.label_histogram is None:
        raise SystemExit("This federation has neither features nor labels for an oracle.")
    shares: FloatArray = clients.label_histogram / clients.label_histogram.sum(axis=1, keepdims=True)
    return shares


def revealed(run: FederatedRun, signal: Signal) -> FloatArray:
    """(N, s) directions, in single precision, that training from the initial model gives for every client."""
    clients = np.arange(len(run.session.clients))
    parts = []
    for start in range(0, len(clients), BLOCK):
        values = run.simulator.measure(Probe(clients=clients[start : start + BLOCK], signal=signal))
        parts.append((values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32))
    return np.concatenate(parts)


def products(directions: FloatArray) -> FloatArray:
    """(N, N) cosines in double precision, from one slice of the vectors at a time."""
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
            f"{row} all linked | | {all_linked.precision:.4f} | {all_linked.recall:.4f} | {all_linked.f1:.4f} |",
            flush=True,
        )


def picture(path: Path, name: str, num_clients: int, seed: int) -> None:
    """Figure 3: the oracle's graph of a few clients with two labels each."""
    clients = data.partition(data.load(name), "two-labels", num_clients=num_clients, seed=seed).clients()
    shares = oracle_features(clients)
    draw_graph(path, graph_similarities(shares) >= 0.1, shares)


def graphs(options: argparse.Namespace) -> None:
    """Table 3 and figure 3."""
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
        picture(options.folder / "fedgs-graph.png", options.data, options.clients, options.seed)


def main(arguments: list[str] | None = None) -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for the pictures")
    parser.add_argument("--seed", type=int, default=0)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("counts", help="figure 4")
    command.add_argument("specs", nargs="+", type=Path)
    command.add_argument("--rounds", nargs="+", type=int, help="one number, or one per spec; default: the spec's")
    command.set_defaults(run=counts)
    command = commands.add_parser("curves", help="figure 5")
    command.add_argument("titles", nargs="*", help="of experiments in the store; default: the latest")
    command.add_argument("--store", default="results/fedpick.sqlite")
    command.add_argument("--policies", nargs="+", default=CURVES, help="labels")
    command.add_argument("--smooth", type=int, default=10, help="evaluations to average over")
    command.set_defaults(run=curves)
    command = commands.add_parser("availability", help="figure 8")
    command.add_argument("--rounds", type=int, default=200)
    command.add_argument("--modes", nargs="+", default=MODES, help="NAME of benchmarks/specs/fedgs-table2-NAME")
    command.set_defaults(run=availability)
    command = commands.add_parser("graphs", help="table 3 and figure 3")
    command.add_argument("specs", nargs="*", type=Path)
    command.add_argument("--steps", type=int, help="local steps; default: the spec's")
    command.add_argument("--draw", action="store_true", help="draw figure 3")
    command.add_argument("--data", default="cifar10", help="of figure 3")
    command.add_argument("--clients", type=int, default=20, help="of figure 3")
    command.set_defaults(run=graphs)
    options = parser.parse_args(arguments)
    options.run(options)


if __name__ == "__main__":
    main()
