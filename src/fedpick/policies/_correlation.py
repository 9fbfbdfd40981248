"""What FedCor and FedGP share: when to measure, what a sample is, when to learn, how to pick. See `fedcor`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import FloatArray
from fedpick.core.errors import InvalidInput
from fedpick.core.policy import Policy, Signal
from fedpick.core.sampling import sample_uniform, top_k
from fedpick.core.state import per_client
from fedpick.core.types import Clients, Measurement, Outcome, Probe, RoundContext, Selection
from fedpick.core.validation import assign, choice, flag, number, whole
from fedpick.policies import _gp as gaussian

__all__ = ["Correlation", "CorrelationState"]


# Pictures for the report; beyond these sizes nobody could read them.
_MATRIX_LIMIT = 500
_EMBEDDING_LIMIT = 5000


@dataclass(frozen=True)
class CorrelationState:
    """What is known of the clients: their embedding and the samples it is learned from."""

    sample_rounds: NDArray[np.int64]
    """(H,) the round at whose start a sample was complete; -1: no sample in this row."""
    losses_round: int
    """The round in which `losses` were measured; -1: never."""
    moved: bool
    """Somebody completed the last round, so the model is a new one."""
    trained: bool
    """The embedding was learned at least once."""
    embedding: FloatArray = per_client(axis=1)
    """(d, N) X; 0 for a client never measured."""
    samples: FloatArray = per_client(axis=1)
    """(H, N) loss changes, newest first; NaN: no answer."""
    losses: FloatArray = per_client()
    """(N,) answers of the last probe of the current model; NaN: none."""
    picked: FloatArray = per_client()
    """(N,) times picked since the last update."""


@dataclass(frozen=True, kw_only=True)
class Correlation(Policy[CorrelationState]):
    """The fields and methods that FedCor and FedGP share; the arguments are explained at `FedCor`."""

    dimension: int = 15
    warmup: int = None  # type: ignore[assignment]  # None on entry only: set by the variant
    interval: int = 10
    beta: float = 0.95
    history: int = None  # type: ignore[assignment]
    theta: float = None  # type: ignore[assignment]
    trials: int = 1
    noise: float = 0.01
    variant: str = "paper"
    rule: str = "posterior"
    updates: str = "trial"
    initial_scale: float = 1.0
    learning_rate: float = 0.01
    iterations: int = 100
    warmup_iterations: int = None  # type: ignore[assignment]
    warmup_training: str = None  # type: ignore[assignment]
    warmup_history: int = None  # type: ignore[assignment]
    history_unit: str = None  # type: ignore[assignment]
    sample_from: int = None  # type: ignore[assignment]
    prior_mean: str = None  # type: ignore[assignment]
    selection_noise: str = None  # type: ignore[assignment]
    schedule: str = None  # type: ignore[assignment]
    anneal_warmup: bool = None  # type: ignore[assignment]

    presets: ClassVar[dict[str, dict[str, Any]]]
    """What each variant sets."""

    def __post_init__(self) -> None:
        choices = {
            "variant": tuple(self.presets),
            "rule": ("posterior", "independent", "proxy"),
            "updates": ("trial", "round"),
            "warmup_training": ("each", "end"),
            "history_unit": ("updates", "rounds"),
            "prior_mean": ("zero", "samples"),
            "selection_noise": gaussian.NOISE_RULES,
            "schedule": ("elapsed", "multiples", "after-multiples"),
        }
        choice(self, "variant", choices["variant"])
        self._refuse_another_preset()
        for name, value in self.presets[self.variant].items():
            if getattr(self, name) is None:
                assign(self, **{name: value})
        for name, allowed in choices.items():
            choice(self, name, allowed)
        flag(self, "anneal_warmup")
        for name, least in (("dimension", 1), ("interval", 1), ("trials", 1), ("iterations", 0), ("warmup", 0)):
            whole(self, name, least)
        for name in ("history", "warmup_history", "warmup_iterations", "sample_from"):
            whole(self, name, 0)
        for name in ("beta", "theta"):
            number(self, name, "(0, 1]")
        for name in ("noise", "learning_rate", "initial_scale"):
            number(self, name, "(0, inf)")

    def _refuse_another_preset(self) -> None:
        """`dataclasses.replace` of the variant alone would keep every option of the old one, under the new name."""
        given = {name: getattr(self, name) for name in self.presets[self.variant]}
        for variant, preset in self.presets.items():
            if variant != self.variant and given == preset != self.presets[self.variant]:
                raise InvalidInput(
                    f"variant={self.variant!r} with every option of variant={variant!r}: dataclasses.replace keeps the "
                    f"options that a policy has. Build a new one: policies.get(..., variant={self.variant!r})."
                )

    @property
    def needs(self) -> frozenset[Signal]:
        """Losses of everybody; unless `updates="round"`, trials too."""
        return frozenset({Signal.LOSS, Signal.TRIAL} if self.updates == "trial" else {Signal.LOSS})

    @property
    def _capacity(self) -> int:
        """The largest number of samples that any update can use."""
        trials = self.trials if self.updates == "trial" else 1
        if self.history_unit == "updates":
            return max(self.warmup_history + 1, (self.history + 1) * trials)
        return max(self.warmup - self.sample_from, 0) + trials * (self.history // self.interval + 2)

    def init(self, clients: Clients, rng: np.random.Generator) -> CorrelationState:
        """Nobody measured; a newcomer starts like that too."""
        count = len(clients)
        return CorrelationState(
            embedding=np.zeros((self.dimension, count)),
            samples=np.full((self._capacity, count), np.nan),
            losses=np.full(count, np.nan),
            picked=np.zeros(count),
            sample_rounds=np.full(self._capacity, -1, dtype=np.int64),
            losses_round=-1,
            moved=False,
            trained=False,
        )

    def probe(self, state: CorrelationState, context: RoundContext, rng: np.random.Generator) -> tuple[Probe, ...]:
        """Everybody's loss: each round of the warm-up, later when an update is due, then with trial cohorts."""
        plan = self._plan(state, context)
        if plan == "nothing":
            return ()
        everybody = np.flatnonzero(context.available)
        probes = [Probe(clients=everybody, signal=Signal.LOSS)]
        for _ in range(self.trials if plan == "trial" else 0):
            cohort = sample_uniform(context.available, context.budget, rng)
            trial = Selection(clients=cohort, weights=_equal(len(cohort)))
            probes.append(Probe(clients=everybody, signal=Signal.LOSS, trial=trial))
        return tuple(probes)

    def select(
        self, state: CorrelationState, context: RoundContext, rng: np.random.Generator
    ) -> tuple[Selection, CorrelationState]:
        """Learn from the answers, then draw at random (warm-up) or by the Gaussian."""
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
        return Selection(clients=chosen, weights=_equal(len(chosen)), diagnostics=diagnostics), state

    def observe(self, state: CorrelationState, outcome: Outcome) -> CorrelationState:
        """Remember whether there is a new model."""
        return replace(state, moved=bool(outcome.completed.any()))

    def _plan(self, state: CorrelationState, context: RoundContext) -> str:
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

    def _due(self, state: CorrelationState, index: int) -> bool:
        last = int(state.sample_rounds[0])
        if last < 0 or index - last >= self.interval:
            return True
        shift = {"elapsed": None, "multiples": 0, "after-multiples": 1}[self.schedule]
        return shift is not None and index - shift >= self.warmup and (index - shift) % self.interval == 0

    def _follows_a_round(self, state: CorrelationState, index: int) -> bool:
        """The losses before the last round are known, and that round changed the model."""
        return state.moved and state.losses_round >= 0 and state.losses_round == index - 1

    def _learn(
        self, state: CorrelationState, context: RoundContext, rng: np.random.Generator
    ) -> tuple[CorrelationState, dict[str, Any]]:
        """Take in the answers; where that gives a sample, learn the embedding again."""
        index = context.index
        changes: list[FloatArray] = []
        if context.measurements:
            losses, *trials = (_spread(answer, len(context.clients)) for answer in context.measurements)
            if trials:
                changes = [after - losses for after in trials]
            elif self._follows_a_round(state, index):
                changes = [losses - state.losses]
            # Nothing but zeros means that the model did not move: no information on the clients.
            changes = [change for change in changes if np.any(np.abs(change) > 0)]
            state = _remember(replace(state, losses=losses, losses_round=index), changes, index)
        if changes and index > self.warmup:
            state = replace(state, picked=np.zeros_like(state.picked))
        wanted = bool(changes)
        if self.warmup_training == "end":
            wanted = index >= self.warmup and (wanted or not state.trained)
        if not wanted or state.sample_rounds[0] < 0:
            return state, {}
        return self._train(state, context, rng)

    def _train(
        self, state: CorrelationState, context: RoundContext, rng: np.random.Generator
    ) -> tuple[CorrelationState, dict[str, Any]]:
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
        learned = gaussian.fit(
            start,
            samples,
            weights,
            noise=self.noise,
            iterations=self.warmup_iterations if early else self.iterations,
            learning_rate=self.learning_rate,
            mean=gaussian.discounted_mean(samples, weights) if self.prior_mean == "samples" else None,
        )
        diagnostics: dict[str, Any] = {
            "gp_samples": kept,
            "log_likelihood_before": learned.before,
            "log_likelihood_after": learned.after,
        }
        if len(context.clients) <= _EMBEDDING_LIMIT:
            diagnostics["embedding"] = learned.embedding
        if len(context.clients) <= _MATRIX_LIMIT:
            diagnostics["correlation"] = gaussian.correlation(learned.embedding)
        return replace(state, embedding=learned.embedding, trained=True), diagnostics

    def _usable(self, sample_rounds: NDArray[np.int64], history: int) -> int:
        """How many of the samples, newest first, enter the likelihood."""
        there = sample_rounds >= 0
        if self.history_unit == "rounds":
            young = there & (sample_rounds[0] - sample_rounds < max(history, 1))
            return int(np.count_nonzero(young))
        times = np.unique(sample_rounds[there])[::-1][: history + 1]
        return int(np.count_nonzero(there & (sample_rounds >= times[-1])))

    def _pick(
        self, state: CorrelationState, context: RoundContext, rng: np.random.Generator
    ) -> tuple[NDArray[np.int64], float | None]:
        """The cohort by the Gaussian, and the change of the global loss expected of it (None: there was no choice)."""
        candidates = None if context.available.all() else np.flatnonzero(context.available)
        count = len(context.clients) if candidates is None else len(candidates)
        if context.budget >= count:  # no choice: do not spend N picks on it
            return np.flatnonzero(context.available), None
        if context.budget == 0:
            return np.empty(0, dtype=np.int64), 0.0
        alpha = self.beta**state.picked
        importance = context.clients.importance
        if self.rule == "posterior":
            chosen, gains = gaussian.select_greedy(
                state.embedding,
                importance,
                alpha,
                context.budget,
                noise=self.noise,
                rule=self.selection_noise,
                candidates=candidates,
            )
            return chosen, -float(gains.sum())
        scores, variance = gaussian.prior_moments(
            state.embedding, importance, self.noise, self.selection_noise, candidates
        )
        if self.rule == "independent":
            extra = self.noise**2 if self.selection_noise == "observation" else 0.0
            ratio = np.divide(np.sqrt(variance), variance + extra, out=np.zeros_like(variance), where=variance > 0)
            scores = scores * ratio * (alpha if candidates is None else alpha[candidates])
        best = top_k(scores, context.budget, rng)
        return (best if candidates is None else candidates[best]), -float(scores[best].sum())


def _equal(count: int) -> FloatArray:
    return np.full(count, 1 / max(count, 1))


def _spread(answer: Measurement, count: int) -> FloatArray:
    """The answers of some clients as a row for all: NaN for the others."""
    row = np.full(count, np.nan)
    row[answer.clients] = answer.values
    return row


def _remember(state: CorrelationState, changes: list[FloatArray], index: int) -> CorrelationState:
    """The new samples on top, the oldest ones out."""
    if not changes:
        return state
    kept = max(len(state.samples) - len(changes), 0)
    samples = np.concatenate([np.stack(changes), state.samples[:kept]])[: len(state.samples)]
    new_rounds = np.full(len(changes), index, dtype=np.int64)
    sample_rounds = np.concatenate([new_rounds, state.sample_rounds[:kept]])[: len(state.samples)]
    return replace(state, samples=samples, sample_rounds=sample_rounds)
