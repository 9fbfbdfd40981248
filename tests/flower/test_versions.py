"""The oldest supported release of Flower; the other tests run on the installed one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = (
    *("conformance", "inner", "legacy", "limits", "membership", "messages", "probing", "progress", "settings"),
    *("sketch", "strategy"),
)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.22.0"])
def test_the_adapter_works_with_old_releases(tmp_path, version):
    python = tmp_path / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path)], check=True)
    packages = [f"flwr=={version}", "numpy>=2.0", "scipy>=1.13", "pytest"]
    subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True)
    subprocess.run(
        [
            *(str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-o", "addopts=", "-o", "filterwarnings="),  # old releases use what Python deprecates
            *(f"tests/flower/test_{name}.py" for name in MODULES),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        check=True,
    )
