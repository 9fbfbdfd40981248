"""Files are written whole or not at all, and a directory of saved state has one writer.

A reader needs no lock: `write_atomically` renames a complete file into place, so it finds the old content or the new.
Two writers would overwrite each other's progress. `claim` therefore locks the directory for one process, until the
object that saves there is gone or the process ends. Sessions of one process share the lock: they run one after another.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from pathlib import Path

from fedpick.core.errors import InvalidInput, StateFileError

if sys.platform != "win32":  # on Windows files are still replaced atomically, but a second writer is not noticed
    import fcntl

__all__ = ["Claim", "claim", "refuse_directory", "write_atomically"]

_LOCK_FILE = "session.lock"


def refuse_directory(path: str | Path) -> Path:
    """Return the path of a file to write. Raise if it is a directory."""
    target = Path(path)
    if target.is_dir():
        raise InvalidInput(f"{target} is a directory. Name the file to write, such as {target / 'report.html'}.")
    return target


def write_atomically(path: str | Path, content: bytes | str, *, private: bool = False) -> Path:
    """Replace a file, create the directories above it and return its path. `private`: only its owner may read it.

    After a crash or on a full disk the file has its old content.
    """
    target = refuse_directory(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if private else 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except OSError as error:
        # The caller knows the target, not the temporary file.
        raise OSError(error.errno, error.strerror, str(target)) from error
    finally:
        partial.unlink(missing_ok=True)
    _sync_directory(target.parent)
    return target


def _sync_directory(directory: Path) -> None:
    """Make a rename survive a power failure, where directories can be opened (not on Windows)."""
    if os.name == "posix":
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Claim:
    """The lock on one directory, held by this process until the object is collected."""

    def __init__(self, directory: Path) -> None:
        self.writing = threading.Lock()
        """Held while a thread of this process writes."""
        self._file = directory / _LOCK_FILE
        if sys.platform == "win32":
            return
        self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
        weakref.finalize(self, os.close, self._descriptor)
        self._lock(directory)
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, str(os.getpid()).encode())

    def _lock(self, directory: Path) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(self._descriptor, 20).decode(errors="replace") or "unknown"
            raise StateFileError(
                f"Another process (id {owner}) saves its session in {directory}. "
                "Save to another directory, or end that process first."
            ) from error
        except OSError:
            pass  # a file system without locks: as on Windows

    def is_valid(self) -> bool:
        """Whether the lock file is still the one that was locked: the directory may have been deleted since."""
        if sys.platform == "win32":
            return True
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(self._file.stat(), os.fstat(self._descriptor))
        return False


_claims: weakref.WeakValueDictionary[tuple[int, Path], Claim] = weakref.WeakValueDictionary()
"""The claims of this process. Its id is part of the key: a forked child has no claim of its own."""
_held: weakref.WeakKeyDictionary[object, Claim] = weakref.WeakKeyDictionary()
"""What keeps a claim alive: one per holder. Kept here so that holders can be copied and pickled."""
_guard = threading.Lock()


def claim(directory: Path, holder: object) -> Claim:
    """Lock the directory for this process until `holder` is collected. Raise if another process has locked it."""
    key = (os.getpid(), directory.resolve())
    with _guard:
        found = _claims.get(key)
        if found is None or not found.is_valid():
            found = _claims[key] = Claim(directory)
        _held[holder] = found
    return found
