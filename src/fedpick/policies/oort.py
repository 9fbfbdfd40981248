"""Oort: clients with high loss that are fast enough, and some that are new (Lai et al., OSDI 2021, training selector).

Notation: m budget; n_k examples; t the round, from 1; t_k the round in which client k was selected last; d_k its latest
duration.

1. Utility of a client that has taken part: U_k = n_k * (root mean square of its per-example losses), cut at the
   quantile `clip` of all available ones.
2. Score: (U_k - min) / (max - min) + sqrt(0.1 ln t / t_k). The second term grows while a client does not take part.
3. Clients slower than the preferred duration T lose: their score is multiplied by (T / d_k)^penalty. T is a percentile
   of the known durations. The pacer moves it by `pacer_step` every `pacer_rounds` rounds: up if the utility gained in
   these rounds differs by at most 10 % from that in the rounds before, down if it differs by a factor of 5 or more.
4. Exploit floor((1 - eps) m) places: sample by score among the clients with at least `cutoff` times the score on the
   last of these places.
5. Explore with the other places: sample clients that were never selected, by n_k. eps is exploration * decay^t, at
   least `least_exploration`.

Oort does not define weights. `weighting="examples"` is the usual FedAvg.

Deviations. Places without new clients go to step 4. The authors' code fills them at random, and takes only the largest
new clients; ours samples all of them. Minimum and maximum in step 2 are taken after the cut: otherwise one outlier
presses all other scores to 0, which the cut shall prevent. The cut-off is the score on the last place, as in the paper;
the authors' code takes the next one and fails if there is none. A client that did not complete, or reported no loss,
has the utility 0 until it reports one; one that the server stopped has the mean of its cohort. In the authors' code it
stays new, or keeps its utility, and is selected again and again. The list of often-selected clients that are left out,
off by default, is not offered. Selecting more clients than needed is up to the driver. FedScale's code never empties
its list of explored clients, so that the last ones join all later cohorts; Plato's computes the second term of step 2
only when a client takes part. Neither happens here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

import numpy as np

from fedpick.core.arrays import FloatArray, IntArray
from fedpick.core.policy import Policy, Signal
from fedpick.core.sampling import cumulative, sample_weighted
from fedpick.core.state import derived, per_client
from fedpick.core.types import Clients, Outcome, RoundContext, Selection
from fedpick.core.validation import choice, number, whole

__all__ = ["Oort", "OortState", "reference"]


def reference(
    utility: list[float],
    last: list[int],
    duration: list[float],
    preferred: float,
    t: int,
    places: int,
    clip: float,
    cutoff: float,
    penalty: float,
) -> dict[int, float]:
    """Steps 1 to 4 for clients that have taken part: the score of every client that may be sampled."""
    cut = sorted(utility)[min(int(clip * len(utility)), len(utility) - 1)]
    cut_utility = [min(value, cut) for value in utility]
    low, high = min(cut_utility), max(cut_utility)
    scores = {}
    for k, value in enumerate(cut_utility):
        statistical = (value - low) / (high - low) if high > low else 0.0
        scores[k] = statistical + math.sqrt(0.1 * math.log(t) / last[k])
        if duration[k] > preferred:  # False for NaN, an unknown duration
            scores[k] *= (preferred / duration[k]) ** penalty
    threshold = cutoff * sorted(scores.values(), reverse=True)[min(places, len(scores)) - 1]
    return {k: score for k, score in scores.items() if score >= threshold}


@dataclass(frozen=True)
class OortState:
    """What is known of every client, and the pacer."""

    percentile: float
    """T is this percentile of the known durations."""
    gained: float
    """Utility gained by exploitation since the last step of the pacer."""
    gained_before: float
    """The same in the period before. NaN: there was none."""
    sizes: FloatArray = derived()
    """(N,) num_examples."""
    last: IntArray = per_client()
    """(N,) the round of the last selection, from 1; 0: never selected."""
    utility: FloatArray = per_client()
    """(N,) U_k, before the cut; 0 if not known."""
    duration: FloatArray = per_client()
    """(N,) the latest duration; NaN if not known."""


@final
@dataclass(frozen=True, kw_only=True)
class Oort(Policy[OortState]):
    """Sample clients by loss and speed, and keep a share of the places for new clients.

    Args:
        exploration: share of the places for new clients at the start.
        decay: factor of that share per round.
        least_exploration: the share does not fall below this.
        clip: quantile at which utilities are cut.
        cutoff: clients with at least this share of the score on the last place are sampled; 1 takes the best.
        percentile: T is this percentile of the durations at the start; 100 ignores durations.
        pacer_step: percentage points by which the pacer moves T.
        pacer_rounds: rounds between two steps of the pacer.
        penalty: power of T / duration for slower clients; 0 ignores durations.
        weighting: "examples" weights by num_examples, "equal" gives every selected client the same weight.
    """

    exploration: float = 0.9
    decay: float = 0.95
    least_exploration: float = 0.2
    clip: float = 0.98
    cutoff: float = 0.7
    percentile: float = 10.0
    pacer_step: float = 5.0
    pacer_rounds: int = 20
    penalty: float = 2.0
    weighting: Literal["examples", "equal"] = "examples"

    reference: ClassVar[str] = """
        @inproceedings{lai2021oort,
          title = {Oort: Efficient Federated Learning via Guided Participant Selection},
          author = {Lai, Fan and Zhu, Xiangfeng and Madhyastha, Harsha V. and Chowdhury, Mosharaf},
          booktitle = {USENIX Symposium on Operating Systems Design and Implementation (OSDI)},
          year = {2021}
        }"""

    def __post_init__(self) -> None:
        for name in ("exploration", "least_exploration", "clip"):
            number(self, name, "[0, 1]")
        number(self, "decay", "(0, 1]")
        number(self, "cutoff", "(0, 1]")
        number(self, "percentile", "[0, 100]")
        number(self, "pacer_step", "[0, 100]")
        whole(self, "pacer_rounds", 1)
        number(self, "penalty", "[0, inf)")
        choice(self, "weighting", ("examples", "equal"))

    @property
    def needs(self) -> frozenset[Signal]:
        """The losses of the examples; durations unless they are ignored."""
        return frozenset({Signal.LOSS_RMS, Signal.DURATION} if self._uses_durations else {Signal.LOSS_RMS})

    @property
    def _uses_durations(self) -> bool:
        return self.penalty > 0 and self.percentile < 100

    def init(self, clients: Clients, rng: np.random.Generator) -> OortState:
        """All clients are new."""
        return OortState(
            percentile=float(self.percentile),
            gained=0.0,
            gained_before=math.nan,
            sizes=clients.num_examples,
            last=np.zeros(len(clients), dtype=np.int64),
            utility=np.zeros(len(clients)),
            duration=np.full(len(clients), np.nan),
        )

    def select(self, state: OortState, context: RoundContext, rng: np.random.Generator) -> tuple[Selection, OortState]:
        """Exploit known clients and explore new ones."""
        t = context.index + 1
        state = self._paced(state, context.index)
        seen = np.flatnonzero(context.available & (state.last > 0))
        new = context.available & (state.last == 0)
        share = max(self.exploration * self.decay**t, self.least_exploration)
        # The small number keeps a product such as (1 - 0.9) * 10 = 0.9999999999999998 from being rounded down to 0.
        exploit = math.floor((1 - share) * context.budget + 1e-9)
        exploit = min(max(exploit, context.budget - int(np.count_nonzero(new))), len(seen))
        admitted, scores = self._admitted(state, seen, t, exploit)
        drawn = sample_weighted(scores, cumulative(scores), np.ones(len(scores), dtype=bool), exploit, rng)
        sizes = context.clients.num_examples
        explored = sample_weighted(sizes, cumulative(sizes), new, context.budget - exploit, rng)
        chosen = np.concatenate([admitted[drawn], explored])
        weights = np.full(len(chosen), 1 / max(len(chosen), 1)) if self.weighting == "equal" else None
        diagnostics = {
            "explored": len(explored),
            "admitted": len(admitted),
            "seen": int(np.count_nonzero(state.last)),
            "percentile": state.percentile,
        }
        return Selection(clients=chosen, weights=weights, diagnostics=diagnostics), state

    def _admitted(self, state: OortState, seen: IntArray, t: int, places: int) -> tuple[IntArray, FloatArray]:
        """Steps 1 to 4: the clients that may be sampled, and their scores."""
        if places == 0:
            return seen[:0], np.empty(0)
        utility = state.utility[seen]
        utility = np.minimum(utility, _ranked(utility, self.clip))
        low, spread = utility.min(), np.ptp(utility)
        scores = (utility - low) / spread if spread > 0 else np.zeros(len(seen))
        scores = scores + np.sqrt(0.1 * math.log(t) / state.last[seen])
        duration, preferred = state.duration[seen], self._preferred_duration(state)
        slow = duration > preferred
        scores[slow] *= (preferred / duration[slow]) ** self.penalty
        threshold = self.cutoff * np.partition(scores, len(scores) - places)[len(scores) - places]
        kept = scores >= threshold
        return seen[kept], scores[kept]

    def _preferred_duration(self, state: OortState) -> float:
        known = state.duration[~np.isnan(state.duration)]
        return _ranked(known, state.percentile / 100) if len(known) and state.percentile < 100 else math.inf

    def _paced(self, state: OortState, index: int) -> OortState:
        """Step 3: the pacer, at the start of a period."""
        if not self._uses_durations or index == 0 or index % self.pacer_rounds:
            return state
        change, before = abs(state.gained - state.gained_before), state.gained_before
        percentile = state.percentile
        if change <= 0.1 * before:  # False for NaN, in the first period
            percentile = min(percentile + self.pacer_step, 100.0)
        elif change >= 5 * before:
            percentile = max(percentile - self.pacer_step, min(self.pacer_step, percentile))
        return replace(state, percentile=percentile, gained=0.0, gained_before=state.gained)

    def observe(self, state: OortState, outcome: Outcome) -> OortState:
        """Refresh what is known of the selected clients."""
        chosen = outcome.clients
        usable = outcome.completed & ~np.isnan(outcome.loss_rms)
        gain = np.where(usable, state.sizes[chosen] * outcome.loss_rms, 0.0)
        # A client that was stopped was not useless: it counts as an average one, as in FedScale.
        gain[outcome.cancelled] = gain[usable].mean() if usable.any() else 0.0
        exploited = usable & (state.last[chosen] > 0)
        last, utility, duration = state.last.copy(), state.utility.copy(), state.duration.copy()
        last[chosen] = outcome.index + 1
        utility[chosen] = gain
        duration[chosen] = np.where(np.isnan(outcome.duration), duration[chosen], outcome.duration)
        gained = state.gained + (float(gain[exploited].mean()) if exploited.any() else 0.0)
        return replace(state, last=last, utility=utility, duration=duration, gained=gained)


def _ranked(values: FloatArray, share: float) -> float:
    """The value with this share of the others below it."""
    place = min(int(share * len(values)), len(values) - 1)
    return float(np.partition(values, place)[place])
