"""FedCor, figures 2, 12 and 13: are the loss changes of random cohorts Gaussian?

    python benchmarks/fedcor-normality.py benchmarks/specs/fedcor-fmnist.toml#{2SPC,1SPC,Dir}
    python benchmarks/fedcor-normality.py benchmarks/specs/fedcor-cifar10.toml#{2SPC,1SPC,Dir} --rounds 20 \\
        --figure cifar.png

Each spec's federation is trained with random cohorts for the warm-up; from there many random cohorts are tried, none
is committed. Writes a table per principal component of the loss changes, a multivariate test of the first ones, and
the histograms. The paper tries 1,000 cohorts per setting. A client trains on the same mini-batches in every trial, so
the cohort alone is random.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.paper_figures import draw_components
from benchmarks.theory.fedcor import henze_zirkler, normality, principal_components, sample_loss_changes
from fedpick.core.rng import Purpose, stream
from fedpick.experiments.run import build
from fedpick.experiments.spec import load_spec

FIGURE = Path(__file__).parents[1] / "docs/figures/fedcor-normality.png"


def main(arguments: list[str] | None = None) -> None:
    """Sample, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="+", type=Path, help="specs with a policy named `uniform`")
    parser.add_argument("--cohorts", type=int, default=300, help="random cohorts per setting")
    parser.add_argument("--rounds", type=int, default=15, help="of warm-up")
    parser.add_argument("--components", type=int, default=4, help="in the table and the figure")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    options = parser.parse_args(arguments)
    drawn = {}
    for path in options.specs:
        spec = load_spec(path).override(only=["uniform"])
        run = build(spec.settings_of(spec.policies[0], options.seed))
        rounds = run.rounds()
        for _ in range(options.rounds):
            next(rounds)
        changes = sample_loss_changes(
            run.simulator.measure,
            len(run.session.clients),
            cohorts=options.cohorts,
            budget=spec.budget or len(run.session.clients),
            rng=stream(options.seed, options.rounds, Purpose.ANALYSIS),
        )
        components = principal_components(changes)
        found = [normality(values) for values in components.scores[:, : options.components].T]
        print(f"{spec.title}: {options.cohorts} cohorts of {spec.budget} after {options.rounds} rounds")
        print("| component | share of variance | W | p | skewness | excess kurtosis | distance |")
        print("|---|---|---|---|---|---|---|")
        for place, (share, measured) in enumerate(zip(components.share, found, strict=False), start=1):
            print(
                f"| {place} | {share:.1%} | {measured.shapiro:.4f} | {measured.p_value:.2g} | {measured.skewness:+.2f} "
                f"| {measured.excess_kurtosis:+.2f} | {measured.distance:.3f} |"
            )
        statistic, p_value = henze_zirkler(components.scores[:, : options.components])
        print(f"Henze-Zirkler, {len(found)} components: HZ = {statistic:.3f}, p = {p_value:.2g}\n", flush=True)
        drawn[spec.partition.name] = (components, found)
    draw_components(drawn, options.figure)


if __name__ == "__main__":
    main()
