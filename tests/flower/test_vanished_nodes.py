"""What Flower's own grid and SuperLink do with messages to nodes that are gone: the adapter counts on it."""

from __future__ import annotations

import logging
import secrets
import time
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

import tests.flower.fake_grid  # noqa: F401  makes messages possible outside a run

try:  # Flower's internals, which move between releases
    from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
    from flwr.server.superlink.linkstate import LinkStateFactory
    from flwr.supercore.constant import NOOP_FEDERATION_ID
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.superlink.federation import NoOpFederationManager
    from flwr.superlink.grid.http_grid import HttpGrid
    from flwr.superlink.servicer.runtime import runtime_handlers as handlers
except ImportError as error:
    pytest.skip(f"this release of Flower is built otherwise: {error}", allow_module_level=True)

logging.getLogger("flwr").setLevel(logging.CRITICAL)

# Flower's own migrations of its database.
pytestmark = pytest.mark.filterwarnings("ignore:No path_separator found:DeprecationWarning")

LONG = 60.0  # a timeout that the test must not come near


class Client:
    """Flower's HTTP client without the HTTP: calls the SuperLink's handlers."""

    def __init__(self, state, run_id):
        self.state, self.task = state, SimpleNamespace(run_id=run_id)

    def __getattr__(self, name):
        handler = getattr(handlers, "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_"))
        return lambda request: handler(request, self.state, self.task)


@pytest.fixture(params=["memory", "sql"])
def superlink(request, tmp_path):
    """(state, grid): a real SuperLink's state, and Flower's deployment grid on top of it."""
    # A file: the grid pushes from several threads, and a database in memory may be another one in each of them.
    place = ":flwr-in-memory:" if request.param == "memory" else str(tmp_path / "state.db")
    store = ObjectStoreFactory(place)
    state = LinkStateFactory(place, NoOpFederationManager(), store).state()
    run_id = state.create_run(None, None, "hash", {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, "flwr-serverapp")
    before, TaskIdentity.run_id = TaskIdentity.run_id, run_id
    grid = HttpGrid(token="unused")
    grid._client = Client(state, run_id)
    grid.set_run(state.get_run_info(run_ids=[run_id])[0])
    yield state, grid
    TaskIdentity.run_id = before


def join(state) -> int:
    node = state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, secrets.token_bytes(32), heartbeat_interval=30)
    assert state.activate_node(node, 30)
    return node


def send(grid, nodes):
    messages = [Message(RecordDict({"config": ConfigRecord({"a": 1})}), node, "train") for node in nodes]
    started = time.monotonic()
    replies = list(grid.send_and_receive(messages, timeout=LONG))
    return messages, replies, time.monotonic() - started


def test_nobody_waits_for_nodes_that_unregistered(superlink):
    state, grid = superlink
    nodes = [join(state), join(state)]
    assert sorted(grid.get_node_ids()) == sorted(nodes)
    for node in nodes:
        state.delete_node(NOOP_FLWR_AID, node)
    messages, replies, seconds = send(grid, nodes)
    assert seconds < LONG / 4
    # The errors name no message, so that only the missing answer tells who failed ...
    assert {reply.metadata.reply_to_message_id for reply in replies} == {""}
    # ... and who asks later for the answer to one of the messages is told that there is none to come.
    (late,) = grid.pull_messages({messages[0].metadata.message_id})
    assert late.has_error() and late.metadata.reply_to_message_id == messages[0].metadata.message_id


def test_nobody_waits_for_nodes_that_are_known_to_be_offline(superlink):
    state, grid = superlink
    node = join(state)
    assert state.deactivate_node(node)
    (message,), (reply,), seconds = send(grid, [node])
    assert seconds < LONG / 4
    assert reply.error.code == 5 and reply.metadata.reply_to_message_id == message.metadata.message_id
    assert reply.metadata.src_node_id != node
