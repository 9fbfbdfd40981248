"""Unbiased aggregation, a baseline of CA-Fed: all available clients train, weighted by importance over availability.

Algorithm (Rodio et al. 2024, sections III-B and V-A c): client k enters with the weight q_k = alpha_k / pi_k, so that a
client that is rarely available counts for more when it is. The weights are used as they are: their sum, hence the
length of the step, changes with the available set, and drop-outs shrink it. With the true pi_k the expected step is
that of full participation, E[sum of weights x update] = sum_k alpha_k x update_k.
With a budget below the number available, that many clients are drawn uniformly and the weights are multiplied by
available / budget. The estimates of round t include the mask of round t.
Deviations: none.
The class does not claim `unbiased` in the sense of the contract: by default pi_k is estimated, and an estimate makes
the expectation exact only in the limit. With estimates="oracle" and true values it is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from fedpick.availability.estimators import AvailabilityCounts
from fedpick.core.types import RoundContext, Selection
from fedpick.policies._estimates import (
    RODIO,
    AvailabilityAware,
    availability_of,
    count_mask,
    inverse_weights,
    sample_within_budget,
)

__all__ = ["Unbiased"]


@final
@dataclass(frozen=True, kw_only=True)
class Unbiased(AvailabilityAware):
    """All available clients, weighted by importance over availability.

    Args:
        estimates: the source of pi_k: "bayes", "bayes-chain" or "oracle".
        prior: pseudo-counts of the beta prior, for either outcome.
    """

    reference: ClassVar[str] = RODIO

    def select(
        self, state: AvailabilityCounts, context: RoundContext, rng: np.random.Generator
    ) -> tuple[Selection, AvailabilityCounts]:
        """All available clients, or a uniform sample of them."""
        state = count_mask(self, state, context)
        weights = inverse_weights(availability_of(self, state, context), context.available, context)
        chosen, factor = sample_within_budget(context.available, context.budget, rng)
        return Selection(clients=chosen, weights=weights[chosen] * factor, renormalize=False), state
