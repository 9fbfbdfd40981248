from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

import fedpick
from fedpick.availability import AvailabilityCounts, no_counts, update_counts
from fedpick.core.errors import InvalidInput, MissingSignal
from fedpick.core.policy import Signal
from fedpick.core.session import Session
from fedpick.core.types import Clients, Outcome, RoundContext, aggregation_weights
from tests.policies import QUICK_CHECKS

NAMES = ["unbiased", "more-available", "adafed", "f3ast"]
IMPORTANCE = np.array([0.1, 0.2, 0.3, 0.4])
AVAILABILITY = np.array([0.2, 0.5, 0.6, 0.8])
RATIO = np.array([0.5, 0.4, 0.5, 0.5])  # importance over availability


def table(**fields):
    return Clients(num_examples=np.ones(4), importance=IMPORTANCE, availability=AVAILABILITY, **fields)


def select(policy, clients, mask, budget=None, seed=0, state=None, index=0):
    rng = np.random.default_rng(seed)
    available = np.asarray(mask, dtype=bool)
    context = RoundContext(
        index=index,
        budget=int(available.sum()) if budget is None else budget,
        available=available,
        clients=clients,
    )
    return policy.select(policy.init(clients, rng) if state is None else state, context, rng)


def oracle(name, **hyper_parameters):
    return fedpick.policies.get(name, estimates="oracle", **hyper_parameters)


def test_unbiased_weights_by_hand():
    selection, _ = select(oracle("unbiased"), table(), [1, 0, 1, 1])
    np.testing.assert_array_equal(selection.clients, [0, 2, 3])
    np.testing.assert_allclose(selection.weights, RATIO[[0, 2, 3]])
    assert not selection.renormalize
    # Drop-outs shrink the step instead of being made up for.
    used = aggregation_weights(selection, np.array([True, False, True]), table())
    np.testing.assert_allclose(used, [0.5, 0.0, 0.5])


def test_more_available_by_hand():
    selection, _ = select(oracle("more-available"), table(), [1, 1, 0, 1])
    np.testing.assert_array_equal(selection.clients, [1, 3])  # exactly one half counts as more available
    np.testing.assert_allclose(selection.weights, [0.4, 0.5])
    assert not selection.renormalize
    assert selection.diagnostics["excluded"] == 1
    nobody, _ = select(oracle("more-available"), table(), [1, 0, 0, 0])
    assert len(nobody.clients) == 0


def test_adafed_by_hand():
    selection, _ = select(oracle("adafed"), table(), [0, 1, 1, 0])
    np.testing.assert_allclose(selection.weights, [4 / 9, 5 / 9])
    assert selection.renormalize
    # Budget 1 of 2: twice the weight under full participation, or everything.
    one, _ = select(oracle("adafed"), table(), [0, 1, 1, 0], budget=1)
    np.testing.assert_allclose(one.weights, 2 * np.array([0, 4 / 9, 5 / 9, 0])[one.clients])
    one, _ = select(oracle("adafed", normalize_over="cohort"), table(), [0, 1, 1, 0], budget=1)
    np.testing.assert_allclose(one.weights, [1.0])


def test_adafed_without_importance_gives_no_step():
    clients = Clients(num_examples=np.ones(2), importance=np.array([0.0, 1.0]))
    selection, _ = select(fedpick.policies.get("adafed"), clients, [1, 0])
    np.testing.assert_array_equal(selection.weights, [0.0])


def test_f3ast_takes_the_top_and_breaks_ties_at_random():
    picks = [select(oracle("f3ast"), table(), [1, 1, 1, 1], budget=2, seed=seed)[0] for seed in range(60)]
    for selection in picks:
        assert 1 not in selection.clients  # the only one below 0.5
        np.testing.assert_allclose(selection.weights, [0.5, 0.5])
        assert not selection.renormalize
    assert {tuple(sorted(s.clients.tolist())) for s in picks} == {(0, 2), (0, 3), (2, 3)}
    everyone, _ = select(oracle("f3ast"), table(), [1, 1, 1, 1])
    assert sorted(everyone.clients.tolist()) == [0, 1, 2, 3]
    fewer, _ = select(oracle("f3ast", cohort_size=2), table(), [1, 1, 0, 1])
    assert sorted(fewer.clients.tolist()) == [0, 3]
    with pytest.raises(InvalidInput, match="'cohort_size' parameter of F3AST"):
        oracle("f3ast", cohort_size=0)
    with pytest.raises(InvalidInput, match=r"whole number of at least 1, or None\. Got 2\.5"):
        oracle("f3ast", cohort_size=2.5)


def exact_availability(masks, estimates):
    """pi of one client with prior 1, in exact arithmetic."""
    pairs = list(pairwise(masks))
    stay = Fraction(pairs.count((1, 1)) + 1, masks[:-1].count(1) + 2)
    appear = Fraction(pairs.count((0, 1)) + 1, masks[:-1].count(0) + 2)
    return appear / (appear + 1 - stay) if estimates == "bayes-chain" else Fraction(masks.count(1) + 1, len(masks) + 2)


@pytest.mark.parametrize("estimates", ["bayes", "bayes-chain"])
def test_f3ast_breaks_ties_as_in_exact_arithmetic(estimates):
    rng, missed = np.random.default_rng(3), 0
    policy = fedpick.policies.get("f3ast", estimates=estimates)
    for _ in range(150):
        count, budget = int(rng.integers(3, 7)), int(rng.integers(1, 4))
        sizes = rng.integers(1, 5, count)
        rounds = [*(rng.random((int(rng.integers(1, 6)), count)) < 0.5), np.ones(count, bool)]
        counts = AvailabilityCounts(**no_counts(count))
        for mask in rounds[:-1]:
            counts = update_counts(counts, mask)
        clients = Clients(num_examples=sizes.astype(float))
        exact = [
            Fraction(int(size), int(sizes.sum()))
            / exact_availability([int(mask[client]) for mask in rounds], estimates)
            for client, size in enumerate(sizes)
        ]
        chosen, weights = [], {}
        for seed in range(60):
            selection, _ = select(policy, clients, rounds[-1], state=counts, budget=budget, seed=seed)
            chosen.append(set(selection.clients.tolist()))
            weights.update(zip(selection.clients.tolist(), selection.weights.tolist(), strict=True))
        last = sorted(exact)[-budget]
        assert set.union(*chosen) == {client for client, value in enumerate(exact) if value >= last}
        assert set.intersection(*chosen) >= {client for client, value in enumerate(exact) if value > last}
        tied = {weights[client] for client, value in enumerate(exact) if value == last}
        missed += len(tied) > 1  # the weights stay as they are
    assert missed > 3  # floating-point numbers miss some ties


def test_estimates_count_this_round_and_only_the_clients_own_age():
    clients = Clients(num_examples=np.ones(2))
    session = Session(fedpick.policies.get("unbiased"), clients)
    masks = [[True, False], [True, True], [False, True]]
    weights = []
    for index, mask in enumerate(masks):
        selection = session.ask(available=np.array(mask))
        done = np.ones(len(selection.clients), dtype=bool)
        session.tell(Outcome(index=index, clients=selection.clients, completed=done))
        weights.append(selection.weights)
    # alpha = 1/2; round 0: 2/3. Round 1: 3/4 and 2/4. Round 2: client 1, (2 + 1) / (3 + 2).
    np.testing.assert_allclose(weights[0], [3 / 4])
    np.testing.assert_allclose(weights[1], [2 / 3, 1.0])
    np.testing.assert_allclose(weights[2], [5 / 6])
    session.grow(Clients(num_examples=np.ones(3)))
    newcomer = session.ask(available=np.array([False, False, True]))
    np.testing.assert_allclose(newcomer.weights, [(1 / 3) / (2 / 3)])


def test_chain_estimates_are_the_stationary_probability():
    clients = Clients(num_examples=np.ones(1))
    policy = fedpick.policies.get("unbiased", estimates="bayes-chain")
    state = None
    for index, mask in enumerate([1, 1, 0, 1]):
        selection, state = select(policy, clients, [mask], state=state, index=index)
    # P(on | on) = (1 + 1) / (2 + 2), P(on | off) = (1 + 1) / (1 + 2): pi = (2/3) / (2/3 + 1/2).
    np.testing.assert_allclose(selection.weights, [7 / 4])


@pytest.mark.parametrize("name", NAMES)
def test_without_a_prior_weights_are_finite(name):
    policy, state = fedpick.policies.get(name, prior=0.0), None
    for index, mask in enumerate([[0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]):
        selection, state = select(policy, table(), mask, state=state, index=index)
        assert np.isfinite(selection.weights).all()
    assert len(selection.clients) >= 1


def chains(rng, count, rounds, correlation):
    """Independent federations of two-state Markov chains that start in their stationary law: (count, rounds, N)."""
    masks = np.empty((count, rounds, 4), dtype=bool)
    masks[:, 0] = rng.random((count, 4)) < AVAILABILITY
    for index in range(1, rounds):
        on = correlation * masks[:, index - 1] + (1 - correlation) * AVAILABILITY
        masks[:, index] = rng.random((count, 4)) < on
    return masks


def mean_step(policy, masks, updates, budget, rng):
    """Mean of sum_k weight_k x update_k over independent federations, and its standard error."""
    clients, steps = table(), []
    for mask in masks[:, -1]:
        context = RoundContext(index=0, budget=budget or int(mask.sum()), available=mask, clients=clients)
        selection, _ = policy.select(policy.init(clients, rng), context, rng)
        weights = aggregation_weights(selection, np.ones(len(selection.clients), dtype=bool), clients)
        steps.append(weights @ updates[selection.clients])
    return np.mean(steps, axis=0), np.std(steps, axis=0) / np.sqrt(len(steps))


@pytest.mark.parametrize("budget", [None, 1, 2])
def test_with_true_availability_the_expected_step_is_that_of_full_participation(budget):
    rng = np.random.default_rng(1)
    masks = chains(rng, 4000, 4, np.array([0.9, 0.0, 0.5, -0.2]))
    updates = rng.normal(size=(4, 3))
    full = IMPORTANCE @ updates
    mean, error = mean_step(oracle("unbiased"), masks, updates, budget, rng)
    assert (np.abs(mean - full) < 4.5 * error).all()
    # The test has teeth: the biased ones do not pass it where no sampling hides the bias.
    for name in ("more-available", "adafed") if budget is None else ():
        mean, error = mean_step(oracle(name), masks, updates, budget, rng)
        assert (np.abs(mean - full) > 4.5 * error).any()


def test_estimated_availability_becomes_unbiased_in_the_long_run():
    rng = np.random.default_rng(2)
    masks = chains(rng, 1, 10_000, np.array([0.6, 0.0, 0.3, 0.1]))[0]
    policy, clients, state = fedpick.policies.get("unbiased"), table(), None
    total = np.zeros(4)
    for index, mask in enumerate(masks):
        context = RoundContext(index=index, budget=4, available=mask, clients=clients)
        selection, state = policy.select(state or policy.init(clients, rng), context, rng)
        total[selection.clients] += selection.weights if index >= 2_000 else 0.0
    np.testing.assert_allclose(total / 8_000, IMPORTANCE, rtol=0.05)


@pytest.mark.parametrize("name", ["unbiased", "more-available", "adafed"])
def test_a_budget_keeps_the_expected_weights(name):
    mask = [True, True, True, True]
    full, _ = select(oracle(name), table(), mask)
    expected = np.zeros(4)
    expected[full.clients] = full.weights
    weights = np.zeros((4000, 4))
    for seed in range(4000):
        some, _ = select(oracle(name), table(), mask, budget=2, seed=seed)
        weights[seed, some.clients] = some.weights
    assert (np.abs(weights.mean(axis=0) - expected) < 4.5 * weights.std(axis=0) / np.sqrt(4000) + 1e-12).all()


@pytest.mark.parametrize("name", NAMES)
def test_an_oracle_must_be_there_and_may_not_contradict_the_mask(name):
    assert oracle(name).needs == {Signal.AVAILABILITY}
    assert fedpick.policies.get(name).needs == frozenset()
    with pytest.raises(MissingSignal, match=r"Clients\.availability"):
        Session(oracle(name), Clients(num_examples=np.ones(2)))
    never = Clients(num_examples=np.ones(2), availability=np.array([0.0, 0.7]))
    absent, _ = select(oracle(name), never, [False, True])
    np.testing.assert_array_equal(absent.clients, [1])
    if name != "more-available":  # which does not look at clients below one half
        with pytest.raises(InvalidInput, match="client 0 is never available, but it is available in round 0"):
            select(oracle(name), never, [True, True])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [{"estimates": "true"}, {"prior": -0.5}, {"prior": float("inf")}])
def test_wrong_hyper_parameters_are_refused(name, wrong):
    with pytest.raises(InvalidInput, match=f"'{next(iter(wrong))}' parameter"):
        fedpick.policies.get(name, **wrong)


def test_adafed_refuses_an_unknown_normalisation():
    with pytest.raises(InvalidInput, match="'normalize_over' parameter of AdaFed"):
        fedpick.policies.get("adafed", normalize_over="all")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check", QUICK_CHECKS)
def test_conformance_with_an_oracle(name, check):
    check(oracle(name))


def test_an_estimate_of_exactly_one_half_is_more_available():
    # Masks 1, 0, 1: P(on | off) = (1 + 1) / (1 + 2) and P(on | on) = (0 + 1) / (1 + 2), so pi = (2/3) / (2/3 + 2/3).
    on, off = Fraction(1, 3), Fraction(2, 3)
    assert off / (off + 1 - on) == Fraction(1, 2)
    policy, clients = fedpick.policies.get("more-available", estimates="bayes-chain"), table()
    state = None
    for index, available in enumerate((1, 0, 1)):
        selection, state = select(policy, clients, [available] * 4, state=state, index=index)
    np.testing.assert_array_equal(selection.clients, [0, 1, 2, 3])
    assert selection.diagnostics["excluded"] == 0
