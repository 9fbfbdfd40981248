"""F3AST (Ribero et al. 2023) as CA-Fed compares with it: the rarest and most important of the available clients.

Algorithm (Rodio et al. 2024, section V-A c): of the available clients, the m = budget with the largest alpha_k / pi_k
train, ties (up to rounding) broken at random, with the weight alpha_k / pi_k, used as it is. The authors' code ranks by
the square, which is the same order. With a budget of at least the number available it is the `unbiased` policy.
CA-Fed's comparison gives the other policies all clients and F3AST half of them: see cohort_size.
The estimates of round t include the mask of round t.
Deviations: F3AST itself divides by the rate at which a client is *selected*, which it learns from its own choices.
CA-Fed's comparison, followed here, divides by the rate at which it is *available*, so that with a small budget the
weights are not those of an unbiased step. The authors' code moves pi_k by (1/T) (1[available] - pi_k) in each round,
every time from the true value; this is not offered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from fedpick.availability.estimators import AvailabilityCounts
from fedpick.core.types import RoundContext, Selection
from fedpick.core.validation import whole
from fedpick.policies._estimates import (
    AvailabilityAware,
    availability_of,
    count_mask,
    inverse_weights,
    top_k_with_ties,
)

__all__ = ["F3AST"]


@final
@dataclass(frozen=True, kw_only=True)
class F3AST(AvailabilityAware):
    """The available clients with the largest importance over availability, weighted by it.

    Args:
        estimates: the source of pi_k: "bayes", "bayes-chain" or "oracle".
        prior: pseudo-counts of the beta prior, for either outcome.
        cohort_size: the largest cohort, where this policy is to take fewer clients than the budget; None: the budget.
    """

    cohort_size: int | None = None

    reference: ClassVar[str] = """
        @article{ribero2023federated,
          title = {Federated Learning Under Intermittent Client Availability and Time-Varying Communication
                   Constraints},
          author = {Ribero, M{\\'o}nica and Vikalo, Haris and de Veciana, Gustavo},
          journal = {IEEE Journal of Selected Topics in Signal Processing},
          volume = {17},
          number = {1},
          pages = {98--111},
          year = {2023}
        }"""

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self, "cohort_size", 1, optional=True)

    def select(
        self, state: AvailabilityCounts, context: RoundContext, rng: np.random.Generator
    ) -> tuple[Selection, AvailabilityCounts]:
        """The top of the available by importance over availability."""
        state = count_mask(self, state, context)
        weights = inverse_weights(availability_of(self, state, context), context.available, context)
        reachable = np.flatnonzero(context.available)
        places = context.budget if self.cohort_size is None else min(self.cohort_size, context.budget)
        chosen = reachable[top_k_with_ties(weights[reachable], places, rng)]
        return Selection(clients=chosen, weights=weights[chosen], renormalize=False), state
