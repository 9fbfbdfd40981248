"""An append-only log of decisions: who took part, who was chosen, with which reports and weights.

One JSON object per line. Each line starts with a hash of its own text and of the hash before it, so that a changed,
lost or inserted line breaks the chain from there on:

    {"hash": "9f86d0...", "line": 3, "at": "2026-01-31T12:00:00Z", "kind": "choice", "round": 2, ...}

Anyone who can write the file can also compute the hashes of all later lines again, or cut lines off its end. Keep the
last hash elsewhere: adapters write it to their log after every round.

A line is on the disk before the round goes on. A process that is killed leaves at most a part of one line, without its
newline; the next run removes that part and says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedpick.core.errors import InvalidInput, StateFileError

if sys.platform != "win32":  # on Windows a second writer is not noticed
    import fcntl

__all__ = ["AuditLog", "Chain", "check", "open_log"]

_FIRST = "0" * 64
_LINE = re.compile(rb'\{"hash": "([0-9a-f]{64})", (.*\})\n', re.DOTALL)


@dataclass(frozen=True)
class Chain:
    """What `check` found: the unbroken beginning of a log, and what follows it."""

    lines: int = 0
    """The number of unbroken lines."""
    rounds: int = 0
    """The number of decisions in them."""
    hash: str = _FIRST
    """Of the last unbroken line."""
    size: int = 0
    """The bytes of the unbroken lines."""
    torn: bool = False
    """Whether a part of a line follows, which a kill leaves."""
    broken: bool = False
    """Whether a whole line follows that does not belong there."""

    @property
    def sentence(self) -> str:
        """What is wrong; empty if nothing is."""
        if self.broken:
            return f"Line {self.lines + 1} is broken: it was changed, inserted, or follows a line that is missing."
        if self.torn:
            return f"Line {self.lines + 1} is only partly written, as a kill leaves it. The next run removes that part."
        return ""


def _digest(before: str, body: bytes) -> str:
    return hashlib.sha256(before.encode() + body).hexdigest()


def check(path: str | Path) -> Chain:
    """Follow the chain of a log to its end, or to the first line that does not fit."""
    try:
        with Path(path).open("rb") as file:
            return _follow(file)
    except OSError as error:
        raise InvalidInput(
            f"The audit log {path} cannot be read: {error.strerror}. Name the file that was given as audit=."
        ) from error


def _follow(file: BinaryIO) -> Chain:
    lines, rounds, size, last = 0, 0, 0, _FIRST
    for line in file:
        found = _LINE.fullmatch(line)
        if found is None or found[1].decode() != _digest(last, b"{" + found[2]):
            torn = not line.endswith(b"\n")
            return Chain(lines, rounds, last, size, torn=torn, broken=not torn)
        lines, size, last = lines + 1, size + len(line), found[1].decode()
        rounds += b'"kind": "outcome"' in line[:200]
    return Chain(lines, rounds, last, size)


class AuditLog:
    """A log that is open for writing; it has one writer. `open_log` makes one.

    Args:
        path: of the file. It is created, or continued after its chain has been checked.
        log: where a repair, and the hash of the last line, are reported.
    """

    def __init__(self, path: str | Path, log: logging.Logger) -> None:
        self.path, self._log = Path(path), log
        try:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise InvalidInput(
                f"audit must be the path of a file that can be written. Got {str(path)!r}: {reason}. "
                "Choose another file."
            ) from error
        weakref.finalize(self, os.close, self._file)
        self._lock()
        chain = check(self.path)
        if chain.broken:
            raise StateFileError(
                f"The audit log {self.path} cannot be continued. {chain.sentence} Keep it as evidence, and choose "
                "another file."
            )
        if chain.torn:
            log.warning(
                "%s: line %d is only partly written, as a kill leaves it; it is removed.", path, chain.lines + 1
            )
            os.ftruncate(self._file, chain.size)
        os.lseek(self._file, chain.size, os.SEEK_SET)
        self.lines, self.hash = chain.lines, chain.hash

    def _lock(self) -> None:
        if sys.platform == "win32":
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StateFileError(
                f"Another process writes to the audit log {self.path}. End it first, or choose another file."
            ) from error
        except OSError:
            pass  # a file system without locks

    def is_current(self) -> bool:
        """Whether the path still names the file that is open, and nobody else has written to it."""
        with contextlib.suppress(OSError):
            here, there = os.fstat(self._file), self.path.stat()
            return os.path.samestat(here, there) and there.st_size == os.lseek(self._file, 0, os.SEEK_CUR)
        return False

    def write(self, kind: str, **fields: Any) -> None:
        """Append a line. It is on the disk when this returns; raise if it could not be written."""
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        content = {"line": self.lines + 1, "at": at, "kind": kind, **fields}
        body = json.dumps(_plain(content), allow_nan=False).encode()
        digest = _digest(self.hash, body)
        start, rest = os.lseek(self._file, 0, os.SEEK_CUR), b'{"hash": "%s", %s\n' % (digest.encode(), body[1:])
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fsync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):  # what was not written whole is not part of the log
                os.ftruncate(self._file, start)
                os.lseek(self._file, start, os.SEEK_SET)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.lines, self.hash = self.lines + 1, digest

    def note(self) -> None:
        """Report the last hash, so that it also stands elsewhere."""
        self._log.info("Audit log: %d lines, the last hash is %s.", self.lines, self.hash)


_logs: weakref.WeakValueDictionary[tuple[int, Path], AuditLog] = weakref.WeakValueDictionary()
"""The logs of this process. Its id is part of the key: a forked child has none."""


def open_log(path: str | Path, log: logging.Logger) -> AuditLog:
    """The log of this path. Several strategies of one process, one after another, write to the same."""
    key = (os.getpid(), Path(path).resolve())
    found = _logs.get(key)
    if found is None or not found.is_current():
        found = _logs[key] = AuditLog(path, log)
    return found


def _plain(value: Any) -> Any:
    """A value as JSON can hold it. NaN and infinities are null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else repr(value)
