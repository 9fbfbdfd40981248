"""More available, a baseline of CA-Fed: only clients that are available at least half of the time train.

Algorithm (Rodio et al. 2024, section V-A c): available clients with pi_k >= 1/2 train, with the weight alpha_k / pi_k,
used as it is. The others never train: fast and biased. A round in which none of them is available has an empty cohort.
With a budget below the number eligible, that many clients are drawn uniformly and the weights are multiplied by
eligible / budget. The estimates of round t include the mask of round t.
Deviations: the paper has two classes of clients, pi = 0.9 and 0.1, and keeps the first. The threshold of 1/2 between
them, and its use with estimates, are ours. The policy is not in the authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from fedpick.availability.estimators import AvailabilityCounts
from fedpick.core.types import RoundContext, Selection
from fedpick.policies._estimates import (
    RODIO,
    TIE,
    AvailabilityAware,
    availability_of,
    count_mask,
    inverse_weights,
    sample_within_budget,
)

__all__ = ["MoreAvailable"]


@final
@dataclass(frozen=True, kw_only=True)
class MoreAvailable(AvailabilityAware):
    """Available clients with an availability of at least 1/2, weighted by importance over availability.

    Args:
        estimates: the source of pi_k: "bayes", "bayes-chain" or "oracle".
        prior: pseudo-counts of the beta prior, for either outcome.
    """

    reference: ClassVar[str] = RODIO

    def select(
        self, state: AvailabilityCounts, context: RoundContext, rng: np.random.Generator
    ) -> tuple[Selection, AvailabilityCounts]:
        """The eligible clients, or a uniform sample of them."""
        state = count_mask(self, state, context)
        availability = availability_of(self, state, context)
        often = availability > 0.5 - TIE
        eligible = context.available & often
        weights = inverse_weights(availability, eligible, context)
        chosen, factor = sample_within_budget(eligible, context.budget, rng)
        diagnostics = {"excluded": int(np.count_nonzero(~often))}
        return Selection(
            clients=chosen, weights=weights[chosen] * factor, renormalize=False, diagnostics=diagnostics
        ), state
