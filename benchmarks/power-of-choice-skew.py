"""Power-of-Choice, figure 2 (d): rho-bar and rho-tilde / rho-bar of rand and pow-d on the quadratics of appendix F.

    python benchmarks/power-of-choice-skew.py --clients 30 --candidates 6 15 30

"A large range of possible w, w'" is all that the paper says of its grid: here w and w' come from a box around the
origin, in which training starts, with w* added to the w'. The last column is the smallest skew with w' = w.
"""

from __future__ import annotations

import argparse

from fedpick import Clients, policies
from fedpick.data import load
from fedpick.theory.pow_d import grid, objective_gap, quadratics, skew_extremes


def main() -> None:
    """Print one line per policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=30, help="K; the cohort is a tenth of it")
    parser.add_argument("--candidates", type=int, nargs="+", default=[6, 15, 30], help="values of d")
    parser.add_argument("--seeds", type=int, default=5, help="federations")
    parser.add_argument("--range", type=float, default=200.0, help="half the side of the box")
    parser.add_argument("--per-axis", type=int, default=2, help="points per axis for w, in 5 dimensions")
    parser.add_argument("--evaluated-per-axis", type=int, default=5, help="points per axis for w'")
    parser.add_argument("--samples", type=int, default=10_000, help="cohorts drawn at every w")
    options = parser.parse_args()
    chosen = {"rand": policies.get("md")}
    chosen |= {f"pow-d, d = {d}": policies.get("pow-d", num_candidates=d) for d in options.candidates}
    corner = [options.range] * 5
    points = grid([-value for value in corner], corner, options.per_axis)
    evaluated = grid([-value for value in corner], corner, options.evaluated_per_axis)
    print(f"{'policy':<16} {'seed':>4} {'Gamma':>9} {'rho-bar':>8} {'rho-tilde':>9} {'ratio':>8} {'same w':>8}")
    for seed in range(options.seeds):
        data = load("quadratic", num_clients=options.clients, seed=seed)
        task = quadratics(data.train_x[:, 0, 0], data.train_x[:, 1], Clients(num_examples=data.client_sizes))
        for label, policy in chosen.items():
            found = skew_extremes(
                policy,
                task,
                points,
                evaluated=evaluated,
                budget=options.clients // 10,
                samples=options.samples,
                seed=seed,
            )
            print(
                f"{label:<16} {seed:>4} {objective_gap(task):>9.4g} {found.rho_bar:>8.3f} {found.rho_tilde:>9.3f} "
                f"{found.ratio:>8.3f} {found.rho_same:>8.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
