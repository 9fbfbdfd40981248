"""Policy states: how their fields follow the clients, and how they are written to disk. Never pickle.

A state is a frozen dataclass whose fields are arrays or plain values (int, float, bool, str, None). How a field behaves
when the table of clients grows, and whether it is saved, is declared where it is born:

    counts: NDArray = per_client()            # one row per client
    embedding: NDArray = per_client(axis=1)   # clients along the second axis
    running: NDArray = derived()              # a function of the table alone: recomputed by init, never saved
    temperature: float                        # belongs to no client: carried over as it is
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedpick.core.errors import InvalidInput, StateFileError

__all__ = [
    "Stateless",
    "carry_over",
    "derived",
    "fingerprint",
    "join",
    "per_client",
    "read_directory",
    "split",
    "to_json",
    "write_atomically",
    "write_directory",
]

AnyState = TypeVar("AnyState")


@dataclass(frozen=True)
class Stateless:
    """The state of a policy that remembers nothing."""


_MANIFEST = "session.json"
_FORMAT = "fedpick-session"
_SCHEMA = 1
_AXIS = "fedpick.client_axis"
_DERIVED = "fedpick.derived"
# What a session writes, and what a crash may leave of it. Nothing else in the directory is ours to remove.
_OWN_ARRAYS = re.compile(r"(state-[0-9]{8,}|clients)-[0-9a-f]{16}\.npz")
_OWN_PARTIAL = re.compile(rf"({_OWN_ARRAYS.pattern}|{re.escape(_MANIFEST)})\.[0-9]+\.partial")


def per_client(axis: int = 0) -> Any:
    """A field with one entry per client along `axis`."""
    return field(metadata={_AXIS: axis})


def derived() -> Any:
    """A field that `init` computes from the table of clients alone: recomputed on load and growth, never saved."""
    return field(metadata={_DERIVED: True})


def carry_over(old: AnyState, fresh: AnyState) -> AnyState:
    """`fresh`, a state for a larger table, with everything `old` knew about the clients it had."""
    changes: dict[str, Any] = {}
    for item in fields(old):  # type: ignore[arg-type]
        if item.metadata.get(_DERIVED):
            continue
        value = getattr(old, item.name)
        axis = item.metadata.get(_AXIS)
        if axis is not None and value is not None:
            target = getattr(fresh, item.name)
            if target is None:
                raise InvalidInput(f"{type(old).__name__}.{item.name} is per client, but init left it None.")
            value = _rows_copied(value, np.array(target), axis)
        changes[item.name] = value
    return replace(fresh, **changes)  # type: ignore[type-var]


def _rows_copied(old: NDArray[Any], target: NDArray[Any], axis: int) -> NDArray[Any]:
    rows: list[slice] = [slice(None)] * target.ndim
    rows[axis] = slice(0, old.shape[axis])
    target[tuple(rows)] = old
    return target


def split(state: object) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The saved part of a state as (arrays, plain values)."""
    arrays: dict[str, NDArray[Any]] = {}
    plain: dict[str, Any] = {}
    for item in fields(state):  # type: ignore[arg-type]
        value = getattr(state, item.name)
        if item.metadata.get(_DERIVED):
            continue
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                raise InvalidInput(
                    f"{type(state).__name__}.{item.name} holds Python objects; a state holds numbers only."
                )
            arrays[item.name] = value
        elif value is None or isinstance(value, (bool, int, float, str)):
            plain[item.name] = value
        elif isinstance(value, np.generic):
            plain[item.name] = value.item()
        else:
            raise InvalidInput(
                f"{type(state).__name__}.{item.name} is a {type(value).__name__}; a state holds arrays, numbers, "
                "strings and None only, so that it can be saved without pickle."
            )
    return arrays, plain


def join(fresh: AnyState, arrays: Mapping[str, NDArray[Any]], plain: Mapping[str, Any]) -> AnyState:
    """`fresh` with every saved field put back; the inverse of `split`."""
    saved = {**arrays, **plain}
    wanted = {item.name for item in fields(fresh) if not item.metadata.get(_DERIVED)}  # type: ignore[arg-type]
    if wanted != set(saved):
        raise StateFileError(
            f"The saved state has the fields {sorted(saved)}, but {type(fresh).__name__} has {sorted(wanted)}: "
            "it was written by another version of this policy."
        )
    for item in fields(fresh):  # type: ignore[arg-type]
        axis, here = item.metadata.get(_AXIS), getattr(fresh, item.name)
        there = arrays.get(item.name)
        if axis is None or here is None or there is None:
            continue
        if there.ndim != here.ndim or there.shape[axis] != here.shape[axis]:
            raise StateFileError(
                f"The saved {type(fresh).__name__}.{item.name} has the shape {there.shape}, which is not for the "
                f"{here.shape[axis]} clients of this session. Restore it into a session with the same clients."
            )
    return replace(fresh, **saved)  # type: ignore[type-var]


def write_directory(path: Path, manifest: dict[str, Any], files: Mapping[str, Mapping[str, NDArray[Any]]]) -> None:
    """Write arrays and a manifest so that a reader finds either the previous state or this one, never a mixture.

    The names of array files must tell their content apart, so that no file of the previous manifest is overwritten with
    anything else; the manifest that names them is put in place last, by an atomic rename; only then are files of
    earlier states removed, known by their names. Whatever else is in the directory is the user's and stays.
    """
    text = to_json({"format": _FORMAT, "schema": _SCHEMA, **manifest})
    path.mkdir(parents=True, exist_ok=True)
    _refuse_foreign_manifest(path / _MANIFEST)
    for name, arrays in files.items():
        if name == manifest["clients_file"] and (path / name).exists():
            continue  # named by its content and renamed into place whole: already the same bytes
        write_atomically(path / name, _npz_bytes(arrays))
    write_atomically(path / _MANIFEST, text.encode())
    kept = {manifest["state_file"], manifest["clients_file"]}
    for file in path.iterdir():
        own = _OWN_ARRAYS.fullmatch(file.name) or _OWN_PARTIAL.fullmatch(file.name)
        if own and file.name not in kept and file.is_file():
            file.unlink(missing_ok=True)


def _refuse_foreign_manifest(file: Path) -> None:
    """Somebody else's session.json is not ours to overwrite. (A damaged one cannot be told from somebody else's.)"""
    if not file.exists():
        return
    try:
        found = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        found = None
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise StateFileError(
            f"{file} is there and is not a fedpick session, so it is not overwritten. Save to another directory."
        )


def to_json(value: Any) -> str:
    """JSON for a manifest; NumPy's numbers are numbers."""

    def plain(item: Any) -> Any:
        if isinstance(item, (np.generic, np.ndarray)):
            return item.tolist()
        raise InvalidInput(
            f"{item!r} cannot be saved: hyper-parameters of a policy that is saved are numbers, strings, lists or None."
        )

    return json.dumps(value, indent=1, allow_nan=True, default=plain)


def fingerprint(arrays: Mapping[str, NDArray[Any]]) -> str:
    """A short name for the content of some arrays."""
    digest = hashlib.blake2b(digest_size=8)
    for name, array in arrays.items():
        digest.update(f"{name}:{array.dtype}:{array.shape}:".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _npz_bytes(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def write_atomically(target: Path, content: bytes) -> None:
    """Put a whole file in place or none: a crash never leaves half of it, a full disk nothing at all."""
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def read_directory(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """The (manifest, state arrays, clients arrays) that `write_directory` wrote."""
    file = path / _MANIFEST
    try:
        manifest = json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StateFileError(
            f"There is no saved session in {path}: {_MANIFEST} is missing. Save one with Session.save."
        ) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise StateFileError(f"{file} is damaged or not a fedpick file: {error}.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise StateFileError(f"{file} is not a fedpick session: its 'format' is not {_FORMAT!r}.")
    if manifest.get("schema") != _SCHEMA:
        raise StateFileError(
            f"{file} has schema {manifest.get('schema')!r}; this version of fedpick reads schema {_SCHEMA}. "
            "Use the fedpick version that wrote it."
        )
    missing = {"policy", "parameters", "seed", "round", "report_limit", "plain", "state_file", "clients_file"} - set(
        manifest
    )
    if missing:
        raise StateFileError(f"{file} is damaged: it lacks {', '.join(map(repr, sorted(missing)))}.")
    return manifest, _read_npz(path / manifest["state_file"]), _read_npz(path / manifest["clients_file"])


def _read_npz(file: Path) -> dict[str, NDArray[Any]]:
    try:
        with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError as error:
        raise StateFileError(f"{file} is missing, though {_MANIFEST} names it.") from error
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise StateFileError(f"{file} is truncated or not a file of arrays: {error}.") from error
