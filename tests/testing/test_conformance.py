"""Every registered policy keeps the contract, and the kit that says so can fail."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import pytest

import fedpick
from fedpick import Clients, Policy, Selection, Signal, testing
from fedpick.core.errors import PolicyCheckFailed
from fedpick.core.registry import BUILT_IN
from fedpick.core.state import Stateless, per_client


@pytest.mark.parametrize("check", testing.CHECKS)
@pytest.mark.parametrize("name", BUILT_IN)
def test_every_registered_policy_keeps_the_contract(name, check):
    # Learning FedCor's embedding for a million clients takes a minute per round of its warm-up, which
    # `python -m benchmarks.speed gp` measures. A few iterations suffice here.
    brief = {"warmup_iterations": 3} if name in ("fedcor", "fedgp") and check == "one_million_clients" else {}
    testing.CHECKS[check](fedpick.policies.get(name, **brief))


@dataclass(frozen=True, kw_only=True)
class Counts:
    counts: np.ndarray = per_client()
    value: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Broken(Policy[Counts]):
    """Keeps the contract but for the one fault it is given."""

    fault: str = ""
    unbiased: ClassVar[bool] = False
    memory: list = field(default_factory=list)

    @property
    def needs(self):
        return frozenset({Signal.LOSS})

    def init(self, clients: Clients, rng):
        return Counts(counts=np.zeros(len(clients)))

    def probe(self, state, context, rng):
        return (fedpick.Probe(clients=np.flatnonzero(context.available)),)

    def select(self, state, context, rng):
        eligible = np.flatnonzero(context.available)
        count = min(context.budget, len(eligible))
        chosen = rng.permutation(eligible)[:count]
        counts = state.counts.copy()
        if self.fault == "global rng":
            chosen = np.random.permutation(eligible)[:count]  # noqa: NPY002
        elif self.fault == "hidden memory":
            self.memory.append(1)
            chosen = np.roll(eligible, len(self.memory))[:count]
        elif self.fault == "hash order":
            order = sorted(eligible.tolist(), key=lambda client: hash(f"client {client}"))
            chosen = np.array(order[:count], dtype=int)
        elif self.fault == "writes":
            counts = state.counts
        elif self.fault == "over budget":
            chosen = eligible[: count + 1]
        elif self.fault == "ghost":
            chosen = np.array([0]) if len(eligible) == 0 else chosen
        elif self.fault == "shy":
            chosen = chosen if len(context.clients) > 1 else chosen[:0]
        elif self.fault == "newest first":
            chosen = eligible[np.argsort(state.counts[eligible], kind="stable")][:count]
        elif self.fault == "gives up":
            chosen = chosen if state.value == 0 else chosen[:0]
        elif self.fault == "stubborn":
            shuffled = rng.permutation(eligible)
            chosen = shuffled[np.argsort(-state.counts[shuffled], kind="stable")][:count]
        elif self.fault == "crash":
            raise KeyError("duration")
        counts[chosen[chosen < len(counts)]] += 1
        value = float(len(chosen)) if self.fault == "own rows" else state.value
        return Selection(clients=chosen), replace(state, counts=counts, value=value)

    def observe(self, state, outcome):
        if self.fault == "gives up" and not outcome.completed.any():
            return replace(state, value=1.0)
        if self.fault == "own rows":
            return replace(state, value=float((outcome.completed * np.ones(int(state.value))).sum()))
        if self.fault == "infinite":
            return replace(state, value=np.inf)
        if self.fault == "stubborn":
            counts = state.counts.copy()
            counts[outcome.clients[outcome.completed]] = 0
            return replace(state, counts=counts)
        return state


@dataclass(frozen=True, kw_only=True)
class Boastful(Policy[Stateless]):
    """Claims to be unbiased and is not."""

    unbiased: ClassVar[bool] = True

    def init(self, clients, rng):
        return Stateless()

    def select(self, state, context, rng):
        return Selection(clients=np.flatnonzero(context.available)[: context.budget]), state


@dataclass(frozen=True, kw_only=True)
class Optimist(Policy[Counts]):
    """Takes a client that never reported for the best, and does not notice failures."""

    needs = frozenset({Signal.OUTCOME_LOSS})

    def init(self, clients, rng):
        return Counts(counts=np.full(len(clients), 9.0))

    def select(self, state, context, rng):
        eligible = rng.permutation(np.flatnonzero(context.available))
        best = eligible[np.argsort(-state.counts[eligible], kind="stable")]
        return Selection(clients=best[: context.budget]), state

    def observe(self, state, outcome):
        losses = state.counts.copy()
        reported = ~np.isnan(outcome.loss)
        losses[outcome.clients[reported]] = outcome.loss[reported]
        return replace(state, counts=losses)


@dataclass(frozen=True, kw_only=True)
class Loose(Policy[dict]):
    """Keeps its state in a dictionary."""

    def init(self, clients, rng):
        return {"rounds": 0}

    def select(self, state, context, rng):
        return Selection(clients=np.flatnonzero(context.available)[: context.budget]), {"rounds": state["rounds"] + 1}


@pytest.mark.parametrize(
    ("fault", "check", "sentence"),
    [
        ("global rng", "global_randomness_is_untouched", "global random generator"),
        ("global rng", "same_seed_same_selections", "same seed"),
        ("hidden memory", "save_and_load_at_every_round", "not in its state"),
        ("hidden memory", "only_tell_commits", "only tell"),
        ("hash order", "same_selections_in_other_processes", "hash seeds"),
        ("writes", "arguments_are_never_modified", "writes to an array of its arguments"),
        ("over budget", "keeps_within_the_round", "budget"),
        ("ghost", "nobody_available", "not available"),
        ("shy", "one_client", "never chose it"),
        ("gives up", "everybody_fails", "stopped selecting"),
        ("own rows", "answers_come_late", "ValueError"),
        ("infinite", "odd_reports", "absurd number entered its value"),
        ("newest first", "clients_join", "newcomers"),
        ("stubborn", "dead_clients_are_not_picked_for_ever", "never complete"),
        ("crash", "one_client", "KeyError"),
    ],
)
def test_the_kit_catches(fault, check, sentence, monkeypatch):
    monkeypatch.setattr(testing, "CHECKS", {check: testing.CHECKS[check]})
    policy = Broken(fault=fault, memory=[])
    with pytest.raises(PolicyCheckFailed, match=sentence):
        testing.check_policy(policy)


def test_a_policy_without_fault_passes():
    testing.check_policy(Broken())


def test_the_kit_catches_a_false_claim_of_unbiasedness():
    with pytest.raises(PolicyCheckFailed, match="claims to be unbiased"):
        testing.unbiased_if_it_says_so(Boastful())


def test_the_kit_catches_what_is_too_large(monkeypatch):
    monkeypatch.setattr(testing, "MEMORY_LIMIT", 1000)
    with pytest.raises(PolicyCheckFailed, match="MiB"):
        testing.one_million_clients(fedpick.policies.get("uniform"), num_clients=10_000)


def test_a_policy_that_ignores_failures_is_caught():
    with pytest.raises(PolicyCheckFailed, match="never complete"):
        testing.dead_clients_are_not_picked_for_ever(Optimist())


@pytest.mark.parametrize("check", ["save_and_load_at_every_round", "arguments_are_never_modified", "odd_reports"])
def test_a_state_that_is_no_dataclass_is_a_sentence(check, monkeypatch):
    monkeypatch.setattr(testing, "CHECKS", {check: testing.CHECKS[check]})
    with pytest.raises(PolicyCheckFailed, match=r"must be an instance of a frozen dataclass.*Got \{'rounds'"):
        testing.check_policy(Loose())


def test_every_result_is_passed_on(monkeypatch):
    names = ("one_client", "nobody_available")
    monkeypatch.setattr(testing, "CHECKS", {name: testing.CHECKS[name] for name in names})
    seen = {}
    with pytest.raises(PolicyCheckFailed, match="never chose it"):
        testing.check_policy(Broken(fault="shy", memory=[]), on_check=seen.__setitem__)
    assert "never chose it" in seen["one_client"]
    assert seen["nobody_available"] is None
