"""Active Federated Learning: sample clients by how valuable their data looked the last time (Goetz et al. 2019).

Algorithm, with m = budget and n clients available:

1. a client's value is v_k = loss_k * sqrt(num_examples_k), refreshed only when it trains, with the loss of the model it
   *received*;
2. the floor(alpha1 * n) smallest values count as minus infinity;
3. m - ceil(alpha3 * m) places are filled without replacement with probability proportional to exp(alpha2 * v_k);
4. the other places are filled uniformly from everybody available who is not in yet.

The model moves by the plain mean, 1/m. This is the "AFL" of FedCor and the "afl" of Power-of-Choice, whose supplement
takes the mean training loss without the square root: `value="loss", report="train-loss"`.

A client without a value counts as minus infinity in steps 2 and 3. How values come about in the first place:
`unseen="explore"` never asks anybody, so that new clients come in through step 4; `unseen="probe"` asks every client
once, in the first round in which it is available (FedCor's code: everybody before the first round).
Deviations: places that step 3 cannot fill, for want of clients with a value, go to step 4. A client that did not
complete, or reported nothing usable, has no value until it reports again. As ceil(alpha3 * m) is at least one unless
alpha3 is 0, a budget of 1 makes this policy uniform sampling, as in both public codes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

import numpy as np
from numpy.typing import NDArray

from fedpick.core.policy import Policy, Signal
from fedpick.core.sampling import sample_uniform, top_k
from fedpick.core.state import per_client
from fedpick.core.types import Clients, Outcome, Probe, RoundContext, Selection
from fedpick.core.validation import choice, number

__all__ = ["AFL"]


@dataclass(frozen=True)
class ClientLosses:
    """The latest loss of every client; values are worked out from it on use."""

    loss: NDArray[np.float64] = per_client()
    """(N,) 0 where not known."""
    known: NDArray[np.bool_] = per_client()
    """(N,) whether `loss` holds."""
    asked: NDArray[np.bool_] = per_client()
    """(N,) whether the client was asked before it ever trained; with unseen="probe" only."""


@final
@dataclass(frozen=True, kw_only=True)
class AFL(Policy[ClientLosses]):
    """Samples by a softmax of loss times the root of the data size, with a uniform share.

    Args:
        alpha1: share of the available clients, those of least value, that the softmax leaves out.
        alpha2: factor of the values in the softmax; 0 makes it uniform.
        alpha3: share of the places filled uniformly.
        value: "loss-sqrt-n" multiplies the loss by sqrt(num_examples); "loss" does not.
        unseen: "explore" sends no probe ever; "probe" asks every client for its loss once.
        report: which loss refreshes a value: "loss", of the model received, or "train-loss", mean over local training.
    """

    alpha1: float = 0.75
    alpha2: float = 0.01
    alpha3: float = 0.1
    value: Literal["loss-sqrt-n", "loss"] = "loss-sqrt-n"
    unseen: Literal["explore", "probe"] = "explore"
    report: Literal["loss", "train-loss"] = "loss"

    reference: ClassVar[str] = """
        @article{goetz2019active,
          title = {Active Federated Learning},
          author = {Goetz, Jack and Malik, Kshitiz and Bui, Duc and Moon, Seungwhan and Liu, Honglei and Kumar, Anuj},
          journal = {arXiv preprint arXiv:1909.12641},
          year = {2019}
        }"""

    def __post_init__(self) -> None:
        number(self, "alpha1", "[0, 1]")
        number(self, "alpha2", "[0, inf)")
        number(self, "alpha3", "[0, 1]")
        choice(self, "value", ("loss-sqrt-n", "loss"))
        choice(self, "unseen", ("explore", "probe"))
        choice(self, "report", ("loss", "train-loss"))

    @property
    def needs(self) -> frozenset[Signal]:
        """The reported loss; with unseen="probe" the answer to a question as well."""
        reported = Signal.OUTCOME_LOSS if self.report == "loss" else Signal.TRAIN_LOSS
        return frozenset({reported, Signal.LOSS} if self.unseen == "probe" else {reported})

    def init(self, clients: Clients, rng: np.random.Generator) -> ClientLosses:
        """Nobody has a value."""
        nobody = np.zeros(len(clients), dtype=bool)
        return ClientLosses(loss=np.zeros(len(clients)), known=nobody, asked=nobody)

    def probe(self, state: ClientLosses, context: RoundContext, rng: np.random.Generator) -> tuple[Probe, ...]:
        """Ask those available who were never asked and have no value."""
        if self.unseen == "explore":
            return ()
        unasked = np.flatnonzero(context.available & ~state.asked & ~state.known)
        return (Probe(clients=unasked, signal=Signal.LOSS),) if len(unasked) else ()

    def select(
        self, state: ClientLosses, context: RoundContext, rng: np.random.Generator
    ) -> tuple[Selection, ClientLosses]:
        """Fill one share by value, the other uniformly."""
        if context.measurements:
            state = _with_answers(state, context)
        # The small number keeps a product such as 0.14 * 50 = 7.000000000000001 from being rounded up to 8.
        uniform_places = math.ceil(self.alpha3 * context.budget - 1e-9)
        valued = self._by_value(state, context, context.budget - uniform_places, rng)
        left = context.available.copy()
        left[valued] = False
        chosen = np.concatenate([valued, sample_uniform(left, context.budget - len(valued), rng)])
        diagnostics = {"by_value": len(valued), "known": int(np.count_nonzero(state.known))}
        weights = np.full(len(chosen), 1 / max(len(chosen), 1))
        return Selection(clients=chosen, weights=weights, diagnostics=diagnostics), state

    def _by_value(
        self, state: ClientLosses, context: RoundContext, places: int, rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """Steps 2 and 3."""
        reachable = int(np.count_nonzero(context.available))
        keep = reachable - math.floor(self.alpha1 * reachable + 1e-9)
        candidates = np.flatnonzero(context.available & state.known)
        values = state.loss[candidates]
        if self.value == "loss-sqrt-n":
            values = values * np.sqrt(context.clients.num_examples[candidates])
        kept = top_k(values, keep, rng)
        # The largest of (logit + Gumbel noise) are a draw without replacement from the softmax, which cannot overflow.
        noisy = self.alpha2 * values[kept] + rng.gumbel(size=len(kept))
        chosen: NDArray[np.int64] = candidates[kept[top_k(noisy, places, rng)]]
        return chosen

    def observe(self, state: ClientLosses, outcome: Outcome) -> ClientLosses:
        """Refresh the values of those who trained; who did not complete has none."""
        reported = outcome.loss if self.report == "loss" else outcome.train_loss
        usable = outcome.completed & ~np.isnan(reported)
        loss, known = state.loss.copy(), state.known.copy()
        loss[outcome.clients] = np.where(usable, reported, 0.0)
        known[outcome.clients] = usable
        return replace(state, loss=loss, known=known)


def _with_answers(state: ClientLosses, context: RoundContext) -> ClientLosses:
    """The state with the answers to the question taken in; one question is all a client gets."""
    answers = context.measurements[0]
    usable = ~np.isnan(answers.values)
    loss, known, asked = state.loss.copy(), state.known.copy(), state.asked.copy()
    loss[answers.clients[usable]] = answers.values[usable]
    known[answers.clients[usable]] = True
    asked[answers.clients] = True
    return replace(state, loss=loss, known=known, asked=asked)
