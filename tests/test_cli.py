from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import pytest

pytest.importorskip("typer")
pytest.importorskip("jax")

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


def test_run_prints_tables_and_goes_on(fedpick, tmp_path):
    code, out, err = fedpick("run", "spec.toml", "--no-report", "-p", "1")
    assert code == 0, err
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
    code, _, err = fedpick("tune", "spec.toml")
    assert code == 2
    assert "nothing to search" in err


def test_report_adds_differences_and_groups(fedpick):
    code, _, err = fedpick("run", "spec.toml", "--no-report", "--seeds", "2", "-p", "1")
    assert code == 0, err
    code, out, err = fedpick(
        "report", "--no-html", "--against", "uniform", "--groups", "availability", "-f", "markdown"
    )
    assert code == 0, err
    assert "**Paired differences to uniform**" in out
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
    )  # fmt: skip
    assert code == 0, err
    assert "pow-d" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "absent.toml"], "cannot be read"),
        (["run", "spec.toml", "--only", "unifrm"], "Did you mean 'uniform'"),
        (["run", "spec.toml", "--seeds", "x"], "--seeds must be"),
        (["run", "spec.toml", "--rounds", "0"], "at least 1"),
        (["run", "spec.toml", "--engine", "threads"], "'processes' or 'ray'"),
        (["run", "spec.toml", "--store", "nonsense://x"], "not a database URL"),
        (["run", "spec.toml", "--nonsense"], "No such option"),
        (["compare", "--dataset", "digit"], "Did you mean 'digits'"),
        (["compare", "--dataset", "digits", "--policies", "fedcorr"], "Did you mean 'fedcor'"),
        (["compare", "--dataset", "digits", "--set", "alpha=1"], "section.key=value"),
        (["report"], "no results at"),
        (["check", "unifrm"], "Did you mean 'uniform'"),
        (["data", "get", "mnst"], "Did you mean 'mnist'"),
        (["availability", "show", "idael"], "Did you mean 'ideal'"),
        (["run", "spec.toml", "--seeds", ""], "--seeds must be"),
        (["run", "spec.toml", "--seeds", " ,"], "--seeds must be"),
        (["run", "spec.toml", "--store", "/proc/x/a.sqlite"], "There can be no store at /proc/x/a.sqlite"),
        (["run", "spec.toml", "--store", "."], "cannot be opened"),
        (["tune", "spec.toml", "--local-lr", "0.1", "-o", "."], "is a directory"),
        (["data", "show", "digits", "--clients", "0"], "at least 1. Got 0"),
        (["data", "show", "synthetic", "--partition", "natural", "--clients", "0"], "Got num_clients=0"),
        (["data", "show", "digits", "-o", "a.gif"], "must end in .png, .svg or .pdf. Got 'a.gif'"),
        (["availability", "show", "ideal", "-o", "x"], "must end in .png, .svg or .pdf. Got 'x'"),
        (["availability", "show", "ideal", "-o", "x.gif"], "must end in .png, .svg or .pdf. Got 'x.gif'"),
        (["bench", "select", "--largest", "1"], "--largest must be at least 100"),
        (["bench", "select", "--rounds", "0"], "--rounds must be at least 1"),
    ],
)
def test_wrong_input_is_refused_with_code_2(fedpick, arguments, says):
    code, _, err = fedpick(*arguments)
    assert code == 2
    assert says in err


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


def test_a_damaged_store_is_told_in_a_sentence(fedpick, tmp_path):
    assert fedpick("run", "spec.toml", "--quiet", "--no-report", "-p", "1")[0] == 0
    file = tmp_path / "results" / "fedpick.sqlite"
    content = file.read_bytes()
    middle = len(content) // 8192 * 4096
    file.write_bytes(content[:middle] + b"\xff" * (len(content) - middle))
    code, _, err = fedpick("report")
    assert code == 1
    assert err.startswith("error: ") and "malformed" in err and err.count("\n") == 1


def test_what_is_our_mistake_keeps_its_traceback(fedpick, monkeypatch):
    from fedpick.experiments import spec

    def broken(path):
        raise ZeroDivisionError

    monkeypatch.setattr(spec, "load_spec", broken)
    with pytest.raises(ZeroDivisionError):
        fedpick("run", "spec.toml")


@pytest.mark.parametrize("what", ["policies", "datasets", "partitions", "availability", "tasks"])
def test_lists(fedpick, what):
    code, out, _ = fedpick("list", what, "--json")
    assert code == 0
    entries = json.loads(out)
    assert all(entry["name"] and entry["summary"] for entry in entries)
    code, out, _ = fedpick("list", what)
    assert all(entry["name"] in out for entry in entries)


def test_every_policy_has_a_citation(fedpick):
    _, out, _ = fedpick("list", "policies", "--json")
    assert all("(" in entry["citation"] for entry in json.loads(out))
    _, out, _ = fedpick("list", "policies", "--bibtex")
    assert out.count("@") >= 5


def test_pictures(fedpick, tmp_path):
    code, out, err = fedpick("data", "show", "digits", "--clients", "10", "-o", "a.png")
    assert code == 0, err
    assert "10 clients, 1438 examples" in out
    assert (tmp_path / "a.png").stat().st_size > 1000
    code, out, err = fedpick("availability", "show", "log-normal", "--set", "beta=0.3", "--rounds", "20", "-o", "b.png")
    assert code == 0, err
    assert "available on average" in out
    assert (tmp_path / "b.png").stat().st_size > 1000
    code, out, err = fedpick("availability", "show", "ideal", "-o", "deep/er/c.PDF")
    assert code == 0, err
    assert (tmp_path / "deep/er/c.PDF").read_bytes().startswith(b"%PDF")


def test_data_that_needs_no_files(fedpick):
    code, out, _ = fedpick("data", "get", "digits", "--quiet")
    assert code == 0
    assert "needs no files" in out


def test_bench_sampling(fedpick, tmp_path):
    code, out, err = fedpick("bench", "sampling", "--clients", "20000", "--repeats", "3", "--json", "out.json")
    assert code == 0, err
    assert "ratio:" in out
    assert json.loads((tmp_path / "out.json").read_text())["ratio"] > 0
    code, _, err = fedpick("bench", "nothing")
    assert code == 2


def test_help_and_version(fedpick):
    for arguments in (["--help"], ["run", "--help"], ["bench", "--help"], ["list", "--help"]):
        code, out, _ = fedpick(*arguments)
        assert code == 0
        assert "Usage" in out
    code, out, _ = fedpick("--version")
    assert out.startswith("fedpick ")


def test_a_typo_is_refused_without_importing_jax(tmp_path):
    """The wall clock is left to the slow test: here, what would take the time must not be there at all."""
    (tmp_path / "typo.toml").write_text(SPEC.replace('"uniform"', '"unifrom"'))
    program = (
        "import sys\nfrom fedpick import cli\nsys.argv = ['fedpick', 'run', 'typo.toml']\n"
        "try:\n    cli.main()\nexcept SystemExit as end:\n"
        "    print(end.code, 'jax' in sys.modules, 'sqlalchemy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False", "False"]
    assert "typo.toml:17: There is no policy named 'unifrom'. Did you mean 'uniform'?" in done.stderr


@pytest.mark.slow
def test_a_typo_is_refused_within_a_second(tmp_path):
    (tmp_path / "typo.toml").write_text(SPEC.replace('"uniform"', '"unifrom"'))
    seconds = []
    for _ in range(5):
        # Processor time: what else runs on the machine does not count.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-m", "fedpick", "run", "typo.toml"], cwd=tmp_path, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 2
    assert min(seconds) < 1.0


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
