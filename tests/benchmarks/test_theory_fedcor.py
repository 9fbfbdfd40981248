"""The numbers behind FedCor's figures on its assumptions, on known cases."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.theory.fedcor import (
    covariance_similarity,
    henze_zirkler,
    normality,
    principal_components,
    sample_loss_changes,
)
from fedpick.core.errors import InvalidInput


def test_a_sample_is_the_change_of_everybodys_loss_by_one_random_cohort():
    seen = []

    def measure(probe):
        if probe.trial is None:
            return np.arange(6.0)
        seen.append(probe.trial)
        after = np.arange(6.0)
        after[probe.trial.clients] -= 1.0
        return after

    changes = sample_loss_changes(measure, 6, cohorts=40, budget=2, rng=np.random.default_rng(0))
    assert changes.shape == (40, 6)
    np.testing.assert_array_equal(changes.sum(axis=1), -2.0)
    for row, trial in zip(changes, seen, strict=True):
        np.testing.assert_array_equal(np.flatnonzero(row), np.sort(trial.clients))
        np.testing.assert_array_equal(trial.weights, 0.5)
    assert len(np.unique(changes, axis=0)) > 8  # of 15 pairs: they are not all the same
    with pytest.raises(InvalidInput, match="budget"):
        sample_loss_changes(measure, 6, cohorts=1, budget=7, rng=np.random.default_rng(0))


def test_principal_components_are_those_of_the_covariance():
    rng = np.random.default_rng(1)
    samples = rng.normal(size=(200, 5)) @ rng.normal(size=(5, 5)) + 3.0
    found = principal_components(samples)
    values = np.linalg.eigvalsh(np.cov(samples, rowvar=False))[::-1]
    np.testing.assert_allclose(found.scores.var(axis=0, ddof=1), values)
    np.testing.assert_allclose(found.share, values / values.sum())
    assert principal_components(samples, 2).scores.shape == (200, 2)
    flat = np.outer(np.arange(4.0), np.ones(7))
    assert principal_components(flat).share.shape == (1,)


def test_normality_tells_a_gaussian_from_others():
    rng = np.random.default_rng(2)
    gaussian, skewed = normality(rng.normal(5, 3, 500)), normality(rng.exponential(size=500))
    assert gaussian.p_value > 0.05
    assert gaussian.shapiro > 0.99
    assert abs(gaussian.skewness) < 0.3
    assert gaussian.distance < 0.05
    assert skewed.p_value < 1e-6
    assert skewed.skewness > 1
    assert skewed.distance > 0.1
    with pytest.raises(InvalidInput, match="not all equal"):
        normality(np.ones(10))


def test_henze_and_zirklers_statistic_equals_its_definition_and_keeps_its_level():
    rng = np.random.default_rng(3)
    samples = rng.normal(size=(30, 2)) @ np.array([[2.0, 1.0], [0.0, 0.5]])
    number, size = samples.shape
    beta = ((2 * size + 1) * number / 4) ** (1 / (size + 4)) / np.sqrt(2)
    centred = samples - samples.mean(axis=0)
    inverse = np.linalg.inv(np.cov(samples, rowvar=False, bias=True))
    pairs = single = 0.0
    for first in centred:
        single += np.exp(-(beta**2) / (2 * (1 + beta**2)) * (first @ inverse @ first))
        for second in centred:
            gap = first - second
            pairs += np.exp(-(beta**2) / 2 * (gap @ inverse @ gap))
    expected = number * (
        pairs / number**2 - 2 * (1 + beta**2) ** (-size / 2) * single / number + (1 + 2 * beta**2) ** (-size / 2)
    )
    assert henze_zirkler(samples)[0] == pytest.approx(expected)
    rejected = sum(henze_zirkler(rng.normal(size=(100, 3)))[1] < 0.05 for _ in range(300))
    assert 3 <= rejected <= 30  # of 15 expected
    assert henze_zirkler(rng.exponential(size=(100, 3)))[1] < 1e-4


def test_similarity_of_covariances_is_a_cosine():
    rng = np.random.default_rng(4)
    a, b = (np.cov(rng.normal(size=(50, 6)), rowvar=False) for _ in range(2))
    assert covariance_similarity(a, 7 * a) == pytest.approx(1.0)
    assert covariance_similarity(a, b) == pytest.approx(covariance_similarity(b, a))
    assert covariance_similarity(a, b) == pytest.approx(
        np.trace(a.T @ b) / np.sqrt(np.trace(a.T @ a) * np.trace(b.T @ b))
    )
    assert covariance_similarity(np.diag([1.0, 0.0]), np.diag([0.0, 1.0])) == 0.0
    with pytest.raises(InvalidInput, match="zeros"):
        covariance_similarity(a, np.zeros_like(a))
    with pytest.raises(InvalidInput, match="same size"):
        covariance_similarity(a, np.eye(3))
