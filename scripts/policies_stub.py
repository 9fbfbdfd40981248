"""Write src/fedpick/policies/__init__.pyi: the names and hyper-parameters of `fedpick.policies.get`, for type checkers.

    python scripts/policies_stub.py

A literal name has an overload with the hyper-parameters of its policy. Any other text has none, so that a wrong
hyper-parameter of a known policy is an error. Run this after adding a policy or a hyper-parameter; a test compares.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from fedpick.core import registry

TARGET = Path(__file__).parents[1] / "src/fedpick/policies/__init__.pyi"


def overload_of(name: str) -> str:
    """The signature of `get` for one policy."""
    policy: Any = registry.load(name)
    types = {item.name: str(item.type).replace("'", '"') for item in fields(policy) if item.init}
    options = [f"    {option}: {written} = ...,\n" for option, written in types.items()]
    star = "    *,\n" if options else ""
    return f'@overload\ndef get(\n    name: Literal["{name}"],\n{star}{"".join(options)}) -> {policy.__name__}: ...\n'


def stub() -> str:
    """The whole file."""
    paths = [path.partition(":")[::2] for path in registry.BUILT_IN.values()]
    classes = sorted((name for _, name in paths), key=lambda name: (not name.isupper(), name))  # as ruff sorts them
    modules = {module: sorted(name for each, name in paths if each == module) for module, _ in sorted(paths)}
    imports = [f"from {module} import {', '.join(names)}" for module, names in modules.items()]
    listed = "".join(f'    "{each}",\n' for each in [*classes, "get", "names"])
    return "\n".join(
        [
            '"""Written by scripts/policies_stub.py. Do not edit."""\n',
            "from collections.abc import Sequence",
            "from typing import Any, Literal, overload\n",
            "from fedpick.core.policy import Policy",
            *imports,
            f"\n__all__ = [\n{listed}]\n",
            "".join(overload_of(name) for name in registry.BUILT_IN) + "@overload",
            "def get(name: str) -> Policy[Any]: ...",
            "def names() -> tuple[str, ...]: ...\n",
        ]
    )


if __name__ == "__main__":
    TARGET.write_text(stub())
