from __future__ import annotations

import pytest

pytest.importorskip("typer")
pytest.importorskip("jax")


def test_tune_writes_a_spec_that_runs(fedpick, tmp_path):
    rates = ["--local-lr", "0.1,0.001", "--server-lr", "1,0.5", "--rounds", "3", "-p", "1"]
    code, out, err = fedpick("tune", "spec.toml", *rates)
    assert code == 0, err
    assert "learning rates" in out and "local=0.001 server=0.5" in out
    assert "is at the edge of the grid" in out
    text = (tmp_path / "spec-tuned.toml").read_text()
    assert text.startswith(
        "# Learning rates found by:\n#   fedpick tune spec.toml --local-lr 0.1,0.001 --server-lr 1,0.5"
    )
    assert "holdout 0.2 of every client" in text
    code, _, err = fedpick("tune", "spec.toml", *rates, "-o", "again.toml")
    assert "8 runs, 24 rounds, 24 of them done before" in err
    assert (tmp_path / "again.toml").read_text() == text
    code, out, err = fedpick("run", "spec-tuned.toml", "--no-report", "-p", "1")
    assert code == 0, err
    assert fedpick("tune", "spec.toml", *rates)[0] == 0
    code, out, _ = fedpick("report", "--no-html", "--format", "markdown")
    assert "search for learning rates" not in out and "small: accuracy" in out
    titles = [line.split("\t")[2] for line in fedpick("report", "--list")[1].splitlines()]
    assert titles == ["small", "small: search for learning rates"]
    code, _, err = fedpick("tune", "spec.toml")
    assert code == 2
    assert "nothing to search" in err
