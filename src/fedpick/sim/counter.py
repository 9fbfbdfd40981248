"""Counter-based random numbers: a value is a hash of what it is for, never the next one of a stream.

The mini-batches of client k in round t are a function of (seed, round, client) alone, so they cannot depend on who
else was selected, on the order of the cohort or on how the work was split. A permutation is not stored and not
sorted: `permute` gives any of its positions at once (a Feistel network on a rectangle just large enough, walked until
it lands inside), so drawing a batch costs the same from 10 as from 10 million examples.

Everything here runs on numpy and on JAX arrays alike, with the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

__all__ = ["Key", "fold", "key_from", "permute", "uniform_bits", "uniform_floats", "with_replacement"]

FEISTEL_ROUNDS = 12
"""Enough that orders are about equally likely (within 8 % even for 6 examples, measured); fewer were visibly not."""


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


def _scaled(bits: Any, size: Any) -> Any:
    """Random bits as a number in 0..size-1 (size is a float32): a multiplication, because a remainder is slow."""
    return ((bits >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24) * size).astype(np.uint32)


def _scramble(round_keys: list[Any], left: Any, right: Any, width: Any, height: Any) -> tuple[Any, Any]:
    """A keyed bijection of the pairs (0..width-1, 0..height-1): each half is shifted by a hash of the other."""
    float_width, float_height = width.astype(np.float32), height.astype(np.float32)
    for index, round_key in enumerate(round_keys):
        if index % 2 == 0:
            left = left + _scaled(_mix(right + round_key), float_width)
            left = left - width * (left >= width).astype(np.uint32)
        else:
            right = right + _scaled(_mix(left + round_key), float_height)
            right = right - height * (right >= height).astype(np.uint32)
    return left, right


def permute(key: Key, position: Any, size: Any) -> Any:
    """Where `position` (uint32, 0..size-1) goes in a random permutation of 0..size-1, as int32.

    Positions beyond the end give some valid position: mask them afterwards. `size` is a uint32 of 1..2**31.
    """
    # The smallest rectangle that holds 0..size-1 and is nearly square: few positions fall outside and must walk on.
    width = np.sqrt(size.astype(np.float32)) if isinstance(size, np.ndarray) else _jax_sqrt(size)
    width = width.astype(np.uint32) + np.uint32(1)
    height = (size + width - np.uint32(1)) // width
    salts = [np.array([index], np.uint32) * np.uint32(0x9E3779B9) for index in range(FEISTEL_ROUNDS)]
    round_keys = [_mix(key.high + salt) ^ key.low for salt in salts]
    position = position - (position >= size).astype(np.uint32) * position
    left = position // height
    halves = left, position - left * height
    if not isinstance(position, np.ndarray):
        return _walk_on_device(round_keys, halves, width, height, size)
    halves = _scramble(round_keys, *halves, width, height)
    while (outside := halves[0] * height + halves[1] >= size).any():
        moved = _scramble(round_keys, *halves, width, height)
        halves = np.where(outside, moved[0], halves[0]), np.where(outside, moved[1], halves[1])
    return (halves[0] * height + halves[1]).astype(np.int32)


def _jax_sqrt(size: Any) -> Any:
    import jax.numpy as jnp

    return jnp.sqrt(size.astype(np.float32))


def _walk_on_device(round_keys: list[Any], halves: tuple[Any, Any], width: Any, height: Any, size: Any) -> Any:
    import jax.numpy as jnp
    from jax import lax

    def move(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        left, right, walking = carry
        moved = _scramble(round_keys, left, right, width, height)
        left, right = jnp.where(walking, moved[0], left), jnp.where(walking, moved[1], right)
        return left, right, left * height + right >= size

    # Everybody walks at least once; one copy of the network in the program keeps it quick to compile.
    shape = jnp.broadcast_shapes(halves[0].shape, halves[1].shape, round_keys[0].shape)
    start = (jnp.broadcast_to(halves[0], shape), jnp.broadcast_to(halves[1], shape), jnp.ones(shape, bool))
    left, right, _ = lax.while_loop(lambda carry: carry[2].any(), move, start)
    return (left * height + right).astype(np.int32)
