"""Power-of-Choice: draw some candidates, train those with the largest loss (Cho, Wang, Joshi 2022).

Algorithm (section 4), with m = budget, p_k = importance and d = the number of candidates, m <= d <= K:

1. draw d candidates among the available clients, without replacement, with probability p_k (one after the other);
2. learn the loss of the current model for every candidate;
3. train the m candidates with the largest losses, ties broken at random; the model moves by the plain mean, 1/m.

The variants differ in the source of the loss and in how d changes:

- `pow-d`     asks every candidate for its loss on all its local data;
- `cpow-d`    asks for the loss on one mini-batch (algorithm 1 of the appendix);
- `rpow-d`    does not ask: it ranks by the mean training loss that a client reported the last time it trained, and a
              client never tried counts as infinite (algorithm 2);
- `adapow-d`  lets d fall to m, by halving or by one drop, so that the bias of preferring large losses vanishes.

With d = m all of them are sampling without replacement by p_k; with d = K, `pow-d` is the exact top m. The paper's
"rand" is the policy `md`. `inclusion_reference` gives the probability with which the three steps choose each client.

Options where the authors' supplement differs from the text: `first_round="uniform"` draws the first cohort uniformly,
without asking. FedGS's comparison draws no candidates: `num_candidates="all"`.
Deviations:
- if all candidates will train anyway (d = m, or few available), no client is asked: no answer could change the choice;
- a client that gave no answer ranks last: it may fill up a cohort but never wins a place. If no client answered, the
  cohort is a random part of the candidates;
- `rpow-d` spends the infinite value on the first attempt. A client that did not complete its latest attempt counts as
  the mean of the known losses until it completes again; otherwise a client that failed with a large loss would be
  picked for ever. A client that completed without ever reporting a usable loss ranks last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, ClassVar, Literal, final

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import FloatArray, IntArray
from fedpick.core.errors import InvalidInput
from fedpick.core.policy import Policy, Signal
from fedpick.core.sampling import cumulative, sample_uniform, sample_weighted, top_k
from fedpick.core.state import derived, per_client
from fedpick.core.types import Clients, Outcome, Probe, RoundContext, Selection
from fedpick.core.validation import choice, is_whole, require, whole

__all__ = ["AdaPowD", "CPowD", "PowD", "RPowD", "inclusion_reference"]

_REFERENCE = """
    @inproceedings{cho2022towards,
      title = {Towards Understanding Biased Client Selection in Federated Learning},
      author = {Cho, Yae Jee and Wang, Jianyu and Joshi, Gauri},
      booktitle = {Artificial Intelligence and Statistics (AISTATS)},
      year = {2022}
    }"""

# The schedule of the paper's quadratic experiments, the default of adapow-d.
_PAPER_HALVE_EVERY = 5000


@dataclass(frozen=True)
class CandidateState:
    """What drawing candidates needs. Nothing is learned."""

    running: FloatArray = derived()
    """(N,) cumulative importance."""


def _check_common(policy: Any) -> None:
    wanted = policy.num_candidates
    named = wanted is None or (isinstance(wanted, str) and wanted == "all")
    require(named or is_whole(wanted, 1), policy, "num_candidates", "a whole number of at least 1, 'all' or None")
    choice(policy, "first_round", ("candidates", "uniform"))


def _count(wanted: int | Literal["all"] | None, context: RoundContext) -> int:
    """The number of candidates to draw: d of the paper, at least the budget."""
    if wanted is None:
        return 2 * context.budget
    return len(context.clients) if wanted == "all" else max(int(wanted), context.budget)


def _draw(running: FloatArray, context: RoundContext, count: int, rng: np.random.Generator) -> IntArray:
    """Step 1: `count` available clients without replacement, with probability p_k."""
    reachable = int(np.count_nonzero(context.available))
    if count >= reachable:
        return np.flatnonzero(context.available)
    return sample_weighted(context.clients.importance, running, context.available, count, rng)


def _opens_uniformly(first_round: str, context: RoundContext) -> bool:
    return first_round == "uniform" and context.index == 0


def _ask(
    state: CandidateState,
    context: RoundContext,
    rng: np.random.Generator,
    *,
    count: int,
    first_round: str,
    batch_size: int | None = None,
) -> tuple[Probe, ...]:
    """Steps 1 and 2: draw candidates and ask for their losses, unless all of them will train anyway."""
    if context.budget == 0 or _opens_uniformly(first_round, context):
        return ()
    candidates = _draw(state.running, context, count, rng)
    if len(candidates) <= context.budget:
        return ()
    return (Probe(clients=candidates, signal=Signal.LOSS, batch_size=batch_size),)


def _select_from_answers(
    state: CandidateState, context: RoundContext, rng: np.random.Generator, first_round: str
) -> Selection:
    """Step 3, on the answers to the probe; without a probe the candidates are the cohort."""
    if context.measurements:
        answers = context.measurements[0]
        return _largest(answers.clients, answers.values, context.budget, rng)
    return _unranked(state.running, context, rng, first_round)


def _unranked(running: FloatArray, context: RoundContext, rng: np.random.Generator, first_round: str) -> Selection:
    """The cohort of a round without ranking."""
    if _opens_uniformly(first_round, context):
        chosen = sample_uniform(context.available, context.budget, rng)
    else:
        chosen = _draw(running, context, context.budget, rng)
    return _equal_weights(chosen, {"candidates": len(chosen)})


def _largest(candidates: IntArray, losses: FloatArray, budget: int, rng: np.random.Generator) -> Selection:
    """The candidates with the largest losses; NaN ranks last, infinity (never tried) first."""
    ranked = top_k(losses, budget, rng)
    diagnostics: dict[str, Any] = {"candidates": len(candidates)}
    if unanswered := int(np.isnan(losses).sum()):
        diagnostics["unanswered"] = unanswered
    if untried := int(np.isposinf(losses).sum()):
        diagnostics["untried"] = untried
    for name, values in (("candidate_loss", losses), ("cohort_loss", losses[ranked])):
        if (finite := values[np.isfinite(values)]).size:
            diagnostics[name] = float(finite.mean())
    return _equal_weights(candidates[ranked], diagnostics)


def _equal_weights(chosen: IntArray, diagnostics: dict[str, Any]) -> Selection:
    weights = np.full(len(chosen), 1 / max(len(chosen), 1))
    return Selection(clients=chosen, weights=weights, diagnostics=diagnostics)


def inclusion_reference(
    importance: FloatArray, available: Sequence[int], candidates: int, budget: int, losses: FloatArray
) -> FloatArray:
    """(N,) the probability that the three steps choose each client, over all ordered lists of candidates."""
    inclusion = np.zeros(len(importance))
    for drawn in permutations(available, candidates):
        probability, left = 1.0, float(importance[list(available)].sum())
        for client in drawn:  # step 1
            probability *= importance[client] / left
            left -= importance[client]
        ranked = sorted(drawn, key=lambda client: -losses[client])  # steps 2 and 3
        inclusion[ranked[:budget]] += probability
    return inclusion


@final
@dataclass(frozen=True, kw_only=True)
class PowD(Policy[CandidateState]):
    """Of some candidates drawn by importance, those with the largest loss of the current model.

    Args:
        num_candidates: d, at least the budget; None: twice the budget; "all": all available clients.
        first_round: "candidates" as in the paper; "uniform" draws the first cohort uniformly, as in the authors' code.

    Five clients with losses 1 to 5, all of them candidates, and two places:

    >>> from fedpick import Clients, Session
    >>> session = Session(PowD(num_candidates="all"), Clients(num_examples=np.ones(5)))
    >>> session.ask(budget=2, measure=lambda probe: probe.clients + 1.0).clients
    array([4, 3])
    """

    num_candidates: int | Literal["all"] | None = None
    first_round: Literal["candidates", "uniform"] = "candidates"

    reference: ClassVar[str] = _REFERENCE

    def __post_init__(self) -> None:
        _check_common(self)

    @property
    def needs(self) -> frozenset[Signal]:
        """The loss of the current model, from the candidates."""
        return frozenset({Signal.LOSS})

    def init(self, clients: Clients, rng: np.random.Generator) -> CandidateState:
        """The running sum of the importance."""
        return CandidateState(running=cumulative(clients.importance))

    def probe(self, state: CandidateState, context: RoundContext, rng: np.random.Generator) -> tuple[Probe, ...]:
        """Ask the candidates for their loss on all local data."""
        count = _count(self.num_candidates, context)
        return _ask(state, context, rng, count=count, first_round=self.first_round)

    def select(
        self, state: CandidateState, context: RoundContext, rng: np.random.Generator
    ) -> tuple[Selection, CandidateState]:
        """Take the candidates with the largest losses."""
        return _select_from_answers(state, context, rng, self.first_round), state


@final
@dataclass(frozen=True, kw_only=True)
class CPowD(Policy[CandidateState]):
    """Power-of-Choice that estimates the candidates' losses from one mini-batch each.

    Args:
        num_candidates: d, at least the budget; None: twice the budget; "all": all available clients.
        batch_size: examples in the mini-batch, b of the paper.
        first_round: "candidates" as in the paper; "uniform" draws the first cohort uniformly, as in the authors' code.
    """

    num_candidates: int | Literal["all"] | None = None
    batch_size: int = 64
    first_round: Literal["candidates", "uniform"] = "candidates"

    reference: ClassVar[str] = _REFERENCE

    def __post_init__(self) -> None:
        _check_common(self)
        whole(self, "batch_size", 1)

    @property
    def needs(self) -> frozenset[Signal]:
        """The loss of the current model, from the candidates."""
        return frozenset({Signal.LOSS})

    def init(self, clients: Clients, rng: np.random.Generator) -> CandidateState:
        """The running sum of the importance."""
        return CandidateState(running=cumulative(clients.importance))

    def probe(self, state: CandidateState, context: RoundContext, rng: np.random.Generator) -> tuple[Probe, ...]:
        """Ask the candidates for their loss on one mini-batch."""
        count = _count(self.num_candidates, context)
        return _ask(state, context, rng, count=count, first_round=self.first_round, batch_size=self.batch_size)

    def select(
        self, state: CandidateState, context: RoundContext, rng: np.random.Generator
    ) -> tuple[Selection, CandidateState]:
        """Take the candidates with the largest losses."""
        return _select_from_answers(state, context, rng, self.first_round), state


@final
@dataclass(frozen=True, kw_only=True)
class AdaPowD(Policy[CandidateState]):
    """Power-of-Choice whose number of candidates falls to the budget, so that its bias vanishes.

    Give at most one of `halve_every` and `drop_at`. With neither, d is halved every 5,000 rounds, the schedule of the
    paper's quadratic experiments.

    Args:
        num_candidates: d in round 0; None and "all": the number of clients in the table, K.
        halve_every: number of rounds after which d is halved (rounded down), until it is the budget.
        drop_at: from this round on (the first is 0), d is the budget.
        first_round: "candidates" as in the paper; "uniform" draws the first cohort uniformly, as in the authors' code.
    """

    num_candidates: int | Literal["all"] | None = None
    halve_every: int | None = None
    drop_at: int | None = None
    first_round: Literal["candidates", "uniform"] = "candidates"

    reference: ClassVar[str] = _REFERENCE

    def __post_init__(self) -> None:
        _check_common(self)
        whole(self, "halve_every", 1, optional=True)
        whole(self, "drop_at", 0, optional=True)
        if self.halve_every is not None and self.drop_at is not None:
            raise InvalidInput(
                f"AdaPowD takes one schedule. Got halve_every={self.halve_every} and "
                f"drop_at={self.drop_at}: leave one out."
            )

    @property
    def needs(self) -> frozenset[Signal]:
        """The loss of the current model, from the candidates."""
        return frozenset({Signal.LOSS})

    def candidates_in_round(self, index: int, num_clients: int, budget: int) -> int:
        """The number of candidates, d, in a round.

        >>> policy = AdaPowD(halve_every=100)
        >>> [policy.candidates_in_round(index, num_clients=30, budget=3) for index in (0, 99, 100, 200, 300, 400)]
        [30, 30, 15, 7, 3, 3]
        """
        start = num_clients if self.num_candidates in (None, "all") else int(self.num_candidates or 0)
        if self.drop_at is not None:
            return max(budget, 0 if index >= self.drop_at else start)
        return max(budget, start >> (index // (self.halve_every or _PAPER_HALVE_EVERY)))

    def init(self, clients: Clients, rng: np.random.Generator) -> CandidateState:
        """The running sum of the importance. The schedule is a function of the round."""
        return CandidateState(running=cumulative(clients.importance))

    def probe(self, state: CandidateState, context: RoundContext, rng: np.random.Generator) -> tuple[Probe, ...]:
        """Ask this round's candidates for their loss, unless d is the budget."""
        count = self.candidates_in_round(context.index, len(context.clients), context.budget)
        return _ask(state, context, rng, count=count, first_round=self.first_round)

    def select(
        self, state: CandidateState, context: RoundContext, rng: np.random.Generator
    ) -> tuple[Selection, CandidateState]:
        """Take the candidates with the largest losses."""
        return _select_from_answers(state, context, rng, self.first_round), state


# What rpow-d knows of a client's loss: see RememberedLosses.report.
_UNTRIED = 0
_KNOWN = 1
_FAILED = 2
_UNUSABLE = 3
_FAILED_KNOWN = 4


@dataclass(frozen=True)
class RememberedLosses:
    """The latest report of every client, always finite. `_ranking_values` decides what a missing one counts as."""

    loss: FloatArray = per_client()
    """(N,) mean training loss of the latest usable report; 0 where there was none."""
    report: NDArray[np.int8] = per_client()
    """(N,) 0: never tried; 1: `loss` holds; 2: never reported, did not complete its latest attempt; 3: never reported,
    did complete; 4: `loss` holds what it reported before, did not complete its latest attempt."""
    running: FloatArray = derived()
    """(N,) cumulative importance."""


@final
@dataclass(frozen=True, kw_only=True)
class RPowD(Policy[RememberedLosses]):
    """Power-of-Choice without probes: candidates are ranked by the training loss they last reported.

    Args:
        num_candidates: d, at least the budget; None: twice the budget; "all": all available clients.
        first_round: "candidates" as in the paper; "uniform" draws the first cohort uniformly, as in the authors' code.
    """

    num_candidates: int | Literal["all"] | None = None
    first_round: Literal["candidates", "uniform"] = "candidates"

    reference: ClassVar[str] = _REFERENCE

    def __post_init__(self) -> None:
        _check_common(self)

    @property
    def needs(self) -> frozenset[Signal]:
        """The mean training loss that comes back with every update."""
        return frozenset({Signal.TRAIN_LOSS})

    def init(self, clients: Clients, rng: np.random.Generator) -> RememberedLosses:
        """No client is tried yet."""
        return RememberedLosses(
            loss=np.zeros(len(clients)),
            report=np.full(len(clients), _UNTRIED, dtype=np.int8),
            running=cumulative(clients.importance),
        )

    def select(
        self, state: RememberedLosses, context: RoundContext, rng: np.random.Generator
    ) -> tuple[Selection, RememberedLosses]:
        """Draw the candidates and take those with the largest remembered losses."""
        if _opens_uniformly(self.first_round, context):
            return _unranked(state.running, context, rng, self.first_round), state
        candidates = _draw(state.running, context, _count(self.num_candidates, context), rng)
        return _largest(candidates, _ranking_values(state, candidates), context.budget, rng), state

    def observe(self, state: RememberedLosses, outcome: Outcome) -> RememberedLosses:
        """Keep the reports of the clients that completed. Every attempt spends the infinite value."""
        loss, report = state.loss.copy(), state.report.copy()
        tried, usable = outcome.clients, outcome.completed & ~np.isnan(outcome.train_loss)
        loss[tried[usable]] = outcome.train_loss[usable]
        # A client that completes without a usable report keeps its latest usable one, also across failures.
        reported = np.isin(state.report[tried], (_KNOWN, _FAILED_KNOWN))
        completed = np.where(usable | reported, _KNOWN, _UNUSABLE)
        report[tried] = np.where(outcome.completed, completed, np.where(reported, _FAILED_KNOWN, _FAILED))
        return replace(state, loss=loss, report=report)


def _ranking_values(state: RememberedLosses, candidates: IntArray) -> FloatArray:
    """The losses by which candidates are ranked: infinite, as reported, the median of the known, or NaN (last)."""
    known = state.report == _KNOWN
    # Half of the clients are above it. The mean is not: a few large losses would lift every client that failed.
    middle = float(np.median(state.loss[known])) if known.any() else 0.0
    of_kind = {_UNTRIED: np.inf, _FAILED: middle, _FAILED_KNOWN: middle, _UNUSABLE: np.nan}
    values = state.loss[candidates]
    for kind, value in of_kind.items():
        values[state.report[candidates] == kind] = value
    return values
