from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from fedpick.core import sampling
from fedpick.core.sampling import cumulative, draw_with_replacement, sample_uniform, sample_weighted, top_k

WEIGHTS = np.array([5.0, 1.0, 3.0, 2.0, 0.5])


def subset_probabilities(weights: np.ndarray, eligible: list[int], count: int) -> dict[frozenset[int], float]:
    """The exact law of sequential sampling: sum over all orders in which a subset can be drawn."""
    law: dict[frozenset[int], float] = {}
    for order in permutations(eligible, count):
        probability, left = 1.0, sum(weights[i] for i in eligible)
        for client in order:
            probability *= weights[client] / left
            left -= weights[client]
        law[frozenset(order)] = law.get(frozenset(order), 0.0) + probability
    return law


def chi_square(draw, law, trials: int) -> float:
    seen = dict.fromkeys(law, 0)
    for trial in range(trials):
        seen[frozenset(draw(np.random.default_rng(trial)).tolist())] += 1
    observed = np.array([seen[subset] for subset in law])
    return float(stats.chisquare(observed, trials * np.array([law[subset] for subset in law])).pvalue)


# A correct sampler gives uniform p-values: with these fixed seeds each is one draw, refused if under one in a thousand.
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("draws_per_place", [0, 1, 4], ids=["race", "mixed", "rejection"])
def test_weighted_sampling_follows_the_exact_law_over_all_subsets_of_five(monkeypatch, count, draws_per_place):
    monkeypatch.setattr(sampling, "_DRAWS_PER_PLACE", draws_per_place)
    if draws_per_place < 4:  # without the spare draws, so that the race really has something left to do
        plain = sampling._reject
        monkeypatch.setattr(sampling, "_reject", lambda r, a, c, g: plain(r, a, c, g)[:draws_per_place])
    running, everyone = cumulative(WEIGHTS), np.ones(5, dtype=bool)
    law = subset_probabilities(WEIGHTS, list(range(5)), count)
    assert chi_square(lambda rng: sample_weighted(WEIGHTS, running, everyone, count, rng), law, 6000) > 1e-3


def test_weighted_sampling_among_the_available_only():
    running, available = cumulative(WEIGHTS), np.array([False, True, True, True, True])
    law = subset_probabilities(WEIGHTS, [1, 2, 3, 4], 2)
    assert chi_square(lambda rng: sample_weighted(WEIGHTS, running, available, 2, rng), law, 6000) > 1e-3


def test_clients_of_weight_zero_only_fill_up():
    weights = np.array([0.0, 1.0, 0.0, 1.0])
    running, everyone = cumulative(weights), np.ones(4, dtype=bool)
    for seed in range(50):
        drawn = sample_weighted(weights, running, everyone, 3, np.random.default_rng(seed))
        assert set(drawn[:2]) == {1, 3} and drawn[2] in (0, 2)


@settings(max_examples=150, deadline=None)
@given(
    weights=hnp.arrays(float, st.integers(1, 30), elements=st.sampled_from([0.0, 1e-12, 0.5, 1.0, 1e6])),
    count=st.integers(0, 40),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_weighted_sampling_never_leaves_the_available_and_never_repeats(weights, count, seed, data):
    available = data.draw(hnp.arrays(bool, len(weights)))
    drawn = sample_weighted(weights, cumulative(weights), available, count, np.random.default_rng(seed))
    assert len(set(drawn.tolist())) == len(drawn) == min(count, available.sum())
    assert available[drawn].all()


@settings(max_examples=150, deadline=None)
@given(
    values=hnp.arrays(float, st.integers(0, 30), elements=st.sampled_from([np.nan, -np.inf, 0.0, 1.0, 2.0, np.inf])),
    k=st.integers(0, 35),
    seed=st.integers(0, 2**31),
)
def test_top_k_is_a_sort_with_nan_last(values, k, seed):
    chosen = top_k(values, k, np.random.default_rng(seed))
    assert len(set(chosen.tolist())) == len(chosen) == min(k, len(values))

    def rank(value):  # NaN below everything
        return (not np.isnan(value), 0.0 if np.isnan(value) else value)

    expected = sorted((rank(value) for value in values), reverse=True)[: len(chosen)]
    assert [rank(value) for value in values[chosen]] == expected


def test_top_k_breaks_ties_evenly():
    values = np.array([1.0, 1.0, 1.0, 2.0])
    counts = np.zeros(4)
    for seed in range(3000):
        counts[top_k(values, 2, np.random.default_rng(seed))] += 1
    assert counts[3] == 3000
    assert stats.chisquare(counts[:3]).pvalue > 1e-3


def test_uniform_sampling_is_uniform_over_the_available():
    available = np.array([True, False, True, True, True])
    counts = np.zeros(5)
    for seed in range(4000):
        counts[sample_uniform(available, 2, np.random.default_rng(seed))] += 1
    assert counts[1] == 0
    assert stats.chisquare(counts[available]).pvalue > 1e-3


def test_draws_with_replacement_match_the_weights():
    clients, multiplicity = draw_with_replacement(WEIGHTS, np.ones(5, dtype=bool), 20_000, np.random.default_rng(0))
    assert clients.tolist() == [0, 1, 2, 3, 4]
    assert stats.chisquare(multiplicity, 20_000 * WEIGHTS / WEIGHTS.sum()).pvalue > 1e-3


def test_draws_with_replacement_without_weight_are_uniform():
    clients, multiplicity = draw_with_replacement(
        np.zeros(3), np.array([True, False, True]), 100, np.random.default_rng(0)
    )
    assert clients.tolist() == [0, 2] and multiplicity.sum() == 100
    assert len(draw_with_replacement(WEIGHTS, np.zeros(5, dtype=bool), 4, np.random.default_rng(0))[0]) == 0
