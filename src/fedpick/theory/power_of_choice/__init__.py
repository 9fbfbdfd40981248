"""Power-of-Choice: how biased a policy is on a task with known optima (`skew`), and what that costs (`bounds`)."""

from fedpick.theory.power_of_choice.bounds import (
    Bound,
    Constants,
    averaging_bound,
    decaying_rate_bound,
    fixed_rate_bound,
    largest_fixed_rate,
)
from fedpick.theory.power_of_choice.skew import (
    Cohorts,
    Estimate,
    Objectives,
    SkewExtremes,
    grid,
    objective_gap,
    quadratics,
    sample_cohorts,
    selection_skew,
    skew_extremes,
)

__all__ = [
    "Bound",
    "Cohorts",
    "Constants",
    "Estimate",
    "Objectives",
    "SkewExtremes",
    "averaging_bound",
    "decaying_rate_bound",
    "fixed_rate_bound",
    "grid",
    "largest_fixed_rate",
    "objective_gap",
    "quadratics",
    "sample_cohorts",
    "selection_skew",
    "skew_extremes",
]
