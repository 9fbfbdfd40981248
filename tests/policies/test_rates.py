"""Inclusion probabilities and the draw with these probabilities."""

from __future__ import annotations

import numpy as np

from fedpick.policies._rates import draw_by_rates, selection_rates


def test_the_comb_hits_every_client_with_its_rate():
    """Exactly: for one order of the clients, the shares of [0, 1) in which a tooth hits each client."""

    class Fixed:
        def __init__(self, point):
            self.point = point

        def permutation(self, values):
            return values

        def random(self):
            return self.point

    rng = np.random.default_rng(0)
    for _ in range(50):
        size = int(rng.integers(1, 9))
        rates = selection_rates(rng.integers(1, 20, size).astype(float), int(rng.integers(1, 9)))
        counts = np.zeros(size)
        for point in (np.arange(1000) + 0.5) / 1000:
            drawn = draw_by_rates(rates, Fixed(point))
            assert len(drawn) == len(np.unique(drawn)) == round(rates.sum())
            counts[drawn] += 1
        assert np.abs(counts / 1000 - rates).max() < 0.0021


def test_no_rates_no_clients():
    assert draw_by_rates(np.zeros(3), np.random.default_rng(0)).tolist() == []
    assert draw_by_rates(np.empty(0), np.random.default_rng(0)).tolist() == []
    assert draw_by_rates(np.array([1.0, 0.0, 1.0]), np.random.default_rng(0)).tolist() == [0, 2]
