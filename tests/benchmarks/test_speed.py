"""The benchmarks measure what they say: identical work, honest ratios, every peer left out for a stated reason."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.speed import contenders, gp, jobs, machine, scale, select, sim
from benchmarks.speed.__main__ import app
from benchmarks.speed.peers.turns import Turns, Work
from fedpick import data, policies
from fedpick.core.errors import InvalidInput, UnknownName
from fedpick.policies.fedcor import FedCor, FedGP

runner = CliRunner()


@pytest.fixture
def small_j2(monkeypatch):
    monkeypatch.setitem(jobs.JOBS, "j2", replace(jobs.JOBS["j2"], cohort=6, steps=2, batch=16, turn=2))


def test_an_exponent_is_the_slope_on_log_scales():
    rows = [{"policy": "p", "cohort": 10, "clients": n, "seconds": 3e-6 * n**1.5} for n in (100, 10_000, 10**5, 10**6)]
    rows[0]["seconds"] = 1.0  # below 10^4 clients fixed costs dominate: not part of the fit
    assert select.exponent(rows, "p", 10) == pytest.approx(1.5)
    assert np.isnan(select.exponent(rows, "p", 100))


def test_a_decision_is_timed_and_its_memory_followed_without_the_answers_to_probes():
    row = select.measure("fedcor", 2000, 10, 2, 0)
    assert 0 < row["seconds"] <= row["slowest_seconds"]
    rank_rows = 15 * 2000 * 8 / 2**20  # the embedding alone
    assert rank_rows < row["peak_mebibytes"] < 100 * rank_rows


@pytest.mark.parametrize("policy", [FedCor, FedGP])
def test_the_timed_rounds_of_the_gaussian_policies_are_decisions_of_a_trained_model(policy):
    name = {FedCor: "fedcor", FedGP: "fedgp"}[policy]
    world = select._World(300, 0)
    session = select.Session(policies.get(name, **select.PARAMETERS[name]), world.clients, 0)
    for _ in range(select.SETTLING_ROUNDS):
        world.play(session, 10)
    selection = session.ask(available=world.masks[0], budget=10, measure=world.measure)
    assert selection.diagnostics["phase"] == "normal"
    assert "gp_samples" not in selection.diagnostics  # no update in a timed round


def test_select_writes_table_picture_and_numbers(tmp_path):
    result = runner.invoke(
        app,
        [
            *("select", "--only", "uniform,pow-d", "--largest", "100", "--rounds", "1", "--cohorts", "5"),
            *("--folder", str(tmp_path)),
        ],
    )
    assert result.exit_code == 0, result.output
    assert "| uniform | 5 |" in result.output
    assert "[{" not in result.output  # a table is printed, not Python's lists
    numbers = json.loads((tmp_path / "select.json").read_text())
    assert (tmp_path / "select.md").read_text().strip() in result.output
    assert {row["policy"] for row in numbers["rows"]} == {"uniform", "pow-d"}
    assert numbers["machine"]["cores"] == os.cpu_count()
    assert (tmp_path / "select.png").read_bytes()[:4] == b"\x89PNG"


def test_select_refuses_what_it_cannot_measure():
    with pytest.raises(UnknownName):
        select.command(only="unifrom")
    with pytest.raises(InvalidInput, match="whole numbers"):
        select.command(only="uniform", cohorts="ten")


def test_the_gaussian_process_is_timed_with_and_without_missing_answers(tmp_path):
    gp.command(largest=100, cohort=5, repeats=1, seed=0, folder=tmp_path)
    row = json.loads((tmp_path / "gp.json").read_text())["rows"][0]
    assert row["clients"] == 100 and row["select_seconds"] > 0 and row["iteration_half_seconds"] >= 0
    assert row["update_seconds"] == pytest.approx(FedCor().iterations * row["iteration_seconds"])
    assert "| 100 |" in (tmp_path / "gp.md").read_text()


def test_the_work_that_is_written_out_is_what_the_simulator_does(small_j2, tmp_path):
    job = jobs.find("j2")
    simulator = jobs.simulator(job, jobs.federation(job))
    jobs.write_work(job, simulator, 3, tmp_path)
    work = Work(tmp_path)
    ours, loop = contenders.Fedpick(job, simulator), contenders.Sequential(work)
    mine, theirs = ours.turn(3), loop.turn(3)
    assert mine.accuracy == pytest.approx(theirs.accuracy, abs=1e-6)
    assert 0 < mine.first <= mine.seconds
    there, here = loop.finish(), ours.finish()
    moved = 0.0
    for name, start in work.initial().items():
        assert here[name] == pytest.approx(there[name], abs=2e-6)
        moved = max(moved, float(np.abs(here[name] - start).max()))
    assert moved > 1e-3  # or the comparison would be empty
    batches, sizes = work.array("batches"), simulator.examples.sizes
    for place, client in enumerate(work.array("cohorts")[0]):
        rows = batches[0, place] - simulator.examples.starts[client]
        assert (rows >= 0).all() and (rows < sizes[client]).all()


def test_ratios_are_taken_turn_by_turn_and_a_missing_peer_is_named(small_j2, monkeypatch):
    # An interpreter without any packages: no peer can be there.
    monkeypatch.setattr(machine, "matrix_rate", lambda: 100.0)
    bare = str(Path(sys.base_prefix) / "bin" / Path(sys.executable).resolve().name)
    result = sim.compare("j2", ["sequential", "torch"], 2, bare, lambda text: None)
    assert list(result["contenders"]) == ["fedpick", "sequential"]
    assert "torch" in result["missing"]
    loop, ours = result["contenders"]["sequential"], result["contenders"]["fedpick"]
    assert loop["ratio"] == pytest.approx(np.median(np.array(ours["rates"]) / loop["rates"]))
    assert loop["ratio_lowest"] <= loop["ratio"] <= loop["ratio_highest"]
    assert loop["largest_difference"] < 1e-5 * max(1, result["largest_weight"])
    text = sim.as_markdown({"jobs": {"j2": result}})
    assert "Left out: torch" in text and "| sequential |" in text


def test_another_checkout_does_the_identical_work_in_turns(monkeypatch):
    monkeypatch.setattr(machine, "matrix_rate", lambda: 100.0)
    # The other process has the job as it is in the file: only the length of a turn may be changed here.
    monkeypatch.setitem(jobs.JOBS, "j2", replace(jobs.JOBS["j2"], turn=2))
    root = str(Path(__file__).parents[2])
    result = sim.compare("j2", [root], 1, sys.executable, lambda text: None)
    other = result["contenders"][root]
    assert result["missing"] == {} and other["start_seconds"] > 0
    assert other["accuracy"] == result["contenders"]["fedpick"]["accuracy"]
    assert other["largest_difference"] == 0
    with pytest.raises(InvalidInput, match="has a folder src/fedpick"):
        sim.compare("j2", [root + "/docs"], 1, sys.executable, lambda text: None)


def test_the_bound_follows_the_measured_rate_of_themachine():
    job = jobs.find("j1")
    found = sim._bound(job, ours=[16.0, 24.0], rates=[160.0, 173.0])
    assert found["bound_rounds_per_second"] == pytest.approx(39.14, abs=0.01)
    assert found["percent_of_bound"] == pytest.approx(51.1, abs=0.1)
    assert found["percent_of_bound_by_turn"] == pytest.approx([44.2, 61.3], abs=0.1)
    assert sim._bound(jobs.find("j2"), [20.0], [173.0]) == {}


def test_sim_refuses_unknown_names():
    with pytest.raises(UnknownName):
        sim.command(jobs_="j4")
    with pytest.raises(UnknownName):
        sim.command(against="flowr")
    with pytest.raises(InvalidInput, match="at least 1"):
        sim.command(repeats=0)


def test_a_program_that_breaks_down_is_left_out_with_its_last_words(small_j2, tmp_path):
    (tmp_path / "job.json").write_text("{}")
    with pytest.raises(contenders.ContenderMissing, match=r"ended with code|torch"):
        contenders.Program("torch", Work(tmp_path), sys.executable)


def test_made_up_clients_share_one_array_and_the_memory_of_many_is_measured():
    dealt = scale.made_up(50, 4, 3)
    assert dealt.num_clients == 50 and len(dealt.x) == 200
    assert [len(dealt.rows(client)) for client in (0, 49)] == [4, 4]
    # In a process of its own, as the benchmark does: the most memory ever is of the whole process.
    program = (
        "from benchmarks.speed import scale; import json; print(json.dumps(scale.measure_million(20000, 10, 100, 1)))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    found = json.loads(said)
    assert found["examples"] == 200_000 and found["round_seconds"] > 0
    assert found["data_mebibytes"] == pytest.approx(200_000 * 404 / 2**20)
    assert found["data_mebibytes"] < found["training_mebibytes"] <= found["with_losses_mebibytes"]


def test_clients_that_are_not_selected_are_compared_in_turns():
    found = scale.unselected(few=60, many=120, repeats=1)
    assert found["train_ratio"] == pytest.approx(found["train_seconds_many"] / found["train_seconds_few"])
    assert found["round_seconds_few"] >= found["train_seconds_few"] > 0


def test_the_first_start_compiles_everything_itself(monkeypatch, tmp_path):
    folders = []

    def fresh(what, **environment):
        mine = Path(environment["XDG_CACHE_HOME"]) / "fedpick"
        monkeypatch.setenv("XDG_CACHE_HOME", environment["XDG_CACHE_HOME"])
        assert data.cache_directory() == mine  # the program will look where the benchmark thinks
        folders.append((mine / scale.COMPILED).exists())
        (mine / scale.COMPILED).mkdir(exist_ok=True)
        (mine / scale.COMPILED / "program").touch()
        now = time.time()
        return {"trained_at": now + 1, "evaluated_at": now + 2}

    (tmp_path / "fedpick" / scale.COMPILED).mkdir(parents=True)
    (tmp_path / "fedpick" / "mnist").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(scale, "_in_fresh_process", fresh)
    found = scale.start(repeats=1)
    assert folders == [False, True]
    assert found["first_trained_seconds"] == pytest.approx(1, abs=0.5)
    assert list((tmp_path / "fedpick" / scale.COMPILED).iterdir()) == []

    monkeypatch.setattr(scale, "_in_fresh_process", lambda what, **environment: {"trained_at": 0, "evaluated_at": 0})
    with pytest.raises(InvalidInput, match="compiled nothing"):
        scale.start(repeats=1)


def test_a_contender_waits_when_its_turn_is_done(monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdin", io.StringIO("2\n1\n"))
    turns = Turns.__new__(Turns)
    turns._out, turns.left, turns._start = io.StringIO(), 0, 0.0
    turns._first = turns._accuracy = None
    assert turns.begin()
    assert turns.done(0.25) and turns.done(0.5) and not turns.done(0.75)
    said = [json.loads(line) for line in turns._out.getvalue().splitlines()]
    assert said[0] == {"ready": True}
    assert [words["accuracy"] for words in said[1:]] == [0.5, 0.75]
    assert said[1]["first"] <= said[1]["seconds"]


def test_checkouts_write_rounds_in_turns(tmp_path):
    root = str(Path(__file__).parents[2])
    options = ["--checkout", root, "--checkout", root, "--rounds", "10", "--turns", "1", "--folder", str(tmp_path)]
    assert runner.invoke(app, ["store", *options]).exit_code == 0
    (row,) = json.loads((tmp_path / "store.json").read_text())["rows"]  # one checkout, named twice
    assert len(row["seconds"]) == 2
    assert all(0 < seconds < 1 for seconds in row["seconds"])
    with pytest.raises(InvalidInput, match="has a folder src/fedpick"):
        runner.invoke(app, ["store", "--checkout", str(tmp_path)], catch_exceptions=False)


@pytest.mark.slow
def test_flower_does_the_identical_work(small_j2, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr(machine, "matrix_rate", lambda: 100.0)
    result = sim.compare("j2", ["flower"], 1, sys.executable, lambda text: None)
    assert result["missing"] == {}
    flower = result["contenders"]["flower"]
    assert flower["largest_difference"] < 1e-5 * max(1, result["largest_weight"])
    assert flower["start_seconds"] > 0
