"""The stub of `fedpick.policies`: as generated, and what a type checker makes of it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

import fedpick
from fedpick.core import registry

ROOT = Path(__file__).parents[2]


def generator():
    spec = importlib.util.spec_from_file_location("policies_stub", ROOT / "scripts/policies_stub.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_stub_is_up_to_date():
    made = generator()
    written = (Path(fedpick.policies.__file__).parent / "__init__.pyi").read_text()
    assert written == made.stub(), "run: python scripts/policies_stub.py"


@pytest.mark.parametrize(("name", "path"), registry.BUILT_IN.items())
def test_every_class_can_be_imported(name, path):
    policy_class = getattr(fedpick.policies, path.partition(":")[2])
    assert policy_class is registry.load(name) and policy_class.__name__ in dir(fedpick.policies)
    assert policy_class() == fedpick.policies.get(name)


def test_what_is_no_policy_is_no_attribute():
    with pytest.raises(AttributeError, match="nosuch"):
        getattr(fedpick.policies, "nosuch")  # noqa: B009  # pytest.raises needs a call


@pytest.mark.slow
def test_a_type_checker_knows_names_and_hyper_parameters(tmp_path, monkeypatch):
    api = pytest.importorskip("mypy.api")
    program = tmp_path / "program.py"
    program.write_text(
        "from typing import Any\n"
        "import fedpick\n"
        "from fedpick.policies import PowD\n"
        'good: PowD = fedpick.policies.get("pow-d", num_candidates=3)\n'
        "def any_of(name: str, options: dict[str, Any]) -> fedpick.Policy[Any]:\n"
        "    return fedpick.policies.get(name, **options)\n"
        'fedpick.policies.get("pow-d", candidates=3)\n'
        'fedpick.policies.get("pow-d", num_candidates="three")\n'
        'fedpick.policies.get("uniform", num_candidates=3)\n'
    )
    monkeypatch.setenv("MYPYPATH", str(ROOT / "src"))
    arguments = ["--strict", "--follow-imports=silent", "--cache-dir", str(tmp_path), "--python-version", "3.11"]
    out, err, _ = api.run([*arguments, "--python-executable", sys.executable, str(program)])
    lines = {int(line.split(":")[1]) for line in out.splitlines() if ": error:" in line and "program.py" in line}
    assert lines == {7, 8, 9}, out + err
