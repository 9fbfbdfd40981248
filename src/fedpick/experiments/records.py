"""What crosses between a simulation and the store: one record per round, and how arrays become bytes."""

from __future__ import annotations

import datetime
import io
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import FloatArray
from fedpick.core.errors import StateFileError

__all__ = [
    "LARGEST_ARRAY",
    "RoundRecord",
    "array_bytes",
    "bytes_array",
    "float_bytes",
    "floats_from",
    "from_json",
    "index_bytes",
    "indices_from",
    "mask_bytes",
    "mask_from",
    "pack_checkpoint",
    "split_diagnostics",
    "to_json",
    "unpack_checkpoint",
    "utc_now",
]

LARGEST_ARRAY = 4_000_000
"""Policies' diagnostics with more bytes than this are not stored; their shape is noted instead."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundRecord:
    """One round, as it goes into the store."""

    index: int
    available: NDArray[np.bool_]
    """(N,)"""
    clients: NDArray[np.int64]
    """(k,) the cohort."""
    given_weights: FloatArray | None
    """(k,) as the policy gave them; None: it gave none."""
    weights: FloatArray
    """(k,) as they entered the model; 0 for those who did not complete."""
    completed: NDArray[np.bool_]
    loss: FloatArray
    train_loss: FloatArray
    duration: FloatArray
    update_norm: FloatArray
    counters: Mapping[str, int]
    """models_down, updates_up, scalars_up, bytes_down, bytes_up since the start, this round included."""
    seconds: Mapping[str, float]
    """select, measure, train, evaluate: this round alone."""
    test_accuracy: float | None = None
    test_loss: float | None = None
    objective: float | None = None
    """Everybody's loss, weighted by importance."""
    local_accuracy: float | None = None
    """On the clients' own test data, weighted by importance."""
    diagnostics: Mapping[str, Any] = field(default_factory=dict)
    """What the policy and the session had to say: numbers, texts, arrays."""
    evaluation: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Arrays measured for the record, such as the loss of every client."""


def index_bytes(values: NDArray[np.int64]) -> bytes:
    """Client indices as little-endian int32."""
    return values.astype("<i4").tobytes()


def indices_from(content: bytes) -> NDArray[np.int64]:
    """The inverse of `index_bytes`."""
    return np.frombuffer(content, dtype="<i4").astype(np.int64)


def float_bytes(values: NDArray[Any]) -> bytes:
    """Numbers as little-endian float64."""
    return np.asarray(values).astype("<f8").tobytes()


def floats_from(content: bytes) -> FloatArray:
    """The inverse of `float_bytes`."""
    return np.frombuffer(content, dtype="<f8").astype(np.float64)


def mask_bytes(mask: NDArray[np.bool_]) -> bytes | None:
    """One bit per client, packed and compressed; None: everybody."""
    return None if mask.all() else zlib.compress(np.packbits(mask).tobytes(), 6)


def mask_from(content: bytes | None, size: int) -> NDArray[np.bool_]:
    """The inverse of `mask_bytes`."""
    if content is None:
        return np.ones(size, dtype=bool)
    return np.unpackbits(np.frombuffer(_decompressed(content), dtype=np.uint8), count=size).astype(bool)


def array_bytes(array: NDArray[Any]) -> bytes:
    """Any array as a compressed .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(array), allow_pickle=False)
    return zlib.compress(buffer.getvalue(), 6)


def bytes_array(content: bytes) -> NDArray[Any]:
    """The inverse of `array_bytes`."""
    loaded: NDArray[Any] = np.load(io.BytesIO(_decompressed(content)), allow_pickle=False)
    return loaded


def _decompressed(content: bytes) -> bytes:
    try:
        return zlib.decompress(content)
    except zlib.error as error:
        raise StateFileError(f"The store is damaged: an array in it cannot be read ({error}).") from error


def from_json(text: str) -> Any:
    """A column of JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise StateFileError(f"The store is damaged: a text in it is not JSON ({error}).") from error


def split_diagnostics(diagnostics: Mapping[str, Any]) -> tuple[str, dict[str, NDArray[Any]]]:
    """(JSON of the plain values, the arrays). NaN and infinity become null: JSON has no word for them."""
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
    """Any nest of plain values and NumPy numbers as strict JSON; what JSON has no word for becomes null or text.

    `finite=False` keeps numbers that are not finite, as the words that Python's reader knows: Infinity, NaN.
    """
    return json.dumps(_plain(value, finite), sort_keys=sort_keys, indent=indent, allow_nan=not finite)


def utc_now() -> str:
    """The moment, for people."""
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


def pack_checkpoint(arrays: Mapping[str, NDArray[Any]], plain: Mapping[str, Any]) -> bytes:
    """Arrays and plain values as one .npz; never pickle."""
    buffer = io.BytesIO()
    text = np.frombuffer(json.dumps(plain).encode(), dtype=np.uint8)
    # NumPy's stub takes any further keyword for its flag allow_pickle.
    np.savez(buffer, **{f"array/{name}": value for name, value in arrays.items()}, plain=text)  # type: ignore[arg-type]
    return buffer.getvalue()


def unpack_checkpoint(content: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The inverse of `pack_checkpoint`."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            arrays = {name.removeprefix("array/"): archive[name] for name in archive.files if name != "plain"}
            return arrays, json.loads(archive["plain"].tobytes())
    except (ValueError, OSError, KeyError) as error:
        raise StateFileError(f"A checkpoint in the store is damaged: {error}. Run again with --restart.") from error
