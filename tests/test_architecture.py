"""The shape of the code base: which part may import which, what is public, and what an import costs."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import fedpick

SOURCE = Path(fedpick.__file__).parent

# Each part and the parts of fedpick it may import. A module not named here belongs to the part of its first folder.
MAY_IMPORT = {
    "core": set(),
    "availability": {"core"},
    "policies": {"core", "availability"},
    "testing": {"core"},
    "theory": {"core", "policies"},
    "private": {"core"},
    "callbacks": {"core"},
    "data": {"core", "availability"},
    "sim": {"core", "availability", "data", "policies"},
    "experiments": {"core", "availability", "data", "policies", "sim", "testing", "theory"},
    "report": {"core", "availability", "data", "policies", "sim", "experiments", "theory"},
    "advice": {"core", "availability", "data", "policies", "sim", "experiments", "report"},
    "adapter": {"core"},
    "dashboard": {"core", "experiments", "report"},
    "flower": {"core", "policies", "adapter"},
    "nvflare": {"core", "adapter"},
    "__main__": {"cli"},
    "cli": {
        *("core", "availability", "data", "policies", "sim", "experiments", "report", "testing", "flower", "dashboard"),
        *("theory", "private", "advice", "adapter"),
    },
}
HEAVY = {"jax", "flwr", "nvflare", "pandas", "matplotlib", "plotly", "sqlalchemy", "ray", "torch", "sklearn"}
LIGHT_PARTS = {"core", "policies", "availability", "testing", "adapter"}

MODULES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Every module imported anywhere in the file, function bodies included, but not `if TYPE_CHECKING`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} if node.module != "fedpick" else {f"fedpick.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way_only(path):
    part = part_of(path)
    for name in imported(path):
        head, _, rest = name.partition(".")
        if head == "fedpick" and rest:
            target = rest.partition(".")[0]
            assert target == part or target in MAY_IMPORT[part] or target == "__version__", f"{part} imports {name}"
        if part in LIGHT_PARTS:
            assert head not in HEAVY, f"{part} imports {head}"


@pytest.mark.parametrize("path", sorted((SOURCE / "policies").glob("[a-z]*.py")), ids=lambda path: path.name)
def test_no_policy_imports_another(path):
    for name in imported(path):
        if name.startswith("fedpick.policies."):
            assert name.split(".")[2].startswith("_"), f"{path.name} imports {name}"


def test_import_fedpick_is_light():
    code = f"import fedpick, sys; print(sorted({HEAVY!r} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def defined_names(tree: ast.Module) -> set[str]:
    """What a module's top level defines or imports."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_all_names_what_exists(path):
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["__all__"]:
            listed = ast.literal_eval(node.value)
            assert len(listed) == len(set(listed))
            assert set(listed) <= defined_names(tree)


def test_the_public_names_are_these_and_sorted():
    assert fedpick.__all__ == sorted(fedpick.__all__)
    for name in fedpick.__all__:
        assert hasattr(fedpick, name) or importlib.import_module(f"fedpick.{name}")
