"""The two records of the data layer: a `Dataset` (examples) and a `Federation` (examples dealt to clients).

Neither holds an object per client. A federation keeps the examples where the data set put them (images are
never copied) and one index array, sorted by client: client k owns the rows `indices[offsets[k]:offsets[k + 1]]`, first
those it trains on, then its validation (hold-out) rows, then its local test rows:

    offsets[k] ..... train_ends[k] ..... validation_ends[k] ..... offsets[k + 1]
       train            validation            local test

Pixels stay `uint8`; models get `(x * scale - mean) / std` (see `Dataset.normalized`). Both records validate their
arrays, so a mistake in user data is found before training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpick.core.arrays import read_only
from fedpick.core.errors import InvalidInput
from fedpick.core.types import Clients
from fedpick.core.validation import assign

__all__ = ["Dataset", "Federation", "Part"]

Part = Literal["all", "train", "validation", "test"]

_VALUES_AT_ONCE = 2**20  # when validating: finding a NaN makes no second copy of the data


def _normalized(x: NDArray[Any], scale: float, mean: NDArray[Any], std: NDArray[Any]) -> NDArray[np.float32]:
    values = x.astype(np.float32)
    values *= np.float32(scale)
    values -= mean
    values /= std
    return values


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """Examples and labels, not yet dealt to clients (but see `groups`)."""

    name: str
    """The name in messages and reports."""
    train_x: NDArray[Any]
    """(n, ...) uint8 or float32, finite. Images are (height, width, channels)."""
    train_y: NDArray[Any]
    """(n,) labels 0, 1, ... as whole numbers, kept as int32; float32 where `num_classes` is 0."""
    num_classes: int
    """0 for a set without classes (the quadratic)."""
    test_x: NDArray[Any] = field(default_factory=lambda: np.empty(0, np.float32))
    """(m, ...) the central test set, prepared like train_x. Without one, the union of the local tests takes its place;
    without local tests either (see `Partition.split`), test loss and accuracy are NaN."""
    test_y: NDArray[Any] = field(default_factory=lambda: np.empty(0, np.float32))
    """(m,) labels of the test set."""
    scale: float = 1.0
    """Multiply x by this before anything else: 1/255 for bytes."""
    mean: NDArray[np.float32] = field(default_factory=lambda: np.zeros(1, np.float32))
    """(1,) or (channels,) subtracted after scaling."""
    std: NDArray[np.float32] = field(default_factory=lambda: np.ones(1, np.float32))
    """(1,) or (channels,) divided by after centring."""
    groups: NDArray[Any] | None = None
    """(n,) natural owner of every training example: author, user, writer, generated client."""
    client_features: NDArray[np.float32] | None = None
    """(N, F) oracle description of the natural clients, in ascending order of `groups`."""
    client_sizes: NDArray[np.float64] | None = None
    """(N,) stated size of the natural clients, where it is not the number of rows (the quadratic's p_k)."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """How it was made: options, sources, citation."""

    def __post_init__(self) -> None:
        train_x, test_x = _array_of("Dataset.train_x", self.train_x), _array_of("Dataset.test_x", self.test_x)
        if len(train_x) == 0:
            raise InvalidInput(f"The data set {self.name!r} has no training examples. It needs at least one.")
        if len(test_x) == 0:
            test_x = train_x[:0]  # an empty array still needs the shape of the examples
        num_classes = _check_num_classes(self.num_classes)
        assign(
            self,
            train_x=read_only(train_x),
            test_x=read_only(test_x),
            train_y=read_only(_labels_of("Dataset.train_y", self.train_y, len(train_x), num_classes)),
            test_y=read_only(_labels_of("Dataset.test_y", self.test_y, len(test_x), num_classes)),
            num_classes=num_classes,
            mean=read_only(np.atleast_1d(self.mean), np.float32),
            std=read_only(np.atleast_1d(self.std), np.float32),
            info=MappingProxyType(dict(self.info)),
        )
        _check_examples(self.train_x, self.test_x)
        _check_normalization(self.shape, self.scale, self.mean, self.std)
        if self.groups is not None:
            assign(self, groups=read_only(self.groups))
            _check_groups(self.groups, len(self))

    def __len__(self) -> int:
        return len(self.train_y)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return self.train_x.shape[1:]

    def normalized(self, x: NDArray[Any]) -> NDArray[np.float32]:
        """A float32 copy of examples of this set as models expect them: `(x * scale - mean) / std`."""
        return _normalized(x, self.scale, self.mean, self.std)


@dataclass(frozen=True, kw_only=True, eq=False)
class Federation:
    """A data set dealt to clients: every training example belongs to exactly one of them."""

    name: str
    """The data set."""
    partition: str
    """How it was dealt."""
    x: NDArray[Any]
    """(n, ...) all training examples, in the order of the data set (shared with it, not copied)."""
    y: NDArray[Any]
    """(n,) their labels."""
    indices: NDArray[np.integer[Any]]
    """(n,) rows of x and y, sorted by client."""
    offsets: NDArray[np.int64]
    """(N + 1,) client k owns `indices[offsets[k]:offsets[k + 1]]`."""
    train_ends: NDArray[np.int64]
    """(N,) client k trains on `indices[offsets[k]:train_ends[k]]`."""
    validation_ends: NDArray[np.int64]
    """(N,) its hold-out is `indices[train_ends[k]:validation_ends[k]]`; what follows, up to the next client, is its
    local test."""
    test_x: NDArray[Any]
    """(m, ...) the central test set (the union of the local tests where the data set has none)."""
    test_y: NDArray[Any]
    """(m,) its labels."""
    num_classes: int
    """As in `Dataset`, like the next three."""
    scale: float = 1.0
    """Factor of x."""
    mean: NDArray[np.float32] = field(default_factory=lambda: np.zeros(1, np.float32))
    """Subtracted after scaling."""
    std: NDArray[np.float32] = field(default_factory=lambda: np.ones(1, np.float32))
    """Divided by after centring."""
    features: NDArray[np.float32] | None = None
    """(N, F) oracle features, where the generator knows them."""
    stated_sizes: NDArray[np.float64] | None = None
    """(N,) sizes that stand in for the number of rows (the quadratic)."""
    group: NDArray[np.int64] | None = None
    """(N,) the number of each client's group; the partitions `clustered` and `dirichlet-mixture` know it."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Options and facts about the partition."""

    def __post_init__(self) -> None:
        for name in ("x", "y", "test_x", "test_y", "indices", "mean", "std"):
            assign(self, **{name: read_only(getattr(self, name))})
        for name in ("offsets", "train_ends", "validation_ends"):
            assign(self, **{name: read_only(getattr(self, name), np.int64)})
        assign(self, info=MappingProxyType(dict(self.info)))
        count = len(self.offsets) - 1
        if count < 1 or len(self.train_ends) != count or len(self.validation_ends) != count:
            raise InvalidInput(
                f"Federation needs at least one client and one range per client. Got {len(self.offsets)} offsets, "
                f"{len(self.train_ends)} train_ends and {len(self.validation_ends)} validation_ends."
            )
        cuts = np.column_stack([self.offsets[:-1], self.train_ends, self.validation_ends, self.offsets[1:]])
        if (np.diff(cuts, axis=1) < 0).any() or self.offsets[0] != 0 or self.offsets[-1] != len(self.indices):
            raise InvalidInput("Federation ranges must be in order, start at 0 and end at the number of indices.")

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.offsets) - 1

    def __len__(self) -> int:
        return self.num_clients

    @property
    def sizes(self) -> NDArray[np.int64]:
        """(N,) rows each client owns: train, validation and local test together."""
        return np.diff(self.offsets)

    @property
    def train_sizes(self) -> NDArray[np.int64]:
        """(N,) rows each client trains on."""
        return self.train_ends - self.offsets[:-1]

    @property
    def validation_sizes(self) -> NDArray[np.int64]:
        """(N,) hold-out rows of each client."""
        return self.validation_ends - self.train_ends

    def ranges(self, part: Part = "all") -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(N,) first and (N,) one-past-last position in `indices` of every client's part."""
        known = {
            "all": (self.offsets[:-1], self.offsets[1:]),
            "train": (self.offsets[:-1], self.train_ends),
            "validation": (self.train_ends, self.validation_ends),
            "test": (self.validation_ends, self.offsets[1:]),
        }
        if part not in known:
            raise InvalidInput(f"A part of a client's data is one of {', '.join(known)}. Got {part!r}.")
        return known[part]

    def rows(self, client: int, part: Part = "all") -> NDArray[np.integer[Any]]:
        """The rows of x and y that belong to one client."""
        first, last = self.ranges(part)
        return self.indices[first[client] : last[client]]

    @cached_property
    def owners(self) -> NDArray[np.int32]:
        """(n,) the client that owns `indices[i]`."""
        return np.repeat(np.arange(self.num_clients, dtype=np.int32), self.sizes)

    @cached_property
    def label_histogram(self) -> NDArray[np.int32] | None:
        """(N, L) rows per client and label, the full local data; None for a set without classes."""
        if not self.num_classes:
            return None
        cells = self.num_clients * self.num_classes
        flat = self.owners.astype(np.int64) * self.num_classes + self.y[self.indices]
        return np.bincount(flat, minlength=cells).astype(np.int32).reshape(self.num_clients, self.num_classes)

    def clients(self) -> Clients:
        """The table that policies see. `num_examples` is the full local size, hold-out and local test included."""

        def floats(values: NDArray[Any] | None) -> NDArray[np.float64] | None:
            return None if values is None else values.astype(np.float64)

        sizes = self.sizes if self.stated_sizes is None else self.stated_sizes
        return Clients(
            num_examples=sizes.astype(np.float64),
            label_histogram=floats(self.label_histogram),
            features=floats(self.features),
            group=self.group,
        )

    def packed(self) -> Federation:
        """The same federation with a copy of x and y in client order, so that `indices` is 0, 1, 2, ...

        Costs one copy of the data; then a client's rows are contiguous, and nothing needs the index array.
        """
        positions = np.arange(len(self.indices), dtype=self.indices.dtype)
        return replace(self, x=self.x[self.indices], y=self.y[self.indices], indices=positions)

    def normalized(self, x: NDArray[Any]) -> NDArray[np.float32]:
        """A float32 copy of examples as models expect them: `(x * scale - mean) / std`."""
        return _normalized(x, self.scale, self.mean, self.std)


def _blocks(array: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """(first row, block of rows) of an array, about a million values per block."""
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


def _array_of(what: str, given: ArrayLike) -> NDArray[Any]:
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


def _check_examples(train_x: NDArray[Any], test_x: NDArray[Any]) -> None:
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


def _labels_of(what: str, given: ArrayLike, num_examples: int, num_classes: int) -> NDArray[Any]:
    """The labels as int32, or float32 without classes; refuse labels that the conversion would change."""
    labels = _array_of(what, given)
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
            whole = block == np.trunc(block)  # NaN is not whole; infinity is out of range
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
    """Convert labels given as Python objects to numbers; refuse text, even if it spells a number."""
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


def _check_num_classes(num_classes: Any) -> int:
    """The number of classes as an int."""
    if isinstance(num_classes, bool) or not isinstance(num_classes, Integral) or num_classes < 0:
        raise InvalidInput(
            "Dataset.num_classes must be a whole number: the number of classes, or 0 for data without classes. "
            f"Got {num_classes!r}."
        )
    return int(num_classes)


def _check_normalization(shape: tuple[int, ...], scale: float, mean: NDArray[Any], std: NDArray[Any]) -> None:
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


def _check_groups(groups: NDArray[Any], num_examples: int) -> None:
    """Refuse owners that do not match the examples one to one."""
    if groups.shape != (num_examples,):
        raise InvalidInput(
            f"Dataset.groups must have one owner per training example ({num_examples}). Got shape {groups.shape}."
        )
    if groups.dtype.kind == "f" and np.isnan(groups).any():
        raise InvalidInput(
            "Dataset.groups must name the owner of every training example. "
            f"Row {int(np.argmax(np.isnan(groups)))} is nan: give it an owner, or drop the example."
        )
