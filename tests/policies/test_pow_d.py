from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpick import Clients, Outcome, Session, Signal, aggregation_weights, policies
from fedpick.core.errors import InvalidInput, MissingSignal
from fedpick.core.rng import Purpose, stream
from fedpick.core.types import Measurement, RoundContext
from fedpick.policies.pow_d import inclusion_reference
from tests.policies import QUICK_CHECKS

ASKING = ["pow-d", "cpow-d", "adapow-d"]
FAMILY = [*ASKING, "rpow-d"]
SIZES = np.array([10.0, 20.0, 30.0, 5.0, 35.0])


def table(sizes=SIZES, **fields):
    return Clients(num_examples=np.asarray(sizes, dtype=float), **fields)


def context(clients, budget, *, index=0, available=None, answers=None):
    mask = np.ones(len(clients), dtype=bool) if available is None else np.asarray(available)
    measured = () if answers is None else (Measurement(clients=answers[0], values=answers[1]),)
    return RoundContext(index=index, budget=budget, available=mask, clients=clients, measurements=measured)


def play_round(policy, clients, losses, budget, *, seed=0, index=0, available=None, state=None):
    """One round through probe and select, answered exactly: (selection, probes)."""
    state = policy.init(clients, stream(seed, 0, Purpose.INIT)) if state is None else state
    probes = policy.probe(
        state, context(clients, budget, index=index, available=available), stream(seed, index, Purpose.PROBE)
    )
    answers = (probes[0].clients, losses[probes[0].clients]) if probes else None
    asked = context(clients, budget, index=index, available=available, answers=answers)
    selection, _ = policy.select(state, asked, stream(seed, index, Purpose.SELECT))
    return selection, probes


def frequencies(policy, clients, losses, budget, trials, available=None):
    counts = np.zeros(len(clients))
    for seed in range(trials):
        selection, _ = play_round(policy, clients, losses, budget, seed=seed, available=available)
        counts[selection.clients] += 1
    return counts / trials


def assert_matches(observed, expected, trials):
    """Within 5 standard deviations: a false alarm once in about two million clients compared."""
    deviation = np.sqrt(expected * (1 - expected) / trials)
    assert (np.abs(observed - expected) <= 5 * deviation + 1e-12).all(), (observed, expected)


# What the candidate set means


@pytest.mark.parametrize("name", FAMILY)
def test_with_as_many_candidates_as_places_it_is_weighted_sampling_without_replacement(name):
    policy = policies.get(name, num_candidates=2)
    losses = np.array([5.0, 1.0, 4.0, 2.0, 3.0])  # must not matter
    expected = inclusion_reference(SIZES, range(5), 2, 2, losses)
    assert expected.sum() == pytest.approx(2)
    observed = frequencies(policy, table(), losses, 2, 3000)
    assert_matches(observed, expected, 3000)


@pytest.mark.parametrize("name", ["pow-d", "cpow-d"])
def test_between_the_extremes_it_follows_the_three_steps(name):
    losses = np.array([2.0, 5.0, 1.0, 4.0, 3.0])
    expected = inclusion_reference(SIZES, range(5), 3, 1, losses)
    observed = frequencies(policies.get(name, num_candidates=3), table(), losses, 1, 3000)
    assert_matches(observed, expected, 3000)


def test_only_available_clients_are_candidates():
    available = np.array([True, False, True, True, False])
    losses = np.array([1.0, 9.0, 2.0, 3.0, 9.0])
    expected = inclusion_reference(SIZES, [0, 2, 3], 2, 1, losses)
    observed = frequencies(policies.get("pow-d", num_candidates=2), table(), losses, 1, 4000, available)
    assert_matches(observed, expected, 4000)
    assert observed[[1, 4]].sum() == 0


def test_candidates_are_drawn_by_importance_where_it_differs_from_the_sizes():
    clients = table(importance=[0.0, 0.0, 0.5, 0.5, 0.0])
    for seed in range(20):
        _, probes = play_round(policies.get("pow-d", num_candidates=2), clients, np.ones(5), 1, seed=seed)
        assert set(probes[0].clients) == {2, 3}


@pytest.mark.parametrize("name", ASKING)
@given(
    losses=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), budget=st.integers(1, 35), seed=st.integers(0, 99)
)
@settings(max_examples=60, deadline=None)
def test_with_everybody_a_candidate_it_is_the_exact_top(name, losses, budget, seed):
    losses = np.array(losses)
    clients = table(np.ones(len(losses)))
    selection, _ = play_round(policies.get(name, num_candidates="all"), clients, losses, budget, seed=seed)
    assert len(selection.clients) == min(budget, len(losses))
    chosen = np.sort(losses[selection.clients])
    np.testing.assert_array_equal(chosen, np.sort(losses)[-len(chosen) :])


@given(
    losses=st.lists(st.sampled_from([0.0, 1.0, 2.0, np.nan]), min_size=4, max_size=25),
    available=st.data(),
    budget=st.integers(1, 6),
    candidates=st.integers(1, 25),
    seed=st.integers(0, 99),
)
@settings(max_examples=200, deadline=None)
def test_no_candidate_left_out_beats_one_that_was_taken(losses, available, budget, candidates, seed):
    """Wrong indices into the candidates, and a partition from the wrong end, are known bugs of public versions."""
    losses = np.array(losses)
    mask = np.array(available.draw(st.lists(st.booleans(), min_size=len(losses), max_size=len(losses))))
    clients = table(np.arange(1.0, len(losses) + 1))
    policy = policies.get("pow-d", num_candidates=candidates)
    selection, probes = play_round(policy, clients, losses, budget, seed=seed, available=mask)
    assert len(selection.clients) == min(budget, mask.sum())
    assert len(set(selection.clients)) == len(selection.clients)
    assert mask[selection.clients].all()
    if not probes:
        assert min(max(candidates, budget), mask.sum()) <= budget
        return
    asked = probes[0].clients
    assert len(asked) == min(max(candidates, budget), mask.sum())
    assert set(selection.clients) <= set(asked)
    left_out = np.setdiff1d(asked, selection.clients)
    taken, left = losses[selection.clients], losses[left_out]
    if np.isnan(taken).any():
        assert np.isnan(left).all()  # silence only fills up
    elif len(left) and not np.isnan(left).all():
        assert taken.min() >= np.nanmax(left)


@pytest.mark.parametrize(("wanted", "expected"), [(None, 6), (4, 4), (1, 3), ("all", 8), (50, 8)])
def test_number_of_candidates(wanted, expected):
    clients = table(np.ones(10))
    available = np.arange(10) < 8
    _, probes = play_round(policies.get("pow-d", num_candidates=wanted), clients, np.ones(10), 3, available=available)
    asked = len(probes[0].clients) if probes else 3
    assert asked == expected


def test_five_clients_by_hand():
    clients, losses = table(), np.array([1.0, 5.0, 2.0, 4.0, 3.0])
    selection, _ = play_round(policies.get("pow-d", num_candidates="all"), clients, losses, 3)
    np.testing.assert_array_equal(selection.clients, [1, 3, 4])
    np.testing.assert_allclose(selection.weights, 1 / 3)
    assert selection.renormalize
    assert selection.diagnostics == {"candidates": 5, "candidate_loss": 3.0, "cohort_loss": 4.0}
    weights = aggregation_weights(selection, np.array([True, False, True]), clients)
    np.testing.assert_allclose(weights, [0.5, 0.0, 0.5])


def test_the_reference_by_hand():
    # Candidates 0 and 1 come as (0, 1): 1/4 * 1/3, or as (1, 0): 1/4 * 1/3; and so on with p = (1, 1, 2) / 4.
    # (0, 1) 1/12, (0, 2) 1/6, (1, 0) 1/12, (1, 2) 1/6, (2, 0) 1/4, (2, 1) 1/4. Losses fall from client 0 to client 2.
    inclusion = inclusion_reference(np.array([1.0, 1.0, 2.0]), range(3), 2, 1, np.array([3.0, 2.0, 1.0]))
    np.testing.assert_allclose(inclusion, [7 / 12, 5 / 12, 0.0])


# Silence, ties, questions


@pytest.mark.parametrize("name", ASKING)
def test_a_silent_client_is_never_chosen_while_enough_others_answer(name):
    losses = np.array([1.0, np.nan, 2.0, np.nan, 3.0])
    for seed in range(200):
        selection, _ = play_round(policies.get(name, num_candidates="all"), table(), losses, 3, seed=seed)
        assert set(selection.clients) == {0, 2, 4}
        assert selection.diagnostics["unanswered"] == 2


def test_if_nobody_answers_the_cohort_is_a_random_part_of_the_candidates():
    cohorts = set()
    for seed in range(100):
        policy = policies.get("pow-d", num_candidates=4)
        selection, probes = play_round(policy, table(), np.full(5, np.nan), 2, seed=seed)
        assert len(selection.clients) == 2
        assert set(selection.clients) <= set(probes[0].clients)
        cohorts.add(frozenset(selection.clients.tolist()))
    assert len(cohorts) == 10  # every pair comes up


def test_ties_are_broken_at_random():
    observed = frequencies(policies.get("pow-d", num_candidates="all"), table(np.ones(6)), np.ones(6), 2, 3000)
    assert_matches(observed, np.full(6, 1 / 3), 3000)


def test_cpow_d_asks_for_one_mini_batch_and_nothing_more():
    session = Session(policies.get("cpow-d", num_candidates=4, batch_size=16), table())
    probes = []

    def measure(probe):
        probes.append(probe)
        return np.ones(len(probe.clients))

    for index in range(5):
        selection = session.ask(budget=2, measure=measure)
        session.tell(Outcome(index=index, clients=selection.clients, completed=np.ones(2, dtype=bool)))
    assert len(probes) == 5
    for probe in probes:
        assert (probe.batch_size, probe.signal, probe.trial, len(probe.clients)) == (16, Signal.LOSS, None, 4)


def test_pow_d_asks_for_the_whole_local_data():
    _, probes = play_round(policies.get("pow-d"), table(), np.ones(5), 2)
    assert len(probes) == 1
    assert probes[0].batch_size is None


@pytest.mark.parametrize("name", ASKING)
def test_nobody_is_asked_where_no_answer_could_change_the_choice(name):
    available = np.array([True, False, True, False, True])
    for budget, mask, wanted in ((3, available, "all"), (5, None, 2), (2, None, 2), (0, None, "all")):
        policy = policies.get(name, num_candidates=wanted)
        selection, probes = play_round(policy, table(), np.ones(5), budget, available=mask)
        assert probes == ()
        assert len(selection.clients) == budget


def test_asking_policies_say_that_they_need_answers():
    for name in ASKING:
        assert policies.get(name).needs == {Signal.LOSS}
        with pytest.raises(MissingSignal, match="'loss'"):
            Session(policies.get(name), table(), provides=frozenset())


@pytest.mark.parametrize("name", FAMILY)
def test_the_supplement_draws_the_first_cohort_uniformly_and_asks_nobody(name):
    policy = policies.get(name, first_round="uniform", num_candidates=3)
    counts = np.zeros(5)
    for seed in range(3000):
        selection, probes = play_round(policy, table(), np.arange(5.0), 2, seed=seed)
        assert probes == ()
        counts[selection.clients] += 1
    assert_matches(counts / 3000, np.full(5, 0.4), 3000)
    if name != "rpow-d":
        assert play_round(policy, table(), np.arange(5.0), 2, index=1)[1]


# adapow-d


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"halve_every": 2}, [30, 30, 15, 15, 7, 7, 3, 3, 3]),
        ({"halve_every": 1, "num_candidates": 12}, [12, 6, 3, 3]),
        ({"drop_at": 2}, [30, 30, 3, 3]),
        ({"drop_at": 0}, [3, 3]),
        ({}, [30, 30]),
    ],
)
def test_adaptive_schedules(options, expected):
    policy = policies.get("adapow-d", **options)
    clients = table(np.ones(30))
    for index, count in enumerate(expected):
        _, probes = play_round(policy, clients, np.arange(30.0), 3, index=index)
        assert (len(probes[0].clients) if probes else 3) == count


def test_without_a_schedule_adapow_d_takes_the_papers():
    policy = policies.get("adapow-d")
    counts = [policy.candidates_in_round(index, 30, 3) for index in (4999, 5000, 10_000, 14_999, 15_000, 10**9)]
    assert counts == [30, 15, 7, 7, 3, 3]


# rpow-d


def told(session, losses, *, dead=(), silent=()):
    """Ask and tell one round of rpow-d, in which a client's training loss is the given one."""

    def never(probe):
        raise AssertionError("rpow-d must not ask")

    selection = session.ask(budget=2, measure=never)
    values = losses[selection.clients].astype(float)
    values[np.isin(selection.clients, silent)] = np.nan
    completed = ~np.isin(selection.clients, dead)
    session.tell(Outcome(index=session.round, clients=selection.clients, completed=completed, train_loss=values))
    return selection.clients


def test_rpow_d_tries_everybody_once_then_ranks_by_the_last_report():
    session = Session(policies.get("rpow-d", num_candidates="all"), table(np.ones(6)), seed=3)
    losses = np.array([1.0, 6.0, 2.0, 5.0, 3.0, 4.0])
    first = np.concatenate([told(session, losses) for _ in range(3)])
    assert sorted(first) == [0, 1, 2, 3, 4, 5]
    assert told(session, losses / 10).tolist() == [1, 3]  # these now report 0.6 and 0.5 ...
    assert told(session, losses).tolist() == [5, 4]  # ... so that 4 and 3 are the largest
    assert session.policy.needs == {Signal.TRAIN_LOSS}


def test_rpow_d_ranks_by_the_training_loss_and_not_by_the_loss_received():
    session = Session(policies.get("rpow-d", num_candidates="all"), table(np.ones(4)))
    chosen = session.ask(budget=4).clients
    completed = np.ones(4, dtype=bool)
    session.tell(Outcome(index=0, clients=chosen, completed=completed, loss=4.0 - chosen, train_loss=1.0 + chosen))
    assert session.ask(budget=2).clients.tolist() == [3, 2]


def test_rpow_d_keeps_infinity_and_nan_out_of_its_state():
    session = Session(policies.get("rpow-d"), table(np.ones(8)))
    for _ in range(10):
        told(session, np.arange(8.0), dead=(1, 2), silent=(3,))
        assert np.isfinite(session.state.loss).all()


def test_rpow_d_spends_the_infinite_value_on_the_first_attempt():
    session = Session(policies.get("rpow-d", num_candidates="all"), table(np.ones(6)), seed=1)
    losses = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    first = np.concatenate([told(session, losses, dead=(0, 5)) for _ in range(3)])
    assert sorted(first) == [0, 1, 2, 3, 4, 5]
    # Known: 2, 3, 4, 5 with median 3.5, which the two dead ones count as.
    assert told(session, losses).tolist() == [4, 3]


def test_rpow_d_a_client_that_dies_with_the_largest_loss_is_not_picked_for_ever():
    session = Session(policies.get("rpow-d", num_candidates="all"), table(np.ones(10)), seed=2)
    losses = np.full(10, 1.0)
    losses[7] = 100.0
    for _ in range(5):
        told(session, losses)
    picks = np.concatenate([told(session, losses * 0.99**index, dead=(7,)) for index in range(40)])
    assert 1 <= (picks == 7).sum() <= 8  # its share of 80 places


def test_rpow_d_large_losses_of_others_do_not_lift_a_dead_client():
    session = Session(policies.get("rpow-d", num_candidates="all"), table(np.ones(6)), seed=2)
    losses = np.array([1.0, 1.1, 1.2, 1.3, 1.4, 1000.0])  # the mean is above all but one
    for _ in range(3):
        told(session, losses, dead=(0,))
    for _ in range(20):
        assert 0 not in told(session, losses, dead=(0,))


def test_rpow_d_who_completed_without_a_usable_report_ranks_last():
    session = Session(policies.get("rpow-d", num_candidates="all"), table(np.ones(6)), seed=1)
    losses = np.arange(1.0, 7.0)
    for _ in range(3):
        told(session, losses, silent=(5,))
    for _ in range(20):
        assert 5 not in told(session, losses, silent=(5,))


def test_rpow_d_one_missing_report_keeps_the_latest_usable_one():
    session = Session(policies.get("rpow-d", num_candidates="all"), table(np.ones(4)))
    losses = np.arange(1.0, 5.0)
    for _ in range(2):
        told(session, losses)
    assert told(session, losses, silent=(3,)).tolist() == [3, 2]
    np.testing.assert_array_equal(session.state.loss, losses)
    assert told(session, losses).tolist() == [3, 2]


def test_rpow_d_a_failure_does_not_make_it_forget_the_latest_report():
    session = Session(policies.get("rpow-d", num_candidates="all"), table(np.ones(4)))
    losses = np.array([1.0, 2.0, 3.0, 4.0])
    for _ in range(2):
        told(session, losses)
    assert 3 in told(session, losses, dead=(3,))
    # It counts as the median, 2, until it completes again; then as the 4 that it reported before.
    for _ in range(200):
        if 3 in told(session, losses, silent=(3,)):
            break
    assert told(session, losses).tolist() == [3, 2]


def test_numpy_integers_are_whole_numbers():
    assert policies.get("pow-d", num_candidates=np.int64(5)).num_candidates == 5
    assert policies.get("fedgs", max_prototypes=np.int64(5)).max_prototypes == 5


def test_rpow_d_newcomers_are_tried_once_each():
    session = Session(policies.get("rpow-d", num_candidates="all"), table(np.ones(6)))
    losses = np.arange(10.0, 0.0, -1.0)
    for _ in range(5):
        told(session, losses)
    session.grow(table(np.ones(10)))
    newcomers = np.concatenate([told(session, losses) for _ in range(2)])
    assert sorted(newcomers) == [6, 7, 8, 9]
    assert told(session, losses).tolist() == [0, 1]


# The rest of the contract


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("pow-d", {"num_candidates": "all", "first_round": "uniform"}),
        ("cpow-d", {"num_candidates": 7}),
        ("rpow-d", {"num_candidates": "all"}),
        ("adapow-d", {"halve_every": 5}),
    ],
)
def test_contract(name, options):
    for check in QUICK_CHECKS:
        check(policies.get(name, **options))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pow-d", {"num_candidates": 0}, "num_candidates"),
        ("pow-d", {"num_candidates": 2.5}, "num_candidates"),
        ("pow-d", {"num_candidates": "everybody"}, "num_candidates"),
        ("rpow-d", {"num_candidates": True}, "num_candidates"),
        ("pow-d", {"first_round": "random"}, "first_round"),
        ("cpow-d", {"batch_size": 0}, "batch_size"),
        ("cpow-d", {"batch_size": None}, "batch_size"),
        ("adapow-d", {"halve_every": 0}, "halve_every"),
        ("adapow-d", {"drop_at": -1}, "drop_at"),
        ("adapow-d", {"halve_every": 5, "drop_at": 5}, "one schedule"),
    ],
)
def test_refuses_bad_hyper_parameters(name, options, message):
    with pytest.raises(InvalidInput, match=message):
        policies.get(name, **options)
