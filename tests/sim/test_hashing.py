from collections import Counter
from functools import partial
from math import factorial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from fedpick.sim import hashing


def on_device(key):
    return hashing.Key(jnp.asarray(key.high), jnp.asarray(key.low))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 600, 1024, 99_999])
def test_permute_is_a_permutation_with_the_same_bits_on_numpy_and_jax(size):
    key = hashing.key_from(3, size)
    positions = np.arange(size, dtype=np.uint32)
    permuted = hashing.permute(key, positions, np.array([size], np.uint32))
    np.testing.assert_array_equal(np.sort(permuted), positions)
    for rolled in (False, True):
        program = jax.jit(partial(hashing.permute, rolled=rolled))
        compiled = program(on_device(key), jnp.asarray(positions), jnp.uint32(size))
        np.testing.assert_array_equal(np.asarray(compiled), permuted)


def test_positions_beyond_the_end_stay_inside():
    key = hashing.key_from(1)
    permuted = hashing.permute(key, np.arange(64, dtype=np.uint32), np.array([10], np.uint32))
    assert permuted.min() >= 0
    assert permuted.max() < 10


def keys_of(count, seed):
    return hashing.fold(hashing.key_from(seed), np.arange(count, dtype=np.uint32)[:, None])


def permutations_of(size, trials, seed):
    lanes = np.broadcast_to(np.arange(size, dtype=np.uint32), (trials, size))
    return hashing.permute(keys_of(trials, seed), lanes, np.array([[size]], np.uint32))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7])
def test_all_orders_of_a_few_are_equally_likely(size):
    drawn = permutations_of(size, max(12_000, 40 * factorial(size)), 5)
    orders = Counter(map(tuple, drawn.tolist()))
    assert len(orders) == factorial(size)
    assert chisquare(list(orders.values())).pvalue > 1e-4


@pytest.mark.parametrize("size", [9, 25, 49])
def test_squares_of_odd_numbers_give_odd_permutations_too(size):
    drawn = permutations_of(size, 4000, 8)
    inversions = sum((drawn[:, i, None] > drawn[:, i + 1 :]).sum(axis=1) for i in range(size - 1))
    assert 0.45 < np.mean(inversions % 2) < 0.55


def test_pairs_of_positions_look_uniform():
    size, trials = 50, 20_000
    lanes = np.broadcast_to(np.array([0, 1, 25], np.uint32), (trials, 3))
    drawn = hashing.permute(keys_of(trials, 6), lanes, np.array([[size]], np.uint32))
    for column in drawn.T:
        assert chisquare(np.bincount(column, minlength=size)).pvalue > 1e-4
    for other in (1, 2):
        gaps = np.bincount((drawn[:, other] - drawn[:, 0]) % size, minlength=size)
        assert gaps[0] == 0
        assert chisquare(gaps[1:]).pvalue > 1e-4


def test_draws_with_replacement_look_uniform_and_agree_with_jax():
    key, lanes, size = hashing.key_from(7), np.arange(20_000, dtype=np.uint32), np.array([37], np.uint32)
    drawn = hashing.with_replacement(key, lanes, size)
    assert chisquare(np.bincount(drawn, minlength=37)).pvalue > 1e-4
    compiled = jax.jit(hashing.with_replacement)(on_device(key), jnp.asarray(lanes), jnp.asarray(size))
    np.testing.assert_array_equal(np.asarray(compiled), drawn)


def test_folding_gives_other_keys():
    base = hashing.key_from(0, 7, 3)
    keys = hashing.fold(base, np.arange(100_000, dtype=np.uint32))
    pairs = keys.high.astype(np.uint64) << np.uint64(32) | keys.low
    assert len(np.unique(pairs)) == 100_000
    assert hashing.key_from(0, 7, 3) == hashing.key_from(0, 7, 3)
    assert hashing.key_from(0, 7, 4) != hashing.key_from(0, 7, 3)
