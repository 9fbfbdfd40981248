from __future__ import annotations

import resource
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from tests.cli.conftest import SPEC

pytest.importorskip("typer")
pytest.importorskip("jax")


SKEWED = """\
title = "skewed"
data.name = "synthetic"
partition.name = "natural"
task.name = "logistic"
local = { lr = 0.01, steps = 2 }
run = { rounds = 2, budget = 3, seeds = [8, 10] }
policies = [{ name = "uniform" }]
"""


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_warning_is_a_sentence_without_a_line_of_code(tmp_path, processes):
    spec = tmp_path / "spec.toml"
    spec.write_text(SKEWED)
    command = [sys.executable, "-m", "fedpick", "run", str(spec), "--store", str(tmp_path / "s.sqlite")]
    ended = subprocess.run([*command, "-p", processes, "--no-report"], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    said = {line for line in ended.stderr.splitlines() if "The guard bounds" in line}  # once per process
    assert len(said) == 2 and all(line.startswith("warning: The guard bounds the sizes of 1 of 30") for line in said)
    assert ".py:" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "absent.toml"], "cannot be read"),
        (["run", "spec.toml", "--only", "unifrm"], "Did you mean 'uniform'"),
        (["run", "spec.toml", "--seeds", "x"], "--seeds must be"),
        (["run", "spec.toml", "--rounds", "0"], "at least 1"),
        (["run", "spec.toml", "--executor", "threads"], "'processes' or 'ray'"),
        (["run", "spec.toml", "--store", "nonsense://x"], "not a database URL"),
        (["run", "spec.toml", "--nonsense"], "No such option"),
        (["compare", "--dataset", "digit"], "Did you mean 'digits'"),
        (["compare", "--dataset", "digits", "--policies", "fedcorr"], "Did you mean 'fedcor'"),
        (["compare", "--dataset", "digits", "--set", "alpha=1"], "section.key=value"),
        (["compare", "--dataset", "digits", "--set", "policies.nosuch.x=1"], "There is no policy 'nosuch' to adjust"),
        (["compare", "--dataset", "digits", "--set", "policies.pow-d.candidates=8"], "num_candidates"),
        (["compare", "--dataset", "digits", "--set", "policies.pow-d.num_candidates=no"], "num_candidates"),
        (["compare", "--dataset", "digits", "--set", "policies.pow-d=8"], "must be a table of hyper-parameters"),
        (["compare", "--dataset", "digits", "--set", "local.lr=1", "--set", "local.lr.initial=1"], "to a table"),
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
        (["nosuch"], "No such command 'nosuch'"),
        (["compare"], "Missing option '--dataset'"),
    ],
)
def test_wrong_input_is_refused_with_code_2(fedpick, arguments, says):
    code, _, err = fedpick(*arguments)
    assert code == 2
    assert says in err


def test_a_wrong_command_is_suggested_once(fedpick):
    code, _, err = fedpick("chekc")
    assert code == 2
    assert err.count("Did you mean 'check'") == 1


def test_a_damaged_store_is_told_in_a_sentence(fedpick, tmp_path):
    assert fedpick("run", "spec.toml", "--quiet", "--no-report", "-p", "1")[0] == 0
    file = tmp_path / "results" / "fedpick.sqlite"
    with closing(sqlite3.connect(file)) as connection:
        page, size = connection.execute(
            "SELECT rootpage, page_size FROM sqlite_master, pragma_page_size WHERE name = 'rounds'"
        ).fetchone()
    content = file.read_bytes()
    file.write_bytes(content[: (page - 1) * size] + b"\xff" * size + content[page * size :])
    code, _, err = fedpick("report")
    assert code == 2  # the store is what was given to the command
    assert err.startswith("error: ") and "malformed" in err and err.count("\n") == 1


def test_what_is_our_mistake_keeps_its_traceback(fedpick, monkeypatch):
    from fedpick.experiments import spec

    def broken(path):
        raise ZeroDivisionError

    monkeypatch.setattr(spec, "load_specs", broken)
    with pytest.raises(ZeroDivisionError):
        fedpick("run", "spec.toml")


def test_help_and_version(fedpick):
    for arguments in (["--help"], ["run", "--help"], ["report", "--help"], ["list", "--help"]):
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
