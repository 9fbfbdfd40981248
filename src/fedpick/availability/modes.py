"""Availability without memory: the modes of FedGS (table 1) and the groups of Power-of-Choice (appendix G.3).

In FedGS's modes each client is reachable in every round with its own probability, independently of all others:

| name            | rate of client k in round t                                              | beta in the paper |
|-----------------|--------------------------------------------------------------------------|-------------------|
| ideal           | 1                                                                        |                   |
| homogeneous     | 1 - beta                                                                 |                   |
| more-data-first | n_k^beta / max n^beta                                                    | 0.7               |
| less-data-first | n_k^-beta / max n^-beta                                                  | 0.7               |
| y-max-first     | beta * (smallest label of k) / (L - 1) + 1 - beta                        | 0.9               |
| y-cycle         | beta * [k has the active label] + 1 - beta                               | 0.9               |
| log-normal      | c_k / max c, c_k ~ lognormal(0, -ln(1 - beta))                           | 0.5               |
| sin-log-normal  | c_k / max c * (0.4 sin(theta_t) + 0.5)                                   | 0.5               |

n_k examples, L labels (columns of the histogram). In `y-cycle` label y is active while (1 + t mod T) / T is in
(y/L, (y+1)/L], with T = 10 L rounds. The paper prints a closed interval and no T; these are the authors' values. In
`sin-log-normal` the paper misplaces a parenthesis and gives no period. Here T = 24, and the sine multiplies inside the
bracket. `phase="code"` puts theta_t at 24 equally spaced points of [0, 2 pi] *with both ends*, as the authors' code;
`phase="paper"` at 2 pi (1 + t mod T) / T.

`alternating-groups` models time zones. The clients are cut into two fixed halves. The first half is reachable in even
rounds, the second in odd rounds, each time without a random tenth of it. The paper says 10 %; the code in the authors'
supplement leaves out 20 %: `excluded=0.2`.

Deviations from FedGS. A round in which no client is reachable stays empty. The authors draw again until one is, which
`redraw=True` does; the reported rates are those before it. The authors shrink beta by 1e-6 in the log-normal modes so
that beta = 1 is finite; here beta = 1 is refused. Clients without examples have the rate 0 in more-data-first (unless
beta = 0), 1 in less-data-first, and no label of their own in the y-modes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from fedpick.availability.process import (
    AvailabilityProcess,
    Trace,
    trace_stream,
)
from fedpick.core.arrays import BoolArray, FloatArray
from fedpick.core.errors import InvalidInput
from fedpick.core.types import Clients
from fedpick.core.validation import assign, choice, flag, number, whole

__all__ = [
    "AlternatingGroups",
    "AlternatingTrace",
    "Homogeneous",
    "Ideal",
    "IndependentTrace",
    "LessDataFirst",
    "LogNormal",
    "MoreDataFirst",
    "SinLogNormal",
    "YCycle",
    "YMaxFirst",
]

FEDGS = """@inproceedings{wang2023fedgs,
  title={{FedGS}: Federated Graph-Based Sampling with Arbitrary Client Availability},
  author={Wang, Zheng and Fan, Xiaoliang and Qi, Jianzhong and Jin, Haibing and Yang, Peizhen and Shen, Siqi and
          Wang, Cheng},
  booktitle={Proceedings of the AAAI Conference on Artificial Intelligence},
  year={2023}
}"""

POWER_OF_CHOICE = """@inproceedings{cho2022power,
  title={Towards Understanding Biased Client Selection in Federated Learning},
  author={Cho, Yae Jee and Wang, Jianyu and Joshi, Gauri},
  booktitle={International Conference on Artificial Intelligence and Statistics},
  year={2022}
}"""

# With redraw: after this many empty draws the round stays empty.
_MOST_REDRAWS = 1000


@final
class IndependentTrace(Trace):
    """Every client is drawn independently in every round, with a rate that repeats after `period` rounds."""

    def __init__(
        self,
        num_clients: int,
        seed: int,
        *,
        rates: Callable[[int], FloatArray],
        period: int = 1,
        redraw: bool = False,
    ) -> None:
        super().__init__(num_clients, seed)
        self.period = period
        self.redraw = redraw
        self._rates = rates

    def rates(self, round: int) -> FloatArray:
        """(N,) the probability of being available in this round."""
        return self._rates(round % self.period)

    def _mask(self, round: int) -> BoolArray:
        rates = self.rates(round)
        generator = self._round_stream(round)
        mask = generator.random(self.num_clients) < rates
        if self.redraw and rates.max() > 0:
            for _ in range(_MOST_REDRAWS):
                if mask.any():
                    break
                mask = generator.random(self.num_clients) < rates
        return mask

    def _truth(self) -> tuple[FloatArray, FloatArray]:
        # Over a long run: the mean over the period, and the covariance of consecutive rates (draws are independent).
        first = previous = self.rates(0)
        total, products = first.copy(), np.zeros(self.num_clients)
        for round in range(1, self.period):
            rates = self.rates(round)
            total += rates
            products += previous * rates
            previous = rates
        products += previous * first
        mean = total / self.period
        variance = mean * (1.0 - mean)
        covariance = products / self.period - mean**2
        correlation = np.zeros(self.num_clients)
        if self.period > 1:
            np.divide(covariance, variance, out=correlation, where=variance > 1e-15)
        return np.clip(mean, 0.0, 1.0), correlation


def _constant(rates: FloatArray) -> Callable[[int], FloatArray]:
    return lambda _: rates


def _labels_present(process: AvailabilityProcess, clients: Clients) -> BoolArray:
    histogram = clients.label_histogram
    if histogram is None:
        raise InvalidInput(
            f"{type(process).__name__} makes availability depend on the labels a client has, so it needs "
            "Clients.label_histogram, which this table does not have. Give it, or choose a mode without labels."
        )
    if histogram.shape[1] < 2:
        raise InvalidInput(
            f"{type(process).__name__} needs at least two labels. Clients.label_histogram has {histogram.shape[1]}."
        )
    return histogram > 0


@final
@dataclass(frozen=True, kw_only=True)
class Ideal(AvailabilityProcess):
    """All clients are available in every round."""

    def start(self, clients: Clients, seed: int) -> IndependentTrace:
        """See `AvailabilityProcess.start`."""
        return IndependentTrace(len(clients), seed, rates=_constant(np.ones(len(clients))))


@final
@dataclass(frozen=True, kw_only=True)
class Homogeneous(AvailabilityProcess):
    """All clients are available with the same probability 1 - beta."""

    beta: float = 0.5
    redraw: bool = False
    reference: ClassVar[str] = FEDGS

    def __post_init__(self) -> None:
        assign(self, beta=number(self, "beta", "[0, 1]"))
        flag(self, "redraw")

    def start(self, clients: Clients, seed: int) -> IndependentTrace:
        """See `AvailabilityProcess.start`."""
        rates = np.full(len(clients), 1.0 - self.beta)
        return IndependentTrace(len(clients), seed, rates=_constant(rates), redraw=self.redraw)


@final
@dataclass(frozen=True, kw_only=True)
class MoreDataFirst(AvailabilityProcess):
    """The more data, the more available (MDF)."""

    beta: float = 0.7
    redraw: bool = False
    reference: ClassVar[str] = FEDGS

    def __post_init__(self) -> None:
        assign(self, beta=number(self, "beta", "[0, inf)"))
        flag(self, "redraw")

    def start(self, clients: Clients, seed: int) -> IndependentTrace:
        """See `AvailabilityProcess.start`."""
        rates = (clients.num_examples / clients.num_examples.max()) ** self.beta
        return IndependentTrace(len(clients), seed, rates=_constant(rates), redraw=self.redraw)


@final
@dataclass(frozen=True, kw_only=True)
class LessDataFirst(AvailabilityProcess):
    """The less data, the more available (LDF)."""

    beta: float = 0.7
    redraw: bool = False
    reference: ClassVar[str] = FEDGS

    def __post_init__(self) -> None:
        assign(self, beta=number(self, "beta", "[0, inf)"))
        flag(self, "redraw")

    def start(self, clients: Clients, seed: int) -> IndependentTrace:
        """See `AvailabilityProcess.start`."""
        sizes = clients.num_examples
        smallest = sizes[sizes > 0].min()
        rates: FloatArray = (smallest / np.maximum(sizes, smallest)) ** self.beta
        return IndependentTrace(len(clients), seed, rates=_constant(rates), redraw=self.redraw)


@final
@dataclass(frozen=True, kw_only=True)
class YMaxFirst(AvailabilityProcess):
    """The larger a client's smallest label, the more available it is (YMF)."""

    beta: float = 0.9
    redraw: bool = False
    reference: ClassVar[str] = FEDGS

    def __post_init__(self) -> None:
        assign(self, beta=number(self, "beta", "[0, 1]"))
        flag(self, "redraw")

    def start(self, clients: Clients, seed: int) -> IndependentTrace:
        """See `AvailabilityProcess.start`."""
        present = _labels_present(self, clients)
        smallest = present.argmax(axis=1)  # the first True; 0 for a client without labels
        rates = self.beta * smallest / (present.shape[1] - 1) + (1.0 - self.beta)
        return IndependentTrace(len(clients), seed, rates=_constant(rates), redraw=self.redraw)


@final
@dataclass(frozen=True, kw_only=True)
class YCycle(AvailabilityProcess):
    """One label is active at a time; the clients that have it are available (YC)."""

    beta: float = 0.9
    period: int | None = None
    """Rounds until every label was active; None: ten per label."""
    redraw: bool = False
    reference: ClassVar[str] = FEDGS

    def __post_init__(self) -> None:
        assign(self, beta=number(self, "beta", "[0, 1]"))
        if self.period is not None:
            assign(self, period=whole(self, "period", 1))
        flag(self, "redraw")

    def start(self, clients: Clients, seed: int) -> IndependentTrace:
        """See `AvailabilityProcess.start`."""
        present = _labels_present(self, clients)
        num_labels = present.shape[1]
        period = 10 * num_labels if self.period is None else self.period

        def rates(round: int) -> FloatArray:
            # The label y with y/L < (1 + t)/T <= (y+1)/L, in whole numbers: no rounding at the borders.
            label = ((1 + round) * num_labels - 1) // period
            return np.where(present[:, label], 1.0, 1.0 - self.beta)

        return IndependentTrace(len(clients), seed, rates=rates, period=period, redraw=self.redraw)


@final
@dataclass(frozen=True, kw_only=True)
class LogNormal(AvailabilityProcess):
    """Every client has its own probability, log-normal relative to the largest (LN)."""

    beta: float = 0.5
    redraw: bool = False
    reference: ClassVar[str] = FEDGS

    def __post_init__(self) -> None:
        assign(self, beta=number(self, "beta", "[0, 1)"))
        flag(self, "redraw")

    def start(self, clients: Clients, seed: int) -> IndependentTrace:
        """See `AvailabilityProcess.start`."""
        rates = _log_normal_rates(self.beta, len(clients), seed)
        return IndependentTrace(len(clients), seed, rates=_constant(rates), redraw=self.redraw)


@final
@dataclass(frozen=True, kw_only=True)
class SinLogNormal(AvailabilityProcess):
    """Log-normal probabilities that rise and fall like a sine (SLN)."""

    beta: float = 0.5
    period: int = 24
    phase: str = "code"
    redraw: bool = False
    reference: ClassVar[str] = FEDGS

    def __post_init__(self) -> None:
        assign(self, beta=number(self, "beta", "[0, 1)"), period=whole(self, "period", 2))
        choice(self, "phase", ("code", "paper"))
        flag(self, "redraw")

    def start(self, clients: Clients, seed: int) -> IndependentTrace:
        """See `AvailabilityProcess.start`."""
        base = _log_normal_rates(self.beta, len(clients), seed)
        steps = np.arange(self.period)
        turns = steps / (self.period - 1) if self.phase == "code" else (1 + steps) / self.period
        factors = 0.4 * np.sin(2 * np.pi * turns) + 0.5
        return IndependentTrace(
            len(clients), seed, rates=lambda round: base * factors[round], period=self.period, redraw=self.redraw
        )


def _log_normal_rates(beta: float, num_clients: int, seed: int) -> FloatArray:
    # Scale normal draws here instead of calling `lognormal`: sigma = 0 must give exact ones.
    draws = trace_stream(seed).standard_normal(num_clients) * -np.log1p(-beta)
    rates: FloatArray = np.exp(draws - draws.max())
    return rates


@final
class AlternatingTrace(Trace):
    """Group t mod G is active in round t, without a random part of fixed size."""

    def __init__(self, num_clients: int, seed: int, *, num_groups: int, excluded: float) -> None:
        super().__init__(num_clients, seed)
        self._borders = np.arange(num_groups + 1) * num_clients // num_groups
        sizes = np.diff(self._borders)
        # The tolerance guards against rounding such as 0.29 * 100 = 28.999999999999996.
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
