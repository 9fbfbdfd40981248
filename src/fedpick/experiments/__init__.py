"""Experiments: what to run (`spec`), where results go (`store`), how they come about (`runner`, `recorder`).

`Recorder` writes a training loop of the user to the store, `export` reads results as tables, `replay` sends them to
callbacks.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpick.experiments.exporting import export, replay
    from fedpick.experiments.recorder import Recorder

__all__ = ["DEFAULT_STORE", "Recorder", "export", "replay"]

# Here and not in `store`: the command line shows it, and must not wait for SQLAlchemy to do so.
DEFAULT_STORE = "results/fedpick.sqlite"
"""Where results go unless the user names another store."""

_HOMES = {"Recorder": "recorder", "export": "exporting", "replay": "exporting"}


def __getattr__(name: str) -> Any:
    # Import late, for the same reason.
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
