"""The extensions that build the documentation, and the script that checks what they built."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from scripts import check_site

ROOT = Path(__file__).parents[1]
DIAGRAM = """
sequenceDiagram
    participant loop as sim/loop.py
    participant policy
    loop->>policy: select(state)
    policy-->>loop: Selection & state
"""


@pytest.fixture
def extension(monkeypatch):
    """Import an extension as Sphinx does."""
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(ROOT / "docs/_ext")
    return importlib.import_module


def test_sequence_diagrams_become_pictures(extension):
    svg = extension("sequence_diagrams").sequence_svg(DIAGRAM)
    assert svg.count('class="arrow"') == 2 and svg.count("stroke-dasharray") == 1
    assert "sim/loop.py" in svg and "Selection &amp; state" in svg


@pytest.mark.parametrize("source", ["flowchart LR\n a --> b", DIAGRAM + "    loop->>stranger: hello"])
def test_other_diagrams_are_shown_as_text(extension, source):
    assert extension("sequence_diagrams").sequence_svg(source) is None


def test_options_of_a_policy_come_from_its_class(extension):
    parts = extension("policy_parts")
    table = parts.options(["fedcor", "fedgp", "md"])
    assert "| `interval` | `10` | `int` | rounds between updates of the embedding. |" in table
    assert "`fedgp` has the options of `fedcor`, with other defaults: `warmup_history` `1`" in table
    assert table.endswith("`md` has no options.")
    assert "asked before the selection" in parts.needs("pow-d") and "nothing but" in parts.needs("uniform")


def test_every_signal_is_explained_and_every_policy_is_on_the_map(extension):
    parts = extension("policy_parts")
    assert set(parts.SIGNALS) == set(parts.Signal)
    assert all(f">{name}</a>" in parts.policy_map() for name in parts.registry.BUILT_IN)
    assert set().union(*parts.FEAR.values()) <= set(parts.registry.BUILT_IN)


def test_undocumented_public_names_are_found(extension, tmp_path, monkeypatch):
    (tmp_path / "sparse.py").write_text(
        '"""A module."""\n__all__ = ["LIMIT", "Plain", "told", "untold"]\nLIMIT = 3\n"""Documented."""\n\n\n'
        'class Plain:\n    """A class."""\n\n    def silent(self): ...\n\n\n'
        'def told(x: int = 1):\n    """Do it.\n\n    Args:\n        x: how often.\n    """\n\n\ndef untold(): ...\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    pages = extension("api_pages").Pages()
    text = pages.page("sparse", ("LIMIT", "Plain", "told", "untold"))
    sys.modules.pop("sparse")
    assert pages.missing == ["sparse.Plain.silent", "sparse.untold"]
    assert "{py:function} told(x: int = 1)" in text and ":param x: how often." in text


def test_links_that_leave_the_docs_are_adapted(extension):
    adapt = extension("repository_pages").adapt_links
    here = ROOT / "docs/guides"
    assert adapt("[a](../../CHANGELOG.md#x)", here) == "[a](/project/changelog.md#x)"
    assert adapt("[specs](../../benchmarks/specs)", here) == "specs"
    assert adapt("[b](data.md) table[name](value)", here) == "[b](data.md) table[name](value)"
    assert adapt("[c](docs/glossary.md)", ROOT) == "[c](../glossary.md)"


def test_dead_links_and_resources_from_the_network_are_found(tmp_path):
    (tmp_path / "index.html").write_text(
        '<a href="other.html#here">good</a><a href="other.html#gone">no anchor</a><a href="gone.html">dead</a>'
        '<a href="https://example.org">outside</a><script src="https://cdn.example/x.js"></script>'
    )
    (tmp_path / "other.html").write_text('<p id="here">text</p>')
    (tmp_path / "site.css").write_text("@font-face { src: url(https://fonts.example/f.woff) }")
    assert check_site.check_links(tmp_path) == [
        "index.html links to other.html#gone, which has no such anchor",
        "index.html links to gone.html, which does not exist",
        "index.html loads https://cdn.example/x.js from the network",
        "site.css loads https://fonts.example/f.woff from the network",
    ]
