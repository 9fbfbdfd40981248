from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fedpick.core.errors import InvalidInput
from fedpick.experiments.inheritance import place_of
from fedpick.experiments.toml import key_lines, toml_text

SPECS = sorted((Path(__file__).parents[2] / "benchmarks/specs").glob("*.toml"))


@pytest.mark.parametrize("file", SPECS, ids=lambda file: file.stem)
def test_toml_that_is_written_reads_the_same(file):
    content = tomllib.loads(file.read_text())
    assert tomllib.loads(toml_text(content)) == content


def test_toml_knows_every_kind_of_value():
    content = {
        "title": 'a "quoted" \\ ünï\n\x7f',
        "run": {
            "a b": [1, 2.5, True],
            "\N{BICYCLE} \x7f": 1,
            "inf": float("inf"),
            "small": 1e-07,
            "nested": {"x": {"y": []}},
        },
        "policies": [{"name": "a", "local": {"lr": 1.0}}, {"name": "b"}],
    }
    assert tomllib.loads(toml_text(content)) == content
    with pytest.raises(InvalidInput, match="A spec holds"):
        toml_text({"a": {"b": object()}})


def test_lines_of_nested_tables():
    lines = key_lines('[[policies]]\nname = "a"\n[policies.local]\nlr = 1\n[[policies]]\n"name" = "b"\na.b = 2\n')
    assert lines[("policies", 0, "local", "lr")] == 4
    assert lines[("policies", 1, "name")] == 6
    assert lines[("policies", 1, "a", "b")] == 7
    assert place_of(lines, ("policies", 1, "a", "b", "c")) == 7
    assert place_of(lines, ("nothing",)) is None
    assert key_lines('a = """\nb = 1\n"""\nc = 2') == {("a",): 1, ("c",): 4}
    assert key_lines('a = "\N{LINE SEPARATOR}"\r\n[run]\r\nb = 2') == {("a",): 1, ("run",): 2, ("run", "b"): 3}
