"""Dealers: how examples are dealt to clients. `dirichlet` holds those that draw from Dirichlet distributions.

A dealer is a frozen dataclass of its options. `deal` gets the labels and returns `owners (n,)`, the client of every
example, so every example has exactly one owner by construction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedpick.core.errors import InvalidInput
from fedpick.core.validation import require, whole
from fedpick.data.client_table import read_clients

__all__ = [
    "Dealer",
    "Iid",
    "Natural",
    "OneShard",
    "Owners",
    "Shards",
    "Table",
    "TwoLabels",
    "TwoShards",
    "deal_counts",
    "deal_evenly",
    "deal_rows",
    "ensure",
    "fill_empty",
    "require_examples",
]

Owners = NDArray[np.int32]


class Dealer(Protocol):
    """What `fedpick.data.partition.Partition` needs of a dealer."""

    def deal(self, labels: NDArray[Any], num_clients: int, rng: np.random.Generator) -> Owners:
        """(n,) the client of every example."""
        ...


def ensure(condition: bool, message: str) -> None:
    """Raise InvalidInput with `message` unless the condition holds."""
    if not condition:
        raise InvalidInput(message)


def require_examples(num_examples: int, num_clients: int, per_client: int = 1) -> None:
    """Refuse more clients than the examples can serve."""
    ensure(
        num_clients * per_client <= num_examples,
        f"{num_clients} clients with at least {per_client} example(s) each need {num_clients * per_client} examples. "
        f"The data set has {num_examples}: use fewer clients.",
    )


def even_owners(num_examples: int, num_clients: int) -> Owners:
    """Position i of n goes to client floor(i N / n): contiguous runs whose sizes differ by at most one."""
    return (np.arange(num_examples, dtype=np.int64) * num_clients // num_examples).astype(np.int32)


def deal_evenly(num_examples: int, num_clients: int, rng: np.random.Generator) -> Owners:
    """Deal examples uniformly at random; the sizes differ by at most one."""
    require_examples(num_examples, num_clients)
    owner = np.empty(num_examples, dtype=np.int32)
    owner[rng.permutation(num_examples)] = even_owners(num_examples, num_clients)
    return owner


@dataclass(frozen=True, kw_only=True)
class Iid:
    """Examples dealt uniformly at random; the sizes differ by at most one."""

    def deal(self, labels: NDArray[Any], num_clients: int, rng: np.random.Generator) -> Owners:
        """(n,) the client of every example."""
        return deal_evenly(len(labels), num_clients, rng)


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Sorted by label, cut into equal shards, each client gets `shards_per_client` of them (McMahan et al. 2017)."""

    shards_per_client: int = 2

    def __post_init__(self) -> None:
        whole(self, "shards_per_client", 1)

    def deal(self, labels: NDArray[Any], num_clients: int, rng: np.random.Generator) -> Owners:
        """(n,) the client of every example."""
        count = num_clients * self.shards_per_client
        ensure(
            count <= len(labels),
            f"{num_clients} clients with {self.shards_per_client} shard(s) each need {count} shards, but there are "
            f"only {len(labels)} examples: use fewer clients or fewer shards.",
        )
        owner_of_shard = np.empty(count, dtype=np.int32)
        owner_of_shard[rng.permutation(count)] = np.arange(count, dtype=np.int32) // self.shards_per_client
        owner = np.empty(len(labels), dtype=np.int32)
        owner[np.argsort(labels, kind="stable")] = owner_of_shard[even_owners(len(labels), count)]
        return owner


@dataclass(frozen=True, kw_only=True)
class OneShard(Shards):
    """`shards` with one shard per client (FedCor's 1SPC)."""

    shards_per_client: int = field(default=1, init=False)


@dataclass(frozen=True, kw_only=True)
class TwoShards(Shards):
    """`shards` with two shards per client (FedCor's 2SPC)."""

    shards_per_client: int = field(default=2, init=False)


@dataclass(frozen=True, kw_only=True)
class TwoLabels:
    """Two different labels per client, balanced (FedGS on Fashion-MNIST).

    Every label gets a number of slots in proportion to its examples, two slots with different labels make a client, and
    a label's examples are spread evenly over its slots. With equally frequent labels, as in Fashion-MNIST, and slots
    that divide evenly, all clients have the same size.
    """

    def deal(self, labels: NDArray[Any], num_clients: int, rng: np.random.Generator) -> Owners:
        """(n,) the client of every example."""
        present, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
        ensure(len(present) >= 2, f"two-labels needs a data set with at least two labels. Got {len(present)}.")
        require_examples(len(labels), num_clients, per_client=2)
        ensure(
            2 * num_clients >= len(present),
            f"{num_clients} clients with two labels each cannot hold {len(present)} labels: "
            f"use at least {-(-len(present) // 2)} clients.",
        )
        slots = _slots_per_label(counts, num_clients)
        first, second = _pair_slots(slots, num_clients, rng)
        by_label = np.argsort(np.concatenate([first, second]), kind="stable")  # slot ids, label after label
        slot_owner = (by_label % num_clients).astype(np.int32)
        starts = np.concatenate([[0], np.cumsum(slots)])
        owner = np.empty(len(labels), dtype=np.int32)
        order = rng.permutation(len(labels))
        order = order[np.argsort(inverse[order], kind="stable")]
        ends = np.cumsum(counts)
        for label, (count, end) in enumerate(zip(counts, ends, strict=True)):
            holders = rng.permutation(slot_owner[starts[label] : starts[label + 1]])
            owner[order[end - count : end]] = holders[even_owners(count, len(holders))]
        return owner


def _slots_per_label(counts: NDArray[np.int64], num_clients: int) -> NDArray[np.int64]:
    """2 N slots in proportion to the counts, at least one per label, at most one per client or example."""
    most = np.minimum(counts, num_clients)
    ensure(
        int(most.sum()) >= 2 * num_clients,
        f"{num_clients} clients cannot get two different labels each: besides the most frequent label "
        f"there are only {int(counts.sum() - counts.max())} examples. Use at most that many clients.",
    )

    def slots(rate: float) -> NDArray[np.int64]:
        return np.asarray(np.clip(np.floor(counts * rate), 1, most), dtype=np.int64)

    low, high = 0.0, float(2 * num_clients)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if slots(middle).sum() <= 2 * num_clients else (low, middle)
    result = slots(low)
    while (missing := 2 * num_clients - int(result.sum())) > 0:
        room = np.flatnonzero(result < most)
        best = room[np.argsort(-counts[room] / (result[room] + 1), kind="stable")][:missing]
        result[best] += 1
    return result


def _pair_slots(
    slots: NDArray[np.int64], num_clients: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Two labels per client, random and never equal."""
    pool = np.repeat(np.arange(len(slots)), slots)
    # In label order a label's run is at most N long, so places i and i + N always differ: a valid start.
    client = rng.permutation(num_clients)
    first, second = pool[client], pool[client + num_clients]
    for _ in range(20):  # random swaps that keep the pairs valid mix it
        partner = rng.permutation(num_clients)
        half = num_clients // 2
        a, b = partner[:half], partner[half : 2 * half]
        allowed = (first[a] != second[b]) & (first[b] != second[a])
        a, b = a[allowed], b[allowed]
        second[a], second[b] = second[b], second[a]
        flip = rng.random(num_clients) < 0.5
        first, second = np.where(flip, second, first), np.where(flip, first, second)
    return first, second


@dataclass(frozen=True, kw_only=True)
class Natural:
    """One client per author, user or writer of the data set, in ascending order of their ids."""

    def deal(self, labels: NDArray[Any], num_clients: int, rng: np.random.Generator) -> Owners:
        """(n,) the client of every example; here the labels are the `groups` of the data set."""
        return np.unique(labels, return_inverse=True)[1].astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Clients with exactly the sizes and labels of a table (CSV or Parquet); examples are reused where too few."""

    path: str
    """The file; see `fedpick.data.client_table`."""

    def __post_init__(self) -> None:
        require(isinstance(self.path, str) and bool(self.path), self, "path", "the path of a CSV or Parquet file")

    def counts(self, num_classes: int) -> NDArray[np.int64]:
        """(N, L) how many examples of each class every client gets; (N, 1) if the table has no labels."""
        table = read_clients(self.path)
        if table.histogram is None:
            return table.num_examples[:, None]
        ensure(
            len(table.labels) <= num_classes,
            f"{self.path} has {len(table.labels)} labels, and the data set {num_classes} classes: choose a data set "
            "with at least as many, or merge labels.",
        )
        return table.histogram


def deal_rows(labels: NDArray[Any], counts: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """The rows of every client, one client after the other: `counts[k, label]` random examples of each label.

    Clients take the examples of a label in turns, in random order. Where they ask for more than there are, the
    examples are dealt again, so a client holds an example twice only if it asks for more of a label than there are.
    """
    num_clients, num_labels = counts.shape
    offsets = np.concatenate([[0], np.cumsum(counts.sum(axis=1))])
    places = offsets[:-1].copy()
    rows = np.empty(offsets[-1], dtype=np.int64)
    for label in range(num_labels):
        pool = rng.permutation(np.flatnonzero(labels == label))
        asked = counts[:, label]
        ensure(
            len(pool) > 0 or not asked.any(), f"The data set has no example of class {label}, which clients ask for."
        )
        order = rng.permutation(num_clients)
        begins = np.empty(num_clients, dtype=np.int64)
        begins[order] = np.cumsum(asked[order]) - asked[order]
        within = np.arange(asked.sum()) - np.repeat(np.cumsum(asked) - asked, asked)
        if len(within):
            rows[np.repeat(places, asked) + within] = pool[(np.repeat(begins, asked) + within) % len(pool)]
        places += asked
    return rows


def deal_counts(labels: NDArray[Any], counts: NDArray[np.int64], rng: np.random.Generator) -> Owners:
    """Deal `counts[k, label]` random examples of each label to client k; the leftovers to uniformly random clients.

    `counts` is (N, L) and must not ask for more examples of a label than there are.
    """
    num_clients, num_labels = counts.shape
    owner = np.full(len(labels), -1, dtype=np.int32)
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    starts = np.concatenate([[0], np.cumsum(np.bincount(labels, minlength=num_labels))])
    for label in range(num_labels):
        asked = np.repeat(np.arange(num_clients, dtype=np.int32), counts[:, label])
        owner[order[starts[label] : starts[label] + len(asked)]] = asked
    left = np.flatnonzero(owner < 0)
    owner[left] = rng.integers(num_clients, size=len(left), dtype=np.int32)
    return owner


def fill_empty(owner: Owners, num_clients: int, rng: np.random.Generator) -> Owners:
    """Give every client without data one example of a client that has more than one."""
    sizes = np.bincount(owner, minlength=num_clients)
    empty = np.flatnonzero(sizes == 0)
    if len(empty) == 0:
        return owner
    order = rng.permutation(len(owner))
    order = order[np.argsort(owner[order], kind="stable")]
    spare = np.ones(len(owner), dtype=np.bool_)
    spare[np.unique(owner[order], return_index=True)[1]] = False  # every client keeps its first
    owner = owner.copy()
    owner[rng.choice(order[spare], size=len(empty), replace=False)] = empty
    return owner
