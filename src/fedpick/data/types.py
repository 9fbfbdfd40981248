"""The two records of the data layer: a `Dataset` (examples) and a `Federation` (examples dealt to clients).

Neither holds an object per client. A federation keeps the examples where the data set put them (no copy of an image is
ever made) and one index array, sorted by client: client k owns the rows `indices[offsets[k]:offsets[k + 1]]`, first
those it trains on, then its validation (hold-out) rows, then its local test rows:

    offsets[k] ..... train_ends[k] ..... validation_ends[k] ..... offsets[k + 1]
       train            validation            local test

Pixels stay `uint8`; whoever feeds a model computes `(x * scale - mean) / std` (see `Dataset.normalized`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import read_only
from fedpick.core.errors import InvalidInput
from fedpick.core.types import Clients
from fedpick.core.validation import assign
from fedpick.data.checks import (
    array_of,
    check_examples,
    check_groups,
    check_normalization,
    check_num_classes,
    labels_of,
)

__all__ = ["Dataset", "Federation", "Part"]

Part = Literal["all", "train", "validation", "test"]


def _normalized(x: NDArray[Any], scale: float, mean: NDArray[Any], std: NDArray[Any]) -> NDArray[np.float32]:
    values = x.astype(np.float32)
    values *= np.float32(scale)
    values -= mean
    values /= std
    return values


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """Examples and labels, not yet dealt to anybody (but see `groups`)."""

    name: str
    train_x: NDArray[Any]
    """(n, ...) uint8 or float32, finite. Images are (height, width, channels)."""
    train_y: NDArray[Any]
    """(n,) labels 0, 1, ... as whole numbers, kept as int32; float32 where `num_classes` is 0."""
    num_classes: int
    """0 for a set without classes (the quadratic)."""
    test_x: NDArray[Any] = field(default_factory=lambda: np.empty(0, np.float32))
    """(m, ...) the central test set, prepared like train_x. It may be left out: then the union of the local tests takes
    its place, and where there are none either (see `partition`), test loss and accuracy are NaN."""
    test_y: NDArray[Any] = field(default_factory=lambda: np.empty(0, np.float32))
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
        train_x, test_x = array_of("Dataset.train_x", self.train_x), array_of("Dataset.test_x", self.test_x)
        if len(train_x) == 0:
            raise InvalidInput(f"The data set {self.name!r} has no training examples. It needs at least one.")
        if len(test_x) == 0:
            test_x = train_x[:0]  # nothing has no shape of its own
        num_classes = check_num_classes(self.num_classes)
        assign(
            self,
            train_x=read_only(train_x),
            test_x=read_only(test_x),
            train_y=read_only(labels_of("Dataset.train_y", self.train_y, len(train_x), num_classes)),
            test_y=read_only(labels_of("Dataset.test_y", self.test_y, len(test_x), num_classes)),
            num_classes=num_classes,
            mean=read_only(np.atleast_1d(self.mean), np.float32),
            std=read_only(np.atleast_1d(self.std), np.float32),
            info=MappingProxyType(dict(self.info)),
        )
        check_examples(self.train_x, self.test_x)
        check_normalization(self.shape, self.scale, self.mean, self.std)
        if self.groups is not None:
            assign(self, groups=read_only(self.groups))
            check_groups(self.groups, len(self))

    def __len__(self) -> int:
        return len(self.train_y)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return self.train_x.shape[1:]

    def normalized(self, x: NDArray[Any]) -> NDArray[np.float32]:
        """A float32 copy of some examples of this set as a model wants them: `(x * scale - mean) / std`."""
        return _normalized(x, self.scale, self.mean, self.std)


@dataclass(frozen=True, kw_only=True, eq=False)
class Federation:
    """A data set dealt to clients: every training example belongs to exactly one of them."""

    name: str
    """The data set."""
    partition: str
    """How it was dealt."""
    x: NDArray[Any]
    """(n, ...) all training examples, in the data set's own order (shared with it, not copied)."""
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
    num_classes: int
    scale: float = 1.0
    mean: NDArray[np.float32] = field(default_factory=lambda: np.zeros(1, np.float32))
    std: NDArray[np.float32] = field(default_factory=lambda: np.ones(1, np.float32))
    features: NDArray[np.float32] | None = None
    """(N, F) oracle features, where the generator knows them."""
    stated_sizes: NDArray[np.float64] | None = None
    """(N,) sizes that stand in for the number of rows (the quadratic)."""
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
        """The rows of x and y that are one client's."""
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
        """The table policies see. `num_examples` is the full local size, hold-out and local test included."""

        def floats(values: NDArray[Any] | None) -> NDArray[np.float64] | None:
            return None if values is None else values.astype(np.float64)

        sizes = self.sizes if self.stated_sizes is None else self.stated_sizes
        return Clients(
            num_examples=sizes.astype(np.float64),
            label_histogram=floats(self.label_histogram),
            features=floats(self.features),
        )

    def packed(self) -> Federation:
        """The same federation with a copy of x and y in client order, so that `indices` is 0, 1, 2, ...

        Costs one copy of the data; then a client's rows are contiguous, and nothing needs the index array.
        """
        positions = np.arange(len(self.indices), dtype=self.indices.dtype)
        return replace(self, x=self.x[self.indices], y=self.y[self.indices], indices=positions)

    def normalized(self, x: NDArray[Any]) -> NDArray[np.float32]:
        """A float32 copy of some examples as a model wants them: `(x * scale - mean) / std`."""
        return _normalized(x, self.scale, self.mean, self.std)
