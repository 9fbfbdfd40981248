"""With what, where and when a run was made."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib import metadata
from typing import Any

import fedpick
from fedpick.experiments.encoding import utc_now

__all__ = ["new_manifest"]


def new_manifest(*packages: str, **facts: Any) -> dict[str, Any]:
    """Versions of Python, fedpick and these packages, the machine, the time, and further facts."""
    versions = {"fedpick": fedpick.__version__, "python": platform.python_version()}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    host = {
        "system": platform.platform(),
        "machine": platform.machine(),
        "processor": platform.processor(),
        "cores": os.cpu_count(),
    }
    return {"versions": versions, "host": host, "started_at": utc_now(), **facts}
