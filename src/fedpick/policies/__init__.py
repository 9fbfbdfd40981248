"""The selection policies: one paper, one file. `get` builds one by name, `names` lists them."""

from fedpick.core.registry import get, names

__all__ = ["get", "names"]
