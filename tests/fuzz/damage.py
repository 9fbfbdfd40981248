"""Random damage, seeded: what the fuzzers share."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import numpy as np
import pytest

from fedpick.core.errors import FedpickError

SHORT, LONG = 60, int(os.environ.get("FEDPICK_FUZZ", "100000"))
"""Cases in the usual tests, and those of one kind of input in `make test-slow`."""
FIRST_SEED = int(os.environ.get("FEDPICK_FUZZ_SEED", "0"))
"""Another number makes other cases."""
ODD_NUMBERS = (0, -1, 1, 2**31, 2**63, 10**30, 10**400, 0.0, -0.0, 1e-320, 1e308, -1e308, float("inf"), float("nan"))
ODD_VALUES = (
    *ODD_NUMBERS, *("", "x", "\x00", "\x1b[31m", "=1+1", "é" * 50, "../..", "a" * 5000), None, True, False, [], {},
    [[]], [1, "a"], {"a": 1}, [float("nan")], 1j, b"bytes", np.array([1.0]), np.float32("nan"), object(),
)  # fmt: skip

both, both_half = (
    pytest.mark.parametrize("cases", [SHORT, pytest.param(size, marks=pytest.mark.slow)]) for size in (LONG, LONG // 2)
)
"""A short and a long run; half as long where two fuzzers damage one kind of input."""


def survives(case: Callable[[np.random.Generator], object], cases: int, seed: int) -> int:
    """Run every case; only FedpickError may leave it. Return how many raised one."""
    refused, seed = 0, FIRST_SEED + seed
    for index in range(cases):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                case(np.random.default_rng([seed, index]))
            except FedpickError as error:
                assert str(error)
                refused += 1
            except Exception as error:
                raise AssertionError(f"case {index} of seed {seed}: {type(error).__name__}: {error}") from error
    return refused


def pick(rng: np.random.Generator, values):
    return values[int(rng.integers(len(values)))]


def damaged(content: bytes, rng: np.random.Generator, *, moves: bool = True) -> bytes:
    """The content with flipped bits, holes, cuts or repeats; without `moves` every other byte keeps its place."""
    data = bytearray(content)
    for _ in range(int(rng.integers(1, 6))):
        if not data:
            break
        place, size = int(rng.integers(len(data))), int(rng.integers(1, 64))
        match int(rng.integers(6 if moves else 3)):
            case 0 | 1:
                data[place] ^= 1 << int(rng.integers(8))
            case 2:
                data[place : place + size] = rng.bytes(size)
            case 3:
                del data[place : place + size]
            case 4:
                data[place:place] = data[place : place + size]
            case _:
                del data[int(rng.integers(len(data))) :]
    return bytes(data)


def changed_tree(tree, rng: np.random.Generator):
    """A copy of nested tables and lists in which one or two values, keys or branches are others."""
    if isinstance(tree, dict) and tree and rng.random() < 0.9:
        key = pick(rng, list(tree))
        match int(rng.integers(8)):
            case 0:
                return {name: value for name, value in tree.items() if name != key}
            case 1:
                return {**tree, str(pick(rng, ODD_VALUES))[:20]: pick(rng, ODD_VALUES)}
            case _:
                return {**tree, key: changed_tree(tree[key], rng)}
    if isinstance(tree, list) and tree and rng.random() < 0.8:
        place = int(rng.integers(len(tree)))
        return [*tree[:place], changed_tree(tree[place], rng), *tree[place + 1 :]]
    return pick(rng, ODD_VALUES)
