"""What the docs show must run: every Python block of a page, in one namespace, in an empty directory.

A block that cannot run says so on the line above it: `<!-- not run: the reason -->`. One that begins with the name of a
file, `# mine.py`, is that file; others import it or read it.
"""

from __future__ import annotations

import importlib.util
import pkgutil
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import fedpick
from fedpick import testing
from fedpick.core import registry
from fedpick.experiments import inheritance

ROOT = Path(__file__).parents[1]
WRITTEN_BY_THE_BUILD = [ROOT / "docs/api", ROOT / "docs/project"]
PAGES = sorted(
    page for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")] if page.parent not in WRITTEN_BY_THE_BUILD
)
BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>.+?) -->\n)?^```python\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"^```\w+\n# (?P<name>\w+\.(?:py|toml))\n(?P<content>.*?)^```$", re.DOTALL | re.MULTILINE)
OPTIONS = re.compile(r"^```\{policy-options\} (.+)$", re.MULTILINE)

# What a page says -> what is run instead: less of the same, or the name of something that is here.
INSTEAD: Mapping[str, Mapping[str, str]] = {
    "docs/guides/advise.md": {"round_seconds=3600)": 'round_seconds=3600, rounds=2, seeds=2, policies=["fedcbs"])'},
    "docs/guides/data.md": {'data.load("fmnist")': 'data.load("digits")'},
    "docs/guides/simulator.md": {"rounds=50": "rounds=10"},
    "docs/guides/report.md": {'experiment="9af5f7bf"': "experiment=1", '("png", "svg")': '("png",)'},
}
NEEDS = {
    "docs/start/demo.md": ["jax"],
    "docs/start/spec.md": ["jax"],
    "docs/start/flower.md": ["flwr"],
    "docs/guides/flower.md": ["flwr"],
    "docs/guides/private-similarities.md": ["cryptography"],
    "docs/guides/report.md": ["plotly", "matplotlib"],
    "docs/guides/recording.md": ["sqlalchemy", "plotly"],
    "docs/guides/pytorch.md": ["torch", "plotly"],
    "docs/guides/your-own.md": ["jax", "plotly"],
    "docs/guides/advise.md": ["jax"],
    "docs/guides/time.md": ["jax"],
    "docs/guides/availability.md": ["matplotlib"],
}
# Pages about results find a store with an experiment in it, and its spec, my.toml.
ABOUT_RESULTS = {"docs/guides/experiments.md", "docs/guides/report.md", "docs/reference/store.md"}
SPEC = """
[data]
name = "synthetic"
num_clients = 12
dimension = 5
[partition]
name = "natural"
[task]
name = "logistic"
[local]
lr = 0.1
steps = 2
batch_size = 8
[availability]
name = "clustered"
num_clusters = 3
[run]
rounds = 6
seeds = 2
losses_every = 1
targets = [0.1]
[[policies]]
name = "unbiased"
[[policies]]
name = "ca-fed"
"""


def python_blocks(path: Path) -> list[str]:
    """Those to run: files that blocks import are not among them."""
    blocks = BLOCK.finditer(path.read_text())
    return [block["code"] for block in blocks if not block["reason"] and not FILE.match(block[0])]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


SHOWING = [page for page in PAGES if "```python" in page.read_text() and page.name != "CONTRIBUTING.md"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A directory with an experiment."""
    pytest.importorskip("jax", reason="the simulator is not installed: pip install 'fedpick[sim]'")
    from fedpick.experiments.runner import run
    from fedpick.experiments.spec import load_spec
    from fedpick.experiments.store import Store

    directory = tmp_path_factory.mktemp("experiment")
    (directory / "my.toml").write_text(SPEC)
    store = Store(str(directory / "results/fedpick.sqlite"))
    run(load_spec(directory / "my.toml"), store)
    store.close()
    return directory


@pytest.mark.parametrize("page", SHOWING, ids=name_of)
def test_every_python_block_runs(page, tmp_path, monkeypatch, request):
    name = name_of(page)
    for package in NEEDS.get(name, []):
        pytest.importorskip(package)
    if name in ABOUT_RESULTS:
        shutil.copytree(request.getfixturevalue("results"), tmp_path, dirs_exist_ok=True)
    code = "\n".join(python_blocks(page))
    for shown, run in INSTEAD.get(name, {}).items():
        assert shown in code, f"{name} no longer says {shown!r}"
        code = code.replace(shown, run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    files = {file["name"]: file["content"] for file in FILE.finditer(page.read_text())}
    for file, content in files.items():
        (tmp_path / file).write_text(content)
    try:
        exec(compile(code, name, "exec"), {"__name__": "page"})
    finally:
        for file in files:
            sys.modules.pop(file.removesuffix(".py"), None)  # a page's modules are its own
    if name == "README.md":
        assert fedpick.Session.load("run/policy").round == 3


@pytest.mark.parametrize("policy", ["herd", "afl", "rpow-d"])
def test_the_loop_in_the_readme_reports_what_every_policy_learns_from(policy, tmp_path, monkeypatch):
    """`afl` and `rpow-d` learn from reports alone; without them they would select at random."""
    (block,) = python_blocks(ROOT / "README.md")
    shown = 'get("herd")'
    assert shown in block
    code = block.replace(shown, f'get("{policy}")').replace("range(3)", "range(30)")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "page"}
    exec(compile(code, "README.md", "exec"), namespace)
    diagnostics = namespace["selection"].diagnostics
    assert "unanswered" not in diagnostics if policy == "rpow-d" else diagnostics["known"] == 5


def test_blocks_that_are_not_run_say_why():
    text = "<!-- not run: needs a GPU -->\n```python\nfail()\n```\n\n```python\npass\n```\n"
    assert [(block["reason"], block["code"]) for block in BLOCK.finditer(text)] == [
        ("needs a GPU", "fail()\n"),
        (None, "pass\n"),
    ]
    for page in PAGES:
        assert len(BLOCK.findall(page.read_text())) == page.read_text().count("```python"), name_of(page)


def test_the_skeleton_in_contributing_is_a_working_policy(tmp_path, monkeypatch):
    (block,) = python_blocks(ROOT / "CONTRIBUTING.md")
    (tmp_path / "skeleton_policy.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    import skeleton_policy  # type: ignore[import-not-found]

    testing.check_policy(skeleton_policy.MyPolicy())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        assert target.startswith(("http", "mailto")) or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_outside_tables_have_at_most_120_characters(page):
    lines = enumerate(page.read_text().splitlines(), start=1)
    assert [number for number, line in lines if len(line) > 120 and not line.startswith("|")] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_in_fedpick_exist(page):
    for dotted in re.findall(r"`(fedpick(?:\.\w+)+)", page.read_text()):
        if dotted.startswith("fedpick.nvflare") and not importlib.util.find_spec("nvflare"):
            continue
        if name_of(page) not in NEEDS or all(importlib.util.find_spec(package) for package in NEEDS[name_of(page)]):
            pkgutil.resolve_name(dotted)
    for module in re.findall(r"python -m (benchmarks(?:\.\w+)+)", page.read_text()):
        assert importlib.util.find_spec(module), module


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_of_the_benchmarks_exist(page):
    for shown in re.findall(r"benchmarks/[\w./{},-]+\.(?:toml|py)", page.read_text()):
        before, _, rest = shown.partition("{")
        alternatives, _, after = rest.partition("}")
        for alternative in alternatives.split(","):
            assert (ROOT / f"{before}{alternative}{after}").is_file(), shown
    for spec in re.findall(
        r"[`/ ]((?:cafed|fedcor|fedgp|fedgs|power-of-choice)[\w-]*\.toml(?:#[\w.-]*\w)?)", page.read_text()
    ):
        assert inheritance.resolve(ROOT / "benchmarks/specs" / spec)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_page_names_a_policy_that_does_not_exist(page):
    for policy in re.findall(r"policies\.get\(\"([^\"]+)\"", page.read_text()):
        assert policy in fedpick.policies.names()


PARTS = ["What it does", "When to use it", "Needs", "Options", "Weights", "Cost", "Deviations", "Results", "Citation"]
POLICIES = [page for page in PAGES if page.parent.name == "policies" and page.name != "index.md"]


@pytest.mark.parametrize("page", POLICIES, ids=name_of)
def test_pages_of_policies_have_the_same_parts(page):
    headings = re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE)
    assert [heading for heading in headings if heading in PARTS] == PARTS


def test_every_policy_has_a_page():
    shown = [name for page in POLICIES for names in OPTIONS.findall(page.read_text()) for name in names.split()]
    assert sorted(shown) == sorted(registry.BUILT_IN)
