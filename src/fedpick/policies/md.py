"""Multinomial ("MD") sampling: clients drawn with replacement by importance, averaged equally.

Algorithm: m = budget independent draws among the available clients. Client k has probability p_k over the sum of p on
the available clients, p_k being its importance (by default the share of examples). The model moves by the plain mean of
the m updates. This is the "rand" baseline of Power-of-Choice and the "MDSample" baseline of FedGS. With all clients
available it is unbiased: E[sum of weights x update] = sum_k p_k x update_k.
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

__all__ = ["MD"]


@final
@dataclass(frozen=True, kw_only=True)
class MD(Policy[Stateless]):
    """Draws with replacement by importance. The weight of a client counts how often it was drawn."""

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
