"""Partitions: deal a data set to clients and split every client's share into train, validation and local test."""

from __future__ import annotations

import inspect
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.errors import InvalidInput, unknown_name
from fedpick.core.rng import Purpose, stream
from fedpick.core.validation import is_whole
from fedpick.data.dealers import Dealer, Iid, Natural, OneShard, Owners, Shards, Table, TwoLabels, TwoShards, deal_rows
from fedpick.data.dirichlet import Clustered, DirichletClass, DirichletLognormal, DirichletMixture, DirichletQP
from fedpick.data.types import Dataset, Federation

__all__ = ["OWN_CLIENTS", "Partition", "dealer_class", "describe_partition", "partition", "partition_names"]

_DEALERS: dict[str, type[Any]] = {
    "iid": Iid,
    "shards": Shards,
    "1spc": OneShard,
    "2spc": TwoShards,
    "dirichlet-qp": DirichletQP,
    "dirichlet-lognormal": DirichletLognormal,
    "dirichlet-class": DirichletClass,
    "dirichlet-mixture": DirichletMixture,
    "two-labels": TwoLabels,
    "clustered": Clustered,
    "natural": Natural,
    "table": Table,
}
_MOST_BYTES = 2**33
"""Of examples that a table may ask for: more would end in a lack of memory."""
OWN_CLIENTS = ("natural", "table")
"""Partitions that know their clients: they take no `num_clients`."""


def partition_names() -> tuple[str, ...]:
    """The names `partition` knows."""
    return tuple(sorted(_DEALERS))


def dealer_class(name: str) -> type[Any]:
    """The dealer behind a name: a dataclass whose fields are the options of the partition."""
    if name not in _DEALERS:
        raise unknown_name("partition", name, _DEALERS, "`fedpick list partitions` shows them all")
    return _DEALERS[name]


def describe_partition(name: str) -> str:
    """One line about a partition."""
    return (inspect.getdoc(dealer_class(name)) or "").partition("\n")[0]


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A dealer and how every client's share is split.

    `holdout` keeps the last share of every client's (shuffled) examples as validation data; FedCor's code uses 0.2.
    `split` gives the shares for train, validation and local test; Power-of-Choice has (0.8, 0.05, 0.15). Use one of the
    two. Shares are rounded down for train, and a client with any data trains on at least one example.
    """

    name: str
    """The registered name of the dealer."""
    dealer: Dealer | Table
    num_clients: int | None = None
    """Those of OWN_CLIENTS need none; every other one does."""
    holdout: float = 0.0
    split: tuple[float, float, float] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _shares(self.holdout, self.split)
        if isinstance(self.dealer, Table) and self.num_clients is not None:
            raise InvalidInput(
                f"The partition 'table' has the clients of its table. Got num_clients={self.num_clients}: leave it out."
            )
        if isinstance(self.dealer, (Natural, Table)):
            return
        if not is_whole(self.num_clients, 1):
            raise InvalidInput(
                f"The partition {self.name!r} needs num_clients, a whole number of at least 1. "
                f"Got {self.num_clients!r}."
            )
        if isinstance(self.dealer, Clustered):
            self.dealer.check_clients(int(self.num_clients or 0))

    @classmethod
    def named(
        cls,
        name: str,
        *,
        num_clients: int | None = None,
        holdout: float = 0.0,
        split: tuple[float, float, float] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Partition:
        """The partition with this registered name; `options` are those of its dealer."""
        dealer = dealer_class(name)
        known = [item.name for item in fields(dealer) if item.init]
        for option in options:
            if option not in known:
                offer = f"It has {', '.join(known)}." if known else "It has none."
                raise InvalidInput(f"The partition {name!r} has no option {option!r}. {offer}")
        return cls(
            name=name, dealer=dealer(**options), num_clients=num_clients, holdout=holdout, split=split, seed=seed
        )

    def deal(self, dataset: Dataset) -> Federation:
        """Deal the training examples of `dataset` to clients."""
        rng = stream(self.seed, 0, Purpose.PARTITION)
        if isinstance(self.dealer, Natural):
            owner = self._natural_owners(dataset, self.dealer, rng)
            return self._federation(dataset, *_rows_of(owner, int(owner.max()) + 1, rng))
        if not dataset.num_classes:
            raise InvalidInput(
                f"The data set {dataset.name!r} has no labels to deal by: use the partition 'natural', which keeps "
                f"its own clients. Got {self.name!r}."
            )
        if isinstance(self.dealer, Table):
            return self._from_table(dataset, self.dealer, rng)
        num_clients = int(self.num_clients or 0)
        owner = self.dealer.deal(dataset.train_y, num_clients, rng)
        return self._federation(dataset, *_rows_of(owner, num_clients, rng))

    def _natural_owners(self, dataset: Dataset, dealer: Natural, rng: np.random.Generator) -> Owners:
        if dataset.groups is None:
            raise InvalidInput(
                f"The data set {dataset.name!r} does not know the owners of its examples, so it has no natural "
                "partition: choose another one, or load it with owners (mnist: writers=PATH)."
            )
        owner = dealer.deal(dataset.groups, 0, rng)
        count = int(owner.max()) + 1
        if self.num_clients not in (None, count):
            raise InvalidInput(
                f"The natural partition of {dataset.name!r} has {count} clients. Got num_clients={self.num_clients}: "
                "leave it out, or choose the number when loading the data set."
            )
        return owner

    def _from_table(self, dataset: Dataset, dealer: Table, rng: np.random.Generator) -> Federation:
        """Deal exactly what a table asks for. The test set gets the labels of all clients together."""
        counts = dealer.counts(dataset.num_classes)
        size = 4.0 * counts.sum() * math.prod(dataset.shape)  # the simulator keeps every client's examples as float32
        if size > _MOST_BYTES:
            raise InvalidInput(
                f"{dealer.path} asks for {counts.sum():,} examples of {dataset.name!r}, {size / 2**30:,.0f} GiB, more "
                f"than {_MOST_BYTES / 2**30:g} GiB. Divide all counts by the same number."
            )
        by_label = counts.shape[1] > 1

        def classes(labels: NDArray[Any]) -> NDArray[Any]:
            return labels if by_label else np.zeros(len(labels), np.int32)

        rows = deal_rows(classes(dataset.train_y), counts, rng)
        offsets = np.concatenate([[0], np.cumsum(counts.sum(axis=1))])
        # Every client's rows in random order, so that each of its parts gets all labels.
        owners = np.repeat(np.arange(len(counts)), np.diff(offsets))
        rows = rows[np.lexsort([rng.random(len(rows)), owners])]
        if by_label and len(dataset.test_y):
            mix = _apportioned(counts.sum(axis=0), len(dataset.test_y))
            test = deal_rows(dataset.test_y, mix[None, :], rng)
            dataset = replace(dataset, test_x=dataset.test_x[test], test_y=dataset.test_y[test])
        return self._federation(dataset, rows, offsets)

    def _federation(self, dataset: Dataset, indices: NDArray[Any], offsets: NDArray[np.int64]) -> Federation:
        """Cut every client's range of rows."""
        natural = isinstance(self.dealer, Natural)
        train_ends, validation_ends = _cut(offsets, _shares(self.holdout, self.split))
        test_x, test_y = dataset.test_x, dataset.test_y
        if len(test_y) == 0 and (validation_ends < offsets[1:]).any():
            rows = indices[_positions(validation_ends, offsets[1:])]
            test_x, test_y = dataset.train_x[rows], dataset.train_y[rows]
        options: dict[str, Any] = asdict(self.dealer)  # type: ignore[arg-type]  # every dealer is a dataclass
        return Federation(
            name=dataset.name,
            partition=self.name,
            x=dataset.train_x,
            y=dataset.train_y,
            indices=indices,
            offsets=offsets,
            train_ends=train_ends,
            validation_ends=validation_ends,
            test_x=test_x,
            test_y=test_y,
            num_classes=dataset.num_classes,
            scale=dataset.scale,
            mean=dataset.mean,
            std=dataset.std,
            features=dataset.client_features if natural else None,
            stated_sizes=dataset.client_sizes if natural else None,
            group=self._groups(len(offsets) - 1),
            info={"seed": self.seed, "holdout": self.holdout, "split": self.split, **options},
        )

    def _groups(self, num_clients: int) -> NDArray[np.int64] | None:
        return self.dealer.groups(num_clients) if isinstance(self.dealer, (Clustered, DirichletMixture)) else None


def partition(dataset: Dataset, name: str, **options: Any) -> Federation:
    """Deal the training examples of `dataset` to clients.

    The options are `num_clients`, `holdout`, `split` and `seed` of `Partition`, and those of the partition with this
    name. The partition `natural` needs no `num_clients`.

    >>> from fedpick.data import load, partition
    >>> federation = partition(load("synthetic", num_clients=5), "natural", holdout=0.2)
    >>> federation.num_clients, bool((federation.sizes == federation.train_sizes + federation.validation_sizes).all())
    (5, True)
    """
    return Partition.named(name, **options).deal(dataset)


def _rows_of(owner: Owners, num_clients: int, rng: np.random.Generator) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Rows sorted by owner, each owner's in random order, and (N + 1,) where every owner's begin."""
    shuffled: NDArray[Any] = rng.permutation(len(owner))
    if len(owner) < 2**31:
        shuffled = shuffled.astype(np.int32)
    indices = shuffled[np.argsort(owner[shuffled], kind="stable")]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=num_clients))]).astype(np.int64)
    return indices, offsets


def _apportioned(counts: NDArray[np.int64], total: int) -> NDArray[np.int64]:
    """Whole numbers in proportion to the counts that sum to `total`, by largest remainders.

    >>> _apportioned(np.array([3, 3, 1]), 10)
    array([4, 4, 2])
    """
    shares = counts * (total / counts.sum())
    result: NDArray[np.int64] = np.floor(shares).astype(np.int64)
    result[np.argsort(result - shares, kind="stable")[: total - result.sum()]] += 1
    return result


def _shares(holdout: float, split: tuple[float, float, float] | None) -> tuple[float, float]:
    """The shares at which train and validation end."""
    if split is None:
        if not 0 <= holdout < 1:
            raise InvalidInput(f"holdout must be a share of at least 0 and less than 1. Got {holdout}.")
        return 1.0 - holdout, 1.0
    if holdout:
        raise InvalidInput(f"Give holdout or split, not both. Got holdout={holdout} and split={split}.")
    shares = np.asarray(split, dtype=np.float64)
    if shares.shape != (3,) or not (shares >= 0).all() or abs(shares.sum() - 1) > 1e-9 or shares[0] == 0:
        raise InvalidInput(
            f"split must be three shares (train, validation, test) that sum to 1, train above 0. Got {split}."
        )
    return float(shares[0]), float(shares[0] + shares[1])


def _cut(offsets: NDArray[np.int64], shares: tuple[float, float]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where every client's training and validation rows end."""
    starts, sizes = offsets[:-1], np.diff(offsets)
    # The small term keeps 0.8 of 600 at 480 where floating point says 479.999...
    train = np.maximum(np.floor(shares[0] * sizes + 1e-6).astype(np.int64), np.minimum(sizes, 1))
    validation = np.maximum(np.floor(shares[1] * sizes + 1e-6).astype(np.int64), train)
    return starts + train, starts + validation


def _positions(first: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.int64]:
    """All positions of the ranges first[k]:last[k], one after the other."""
    lengths = last - first
    begins = np.cumsum(lengths) - lengths
    return np.asarray(np.arange(lengths.sum()) + np.repeat(first - begins, lengths))
