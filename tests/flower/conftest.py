"""Flower's tests need Flower. Flower's own log is silenced, fedpick's lines in it are not."""

from __future__ import annotations

import logging

try:
    import flwr.common.logger  # noqa: F401  sets the level when it is first imported
except ImportError:
    collect_ignore_glob = ["test_*.py"]

logging.getLogger("flwr").setLevel(logging.ERROR)
logging.getLogger("flwr.fedpick").setLevel(logging.INFO)
