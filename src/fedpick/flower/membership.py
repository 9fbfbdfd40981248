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

import math
import reprlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Message, MetricRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedpick.core.checkpoint import pack, unpack
from fedpick.core.errors import MissingSignal, StateFileError, TrainingFailed
from fedpick.core.types import Clients
from fedpick.core.writing import write_atomically
from fedpick.flower.messages import LOG, count, is_count, node_infos, queries, reason_of, replies_by_node
from fedpick.flower.settings import KeyFunction, Settings

__all__ = ["ROSTER_FILE", "Membership", "Roster"]

ROSTER_FILE = "roster.npz"
_FORMAT = "fedpick-roster"
_PAUSES = (0.05, 1.0)
"""The first and the longest pause, in seconds, between two looks at the grid."""
_MAX_LABELS = 2**16
"""The largest width of a label histogram: with 1,000 clients the table takes half a gigabyte."""
# Error codes that the SuperLink writes for a node it cannot reach: message or reply unavailable, node unavailable.
_UNREACHABLE = {3, 4, 5}
_MOD_FAILED = 6
# What a ClientApp raises that has no function for a query, and one that is built from a client_fn.
_NO_FUNCTION = ("No query function registered", "Invalid message type")


def _size(value: Any) -> float | None:
    return float(value) if is_count(value) else None


def _histogram(value: Any) -> NDArray[np.float64] | None:
    if not isinstance(value, list) or not 0 < len(value) <= _MAX_LABELS or not all(map(is_count, value)):
        return None
    return np.array(value, dtype=np.float64)


def _partition(value: Any) -> int | None:
    return int(value) if is_count(value) and value == int(value) else None


_FIELDS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "num-examples": (_size, "a number of at least 0"),
    "label-histogram": (_histogram, f"a list of at most {_MAX_LABELS} numbers of at least 0"),
    "partition-id": (_partition, "a whole number of at least 0"),
}
"""Field of a description -> (its reader, which returns None for an unusable value; what it must be, in words)."""


@dataclass
class Roster:
    """Keys in the order of their index, what is known of each client, and the node that each client has now."""

    keys: list[str] = field(default_factory=list)
    num_examples: list[float] = field(default_factory=list)
    """NaN: not reported yet."""
    histograms: list[NDArray[np.float64] | None] = field(default_factory=list)
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
            if "num-examples" in fields:
                self.num_examples[index] = fields["num-examples"]
            if "label-histogram" in fields:
                self.histograms[index] = np.asarray(fields["label-histogram"], dtype=np.float64)
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
        known = np.array([row is not None and len(row) == width for row in self.histograms])
        table = np.empty((len(known), width))
        table[known] = [row for row, usable in zip(self.histograms, known, strict=True) if usable]
        table[~known] = table[known].mean(axis=0)
        return table

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
        rows = [np.empty(0) if row is None else row for row in self.histograms]
        arrays = {
            "num_examples": np.array(self.num_examples, dtype=np.float64),
            "widths": np.array([len(row) for row in rows], dtype=np.int64),
            "histograms": np.concatenate([np.empty(0), *rows]),
        }
        plain = {"format": _FORMAT, "schema": 1, "keys": self.keys}
        write_atomically(path / ROSTER_FILE, pack(arrays, plain), private=True)
        for file in path.glob(f"{ROSTER_FILE}.*.partial"):  # left by a crash
            if file.name.removeprefix(f"{ROSTER_FILE}.").removesuffix(".partial").isdecimal():
                file.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> Roster:
        """Read the roster that `save` wrote."""
        file = path / ROSTER_FILE
        try:
            arrays, plain = unpack(file.read_bytes(), str(file))
            if (plain["format"], plain["schema"]) != (_FORMAT, 1):
                raise StateFileError(f"{file} is not a roster that this version of fedpick reads.")
            keys, sizes, widths = list(map(str, plain["keys"])), arrays["num_examples"], arrays["widths"]
            rows = np.split(arrays["histograms"], np.cumsum(widths)[:-1]) if len(keys) else []
        except StateFileError as error:
            raise StateFileError(f"{error} Restore it, or choose another directory to start anew.") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateFileError(
                f"{file} is missing or is not a fedpick roster ({error!r}). Choose another directory to start anew."
            ) from error
        if not len(keys) == len(sizes) == len(rows):
            raise StateFileError(
                f"{file} is damaged: it has {len(keys)} keys, {len(sizes)} sizes and {len(rows)} histograms. "
                "Choose another directory to start anew."
            )
        histograms = [_histogram(row.tolist()) for row in rows]
        return cls(keys=keys, num_examples=[count(size) for size in sizes.tolist()], histograms=histograms)


def _natural(key: str) -> tuple[str, int, str]:
    """A sort key that puts partition 9 before partition 10."""
    kind, _, rest = key.partition(":")
    # isdigit accepts superscripts, which int refuses; int also refuses thousands of digits.
    return (kind, int(rest), "") if rest.isdecimal() and len(rest) < 20 else (kind, 0, rest)


class Membership:
    """Keeps the roster up to date with the grid.

    Args:
        roster: the clients known so far.
        settings: of `with_policy`.
        labels_for: the name of the policy if it needs label histograms; None: label histograms are not kept.
    """

    def __init__(self, roster: Roster, settings: Settings, *, labels_for: str | None) -> None:
        self.roster = roster
        self._settings = settings
        self._labels_for = labels_for
        self._ineligible: set[int] = set()  # nodes that may not take part
        self._busy: dict[int, str] = {}  # client index -> id of the message it has not answered
        self._asked: dict[int, str] = {}  # node id -> id of the describe query it has not answered
        self._answers: bool | None = None  # whether the ClientApp answers queries; None: not known yet
        self._mod_error = ""  # why a mod of the ClientApp rejected a query
        self._ambiguous: set[str] = set()  # keys that the user's function gave to several nodes at once
        self._odd: set[int] = set()  # indices of clients whose histogram has an odd width
        self._unusable_fields: set[str] = set()

    def refresh(self, grid: Grid) -> NDArray[np.bool_]:
        """Admit new nodes, free those that answered, and return the (N,) mask of the ready clients.

        Wait until `min_clients` have described themselves, at most `wait` seconds; then until one client is ready, at
        most `ready_timeout` seconds. A round is never spent on an empty mask.
        """
        settings, started = self._settings, time.monotonic()
        pause, longest = _PAUSES
        warn_after = settings.wait
        while True:
            online = self._update(grid)
            ready, members = self._ready(online), len(self.roster.indices(online))
            waited = time.monotonic() - started
            if ready.any() and members >= settings.min_clients:
                return ready
            if ready.any() and waited >= settings.wait:
                LOG.warning(
                    "Only %d of min_clients=%d clients are ready after %.0f s; the round starts without more.",
                    *(members, settings.min_clients, waited),
                )
                return ready
            if not ready.any() and waited >= settings.ready_timeout:
                raise TrainingFailed(
                    f"No client became ready within {waited:.0f} s: {self._state(online)}.\n\n"
                    "hint: start SuperNodes that are eligible, or raise ready_timeout to wait longer"
                )
            if not ready.any() and waited >= warn_after:
                LOG.warning("No client is ready after %.0f s: %s. Waiting.", waited, self._state(online))
                warn_after = 2 * waited
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _state(self, online: Sequence[int]) -> str:
        """Why no client is ready, in words."""
        described = self.roster.indices(online)
        ineligible = len(self._ineligible.intersection(online))
        state = f"{len(online)} nodes are online, {f'{ineligible} are not eligible, ' if ineligible else ''}"
        state += f"{len(described)} of them have described themselves"
        if described and self._lacks_labels():
            return f"{state}, but none with a usable label histogram, which {self._labels_for} needs"
        return f"{state}, and {sum(index in self._busy for index in described)} of these are busy"

    def _update(self, grid: Grid) -> list[int]:
        """Pull late replies, ask unknown nodes to describe themselves, and return the online nodes."""
        if self._busy:
            late = {message.metadata.reply_to_message_id for message in grid.pull_messages(set(self._busy.values()))}
            self._busy = {index: sent for index, sent in self._busy.items() if sent not in late}
        # Listed after the pull: a node whose end is among the replies must not count as ready.
        online = list(grid.get_node_ids())
        self._describe(grid, online)
        return online

    def _ready(self, online: Sequence[int]) -> NDArray[np.bool_]:
        """(N,) mask of the clients that are online and not busy; empty while a needed label histogram is missing."""
        mask = np.zeros(len(self.roster.keys), dtype=bool)
        indices = self.roster.indices(online)
        if not indices or self._lacks_labels():
            return mask
        mask[indices] = True
        mask[list(self._busy)] = False
        return mask

    def _lacks_labels(self) -> bool:
        """Whether label histograms are needed and none has come; raise if no client sends one."""
        if self._labels_for is None or any(row is not None for row in self.roster.histograms):
            return False
        if "label-histogram" in self._unusable_fields:
            return True  # clients do report it; a usable one may come
        hint = "report it with fedpick.flower.answer_probes(app, label_histogram=...), raise min_clients to wait for "
        hint += "clients that do, or choose a policy or options that do not need it"
        if self._mod_error:
            hint = f"{_MOD_HINT} The mod said: {self._mod_error}"
        raise MissingSignal(
            f"{self._labels_for} needs the clients' label histograms, but no client reported one.\n\nhint: {hint}"
        )

    @property
    def answers_queries(self) -> bool:
        """Whether the ClientApp answers queries, as far as known."""
        return self._answers is not False

    def busy_nodes(self) -> set[int]:
        """The nodes that have not answered a message yet."""
        return {self.roster.node_of[index] for index in self._busy if index in self.roster.node_of}

    def mark_busy(self, messages: Iterable[Message], answered: Collection[int]) -> None:
        """Mark the recipients of these messages busy, except for the nodes that answered."""
        for message in messages:
            node = message.metadata.dst_node_id
            if node not in answered and node in self.roster.index_of_node:
                self._busy[self.roster.index_of_node[node]] = message.metadata.message_id

    def _describe(self, grid: Grid, online: Sequence[int]) -> None:
        """Ask unknown nodes to describe themselves, and admit those that answered.

        A node that does not answer stays out until it does: under its node id it would remain in the table beside the
        client that it turns out to be. A node that answers with an error is identified by its node id.
        """
        present = set(online)
        unknown = dict.fromkeys(
            node for node in online if node not in self._ineligible and not self.roster.knows(node, present)
        )
        self._asked = {node: sent for node, sent in self._asked.items() if node in present}
        replies = self._late_descriptions(grid)
        self._learn_from_errors(replies)
        new = [node for node in unknown if node not in self._asked and node not in replies]
        members = len(self.roster.indices(online))
        if new and self._answers is not False and members and members >= self._settings.min_clients:
            self._send(grid, new)  # newcomers do not delay the round
            replies |= self._late_descriptions(grid)
        elif new and self._answers is None and len(new) > 1:
            # All nodes run one ClientApp. If it has no function for queries, one error tells it, with one traceback.
            replies |= self._exchange(grid, new[:1], self._settings.probe_timeout)
            new = new[1:]
            if self._answers is not False:
                replies |= self._exchange(grid, new, self._settings.probe_timeout)
                replies |= self._late_descriptions(grid)  # the first node may have answered meanwhile
        elif new and self._answers is not False:
            replies |= self._exchange(grid, new, self._settings.probe_timeout)
        reported = {node: _reported(reply) for node, reply in replies.items() if node in unknown and _reachable(reply)}
        if self._answers is False:
            reported |= {node: {} for node in unknown if node not in replies}
        if reported:
            self._admit(grid, reported, present)

    def _exchange(self, grid: Grid, nodes: Sequence[int], timeout: float) -> dict[int, Message]:
        """Send describe queries and wait for the replies."""
        messages = queries(nodes, {"kind": "describe"})
        replies = replies_by_node(messages, grid.send_and_receive(messages=messages, timeout=timeout))
        self._asked |= {
            message.metadata.dst_node_id: message.metadata.message_id
            for message in messages
            if message.metadata.dst_node_id not in replies
        }
        self._learn_from_errors(replies)
        return replies

    def _send(self, grid: Grid, nodes: Sequence[int]) -> None:
        """Send describe queries; a later `_update` pulls the replies."""
        messages = queries(nodes, {"kind": "describe"})
        list(grid.push_messages(messages))
        self._asked |= {message.metadata.dst_node_id: message.metadata.message_id for message in messages}

    def _learn_from_errors(self, replies: Mapping[int, Message]) -> None:
        """Note whether the ClientApp answers queries, and say why not, once."""
        for node, reply in replies.items():
            reason = reason_of(reply)
            if not reply.has_error():
                self._answers = True
            elif any(text in reason for text in _NO_FUNCTION):
                if self._answers is None:
                    LOG.info(
                        "The ClientApp does not use fedpick.flower.answer_probes, so clients are identified by their "
                        "node ids, and policies that query clients get no answer."
                    )
                self._answers = False
            elif reply.error.code == _MOD_FAILED:
                if not self._mod_error:
                    LOG.warning("A mod of the ClientApp rejected fedpick's query: %s. %s", reason, _MOD_HINT)
                self._mod_error = reason
            elif _reachable(reply):
                LOG.warning("Node %d could not describe itself: %s. Its node id identifies it.", node, reason)

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
        infos = {info.node_id: info for info in node_infos(grid)}
        usable, unusable = {}, {}
        for node, fields in reported.items():
            usable[node], unusable[node] = _usable_fields(fields)
        described = {
            node: (infos.get(node, SimpleNamespace(node_id=node, name="")), fields) for node, fields in usable.items()
        }
        keys = self._keys_of(described)
        for node, (info, fields) in described.items():
            if not self._is_eligible(keys[node], info, fields):
                LOG.info("%s is not eligible, and takes no part.", keys[node])
                self._ineligible.add(node)
                del usable[node]
        for node, names in unusable.items():
            self._warn_of_unusable(keys[node], reported[node], names)
        if self._labels_for is None:
            for fields in usable.values():
                fields.pop("label-histogram", None)
        for old, new in self.roster.admit({node: (keys[node], fields) for node, fields in usable.items()}):
            if old in online:
                LOG.warning(
                    "Nodes %d and %d are both online as %r. Node %d is used, the other one is left out. "
                    "Give each client its own key or partition id.",
                    *(old, new, keys[new], new),
                )
        for node in usable:  # after a restart the answer to an old message never comes
            self._busy.pop(self.roster.index_of_node.get(node, -1), None)
        self._warn_of_odd_histograms()

    def _is_eligible(self, key: str, info: Any, fields: Mapping[str, Any]) -> bool:
        eligible = self._settings.eligible
        if not callable(eligible):
            return eligible is None or key in eligible
        try:
            return bool(eligible(info, fields))
        except Exception:  # its input comes from clients: one of them must not end the federation
            LOG.exception("The eligible function failed for %s, which takes no part.", key)
            return False

    def _keys_of(self, described: Mapping[int, tuple[Any, Mapping[str, Any]]]) -> dict[int, str]:
        """Node id -> key. Nodes to which the user's function gives one key are identified by their node ids.

        All of them have just answered, so none is the dead predecessor of another.
        """
        keys = {node: self._key_of(node, info, fields) for node, (info, fields) in described.items()}
        if self._settings.key is None:
            return keys
        shared = {key for key, times in Counter(keys.values()).items() if times > 1} - self._ambiguous
        for key in sorted(shared):
            LOG.warning(
                "The key function gives %r to several nodes that are online: %s. These nodes are identified by their "
                "node ids, which do not survive a restart. Return a different key for each client.",
                *(key.removeprefix("key:"), reprlib.repr(sorted(node for node in keys if keys[node] == key))),
            )
        self._ambiguous |= shared
        return {node: f"node:{node}" if key in self._ambiguous else key for node, key in keys.items()}

    def _key_of(self, node_id: int, info: Any, fields: Mapping[str, Any]) -> str:
        if self._settings.key is not None:
            return self._users_key(self._settings.key, node_id, info, fields)
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
            LOG.exception("The key function failed for node %d, which is identified by its node id.", node_id)
            return f"node:{node_id}"
        if not text:
            LOG.warning(
                "The key function returned %r for node %d, which is identified by its node id instead. A node id does "
                "not survive a restart. Return a different key for each client.",
                *(value, node_id),
            )
            return f"node:{node_id}"
        return f"key:{text}"

    def _warn_of_unusable(self, key: str, reported: Mapping[str, Any], names: Iterable[str]) -> None:
        for name in names:
            self._unusable_fields.add(name)
            LOG.warning(
                "%s reported %s = %s, which counts as unknown: it must be %s.",
                *(key, name, reprlib.repr(reported[name]), _FIELDS[name][1]),
            )

    def _warn_of_odd_histograms(self) -> None:
        odd = self.roster.odd_histograms()
        for index in sorted(odd.keys() - self._odd):
            LOG.warning(
                "%s has a label-histogram of %d labels, but most clients have %d labels: it counts as unknown.",
                *(self.roster.keys[index], *odd[index]),
            )
        self._odd |= odd.keys()


_MOD_HINT = (
    "Mods in ClientApp(mods=[...]) also apply to fedpick's queries; give them to the train function alone: "
    "@app.train(mods=[...])."
)


def _reachable(reply: Message) -> bool:
    return not (reply.has_error() and reply.error.code in _UNREACHABLE)


def _reported(reply: Message) -> Mapping[str, Any]:
    if reply.has_error():
        return {}
    record = reply.content.get("answer")
    if isinstance(record, MetricRecord):
        return record
    LOG.warning("Node %d described itself without a MetricRecord: nothing is known of it.", reply.metadata.src_node_id)
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
