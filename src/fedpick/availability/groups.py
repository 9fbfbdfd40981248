"""Groups that take turns, as in different time zones (Power-of-Choice, appendix G.3).

The clients are cut into two fixed halves. In even rounds the first half can be reached, in odd rounds the second, each
time without a random tenth of it. The paper says 10 %; the code in the authors' supplement leaves out 20 %:
`excluded=0.2`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from fedpick.availability.process import (
    AvailabilityProcess,
    Trace,
)
from fedpick.core.arrays import BoolArray, FloatArray
from fedpick.core.errors import InvalidInput
from fedpick.core.types import Clients
from fedpick.core.validation import assign, number, whole

__all__ = ["AlternatingGroups", "AlternatingTrace"]

POWER_OF_CHOICE = """@inproceedings{cho2022power,
  title={Towards Understanding Biased Client Selection in Federated Learning},
  author={Cho, Yae Jee and Wang, Jianyu and Joshi, Gauri},
  booktitle={International Conference on Artificial Intelligence and Statistics},
  year={2022}
}"""


@final
class AlternatingTrace(Trace):
    """Group t mod G is active in round t, without a random part of fixed size."""

    def __init__(self, num_clients: int, seed: int, *, num_groups: int, excluded: float) -> None:
        super().__init__(num_clients, seed)
        self._borders = np.arange(num_groups + 1) * num_clients // num_groups
        sizes = np.diff(self._borders)
        # The hair guards against 0.1 * 30 = 3.0000000000000004 and its like falling on the wrong side.
        self._left_out = np.floor(sizes * excluded + 1e-9).astype(np.int64)

    def _mask(self, round: int) -> BoolArray:
        group = round % len(self._left_out)
        start, end = int(self._borders[group]), int(self._borders[group + 1])
        mask = np.zeros(self.num_clients, dtype=np.bool_)
        mask[start:end] = True
        left_out = int(self._left_out[group])
        if left_out:
            chosen = self._round_stream(round).choice(end - start, size=left_out, replace=False, shuffle=False)
            mask[start + chosen] = False
        return mask

    def _truth(self) -> tuple[FloatArray, FloatArray]:
        sizes, groups = np.diff(self._borders), len(self._left_out)
        rate = 1.0 - self._left_out / sizes
        mean = rate / groups
        # Two consecutive rounds never have the same group active, unless there is only one.
        product = rate**2 if groups == 1 else np.zeros(groups)
        variance = mean * (1.0 - mean)
        correlation = np.divide(product - mean**2, variance, out=np.zeros(groups), where=variance > 1e-15)
        if groups == 1:
            correlation[:] = 0.0
        return np.repeat(mean, sizes), np.repeat(correlation, sizes)


@final
@dataclass(frozen=True, kw_only=True)
class AlternatingGroups(AvailabilityProcess):
    """Fixed groups of clients take turns; a random part of the active group is left out."""

    num_groups: int = 2
    excluded: float = 0.1
    """Share of the active group left out at random in each round, rounded down to whole clients."""
    reference: ClassVar[str] = POWER_OF_CHOICE

    def __post_init__(self) -> None:
        assign(self, num_groups=whole(self, "num_groups", 1), excluded=number(self, "excluded", "[0, 1]"))

    def start(self, clients: Clients, seed: int) -> AlternatingTrace:
        """See `AvailabilityProcess.start`."""
        if self.num_groups > len(clients):
            raise InvalidInput(
                f"AlternatingGroups has {self.num_groups} groups, but there are only {len(clients)} clients."
            )
        return AlternatingTrace(len(clients), seed, num_groups=self.num_groups, excluded=self.excluded)
