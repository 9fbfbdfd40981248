from __future__ import annotations

import sqlite3

import pytest

pytest.importorskip("typer")
pytest.importorskip("jax")


def test_verify_names_damage_and_repairs_it(fedpick, tmp_path):
    assert fedpick("run", "spec.toml", "--quiet", "--no-report", "-p", "1")[0] == 0
    code, out, err = fedpick("verify")
    assert (code, out, err) == (0, "2 runs, 8 rounds. Nothing is damaged.\n", "")
    with sqlite3.connect(tmp_path / "results" / "fedpick.sqlite") as connection:
        connection.execute("UPDATE rounds SET accuracy = 0.5 WHERE run_id = 2 AND round = 1")
    connection.close()
    code, out, err = fedpick("verify")
    assert (code, err) == (1, "")
    assert "Run 2 (md, seed 0): round 1 was changed" in out
    assert out.endswith("2 runs, 8 rounds. 1 problem.\n")
    code, _, err = fedpick("run", "spec.toml", "--rounds", "6", "--no-report", "--quiet", "-p", "1")
    assert code == 1
    assert "Compute it again with: fedpick verify --repair" in err
    code, out, err = fedpick("verify", "--repair", "--quiet")
    assert code == 0, err
    assert out.endswith("After the repair:\n2 runs, 12 rounds. Nothing is damaged.\n")


def test_verify_needs_a_store(fedpick):
    code, _, err = fedpick("verify")
    assert code == 2
    assert "no results at" in err
