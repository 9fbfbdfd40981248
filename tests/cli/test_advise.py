"""The command `advise`."""

from __future__ import annotations

import pytest

pytest.importorskip("typer")
pytest.importorskip("jax")

TABLE = "id,label_a,label_b\nnorth,9,1\nsouth,0,12\neast,5,8\n"
QUICK = ["--budget", "2", "--rounds", "2", "--seeds", "2", "--policies", "md", "--set", "local.steps=1"]


def test_it_prints_the_answer_and_writes_a_spec_that_runs(fedpick, tmp_path):
    (tmp_path / "clinics.csv").write_text(TABLE)
    code, out, err = fedpick("advise", "clinics.csv", *QUICK, "--no-report")
    assert code == 0, err
    assert out.startswith("Use ") and "What this cannot know:" in out and "with_policy(" in out
    assert "4 runs, 8 rounds" in err  # progress
    code, out, err = fedpick("run", "clinics-advice.toml", "--no-report", "-p", "1")
    assert code == 0, err
    assert "4 runs, 8 rounds, 8 of them done before" in err


@pytest.mark.parametrize(
    ("table", "options", "sentence"),
    [
        (TABLE.replace("12", "many"), [], "clinics.csv, line 3: label_b must be a whole number"),
        (TABLE, ["--budget", "9"], "A budget of 9 is more than the 3 clients"),
        (TABLE, ["--set", "local.nosuch=1"], "no key 'nosuch'"),
        (TABLE, ["--availability", "nosuch.csv"], "There is no file of device logs"),
    ],
)
def test_wrong_input_is_one_sentence_and_leaves_nothing_behind(fedpick, tmp_path, table, options, sentence):
    (tmp_path / "clinics.csv").write_text(table)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = fedpick("advise", "clinics.csv", *QUICK, *options)
    assert code == 2 and not out
    assert sentence in err and "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_changed_table_is_refused_until_it_is_started_over(fedpick, tmp_path):
    (tmp_path / "clinics.csv").write_text(TABLE)
    assert fedpick("advise", "clinics.csv", *QUICK, "--no-report", "-q")[0] == 0
    (tmp_path / "clinics.csv").write_text(TABLE.replace("12", "13"))
    code, _, err = fedpick("advise", "clinics.csv", *QUICK, "--no-report", "-q")
    assert code == 2 and "[partition]: the file clinics.csv is not the one" in err and "--restart" in err
    assert fedpick("advise", "clinics.csv", *QUICK, "--no-report", "-q", "--restart")[0] == 0
