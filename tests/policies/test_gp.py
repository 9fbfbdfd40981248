"""The low-rank Gaussian against the reference forms: picks, likelihood, gradient, missing answers."""

from __future__ import annotations

import numpy as np
import pytest

from fedpick.policies import _gp


def problem(seed):
    rng = np.random.default_rng(seed)
    count, rank = int(rng.integers(5, 40)), int(rng.integers(2, 8))
    embedding = rng.normal(size=(rank, count)) * rng.choice([0.03, 0.3, 3.0])
    if rng.random() < 0.3:
        embedding[:, rng.random(count) < 0.1] = 0.0  # never measured
    importance = rng.dirichlet(np.ones(count))
    alpha = 0.95 ** rng.integers(0, 5, size=count) if rng.random() < 0.5 else np.ones(count)
    eligible = rng.random(count) < 0.6 if rng.random() < 0.5 else np.ones(count, dtype=bool)
    return rng, embedding, importance, alpha, eligible


@pytest.mark.parametrize("rule", _gp.NOISE_RULES)
def test_picks_equal_the_reference(rule):
    """1,000 random problems over the three rules, with masks, annealing and cohorts beyond the rank."""
    for seed in range({"none": 334, "observation": 333, "prior": 333}[rule]):
        rng, embedding, importance, alpha, eligible = problem(seed)
        rank, count = embedding.shape
        noise = 0.0 if rule == "none" else float(rng.choice([0.01, 0.1]))
        # Without noise the last direction is a tie between all clients: compare what the paper's rule decides.
        measured = int((embedding[:, eligible] != 0).any(axis=0).sum())
        size = int(rng.integers(1, min(rank, max(measured, 2)))) if rule == "none" else int(rng.integers(1, count))
        covariance = embedding.T @ embedding + (noise**2 * np.eye(count) if rule == "prior" else 0)
        if rule == "none":
            eligible = eligible & embedding.any(axis=0)  # 0 / 0 in the dense form
        picks, gains = _gp.select_greedy_reference(
            covariance,
            importance,
            alpha,
            size,
            candidates=np.flatnonzero(eligible),
            observation_noise=noise**2 if rule == "observation" else 0.0,
        )
        candidates = None if eligible.all() else np.flatnonzero(eligible)
        ours, our_gains = _gp.select_greedy(
            embedding, importance, alpha, size, noise=noise, rule=rule, candidates=candidates
        )
        np.testing.assert_array_equal(ours, picks, err_msg=f"seed {seed}")
        np.testing.assert_allclose(our_gains, gains, rtol=1e-5, atol=1e-9 * np.abs(gains).max(initial=0))


def test_without_noise_a_cohort_beyond_the_rank_is_well_defined():
    """All clients are picked, in the order of the reference on the covariance with the jitter."""
    for seed in range(100):
        _, embedding, importance, alpha, _ = problem(seed)
        count = embedding.shape[1]
        jitter = 1e-10 * (embedding**2).sum(axis=0).max()
        ours, gains = _gp.select_greedy(embedding, importance, alpha, count)
        assert sorted(ours) == list(range(count))
        assert np.isfinite(gains).all()
        picks, _ = _gp.select_greedy_reference(
            embedding.T @ embedding + jitter * np.eye(count), importance, alpha, count, candidates=np.arange(count)
        )
        np.testing.assert_array_equal(ours, picks, err_msg=f"seed {seed}")


def test_three_clients_by_hand():
    # Sigma = [[4, 2, 0], [2, 2, 1], [0, 1, 1]], p = (1/4, 1/2, 1/4):
    # a = (2, 7/4, 3/4), a / sqrt(b) = (1, 1.2374, 0.75): client 1 first.
    # Conditioned on it, Sigma_02 = 0 - 2 * 1 / 2 = -1, b = (2, 1/2), a = (2 / 4 - 1 / 4, -1 / 4 + 1 / 8).
    embedding = np.array([[2.0, 1.0, 0.0], [0.0, 1.0, 1.0]])
    importance = np.array([0.25, 0.5, 0.25])
    picks, gains = _gp.select_greedy(embedding, importance, np.ones(3), 3, rule="none")
    np.testing.assert_array_equal(picks[:2], [1, 0])
    np.testing.assert_allclose(gains[:2], [1.75 / np.sqrt(2), 0.25 / np.sqrt(2)], rtol=1e-6)
    picks, gains = _gp.select_greedy_reference(
        embedding.T @ embedding, importance, np.ones(3), 2, candidates=np.arange(3)
    )
    np.testing.assert_array_equal(picks, [1, 0])
    np.testing.assert_allclose(gains, [1.75 / np.sqrt(2), 0.25 / np.sqrt(2)])


def test_likelihood_of_one_client_by_hand():
    # x = 2, s = 1: Sigma = 5. Answers 5 and 0 with weights 1 and 1/2:
    # -1/2 (log(2 pi 5) + 25 / 5) - 1/4 log(2 pi 5), and d/dx = sum_j w_j x (z_j^2 / 25 - 1 / 5).
    samples, weights = np.array([[5.0], [0.0]]), np.array([1.0, 0.5])
    expected = -0.75 * np.log(10 * np.pi) - 2.5
    for form in (_gp.log_likelihood, _gp.log_likelihood_reference):
        value, gradient = form(np.array([[2.0]]), samples, weights, noise=1.0, mean=np.zeros(1))
        assert value == pytest.approx(expected)
        np.testing.assert_allclose(gradient, [[2 * (1 - 1 / 5) - 1 * (1 / 5)]])


def test_annealing_moves_the_pick_to_the_next_best():
    embedding = np.array([[1.0, 0.98, 0.0], [0.0, 0.0, 0.1]])
    importance = np.full(3, 1 / 3)
    first, _ = _gp.select_greedy(embedding, importance, np.ones(3), 1)
    assert first[0] in (0, 1)
    tired = np.ones(3)
    tired[first] = 0.9
    second, _ = _gp.select_greedy(embedding, importance, tired, 1)
    assert second[0] == 1 - first[0]


def test_an_embedding_of_zeros_picks_by_importance():
    picks, _ = _gp.select_greedy(np.zeros((2, 4)), np.array([0.1, 0.4, 0.2, 0.3]), np.ones(4), 3)
    np.testing.assert_array_equal(picks, [1, 3, 2])


def likelihood_problem(seed, missing):
    rng = np.random.default_rng(seed)
    count, rank, number = int(rng.integers(3, 60)), int(rng.integers(1, 16)), int(rng.integers(1, 25))
    embedding = rng.normal(size=(rank, count)) * rng.choice([0.05, 0.3])
    samples = rng.normal(size=(number, count)) * 0.1
    if missing == "some":
        samples[rng.random(samples.shape) < 0.3] = np.nan
    if missing == "same":
        samples[:, rng.random(count) < 0.3] = np.nan
    weights = 0.9 ** np.arange(number)
    return rng, embedding, samples, weights


@pytest.mark.parametrize("missing", ["none", "same", "some"])
@pytest.mark.parametrize("centred", [False, True])
def test_likelihood_and_gradient_equal_the_reference(missing, centred):
    for seed in range(60):
        rng, embedding, samples, weights = likelihood_problem(seed, missing)
        mean = _gp.discounted_mean(samples, weights) if centred else np.zeros(samples.shape[1])
        noise = float(rng.choice([0.01, 0.1]))
        value, gradient = _gp.log_likelihood(embedding, samples, weights, noise=noise, mean=mean)
        expected, slope = _gp.log_likelihood_reference(embedding, samples, weights, noise=noise, mean=mean)
        assert value == pytest.approx(expected, rel=1e-6, abs=1e-6)
        np.testing.assert_allclose(gradient, slope, rtol=1e-6, atol=1e-6 * np.abs(slope).max(initial=1e-9))


def test_the_marginal_of_missing_answers_equals_scipys():
    from scipy.stats import multivariate_normal

    _, embedding, samples, weights = likelihood_problem(3, "some")
    value, _ = _gp.log_likelihood(embedding, samples, weights, noise=0.1)
    expected = 0.0
    for sample, weight in zip(samples, weights, strict=True):
        known = ~np.isnan(sample)
        x = embedding[:, known]
        covariance = x.T @ x + 0.01 * np.eye(known.sum())
        expected += weight * multivariate_normal.logpdf(sample[known], cov=covariance)
    assert value == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("missing", ["none", "some"])
def test_the_gradient_equals_finite_differences(missing):
    rng, embedding, samples, weights = likelihood_problem(7, missing)
    _, gradient = _gp.log_likelihood(embedding, samples, weights, noise=0.1)
    for _ in range(20):
        at = tuple(int(rng.integers(size)) for size in embedding.shape)
        step = np.zeros_like(embedding)
        step[at] = 1e-6
        above, _ = _gp.log_likelihood(embedding + step, samples, weights, noise=0.1)
        below, _ = _gp.log_likelihood(embedding - step, samples, weights, noise=0.1)
        assert gradient[at] == pytest.approx((above - below) / 2e-6, rel=1e-4, abs=1e-4 * np.abs(gradient).max())


@pytest.mark.parametrize("missing", ["none", "same", "some"])
def test_fit_is_adam_on_the_reference_likelihood(missing, monkeypatch):
    monkeypatch.setattr(_gp, "_BLOCK", 7)  # several blocks, the last one short
    _, embedding, samples, weights = likelihood_problem(11, missing)
    learned = _gp.fit(embedding, samples, weights, noise=0.1, iterations=20, learning_rate=0.01)
    x, first, second = embedding.copy(), np.zeros_like(embedding), np.zeros_like(embedding)
    zero = np.zeros(samples.shape[1])
    for step in range(1, 21):
        _, gradient = _gp.log_likelihood_reference(x, samples, weights, noise=0.1, mean=zero)
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        x = x + 0.01 * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
    np.testing.assert_allclose(learned.embedding, x, rtol=1e-6, atol=1e-9)
    before, _ = _gp.log_likelihood_reference(embedding, samples, weights, noise=0.1, mean=zero)
    assert learned.before == pytest.approx(before)
    assert learned.after == pytest.approx(_gp.log_likelihood_reference(x, samples, weights, noise=0.1, mean=zero)[0])


def test_fit_finds_the_clusters_that_made_the_samples():
    rng = np.random.default_rng(0)
    cluster = np.repeat([0, 1, 2], 8)
    truth = np.array([[0.3, 0.0, -0.2], [0.0, 0.3, 0.1]])[:, cluster]
    samples = rng.normal(size=(40, 2)) @ truth + 0.01 * rng.normal(size=(40, 24))
    start = rng.normal(size=(2, 24)) / np.sqrt(2)
    learned = _gp.fit(start, samples, np.ones(40), noise=0.01, iterations=500, learning_rate=0.01)
    assert learned.after > learned.before
    found = _gp.correlation(learned.embedding)
    assert found[cluster[:, None] == cluster].min() > 0.95
    assert found[cluster[:, None] != cluster].max() < 0.9


def test_clients_without_answers_keep_their_embedding():
    _, embedding, samples, weights = likelihood_problem(5, "none")
    samples[:, 1] = np.nan
    learned = _gp.fit(embedding, samples, weights, noise=0.1, iterations=5, learning_rate=0.01)
    np.testing.assert_array_equal(learned.embedding[:, 1], embedding[:, 1])
    assert (learned.embedding[:, 0] != embedding[:, 0]).any()


def test_the_discounted_mean_leaves_out_silence():
    samples = np.array([[1.0, np.nan, np.nan], [3.0, 2.0, np.nan]])
    np.testing.assert_allclose(_gp.discounted_mean(samples, np.array([1.0, 0.5])), [2.5 / 1.5, 2.0, 0.0])


def test_next_to_no_noise_is_no_reason_to_fail():
    rng = np.random.default_rng(0)
    start, samples = rng.normal(size=(15, 8)), rng.normal(size=(3, 8))
    samples[0, 2:] = np.nan
    learned = _gp.fit(start, samples, np.ones(3), noise=1e-8, iterations=20, learning_rate=0.01)
    assert np.isfinite(learned.embedding).all() and np.isfinite(learned.after)
