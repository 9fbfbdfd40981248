"""One sentence for every refused parameter."""

from dataclasses import dataclass

import numpy as np
import pytest

from fedpick.core.errors import InvalidInput
from fedpick.core.validation import choice, flag, number, require, whole


@dataclass
class Settings:
    rate: object = 0.5


@pytest.mark.parametrize(
    ("interval", "inside", "outside"),
    [
        ("[0, 1]", (0, 1, 0.5, np.float32(0.5), np.int64(1)), (-0.1, 1.1)),
        ("(0, 1]", (1e-300, 1), (0, 0.0, np.float64(0))),
        ("[0, 1)", (0, 0.999), (1, 1.0)),
        ("[0, inf)", (0, 1e308), (np.inf, -1e-9)),
        ("(0, inf]", (1e-9, np.inf), (0,)),
        ("[-1, 1]", (-1, 1), (-1.1, 2)),
        ("(-inf, inf)", (-1e308, 0), (np.inf, -np.inf)),
    ],
)
def test_a_number_lies_in_its_interval(interval, inside, outside):
    for value in inside:
        assert number(Settings(value), "rate", interval) == float(value)
    for value in (*outside, np.nan, True, None, "0.5", [0.5], 1 + 0j, np.array(0.5)):
        with pytest.raises(
            InvalidInput, match=r"^The 'rate' parameter of Settings must be a .*number.* Got .* instead\.$"
        ):
            number(Settings(value), "rate", interval)


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ("[0, 0.5]", r"a number in \[0, 0\.5\]"),
        ("(0, inf)", "a finite number larger than 0"),
        ("[2, inf)", "a finite number of at least 2"),
        ("[0, inf]", "a number of at least 0"),
    ],
)
def test_the_interval_is_spelled_out(interval, expected):
    with pytest.raises(InvalidInput, match=f"must be {expected}. Got -1 instead"):
        number(Settings(-1), "rate", interval)


def test_a_whole_number_has_a_smallest_value():
    assert whole(Settings(np.int32(3)), "rate", 1) == 3
    assert whole(Settings(None), "rate", 1, optional=True) is None
    for value in (0, 1.0, True, "1", None, np.nan):
        with pytest.raises(InvalidInput, match=r"'rate' parameter of Settings must be a whole number of at least 1\."):
            whole(Settings(value), "rate", 1)
    with pytest.raises(InvalidInput, match=r"at least 1, or None\. Got 0 instead"):
        whole(Settings(0), "rate", 1, optional=True)


def test_choices_and_flags():
    choice(Settings("a"), "rate", ("a", "b", "c"))
    for value in ("d", None, ["a"], np.array(["a", "b"])):
        with pytest.raises(InvalidInput, match="must be 'a', 'b' or 'c'"):
            choice(Settings(value), "rate", ("a", "b", "c"))
    with pytest.raises(InvalidInput, match=r"must be 'a'\. Got"):
        choice(Settings("b"), "rate", ("a",))
    flag(Settings(False), "rate")
    for value in (0, "true", None):
        with pytest.raises(InvalidInput, match="must be true or false"):
            flag(Settings(value), "rate")


def test_an_argument_names_its_function():
    with pytest.raises(InvalidInput, match=r"^The 'steps' parameter of train must be even\. Got 3 instead\.$"):
        require(False, "train", "steps", "even", value=3)
