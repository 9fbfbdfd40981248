from __future__ import annotations

import inspect
import json
import resource
import subprocess
import sys
import time
import tomllib
from contextlib import closing

import pytest

from fedpick.experiments.store import Store
from tests.cli.conftest import SPEC

pytest.importorskip("typer")
pytest.importorskip("jax")


def test_run_prints_tables_and_goes_on(fedpick, tmp_path):
    code, out, err = fedpick("run", "spec.toml", "--no-report", "-p", "1")
    assert code == 0, err
    assert out.startswith("No verdict from one seed")
    assert "rounds to 5 %" in out
    assert "uniform, seed 0: done" in err
    assert (tmp_path / "results" / "fedpick.sqlite").is_file()
    code, out, err = fedpick(
        "run", "spec.toml", "--rounds", "6", "--seeds", "2", "--only", "md", "--no-report", "-p", "1"
    )
    assert code == 0
    assert "2 runs, 12 rounds, 4 of them done before" in err
    code, out, _ = fedpick("report", "--format", "csv", "--no-html")
    assert code == 0
    assert out.splitlines()[1].startswith("md,2,")
    code, out, _ = fedpick("report", "--list")
    assert len(out.splitlines()) == 2
    code, out, _ = fedpick("report", "-e", "1", "--format", "markdown", "--no-html")
    assert "| uniform |" in out
    code, out, err = fedpick("report", "--figures", "figures", "--figure-formats", "svg")
    assert code == 0, err
    assert "files in figures" in out
    page = next((tmp_path / "results").glob("small-*.html"))
    assert f"Report: {page.relative_to(tmp_path)}" in out
    assert "small" in page.read_text()
    assert list((tmp_path / "figures").glob("*.svg"))


def test_variants_are_run_one_by_one_and_shown(fedpick, tmp_path):
    variants = 'extends = "spec.toml"\ntitle = "small {variant}"\n[variants]\na.run.rounds = 1\nb.run.rounds = 2\n'
    (tmp_path / "two.toml").write_text(variants)
    code, out, _ = fedpick("show", "two.toml")
    assert code == 0
    a, b = (tomllib.loads(part) for part in out.split("# two.toml#")[1:] for part in [part.partition("\n")[2]])
    assert (a["title"], a["run"]["rounds"], b["title"], b["run"]["rounds"]) == ("small a", 1, "small b", 2)
    assert fedpick("show", "two.toml#b")[1] == out[out.index("# two.toml#b") :]
    assert fedpick("run", "two.toml", "--no-report", "-q", "-p", "1")[0] == 0
    listed = fedpick("report", "--list")[1].splitlines()
    assert {line.split("\t")[2] for line in listed} == {"small a", "small b"}
    code, _, err = fedpick("run", "two.toml#c")
    assert code == 2
    assert "There is no variant 'c'" in err
    code, _, err = fedpick("tune", "two.toml", "--local-lr", "0.1", "-o", "out.toml")
    assert code == 2
    assert "holds 2 experiments: two.toml#a, two.toml#b" in err


def test_report_adds_differences_and_groups(fedpick):
    code, _, err = fedpick("run", "spec.toml", "--no-report", "--seeds", "2", "-p", "1")
    assert code == 0, err
    code, out, err = fedpick(
        "report", "--no-html", "--against", "uniform", "--groups", "availability", "-f", "markdown"
    )
    assert code == 0, err
    assert "**Paired differences to uniform**" in out
    assert out.startswith("**") and "uniform" in out.splitlines()[0]
    assert "| md: more available, weakly correlated | 10 ± 0 |" in out
    code, out, _ = fedpick("report", "--no-html", "--against", "md")
    assert "Paired differences to md" in out
    for window in ("0", "-3"):
        code, out, err = fedpick("report", "--no-html", "--window", window)
        assert (code, out) == (2, "")
        assert f"must be at least 1. Got {window}" in err
    code, _, err = fedpick("report", "--no-html", "--groups", "cluster")
    assert code == 2
    assert "has no clusters" in err


def test_json_lines(fedpick):
    code, out, _ = fedpick("run", "spec.toml", "--json", "--no-report", "-p", "1")
    assert code == 0
    events = [json.loads(line) for line in out.splitlines()]
    assert events[0]["event"] == "start"
    assert events[-1]["event"] == "end"
    assert events[-1]["finished"] == 2
    assert events[-1]["verdict"][0].startswith("No verdict from one seed")
    assert events[-1]["tables"]["small: accuracy"]["md"]["final accuracy %"]["mean"] > 0


def test_json_lines_without_a_test_accuracy(fedpick):
    flags = ["--dataset", "quadratic", "--policies", "uniform", "--rounds", "2", "--json", "--no-report", "-p", "1"]
    code, out, err = fedpick("compare", *flags)
    assert code == 0, err
    assert "NaN" not in out
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["accuracy"] for event in events if event["event"] == "progress"][-1] is None


def test_quiet_says_only_the_results(fedpick):
    code, out, err = fedpick("run", "spec.toml", "--quiet", "--no-report", "-p", "1")
    assert code == 0
    assert err == ""
    assert "final accuracy" in out


def test_compare_from_flags(fedpick):
    code, out, err = fedpick(
        "compare", "--dataset", "digits", "--policies", "uniform,pow-d", "--clients", "10", "--budget", "2",
        "--rounds", "2", "--task", "logistic", "--set", "local.epochs=1", "--no-report", "-p", "1",
        "--set", "policies.pow-d.num_candidates=8",
    )  # fmt: skip
    assert code == 0, err
    assert "pow-d" in out
    with closing(Store("results/fedpick.sqlite")) as store:
        runs = store.runs(store.experiment().id)
    assert sorted(run.seed for run in runs if run.policy == "pow-d") == [0, 1, 2]
    assert {run.parameters["num_candidates"] for run in runs if run.policy == "pow-d"} == {8}


def test_compare_shows_what_liars_captured(fedpick):
    small = [
        "--clients",
        "10",
        "--budget",
        "3",
        "--rounds",
        "6",
        "--seeds",
        "1",
        "--set",
        "local.epochs=1",
        "--no-report",
        "-q",
    ]
    attack = ["--attack", "inflate-flip", "--share", "0.2", "--guard", "strict"]
    code, out, _ = fedpick("compare", "--dataset", "digits", "--policies", "pow-d,uniform", *small, *attack)
    assert code == 0
    assert "Clients that lie" in out
    assert "places of liars %" in out
    code, _, err = fedpick("compare", "--dataset", "digits", *small, "--attack", "bribe")
    assert code == 2
    assert "inflate" in err


def test_the_help_of_attack_names_every_kind():
    from fedpick.cli.experiments import compare
    from fedpick.sim.attacks import KINDS

    option = inspect.signature(compare, eval_str=True).parameters["attack"].annotation.__metadata__[0]
    assert all(f" {kind}" in option.help for kind in KINDS)


def test_a_failing_run_has_code_1(fedpick, monkeypatch):
    from fedpick.sim import Simulator

    def broken(self, clients):
        raise RuntimeError("the disk is on fire")

    monkeypatch.setattr(Simulator, "_count_model", broken)
    code, _, err = fedpick("run", "spec.toml", "-p", "1", "--no-report")
    assert code == 1
    assert "the disk is on fire" in err


def test_an_interrupted_run_has_code_3_and_says_how_to_go_on(fedpick, monkeypatch):
    from fedpick.experiments.executors import StopFlag

    monkeypatch.setattr(StopFlag, "__call__", lambda self: True)
    code, _, err = fedpick("run", "spec.toml", "-p", "1", "--no-report")
    assert code == 3
    assert "Go on with: fedpick run spec.toml -p 1 --no-report" in err


def test_a_place_that_cannot_be_written_is_told_in_a_sentence(fedpick, tmp_path):
    assert fedpick("run", "spec.toml", "--quiet", "--no-report", "-p", "1", "--rounds", "1")[0] == 0
    code, _, err = fedpick("report", "-o", ".")
    assert (code, err) == (2, "error: . is a directory. Name the file to write, such as report.html.\n")
    code, _, err = fedpick("report", "-o", "/proc/x/r.html")
    assert (code, err) == (1, "error: No such file or directory: /proc/x.\n")
    (tmp_path / "results" / "kept.html").write_text("an older page")
    before = sorted(tmp_path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))  # as if the disk were full
    try:
        code, _, err = fedpick("report", "-o", "full.html")
        refused = fedpick("report", "-o", "results/kept.html")
        unasked = fedpick("report", "--format", "csv")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1
    assert err == "error: File too large: full.html.\n"
    assert refused[0] == 1
    assert (tmp_path / "results" / "kept.html").read_text() == "an older page"
    assert unasked[0] == 1
    assert unasked[1].startswith("policy,seeds,")
    assert "Name another place: fedpick report -o FILE.html" in unasked[2]
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_the_real_thing_killed_twenty_times_ends_in_the_same_rows(tmp_path):
    """3 policies x 2 seeds x 50 rounds of real training, kill -9 at random moments from start-up to the last rounds."""
    import numpy as np
    import sqlalchemy as sa

    spec = SPEC.replace("rounds = 4", "rounds = 50\nseeds = 2") + '[[policies]]\nname = "afl"\n'
    (tmp_path / "spec.toml").write_text(spec)
    command = [sys.executable, "-m", "fedpick", "run", "spec.toml", "--no-report", "--quiet", "-p", "1", "--store"]
    rng = np.random.default_rng(0)

    def rows(name, table, columns="*"):
        with sa.create_engine(f"sqlite:///{tmp_path / name}").connect() as connection:
            return list(connection.exec_driver_sql(f"SELECT {columns} FROM {table} ORDER BY 1, 2"))

    def rounds_there():
        try:
            return rows("killed.sqlite", "runs", "sum(rounds_done), 0")[0][0] or 0
        except sa.exc.OperationalError:
            return 0

    for kill in range(20):
        process = subprocess.Popen([*command, "killed.sqlite"], cwd=tmp_path)
        before = rounds_there()
        if kill % 5:  # most of them while rounds are written, at most ten rounds on
            while rounds_there() <= before and process.poll() is None:
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.02))
        else:
            time.sleep(rng.uniform(0, 3))
        process.kill()
        process.wait()
    assert rounds_there() > 0
    for name in ("killed.sqlite", "whole.sqlite"):
        subprocess.run([*command, name], cwd=tmp_path, check=True, capture_output=True)
    clocks = ("select_seconds", "measure_seconds", "train_seconds", "evaluate_seconds")
    with sa.create_engine(f"sqlite:///{tmp_path / 'whole.sqlite'}").connect() as connection:
        named = [column["name"] for column in sa.inspect(connection).get_columns("rounds")]
    kept = ", ".join(name for name in named if name not in clocks)
    assert len(rows("whole.sqlite", "rounds")) == 300
    assert rows("killed.sqlite", "rounds", kept) == rows("whole.sqlite", "rounds", kept)
    for table in ("selections", "arrays", "checkpoints"):
        assert rows("killed.sqlite", table) == rows("whole.sqlite", table)
