"""Membership: which client a node is, what the client reported about itself, and which nodes are ready.

Policies work with dense client indices. A client keeps its index when its SuperNode restarts under another node id, as
long as its *key* stays the same. The key is, in this order: the result of the user's key function; the authenticated
name; the partition id that the client reports; the node id. (Without authentication a node's public key is as
short-lived as its node id.)

A SuperNode handles one message at a time. A node that did not answer in time, whatever the message, is busy: no further
message is sent to it until its answer arrives. One stuck client therefore costs one deadline, not one in every round.

Clients fail and lie. Nothing that a client reports may end the federation or change what is known of another client.
"""

from __future__ import annotations

import json
import logging
import math
import reprlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Message, MetricRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedpick.core.errors import StateFileError
from fedpick.core.types import Clients
from fedpick.core.writing import write_atomically
from fedpick.flower.messages import count, is_count, queries, replies_by_node

__all__ = ["KeyFunction", "Membership", "Roster"]

_LOG = logging.getLogger(__name__)
_FILE, _FORMAT = "roster.json", "fedpick-roster"
_POLL_SECONDS = 0.5
# Errors that the SuperLink writes for a node it cannot reach: message or reply unavailable, node unavailable.
_UNREACHABLE = {3, 4, 5}

KeyFunction = Callable[[Any, Mapping[str, Any]], "str | int"]
"""(NodeInfo, what the client reported) -> a key that stays the same when the node id does not."""


def _size(value: Any) -> float | None:
    return float(value) if is_count(value) else None


def _histogram(value: Any) -> list[float] | None:
    if not isinstance(value, list) or not value or not all(map(is_count, value)):
        return None
    return [float(entry) for entry in value]


def _partition(value: Any) -> int | None:
    return int(value) if is_count(value) and value == int(value) else None


_FIELDS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "num-examples": (_size, "a number of at least 0"),
    "label-histogram": (_histogram, "a list of numbers of at least 0"),
    "partition-id": (_partition, "a whole number of at least 0"),
}
"""Field of a description -> (its reader, which returns None for an unusable value; what it must be, in words)."""


@dataclass
class Roster:
    """Keys in the order of their index, what is known of each client, and the node that each client has now."""

    keys: list[str] = field(default_factory=list)
    num_examples: list[float] = field(default_factory=list)
    """NaN: not reported yet."""
    histograms: list[list[float] | None] = field(default_factory=list)
    node_of: dict[int, int] = field(default_factory=dict)
    """Index -> node id."""
    index_of_node: dict[int, int] = field(default_factory=dict)
    replaced: dict[int, int] = field(default_factory=dict)
    """Node id -> the client that has another node now."""

    def knows(self, node_id: int, online: Collection[int]) -> bool:
        """Whether the node is a client's, or was until a node with the same key came that is still online."""
        if node_id in self.index_of_node:
            return True
        return node_id in self.replaced and self.node_of[self.replaced[node_id]] in online

    def admit(self, described: Mapping[int, tuple[str, Mapping[str, Any]]]) -> list[tuple[int, int]]:
        """Add nodes: node id -> (key, usable fields). Sorted by key, so that the order of arrival does not matter.

        Returns (old node, new node) for every client that had another node before.
        """
        known = {key: index for index, key in enumerate(self.keys)}
        replacements: list[tuple[int, int]] = []
        for node_id, (key, fields) in sorted(described.items(), key=lambda item: (_natural(item[1][0]), item[0])):
            if key not in known:
                known[key] = len(self.keys)
                self.keys.append(key)
                self.num_examples.append(math.nan)
                self.histograms.append(None)
            index = known[key]
            if (size := _size(fields.get("num-examples"))) is not None:
                self.num_examples[index] = size
            if (histogram := _histogram(fields.get("label-histogram"))) is not None:
                self.histograms[index] = histogram
            if (old := self.node_of.get(index)) is not None and old != node_id:
                self.index_of_node.pop(old, None)
                self.replaced[old] = index
                replacements.append((old, node_id))
            self.replaced.pop(node_id, None)
            self.node_of[index] = node_id
            self.index_of_node[node_id] = index
        return replacements

    def clients(self) -> Clients:
        """The table for the policy; an unknown size is the mean of the known ones."""
        sizes = np.array(self.num_examples)
        known = sizes[np.isfinite(sizes)]
        sizes = np.where(np.isfinite(sizes), sizes, known.mean() if len(known) else 1.0)
        if not sizes.sum() > 0:
            sizes = np.ones(len(sizes))
        return Clients(num_examples=sizes, label_histogram=self._label_histogram())

    def _label_histogram(self) -> NDArray[np.float64] | None:
        """The reported histograms; an unknown one, or one of another width, is the mean of the others."""
        width = self._width()
        if width is None:
            return None
        mean = np.mean([row for row in self.histograms if row is not None and len(row) == width], axis=0)
        return np.array(
            [mean if row is None or len(row) != width else row for row in self.histograms], dtype=np.float64
        )

    def _width(self) -> int | None:
        """The number of labels that most clients count; of two equally frequent ones the first reported."""
        widths = Counter(len(row) for row in self.histograms if row is not None)
        return max(widths, key=lambda width: widths[width]) if widths else None

    def odd_histograms(self) -> dict[int, tuple[int, int]]:
        """Index -> (its number of labels, that of most clients), where the two differ."""
        width = self._width()
        return {
            index: (len(row), width)
            for index, row in enumerate(self.histograms)
            if row is not None and width is not None and len(row) != width
        }

    def indices(self, node_ids: Sequence[int]) -> list[int]:
        """The indices of those nodes that are in the roster."""
        return [self.index_of_node[node_id] for node_id in node_ids if node_id in self.index_of_node]

    def save(self, path: Path) -> None:
        """Write the roster. Rows are only ever added, so a roster newer than the policy's state does no harm."""
        path.mkdir(parents=True, exist_ok=True)
        rows = {"keys": self.keys, "num_examples": self.num_examples, "histograms": self.histograms}
        write_atomically(path / _FILE, json.dumps({"format": _FORMAT, "schema": 1, **rows}).encode())
        for file in path.glob(f"{_FILE}.*.partial"):  # left by a crash
            if file.name.removeprefix(f"{_FILE}.").removesuffix(".partial").isdecimal():
                file.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> Roster:
        """Read the roster that `save` wrote."""
        file = path / _FILE
        try:
            rows = json.loads(file.read_text())
            if rows["format"] != _FORMAT or rows["schema"] != 1:
                raise StateFileError(
                    f"{file} is not a roster that this version of fedpick reads. Choose another directory."
                )
            keys = [str(key) for key in rows["keys"]]
            sizes = [count(size) for size in rows["num_examples"]]
            histograms = [_histogram(row) for row in rows["histograms"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, StateFileError):
                raise
            raise StateFileError(
                f"{file} is missing, damaged or not a fedpick roster: {error!r}. Choose another directory."
            ) from error
        if not len(keys) == len(sizes) == len(histograms):
            raise StateFileError(f"{file} is damaged: it has {len(keys)} keys for {len(sizes)} sizes.")
        return cls(keys=keys, num_examples=sizes, histograms=histograms)


def _natural(key: str) -> tuple[str, int, str]:
    """A sort key that puts partition 9 before partition 10."""
    kind, _, rest = key.partition(":")
    # isdigit accepts superscripts, which int refuses; int also refuses thousands of digits.
    return (kind, int(rest), "") if rest.isdecimal() and len(rest) < 20 else (kind, 0, rest)


class Membership:
    """Keeps the roster up to date with the grid."""

    def __init__(
        self, roster: Roster, *, key: KeyFunction | None, min_clients: int, wait: float, probe_timeout: float
    ) -> None:
        self.roster = roster
        self._key, self._min_clients, self._wait, self._probe_timeout = key, min_clients, wait, probe_timeout
        self._busy: dict[int, str] = {}  # client index -> id of the message it has not answered
        self._asked: dict[int, str] = {}  # node id -> id of the describe query it has not answered
        self._ambiguous: set[str] = set()  # keys that the user's function gave to several nodes at once
        self._odd: set[int] = set()  # indices of clients whose histogram has an odd width
        self.unusable_fields: set[str] = set()
        """The fields for which a client reported an unusable value."""

    def refresh(self, grid: Grid) -> list[int]:
        """Wait for enough nodes, at most `wait` seconds; admit new nodes, free those that answered; return the online.

        A node is asked to describe itself before it becomes a client. A node that does not answer stays out until it
        does: under its node id it would remain in the table beside the client that it turns out to be.
        """
        deadline = time.monotonic() + self._wait
        while len(online := list(grid.get_node_ids())) < self._min_clients and time.monotonic() < deadline:
            time.sleep(min(_POLL_SECONDS, self._wait))
        if self._busy:
            late = {message.metadata.reply_to_message_id for message in grid.pull_messages(set(self._busy.values()))}
            self._busy = {index: sent for index, sent in self._busy.items() if sent not in late}
            # Listed after the pull: a node whose end is among the replies must not count as ready.
            online = list(grid.get_node_ids())
        self._describe(grid, online)
        return online

    def available(self, online: Iterable[int]) -> NDArray[np.bool_]:
        """(N,) mask of the clients that are online and not busy."""
        mask = np.zeros(len(self.roster.keys), dtype=bool)
        mask[self.roster.indices(list(online))] = True
        mask[list(self._busy)] = False
        return mask

    def busy_nodes(self) -> set[int]:
        """The nodes that have not answered a message yet."""
        return {self.roster.node_of[index] for index in self._busy if index in self.roster.node_of}

    def mark_busy(self, messages: Iterable[Message], answered: Collection[int]) -> None:
        """Mark the recipients of these messages busy, except for the nodes that answered."""
        for message in messages:
            node = message.metadata.dst_node_id
            if node not in answered and node in self.roster.index_of_node:
                self._busy[self.roster.index_of_node[node]] = message.metadata.message_id

    def _describe(self, grid: Grid, online: list[int]) -> None:
        """Ask unknown nodes to describe themselves, and admit those that answered.

        A node that answers with an error does not use `answer_probes`; its node id identifies it.
        """
        present = set(online)
        unknown = dict.fromkeys(node for node in online if not self.roster.knows(node, present))
        self._asked = {node: sent for node, sent in self._asked.items() if node in present}
        replies = self._late_descriptions(grid)
        if new := [node for node in unknown if node not in self._asked and node not in replies]:
            messages = queries(new, {"kind": "describe"})
            replies |= replies_by_node(messages, grid.send_and_receive(messages=messages, timeout=self._probe_timeout))
            for message in messages:
                if message.metadata.dst_node_id not in replies:
                    self._asked[message.metadata.dst_node_id] = message.metadata.message_id
        reported = {node: _reported(reply) for node, reply in replies.items() if node in unknown and _reachable(reply)}
        if reported:
            self._admit(grid, reported, present)

    def _late_descriptions(self, grid: Grid) -> dict[int, Message]:
        if not self._asked:
            return {}
        node_of = {sent: node for node, sent in self._asked.items()}
        replies = {
            node_of[reply.metadata.reply_to_message_id]: reply
            for reply in grid.pull_messages(set(node_of))
            if reply.metadata.reply_to_message_id in node_of
        }
        for node in replies:
            del self._asked[node]
        return replies

    def _admit(self, grid: Grid, reported: Mapping[int, Mapping[str, Any]], online: Collection[int]) -> None:
        nodes = {node.node_id: node for node in grid.get_nodes()}
        usable, unusable = {}, {}
        for node, fields in reported.items():
            usable[node], unusable[node] = _usable_fields(fields)
        keys = self._keys_of({node: (nodes.get(node), fields) for node, fields in usable.items()})
        for node, names in unusable.items():
            self._warn_of_unusable(keys[node], reported[node], names)
        for old, new in self.roster.admit({node: (keys[node], fields) for node, fields in usable.items()}):
            if old in online:
                _LOG.warning(
                    "Nodes %d and %d are both online as %r. Node %d is used, the other one is left out. "
                    "Give each client its own key or partition id.",
                    *(old, new, keys[new], new),
                )
        for node in usable:  # after a restart the answer to an old message never comes
            self._busy.pop(self.roster.index_of_node.get(node, -1), None)
        self._warn_of_odd_histograms()

    def _keys_of(self, described: Mapping[int, tuple[Any, Mapping[str, Any]]]) -> dict[int, str]:
        """Node id -> key. Nodes to which the user's function gives one key are identified by their node ids.

        All of them have just answered, so none is the dead predecessor of another.
        """
        keys = {node: self._key_of(node, info, fields) for node, (info, fields) in described.items()}
        if self._key is None:
            return keys
        shared = {key for key, times in Counter(keys.values()).items() if times > 1} - self._ambiguous
        for key in sorted(shared):
            _LOG.warning(
                "The key function gives %r to several nodes that are online: %s. These nodes are identified by their "
                "node ids, which do not survive a restart. Return a different key for each client.",
                *(key.removeprefix("key:"), reprlib.repr(sorted(node for node in keys if keys[node] == key))),
            )
        self._ambiguous |= shared
        return {node: f"node:{node}" if key in self._ambiguous else key for node, key in keys.items()}

    def _key_of(self, node_id: int, info: Any, fields: Mapping[str, Any]) -> str:
        if self._key is not None:
            return self._users_key(self._key, node_id, info, fields)
        if name := getattr(info, "name", ""):
            return f"name:{name}"
        if "partition-id" in fields:
            return f"partition:{fields['partition-id']}"
        return f"node:{node_id}"

    def _users_key(self, function: KeyFunction, node_id: int, info: Any, fields: Mapping[str, Any]) -> str:
        try:
            value = function(info, fields)
            text = "" if value is None else str(value)
        except Exception:  # its input comes from clients: one of them must not end the federation
            _LOG.exception("The key function failed for node %d, which is identified by its node id.", node_id)
            return f"node:{node_id}"
        if not text:
            _LOG.warning(
                "The key function returned %r for node %d, which is identified by its node id instead. A node id does "
                "not survive a restart. Return a different key for each client.",
                *(value, node_id),
            )
            return f"node:{node_id}"
        return f"key:{text}"

    def _warn_of_unusable(self, key: str, reported: Mapping[str, Any], names: Iterable[str]) -> None:
        for name in names:
            self.unusable_fields.add(name)
            _LOG.warning(
                "%s reported %s = %s, which counts as unknown: it must be %s.",
                *(key, name, reprlib.repr(reported[name]), _FIELDS[name][1]),
            )

    def _warn_of_odd_histograms(self) -> None:
        odd = self.roster.odd_histograms()
        for index in sorted(odd.keys() - self._odd):
            _LOG.warning(
                "%s has a label-histogram of %d labels, but most clients have %d labels: it counts as unknown.",
                *(self.roster.keys[index], *odd[index]),
            )
        self._odd |= odd.keys()


def _reachable(reply: Message) -> bool:
    return not (reply.has_error() and reply.error.code in _UNREACHABLE)


def _reported(reply: Message) -> Mapping[str, Any]:
    if reply.has_error():
        return {}
    record = reply.content.get("answer")
    if isinstance(record, MetricRecord):
        return record
    _LOG.warning("Node %d described itself without a MetricRecord: nothing is known of it.", reply.metadata.src_node_id)
    return {}


def _usable_fields(reported: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(The usable fields, the names of the unusable ones). Fields unknown to fedpick stay as they are."""
    usable: dict[str, Any] = {}
    unusable: list[str] = []
    for name, value in reported.items():
        read, _ = _FIELDS.get(name, (lambda value: value, ""))
        if (checked := read(value)) is None:
            unusable.append(name)
        else:
            usable[name] = checked
    return usable, unusable
