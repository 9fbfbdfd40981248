"""Flower's tests need Flower. Flower's own log is silenced, fedpick's lines in it are not."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace

import pytest

try:
    import flwr.common.logger  # noqa: F401  sets the level when it is first imported
except ImportError:
    collect_ignore_glob = ["test_*.py"]

logging.getLogger("flwr").setLevel(logging.ERROR)
logging.getLogger("flwr.fedpick").setLevel(logging.INFO)


class Clock:
    """Passes the time that a test sleeps at once."""

    def __init__(self) -> None:
        self.slept = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.slept

    def sleep(self, seconds: float) -> None:
        self.slept += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> Clock:
    """The time that passes while the adapter waits for replies."""
    clock = Clock()
    monkeypatch.setattr("fedpick.flower.messages.time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))
    return clock
