"""AdaFed (Tan et al. 2022) as CA-Fed compares with it: unbiased weights, normalised in every round.

Algorithm (Rodio et al. 2024, section V-A c): all available clients train, with the weight
(alpha_k / pi_k) / sum over the available of (alpha_h / pi_h). The weights sum to 1 in every round, so the length of the
step does not change with the available set; in return the expectation is not that of full participation.
With a budget below the number available, that many clients are drawn uniformly. With normalize_over="available" each
weight comes from the normalisation over all available clients and is multiplied by available / budget, so that the
expected step is the one without a budget. With normalize_over="cohort" the weights of the drawn clients sum to 1.
Drop-outs: the weights of the clients that complete are scaled back to the sum given.
The estimates of round t include the mask of round t.
Deviations: the paper and the authors' code define full participation only; both partial forms are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from fedpick.availability.estimators import AvailabilityCounts
from fedpick.core.types import RoundContext, Selection
from fedpick.core.validation import choice
from fedpick.policies._estimates import (
    AvailabilityAware,
    availability_of,
    count_mask,
    inverse_weights,
    sample_within_budget,
)

__all__ = ["AdaFed"]


@final
@dataclass(frozen=True, kw_only=True)
class AdaFed(AvailabilityAware):
    """All available clients, weighted by importance over availability, normalised in every round.

    Args:
        estimates: the source of pi_k: "bayes", "bayes-chain" or "oracle".
        prior: pseudo-counts of the beta prior, for either outcome.
        normalize_over: with a small budget, "available" keeps the expected step, "cohort" keeps a sum of 1.
    """

    normalize_over: str = "available"

    reference: ClassVar[str] = """
        @article{tan2022adafed,
          title = {{AdaFed}: Optimizing Participation-Aware Federated Learning with Adaptive Aggregation Weights},
          author = {Tan, L. and Zhang, X. and Zhou, Y. and Che, X. and Hu, M. and others},
          journal = {IEEE Transactions on Network Science and Engineering},
          year = {2022}
        }"""

    def __post_init__(self) -> None:
        super().__post_init__()
        choice(self, "normalize_over", ("available", "cohort"))

    def select(
        self, state: AvailabilityCounts, context: RoundContext, rng: np.random.Generator
    ) -> tuple[Selection, AvailabilityCounts]:
        """All available clients, or a uniform sample of them."""
        state = count_mask(self, state, context)
        weights = inverse_weights(availability_of(self, state, context), context.available, context)
        chosen, factor = sample_within_budget(context.available, context.budget, rng)
        if self.normalize_over == "cohort":
            total, factor = weights[chosen].sum(), 1.0
        else:
            total = weights.sum()
        # A total of 0 means that every weight is 0: no step, whatever the divisor.
        return Selection(clients=chosen, weights=weights[chosen] * (factor / total if total > 0 else 1.0)), state
