"""Regenerate CA-Fed's figure 4a: how fast availability and correlation are learnt from the masks.

    python benchmarks/availability-estimation.py        # some seconds; writes docs/figures/cafed-figure-4a.png

The paper's population of 100 clients (g = 0.4, nu = 0.9, epsilon = 0.01), 10 to 10,000 observed rounds, ten seeds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedpick import availability
from fedpick.availability.statistics import estimation_error_curve
from fedpick.core.types import Clients
from fedpick.report.figures.availability import draw_estimation_errors

FIGURE = Path(__file__).parents[1] / "docs/figures/cafed-figure-4a.png"


def main() -> None:
    """Measure, print the table, draw."""
    process = availability.get("correlated-population")
    curve = estimation_error_curve(process, Clients(num_examples=np.ones(100)), seeds=range(10))
    print("| rounds observed | error of pi (frequency) | error of pi (chain) | error of lambda |")
    print("|---|---|---|---|")
    for column, rounds in enumerate(curve.observations):
        cells = [
            f"{values[:, column].mean():.4f} ± {values[:, column].std(ddof=1):.4f}"
            for values in (curve.availability, curve.stationary, curve.correlation)
        ]
        print(f"| {rounds:,} | {' | '.join(cells)} |")
    draw_estimation_errors(curve, FIGURE)


if __name__ == "__main__":
    main()
