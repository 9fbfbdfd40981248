"""The selection policies: one paper, one file. `get` builds one by name, `names` lists them.

Their classes are here too: `from fedpick.policies import PowD`. Each is imported when it is first used. The types of
`get` are in `__init__.pyi`, which `scripts/policies_stub.py` writes.
"""

from __future__ import annotations

from typing import Any

from fedpick.core.registry import BUILT_IN, get, load, names

_CLASSES = {path.partition(":")[2]: name for name, path in BUILT_IN.items()}

__all__ = ["get", "names"]
__all__ += sorted(_CLASSES)


def __getattr__(name: str) -> Any:
    if name in _CLASSES:
        return load(_CLASSES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_CLASSES})
