"""A small experiment, and the program called in this process."""

from __future__ import annotations

import sys

import pytest

from fedpick import cli

SPEC = """\
title = "small"
[data]
name = "digits"
[partition]
name = "2spc"
num_clients = 10
[task]
name = "logistic"
[local]
lr = 0.1
steps = 2
[run]
rounds = 4
budget = 3
targets = [0.05]
[[policies]]
name = "uniform"
[[policies]]
name = "md"
"""


@pytest.fixture
def fedpick(capsys, monkeypatch, tmp_path):
    """Call the program in this process: (exit code, output, errors)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "spec.toml").write_text(SPEC)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedpick", *arguments])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        printed = capsys.readouterr()
        return exited.value.code, printed.out, printed.err

    return call
