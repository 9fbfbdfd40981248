"""What a release needs: one version, a changelog, known licences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fedpick
from scripts import licences

ROOT = Path(__file__).parents[1]


def test_every_place_names_the_same_version():
    assert re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == fedpick.__version__
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == fedpick.__version__


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("MIT", True),
        ("Apache-2.0 OR GPL-3.0-only", True),
        ("MIT AND GPL-3.0-only", False),
        ("(MIT OR Apache-2.0) AND BSD-3-Clause", True),
        ("GPL-2.0-only", False),
        ("unknown", False),
    ],
)
def test_licences_are_judged(expression, expected):
    assert licences.compatible(expression) is expected


def test_installed_dependencies_have_compatible_licences():
    found = {}
    licences.installed("fedpick", frozenset({"all"}), found)
    assert {"numpy", "scipy"} <= set(found)
    assert {
        name: licences.licence(each) for name, each in found.items() if not licences.compatible(licences.licence(each))
    } == {}


def test_workflows_call_targets_and_scripts_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    for workflow in (ROOT / ".github/workflows").glob("*.yml"):
        text = workflow.read_text()
        for target in re.findall(r"\bmake ([a-z-]+)", text):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), (workflow.name, target)
        for script in re.findall(r"scripts/\w+\.py", text):
            assert (ROOT / script).is_file(), (workflow.name, script)
