"""tifl: tiers, probabilities and cohorts against the definition, and the known faults of public code."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fedpick import Clients, Outcome, Session, Signal, policies
from fedpick.core.errors import InvalidInput
from fedpick.core.rng import Purpose, stream
from fedpick.core.types import RoundContext
from fedpick.policies.tifl import _tier_losses, _tiers, probabilities, reference_tiers


def table(count):
    return Clients(num_examples=np.ones(count))


def start(policy, count, **fields):
    return replace(policy.init(table(count), stream(0, 0, Purpose.INIT)), **fields)


def select(policy, state, budget, index=1, seed=0, available=None):
    count = len(state.tried)
    mask = np.ones(count, dtype=bool) if available is None else available
    context = RoundContext(index=index, budget=budget, available=mask, clients=table(count))
    return policy.select(state, context, stream(seed, index, Purpose.SELECT))


def random_state(rng, policy, count):
    tried = rng.random(count) < rng.choice([0.3, 0.8, 1.0])
    duration, loss = rng.lognormal(size=count), rng.lognormal(size=count)
    duration = np.round(duration, int(rng.choice([0, 3])))  # with ties, and without
    duration[~tried | (rng.random(count) < 0.15)] = np.nan
    loss[~tried | (rng.random(count) < 0.3)] = np.nan
    credits = rng.integers(0, 3, policy.tiers) if policy.credits else np.zeros(policy.tiers, dtype=int)
    chances = rng.dirichlet(np.ones(policy.tiers))
    return start(policy, count, tried=tried, duration=duration, loss=loss, credits=credits, chances=chances)


def naive(policy, state, budget, available, rng):
    """The tier of the round, and the distances to it of the clients that train; None: a client of every tier."""
    tried = np.flatnonzero(state.tried).tolist()
    seconds = [math.inf if math.isnan(state.duration[k]) else float(state.duration[k]) for k in tried]
    tier = dict(zip(tried, reference_tiers(seconds, policy.tiers), strict=True))
    reachable = [any(tier.get(k, t) == t for k in np.flatnonzero(available)) for t in range(policy.tiers)]
    credits = state.credits.tolist()
    if policy.credits and not any(r and c for r, c in zip(reachable, credits, strict=True)):
        credits = [policy.credits] * policy.tiers
    chances = np.array(
        [
            chance if r and (c or policy.credits is None) else 0
            for chance, r, c in zip(state.chances, reachable, credits, strict=True)
        ]
    )
    drawn = int(rng.choice(policy.tiers, p=chances / chances.sum()))
    key = {k: 0 if k not in tier else 2 * abs(tier[k] - drawn) + (tier[k] > drawn) for k in np.flatnonzero(available)}
    return drawn, key, sorted(key.values())[:budget]


def test_decisions_equal_the_definition():
    rng = np.random.default_rng(0)
    for seed in range(600):
        policy = policies.get("tifl", tiers=int(rng.integers(1, 7)), credits=rng.choice([None, 3]))
        count, budget = int(rng.integers(1, 40)), int(rng.integers(1, 10))
        state, available = random_state(rng, policy, count), rng.random(count) < 0.7
        selection, after = select(policy, state, budget, index=1, seed=seed, available=available)
        if not available.any():
            assert len(selection.clients) == 0
            continue
        drawn, key, distances = naive(policy, state, budget, available, stream(seed, 1, Purpose.SELECT))
        assert selection.diagnostics["tier"] == after.last_tier == drawn
        assert sorted(key[k] for k in selection.clients.tolist()) == distances


def test_tiers_and_losses_by_hand():
    """Seven clients, one never tried and one without a report: no number of tiers needs to divide six."""
    policy = policies.get("tifl", tiers=4)
    state = start(
        policy,
        7,
        tried=np.array([True] * 6 + [False]),
        duration=np.array([5.0, 1.0, np.nan, 2.0, 9.0, 3.0, np.nan]),
        loss=np.array([4.0, 1.0, np.nan, 3.0, np.nan, 6.0, np.nan]),
    )
    tier = _tiers(state, 4)
    assert tier.tolist() == [2, 0, 3, 0, 2, 1, -1]  # in order of speed: 1, 3 | 5 | 0, 4 | 2
    assert _tier_losses(state, tier, 4)[:3].tolist() == [2.0, 6.0, 4.0]
    assert np.isnan(_tier_losses(state, tier, 4)[3])


def test_clients_of_equal_duration_share_a_tier():
    policy = policies.get("tifl", tiers=5)
    equal = start(policy, 8, tried=np.ones(8, bool), duration=np.ones(8))
    assert set(_tiers(equal, 5).tolist()) == {4}
    assert len(select(policy, equal, 3)[0].clients) == 3
    assert reference_tiers([1.0, 1.0, 2.0, 3.0], 2) == [0, 0, 1, 1]
    assert reference_tiers([1.0, 2.0, 2.0, 3.0], 2) == [0, 1, 1, 1]


def test_probabilities_by_hand():
    assert probabilities([0.5, 2.0, 1.0], [True] * 3) == pytest.approx([1 / 6, 3 / 6, 2 / 6])
    assert probabilities([0.5, 2.0, 1.0], [True, False, True]) == pytest.approx([1 / 3, 0, 2 / 3])
    assert probabilities([1.0, math.nan, 3.0], [True] * 3) == pytest.approx([1 / 6, 2 / 6, 3 / 6])


def test_probabilities_change_only_if_the_loss_of_the_tier_did_not_fall():
    policy = policies.get("tifl", tiers=2, interval=5)
    state = start(
        policy, 4, tried=np.ones(4, bool), duration=np.arange(4.0), loss=np.array([1.0, 1, 3, 3]), last_tier=0
    )
    first = select(policy, state, 1, index=5)[1]
    assert first.chances.tolist() == [0.5, 0.5]  # there was no earlier loss
    assert first.earlier_loss.tolist() == [1, 3]
    worse = select(policy, replace(first, last_tier=0), 1, index=10)[1]
    assert worse.chances == pytest.approx([1 / 3, 2 / 3])
    better = replace(first, last_tier=1, loss=np.array([1.0, 1, 2, 2]))
    assert select(policy, better, 1, index=10)[1].chances.tolist() == [0.5, 0.5]
    assert select(policy, replace(first, last_tier=0), 1, index=9)[1].chances.tolist() == [0.5, 0.5]


def test_a_cohort_is_of_one_tier_once_durations_are_known_and_clients_are_distinct():
    """FLGo draws with replacement, and fails unless 5 divides the number of clients."""
    seconds = np.random.default_rng(1).permutation(23.0 + np.arange(23))
    session = Session(policies.get("tifl"), table(23), seed=0)
    for index in range(200):
        selection = session.ask(budget=4)
        assert len(set(selection.clients.tolist())) == 4
        if session.state.tried.all():
            assert len({int(place * 5 // 23) for place in seconds[selection.clients] - 23}) == 1
        session.tell(
            Outcome(
                index=index,
                clients=selection.clients,
                completed=np.ones(4, dtype=bool),
                duration=seconds[selection.clients],
                loss=np.ones(4),
            )
        )
    assert session.state.tried.all()


def test_spent_credits_are_given_back():
    """FLGo searches for a tier with credits for ever."""
    policy = policies.get("tifl", tiers=3, credits=2)
    state = start(policy, 9, tried=np.ones(9, bool), duration=np.arange(9.0))
    drawn = []
    for index in range(1, 19):
        selection, state = select(policy, state, 2, index=index)
        drawn.append(selection.diagnostics["tier"])
    for period in range(3):
        assert sorted(drawn[6 * period : 6 * period + 6]) == [0, 0, 1, 1, 2, 2]


def test_a_small_tier_is_filled_from_its_neighbours_faster_first():
    policy = policies.get("tifl", tiers=3)
    chances = np.array([0.0, 1.0, 0.0])
    state = start(policy, 6, tried=np.ones(6, bool), duration=np.arange(6.0), chances=chances)
    assert set(select(policy, state, 3, seed=1)[0].clients[:2]) == {2, 3}
    for seed in range(20):
        assert set(select(policy, state, 4, seed=seed)[0].clients) == {0, 1, 2, 3}


def test_clients_of_a_tier_are_equally_likely():
    policy = policies.get("tifl", tiers=2)
    state = start(policy, 8, tried=np.ones(8, bool), duration=np.arange(8.0), chances=np.array([1.0, 0.0]))
    counts = np.zeros(8)
    for seed in range(1000):
        counts[select(policy, state, 2, seed=seed)[0].clients] += 1
    assert counts[4:].sum() == 0
    assert (np.abs(counts[:4] / 1000 - 0.5) <= 5 * np.sqrt(0.25 / 1000)).all()


def test_who_never_answers_is_in_the_slowest_tier():
    session = Session(policies.get("tifl"), table(20), seed=0)
    picks = np.zeros(20)
    for index in range(300):
        selection = session.ask(budget=2)
        picks[selection.clients] += 1
        session.tell(
            Outcome(
                index=index,
                clients=selection.clients,
                completed=selection.clients != 0,
                duration=np.where(selection.clients == 0, np.nan, 1.0 + selection.clients),
                loss=np.ones(2),
            )
        )
    assert _tiers(session.state, 5)[0] == 4
    assert picks[0] < 80  # an equal share of 600 places is 30


def test_late_clients_keep_their_duration_and_those_that_die_lose_it():
    policy = policies.get("tifl")
    state = start(policy, 3, tried=np.ones(3, bool), duration=np.array([1.0, 2.0, 3.0]), loss=np.ones(3))
    outcome = Outcome(
        index=1,
        clients=[0, 1, 2],
        completed=np.array([False, False, True]),
        duration=[9.0, np.nan, np.nan],
        loss=[5.0, 5.0, 5.0],
    )
    state = policy.observe(state, outcome)
    assert state.duration.tolist()[::2] == [9.0, 3.0]
    assert np.isnan(state.duration[1])
    assert state.loss.tolist() == [1.0, 1.0, 5.0]


def test_newcomers_and_unusable_reports():
    session = Session(policies.get("tifl"), table(3), seed=0)
    selection = session.ask(budget=3)
    session.tell(
        Outcome(
            index=0,
            clients=selection.clients,
            completed=np.ones(3, bool),
            duration=[1.0, -5.0, np.inf],
            loss=[np.nan] * 3,
        )
    )
    assert np.isnan(session.state.duration).sum() == 2
    session.grow(table(5))
    assert session.state.tried.tolist() == [True] * 3 + [False] * 2
    assert _tiers(session.state, 5)[3:].tolist() == [-1, -1]
    assert len(session.ask(budget=5).clients) == 5


def test_needs_and_refusals():
    assert policies.get("tifl").needs == {Signal.DURATION, Signal.OUTCOME_LOSS}
    for options in ({"tiers": 0}, {"interval": 0}, {"credits": 0}, {"tiers": 2.5}):
        with pytest.raises(InvalidInput, match=next(iter(options))):
            policies.get("tifl", **options)
