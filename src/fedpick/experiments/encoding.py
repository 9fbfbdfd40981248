"""How arrays and plain values become the bytes and texts of the store's columns, and back."""

from __future__ import annotations

import datetime
import io
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core import checkpoint
from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.core.errors import StateFileError

__all__ = [
    "LARGEST_ARRAY",
    "array_bytes",
    "bytes_array",
    "cell_text",
    "float_bytes",
    "floats_from",
    "from_json",
    "has_control_characters",
    "index_bytes",
    "indices_from",
    "mask_bytes",
    "mask_from",
    "masks_from",
    "split_diagnostics",
    "table_from_json",
    "to_json",
    "utc_now",
    "without_control_characters",
]

LARGEST_ARRAY = 4_000_000
"""Diagnostics with more bytes than this are not stored; their shape is noted instead."""
_LARGEST_STORED = 2**28  # the losses of 30 million clients
_SMALL = 512  # zlib expands by at most 1032: what is smaller needs no guard, and a guard takes longer than the work
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")  # tab and newline may pass


def index_bytes(values: IntArray) -> bytes:
    """Client indices as little-endian int32."""
    return values.astype("<i4").tobytes()


def indices_from(content: bytes) -> IntArray:
    """The inverse of `index_bytes`."""
    return np.frombuffer(content, dtype="<i4").astype(np.int64)


def float_bytes(values: NDArray[Any]) -> bytes:
    """Numbers as little-endian float64."""
    return np.asarray(values).astype("<f8").tobytes()


def floats_from(content: bytes) -> FloatArray:
    """The inverse of `float_bytes`."""
    return np.frombuffer(content, dtype="<f8").astype(np.float64)


def mask_bytes(mask: BoolArray) -> bytes | None:
    """One bit per client, packed and compressed; None: all clients."""
    return None if mask.all() else zlib.compress(np.packbits(mask).tobytes(), 6)


def mask_from(content: bytes | None, size: int) -> BoolArray:
    """The inverse of `mask_bytes`."""
    mask: BoolArray = masks_from([content], size)[0]
    return mask


def masks_from(contents: Sequence[bytes | None], size: int) -> BoolArray:
    """(B, size) the inverse of `mask_bytes`, row by row."""
    width = -(-size // 8)
    everybody = b"\xff" * width
    rows = [everybody if content is None else _decompressed(content, width) for content in contents]
    wrong = set(map(len, rows)) - {width}
    if wrong:
        raise StateFileError(f"The store is damaged: a mask of {8 * wrong.pop()} clients where there are {size}.")
    packed = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), width)
    return np.unpackbits(packed, axis=1, count=size).view(bool)


def array_bytes(array: NDArray[Any]) -> bytes:
    """Any array as a compressed .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(array), allow_pickle=False)
    return zlib.compress(buffer.getvalue(), 6)


def bytes_array(content: bytes) -> NDArray[Any]:
    """The inverse of `array_bytes`."""
    try:
        return checkpoint.read_array(_decompressed(content, limit=_LARGEST_STORED))
    except StateFileError:
        raise
    except Exception as error:  # NumPy raises a dozen types for a damaged header
        raise StateFileError(f"The store is damaged: an array in it cannot be read ({error}).") from error


def _decompressed(content: bytes, limit: int) -> bytes:
    """Decompress up to `limit` bytes; raise if there are more, so that a small row cannot fill the memory."""
    whole = True
    try:
        if len(content) <= _SMALL:
            found = zlib.decompress(content)
        else:
            reader = zlib.decompressobj()
            found, whole = reader.decompress(content, limit + 1), reader.eof
    except zlib.error as error:
        raise StateFileError(f"The store is damaged: an array in it cannot be read ({error}).") from error
    if len(found) > limit or not whole:
        raise StateFileError(f"The store is damaged: an array in it is cut off, or larger than {limit:,} bytes.")
    return found


def from_json(text: str) -> Any:
    """Parse a JSON column."""
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise StateFileError(f"The store is damaged: a text in it is not JSON ({error}).") from error


def table_from_json(text: str) -> dict[str, Any]:
    """Parse a JSON column that holds a table."""
    table = from_json(text)
    if not isinstance(table, dict):
        raise StateFileError(f"The store is damaged: a text in it is not a table ({text!r:.60}).")
    return table


def split_diagnostics(diagnostics: Mapping[str, Any]) -> tuple[str, dict[str, NDArray[Any]]]:
    """Return (JSON of the plain values, the arrays). NaN and infinity are written as null."""
    plain: dict[str, Any] = {}
    found: dict[str, NDArray[Any]] = {}
    for name, value in diagnostics.items():
        if isinstance(value, np.ndarray) and value.ndim > 0:
            if value.dtype.hasobject or value.nbytes > LARGEST_ARRAY:
                plain[name] = f"not stored: array of {value.dtype} with shape {value.shape}"
            else:
                found[name] = value
        else:
            plain[name] = _plain(value)
    return json.dumps(plain, sort_keys=True), found


def to_json(value: Any, *, sort_keys: bool = True, indent: int | None = None, finite: bool = True) -> str:
    """Write plain values and NumPy numbers as strict JSON: NaN and infinity as null, other objects as text.

    `finite=False` writes NaN and Infinity as such, which Python's reader accepts.
    """
    return json.dumps(_plain(value, finite), sort_keys=sort_keys, indent=indent, allow_nan=not finite)


def has_control_characters(text: str) -> bool:
    """Whether a text of one line holds characters that move a terminal's cursor, colour it or turn its direction."""
    return bool(_CONTROL.search(text)) or "\n" in text or "\t" in text


def without_control_characters(text: str) -> str:
    """Replace the characters that a terminal obeys instead of showing them.

    >>> without_control_characters("a\x1b[31mb")
    'a\ufffd[31mb'
    """
    return _CONTROL.sub("\ufffd", text)


def cell_text(text: str) -> str:
    """Quote a text that a spreadsheet would compute as a formula.

    >>> cell_text("=1+1")
    "'=1+1"
    """
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def utc_now() -> str:
    """The current time in UTC, in ISO format."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _plain(value: Any, finite: bool = True) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) or not finite else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, finite) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, finite) for item in value]
    return str(value)
