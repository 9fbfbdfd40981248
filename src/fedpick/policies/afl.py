"""Active Federated Learning: sample clients by how valuable their data was when they last trained (Goetz et al. 2019).

Algorithm, with m = budget and n clients available:

1. a client's value is v_k = loss_k * sqrt(num_examples_k), refreshed only when it trains, with the loss of the model it
   *received*;
2. the floor(alpha1 * n) smallest values count as minus infinity;
3. m - ceil(alpha3 * m) places are filled without replacement with probability proportional to exp(alpha2 * v_k);
4. the other places are filled uniformly from the available clients not chosen yet.

The model moves by the plain mean, 1/m. This is the "AFL" of FedCor and the "afl" of Power-of-Choice, whose supplement
takes the mean training loss without the square root: `value="loss", report="train-loss"`. `inclusion_reference` gives
the probability with which steps 2 to 4 choose each client.

A client without a value counts as minus infinity in steps 2 and 3. The source of the first value: `unseen="explore"`
never asks, so that new clients enter through step 4; `unseen="probe"` asks every client once, in the first round in
which it is available (FedCor's code: all clients before the first round).
Deviations: places that step 3 cannot fill, because too few clients have a value, go to step 4. A client that did not
complete, or reported no usable loss, has no value until it reports again. ceil(alpha3 * m) is at least one unless
alpha3 is 0, so with a budget of 1 this policy is uniform sampling, as in both public codes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import permutations
from typing import ClassVar, Literal, final

import numpy as np

from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.core.policy import Policy, Signal
from fedpick.core.sampling import sample_uniform, top_k
from fedpick.core.state import per_client
from fedpick.core.types import Clients, Outcome, Probe, RoundContext, Selection
from fedpick.core.validation import choice, number

__all__ = ["AFL", "ClientLosses", "inclusion_reference"]


@dataclass(frozen=True)
class ClientLosses:
    """The latest loss of every client, from which `select` computes the values."""

    loss: FloatArray = per_client()
    """(N,) 0 if not known."""
    known: BoolArray = per_client()
    """(N,) whether `loss` is known."""
    asked: BoolArray = per_client()
    """(N,) whether the client was asked before it trained; with unseen="probe" only."""


@final
@dataclass(frozen=True, kw_only=True)
class AFL(Policy[ClientLosses]):
    """Samples by a softmax of loss times the root of the data size, with a uniform share.

    Args:
        alpha1: share of the available clients, those with the smallest values, that the softmax leaves out.
        alpha2: factor of the values in the softmax; 0 makes it uniform.
        alpha3: share of the places filled uniformly.
        value: "loss-sqrt-n" multiplies the loss by sqrt(num_examples); "loss" does not.
        unseen: "explore" never sends a probe; "probe" asks every client for its loss once.
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
        """The reported loss; with unseen="probe" also the answer to a probe."""
        reported = Signal.OUTCOME_LOSS if self.report == "loss" else Signal.TRAIN_LOSS
        return frozenset({reported, Signal.LOSS} if self.unseen == "probe" else {reported})

    def init(self, clients: Clients, rng: np.random.Generator) -> ClientLosses:
        """No client has a value yet."""
        no_client = np.zeros(len(clients), dtype=bool)
        return ClientLosses(loss=np.zeros(len(clients)), known=no_client, asked=no_client)

    def probe(self, state: ClientLosses, context: RoundContext, rng: np.random.Generator) -> tuple[Probe, ...]:
        """Ask the available clients that were never asked and have no value."""
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

    def _by_value(self, state: ClientLosses, context: RoundContext, places: int, rng: np.random.Generator) -> IntArray:
        """Steps 2 and 3."""
        reachable = int(np.count_nonzero(context.available))
        keep = reachable - math.floor(self.alpha1 * reachable + 1e-9)
        candidates = np.flatnonzero(context.available & state.known)
        values = state.loss[candidates]
        if self.value == "loss-sqrt-n":
            values = values * np.sqrt(context.clients.num_examples[candidates])
        kept = top_k(values, keep, rng)
        # The largest of (logit + Gumbel noise) are a draw without replacement from the softmax, and cannot overflow.
        noisy = self.alpha2 * values[kept] + rng.gumbel(size=len(kept))
        chosen: IntArray = candidates[kept[top_k(noisy, places, rng)]]
        return chosen

    def observe(self, state: ClientLosses, outcome: Outcome) -> ClientLosses:
        """Refresh the values of the clients that trained. One that did not complete loses its value."""
        reported = outcome.loss if self.report == "loss" else outcome.train_loss
        usable = outcome.completed & ~np.isnan(reported)
        loss, known = state.loss.copy(), state.known.copy()
        loss[outcome.clients] = np.where(usable, reported, 0.0)
        known[outcome.clients] = usable
        return replace(state, loss=loss, known=known)


def _with_answers(state: ClientLosses, context: RoundContext) -> ClientLosses:
    """The state with the answers to the probe. A client is asked only once."""
    answers = context.measurements[0]
    usable = ~np.isnan(answers.values)
    loss, known, asked = state.loss.copy(), state.known.copy(), state.asked.copy()
    loss[answers.clients[usable]] = answers.values[usable]
    known[answers.clients[usable]] = True
    asked[answers.clients] = True
    return replace(state, loss=loss, known=known, asked=asked)


def inclusion_reference(values: FloatArray, budget: int, *, alpha1: float, alpha2: float, alpha3: float) -> FloatArray:
    """(n,) the probability that steps 2 to 4 choose each of n available clients, over all ordered draws of step 3."""
    count, by_value = len(values), budget - math.ceil(alpha3 * budget)
    weight = np.exp(alpha2 * values)
    weight[np.argsort(values)[: math.floor(alpha1 * count)]] = 0.0  # step 2
    inclusion = np.zeros(count)
    for drawn in permutations(np.flatnonzero(weight).tolist(), by_value):
        probability, left = 1.0, float(weight.sum())
        for client in drawn:  # step 3
            probability *= weight[client] / left
            left -= weight[client]
        share = np.full(count, (budget - by_value) / (count - by_value))  # step 4
        share[list(drawn)] = 1.0
        inclusion += probability * share
    return inclusion
