"""refl: cohorts against the definition on random masks, and the known faults of public code."""

from __future__ import annotations

import numpy as np
import pytest

from fedpick import Clients, Outcome, Session, policies
from fedpick.core.errors import InvalidInput
from fedpick.policies.refl import reference


def table(count, **columns):
    return Clients(num_examples=np.ones(count), **columns)


def play(session, masks, budget, alive=None):
    """Ask and tell a round per mask; return the cohorts."""
    cohorts = []
    for mask in masks:
        selection = session.ask(available=np.asarray(mask, dtype=bool), budget=budget)
        completed = np.ones(len(selection.clients), bool) if alive is None else alive[selection.clients]
        session.tell(Outcome(index=session.round, clients=selection.clients, completed=completed))
        cohorts.append(selection.clients.tolist())
    return cohorts


def ranks(masks, last, prior, rest):
    """The rank of every available client in the definition; equal for ties, which it breaks by index."""
    order = reference(masks, last, prior, rest, len(last))
    mirrored = [len(last) - 1 - k for k in reference(masks[:, ::-1], last[::-1], prior, rest, len(last))]
    # With the clients mirrored, a group of ties takes the same places in reverse order: the sum of both is its name.
    return {k: order.index(k) + mirrored.index(k) for k in order}


def test_cohorts_equal_the_definition():
    rng = np.random.default_rng(0)
    compared = 0
    for seed in range(60):
        count, budget, rest = int(rng.integers(1, 12)), int(rng.integers(1, 5)), int(rng.integers(0, 6))
        prior = float(rng.choice([0.5, 1.0, 3.0]))
        masks = rng.random((12, count)) < rng.uniform(0.3, 1, count)
        session = Session(policies.get("refl", rest=rest, prior=prior), table(count), seed=seed)
        last = [0] * count
        for t in range(1, 13):
            rank = ranks(masks[:t], last, prior, rest)
            (chosen,) = play(session, masks[t - 1 : t], budget)
            expected = reference(masks[:t], last, prior, rest, budget)
            assert sorted(rank[k] for k in chosen) == sorted(rank[k] for k in expected)
            compared += 1
            for k in chosen:
                last[k] = t
    assert compared > 500


def test_one_case_by_hand():
    """Client 0 always stays (3 of 3), client 1 stays once of twice, client 2 never: mean 4/6, prior 1."""
    masks = [[1, 1, 1], [1, 1, 0], [1, 0, 1], [1, 1, 0]]
    session = Session(policies.get("refl", rest=0), table(3), seed=0)
    play(session, masks, 1)
    selection = session.ask(available=np.array([True, True, True]), budget=2)
    # The transitions so far: 3 of 3; 1 of 2, then one from the fourth round to this one; 0 of 2.
    forecast = session.policy._forecast(session._pending[1], np.arange(3))
    mean = (4 + 2 + 0) / (4 + 3 + 2)
    assert forecast == pytest.approx([(4 + 2 * mean) / 6, (2 + 2 * mean) / 5, (0 + 2 * mean) / 4])
    assert selection.clients.tolist() == [2, 1]
    assert selection.weights.tolist() == [0.5, 0.5]


def test_clients_that_leave_soon_are_preferred_and_nothing_but_past_masks_is_read():
    """The authors' code reads the true trace. Here a false oracle changes nothing."""
    rng = np.random.default_rng(1)
    stay, masks = np.where(np.arange(20) < 10, 0.2, 0.95), [np.ones(20, dtype=bool)]
    for _ in range(300):
        masks.append(np.where(masks[-1], rng.random(20) < stay, rng.random(20) < 0.5))
    told = play(Session(policies.get("refl"), table(20), seed=0), masks, 2)
    oracle = table(20, availability=rng.random(20), correlation=rng.random(20))
    assert told == play(Session(policies.get("refl"), oracle, seed=0), masks, 2)
    share = np.mean([k < 10 for cohort in told[50:] for k in cohort])
    present = np.mean([mask[:10].sum() / mask.sum() for mask in masks[50:]])
    assert share > present + 0.2
    # The future is not read either: the same past gives the same choice.
    assert told[:100] == play(Session(policies.get("refl"), table(20), seed=0), masks[:100], 2)


def test_a_selected_client_rests_and_the_longest_rested_fill_up():
    session = Session(policies.get("refl", rest=2), table(6), seed=3)
    cohorts = play(session, np.ones((9, 6)), 2)
    for first, second, third in zip(cohorts, cohorts[1:], cohorts[2:], strict=False):
        assert len({*first, *second, *third}) == 6
    session = Session(policies.get("refl", rest=5), table(3), seed=3)
    cohorts = play(session, np.ones((9, 3)), 1)
    assert cohorts[:3] * 3 == cohorts


def test_every_place_is_filled():
    """The authors' code leaves one place empty if its list of preferred clients has no more than m entries."""
    assert len(play(Session(policies.get("refl"), table(5)), [[1, 1, 1, 0, 0]], 3)[0]) == 3
    masks = [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]  # two clients leave, and two places
    assert [len(cohort) for cohort in play(Session(policies.get("refl", rest=0), table(5)), masks, 2)] == [2, 2, 2]


def test_a_client_that_never_answers_rests_too():
    alive = np.arange(10) != 0
    cohorts = play(Session(policies.get("refl"), table(10), seed=0), np.ones((100, 10)), 2, alive)
    assert sum(0 in cohort for cohort in cohorts) <= 34  # an equal share is 20


def test_newcomers_count_as_average_clients():
    rng = np.random.default_rng(0)
    session = Session(policies.get("refl", rest=0), table(20), seed=0)
    play(session, rng.random((100, 20)) < 0.9, 2)
    session.grow(table(40))
    places = np.concatenate(play(session, rng.random((10, 40)) < 0.9, 2)).astype(int)
    assert np.mean(places >= 20) < 0.8  # a fixed prior of 1/2 would give them all places
    assert session.state.from_available[20:].max() <= 9


def test_needs_and_refusals():
    assert policies.get("refl").needs == frozenset()
    for options in ({"rest": -1}, {"rest": 1.5}, {"prior": 0.0}):
        with pytest.raises(InvalidInput, match=next(iter(options))):
            policies.get("refl", **options)
