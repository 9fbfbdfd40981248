"""Who is online, who they are, and who still owes an answer.

A SuperNode works on one message at a time. Whoever did not answer in time, whatever it was asked, is busy: it is not
asked again until the answer has come, so that one stuck client costs one deadline and not one in every round.
"""

from __future__ import annotations

import logging
import reprlib
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Message, MetricRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedpick.flower.exchange import attribute, questions
from fedpick.flower.introduction import EXPECTED, checked_facts
from fedpick.flower.roster import KeyFunction, Roster

__all__ = ["Attendance"]

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.5
# Errors that the SuperLink makes for a node that cannot be reached: message or reply unavailable, node unavailable.
_NOT_THE_CLIENTS_WORD = {3, 4, 5}


class Attendance:
    """The roster, kept up to date with the grid."""

    def __init__(
        self, roster: Roster, *, key: KeyFunction | None, min_clients: int, wait: float, probe_timeout: float
    ) -> None:
        self.roster = roster
        self._key, self._min_clients, self._wait, self._probe_timeout = key, min_clients, wait, probe_timeout
        self._busy: dict[int, str] = {}  # client index -> the message it has not answered yet
        self._greeted: dict[int, str] = {}  # node id -> the question who it is, not answered yet
        self._ambiguous: set[str] = set()  # what the caller's key function gave to several nodes at once
        self._odd: set[int] = set()  # indices of clients whose histogram was found not to fit
        self.unusable_fields: set[str] = set()
        """The fields of introductions that somebody filled with what makes no sense."""

    def meet(self, grid: Grid) -> list[int]:
        """Wait, but not for ever, for enough nodes; learn who the new ones are and who has finished at last."""
        deadline = time.monotonic() + self._wait
        while len(online := list(grid.get_node_ids())) < self._min_clients and time.monotonic() < deadline:
            time.sleep(min(_POLL_SECONDS, self._wait))
        if self._busy:
            late = {message.metadata.reply_to_message_id for message in grid.pull_messages(set(self._busy.values()))}
            self._busy = {index: sent for index, sent in self._busy.items() if sent not in late}
            # Listed after the pull: a node whose end is among the replies must not be taken for one that is ready.
            online = list(grid.get_node_ids())
        self._introduce(grid, online)
        return online

    def available(self, online: Iterable[int]) -> NDArray[np.bool_]:
        """(N,) the mask of the clients that are online and owe nothing."""
        mask = np.zeros(len(self.roster.keys), dtype=bool)
        mask[self.roster.indices(list(online))] = True
        mask[list(self._busy)] = False
        return mask

    def busy_nodes(self) -> set[int]:
        """The nodes that owe an answer."""
        return {self.roster.node_of[index] for index in self._busy if index in self.roster.node_of}

    def note_silence(self, messages: Iterable[Message], answered: Collection[int]) -> None:
        """Whoever got one of these messages and is not among the nodes that answered is busy from now on."""
        for message in messages:
            node = message.metadata.dst_node_id
            if node not in answered and node in self.roster.index_of_node:
                self._busy[self.roster.index_of_node[node]] = message.metadata.message_id

    def _introduce(self, grid: Grid, online: list[int]) -> None:
        """Ask nodes that are not in the roster who they are.

        A node that says nothing is left out until it does: taken in under its node id, it would stay in the table as a
        client of its own beside the one that it turns out to be. A node that answers with an error knows nothing of
        fedpick, and its node id is all there is.
        """
        present = set(online)
        strangers = dict.fromkeys(node for node in online if not self.roster.speaks_or_is_spoken_for(node, present))
        self._greeted = {node: sent for node, sent in self._greeted.items() if node in present}
        replies = self._late_introductions(grid)
        if asked := [node for node in strangers if node not in self._greeted and node not in replies]:
            messages = questions(asked, {"kind": "hello"})
            replies |= attribute(messages, grid.send_and_receive(messages=messages, timeout=self._probe_timeout))
            for message in messages:
                if message.metadata.dst_node_id not in replies:
                    self._greeted[message.metadata.dst_node_id] = message.metadata.message_id
        reported = {node: _reported(reply) for node, reply in replies.items() if node in strangers and _is_there(reply)}
        if reported:
            self._admit(grid, reported, present)

    def _late_introductions(self, grid: Grid) -> dict[int, Message]:
        if not self._greeted:
            return {}
        node_of = {sent: node for node, sent in self._greeted.items()}
        replies = {
            node_of[reply.metadata.reply_to_message_id]: reply
            for reply in grid.pull_messages(set(node_of))
            if reply.metadata.reply_to_message_id in node_of
        }
        for node in replies:
            del self._greeted[node]
        return replies

    def _admit(self, grid: Grid, reported: Mapping[int, Mapping[str, Any]], online: Collection[int]) -> None:
        nodes = {node.node_id: node for node in grid.get_nodes()}
        checked = {node: checked_facts(record) for node, record in reported.items()}
        keys = self._keys_of({node: (nodes.get(node), facts) for node, (facts, _) in checked.items()})
        for node, (_, unusable) in checked.items():
            self._warn_of_unusable(keys[node], reported[node], unusable)
        for old, new in self.roster.admit({node: (keys[node], facts) for node, (facts, _) in checked.items()}):
            if old in online:
                _LOG.warning(
                    "Nodes %d and %d are both online as %r; %d speaks for it, the other one is left out. "
                    "Clients need different keys or partition ids.",
                    *(old, new, keys[new], new),
                )
        for node in checked:  # a restarted client starts afresh: what its old process owed will never come
            self._busy.pop(self.roster.index_of_node.get(node, -1), None)
        self._warn_of_odd_histograms()

    def _keys_of(self, newcomers: Mapping[int, tuple[Any, Mapping[str, Any]]]) -> dict[int, str]:
        """node id -> key. Nodes that the caller's function cannot tell apart are told apart by their node ids.

        All of them have just answered, so none is the dead predecessor of another one.
        """
        keys = {node: self._key_of(node, info, facts) for node, (info, facts) in newcomers.items()}
        if self._key is None:
            return keys
        shared = {key for key, count in Counter(keys.values()).items() if count > 1} - self._ambiguous
        for key in sorted(shared):
            _LOG.warning(
                "The key function gives %r to several nodes that are online: %s. Such nodes are known by their node "
                "ids, which do not survive a restart. Return a different key for each client.",
                *(key.removeprefix("key:"), reprlib.repr(sorted(node for node in keys if keys[node] == key))),
            )
        self._ambiguous |= shared
        return {node: f"node:{node}" if key in self._ambiguous else key for node, key in keys.items()}

    def _key_of(self, node_id: int, info: Any, facts: Mapping[str, Any]) -> str:
        if self._key is not None:
            return self._callers_key(node_id, info, facts)
        if name := getattr(info, "name", ""):
            return f"name:{name}"
        if "partition-id" in facts:
            return f"partition:{facts['partition-id']}"
        return f"node:{node_id}"

    def _callers_key(self, node_id: int, info: Any, facts: Mapping[str, Any]) -> str:
        assert self._key is not None
        try:
            value = self._key(info, facts)
            text = "" if value is None else str(value)
        except Exception:  # it works on what clients report: one of them must not end the federation
            _LOG.exception("The key function failed for node %d, which is known by its node id instead.", node_id)
            return f"node:{node_id}"
        if not text:
            _LOG.warning(
                "The key function gave %r for node %d, which is known by its node id instead; that does not survive a "
                "restart. Return a different key for each client.",
                *(value, node_id),
            )
            return f"node:{node_id}"
        return f"key:{text}"

    def _warn_of_unusable(self, key: str, reported: Mapping[str, Any], unusable: Iterable[str]) -> None:
        for name in unusable:
            self.unusable_fields.add(name)
            _LOG.warning(
                "%s introduced itself with %s = %s, which counts as unknown: it must be %s.",
                *(key, name, reprlib.repr(reported[name]), EXPECTED[name]),
            )

    def _warn_of_odd_histograms(self) -> None:
        odd = self.roster.odd_histograms()
        for index in sorted(odd.keys() - self._odd):
            _LOG.warning(
                "%s has a label-histogram of %d labels, but that of most clients has %d: it counts as unknown.",
                *(self.roster.keys[index], *odd[index]),
            )
        self._odd |= odd.keys()


def _is_there(reply: Message) -> bool:
    return not (reply.has_error() and reply.error.code in _NOT_THE_CLIENTS_WORD)


def _reported(reply: Message) -> Mapping[str, Any]:
    if reply.has_error():
        return {}
    record = reply.content.get("answer")
    if isinstance(record, MetricRecord):
        return record
    _LOG.warning(
        "Node %d introduced itself without a MetricRecord: nothing is known of it.", reply.metadata.src_node_id
    )
    return {}
