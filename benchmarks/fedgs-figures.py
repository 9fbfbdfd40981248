"""FedGS, figures 4, 5 and 8: how often clients are selected, test loss by round, who is available when.

    python benchmarks/fedgs-figures.py counts benchmarks/specs/fedgs-table2-{fmnist.toml#YMF-0.9,cifar10.toml#LN-0.5} \\
        --rounds 500 1000
    fedpick run benchmarks/specs/fedgs-table2-synthetic.toml#LN-0.5 && python benchmarks/fedgs-figures.py curves
    python benchmarks/fedgs-figures.py availability

**counts** plays each spec's availability with policies that need no losses, so nothing is trained. A draw of `md` that
hits the same client twice counts twice. **curves** draws what is in a store; name experiments by their titles.
**availability** takes the modes and the federations of the specs of table 2.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from benchmarks.paper_figures import draw_counts, draw_loss_curves, draw_rasters
from fedpick import policies
from fedpick.core.session import Session
from fedpick.core.types import Clients, Outcome
from fedpick.experiments.run import clients_and_trace
from fedpick.experiments.settings import build_settings, federation_of
from fedpick.experiments.spec import Spec, load_spec
from fedpick.report.material import opened

HERE = Path(__file__).parent
SPECS = HERE / "specs"
FOLDER = HERE.parent / "docs/figures"
CURVES = ("UniformSample", "MDSample", "Power-of-Choice", "FedGS alpha=1")
COUNTED = ("UniformSample", "MDSample", "FedGS alpha=1")
MODES = (
    *("synthetic.toml#IDL", "synthetic.toml#LDF-0.7", "synthetic.toml#MDF-0.7", "cifar10.toml#LN-0.5"),
    *("cifar10.toml#SLN-0.5", "fmnist.toml#YMF-0.9", "fmnist.toml#YC-0.9"),
)


def setting(spec: Spec, seed: int) -> tuple:
    """(clients, trace) of a spec, without a simulator."""
    settings = spec.settings_of(spec.policies[0], seed)
    return clients_and_trace(build_settings(settings), federation_of(settings))


def mode_name(spec: Spec) -> str:
    """Data set and mode, such as "fmnist, y-cycle"."""
    return f"{spec.data.name}, {spec.availability.name}"


def selection_counts(spec: Spec, seed: int, rounds: int) -> dict[str, np.ndarray]:
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
                draws = selection.weights * spec.budget
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
            lines: dict[str, list[np.ndarray]] = {}
            rounds = np.empty(0)
            for run in reader.runs(experiment.id):
                if run.label in options.policies:
                    columns = reader.rounds(run.id)
                    known = np.isfinite(columns["loss"])
                    rounds = columns["round"][known] + 1
                    lines.setdefault(run.label, []).append(columns["loss"][known])
            # Runs of one experiment may be at different rounds while it is still going on.
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


def drawing_order(clients: Clients, mode: str) -> np.ndarray:
    """By what the mode depends on: the smallest label, or the size."""
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


def main(arguments: list[str] | None = None) -> None:
    """Read the command, draw."""
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
    options = parser.parse_args(arguments)
    options.run(options)


if __name__ == "__main__":
    main()
