"""Counter-based random numbers: a value is a hash of what it is for, never the next one of a stream.

The mini-batches of client k in round t are a function of (seed, round, client) alone, so they cannot depend on who
else was selected, on the order of the cohort or on how the work was split. A permutation is not stored and not
sorted: `permute` gives any of its positions at once (a Feistel network on the next power of two, walked until it
lands inside), so drawing a batch costs the same from 10 as from 10 million examples.

Everything here runs on numpy and on JAX arrays alike, with the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

__all__ = ["Key", "fold", "key_from", "permute", "uniform_bits", "uniform_floats", "with_replacement"]

FEISTEL_ROUNDS = 8


class Key(NamedTuple):
    """64 bits as two lanes of uint32; scalars, or arrays with one key per client."""

    high: Any
    low: Any


def _mix(x: Any) -> Any:
    """A bijection of uint32 in which every input bit moves every output bit (the "lowbias32" constants)."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def key_from(seed: int, *parts: int) -> Key:
    """The key of a seed (any whole number) and what it is for, on the host."""
    words = np.random.SeedSequence(seed, spawn_key=parts).generate_state(2)
    return Key(words[:1].copy(), words[1:].copy())


def fold(key: Key, data: Any) -> Key:
    """The key of one more thing: a round, a client, a step. `data` is uint32 (or a whole number, on the host)."""
    if isinstance(data, (int, np.generic)):
        data = np.array([data], np.uint32)  # numpy warns when a scalar wraps round, but not when an array does
    stirred = _mix(data + np.uint32(0x9E3779B9))
    high = _mix(key.high + stirred)
    return Key(high, _mix(key.low ^ high ^ (stirred * np.uint32(0x85EBCA6B))))


def uniform_bits(key: Key, counter: Any) -> Any:
    """32 random bits for every counter (uint32, any shape)."""
    return _mix(_mix(counter + key.high) ^ key.low)


def uniform_floats(key: Key, counter: Any) -> Any:
    """Numbers in (0, 1), numpy only, float64."""
    return (uniform_bits(key, counter).astype(np.float64) + 0.5) * 2.0**-32


def with_replacement(key: Key, counter: Any, size: Any) -> Any:
    """Independent uniform positions in 0..size-1; `size` is at most 2**24."""
    fraction = (uniform_bits(key, counter) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
    position = (fraction * size.astype(np.float32)).astype(np.int32)
    last = size.astype(np.int32) - 1
    return position - (position > last).astype(np.int32)


def _bit_length(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return np.frexp(x.astype(np.float64))[1].astype(np.uint32)
    from jax import lax

    return np.uint32(32) - lax.clz(x)


def _scramble(key: Key, value: Any, bits: Any) -> Any:
    """A keyed bijection of 0..2**bits-1: an alternating Feistel network on the two halves of the bits."""
    right_bits = bits >> np.uint32(1)
    one = np.uint32(1)
    left_mask, right_mask = (one << (bits - right_bits)) - one, (one << right_bits) - one
    left, right = value >> right_bits, value & right_mask
    for round_index in range(FEISTEL_ROUNDS):
        salt = np.uint32((round_index * 0x9E3779B9 + 0x7F4A7C15) & 0xFFFFFFFF)
        if round_index % 2 == 0:
            left = left ^ (uniform_bits(key, right + salt) & left_mask)
        else:
            right = right ^ (uniform_bits(key, left + salt) & right_mask)
    return (left << right_bits) | right


def permute(key: Key, position: Any, size: Any) -> Any:
    """Where `position` (uint32, 0..size-1) goes in a random permutation of 0..size-1, as int32.

    Positions beyond the end are wrapped round first: mask them afterwards. `size` is a uint32 of 1..2**31.
    """
    bits = _bit_length(size - np.uint32(1))
    value = position % size
    if isinstance(value, np.ndarray):
        value = _scramble(key, value, bits)
        while (outside := value >= size).any():
            value = np.where(outside, _scramble(key, value, bits), value)
        return value.astype(np.int32)
    import jax.numpy as jnp
    from jax import lax

    value = lax.while_loop(
        lambda v: (v >= size).any(),
        lambda v: jnp.where(v >= size, _scramble(key, v, bits), v),
        _scramble(key, value, bits),
    )
    return value.astype(np.int32)
