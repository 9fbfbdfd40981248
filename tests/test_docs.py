"""What the docs show must run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fedpick
from fedpick import testing

ROOT = Path(__file__).parents[1]


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)


def test_the_skeleton_in_contributing_is_a_working_policy(tmp_path, monkeypatch):
    (block,) = python_blocks(ROOT / "CONTRIBUTING.md")
    (tmp_path / "skeleton_policy.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    import skeleton_policy  # type: ignore[import-not-found]

    testing.check_policy(skeleton_policy.MyPolicy())


def test_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = python_blocks(ROOT / "README.md")
    exec(block, {})
    assert fedpick.Session.load("run/policy").round == 3


def test_the_flower_guide_runs():
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedpick[flower]'")
    exec("\n".join(python_blocks(ROOT / "docs/guides/flower.md")), {})


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        assert target.startswith(("http", "mailto")) or (page.parent / target).exists(), target


@pytest.mark.parametrize("name", sorted(path.name for path in ROOT.glob("*.md")))
def test_no_page_names_a_policy_that_does_not_exist(name):
    for policy in re.findall(r"policies\.get\(\"([^\"]+)\"", (ROOT / name).read_text()):
        assert policy in fedpick.policies.names()
