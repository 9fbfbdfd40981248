"""Files that a spec names: a run is identified by their content, not by their paths."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedpick.core.errors import InvalidInput
from fedpick.experiments.settings import alternatives
from fedpick.experiments.validation import options_of

__all__ = ["SECTIONS", "referenced_files", "refuse_changed_files"]

SECTIONS = ("data", "partition", "task", "availability", "devices")


def referenced_files(settings: Mapping[str, Any]) -> dict[str, str]:
    """ "section.key" -> SHA-256, for every option that takes a path and names a file (device logs, writers, tables)."""
    found: dict[str, str] = {}
    for section in SECTIONS:
        table = settings.get(section)
        if table is None:
            continue
        known = options_of(section, table["name"]) or []
        keys = [each.name for each in known if each.name == "path" or Path in alternatives(each.hint)]
        for key in keys:
            if isinstance(table.get(key), str) and (digest := _sha256(Path(table[key]))):
                found[f"{section}.{key}"] = digest
    return found


def refuse_changed_files(
    manifest: Mapping[str, Any], settings: Mapping[str, Any], sections: Iterable[str] = SECTIONS
) -> None:
    """Refuse to continue a run with other files than it was begun with. Older runs have no record of files and pass."""
    for name, begun in manifest.get("files", {}).items():
        section, _, key = name.partition(".")
        file = settings.get(section, {}).get(key)
        now = _sha256(Path(file)) if section in sections and isinstance(file, str) else None
        if now is not None and now != begun:
            raise InvalidInput(
                f"[{section}]: the file {file} is not the one this run was begun with: its SHA-256 was {begun[:12]}... "
                f"and is {now[:12]}... Put the first one back, give the new one another name, or start over with "
                "--restart."
            )


def _sha256(file: Path) -> str | None:
    """Of a file's content; None for a missing file: its reader has the better message."""
    if not file.is_file():
        return None
    facts = file.stat()
    return _digest(file.absolute(), facts.st_mtime_ns, facts.st_size, facts.st_ino)


@lru_cache(maxsize=16)
def _digest(file: Path, *_: int) -> str:
    """Cached by time, size and inode, so a large file is read once per process."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
