"""CA-Fed's two baselines without a paper of their own: unbiased aggregation, and the usually available only.

Unbiased: everybody available trains; client k enters with the weight q_k = alpha_k / pi_k, so that a client that is
rarely there counts for more when it is (CA-Fed, Rodio et al. 2024, section III-B and V-A c). The weights are used as
they are: their sum, hence the length of the step, changes with who is available, and drop-outs shrink it. With the
true pi_k the expected step is that of full participation, E[sum of weights x update] = sum_k alpha_k x update_k.
With a budget below the number available, that many are drawn uniformly and the weights grow by available / budget.
The estimates used in round t count the mask of round t.

More available: available clients with pi_k >= 1/2 train, with the weight alpha_k / pi_k, used as it is; the others
never do: fast and biased (section V-A c). A round in which none of them is available has an empty cohort. Budgets as
above.

Deviations: Unbiased, none. More available: the paper knows two classes of clients, pi = 0.9 and 0.1, and keeps the
first; the threshold of 1/2 between them, and its use with estimates, are ours. It is not in the authors' code.
The class Unbiased does not claim `unbiased` in the sense of the contract, because by default pi_k is estimated, and an
estimate makes the expectation exact only in the limit; with estimates="oracle" and true values it is exact.
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
    check_estimates,
    count_mask,
    inverse_weights,
    sample_within_budget,
)

__all__ = ["MoreAvailable", "Unbiased"]


@final
@dataclass(frozen=True, kw_only=True)
class Unbiased(AvailabilityAware):
    """Everybody available, weighted by importance over availability.

    Args:
        estimates: where pi_k comes from: "bayes", "bayes-chain" or "oracle".
        prior: pseudo-counts of the beta prior, for either outcome.
    """

    reference: ClassVar[str] = RODIO

    def __post_init__(self) -> None:
        check_estimates(self)

    def select(
        self, state: AvailabilityCounts, context: RoundContext, rng: np.random.Generator
    ) -> tuple[Selection, AvailabilityCounts]:
        """Everybody available, or a uniform sample of them."""
        state = count_mask(self, state, context)
        weights = inverse_weights(availability_of(self, state, context), context.available, context)
        chosen, factor = sample_within_budget(context.available, context.budget, rng)
        return Selection(clients=chosen, weights=weights[chosen] * factor, renormalize=False), state


@final
@dataclass(frozen=True, kw_only=True)
class MoreAvailable(AvailabilityAware):
    """Available clients that are there at least half of the time, weighted by importance over availability.

    Args:
        estimates: where pi_k comes from: "bayes", "bayes-chain" or "oracle".
        prior: pseudo-counts of the beta prior, for either outcome.
    """

    reference: ClassVar[str] = RODIO

    def __post_init__(self) -> None:
        check_estimates(self)

    def select(
        self, state: AvailabilityCounts, context: RoundContext, rng: np.random.Generator
    ) -> tuple[Selection, AvailabilityCounts]:
        """The more available among the available, or a uniform sample of them."""
        state = count_mask(self, state, context)
        availability = availability_of(self, state, context)
        eligible = context.available & (availability >= 0.5)
        weights = inverse_weights(availability, eligible, context)
        chosen, factor = sample_within_budget(eligible, context.budget, rng)
        diagnostics = {"excluded": int(np.count_nonzero(availability < 0.5))}
        return Selection(
            clients=chosen, weights=weights[chosen] * factor, renormalize=False, diagnostics=diagnostics
        ), state
