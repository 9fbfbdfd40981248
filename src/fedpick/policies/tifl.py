"""TiFL: one tier of equally fast clients per round, slow tiers of high loss more often (Chai et al., HPDC 2020).

Algorithm (the paper's adaptive selection, algorithm 2), with m = budget and t the round, from 0:

1. Clients whose duration is known are sorted by it and cut into `tiers` groups of equal size, the fastest first.
   Clients of equal duration are in the same group, the slowest of those that they would fill.
2. Every `interval` rounds the tier of the last round is reviewed: if its loss is not lower than at the last review, the
   probabilities change. The tiers that have credits are ranked by loss; of n, the one with the highest loss gets the
   probability n / D, the next (n - 1) / D, and so on, with D = n (n + 1) / 2. They are equal at the start.
3. A tier with credits is drawn, and one of its credits is spent.
4. m available clients of the tier are drawn uniformly. The model moves by FedAvg, weighted by size.

The loss of a tier is the mean of the latest reported losses of its clients.

Deviations. The paper measures every client's duration before training and each tier's accuracy on test data that its
clients hold. Here both come from reports of training: a client that was never selected belongs to every tier, so that
training measures it; a client that did not complete and reported no duration counts as slower than all others until it
reports one (the paper leaves it out). A late client's duration counts although its update does not. A tier of unknown
loss counts as one of mean loss. Places that the tier cannot fill go to the nearest tiers, the faster one first. If
every tier is out of credits, all get theirs back. Public code instead draws clients with replacement, fails unless the
number of tiers divides that of clients, and searches for ever when all credits are spent.

>>> probabilities([0.5, 2.0, 1.0], [True, True, True]).tolist()
[0.16666666666666666, 0.5, 0.3333333333333333]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np

from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.core.policy import Policy, Signal
from fedpick.core.sampling import top_k
from fedpick.core.state import per_client
from fedpick.core.types import Clients, Outcome, RoundContext, Selection
from fedpick.core.validation import whole

__all__ = ["TiFL", "TierState", "probabilities", "reference_tiers"]


def reference_tiers(duration: Sequence[float], tiers: int) -> list[int]:
    """Step 1: the tier of each client, from 0. Infinite: tried without a report."""
    tier_of = {seconds: place * tiers // len(duration) for place, seconds in enumerate(sorted(duration))}
    return [tier_of[seconds] for seconds in duration]


def probabilities(loss: Sequence[float], funded: Sequence[bool]) -> FloatArray:
    """Step 2: the probability of each tier, by its loss and whether it has credits."""
    known = [value for value in loss if not math.isnan(value)]
    mean = sum(known) / len(known) if known else 0.0
    with_credits = [tier for tier, has_credits in enumerate(funded) if has_credits]
    ranked = sorted(with_credits, key=lambda tier: mean if math.isnan(loss[tier]) else loss[tier])
    chances = np.zeros(len(loss))
    chances[ranked] = np.arange(1, len(ranked) + 1) / sum(range(1, len(ranked) + 1))
    return chances


@dataclass(frozen=True)
class TierState:
    """What is known of every client, and of the tiers."""

    chances: FloatArray
    """(tiers,) the probabilities of step 2, for all tiers."""
    credits: IntArray
    """(tiers,) credits left."""
    last_tier: int
    """The tier of the last round; -1: none."""
    earlier_loss: FloatArray
    """(tiers,) the losses at the last review; NaN if not known."""
    tried: BoolArray = per_client()
    """(N,) whether the client was selected before."""
    duration: FloatArray = per_client()
    """(N,) the latest duration; NaN if not known."""
    loss: FloatArray = per_client()
    """(N,) the latest loss; NaN if not known."""


@final
@dataclass(frozen=True, kw_only=True)
class TiFL(Policy[TierState]):
    """Draw every cohort from one tier of equally fast clients; tiers of high loss more often.

    Args:
        tiers: number of tiers.
        interval: rounds between two reviews of the losses of the tiers.
        credits: rounds in which each tier may be chosen, until all have spent theirs; None: no limit.
    """

    tiers: int = 5
    interval: int = 10
    credits: int | None = None

    reference: ClassVar[str] = """
        @inproceedings{chai2020tifl,
          title = {{TiFL}: A Tier-based Federated Learning System},
          author = {Chai, Zheng and Ali, Ahsan and Zawad, Syed and Truex, Stacey and Anwar, Ali and Baracaldo, Nathalie
                    and Zhou, Yi and Ludwig, Heiko and Yan, Feng and Cheng, Yue},
          booktitle = {International Symposium on High-Performance Parallel and Distributed Computing (HPDC)},
          year = {2020}
        }"""

    def __post_init__(self) -> None:
        whole(self, "tiers", 1, most=100_000)
        whole(self, "interval", 1)
        whole(self, "credits", 1, optional=True)

    @property
    def needs(self) -> frozenset[Signal]:
        """The durations, and the losses by which tiers are ranked."""
        return frozenset({Signal.DURATION, Signal.OUTCOME_LOSS})

    def init(self, clients: Clients, rng: np.random.Generator) -> TierState:
        """All tiers are equally likely, and no client was tried."""
        return TierState(
            chances=np.full(self.tiers, 1 / self.tiers),
            credits=self._all_credits(),
            last_tier=-1,
            earlier_loss=np.full(self.tiers, np.nan),
            tried=np.zeros(len(clients), dtype=bool),
            duration=np.full(len(clients), np.nan),
            loss=np.full(len(clients), np.nan),
        )

    def _all_credits(self) -> IntArray:
        return np.full(self.tiers, 0 if self.credits is None else self.credits, dtype=np.int64)

    def select(self, state: TierState, context: RoundContext, rng: np.random.Generator) -> tuple[Selection, TierState]:
        """Draw a tier, then its clients."""
        if not context.available.any() or context.budget == 0:
            return Selection(clients=np.empty(0, dtype=np.int64)), state
        tier = _tiers(state, self.tiers)
        if context.index and context.index % self.interval == 0:
            state = self._reviewed(state, tier)
        candidates = np.flatnonzero(context.available)
        here = np.unique(tier[candidates])
        # A client that was never tried belongs to every tier.
        reachable = np.isin(np.arange(self.tiers), here) | (here[0] < 0)
        state, chosen_tier = self._draw_tier(state, reachable, rng)
        distance = np.abs(tier[candidates] - chosen_tier) * 2.0 + (tier[candidates] > chosen_tier)
        distance[tier[candidates] < 0] = 0
        chosen = candidates[top_k(-distance, context.budget, rng)]
        diagnostics = {"tier": chosen_tier, "tried": int(np.count_nonzero(state.tried))}
        return Selection(clients=chosen, diagnostics=diagnostics), replace(state, last_tier=chosen_tier)

    def _reviewed(self, state: TierState, tier: IntArray) -> TierState:
        """Step 2."""
        losses = _tier_losses(state, tier, self.tiers)
        before, now = (float(values[state.last_tier]) for values in (state.earlier_loss, losses))
        if state.last_tier >= 0 and now >= before:  # False if one of them is not known
            state = replace(state, chances=probabilities(losses.tolist(), self._funded(state).tolist()))
        return replace(state, earlier_loss=losses)

    def _funded(self, state: TierState) -> BoolArray:
        return state.credits > 0 if self.credits is not None else np.ones(self.tiers, dtype=bool)

    def _draw_tier(self, state: TierState, reachable: BoolArray, rng: np.random.Generator) -> tuple[TierState, int]:
        """Step 3: a tier that has credits and an available client. Without one, all tiers get their credits back."""
        if not (self._funded(state) & reachable).any():
            state = replace(state, credits=self._all_credits())
        open_ = self._funded(state) & reachable
        chances = np.where(open_, state.chances, 0.0)
        if chances.sum() == 0:  # tiers that had no credits when the probabilities changed
            chances = open_.astype(float)
        drawn = int(rng.choice(self.tiers, p=chances / chances.sum()))
        spent = np.arange(self.tiers) == drawn if self.credits is not None else 0
        return replace(state, credits=state.credits - spent), drawn

    def observe(self, state: TierState, outcome: Outcome) -> TierState:
        """Keep the latest reports. A client that failed without a duration is as slow as one that has none."""
        chosen = outcome.clients
        tried, duration, loss = state.tried.copy(), state.duration.copy(), state.loss.copy()
        tried[chosen] = True
        known = ~np.isnan(outcome.duration)
        duration[chosen[known]] = outcome.duration[known]
        duration[chosen[~known & ~outcome.completed]] = np.nan
        usable = outcome.completed & ~np.isnan(outcome.loss)
        loss[chosen[usable]] = outcome.loss[usable]
        return replace(state, tried=tried, duration=duration, loss=loss)


def _tiers(state: TierState, tiers: int) -> IntArray:
    """(N,) the tier of every client that was tried; -1 for the others."""
    tier = np.full(len(state.tried), -1)
    duration = state.duration[state.tried]
    duration = np.where(np.isnan(duration), np.inf, duration)
    # The duration at the first place of every tier but the fastest; with few clients a tier may be empty.
    places = -(-np.arange(1, tiers) * len(duration) // tiers)
    places = places[places < len(duration)]
    if len(duration):
        firsts = np.partition(duration, places)[places] if len(places) else np.empty(0)
        tier[state.tried] = np.searchsorted(firsts, duration, side="right")
    return tier


def _tier_losses(state: TierState, tier: IntArray, tiers: int) -> FloatArray:
    """(tiers,) the mean of the known losses."""
    known = ~np.isnan(state.loss) & (tier >= 0)
    sums = np.bincount(tier[known], weights=state.loss[known], minlength=tiers)
    counts = np.bincount(tier[known], minlength=tiers)
    means: FloatArray = np.full(tiers, np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means
