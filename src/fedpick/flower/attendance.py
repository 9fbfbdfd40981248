"""Who is online, who they are, and who still owes an answer.

A SuperNode works on one message at a time. Whoever did not answer in time, whatever it was asked, is busy: it is not
asked again until the answer has come, so that one stuck client costs one deadline and not one in every round.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Message, MetricRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedpick.flower.exchange import attribute, questions
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
        facts = {node: _facts(reply) for node, reply in replies.items() if node in strangers and _is_there(reply)}
        if facts:
            self._admit(grid, facts, present)

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

    def _admit(self, grid: Grid, facts: Mapping[int, Mapping[str, Any]], online: Collection[int]) -> None:
        nodes = {node.node_id: node for node in grid.get_nodes()}
        newcomers = {node: (self._key_of(node, nodes.get(node), facts[node]), facts[node]) for node in facts}
        for old, new in self.roster.admit(newcomers):
            if old in online:
                _LOG.warning(
                    "Nodes %d and %d are both online as %r; %d speaks for it, the other one is left out. "
                    "Clients need different keys or partition ids.",
                    *(old, new, newcomers[new][0], new),
                )
        for node in facts:  # a restarted client starts afresh: what its old process owed will never come
            self._busy.pop(self.roster.index_of_node.get(node, -1), None)

    def _key_of(self, node_id: int, info: Any, facts: Mapping[str, Any]) -> str:
        if self._key is not None:
            return f"key:{self._key(info, facts)}"
        if name := getattr(info, "name", ""):
            return f"name:{name}"
        if "partition-id" in facts:
            return f"partition:{int(facts['partition-id'])}"
        return f"node:{node_id}"


def _is_there(reply: Message) -> bool:
    return not (reply.has_error() and reply.error.code in _NOT_THE_CLIENTS_WORD)


def _facts(reply: Message) -> Mapping[str, Any]:
    if reply.has_error():
        return {}
    record = reply.content.get("answer")
    return record if isinstance(record, MetricRecord) else {}
