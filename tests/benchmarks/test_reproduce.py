"""The list of what makes the published tables: every command could start, and every page says where it comes from."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from pathlib import Path

import pytest
import typer

from benchmarks import reproduce
from fedpick.cli.app import app
from fedpick.core.errors import FedpickError
from fedpick.experiments.spec import load_spec

DOCS = Path(reproduce.ROOT) / "docs"
PARTS = reproduce.parts()


class Parsed(Exception):
    """The arguments are valid; the work does not start."""


@pytest.fixture
def only_parse(monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def stop(self, arguments=None, namespace=None):
        raise Parsed(parse(self, arguments, namespace))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)


@pytest.mark.parametrize("part", PARTS, ids=[f"{part.page}, {part.part}" for part in PARTS])
def test_every_command_of_a_part_could_start(part, only_parse):
    assert part.minutes > 0 and part.basis in ("measured", "estimated", "guessed")
    for command in part.commands:
        program, *words = shlex.split(command)
        if program == "fedpick":
            click = typer.main.get_command(app).commands[words[0]]
            click.make_context(words[0], list(words[1:]))  # unknown options and values end here
            for spec in reproduce.specs_of(command):
                assert spec.policies and spec.rounds
            continue
        assert (program, words[0]) == ("python", "-m")
        for word in words:
            if ".toml" in word:
                assert load_spec(word).policies
        with pytest.raises(Parsed):
            importlib.import_module(words[1]).main(words[2:])


def test_a_report_names_an_experiment_that_the_part_runs():
    for part in PARTS:
        titles = {spec.title for command in part.commands for spec in reproduce.specs_of(command)}
        for command in part.commands:
            words = shlex.split(command)
            if "--experiment" in words:
                assert words[words.index("--experiment") + 1] in titles


def test_every_part_is_a_heading_and_every_commit_is_on_its_page():
    for part in PARTS:
        text = (DOCS / part.page).read_text()
        assert part.part in [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
        for word in part.commit.replace(",", "").split():
            assert not word.isalnum() or len(word) < 7 or word in text


def test_commands_run_with_this_python_and_unknown_parts_are_refused(capsys, monkeypatch):
    assert reproduce.arguments_of("fedpick report --window 5") == [
        sys.executable, "-m", "fedpick", "report", "--window", "5",
    ]  # fmt: skip
    started = []
    monkeypatch.setattr(reproduce.subprocess, "run", lambda words, **_: started.append(words))
    reproduce.main(["--only", "Figure 8"])
    assert started == [[sys.executable, "-m", "benchmarks.figures.fedgs", "availability"]]
    reproduce.main(["--list", "--only", "CIFAR-10, reduced"])
    assert "fedgs-cifar10-reduced.toml" in capsys.readouterr().out
    with pytest.raises(FedpickError, match="figure 99"):
        reproduce.main(["--only", "figure 99"])


def test_the_cost_of_a_run_is_measured_round_by_round(tmp_path, capsys, monkeypatch):
    pytest.importorskip("jax")
    from tests.benchmarks.test_figures import TINY

    (tmp_path / "tiny.toml").write_text(TINY)
    monkeypatch.setattr(reproduce, "ROOT", tmp_path)
    part = reproduce.Part(
        page="results/ca-fed.md",
        part="tiny",
        commands=("fedpick run tiny.toml --only MDSample --rounds 5", "fedpick report"),
        minutes=1,
        basis="estimated",
        commit="",
    )
    reproduce.estimate(part)
    assert "MDSample" in (printed := capsys.readouterr().out) and "5 rounds, 2 seeds" in printed
