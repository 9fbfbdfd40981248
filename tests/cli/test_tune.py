from __future__ import annotations

import pytest

pytest.importorskip("typer")
pytest.importorskip("jax")

from fedpick.experiments.spec import load_spec


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


def test_tune_tries_any_setting_with_the_policies_that_have_it(fedpick, tmp_path):
    options = ["--try", "weighting=examples,equal", "--try", "local.steps=1,2", "--rounds", "2", "-p", "1"]
    code, out, err = fedpick("tune", "spec.toml", *options)
    assert code == 0, err
    assert "weighting=equal local.steps=1" in out and "search for settings" in out
    tuned = {policy.label: policy for policy in load_spec(tmp_path / "spec-tuned.toml").policies}
    assert all(policy.local["steps"] in (1, 2) for policy in tuned.values())
    having = {label for label, policy in tuned.items() if "weighting" in policy.parameters}
    assert having == {"uniform"} < set(tuned)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("nosuch=1,2", "no policy of this spec has a hyper-parameter 'nosuch'"),
        ("weighting=nosuch", "weighting"),
        ("local.nosuch=1", "no key 'nosuch'"),
        ("task.rate=1", "local.KEY, server.KEY or a hyper-parameter"),
        ("weighting=equal,equal", "each once"),
        ("weighting", "must look like key=value,value"),
    ],
)
def test_what_cannot_be_tried_is_refused_before_the_search(fedpick, tmp_path, given, sentence):
    code, _, err = fedpick("tune", "spec.toml", "--try", given)
    assert code == 2 and sentence in err
    assert not (tmp_path / "results").exists()


def test_a_score_of_no_evaluations_is_refused_before_the_search(fedpick, tmp_path):
    code, _, err = fedpick("tune", "spec.toml", "--local-lr", "0.1,0.2", "--evaluations", "0", "-p", "1")
    assert code == 2 and "--evaluations" in err
    assert not (tmp_path / "results").exists()
