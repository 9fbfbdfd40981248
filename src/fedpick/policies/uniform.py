"""Uniform sampling without replacement: the baseline of every paper.

Algorithm: m = budget of the available clients are chosen, every subset of that size equally likely.
Weights: by num_examples over the clients that complete (FedGS's "UniformSample"), or equal, 1/k (FedCor's "Rand").
Deviations: none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from fedpick.core.policy import Policy
from fedpick.core.sampling import sample_uniform
from fedpick.core.state import Stateless
from fedpick.core.types import Clients, RoundContext, Selection
from fedpick.core.validation import choice

__all__ = ["Uniform"]


@final
@dataclass(frozen=True, kw_only=True)
class Uniform(Policy[Stateless]):
    """Available clients uniformly at random, without replacement.

    Args:
        weighting: "examples" weights by num_examples, "equal" gives every chosen client the same weight.
    """

    weighting: str = "examples"

    reference: ClassVar[str] = """
        @inproceedings{mcmahan2017communication,
          title = {Communication-Efficient Learning of Deep Networks from Decentralized Data},
          author = {McMahan, Brendan and Moore, Eider and Ramage, Daniel and Hampson, Seth and {Ag\\"uera y Arcas}, B.},
          booktitle = {Artificial Intelligence and Statistics (AISTATS)},
          year = {2017}
        }"""

    def __post_init__(self) -> None:
        choice(self, "weighting", ("examples", "equal"))

    def init(self, clients: Clients, rng: np.random.Generator) -> Stateless:
        """Nothing to remember."""
        return Stateless()

    def select(self, state: Stateless, context: RoundContext, rng: np.random.Generator) -> tuple[Selection, Stateless]:
        """Draw the cohort."""
        chosen = sample_uniform(context.available, context.budget, rng)
        weights = np.full(len(chosen), 1 / len(chosen)) if self.weighting == "equal" and len(chosen) else None
        return Selection(clients=chosen, weights=weights), state
