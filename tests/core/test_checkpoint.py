"""The checkpoint format: what comes back, what is refused."""

import io
import json
import zipfile
import zlib

import numpy as np
import pytest

from fedpick.core import checkpoint
from fedpick.core.errors import InvalidInput, StateFileError

ARRAYS = {
    "model/w": np.arange(6.0).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "empty": np.empty((0, 4), dtype=np.float32),
    "scalar": np.array(3, dtype=np.int8),
    "mask": np.array([True, False]),
    "names": np.array(["a", "bcd"]),
    "file": np.ones(1),
}
PLAIN = {"round": 3, "rate": 0.1, "limit": float("inf"), "note": "ü", "nested": {"list": [1, None, True]}}


def without_checksum(arrays, plain, save=np.savez):
    """A checkpoint as it was written before the checksum existed."""
    buffer = io.BytesIO()
    text = np.frombuffer(json.dumps(plain).encode(), dtype=np.uint8)
    save(buffer, **{f"array/{name}": value for name, value in arrays.items()}, plain=text)
    return buffer.getvalue()


def assert_equal(content):
    arrays, plain = checkpoint.unpack(content)
    assert plain == PLAIN
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array)


def test_what_is_packed_comes_back():
    content = checkpoint.pack(ARRAYS, PLAIN)
    assert content == checkpoint.pack(ARRAYS, PLAIN)
    assert_equal(content)
    with np.load(io.BytesIO(content)) as archive:
        np.testing.assert_array_equal(archive["array/model/w"], ARRAYS["model/w"])


def test_content_of_older_stores_is_read():
    assert_equal(without_checksum(ARRAYS, PLAIN))


def test_numbers_of_numpy_become_plain_and_objects_are_refused():
    content = checkpoint.pack({}, {"a": np.int64(3), "b": np.float32(0.5), "c": np.arange(2)})
    assert checkpoint.unpack(content) == ({}, {"a": 3, "b": 0.5, "c": [0, 1]})
    with pytest.raises(InvalidInput, match="cannot be saved"):
        checkpoint.pack({}, {"a": object()})
    with pytest.raises(InvalidInput, match="Python objects"):
        checkpoint.pack({"a": np.array([{}], dtype=object)}, {})


def test_every_flipped_bit_is_refused():
    content = checkpoint.pack({"counts": np.arange(3)}, {"round": 1})
    for position in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(StateFileError):
            checkpoint.unpack(bytes(flipped))


def test_every_truncation_is_refused():
    content = checkpoint.pack({"counts": np.arange(3)}, {"round": 1})
    for length in range(len(content)):
        with pytest.raises(StateFileError):
            checkpoint.unpack(content[:length])


def test_damage_without_a_checksum_is_refused_or_harmless():
    """The zip format's own CRC-32 notices damaged arrays; a quarter of the bits, names and dates, carry no content."""
    content = without_checksum({"counts": np.arange(3)}, {"round": 1})
    refused = 0
    for position in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[position // 8] ^= 1 << position % 8
        try:
            arrays, plain = checkpoint.unpack(bytes(flipped))
        except StateFileError:
            refused += 1
        else:
            assert [array.tolist() for array in arrays.values()] == [[0, 1, 2]]
            assert plain == {"round": 1}
    assert refused > 0.7 * 8 * len(content)


def test_a_bomb_is_not_unpacked():
    bomb = without_checksum({"zeros": np.zeros(10_000_000)}, {}, save=np.savez_compressed)
    assert len(bomb) < 200_000
    with pytest.raises(StateFileError, match=r"would expand from .* to 8000"):
        checkpoint.unpack(bomb)


def test_members_that_share_their_bytes_are_not_unpacked():
    """Two names for one member would double the memory with every further name."""
    buffer = io.BytesIO(without_checksum({"a": np.zeros(1000)}, {}))
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.filelist.extend([archive.getinfo("array/a.npy")] * 5)
        archive.writestr("array/b.npy", b"")
    with pytest.raises(StateFileError, match="would expand"):
        checkpoint.unpack(buffer.getvalue())


def test_a_header_cannot_declare_more_than_there_is():
    member = io.BytesIO()
    np.save(member, np.zeros(4))
    lie = member.getvalue().replace(b"(4,), }           ", b"(40000000000,), } ")
    assert len(lie) == len(member.getvalue())
    assert lie != member.getvalue()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("array/a.npy", lie)
    with pytest.raises(StateFileError, match=r"declares the shape \(40000000000,\)"):
        checkpoint.unpack(buffer.getvalue())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK nothing",
        b"\x80\x04pickle",
        zlib.compress(b"zeros"),
        without_checksum({}, [1, 2]),
        without_checksum({}, "text"),
        without_checksum({"a": np.array([{"b": 1}], dtype=object)}, {}),
    ],
)
def test_other_content_is_refused_by_name(content):
    with pytest.raises(StateFileError, match=r"^run/session\.npz is "):
        checkpoint.unpack(content, "run/session.npz")


def test_an_archive_of_other_arrays_is_refused():
    buffer = io.BytesIO()
    np.savez(buffer, model=np.ones(3), plain=np.frombuffer(b"{}", dtype=np.uint8))
    with pytest.raises(StateFileError, match="arrays named 'array/"):
        checkpoint.unpack(buffer.getvalue())
    buffer = io.BytesIO()
    np.savez(buffer, model=np.ones(3))
    with pytest.raises(StateFileError, match="not a checkpoint"):
        checkpoint.unpack(buffer.getvalue())
