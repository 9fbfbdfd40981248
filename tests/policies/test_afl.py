from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpick import Clients, Outcome, Session, Signal, policies
from fedpick.core.errors import InvalidInput
from fedpick.core.rng import Purpose, stream
from fedpick.core.types import RoundContext
from fedpick.policies.afl import inclusion_reference
from tests.policies import QUICK_CHECKS


def table(sizes):
    return Clients(num_examples=np.asarray(sizes, dtype=float))


def never(probe):
    raise AssertionError("afl must not ask here")


def seen_by_all(policy, clients, losses):
    """The state after everybody has trained once and reported these losses."""
    everybody = np.arange(len(clients))
    state = policy.init(clients, stream(0, 0, Purpose.INIT))
    outcome = Outcome(index=0, clients=everybody, completed=np.ones(len(clients), dtype=bool), loss=losses)
    return policy.observe(state, outcome)


def choose(policy, state, clients, budget, seed, available=None):
    mask = np.ones(len(clients), dtype=bool) if available is None else available
    context = RoundContext(index=1, budget=budget, available=mask, clients=clients)
    return policy.select(state, context, stream(seed, 1, Purpose.SELECT))[0]


def assert_frequencies(policy, state, clients, budget, expected, trials):
    """How often each client is chosen is within 5 standard deviations of the expected probability."""
    counts = np.zeros(len(clients))
    for seed in range(trials):
        counts[choose(policy, state, clients, budget, seed).clients] += 1
    deviation = np.sqrt(expected * (1 - expected) / trials)
    assert (np.abs(counts / trials - expected) <= 5 * deviation + 1e-12).all()


def test_the_value_is_the_loss_times_the_root_of_the_size():
    clients = table([100, 1, 4, 25, 9, 16, 36, 1])
    losses = np.array([1.0, 9.0, 4.0, 1.0, 1.0, 1.0, 1.5, 1.0])  # values 10, 9, 8, 5, 3, 4, 9, 1
    policy = policies.get("afl", alpha3=0.0, alpha1=0.5)
    state = seen_by_all(policy, clients, losses)
    chosen = choose(policy, state, clients, 4, seed=0)
    assert set(chosen.clients) == {0, 1, 2, 6}
    assert chosen.diagnostics == {"by_value": 4, "known": 8}
    np.testing.assert_allclose(chosen.weights, 0.25)


def test_the_supplements_value_is_the_loss_alone():
    clients = table([100, 1, 4, 25])
    policy = policies.get("afl", alpha3=0.0, alpha1=0.5, value="loss")
    state = seen_by_all(policy, clients, np.array([1.0, 9.0, 4.0, 1.0]))
    assert set(choose(policy, state, clients, 2, seed=0).clients) == {1, 2}


def test_places_by_value_follow_the_softmax_of_those_kept():
    clients = table(np.ones(6))
    losses = np.array([1.0, 2.0, 0.5, 3.0, 0.1, 0.2])
    policy = policies.get("afl", alpha1=0.34, alpha2=1.0, alpha3=0.0)  # leaves out floor(2.04) = 2 clients: 4 and 5
    state = seen_by_all(policy, clients, losses)
    weights = np.where(losses > 0.2, np.exp(losses), 0.0)
    first = weights / weights.sum()
    # Two draws without replacement: i first, or i after j.
    expected = first + np.array(
        [sum(first[j] * first[i] / (1 - first[j]) for j in range(6) if j != i) for i in range(6)]
    )
    np.testing.assert_allclose(inclusion_reference(losses, 2, alpha1=0.34, alpha2=1.0, alpha3=0.0), expected)
    assert_frequencies(policy, state, clients, 2, expected, trials=5000)


@pytest.mark.parametrize(("budget", "alpha1", "alpha3"), [(3, 0.25, 0.3), (4, 0.0, 0.5), (3, 0.5, 1.0), (2, 0.6, 0.1)])
def test_cohorts_follow_the_reference(budget, alpha1, alpha3):
    clients, losses = table([1, 4, 9, 1, 4, 25, 1]), np.array([2.1, 1.0, 0.5, 0.1, 0.65, 0.32, 1.4])
    options = {"alpha1": alpha1, "alpha2": 0.8, "alpha3": alpha3}
    policy = policies.get("afl", **options)
    state = seen_by_all(policy, clients, losses)
    expected = inclusion_reference(losses * np.sqrt(clients.num_examples), budget, **options)
    assert expected.sum() == pytest.approx(budget)
    assert_frequencies(policy, state, clients, budget, expected, trials=2000)


@pytest.mark.parametrize(
    ("budget", "alpha3", "by_value"),
    [
        (5, 0.1, 4),
        (3, 0.1, 2),
        (10, 0.1, 9),
        (30, 0.1, 27),
        (50, 0.14, 43),
        (1, 0.1, 0),
        (1, 0.0, 1),
        (10, 0.9, 1),
        (4, 1.0, 0),
    ],
)
def test_share_of_the_places_by_value(budget, alpha3, by_value):
    clients = table(np.ones(200))
    policy = policies.get("afl", alpha3=alpha3)
    state = seen_by_all(policy, clients, np.arange(200.0))
    selection = choose(policy, state, clients, budget, seed=0)
    assert selection.diagnostics["by_value"] == by_value
    assert len(selection.clients) == budget
    assert (selection.clients[:by_value] >= 150).all()  # the best quarter


def test_the_share_left_out_is_counted_among_the_available():
    clients = table(np.ones(12))
    policy = policies.get("afl", alpha1=0.75, alpha3=0.0)
    state = seen_by_all(policy, clients, np.arange(12.0))
    available = np.arange(12) < 8
    for seed in range(20):
        assert set(choose(policy, state, clients, 2, seed, available).clients) == {6, 7}


def test_leaving_out_everybody_is_uniform_sampling():
    clients = table(np.ones(6))
    policy = policies.get("afl", alpha1=1.0)
    state = seen_by_all(policy, clients, np.arange(6.0))
    counts = np.zeros(6)
    for seed in range(3000):
        counts[choose(policy, state, clients, 2, seed).clients] += 1
    assert (np.abs(counts / 3000 - 1 / 3) <= 5 * np.sqrt(2 / 9 / 3000)).all()


def test_explore_sends_no_probe_and_unseen_clients_take_uniform_places_only():
    """A public version gives clients without a value a share of the softmax."""
    session = Session(policies.get("afl"), table(np.ones(60)), seed=4)
    assert session.policy.needs == {Signal.OUTCOME_LOSS}
    for index in range(40):
        known = session.state.known
        selection = session.ask(budget=5, measure=never)
        if index:
            assert selection.diagnostics["by_value"] == 4
            assert known[selection.clients[:4]].all()
        outcome = Outcome(
            index=index, clients=selection.clients, completed=np.ones(5, dtype=bool), loss=np.linspace(1, 2, 5)
        )
        session.tell(outcome)
    assert session.state.known.sum() > 25


def test_probe_asks_everybody_once_in_the_first_round_they_are_there():
    session = Session(policies.get("afl", unseen="probe"), table(np.ones(8)), seed=0)
    assert session.policy.needs == {Signal.OUTCOME_LOSS, Signal.LOSS}
    asked = []

    def measure(probe):
        asked.append(probe.clients.tolist())
        return np.where(probe.clients == 2, np.nan, 1.0 + probe.clients)

    masks = [np.arange(8) < 4, np.arange(8) < 6, np.ones(8, dtype=bool), np.ones(8, dtype=bool)]
    for index, mask in enumerate(masks):
        selection = session.ask(available=mask, budget=2, measure=measure)
        session.tell(Outcome(index=index, clients=selection.clients, completed=np.zeros(2, dtype=bool)))
    assert asked == [[0, 1, 2, 3], [4, 5], [6, 7]]
    session.grow(table(np.ones(10)))
    session.ask(budget=2, measure=measure)
    assert asked[-1] == [8, 9]


def test_a_repeated_ask_asks_again_because_only_tell_commits():
    session = Session(policies.get("afl", unseen="probe"), table(np.ones(4)))
    asked = []

    def measure(probe):
        asked.append(len(probe.clients))
        return np.ones(len(probe.clients))

    session.ask(budget=2, measure=measure)
    session.ask(budget=2, measure=measure)
    assert asked == [4, 4]


def test_who_does_not_complete_loses_its_value():
    clients = table(np.ones(4))
    policy = policies.get("afl", alpha1=0.0, alpha3=0.0, alpha2=1e3)
    state = seen_by_all(policy, clients, np.array([1.0, 2.0, 3.0, 40.0]))
    assert choose(policy, state, clients, 1, 0).clients.tolist() == [3]
    failed = Outcome(index=1, clients=[3], completed=np.array([False]), loss=np.array([40.0]))
    state = policy.observe(state, failed)
    assert choose(policy, state, clients, 1, 0).clients.tolist() == [2]
    unusable = Outcome(index=2, clients=[2], completed=np.array([True]), loss=np.array([np.nan]))
    state = policy.observe(state, unusable)
    assert choose(policy, state, clients, 1, 0).clients.tolist() == [1]
    assert np.isfinite(state.loss).all()


def test_the_training_loss_can_refresh_the_value_instead():
    policy = policies.get("afl", value="loss", report="train-loss", alpha3=0.0, alpha1=0.5)
    assert policy.needs == {Signal.TRAIN_LOSS}
    clients = table(np.ones(4))
    state = policy.init(clients, stream(0, 0, Purpose.INIT))
    outcome = Outcome(
        index=0,
        clients=np.arange(4),
        completed=np.ones(4, dtype=bool),
        loss=[4.0, 3.0, 2.0, 1.0],
        train_loss=[1.0, 2.0, 3.0, 4.0],
    )
    assert set(choose(policy, policy.observe(state, outcome), clients, 2, 0).clients) == {2, 3}


@given(
    losses=st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=20),
    alpha1=st.floats(0, 1),
    alpha2=st.floats(0, 1e6),
    alpha3=st.floats(0, 1),
    budget=st.integers(0, 25),
)
@settings(max_examples=150, deadline=None)
def test_extreme_values_never_overflow_and_the_cohort_is_always_full(losses, alpha1, alpha2, alpha3, budget):
    clients = table(np.full(len(losses), 1e6))
    policy = policies.get("afl", alpha1=alpha1, alpha2=alpha2, alpha3=alpha3)
    state = seen_by_all(policy, clients, np.array(losses))
    selection = choose(policy, state, clients, budget, seed=0)
    assert len(selection.clients) == min(budget, len(losses))
    assert selection.weights.sum() == pytest.approx(1.0 if budget else 0.0)


@pytest.mark.parametrize("options", [{"unseen": "probe"}, {"value": "loss", "report": "train-loss"}])
def test_contract(options):
    for check in QUICK_CHECKS:
        check(policies.get("afl", **options))


@pytest.mark.parametrize(
    "options",
    [
        {"alpha1": 1.5},
        {"alpha2": -1.0},
        {"alpha2": float("inf")},
        {"alpha3": float("nan")},
        {"value": "sqrt"},
        {"unseen": "ask"},
        {"report": "accuracy"},
    ],
)
def test_refuses_bad_hyper_parameters(options):
    with pytest.raises(InvalidInput, match=next(iter(options))):
        policies.get("afl", **options)
