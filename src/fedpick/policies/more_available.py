"""Only the clients that are usually there: CA-Fed's second baseline, fast and biased.

Algorithm: available clients with pi_k >= 1/2 train, with the weight alpha_k / pi_k, used as it is; the others never
do (CA-Fed, Rodio et al. 2024, section V-A c). A round in which none of them is available has an empty cohort.
With a budget below their number, that many are drawn uniformly and the weights grow by their number / budget.
The estimates used in round t count the mask of round t.
Deviations: the paper knows two classes of clients, pi = 0.9 and 0.1, and keeps the first; the threshold of 1/2
between them, and its use with estimates, are ours. It is not in the authors' code.
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

__all__ = ["MoreAvailable"]


@final
@dataclass(frozen=True, kw_only=True)
class MoreAvailable(Policy[AvailabilityCounts]):
    """Available clients that are there at least half of the time, weighted by importance over availability.

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
