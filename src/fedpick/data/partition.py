"""`partition`: deal a data set to clients and split every client's share into train, validation and local test."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.errors import InvalidInput, unknown_name
from fedpick.core.rng import Purpose, stream
from fedpick.data.clusters import clustered
from fedpick.data.dealing import Owners, iid, natural, shards, two_labels
from fedpick.data.dirichlet import dirichlet_class, dirichlet_lognormal, dirichlet_qp
from fedpick.data.types import Dataset, Federation

__all__ = ["dealer_of", "describe_partition", "partition", "partition_names"]

_NATURAL = "natural"
_DEALERS: dict[str, Callable[..., Owners]] = {
    "iid": iid,
    "shards": shards,
    "1spc": partial(shards, shards_per_client=1),
    "2spc": partial(shards, shards_per_client=2),
    "dirichlet-qp": dirichlet_qp,
    "dirichlet-lognormal": dirichlet_lognormal,
    "dirichlet-class": dirichlet_class,
    "two-labels": two_labels,
    "clustered": clustered,
    _NATURAL: natural,
}
_ALIASES = {"1spc": "shards with one shard per client (FedCor's 1SPC)", "2spc": "shards with two shards per client"}


def partition_names() -> tuple[str, ...]:
    """The names `partition` knows."""
    return tuple(sorted(_DEALERS))


def describe_partition(name: str) -> str:
    """One line about a partition."""
    dealer = dealer_of(name)
    return _ALIASES.get(name) or (inspect.getdoc(dealer) or "").splitlines()[0]


def partition(
    dataset: Dataset,
    name: str,
    *,
    num_clients: int | None = None,
    seed: int = 0,
    holdout: float = 0.0,
    split: tuple[float, float, float] | None = None,
    **options: Any,
) -> Federation:
    """Deal the training examples of `dataset` to clients.

    `holdout` keeps the last share of every client's (shuffled) examples as validation data, FedCor's code uses 0.2;
    `split` gives shares for train, validation and local test, Power-of-Choice has (0.8, 0.05, 0.15). Use one of the
    two. Shares are rounded down for train, and a client with any data trains on at least one example. Further options
    are those of the partition. `natural` needs no `num_clients`; everything else does.

    >>> from fedpick.data import load, partition
    >>> federation = partition(load("synthetic", num_clients=5), "natural", holdout=0.2)
    >>> federation.num_clients, bool((federation.sizes == federation.train_sizes + federation.validation_sizes).all())
    (5, True)
    """
    dealer = dealer_of(name)
    shares = _shares(holdout, split)
    _check_options(name, dealer, options)
    rng = stream(seed, 0, Purpose.PARTITION)
    if name == _NATURAL:
        owner, count = _natural_owners(dataset, num_clients)
    else:
        if isinstance(num_clients, bool) or not isinstance(num_clients, (int, np.integer)) or num_clients < 1:
            raise InvalidInput(
                f"The partition {name!r} needs num_clients, a whole number of at least 1. Got {num_clients!r}."
            )
        if not dataset.num_classes:
            raise InvalidInput(
                f"The data set {dataset.name!r} has no labels to deal by: use the partition 'natural', which keeps "
                f"its own clients. Got {name!r}."
            )
        owner, count = dealer(dataset.train_y, int(num_clients), rng, **options), int(num_clients)
    info = {"seed": seed, "holdout": holdout, "split": split, **_defaults(dealer), **options}
    return _assemble(dataset, name, owner, count, shares, rng, info)


def dealer_of(name: str) -> Callable[..., Owners]:
    """The function behind a name; its keyword-only arguments are the options of the partition."""
    if name not in _DEALERS:
        raise unknown_name("partition", name, _DEALERS, "`fedpick list partitions` shows them all")
    return _DEALERS[name]


def _check_options(name: str, dealer: Callable[..., Owners], options: dict[str, Any]) -> None:
    known = [] if isinstance(dealer, partial) else _option_names(dealer)
    for option in options:
        if option not in known:
            offer = f"It has {', '.join(known)}." if known else "It has none."
            raise InvalidInput(f"The partition {name!r} has no option {option!r}. {offer}")


def _option_names(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]


def _defaults(dealer: Callable[..., Owners]) -> dict[str, Any]:
    parameters = inspect.signature(dealer).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}


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


def _natural_owners(dataset: Dataset, num_clients: int | None) -> tuple[Owners, int]:
    if dataset.groups is None:
        raise InvalidInput(
            f"The data set {dataset.name!r} does not know who its examples belong to, so it has no natural partition: "
            "choose another one, or load it with owners (mnist: writers=PATH)."
        )
    owner = natural(dataset.groups)
    count = int(owner.max()) + 1
    if num_clients not in (None, count):
        raise InvalidInput(
            f"The natural partition of {dataset.name!r} has {count} clients. Got num_clients={num_clients}: leave it "
            "out, or choose the number when loading the data set."
        )
    return owner, count


def _assemble(
    dataset: Dataset,
    name: str,
    owner: Owners,
    num_clients: int,
    shares: tuple[float, float],
    rng: np.random.Generator,
    info: dict[str, Any],
) -> Federation:
    """Sort the rows by owner, in random order within each, and cut every client's run."""
    shuffled: NDArray[Any] = rng.permutation(len(owner))
    if len(owner) < 2**31:
        shuffled = shuffled.astype(np.int32)
    indices = shuffled[np.argsort(owner[shuffled], kind="stable")]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=num_clients))]).astype(np.int64)
    train_ends, validation_ends = _cut(offsets, shares)
    test_x, test_y = dataset.test_x, dataset.test_y
    if len(test_y) == 0 and (validation_ends < offsets[1:]).any():
        rows = indices[_positions(validation_ends, offsets[1:])]
        test_x, test_y = dataset.train_x[rows], dataset.train_y[rows]
    is_natural = name == _NATURAL
    return Federation(
        name=dataset.name,
        partition=name,
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
        features=dataset.client_features if is_natural else None,
        stated_sizes=dataset.client_sizes if is_natural else None,
        info=info,
    )


def _cut(offsets: NDArray[np.int64], shares: tuple[float, float]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
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
