"""CA-Fed (Rodio et al. 2024): drop clients that slow the training down more than their absence biases the model.

Algorithm 1, round t, in our names:
 1. Every available client reports its loss on one mini-batch (line 3). The estimate of its loss keeps the share
    `smoothing` of its old value and takes the rest from the report, F_k = smoothing * old + (1 - smoothing) * report
    (equation 17). F_k* is the smallest F_k so far. The gap of a client is F_k - F_k*, Gamma' the largest gap of all.
 2. pi_k (availability) and lambda_k (correlation) are updated with the mask of this round (line 4). The estimates used
    in round t include round t.
 3. Every client starts with the weight q_k = alpha_k / pi_k (line 5). Two greedy passes go over *all* clients: the
    first by |lambda_k| descending (line 6), the second by pi_k ascending (line 7), equal ones by index. A client is
    dropped, q_k = 0, if the proxy of the total error (equation 20)

        epsilon = sum_k p_k gap_k + 4 kappa2 d_TV(alpha, p)^2 Gamma',    p_k = pi_k q_k / sum_h pi_h q_h

    falls by more than `tau`. The pass goes on after a client that stays.
 4. The available clients that are left train, with the weights q_k as they are: not normalised.

`included_clients_reference` is step 3 as printed. `included_clients` gives the same faster: with q_k = alpha_k / pi_k a
client that is left has p_k = alpha_k / A, A being the sum of alpha over the clients left. So d_TV = 1 - A, the first
term is S / A with S the sum of alpha_k gap_k over the clients left, and dropping client k changes epsilon by a formula
in (A, S, alpha_k, gap_k). A pass costs one sort and O(1) per client instead of O(N).

Choices where the paper is silent or contradicts itself. The proxy must fall by *strictly* more than tau: the text says
so, and the listing's >= drops all clients while all gaps are still 0. `smoothing` is 1 minus equation 17's beta: only
then does "beta = 0" of the experiments make sense. A client never measured has the mean gap of those measured. The last
client of positive importance is never dropped. A budget below the number left means a uniform sample of that size, with
weights multiplied by left / budget, so that the expected step stays. A gap below 0, which only given minima can cause,
counts as 0.
Deviations of the authors' code: it has no factor 4 (its bias_const = 1 is kappa2 = 0.25 here), drops on ties, and takes
the loss over the whole local test split (batch_size=None asks for the whole local data). F_k* comes from models fitted
in advance (minimum_loss=[...]); for images its fit fails and leaves 0 (minimum_loss="zero"). A client that is absent in
the first round has the mean loss of the clients present, until it is measured (unmeasured="first-mean").
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
    TIE,
    availability_of,
    check_estimates,
    correlation_of,
    count_mask,
    inverse_weights,
    oracle_signals,
    ranked,
    sample_within_budget,
)

__all__ = ["CAFed", "CAFedState", "gaps", "included_clients", "included_clients_reference"]

# With more clients the diagnostics do not list the excluded ones: one flag per client and round would fill the logs.
_MASK_LIMIT = 5000
# Clients of a pass that are filtered at once. At a million clients the filter halves the time of the plain loop.
_BLOCK = 4096


@dataclass(frozen=True, kw_only=True, eq=False)
class CAFedState(AvailabilityCounts):
    """The masks counted so far, and the estimate of every client's loss."""

    loss: FloatArray = per_client()
    """(N,) smoothed loss of the global model; NaN: never measured."""
    lowest: FloatArray = per_client()
    """(N,) the smallest smoothed loss so far; NaN: never measured."""
    given: FloatArray = derived()
    """(N,) F_k* as given by the hyper-parameters; NaN: use `lowest`."""


@final
@dataclass(frozen=True, kw_only=True)
class CAFed(Policy[CAFedState]):
    """Drops clients whose rare or bursty presence costs more than their absence biases; weights the rest unbiased.

    Args:
        kappa2: weight of the bias error; large keeps more clients, infinite keeps all (then it is `unbiased`).
        tau: a client is dropped if the proxy falls by strictly more than this.
        smoothing: share of the old loss estimate that is kept, in [0, 1).
        estimates: the source of pi_k and lambda_k: "bayes", "bayes-chain" or "oracle".
        prior: pseudo-counts of the beta priors, for either outcome.
        batch_size: size of the mini-batch on which a client reports its loss; None: its whole data.
        minimum_loss: F_k*: "running" (the smallest estimate so far), "zero", or one value per client, fitted in
            advance. Clients beyond the end of the values, or with NaN, use the running minimum.
        unmeasured: the gap of a client that was never measured: "mean-gap" is the current mean gap of those measured;
            "first-mean" uses the mean loss in the first round with an answer. That one stays while the others' losses
            fall, so with minimum_loss="zero" clients that stay away are excluded.
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
        """A loss from every available client; the true availability and correlation, with estimates="oracle"."""
        return frozenset({Signal.LOSS}) | oracle_signals(self, Signal.AVAILABILITY, Signal.CORRELATION)

    def init(self, clients: Clients, rng: np.random.Generator) -> CAFedState:
        """No client is measured yet. A newcomer has the mean gap of the others until it is measured."""
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
        """Ask all available clients for the loss. A round with budget 0 only counts the mask."""
        if context.budget == 0:
            return ()
        return (Probe(clients=np.flatnonzero(context.available), batch_size=self.batch_size),)

    def select(
        self, state: CAFedState, context: RoundContext, rng: np.random.Generator
    ) -> tuple[Selection, CAFedState]:
        """Update the estimates, run the two passes over all clients, take the clients left that are available."""
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
        """Equation 17 for the clients that answered; the others keep the old estimate."""
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
            # Infinite kappa2 excludes no client: the bias is 0, not infinity times 0.
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
    """F_k - F_k*, (N,), at least 0; the mean of those measured for a client that was not."""
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
    """Which clients are left after the pass by correlation and the pass by availability, (N,); never none.

    >>> included_clients(np.full(4, 0.25), np.array([1.0, 0.1, 0.1, 0.1]), np.array([0.9, 0.8, 0.0, 0.0]),
    ...                  np.full(4, 0.5), kappa2=0.5, tau=0.0)
    array([False,  True,  True,  True])
    """
    included = np.ones(len(importance), dtype=np.bool_)
    largest = float(gap.max())
    if largest <= 0 or np.isinf(kappa2):
        return included  # the first term is 0 already, or any bias costs infinitely much
    share = importance / importance.sum()
    # The decrease depends on gap_k minus the mean gap only. Measured from the smallest gap, the sums lose fewer digits.
    excess = gap - gap.min()
    for key in (-np.abs(correlation), availability):
        left = np.flatnonzero(included)
        candidates = left[ranked(key[left])]
        included[_dropped(candidates, share, excess, included, kappa2=kappa2, largest=largest, tau=tau)] = False
    return included


def included_clients_reference(
    importance: FloatArray,
    gap: FloatArray,
    correlation: FloatArray,
    availability: FloatArray,
    *,
    kappa2: float,
    tau: float,
) -> BoolArray:
    """Lines 5 to 22 of algorithm 1 as printed, with equation 20 from scratch for every client: O(N^2).

    Arrays of fractions give the exact answer, ties included.
    """

    def proxy(weights: FloatArray) -> Any:
        p = availability * weights / (availability @ weights)  # equation 4
        distance = np.abs(importance - p).sum() / 2
        return p @ gap + 4 * kappa2 * distance**2 * gap.max()  # equation 20

    weights = importance / availability  # line 5
    for key in (-np.abs(correlation), availability):  # lines 6 and 7
        for k in np.argsort(key, kind="stable"):
            without = weights.copy()
            without[k] = 0
            if weights[k] > 0 and without.any() and proxy(weights) - proxy(without) > tau:
                weights = without
    included: BoolArray = (weights > 0) | (importance == 0)
    return included


def _dropped(
    candidates: IntArray,
    share: FloatArray,
    excess: FloatArray,
    included: BoolArray,
    *,
    kappa2: float,
    largest: float,
    tau: float,
) -> list[int]:
    """One greedy pass: which of the candidates, given in the order of the pass, are dropped.

    With A and S the sums of share and share x excess over the clients left, A' and S' the same without client k, and
    D = 1 - A, dropping client k lowers the proxy by

        share_k [ (excess_k A' - S') / (A A') - penalty (2 D + share_k) ],    penalty = 4 kappa2 Gamma'.

    The loop compares this with tau, both times A A' to save the division. In a tie the client stays, so a client is
    dropped only if the difference is larger than rounding can make it. A' and S' are sums over the clients that stayed
    and over those that follow. They are never differences: after a client with nearly all the importance was dropped,
    a difference would have lost the digits that decide.

    Each drop changes the sums for the clients that follow, so the loop is sequential. To keep it short, most clients
    never enter it: while a block is decided, A' and S' are at least the sums without the block, and D at least what it
    was before. A client that cannot be dropped even with the sums most in favour of it is skipped.
    """
    own, over = share[candidates], excess[candidates]
    # Row 0: share, row 1: share x excess. `later` has the sums over the candidates from each place on.
    parts = np.stack([own, own * over])
    later = np.zeros((2, len(candidates) + 1))
    later[:, :-1] = np.cumsum(parts[:, ::-1], axis=1)[:, ::-1]
    lost, stayed = float(share[~included].sum()), np.zeros(2)
    tie = max(TIE, 4 * np.finfo(float).eps * len(candidates))  # the sums add one client after the other
    penalty, rounding = 4 * kappa2 * largest, tie * largest
    dropped: list[int] = []
    for start in range(0, len(candidates), _BLOCK):
        block = slice(start, start + _BLOCK)
        end = min(start + _BLOCK, len(candidates))
        least, least_weighted = stayed + later[:, end]
        bias = penalty * (2 * lost + own[block]) * least * (least + own[block])
        possible = over[block] * (stayed[0] + later[0, start]) - least_weighted + rounding >= bias
        skipped = np.cumsum(np.where(possible, 0.0, parts[:, block]), axis=1)
        others = (skipped + later[:, start + 1 : end + 1])[:, possible]
        kept, weighted = stayed.tolist()
        columns = (candidates[block][possible], own[block][possible], over[block][possible], *others)
        for client, s, e, other, other_weighted in zip(*(column.tolist() for column in columns), strict=True):
            rest, rest_weighted = kept + other, weighted + other_weighted
            cost = (s * penalty * (2 * lost + s) + tau) * (rest + s) * rest
            if s * (e * rest - rest_weighted) - cost > tie * (s * rest * largest + cost):
                dropped.append(client)
                lost += s
            else:
                kept, weighted = kept + s, weighted + s * e
        stayed = np.array([kept, weighted]) + skipped[:, -1]
    return dropped
