"""FedCor, figures 3 and 9: does the covariance of the loss changes stay the same while the model is trained?

    python benchmarks/fedcor-stationarity.py benchmarks/specs/fedcor-fmnist.toml#{2SPC,1SPC,Dir}
    python benchmarks/fedcor-stationarity.py benchmarks/specs/fedcor-cifar10.toml#2SPC --every 50 --rounds 500 \\
        --figure c.png

Every so many rounds of training with random cohorts, the covariance is computed from trials of random cohorts, and
compared with the one before (equation 151, with the square root that it lacks in print). Two halves of the same
round's samples show how much of the difference is sampling; each half has half the cohorts, so it is a strict measure.
The last line compares second moments instead, which is what a process with mean 0 learns: the mean change counts too.
The paper tries 1,000 cohorts each time.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.paper_figures import draw_similarities
from benchmarks.theory.fedcor import covariance_similarity, sample_loss_changes
from fedpick.core.rng import Purpose, stream
from fedpick.experiments.run import build
from fedpick.experiments.spec import Spec, load_spec

FIGURE = Path(__file__).parents[1] / "docs/figures/fedcor-stationarity.png"


@dataclass(frozen=True)
class Similarities:
    """Of one federation in training."""

    rounds: np.ndarray
    later: np.ndarray
    """Of each covariance to the next."""
    moments: np.ndarray
    """The same of the second moments."""
    halves: np.ndarray
    """Of the covariances of two halves of the samples."""


def similarities(spec: Spec, options: argparse.Namespace) -> Similarities:
    """Train with random cohorts and look at the covariance every so often."""
    run = build(spec.settings_of(spec.policies[0], options.seed))
    count = len(run.session.clients)
    rounds, samples = [], []
    training = run.rounds()
    for done in range(1, options.rounds + 1):
        next(training)
        if done % options.every == 0:
            rng = stream(options.seed, done, Purpose.ANALYSIS)
            rounds.append(done)
            samples.append(
                sample_loss_changes(
                    run.simulator.measure, count, cohorts=options.cohorts, budget=spec.budget or count, rng=rng
                )
            )
    return Similarities(
        rounds=np.array(rounds),
        later=_neighbours([_covariance(changes) for changes in samples]),
        moments=_neighbours([changes.T @ changes for changes in samples]),
        halves=np.array([covariance_similarity(*(_covariance(changes[k::2]) for k in (0, 1))) for changes in samples]),
    )


def _covariance(changes: np.ndarray) -> np.ndarray:
    return np.cov(changes, rowvar=False)


def _neighbours(matrices: list[np.ndarray]) -> np.ndarray:
    return np.array([covariance_similarity(*pair) for pair in pairwise(matrices)])


def main(arguments: list[str] | None = None) -> None:
    """Train, sample, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="+", type=Path, help="specs with a policy named `uniform`")
    parser.add_argument("--cohorts", type=int, default=100, help="random cohorts at each measurement")
    parser.add_argument("--rounds", type=int, default=100, help="of training")
    parser.add_argument("--every", type=int, default=10, help="rounds between measurements")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    options = parser.parse_args(arguments)
    drawn = {}
    for path in options.specs:
        spec = load_spec(path).override(only=["uniform"])
        found = similarities(spec, options)
        drawn[spec.partition.name] = (found.rounds, found.later, found.halves)
        print(f"{spec.title}: {options.cohorts} cohorts of {spec.budget} every {options.every} rounds")
        print("| from round | " + " | ".join(str(number) for number in found.rounds) + " |")
        print("|---" * (len(found.rounds) + 1) + "|")
        print("| to the next | " + " | ".join(f"{value:.3f}" for value in found.later) + " | |")
        print("| two halves | " + " | ".join(f"{value:.3f}" for value in found.halves) + " |")
        print("| second moments | " + " | ".join(f"{value:.3f}" for value in found.moments) + " | |\n", flush=True)
    draw_similarities(drawn, options.figure)


if __name__ == "__main__":
    main()
