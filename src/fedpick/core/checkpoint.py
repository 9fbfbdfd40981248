"""The one checkpoint format: named arrays and a JSON object in one uncompressed .npz file. Never pickle.

    array/NAME   one member per array
    plain        the JSON object, as uint8
    (comment)    a BLAKE2b checksum of every byte before it, in the comment at the end of the zip archive

`numpy.load` reads the arrays of such a file. The checksum covers the raw bytes, not only the arrays: a single flipped
bit anywhere is noticed before the file is parsed. Content written before the checksum existed has no comment; it is
read without verification.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.errors import InvalidInput, StateFileError

__all__ = ["pack", "read_array", "to_json", "unpack"]

_ARRAY = "array/"
_PLAIN = "plain"
# A zip archive ends with a record of 22 bytes and the comment; the record's last two bytes are the comment's length.
_END_RECORD = b"PK\x05\x06"
_END_RECORD_SIZE = 22
_LABEL = b"fedpick-blake2b:"
_DIGITS = 64
_COMMENT_SIZE = len(_LABEL) + _DIGITS


def pack(arrays: Mapping[str, NDArray[Any]], plain: Mapping[str, Any]) -> bytes:
    """Return the content of a checkpoint file. Equal arguments give equal bytes."""
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise InvalidInput(f"The array {name!r} holds Python objects. A checkpoint holds numbers and strings only.")
    members: dict[str, Any] = {f"{_ARRAY}{name}": array for name, array in arrays.items()}
    members[_PLAIN] = np.frombuffer(to_json(plain).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **members)
    buffer.seek(-2, io.SEEK_END)
    buffer.write(_COMMENT_SIZE.to_bytes(2, "little"))
    buffer.write(_LABEL + _digest(buffer.getbuffer()))
    return buffer.getvalue()


def unpack(content: bytes, source: str = "The checkpoint") -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Return the (arrays, plain) of `pack`. Raise StateFileError, with the name of the `source`, if it is damaged."""
    _verify(content, source)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
            _refuse_bombs(members, len(content))
            found = {info.filename.removesuffix(".npy"): read_array(archive.read(info)) for info in members}
        plain = json.loads(found.pop(_PLAIN).tobytes())
    except Exception as error:  # zipfile, NumPy and json raise a dozen types for damaged bytes
        raise StateFileError(
            f"{source} is damaged or is not a checkpoint ({type(error).__name__}: {error})."
        ) from error
    if not isinstance(plain, dict) or not all(name.startswith(_ARRAY) for name in found):
        raise StateFileError(
            f"{source} is not a checkpoint: it must hold arrays named '{_ARRAY}...' and a JSON object."
        )
    return {name.removeprefix(_ARRAY): array for name, array in found.items()}, plain


def to_json(value: Any) -> str:
    """Return JSON in which NumPy's numbers and arrays are numbers and lists. NaN and Infinity are written as such."""
    return json.dumps(value, default=_plain_value)


def _plain_value(item: Any) -> Any:
    if isinstance(item, (np.generic, np.ndarray)):
        return item.tolist()
    raise InvalidInput(f"{item!r} cannot be saved. Plain values are numbers, strings, lists, tables and None.")


def _digest(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGITS // 2).hexdigest().encode()


def _verify(content: bytes, source: str) -> None:
    end = content[-_END_RECORD_SIZE:]
    if end.startswith(_END_RECORD) and end.endswith(b"\0\0"):
        return  # written before the checksum existed
    body, comment = memoryview(content)[:-_COMMENT_SIZE], content[-_COMMENT_SIZE:]
    if not comment.startswith(_LABEL):
        raise StateFileError(f"{source} is truncated, damaged or not a checkpoint: its checksum is missing.")
    if comment != _LABEL + _digest(body):
        raise StateFileError(f"{source} is damaged: its checksum does not match its content.")


def _refuse_bombs(members: list[zipfile.ZipInfo], size: int) -> None:
    """Raise if reading would take more memory than the file itself: checkpoints are not compressed."""
    compressed = any(info.compress_type != zipfile.ZIP_STORED for info in members)
    declared = sum(info.file_size for info in members)
    if compressed or declared > size:
        raise ValueError(f"it would expand from {size} to {declared} bytes; a checkpoint is not compressed")


def read_array(content: bytes) -> NDArray[Any]:
    """Return the array of a .npy file. Raise if its header declares other than the bytes that follow."""
    stream = io.BytesIO(content)
    version = np.lib.format.read_magic(stream)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(stream)
    if math.prod(shape) * dtype.itemsize != len(content) - stream.tell():
        raise ValueError(f"an array declares the shape {shape}, which its {len(content)} bytes do not hold")
    array: NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
    return array
