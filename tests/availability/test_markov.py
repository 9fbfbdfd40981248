"""The chains against exact laws: over many identical clients a single round is a binomial experiment.

Each binomial test fails a correct implementation at fewer than one seed in a million (Bonferroni over its cells).
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedpick import availability
from fedpick.availability.markov import smallest_correlation
from fedpick.availability.statistics import estimation_error_curve, measure_trace
from fedpick.core.errors import InvalidInput
from fedpick.core.rng import Purpose, stream
from fedpick.core.types import Clients

FALSE_ALARM = 1e-6


def crowd(count):
    return Clients(num_examples=np.ones(count))


def surprise(successes, trials, rate):
    return 2 * min(stats.binom.cdf(successes, trials, rate), stats.binom.sf(successes - 1, trials, rate))


@pytest.mark.parametrize(("pi", "lam"), [(0.9, 0.9), (0.1, 0.9), (0.1, 0.0), (0.5, -1.0), (0.7, -0.3), (0.3, 0.5)])
def test_stationary_law_and_transitions_are_exact(pi, lam):
    count = 40_000
    process = availability.get("markov", availability=pi, correlation=lam)
    trace = process.start(crowd(count), seed=6)
    stay, appear = lam + (1 - lam) * pi, (1 - lam) * pi
    worst = 1.0
    previous = None
    for t in (0, 1, 2, 40, 41):
        mask = trace.mask(t)
        worst = min(worst, surprise(mask.sum(), count, pi))
        if previous is not None and t != 40:
            # Given the round before, these counts are exactly binomial.
            worst = min(worst, surprise((previous & mask).sum(), previous.sum(), stay))
            worst = min(worst, surprise((~previous & mask).sum(), (~previous).sum(), appear))
        previous = mask
    assert worst > FALSE_ALARM / 11


def test_long_run_frequency_and_lag_one_correlation_match():
    pi, lam = 0.3, 0.8
    clients, rounds = crowd(200), 4000
    trace = availability.get("markov", availability=pi, correlation=lam).start(clients, seed=7)
    measured = measure_trace(trace, rounds, max_lag=5)
    # Standard errors: frequency sqrt(pi (1-pi) (1+lam) / ((1-lam) N T)) = 0.0015; correlation about
    # sqrt((1-lam^2) / (N T)) = 0.0007 plus the bias of estimated means, -(1+lam)/((1-lam) T) (1-lam) = -0.0005.
    assert abs(measured.rates.mean() - pi) < 5 * 0.0015
    np.testing.assert_allclose(measured.autocorrelation, lam ** np.arange(6), atol=0.02)
    assert abs(measured.autocorrelation[1] - lam) < 5 * 0.0007 + 0.0005


def test_walking_back_equals_stepping_forward_number_for_number():
    rng = np.random.default_rng(2)
    pi = rng.uniform(0.05, 0.95, 80)
    lam = rng.uniform(smallest_correlation(pi), 1)
    trace = availability.get("markov", availability=pi, correlation=lam).start(crowd(80), seed=13)
    stay, appear = lam + (1 - lam) * pi, (1 - lam) * pi
    state = None
    for t in range(300):
        draws = stream(13, t + 1, Purpose.AVAILABILITY).random(80)
        state = draws < pi if state is None else draws < np.where(state, stay, appear)
        if t % 37 == 0:
            fresh = availability.get("markov", availability=pi, correlation=lam).start(crowd(80), seed=13)
            np.testing.assert_array_equal(fresh.mask(t), state)
    np.testing.assert_array_equal(trace.mask(299), state)


def test_infeasible_chains_are_refused():
    with pytest.raises(InvalidInput, match=r"at least -0\.1111"):
        availability.get("markov", availability=0.9, correlation=-0.2).start(crowd(4), seed=0)
    with pytest.raises(InvalidInput, match="3 values, but there are 4 clients"):
        availability.get("markov", availability=[0.1, 0.2, 0.3]).start(crowd(4), seed=0)


def test_frozen_chains_never_change_or_always_do():
    trace = availability.get("markov", correlation=[1.0, -1.0] * 20).start(crowd(40), seed=1)
    first = trace.mask(0)
    for t in (1, 2, 1001):
        mask = trace.mask(t)
        np.testing.assert_array_equal(mask[::2], first[::2])
        np.testing.assert_array_equal(mask[1::2], first[1::2] ^ (t % 2 == 1))


def test_the_papers_population_has_four_equal_classes():
    trace = availability.get("correlated-population").start(crowd(100), seed=0)
    more, strong = trace.availability == 0.9, trace.correlation == 0.9
    assert [(more & strong).sum(), (more & ~strong).sum(), (~more & strong).sum(), (~more & ~strong).sum()] == [25] * 4
    np.testing.assert_allclose(trace.availability[~more], 0.1)
    weak = availability.get("correlated-population").start(crowd(40_000), seed=0)
    noise = weak.correlation[weak.correlation != 0.9]
    assert stats.kstest(noise / 0.01, "norm").pvalue > FALSE_ALARM
    # Dealt out at random: the first half of the table is not one class.
    assert 10 < more[:50].sum() < 40


def test_the_authors_population_has_three_classes():
    trace = availability.get("correlated-population", variant="authors").start(crowd(24), seed=0)
    more, strong = np.isclose(trace.availability, 0.9), trace.correlation == 0.9
    assert [(more & strong).sum(), more.sum(), (~more & strong).sum(), (~more & ~strong).sum()] == [0, 12, 6, 6]
    big = availability.get("correlated-population", variant="authors", split="random").start(crowd(40_000), seed=0)
    strong = big.correlation == 0.9
    assert surprise(strong.sum(), 40_000, 0.25) > FALSE_ALARM
    assert strong.sum() != 10_000
    assert stats.kstest((big.correlation[~strong] - 0.005) / 0.005, "norm").pvalue > FALSE_ALARM


def test_population_in_blocks_is_in_order():
    trace = availability.get("correlated-population", order="blocks").start(crowd(8), seed=0)
    np.testing.assert_allclose(trace.availability, [0.9] * 4 + [0.1] * 4)
    assert list(trace.correlation == 0.9) == [True, True, False, False] * 2


def test_clusters_switch_together_and_independently_of_each_other():
    trace = availability.get("clustered").start(crowd(100), seed=3)
    np.testing.assert_allclose(trace.availability, np.repeat([0.9] * 5 + [0.1] * 5, 10))
    np.testing.assert_allclose(trace.correlation, np.repeat([0, 0, 0, 0, 0, 0.5, 0.6, 0.7, 0.8, 0.9], 10))
    masks = np.array([trace.mask(t) for t in range(3000)])
    by_cluster = masks.reshape(3000, 10, 10)
    assert (by_cluster == by_cluster[:, :, :1]).all()
    between = np.corrcoef(by_cluster[:, :, 0].T)[np.triu_indices(10, 1)]
    # Of independent chains the correlation has a standard error of at most
    # sqrt((1 + 0.9 * 0.8) / (1 - 0.9 * 0.8) / 3000) = 0.045; there are 45 pairs.
    assert np.abs(between).max() < 5 * 0.045
    spread = availability.get("clustered", num_clusters=4, assignment="round-robin").start(crowd(10), seed=3)
    assert list(spread.cluster) == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    with pytest.raises(InvalidInput, match="only 4 clients"):
        availability.get("clustered").start(crowd(4), seed=0)


def test_estimation_errors_shrink_as_in_figure_4a():
    curve = estimation_error_curve(
        availability.get("correlated-population"), crowd(100), observations=(10, 100, 1000, 3000), seeds=(0, 1)
    )
    for errors in (curve.availability, curve.stationary, curve.correlation):
        assert errors.shape == (2, 4)
        assert (np.diff(errors.mean(axis=0)) < 0).all()
    # The paper: "the estimation error for lambda_k is larger than that for pi_k".
    assert (curve.correlation > curve.availability).all()
    # Errors of averages fall like one over the root of the number of observations: a factor of about 3.2 per decade.
    assert curve.correlation[:, 1].mean() / curve.correlation[:, 2].mean() > 2


def test_who_never_changes_has_no_correlation():
    trace = availability.get("markov", availability=1.0, correlation=0.9).start(Clients(num_examples=np.ones(3)), 0)
    assert trace.mask(5).all()
    np.testing.assert_array_equal(trace.correlation, 0.0)
