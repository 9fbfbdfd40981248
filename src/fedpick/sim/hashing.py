"""Random numbers by hashing: a value is a hash of what it is for, never the next one of a stream.

The mini-batches of client k in round t are a function of (seed, round, client) alone. They do not depend on the other
clients of the cohort, on its order or on how the work is split. A permutation is neither stored nor sorted: `permute`
computes any of its positions directly, so a batch costs the same from 10 as from 10 million examples. It writes
0..size-1 into a square, row by row, and rotates all rows and then all columns by random amounts, again and again. The
last row may be shorter; every row and column rotates within itself.

All functions run on NumPy and on JAX arrays, with the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

__all__ = ["Key", "fold", "key_from", "permute", "sketch_cells", "uniform_bits", "uniform_floats", "with_replacement"]

ROTATIONS = 16
"""With 16, all orders of 2 to 7 examples are equally likely in a test of 400 draws each; with 12 they are not."""


class Key(NamedTuple):
    """64 bits as two lanes of uint32; scalars, or arrays with one key per client."""

    high: Any
    low: Any


def _mix(x: Any) -> Any:
    """Mix the bits of a uint32, a bijection: every input bit affects every output bit (the "lowbias32" constants)."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def key_from(seed: int, *parts: int) -> Key:
    """Make a key from a seed and the parts that say what it is for, on the host."""
    words = np.random.SeedSequence(seed, spawn_key=parts).generate_state(2)
    return Key(words[:1].copy(), words[1:].copy())


def fold(key: Key, data: Any) -> Key:
    """Derive the key of one more part: a round, a client, a step. `data` is uint32, or an int on the host."""
    if isinstance(data, (int, np.generic)):
        data = np.array([data], np.uint32)  # NumPy warns when a scalar overflows, but not when an array does
    stirred = _mix(data + np.uint32(0x9E3779B9))
    high = _mix(key.high + stirred)
    return Key(high, _mix(key.low ^ high ^ (stirred * np.uint32(0x85EBCA6B))))


def uniform_bits(key: Key, counter: Any) -> Any:
    """32 random bits for every counter (uint32, any shape)."""
    return _mix(_mix(counter + key.high) ^ key.low)


def uniform_floats(key: Key, counter: Any) -> Any:
    """Uniform float64 numbers in (0, 1); NumPy only."""
    return (uniform_bits(key, counter).astype(np.float64) + 0.5) * 2.0**-32


def with_replacement(key: Key, counter: Any, size: Any) -> Any:
    """Independent uniform positions in 0..size-1; `size` is at most 2**24."""
    fraction = (uniform_bits(key, counter) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
    position = (fraction * size.astype(np.float32)).astype(np.int32)
    last = size.astype(np.int32) - 1
    return position - (position > last).astype(np.int32)


def sketch_cells(key: Key, length: int, cells: int) -> tuple[Any, Any]:
    """(length,) signs and (length,) cells of a count sketch, which keeps inner products in expectation; NumPy only."""
    bits = uniform_bits(key, np.arange(length, dtype=np.uint32))
    signs = np.where(bits & np.uint32(1), np.float32(1), np.float32(-1))
    return signs, ((bits >> np.uint32(1)) % np.uint32(cells)).astype(np.int32)


def _scaled(bits: Any, size: Any) -> Any:
    """Map random bits to 0..size-1 (size is a float32) by a multiplication, because a remainder is slow."""
    return ((bits >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24) * size).astype(np.uint32)


def permute(key: Key, position: Any, size: Any, rolled: bool = False) -> Any:
    """Return where `position` (uint32, 0..size-1) goes in a random permutation of 0..size-1, as int32.

    Positions beyond the end give some valid position: the caller masks them. `size` is a uint32 of 1..2**31. `rolled`,
    for JAX: use a loop over the rotations, which is faster for a hundred positions or more. Unrolled, XLA computes all
    rotations of one position before the next position, and each rotation waits for the one before it.
    """
    # The square root rounded up; NumPy and XLA round it alike, as IEEE 754 demands. Rows and columns of one odd length
    # would only give even permutations.
    below = (size - np.uint32(1)).astype(np.float32)
    width = (np.sqrt(below) if isinstance(size, np.ndarray) else _jax_sqrt(below)).astype(np.uint32) + np.uint32(1)
    width = width + (width * width == size).astype(np.uint32) * (width & np.uint32(1))
    full = size // width
    rest = size - full * width
    position = position * (position < size).astype(np.uint32)
    row = position // width
    column = position - row * width

    def rotate(index: Any, place: tuple[Any, Any]) -> tuple[Any, Any]:
        """Rotate all rows, then all columns."""
        row, column = place
        index = index * np.uint32(2)
        column = _shifted(column, _mix(row + _rotation_key(key, index)), _chosen(row < full, width, rest))
        index = index + np.uint32(1)
        return _shifted(row, _mix(column + _rotation_key(key, index)), full + (column < rest).astype(np.uint32)), column

    if rolled:
        nothing = key.high * np.uint32(0)  # gives the carry of the loop its final shape
        row, column = _jax_loop(ROTATIONS // 2, rotate, (row + nothing, column + nothing))
    else:
        for index in range(ROTATIONS // 2):
            row, column = rotate(np.array([index], np.uint32), (row, column))
    return (row * width + column).astype(np.int32)


def _rotation_key(key: Key, index: Any) -> Any:
    return _mix(key.high + index * np.uint32(0x9E3779B9)) ^ key.low


def _chosen(condition: Any, yes: Any, no: Any) -> Any:
    """`where` for NumPy and JAX."""
    return no + (yes - no) * condition.astype(np.uint32)


def _shifted(place: Any, bits: Any, length: Any) -> Any:
    """Shift a place by a random amount in a ring of `length`."""
    moved = place + _scaled(bits, length.astype(np.float32))
    return moved - length * (moved >= length).astype(np.uint32)


def _jax_loop(count: int, body: Any, start: Any) -> Any:
    from jax import lax

    return lax.fori_loop(np.uint32(0), np.uint32(count), body, start)


def _jax_sqrt(values: Any) -> Any:
    import jax.numpy as jnp

    return jnp.sqrt(values)
