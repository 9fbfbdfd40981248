"""Membership: ask Flower's nodes to describe themselves, and know which of them have not answered a message yet.

A SuperNode handles one message at a time. A node that did not answer in time, whatever the message, is busy: no further
message is sent to it until its answer arrives, or until it has left and come back. Without authentication a node's
public key is as short-lived as its node id, so it is no identity. With authentication both survive a restart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedpick.adapter.members import Members, Roster
from fedpick.adapter.settings import Settings
from fedpick.flower.messages import LOG, node_infos, queries, reason_of, replies_by_node

__all__ = ["Membership"]

# Error codes that the SuperLink writes for a node it cannot reach: message or reply unavailable, node unavailable.
_UNREACHABLE = {3, 4, 5}
_MOD_FAILED = 6
# What a ClientApp raises that has no function for a query, and one that is built from a client_fn.
_NO_FUNCTION = ("No query function registered", "Invalid message type")
_MOD_HINT = (
    "Mods in ClientApp(mods=[...]) also apply to fedpick's queries; give them to the train function alone: "
    "@app.train(mods=[...])."
)


class Membership(Members):
    """Keeps the roster up to date with the grid; see `Members` for the arguments."""

    def __init__(self, roster: Roster, settings: Settings, *, labels_for: str | None) -> None:
        super().__init__(roster, settings, labels_for=labels_for)
        self._asked: dict[int, str] = {}  # node id -> id of the describe query it has not answered
        self._activated: dict[int, str] = {}  # node id -> when it last came online, as the SuperLink says
        self._answers: bool | None = None  # whether the ClientApp answers queries; None: not known yet
        self._mod_error = ""  # why a mod of the ClientApp rejected a query

    def refresh(self, grid: Grid) -> NDArray[np.bool_]:
        """Admit new nodes, free those that answered, wait, and return the (N,) mask of the ready clients."""
        return self.wait_until_ready(lambda: self._update(grid))

    @property
    def labels_hint(self) -> str:
        """What to do if no client reports a label histogram."""
        if self._mod_error:
            return f"{_MOD_HINT} The mod said: {self._mod_error}"
        return (
            "report it with fedpick.flower.answer_probes(app, label_histogram=...), raise min_clients to wait for "
            "clients that do, or choose a policy or options that do not need it"
        )

    def _update(self, grid: Grid) -> list[int]:
        """Pull late replies, ask unknown nodes to describe themselves, and return the online nodes."""
        if self.busy:
            late = {message.metadata.reply_to_message_id for message in grid.pull_messages(set(self.busy.values()))}
            self.busy = {index: sent for index, sent in self.busy.items() if sent not in late}
        # Listed after the pull: a node whose end is among the replies must not count as ready.
        infos = node_infos(grid)
        online = [info.node_id for info in infos] or list(grid.get_node_ids())
        self._forget_messages_to(self._restarted(infos))
        self._describe(grid, online)
        return online

    def _restarted(self, infos: Iterable[Any]) -> set[int]:
        """The nodes that left and came back since the last look; with a registered key they keep their node ids."""
        activated = {info.node_id: getattr(info, "last_activated_at", "") for info in infos}
        restarted = {node for node, at in activated.items() if self._activated.get(node, at) != at}
        self._activated |= activated
        return restarted

    def _forget_messages_to(self, nodes: Collection[int]) -> None:
        """Expect no answers from these nodes: the SuperLink neither sends a message twice nor answers in their place.

        It does answer with an error while a node is offline, but a restart can be over before the next look.
        """
        self.busy = {index: sent for index, sent in self.busy.items() if self.roster.node_of.get(index) not in nodes}
        self._asked = {node: sent for node, sent in self._asked.items() if node not in nodes}

    @property
    def answers_queries(self) -> bool:
        """Whether the ClientApp answers queries, as far as known."""
        return self._answers is not False

    def busy_nodes(self) -> set[int]:
        """The nodes that have not answered a message yet."""
        return {self.roster.node_of[index] for index in self.busy if index in self.roster.node_of}

    def mark_busy(self, messages: Iterable[Message], answered: Collection[int]) -> None:
        """Mark the recipients of these messages busy, except for the nodes that answered."""
        for message in messages:
            node = message.metadata.dst_node_id
            if node not in answered and node in self.roster.index_of_node:
                self.busy[self.roster.index_of_node[node]] = message.metadata.message_id

    def _describe(self, grid: Grid, online: Sequence[int]) -> None:
        """Ask unknown nodes to describe themselves, and admit those that answered.

        A node that does not answer stays out until it does: under its node id it would remain in the table beside the
        client that it turns out to be. A node that answers with an error is identified by its node id.
        """
        present = set(online)
        unknown = dict.fromkeys(
            node for node in online if node not in self.ineligible and not self.roster.knows(node, present)
        )
        self._asked = {node: sent for node, sent in self._asked.items() if node in present}
        replies = self._late_descriptions(grid)
        self._learn_from_errors(replies)
        new = [node for node in unknown if node not in self._asked and node not in replies]
        members = len(self.roster.indices(online))
        if new and self._answers is not False and members and members >= self.settings.min_clients:
            self._send(grid, new)  # newcomers do not delay the round
            replies |= self._late_descriptions(grid)
        elif new and self._answers is None and len(new) > 1:
            # All nodes run one ClientApp. If it has no function for queries, one error tells it, with one traceback.
            # The one that is asked first may be dead, so the others soon follow.
            replies |= self._exchange(grid, new[:1], self.settings.probe_timeout / 4)
            new = new[1:]
            if self._answers is not False:
                replies |= self._exchange(grid, new, self.settings.probe_timeout)
                replies |= self._late_descriptions(grid)  # the first node may have answered meanwhile
        elif new and self._answers is not False:
            replies |= self._exchange(grid, new, self.settings.probe_timeout)
        reported = {node: _reported(reply) for node, reply in replies.items() if node in unknown and _reachable(reply)}
        if self._answers is False:
            reported |= {node: {} for node in unknown if node not in replies}
        if reported:
            self.admit(reported, {info.node_id: info for info in node_infos(grid)}, present)

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


def _reachable(reply: Message) -> bool:
    return not (reply.has_error() and reply.error.code in _UNREACHABLE)


def _reported(reply: Message) -> Mapping[str, Any]:
    if reply.has_error():
        return {}
    record, facts = reply.content.get("answer"), reply.content.get("facts")
    if isinstance(record, MetricRecord):
        return {**(facts if isinstance(facts, ConfigRecord) else {}), **record}
    LOG.warning("Node %d described itself without a MetricRecord: nothing is known of it.", reply.metadata.src_node_id)
    return {}
