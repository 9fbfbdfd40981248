"""Trees of arrays in one .npz file, with a little JSON beside them. Never pickle."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedpick.core.errors import StateFileError
from fedpick.core.writing import write_atomically
from fedpick.sim.jax_engine.setup import require_jax

__all__ = ["read_checkpoint", "write_checkpoint"]

_FORMAT = "fedpick-simulator"
_SCHEMA = 1
_MANIFEST = "manifest"


def _named_leaves(trees: Mapping[str, Any]) -> dict[str, Any]:
    paths = require_jax().tree_util.tree_flatten_with_path(dict(trees))[0]
    return {"leaf" + require_jax().tree_util.keystr(path): leaf for path, leaf in paths}


def write_checkpoint(path: Path, trees: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    """Write trees of arrays and plain values; the file is replaced in one move."""
    manifest = json.dumps({"format": _FORMAT, "schema": _SCHEMA, "plain": dict(plain)})
    arrays = {name: np.asarray(leaf) for name, leaf in _named_leaves(trees).items()}
    arrays[_MANIFEST] = np.frombuffer(manifest.encode(), np.uint8)
    content = io.BytesIO()
    # NumPy's stub takes any keyword for its flag allow_pickle.
    np.savez(content, **arrays)  # type: ignore[arg-type]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content.getvalue())


def read_checkpoint(path: Path, like: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The (trees, plain values) that were written; the trees must have the structure and shapes of `like`."""
    try:
        # From memory: numpy leaves the file open when it turns out to be damaged.
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except FileNotFoundError as error:
        raise StateFileError(f"There is no saved simulator at {path}.") from error
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise StateFileError(f"{path} is truncated or not a file of arrays: {error}.") from error
    try:
        manifest = json.loads(arrays.pop(_MANIFEST).tobytes())
        known = manifest["format"] == _FORMAT
    except (KeyError, TypeError, ValueError) as error:
        raise StateFileError(f"{path} is not a saved simulator.") from error
    if not known or manifest["schema"] != _SCHEMA:
        raise StateFileError(f"{path} is not a saved simulator of schema {_SCHEMA}: {manifest.get('schema')!r}.")
    wanted = _named_leaves(like)
    fits = wanted.keys() == arrays.keys() and all(wanted[name].shape == arrays[name].shape for name in wanted)
    if not fits:
        raise StateFileError(
            f"{path} holds another model than this simulator's. Build the simulator with the settings of the saved one."
        )
    jax = require_jax()
    structure = jax.tree_util.tree_structure(dict(like))
    trees = jax.tree_util.tree_unflatten(structure, [jax.device_put(arrays[name]) for name in wanted])
    return trees, manifest["plain"]
