"""FedCor and FedGP: pick the cohort whose training is expected to lower the loss of all clients most.

FedCor is Tang et al., CVPR 2022 (algorithms 1 and 2). The loss changes of all clients in one round are modelled as one
Gaussian vector with covariance X'X. Column x_k of X is the embedding of client k.
  Warm-up: cohorts are random. The loss of every client is measured at the start of every round, and its change since
    the round before is a sample. Adam maximises the discounted likelihood of the samples (equations 15 to 17) over X,
    starting from the last X.
  Afterwards: clients are picked one by one. The prediction for client k is the lower confidence bound
    mu_k - alpha_k sigma_k, alpha_k = beta^(times picked since the last update) (equation 9). The pick is the client
    whose prediction gives the lowest expected global loss (equation 10), and the Gaussian is conditioned on it
    (equation 11).
  Every `interval` rounds: losses are measured at the current model and at the model of a random trial cohort, which is
    thrown away. The difference is a new sample, X is learned again, and every alpha_k is 1 again.
The model moves by the plain mean of the cohort's updates.

FedGP is the earlier version of the same method: in its warm-up too it reuses only one older sample (M = 1).

`_gp` holds the mathematics in rank d, and beside it the N x N form of the paper as reference.

Deviations: only available clients are measured and picked. The likelihood leaves out a missing answer exactly. A
client that was never measured has x = 0 and gets a random column (variance 1/d per entry, as in the authors' code) with
its first answer. A warm-up sample exists only if a client completed the round before. An update is due `interval`
rounds after the last sample (algorithm 2: at every multiple of `interval`; see `schedule`). Cohorts are random until
there is a sample. The papers do not give the number of Adam's iterations; the defaults are those of the authors' first
code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import numpy as np

from fedpick.core.arrays import FloatArray, IntArray
from fedpick.core.policy import Policy, Signal
from fedpick.core.sampling import sample_uniform, top_k
from fedpick.core.state import per_client
from fedpick.core.types import Clients, Measurement, Outcome, Probe, RoundContext, Selection
from fedpick.core.validation import choice, flag, number, whole
from fedpick.policies import _gp

__all__ = ["FedCor", "FedCorState", "FedGP"]

# Diagnostics for the report's figures; larger ones are unreadable.
_MATRIX_LIMIT = 500
_EMBEDDING_LIMIT = 5000

# What the two published versions of the authors' code do differently from the paper. In both, rounds up to and
# including 15 are random, and an update follows the step of a round that is a multiple of `interval`.
_CODE_2022: Mapping[str, Any] = {
    "warmup": 16,
    "schedule": "after-multiples",
    "sample_from": 10,
    "warmup_history": 10,
    "theta": 0.8,
    "selection_noise": "observation",
    "anneal_warmup": True,
}
_CODE_2023: Mapping[str, Any] = {
    "warmup": 16,
    "schedule": "after-multiples",
    "warmup_training": "end",
    "warmup_iterations": 1000,
    "warmup_history": 100,
    "history": 100,
    "history_unit": "rounds",
    "theta": 0.95,
    "prior_mean": "samples",
    "selection_noise": "prior",
}


@dataclass(frozen=True)
class FedCorState:
    """The embedding of the clients, and the samples it is learned from."""

    sample_rounds: IntArray
    """(H,) the round at whose start the sample was complete; -1: the row is empty."""
    losses_round: int
    """The round in which `losses` were measured; -1: never."""
    moved: bool
    """A client completed the last round, so the model is a new one."""
    trained: bool
    """The embedding was learned at least once."""
    embedding: FloatArray = per_client(axis=1)
    """(d, N) X; 0 for a client never measured."""
    samples: FloatArray = per_client(axis=1)
    """(H, N) loss changes, newest first; NaN: no answer."""
    losses: FloatArray = per_client()
    """(N,) answers of the last probe of the current model; NaN: no answer."""
    picked: FloatArray = per_client()
    """(N,) times picked since the last update."""


@dataclass(frozen=True, kw_only=True)
class FedCor(Policy[FedCorState]):
    """Picks the cohort that a Gaussian process over the clients' loss changes expects to help all clients most.

    The defaults are the paper's. `policies.get("fedcor", variant="code-2022")` and `variant="code-2023"` start from
    what the two published versions of the authors' code do instead, and take further options on top. The version of
    2023 did clearly better where the authors' two programs were run side by side: use it for results, and the paper's
    for comparison with the paper.

    Args:
        dimension: d, the length of a client's embedding and the rank of the covariance.
        warmup: rounds with random cohorts, whose loss changes are samples.
        interval: rounds between updates of the embedding.
        beta: annealing; a client picked j times since the last update is predicted beta^j as confidently.
        history: M, how many earlier sampling rounds an update reuses, or how many rounds it reaches back (see
            `history_unit`).
        theta: discount of a sample per round of age.
        trials: S, trial cohorts per update.
        noise: standard deviation s of the noise in the likelihood.
        variant: the preset that `policies.get` started from: "paper", "code-2022" or "code-2023". By itself it changes
            no other option.
        rule: "posterior" (algorithm 1), "independent" (each client by its own gain, the left side of equation 59) or
            "proxy" (the right side: largest sum_i p_i Sigma_ik, without annealing).
        updates: "trial" learns from trial cohorts. "round" needs none: it learns from the loss change over a real
            round, whose cohort was not drawn uniformly as the model assumes.
        initial_scale: expected length of an embedding at its random start.
        learning_rate, iterations: of Adam in an update.
        warmup_iterations: of Adam in one training of the warm-up.
        warmup_training: "each" round of the warm-up, or once at its "end".
        warmup_history: the same as `history`, during the warm-up.
        history_unit: "updates" or "rounds".
        sample_from: the first round whose loss change is a sample.
        prior_mean: "zero", or "samples": every client's discounted mean change.
        selection_noise: where the noise enters the selection: "none", "observation" or "prior".
        schedule: an update is due `interval` rounds after the last sample ("elapsed"), or also before ("multiples") or
            after ("after-multiples") the rounds that are multiples of it.
        anneal_warmup: picks before `sample_from` count for the annealing.
    """

    dimension: int = 15
    warmup: int = 15
    interval: int = 10
    beta: float = 0.95
    history: int = 1
    theta: float = 0.9
    trials: int = 1
    noise: float = 0.01
    variant: str = "paper"
    rule: str = "posterior"
    updates: str = "trial"
    initial_scale: float = 1.0
    learning_rate: float = 0.01
    iterations: int = 100
    warmup_iterations: int = 150
    warmup_training: str = "each"
    warmup_history: int = 10
    history_unit: str = "updates"
    sample_from: int = 0
    prior_mean: str = "zero"
    selection_noise: str = "none"
    schedule: str = "elapsed"
    anneal_warmup: bool = False

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "code-2022": _CODE_2022,
        "code-2023": _CODE_2023,
    }
    reference: ClassVar[str] = """
        @inproceedings{tang2022fedcor,
          title = {{FedCor}: Correlation-Based Active Client Selection Strategy for Heterogeneous Federated Learning},
          author = {Tang, Minxue and Ning, Xuefei and Wang, Yitu and Sun, Jingwei and Wang, Yu and Li, Hai
                    and Chen, Yiran},
          booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)},
          year = {2022}
        }"""

    def __post_init__(self) -> None:
        choice(self, "variant", tuple(self.variants))
        choice(self, "rule", ("posterior", "independent", "proxy"))
        choice(self, "updates", ("trial", "round"))
        choice(self, "warmup_training", ("each", "end"))
        choice(self, "history_unit", ("updates", "rounds"))
        choice(self, "prior_mean", ("zero", "samples"))
        choice(self, "selection_noise", _gp.NOISE_RULES)
        choice(self, "schedule", ("elapsed", "multiples", "after-multiples"))
        flag(self, "anneal_warmup")
        whole(self, "interval", 1)
        for name in ("dimension", "trials"):
            whole(self, name, 1, most=10_000)
        for name in ("warmup", "history", "warmup_history"):  # the state holds as many samples of every client
            whole(self, name, 0, most=100_000)
        for name in ("iterations", "warmup_iterations"):
            whole(self, name, 0, most=1_000_000)
        whole(self, "sample_from", 0)
        for name in ("beta", "theta"):
            number(self, name, "(0, 1]")
        for name in ("noise", "learning_rate", "initial_scale"):
            number(self, name, "(0, 1e100]")  # the square of a larger one overflows

    @property
    def needs(self) -> frozenset[Signal]:
        """Losses of all available clients; unless `updates="round"`, trials too."""
        return frozenset({Signal.LOSS, Signal.TRIAL} if self.updates == "trial" else {Signal.LOSS})

    @property
    def _capacity(self) -> int:
        """The largest number of samples that any update can use."""
        trials = self.trials if self.updates == "trial" else 1
        if self.history_unit == "updates":
            return max(self.warmup_history + 1, (self.history + 1) * trials)
        return max(self.warmup - self.sample_from, 0) + trials * (self.history // self.interval + 2)

    def init(self, clients: Clients, rng: np.random.Generator) -> FedCorState:
        """No client is measured yet. A newcomer starts the same way."""
        count = len(clients)
        return FedCorState(
            embedding=np.zeros((self.dimension, count)),
            samples=np.full((self._capacity, count), np.nan),
            losses=np.full(count, np.nan),
            picked=np.zeros(count),
            sample_rounds=np.full(self._capacity, -1, dtype=np.int64),
            losses_round=-1,
            moved=False,
            trained=False,
        )

    def probe(self, state: FedCorState, context: RoundContext, rng: np.random.Generator) -> tuple[Probe, ...]:
        """Ask all available clients for their loss: in each round of the warm-up, later when an update is due."""
        plan = self._plan(state, context)
        if plan == "nothing":
            return ()
        asked = np.flatnonzero(context.available)
        probes = [Probe(clients=asked, signal=Signal.LOSS)]
        for _ in range(self.trials if plan == "trial" else 0):
            cohort = sample_uniform(context.available, context.budget, rng)
            trial = Selection(clients=cohort, weights=_equal_weights(len(cohort)))
            probes.append(Probe(clients=asked, signal=Signal.LOSS, trial=trial))
        return tuple(probes)

    def select(
        self, state: FedCorState, context: RoundContext, rng: np.random.Generator
    ) -> tuple[Selection, FedCorState]:
        """Learn from the answers, then draw at random (warm-up) or pick by the Gaussian."""
        state, diagnostics = self._learn(state, context, rng)
        if context.index < self.warmup or not state.trained:
            chosen = sample_uniform(context.available, context.budget, rng)
            counted = self.anneal_warmup and context.index < self.sample_from
            diagnostics["phase"] = "warm-up"
        else:
            chosen, expected = self._pick(state, context, rng)
            counted = True
            diagnostics["phase"] = "normal"
            if expected is not None:
                diagnostics["expected_loss_change"] = expected
        if counted and len(chosen):
            picked = state.picked.copy()
            picked[chosen] += 1
            state = replace(state, picked=picked)
        return Selection(clients=chosen, weights=_equal_weights(len(chosen)), diagnostics=diagnostics), state

    def observe(self, state: FedCorState, outcome: Outcome) -> FedCorState:
        """Remember whether there is a new model."""
        return replace(state, moved=bool(outcome.completed.any()))

    def _plan(self, state: FedCorState, context: RoundContext) -> str:
        """What to measure now: "nothing", the "losses" of the current model, or a "trial" as well."""
        index = context.index
        if not context.available.any():
            return "nothing"
        if index < self.warmup:
            return "losses" if index >= self.sample_from else "nothing"
        if index == self.warmup and self._follows_a_round(state, index):
            return "losses"  # the change in the last round of the warm-up
        if self.updates == "round":
            return "losses" if self._due(state, index) or self._due(state, index + 1) else "nothing"
        return "trial" if self._due(state, index) and context.budget > 0 else "nothing"

    def _due(self, state: FedCorState, index: int) -> bool:
        """Whether an update is due at the start of this round."""
        last = int(state.sample_rounds[0])
        if last < 0 or index - last >= self.interval:
            return True
        if self.schedule == "elapsed":
            return False
        step = index - (1 if self.schedule == "after-multiples" else 0)
        return step >= self.warmup and step % self.interval == 0

    def _follows_a_round(self, state: FedCorState, index: int) -> bool:
        """Whether the losses before the last round are known and that round changed the model."""
        return state.moved and state.losses_round >= 0 and state.losses_round == index - 1

    def _learn(
        self, state: FedCorState, context: RoundContext, rng: np.random.Generator
    ) -> tuple[FedCorState, dict[str, Any]]:
        """Store the answers. If they give a sample, learn the embedding again."""
        index = context.index
        changes: list[FloatArray] = []
        if context.measurements:
            losses, *trials = (_row(answer, len(context.clients)) for answer in context.measurements)
            if trials:
                changes = [after - losses for after in trials]
            elif self._follows_a_round(state, index):
                changes = [losses - state.losses]
            # Only zeros: the model did not move, and the change says nothing about the clients.
            changes = [change for change in changes if np.any(np.abs(change) > 0)]
            state = _with_samples(replace(state, losses=losses, losses_round=index), changes, index)
        if changes and index > self.warmup:
            state = replace(state, picked=np.zeros_like(state.picked))
        wanted = bool(changes)
        if self.warmup_training == "end":
            wanted = index >= self.warmup and (wanted or not state.trained)
        if not wanted or state.sample_rounds[0] < 0:
            return state, {}
        return self._train(state, context, rng)

    def _train(
        self, state: FedCorState, context: RoundContext, rng: np.random.Generator
    ) -> tuple[FedCorState, dict[str, Any]]:
        """Learn the embedding from the samples of equation 17."""
        early = context.index <= self.warmup or not state.trained
        kept = self._usable(state.sample_rounds, self.warmup_history if early else self.history)
        samples = state.samples[:kept]
        weights = self.theta ** (state.sample_rounds[0] - state.sample_rounds[:kept]).astype(np.float64)
        start = state.embedding.copy()
        # At x = 0 the gradient is 0: a client needs a random start, once, with its first answer.
        fresh = np.flatnonzero(~start.any(axis=0) & ~np.isnan(samples).all(axis=0))
        start[:, fresh] = rng.normal(
            scale=self.initial_scale / np.sqrt(self.dimension), size=(self.dimension, len(fresh))
        )
        learned = _gp.fit(
            start,
            samples,
            weights,
            noise=self.noise,
            iterations=self.warmup_iterations if early else self.iterations,
            learning_rate=self.learning_rate,
            mean=_gp.discounted_mean(samples, weights) if self.prior_mean == "samples" else None,
        )
        diagnostics: dict[str, Any] = {
            "gp_samples": kept,
            "log_likelihood_before": learned.before,
            "log_likelihood_after": learned.after,
        }
        if len(context.clients) <= _EMBEDDING_LIMIT:
            diagnostics["embedding"] = learned.embedding
        if len(context.clients) <= _MATRIX_LIMIT:
            diagnostics["correlation"] = _gp.correlation(learned.embedding)
        return replace(state, embedding=learned.embedding, trained=True), diagnostics

    def _usable(self, sample_rounds: IntArray, history: int) -> int:
        """How many of the samples, newest first, enter the likelihood."""
        filled = sample_rounds >= 0
        if self.history_unit == "rounds":
            young = filled & (sample_rounds[0] - sample_rounds < max(history, 1))
            return int(np.count_nonzero(young))
        times = np.unique(sample_rounds[filled])[::-1][: history + 1]
        return int(np.count_nonzero(filled & (sample_rounds >= times[-1])))

    def _pick(
        self, state: FedCorState, context: RoundContext, rng: np.random.Generator
    ) -> tuple[IntArray, float | None]:
        """The cohort by the Gaussian, and the expected change of the global loss; None if all available are taken."""
        candidates = None if context.available.all() else np.flatnonzero(context.available)
        count = len(context.clients) if candidates is None else len(candidates)
        if context.budget >= count:  # no choice: do not spend N picks on it
            return np.flatnonzero(context.available), None
        if context.budget == 0:
            return np.empty(0, dtype=np.int64), 0.0
        alpha = self.beta**state.picked
        importance = context.clients.importance
        if self.rule == "posterior":
            chosen, gains = _gp.select_greedy(
                state.embedding,
                importance,
                alpha,
                context.budget,
                noise=self.noise,
                rule=self.selection_noise,
                candidates=candidates,
            )
            return chosen, -float(gains.sum())
        scores, variance = _gp.prior_moments(state.embedding, importance, self.noise, self.selection_noise, candidates)
        if self.rule == "independent":
            extra = self.noise**2 if self.selection_noise == "observation" else 0.0
            ratio = np.divide(np.sqrt(variance), variance + extra, out=np.zeros_like(variance), where=variance > 0)
            scores = scores * ratio * (alpha if candidates is None else alpha[candidates])
        best = top_k(scores, context.budget, rng)
        return (best if candidates is None else candidates[best]), -float(scores[best].sum())


@final
@dataclass(frozen=True, kw_only=True)
class FedGP(FedCor):
    """The earlier version of FedCor, which reuses one older sample throughout.

    Its options are those of `FedCor`, where they are described: `dimension`, `warmup`, `interval`, `beta`, `history`,
    `theta`, `trials`, `noise`, `variant`, `rule`, `updates`, `initial_scale`, `learning_rate`, `iterations`,
    `warmup_iterations`, `warmup_training`, `warmup_history` (here 1), `history_unit`, `sample_from`, `prior_mean`,
    `selection_noise`, `schedule` and `anneal_warmup`.
    """

    warmup_history: int = 1

    reference: ClassVar[str] = """
        @article{tang2021fedgp,
          title = {{FedGP}: Correlation-Based Active Client Selection for Heterogeneous Federated Learning},
          author = {Tang, Minxue and Ning, Xuefei and Wang, Yitu and Wang, Yu and Chen, Yiran},
          journal = {arXiv preprint arXiv:2103.13822},
          year = {2021}
        }"""


def _equal_weights(count: int) -> FloatArray:
    return np.full(count, 1 / max(count, 1))


def _row(answer: Measurement, count: int) -> FloatArray:
    """The answers as a row for all clients, NaN for those not asked."""
    row = np.full(count, np.nan)
    row[answer.clients] = answer.values
    return row


def _with_samples(state: FedCorState, changes: list[FloatArray], index: int) -> FedCorState:
    """Put the new samples first, and drop the oldest ones."""
    if not changes:
        return state
    kept = max(len(state.samples) - len(changes), 0)
    samples = np.concatenate([np.stack(changes), state.samples[:kept]])[: len(state.samples)]
    new_rounds = np.full(len(changes), index, dtype=np.int64)
    sample_rounds = np.concatenate([new_rounds, state.sample_rounds[:kept]])[: len(state.samples)]
    return replace(state, samples=samples, sample_rounds=sample_rounds)
