"""Flower's tests need Flower; its own log is silenced."""

from __future__ import annotations

import importlib.util
import logging

collect_ignore_glob = [] if importlib.util.find_spec("flwr") else ["test_*.py"]

logging.getLogger("flwr").setLevel(logging.ERROR)
