"""Putting a finished file in its place: all of it or nothing, and nothing left behind where that fails."""

from __future__ import annotations

import os
from pathlib import Path

from fedpick.core.errors import InvalidInput

__all__ = ["put_file", "refuse_directory"]


def refuse_directory(path: str | Path) -> Path:
    """The path, unless a directory stands where the file should go."""
    target = Path(path)
    if target.is_dir():
        raise InvalidInput(f"{target} is a directory. Name the file to write, such as {target / 'report.html'}.")
    return target


def put_file(path: str | Path, content: bytes | str) -> Path:
    """Write a file, with the directories above it. A reader, a crash or a full disk never meets half of it."""
    target = refuse_directory(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        unfinished.replace(target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return target
