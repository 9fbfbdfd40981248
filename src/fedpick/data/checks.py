"""What examples and labels must be, so that a mistake in one's own data is said at once and not learned from.

Arrays are looked at in blocks: finding a NaN in ten million examples makes no second copy of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpick.core.errors import InvalidInput

__all__ = ["array_of", "check_examples", "check_groups", "check_normalization", "check_num_classes", "labels_of"]

_VALUES_AT_ONCE = 2**20


def _blocks(array: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """(first row, some rows) of an array, about a million values at a time."""
    step = max(1, _VALUES_AT_ONCE // max(1, math.prod(array.shape[1:])))
    for first in range(0, len(array), step):
        yield first, array[first : first + step]


def _check_finite(what: str, array: NDArray[Any]) -> None:
    for first, block in _blocks(array):
        finite = np.isfinite(block)
        if not finite.all():
            place = np.unravel_index(int(np.argmin(finite)), block.shape)
            raise InvalidInput(
                f"{what} must be finite numbers. Its row {first + int(place[0])} holds {block[place]}. "
                "Drop or fill such rows first: a client that trains on them never completes a round."
            )


def array_of(what: str, given: ArrayLike) -> NDArray[Any]:
    """Rows of examples or labels as an array."""
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise InvalidInput(
            f"{what} must be an array with one row per example. Got rows that differ: {error}."
        ) from error
    if array.ndim == 0:
        raise InvalidInput(f"{what} must be an array with one row per example. Got {given!r}, of shape ().")
    return array


def check_examples(train_x: NDArray[Any], test_x: NDArray[Any]) -> None:
    """Refuse examples of the wrong type, of two shapes, or that are not finite."""
    for what, x in (("Dataset.train_x", train_x), ("Dataset.test_x", test_x)):
        if x.dtype not in (np.uint8, np.float32):
            raise InvalidInput(f"{what} must be uint8 or float32. Got {x.dtype}: convert it with x.astype(np.float32).")
    if train_x.shape[1:] != test_x.shape[1:]:
        raise InvalidInput(
            f"Training and test must be examples of one shape. An example of train_x has {train_x.shape[1:]} and one "
            f"of test_x has {test_x.shape[1:]}: prepare both in the same way."
        )
    if train_x.dtype != test_x.dtype:
        raise InvalidInput(
            f"test_x is {test_x.dtype} and train_x {train_x.dtype}, but both are normalised with the same scale, mean "
            "and std. Give both in the same type and units."
        )
    for what, x in (("Dataset.train_x", train_x), ("Dataset.test_x", test_x)):
        if x.dtype != np.uint8:
            _check_finite(what, x)


def labels_of(what: str, given: ArrayLike, num_examples: int, num_classes: int) -> NDArray[Any]:
    """The labels as int32, or as float32 where there are no classes; refused where that would change them."""
    labels = array_of(what, given)
    if labels.shape != (num_examples,):
        one_hot = labels.ndim == 2 and len(labels) == num_examples
        raise InvalidInput(
            f"{what} needs one label per example, shape ({num_examples},). Got shape {labels.shape}."
            + (" Turn one-hot rows into labels with y.argmax(axis=1)." if one_hot else "")
        )
    if labels.dtype.kind not in "biuf":
        labels = _numbers(what, labels)
    if not num_classes:
        _check_finite(what, labels)
        return labels.astype(np.float32, copy=False)
    if labels.dtype.kind == "f":
        for first, block in _blocks(labels):
            whole = block == np.trunc(block)  # NaN is not; infinity is out of range
            if not whole.all():
                row = int(np.argmin(whole))
                raise InvalidInput(
                    f"{what} must be whole numbers from 0, one per class. Its row {first + row} is {block[row]}. "
                    "Set num_classes=0 if the labels are amounts and not classes."
                )
    if len(labels) and not (labels.min() >= 0 and labels.max() < num_classes):
        raise InvalidInput(
            f"{what} must lie in 0..{num_classes - 1}, for num_classes={num_classes}. "
            f"Got {labels.min()} to {labels.max()}."
        )
    return labels.astype(np.int32, copy=False)


def _numbers(what: str, labels: NDArray[Any]) -> NDArray[Any]:
    """Labels that came as Python objects, as numbers; text is refused even where it spells a number."""
    try:
        if labels.dtype.kind == "O" and not any(isinstance(label, (str, bytes)) for label in labels):
            return labels.astype(np.float64)
    except (TypeError, ValueError):
        pass
    kind = "text" if labels.dtype.kind in "SUT" else f"values such as {labels[0]!r}"
    raise InvalidInput(
        f"{what} must be whole numbers from 0, one per class. Got {kind}. Number the classes with "
        "classes, y = np.unique(labels, return_inverse=True)."
    )


def check_num_classes(num_classes: Any) -> int:
    """The number of classes as an int."""
    if isinstance(num_classes, bool) or not isinstance(num_classes, Integral) or num_classes < 0:
        raise InvalidInput(
            f"Dataset.num_classes must be a whole number: how many classes there are, 0 for none. Got {num_classes!r}."
        )
    return int(num_classes)


def check_normalization(shape: tuple[int, ...], scale: float, mean: NDArray[Any], std: NDArray[Any]) -> None:
    """Refuse constants that would turn examples of this shape into NaN, infinity or another shape."""
    if not (np.isfinite(scale) and scale != 0):
        raise InvalidInput(f"Dataset.scale must be a finite number other than 0, such as 1 / 255. Got {scale!r}.")
    example = shape or (1,)
    for name, values in (("mean", mean), ("std", std)):
        fits = len(values.shape) <= len(example) and all(
            size in (1, wanted) for size, wanted in zip(values.shape[::-1], example[::-1], strict=False)
        )
        if not fits:
            raise InvalidInput(
                f"Dataset.{name} must be one number, or one per channel or feature, for examples of shape {shape}. "
                f"Got shape {values.shape}."
            )
    if not np.isfinite(mean).all():
        raise InvalidInput(f"Dataset.mean must be finite. Got {_first(mean, np.isfinite(mean))}.")
    good = np.isfinite(std) & (std > 0)
    if not good.all():
        raise InvalidInput(
            f"Dataset.std must be finite and above 0, since examples are divided by it. Got {_first(std, good)}. Use 1 "
            "for a feature that never changes."
        )


def _first(values: NDArray[Any], good: NDArray[np.bool_]) -> float:
    """The first value that is not good."""
    return float(values[~good][0])


def check_groups(groups: NDArray[Any], num_examples: int) -> None:
    """Refuse owners that do not belong to the examples one by one."""
    if groups.shape != (num_examples,):
        raise InvalidInput(
            f"Dataset.groups must have one owner per training example ({num_examples}). Got shape {groups.shape}."
        )
    if groups.dtype.kind == "f" and np.isnan(groups).any():
        raise InvalidInput(
            "Dataset.groups must name the owner of every training example. "
            f"Row {int(np.argmax(np.isnan(groups)))} is nan: give it an owner, or drop the example."
        )
