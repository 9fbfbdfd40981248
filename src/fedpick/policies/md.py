"""Multinomial ("MD") sampling: clients drawn with replacement by importance, averaged equally.

Algorithm: m = budget independent draws among the available clients, client k with probability p_k over its sum on the
available, p_k the importance (by default the share of examples). The model moves by the plain mean of the m updates.
This is the "rand" baseline of Power-of-Choice and the "MDSample" baseline of FedGS; with everybody available it is
unbiased: E[sum of weights x update] = sum_k p_k x update_k.
Deviations: a client drawn several times trains once and its weight is multiplied, instead of training again with other
mini-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from fedpick.core.policy import Policy
from fedpick.core.sampling import draw_with_replacement
from fedpick.core.state import Stateless
from fedpick.core.types import Clients, RoundContext, Selection

__all__ = ["Multinomial"]


@final
@dataclass(frozen=True, kw_only=True)
class Multinomial(Policy[Stateless]):
    """Draws with replacement by importance; copies of a client fold into its weight."""

    unbiased: ClassVar[bool] = True
    reference: ClassVar[str] = """
        @inproceedings{li2020convergence,
          title = {On the Convergence of FedAvg on Non-IID Data},
          author = {Li, Xiang and Huang, Kaixuan and Yang, Wenhao and Wang, Shusen and Zhang, Zhihua},
          booktitle = {International Conference on Learning Representations (ICLR)},
          year = {2020}
        }"""

    def init(self, clients: Clients, rng: np.random.Generator) -> Stateless:
        """Nothing to remember."""
        return Stateless()

    def select(self, state: Stateless, context: RoundContext, rng: np.random.Generator) -> tuple[Selection, Stateless]:
        """Make `budget` draws, even if fewer clients are available."""
        drawn, multiplicity = draw_with_replacement(context.clients.importance, context.available, context.budget, rng)
        return Selection(clients=drawn, weights=multiplicity / max(context.budget, 1)), state
