"""Unbiased aggregation under heterogeneous availability: CA-Fed's first baseline.

Algorithm: everybody available trains; client k enters with the weight q_k = alpha_k / pi_k, so that a client that is
rarely there counts for more when it is (CA-Fed, Rodio et al. 2024, section III-B and V-A c). The weights are used as
they are: their sum, hence the length of the step, changes with who is available, and drop-outs shrink it. With the
true pi_k the expected step is that of full participation, E[sum of weights x update] = sum_k alpha_k x update_k.
With a budget below the number available, that many are drawn uniformly and the weights grow by available / budget.
The estimates used in round t count the mask of round t.
Deviations: none. The class does not claim `unbiased` in the sense of the contract, because by default pi_k is
estimated, and an estimate makes the expectation exact only in the limit; with estimates="oracle" and true values it
is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from fedpick.availability.estimators import AvailabilityCounts, no_counts
from fedpick.core.policy import Policy, Signal
from fedpick.core.types import Clients, RoundContext, Selection
from fedpick.policies._estimates import (
    availability_of,
    check_estimates,
    count_mask,
    inverse_weights,
    oracle_signals,
    sample_within_budget,
)

__all__ = ["Unbiased"]


@final
@dataclass(frozen=True, kw_only=True)
class Unbiased(Policy[AvailabilityCounts]):
    """Everybody available, weighted by importance over availability.

    Args:
        estimates: where pi_k comes from: "bayes", "bayes-chain" or "oracle".
        prior: pseudo-counts of the beta prior, for either outcome.
    """

    estimates: str = "bayes"
    prior: float = 1.0

    reference: ClassVar[str] = """
        @article{rodio2024federated,
          title = {Federated Learning Under Heterogeneous and Correlated Client Availability},
          author = {Rodio, Angelo and Faticanti, Francescomaria and Marfoq, Othmane and Neglia, Giovanni and
                    Leonardi, Emilio},
          journal = {IEEE/ACM Transactions on Networking},
          volume = {32},
          number = {2},
          pages = {1451--1460},
          year = {2024}
        }"""

    def __post_init__(self) -> None:
        check_estimates(self)

    @property
    def needs(self) -> frozenset[Signal]:
        """The true availability, with an oracle."""
        return oracle_signals(self, Signal.AVAILABILITY)

    def init(self, clients: Clients, rng: np.random.Generator) -> AvailabilityCounts:
        """Nothing seen yet."""
        return AvailabilityCounts(**no_counts(len(clients)))

    def select(
        self, state: AvailabilityCounts, context: RoundContext, rng: np.random.Generator
    ) -> tuple[Selection, AvailabilityCounts]:
        """Everybody available, or a uniform sample of them."""
        state = count_mask(self, state, context)
        weights = inverse_weights(availability_of(self, state, context), context.available, context)
        chosen, factor = sample_within_budget(context.available, context.budget, rng)
        return Selection(clients=chosen, weights=weights[chosen] * factor, renormalize=False), state
