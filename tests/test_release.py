"""What a release needs: one version, a changelog, known licences, files that their readers accept."""

from __future__ import annotations

import re
import sys
import tomllib
import venv
from pathlib import Path

import pytest

import fedpick
from scripts import licences, try_wheel

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def load(path):
    return pytest.importorskip("yaml").safe_load((ROOT / path).read_text())


def test_every_place_names_the_same_version():
    assert load("CITATION.cff")["version"] == fedpick.__version__
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
    licences.installed("fedpick", frozenset({"all", "torch"}), found)
    assert {"numpy", "scipy"} <= set(found)
    assert {
        name: licences.licence(each) for name, each in found.items() if not licences.compatible(licences.licence(each))
    } == {}


def test_every_dependency_of_a_user_is_in_the_list_of_licences():
    listed = dict(re.findall(r"^\| (\S+) \| (.+) \|$", (ROOT / "LICENCES.md").read_text(), re.MULTILINE)[1:])
    extras = {name: words for name, words in try_wheel.project().items() if name not in ("dev", "docs")}
    wanted = {re.match(r"[\w-]+", words)[0] for requirements in extras.values() for words in requirements}
    assert wanted - {"fedpick"} <= set(listed)
    assert [name for name, words in listed.items() if not licences.compatible(words)] == []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_and_scripts_that_exist(workflow):
    jobs = load(workflow)["jobs"]
    text = "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for script in re.findall(r"scripts/\w+\.py", text):
        assert (ROOT / script).is_file(), script
    assert {need for job in jobs.values() for need in [job.get("needs", [])] if need} <= set(jobs)


def test_the_workflows_try_every_python_of_the_classifiers():
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    pythons = [line.rpartition(" ")[2] for line in classifiers if re.search(r":: 3\.\d+$", line)]
    assert load(".github/workflows/tests.yml")["jobs"]["tests"]["strategy"]["matrix"]["python"] == pythons


def test_hooks_before_a_commit_are_those_of_make_check():
    checks = (ROOT / "Makefile").read_text().partition("\ncheck:")[2].replace("$(BIN)", ".venv/bin")
    hooks = [hook for repository in load(".pre-commit-config.yaml")["repos"] for hook in repository["hooks"]]
    assert all({"id", "name", "entry", "language"} <= set(hook) for hook in hooks)
    assert all(hook["entry"].removesuffix(" --fix").removesuffix(" --check") in checks for hook in hooks)


def test_forms_for_reports_can_be_shown():
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = load(path)
        assert path.name == "config.yml" or ({"name", "description", "body"} <= set(form) and form["body"])


def test_a_broken_typer_fails_the_trial_of_the_command_line(tmp_path):
    """The trial needs an environment with a dependency that cannot be imported; the others come from this one."""
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (packages / "others.pth").write_text("\n".join(path for path in sys.path if path))
    environment = try_wheel.Environment(tmp_path / "venv/bin", tmp_path)
    program = environment.bin / "fedpick"
    program.write_text(f"#!{environment.bin / 'python'}\nfrom fedpick.cli import main\nmain()\n")
    program.chmod(0o755)
    environment.fedpick("list", "policies", says="fedcor")
    (packages / "typer.py").write_text("raise ImportError('typer is broken')\n")
    with pytest.raises(try_wheel.Failed, match="fedpick list policies"):
        try_wheel.try_cli(environment, tmp_path / "store.sqlite")
