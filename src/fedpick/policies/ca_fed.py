"""CA-Fed (Rodio et al. 2024): leave out clients that slow the training down more than their absence biases the model.

Algorithm 1, round t, in our names:
 1. Every available client reports its loss on one mini-batch (line 3). The estimate of its loss keeps the share
    `smoothing` of its old value and takes the rest from the report, F_k = smoothing * old + (1 - smoothing) * report
    (equation 17); F_k* is the smallest F_k so far. The gap of a client is F_k - F_k*, Gamma' the largest gap of all.
 2. pi_k (availability) and lambda_k (correlation) are updated with the mask of this round (line 4): what is used in
    round t *includes* round t.
 3. Everybody starts with the weight q_k = alpha_k / pi_k (line 5). Two greedy passes go over *all* clients, the first
    by |lambda_k| descending (line 6), the second by pi_k ascending (line 7), equal ones by index. A client is dropped,
    q_k = 0, if the proxy of the total error (equation 20)

        epsilon = sum_k p_k gap_k + 4 kappa2 d_TV(alpha, p)^2 Gamma',    p_k = pi_k q_k / sum_h pi_h q_h

    falls by more than `tau`; a client that stays does not end the pass.
 4. The available clients that are left train, with the weights q_k as they are: not normalised.

With q_k = alpha_k / pi_k a client that is left has p_k = alpha_k / A, A the sum of alpha over those left. So
d_TV = 1 - A, the first term is S / A with S the sum of alpha_k gap_k over those left, and trying to drop client k
changes epsilon by a formula in (A, S, alpha_k, gap_k): a pass costs one sort and O(1) per client instead of O(N).

Choices where the paper is silent or contradicts itself: the proxy must fall by *strictly* more than tau (the text;
the listing's >= drops everybody while all gaps are still 0); `smoothing` is 1 minus equation 17's beta (the
experiments' "beta = 0" only makes sense so); a client never measured has the mean gap of those measured; the last
client of positive importance is never dropped; a budget below the number left means a uniform sample of that size,
with weights grown by left / budget, so that the expected step stays; a gap below 0 (only possible with given minima)
counts as 0.
Deviations: the authors' code has no factor 4 (its bias_const = 1 is kappa2 = 0.25 here), drops on ties, takes the
loss over the whole local test split (batch_size=None asks for the whole local data), F_k* from models fitted in
advance (minimum_loss=[...]; for images its fit fails and leaves 0: minimum_loss="zero"), and gives whoever is not there
in the first round the mean loss of those who are, for as long as it stays away (unmeasured="first-mean").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import numpy as np

from fedpick.availability.estimators import AvailabilityCounts, no_counts
from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.core.errors import InvalidInput
from fedpick.core.policy import Policy, Signal
from fedpick.core.state import derived, per_client
from fedpick.core.types import Clients, Probe, RoundContext, Selection
from fedpick.core.validation import assign, choice, number, require, whole
from fedpick.policies._estimates import (
    RODIO,
    availability_of,
    check_estimates,
    correlation_of,
    count_mask,
    inverse_weights,
    oracle_signals,
    sample_within_budget,
)

__all__ = ["CAFed", "CAFedState"]

# Above this the diagnostics do not list who is excluded: one flag per client and round would fill the logs.
_MASK_LIMIT = 5000
# Clients of a pass that are filtered at once. At a million clients the filter halves the time of the plain loop.
_BLOCK = 4096
# Far above the rounding error of the running sums, relative to the largest gap.
_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True, eq=False)
class CAFedState(AvailabilityCounts):
    """The masks counted so far, and what is known of every client's loss."""

    loss: FloatArray = per_client()
    """(N,) smoothed loss of the global model; NaN: never measured."""
    lowest: FloatArray = per_client()
    """(N,) the smallest smoothed loss so far; NaN: never measured."""
    given: FloatArray = derived()
    """(N,) F_k* as given by the hyper-parameters; NaN: use `lowest`."""


@final
@dataclass(frozen=True, kw_only=True)
class CAFed(Policy[CAFedState]):
    """Drops clients whose rare or bursty presence costs more than their absence biases; the rest stay unbiased.

    Args:
        kappa2: weight of the bias error; large keeps more clients, infinite keeps all (then it is `unbiased`).
        tau: a client is dropped if the proxy falls by strictly more than this.
        smoothing: share of the old loss estimate that is kept, in [0, 1).
        estimates: where pi_k and lambda_k come from: "bayes", "bayes-chain" or "oracle".
        prior: pseudo-counts of the beta priors, for either outcome.
        batch_size: size of the mini-batch on which a client reports its loss; None: its whole data.
        minimum_loss: F_k*: "running" (the smallest estimate so far), "zero", or one value per client, fitted in
            advance; clients beyond the end of the values, or with NaN, use the running minimum.
        unmeasured: what counts for a client that was never measured: "mean-gap", the mean gap of those measured, as it
            changes; or "first-mean", the mean loss in the first round in which somebody answered. That one grows stale
            while the others' losses fall, so with minimum_loss="zero" clients that stay away are excluded.
    """

    kappa2: float = 1.0
    tau: float = 0.0
    smoothing: float = 0.0
    estimates: str = "bayes"
    prior: float = 1.0
    batch_size: int | None = 64
    minimum_loss: str | Sequence[float] = "running"
    unmeasured: str = "mean-gap"

    reference: ClassVar[str] = RODIO

    def __post_init__(self) -> None:
        check_estimates(self)
        number(self, "kappa2", "[0, inf]")
        number(self, "tau", "[0, inf)")
        number(self, "smoothing", "[0, 1)")
        whole(self, "batch_size", 1, optional=True)
        choice(self, "unmeasured", ("mean-gap", "first-mean"))
        if isinstance(self.minimum_loss, str):
            require(self.minimum_loss in ("running", "zero"), self, "minimum_loss", "'running', 'zero' or values")
        else:  # as a tuple, so that the policy stays a hashable value
            assign(self, minimum_loss=tuple(float(value) for value in self.minimum_loss))
            require(not np.isinf(self.minimum_loss).any(), self, "minimum_loss", "finite values, or NaN for unknown")

    @property
    def needs(self) -> frozenset[Signal]:
        """A loss from every available client; the truth about availability, with an oracle."""
        return frozenset({Signal.LOSS}) | oracle_signals(self, Signal.AVAILABILITY, Signal.CORRELATION)

    def init(self, clients: Clients, rng: np.random.Generator) -> CAFedState:
        """Nothing seen yet; a newcomer has no history and, until it is measured, the mean gap of the others."""
        count = len(clients)
        unknown = np.full(count, np.nan)
        return CAFedState(**no_counts(count), loss=unknown, lowest=unknown, given=self._given_minima(count))

    def _given_minima(self, count: int) -> FloatArray:
        if isinstance(self.minimum_loss, str):
            return np.full(count, 0.0 if self.minimum_loss == "zero" else np.nan)
        if len(self.minimum_loss) > count:
            raise InvalidInput(
                f"minimum_loss has {len(self.minimum_loss)} values, but there are {count} clients. Give one value per "
                "client, in the order of the table."
            )
        minima = np.full(count, np.nan)
        minima[: len(self.minimum_loss)] = self.minimum_loss
        return minima

    def probe(self, state: CAFedState, context: RoundContext, rng: np.random.Generator) -> tuple[Probe, ...]:
        """Ask everybody available for the loss; a round without a budget only watches who is there."""
        if context.budget == 0:
            return ()
        return (Probe(clients=np.flatnonzero(context.available), batch_size=self.batch_size),)

    def select(
        self, state: CAFedState, context: RoundContext, rng: np.random.Generator
    ) -> tuple[Selection, CAFedState]:
        """Update every estimate, run the two passes over all clients, take those left that are available."""
        state = self._with_losses(count_mask(self, state, context), context)
        availability = availability_of(self, state, context)
        gap = gaps(state)
        included = included_clients(
            context.clients.importance,
            gap,
            correlation_of(self, state, context),
            availability,
            kappa2=self.kappa2,
            tau=self.tau,
        )
        survivors = context.available & included
        weights = inverse_weights(availability, survivors, context)
        chosen, factor = sample_within_budget(survivors, context.budget, rng)
        selection = Selection(
            clients=chosen,
            weights=weights[chosen] * factor,
            renormalize=False,
            diagnostics=self._diagnostics(context, included, gap),
        )
        return selection, state

    def _with_losses(self, state: CAFedState, context: RoundContext) -> CAFedState:
        """Equation 17 for those who answered; everybody else keeps the old estimate."""
        if not context.measurements:
            return state
        answered = ~np.isnan(context.measurements[0].values)
        clients, values = context.measurements[0].clients[answered], context.measurements[0].values[answered]
        old = state.loss[clients]
        mixed = np.where(np.isnan(old), values, self.smoothing * old + (1 - self.smoothing) * values)
        loss, lowest = state.loss.copy(), state.lowest.copy()
        if self.unmeasured == "first-mean" and len(values) > 0 and np.isnan(loss).all():
            loss[:] = lowest[:] = values.mean()
            lowest[clients] = np.nan
        loss[clients] = mixed
        lowest[clients] = np.fmin(lowest[clients], mixed)
        return replace(state, loss=loss, lowest=lowest)

    def _diagnostics(self, context: RoundContext, included: BoolArray, gap: FloatArray) -> dict[str, Any]:
        importance = context.clients.importance / context.clients.importance.sum()
        kept = importance[included].sum()
        distance = float(importance[~included].sum())
        largest = float(gap.max())
        diagnostics: dict[str, Any] = {
            "epsilon_opt": float(importance[included] @ gap[included] / kept),
            # Infinite kappa2 excludes nobody: the bias is 0, not infinity times 0.
            "epsilon_bias": 4 * self.kappa2 * distance**2 * largest if distance > 0 else 0.0,
            "total_variation": distance,
            "gamma": largest,
            "excluded": int(np.count_nonzero(~included)),
            "available_excluded": int(np.count_nonzero(context.available & ~included)),
        }
        if len(included) <= _MASK_LIMIT:
            diagnostics["excluded_mask"] = ~included
        return diagnostics


def gaps(state: CAFedState) -> FloatArray:
    """F_k - F_k*, (N,): at least 0, and the mean of those measured where nothing was measured."""
    minimum = np.where(np.isnan(state.given), state.lowest, state.given)
    gap = np.maximum(state.loss - minimum, 0.0)
    measured = ~np.isnan(gap)
    gap[~measured] = gap[measured].mean() if measured.any() else 0.0
    return gap


def included_clients(
    importance: FloatArray,
    gap: FloatArray,
    correlation: FloatArray,
    availability: FloatArray,
    *,
    kappa2: float,
    tau: float,
) -> BoolArray:
    """Who is left after the pass by correlation and the pass by availability, (N,); never empty.

    >>> included_clients(np.full(4, 0.25), np.array([1.0, 0.1, 0.1, 0.1]), np.array([0.9, 0.8, 0.0, 0.0]),
    ...                  np.full(4, 0.5), kappa2=0.5, tau=0.0)
    array([False,  True,  True,  True])
    """
    included = np.ones(len(importance), dtype=np.bool_)
    largest = float(gap.max())
    if largest <= 0 or np.isinf(kappa2):
        return included  # the first term is 0 already, or any bias is infinitely bad
    share = importance / importance.sum()
    # The decrease depends on gap_k minus the mean gap only. Measured from the smallest gap, equal gaps are exactly 0,
    # so that rounding never drops a client in a tie.
    excess = gap - gap.min()
    for key in (-np.abs(correlation), availability):
        left = np.flatnonzero(included)
        candidates = left[np.argsort(key[left], kind="stable")]
        included[_dropped(candidates, share, excess, included, penalty=4 * kappa2 * largest, tau=tau)] = False
    return included


def _dropped(
    candidates: IntArray, share: FloatArray, excess: FloatArray, included: BoolArray, *, penalty: float, tau: float
) -> list[int]:
    """One greedy pass: which of the candidates, given in the order of the pass, are dropped.

    With A and S the sums of share and share x excess over the clients left, and D = 1 - A, dropping client k lowers the
    proxy by

        share_k [ (excess_k A - S) / (A (A - share_k)) - penalty (2 D + share_k) ].

    The loop compares this with tau, both times A (A - share_k) to save the division. Each drop changes A, S and D for
    the clients that follow, so the loop is sequential. To keep it short, most clients never enter it: while a block is
    decided, A and S fall and D rises by at most the sums over the block, and a client that cannot be dropped even with
    the sums most in favour of it is skipped.
    """
    kept, lost = float(share[included].sum()), float(share[~included].sum())
    weighted = float(share[included] @ excess[included])
    # Clients of importance 0 change nothing and are never dropped; one of positive importance must stay.
    spare = int(np.count_nonzero(share[included] > 0)) - 1
    rounding = _ROUNDING * float(excess.max())
    dropped: list[int] = []
    for start in range(0, len(candidates), _BLOCK):
        block = candidates[start : start + _BLOCK]
        own, over = share[block], excess[block]
        least = kept - float(own.sum())
        bias = penalty * (2 * lost + own) * (least * np.maximum(least - own, 0.0))
        possible = over * kept - (weighted - float(own @ over) - rounding) >= bias
        for client, s, e in zip(block[possible].tolist(), own[possible].tolist(), over[possible].tolist(), strict=True):
            area = kept * (kept - s)
            if s * (e * kept - weighted - penalty * (2 * lost + s) * area) > tau * area and spare > 0:
                dropped.append(client)
                kept, lost, weighted, spare = kept - s, lost + s, weighted - s * e, spare - 1
    return dropped
