from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedpick.availability import (
    AvailabilityCounts,
    estimate_availability,
    estimate_correlation,
    estimate_stationary_availability,
    estimate_transitions,
    no_counts,
    update_counts,
)
from fedpick.core.arrays import FloatArray
from fedpick.core.errors import InvalidInput
from fedpick.core.state import carry_over, join, per_client, split


def seen(masks, known=None):
    counts = AvailabilityCounts(**no_counts(len(masks[0])))
    for row, mask in enumerate(masks):
        counts = update_counts(counts, np.array(mask, dtype=bool), None if known is None else np.array(known[row]))
    return counts


def test_posteriors_by_hand():
    # One client: on on off off on off on. 4 of 7 on; from on: 1 of 3 stays on; from off: 2 of 3 turn on.
    counts = seen([[1], [1], [0], [0], [1], [0], [1]])
    assert estimate_availability(counts, prior=1.0)[0] == pytest.approx(5 / 9)
    assert estimate_availability(counts, prior=0.0)[0] == pytest.approx(4 / 7)
    stay, appear = estimate_transitions(counts, prior=1.0)
    assert (stay[0], appear[0]) == (pytest.approx(2 / 5), pytest.approx(3 / 5))
    assert estimate_correlation(counts, prior=1.0)[0] == pytest.approx(-1 / 5)
    assert estimate_correlation(counts, prior=0.0)[0] == pytest.approx(1 / 3 - 2 / 3)
    # The chain with these rows is on with probability (3/5) / (3/5 + 3/5).
    assert estimate_stationary_availability(counts, prior=1.0)[0] == pytest.approx(1 / 2)


def test_lambda_is_the_second_eigenvalue_of_the_estimated_chain():
    counts = seen(np.random.default_rng(0).random((50, 6)) < 0.4)
    stay, appear = estimate_transitions(counts)
    for client, correlation in enumerate(estimate_correlation(counts)):
        chain = np.array([[stay[client], 1 - stay[client]], [appear[client], 1 - appear[client]]])
        assert np.sort(np.linalg.eigvals(chain)) == pytest.approx(np.sort([1.0, correlation]))


def test_nothing_known_is_an_even_chance_without_correlation():
    counts = AvailabilityCounts(**no_counts(3))
    for prior in (0.0, 1.0, 7.0):
        assert (estimate_availability(counts, prior) == 0.5).all()
        assert (estimate_correlation(counts, prior) == 0).all()
        assert (estimate_stationary_availability(counts, prior) == 0.5).all()


def test_a_huge_prior_is_an_even_chance():
    counts = seen([[1], [1], [0]])
    assert estimate_availability(counts, 1e308)[0] == 0.5
    assert estimate_stationary_availability(counts, 1e308)[0] == 0.5


def test_a_client_that_never_changed_has_an_estimate_without_prior():
    counts = seen([[1, 0]] * 5)
    np.testing.assert_array_equal(estimate_availability(counts, prior=0.0), [1, 0])
    np.testing.assert_array_equal(estimate_stationary_availability(counts, prior=0.0), [1 / 1, 0])


def test_rounds_not_observed_break_the_chain_and_count_for_nothing():
    # on, unknown, on: two observations, no transition.
    counts = seen([[1], [0], [1]], known=[[True], [False], [True]])
    assert counts.rounds_seen[0] == counts.rounds_available[0] == 2
    assert counts.from_available[0] == counts.from_unavailable[0] == 0
    counts = update_counts(counts, np.array([False]))
    assert (counts.from_available[0], counts.stayed_available[0]) == (1, 0)


@dataclass(frozen=True, kw_only=True)
class State(AvailabilityCounts):
    losses: FloatArray = per_client()


def test_a_policys_own_state_carries_the_counts_through_updates_growth_and_files():
    state = State(**no_counts(2), losses=np.array([3.0, 4.0]))
    for mask in ([True, False], [True, True]):
        state = update_counts(state, np.array(mask))
    assert isinstance(state, State)
    grown = carry_over(state, State(**no_counts(3), losses=np.zeros(3)))
    grown = update_counts(grown, np.array([True, True, True]))
    # The newcomer is judged by its own age of one round: (1 + 1) / (1 + 2), with no transition yet.
    np.testing.assert_allclose(estimate_availability(grown), [4 / 5, 3 / 5, 2 / 3])
    assert grown.from_available[2] == grown.from_unavailable[2] == 0
    assert estimate_correlation(grown)[2] == 0
    again = join(State(**no_counts(3), losses=np.zeros(3)), *split(grown))
    np.testing.assert_array_equal(again.last_mask, grown.last_mask)


def test_arguments_are_checked_and_left_alone():
    counts = AvailabilityCounts(**no_counts(2))
    for array in vars(counts).values():
        array.flags.writeable = False
    mask = np.array([True, False])
    mask.flags.writeable = False
    update_counts(counts, mask, known=mask)
    with pytest.raises(InvalidInput, match="boolean mask"):
        update_counts(counts, np.array([0, 1]))
    with pytest.raises(InvalidInput, match="known"):
        update_counts(counts, mask, known=np.array([True]))
    with pytest.raises(InvalidInput, match="prior"):
        estimate_availability(counts, prior=-1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_counts_equal_counting_one_client_at_a_time(data):
    shape = data.draw(st.tuples(st.integers(1, 12), st.integers(1, 4)))
    masks = data.draw(hnp.arrays(bool, shape))
    known = data.draw(hnp.arrays(bool, shape))
    counts = seen(masks, known)
    for client in range(shape[1]):
        pairs = [
            (masks[t, client], masks[t + 1, client])
            for t in range(shape[0] - 1)
            if known[t, client] and known[t + 1, client]
        ]
        assert counts.rounds_seen[client] == known[:, client].sum()
        assert counts.rounds_available[client] == (masks & known)[:, client].sum()
        assert counts.from_available[client] == sum(first for first, _ in pairs)
        assert counts.stayed_available[client] == sum(first and second for first, second in pairs)
        assert counts.from_unavailable[client] == sum(not first for first, _ in pairs)
        assert counts.became_available[client] == sum(second and not first for first, second in pairs)
