"""Advice: the spec it runs, when it stops, what it says, and what it refuses before anything is written."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing
from html import escape

import pytest

import fedpick
from fedpick.core.errors import DataError, FedpickError, InvalidInput

pytest.importorskip("jax", reason="the simulator is not installed: pip install 'fedpick[sim]'")

from fedpick import advice
from fedpick.data.client_table import read_clients
from fedpick.experiments.runner import run
from fedpick.experiments.settings import build_settings
from fedpick.experiments.spec import PolicySpec, load_specs
from fedpick.experiments.store import Store, open_store
from fedpick.report.analysis import PolicyResults, Results, common_time, load_results
from fedpick.report.html import page_of
from fedpick.report.material import read_material

TABLE = "id,label_a,label_b,label_c\nnorth,9,0,1\nsouth,0,12,0\neast,3,3,8\nwest,0,1,20\n"
LOG = "client,time,state\nwest,0,on\nnorth,0,on\nnorth,600,off\nsouth,0,off\nsouth,600,on\neast,0,on\neast,1800,on\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clinics.csv").write_text(TABLE)
    (tmp_path / "log.csv").write_text(LOG)
    return tmp_path


def small(**options):
    settings = {"budget": 2, "rounds": 3, "seeds": 2, "policies": ["pow-d"], "changes": {"local": {"steps": 2}}}
    return fedpick.advise("clinics.csv", **{**settings, **options})


def test_the_spec_reproduces_the_runs_without_computing_them_again(folder):
    given = small(availability="log.csv")
    assert given.spec.name == "clinics-advice.toml"
    (spec,) = load_specs(given.spec)
    assert spec.hash == given.experiment.hash and spec.title == given.experiment.title
    with closing(Store()) as store:
        before = [(each.id, each.wall_seconds) for each in store.runs(given.experiment.id)]
        report = run(spec, store)
        assert report.complete
        assert [(each.id, each.wall_seconds) for each in store.runs(report.experiment.id)] == before
        (federation,) = {each.federation_id for each in store.runs(report.experiment.id) if each.seed == 0}
        facts = store.federation(federation)
    assert facts.label_histogram[:, :3].tolist() == [[9, 0, 1], [0, 12, 0], [3, 3, 8], [0, 1, 20]]


def test_the_answer_says_what_it_is_and_what_it_cannot_know(folder):
    given = small()
    assert given.policy in ("uniform", "pow-d")
    text = str(given)
    for part in (given.headline, "What this cannot know:", "stand-in, digits", "always available", "with_policy("):
        assert part in text
    assert f"fedpick run {given.spec}" in text
    assert repr(given) == f"Advice({given.policy!r}, spec='clinics-advice.toml')"
    assert given._repr_html_().startswith("<pre>Use ")


def test_logs_are_matched_by_the_ids_of_the_table(folder):
    given = small(availability="log.csv")
    with closing(open_store()) as store:
        choices = store.choices(store.runs(given.experiment.id)[0].id, limit=2)
        masks = [mask.tolist() for choice in choices for mask in choice.available]
    #            north  south  east  west
    assert masks == [[True, False, True, True], [False, True, True, True]]


def test_epochs_replace_the_steps_of_local_training(folder):
    local = small(changes={"local": {"epochs": 1}}).experiment.spec["local"]
    assert local["epochs"] == 1 and "steps" not in local


@pytest.mark.parametrize(
    ("options", "files", "sentence"),
    [
        ({}, {"clinics.csv": TABLE.replace("12", "many")}, "clinics.csv, line 3: label_b must be a whole number"),
        ({}, {"clinics.csv": TABLE.replace("id,", "")}, "clinics.csv, header: found no column of ids"),
        ({}, {"clinics.csv": TABLE.replace("east", "south")}, "line 4: the client 'south' occurs twice"),
        ({}, {"clinics.csv": TABLE.replace("20", "-20")}, "line 5: label_c must be a whole number of at least 0"),
        ({"availability": "log.csv"}, {"log.csv": LOG + "nroth,9,on\n"}, "log.csv, line 9: there is no client 'nroth'"),
        ({"availability": "log.csv"}, {"log.csv": LOG.replace("west,0,on\n", "")}, "'west' has no log"),
        ({"budget": 5}, {}, "A budget of 5 is more than the 4 clients"),
        ({"budget": 0}, {}, "'budget' parameter of advise"),
        ({"seeds": 1}, {}, "'seeds' parameter of advise"),
        ({"data": "nosuch"}, {}, "no data set named 'nosuch'"),
        ({"policies": ["nosuch"]}, {}, "no policy named 'nosuch'"),
        ({"changes": {"task": {"nosuch": 1}}}, {}, "no key 'nosuch'"),
        ({"changes": {"run": {"seeds": [7, 8]}}}, {}, "give the most of them as --seeds"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_written(folder, options, files, sentence):
    for name, text in files.items():
        (folder / name).write_text(text)
    before = sorted(folder.rglob("*"))
    with pytest.raises(FedpickError) as refusal:
        small(**options)
    assert sentence in str(refusal.value)
    assert sorted(folder.rglob("*")) == before


DEVICES = (
    "id,seconds_per_example,download,upload\neast,0.01,1e6,1e6\nwest,0.02,1e6,1e6\nnorth,0.03,1e6,1e6\n"
    "south,9,1e6,1e6\n"
)


def test_with_speeds_policies_are_compared_after_the_same_time(folder):
    (folder / "devices.csv").write_text(DEVICES)
    given = small(devices="devices.csv", policies=["tifl"])
    assert "accuracy after" in given.verdict.headline and "of your devices' time" in str(given)
    (spec,) = load_specs(given.spec)
    assert spec.hash == given.experiment.hash
    fleet = build_settings(spec.settings_of(spec.policies[0], 0)).devices.fleet(
        fedpick.Clients(num_examples=[1] * 4), 0
    )
    assert fleet.seconds_per_example.tolist() == [0.03, 9, 0.01, 0.02]  # in the order of the table
    with closing(open_store()) as store:
        results = load_results(store, given.experiment)
        page = page_of(read_material(store, given.experiment), window=advice.WINDOW, by=advice.JUDGED_BY)
    ends = [each.rounds["clock"][-1] for policy in results.policies for each in policy.runs]
    assert common_time(results.policies) == min(ends)
    assert escape(given.verdict.headline).replace(" %", "\N{NO-BREAK SPACE}%") in page
    assert advice.short_list(read_clients("clinics.csv"), devices=True)[-2:] == ("oort", "tifl")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (DEVICES.replace("west", "wset"), "devices.csv:3: there is no client 'wset'"),
        (DEVICES.replace("west", "east"), "devices.csv:3: the client 'east' occurs twice"),
        (DEVICES.replace("west,0.02,1e6,1e6\n", ""), "the client 'west' has no device"),
        (DEVICES.replace("0.02", "fast"), "devices.csv:3: speeds and links must be numbers above 0"),
        (DEVICES.replace("id,", "who,"), "It lacks 'id'"),
    ],
)
def test_bad_devices_are_one_sentence_and_nothing_is_written(folder, text, sentence):
    (folder / "devices.csv").write_text(text)
    before = sorted(folder.rglob("*"))
    with pytest.raises(FedpickError) as refusal:
        small(devices="devices.csv")
    assert sentence in str(refusal.value)
    assert sorted(folder.rglob("*")) == before


def test_the_ids_of_a_log_need_a_log_with_ids(folder):
    (folder / "log.json").write_text('{"a": {"messages": "2020-01-28 18:00:00\\tbattery_charged_on\\n"}}')
    with pytest.raises((DataError, InvalidInput)):
        small(availability="log.json")


def made(label: str, values) -> PolicyResults:
    """A policy whose runs ended with these accuracies."""
    import numpy as np

    from fedpick.report.analysis import RunResults

    class Fact:
        def __init__(self, seed):
            self.seed = seed

    runs = tuple(
        RunResults(
            run=Fact(seed), rounds={"accuracy": np.array([value]), "round": np.array([0])}, counts=np.zeros(1), wanted=1
        )
        for seed, value in enumerate(values)
    )
    return PolicyResults(label=label, policy=label, runs=runs)


@pytest.mark.parametrize(
    ("policies", "worse", "clear"),
    [
        # One is better than all others by paired intervals: clear, and the others are dropped.
        ({"uniform": [0.50, 0.51, 0.52], "a": [0.80, 0.81, 0.82], "b": [0.60, 0.61, 0.62]}, ["b"], True),
        # The same within a point: clear, and nothing is dropped.
        ({"uniform": [0.800, 0.811, 0.820], "a": [0.801, 0.810, 0.821]}, [], True),
        # Few seeds that happen to differ alike: too little to drop it.
        ({"uniform": [0.5, 0.6, 0.5], "a": [0.800, 0.812, 0.820], "b": [0.795, 0.807, 0.815]}, [], True),
        # Noise: go on.
        ({"uniform": [0.70, 0.80, 0.75], "a": [0.80, 0.72, 0.79]}, [], False),
        # The loser goes, the two best stay to be told apart.
        ({"uniform": [0.50, 0.51, 0.52], "a": [0.80, 0.75, 0.82], "b": [0.75, 0.81, 0.79], "c": [0.1, 0.1, 0.1]},
         ["c"], False),
    ],
)  # fmt: skip
def test_it_stops_where_the_answer_is_clear(policies, worse, clear):
    results = Results(experiment=None, policies=tuple(made(*each) for each in policies.items()))
    found = advice._judge(results)
    assert (sorted(found[0]), found[1]) == (worse, clear)


def test_a_dropped_policy_is_not_run_again(folder, monkeypatch):
    """The later looks leave it out; the written spec has a variant for each look."""
    monkeypatch.setattr(advice, "LOOKS", (2, 3))
    judged = iter([({"md": -9.0}, False), ({}, True)])
    monkeypatch.setattr(advice, "_judge", lambda results: next(judged))
    given = small(policies=["md", "pow-d"], seeds=3)
    assert given.dropped == ("md was dropped after 2 seeds: -9.0 points from the best one.",)
    specs = load_specs(given.spec)
    assert [[each.label for each in spec.policies] for spec in specs] == [
        ["uniform", "md", "pow-d"],
        ["uniform", "pow-d"],
    ]
    assert [len(spec.seeds) for spec in specs] == [2, 3]
    assert specs[-1].hash == given.experiment.hash
    with closing(open_store()) as store:
        assert len(store.experiments()) == 2
        results = load_results(store, given.experiment)
        assert sorted(each.label for each in results.policies) == ["pow-d", "uniform"]


def test_a_run_that_fails_ends_the_advice(folder, monkeypatch):
    from fedpick.experiments.runner import Report

    monkeypatch.setattr(
        advice, "run", lambda *_, **__: Report(experiment=None, finished=0, stopped=0, failures={"a, seed 0": "why"})
    )
    with pytest.raises(advice.Unfinished, match="No advice: a, seed 0: why"):
        small()


def flower_lines(name, budget, **parameters):
    return advice._flower_lines(PolicySpec(name=name, label=name, parameters=parameters), budget)


def test_the_lines_for_flower_fit_what_the_policy_needs():
    assert 'probe="evaluate"' in flower_lines("pow-d", 10)
    assert "probe" not in flower_lines("herd", 10)
    assert "label_histogram" in flower_lines("fedgs", 10)


def test_the_lines_for_flower_use_the_policy_as_it_was_compared(folder):
    assert 'get("pow-d", num_candidates=8), budget=10, probe' in flower_lines("pow-d", 10, num_candidates=8)
    given = small(changes={"local": {"steps": 2}, "run": {"budget": 3}})
    assert "budget=3" in given.flower


def test_the_lines_for_flower_run():
    pytest.importorskip("flwr")
    from flwr.serverapp.strategy import FedAvg

    for policy in ("uniform", "herd", "pow-d", "fedgs", "fedcbs"):
        exec(flower_lines(policy, 3), {"FedAvg": FedAvg})


@pytest.mark.slow
def test_the_hospitals_of_the_guide_get_the_answer_of_the_guide(tmp_path, monkeypatch):
    """As printed, in under three minutes of CPU time: a busy machine must not decide this test.

    Ten seeds of all policies give the same answer (docs/results/advise.md).
    """
    from tests.test_docs import FILE, ROOT, python_blocks

    page = ROOT / "docs/guides/advise.md"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for file in FILE.finditer(page.read_text()):
        (tmp_path / file["name"]).write_text(file["content"])
    begun, namespace = time.process_time(), {}
    exec("\n".join(python_blocks(page)), namespace)
    sys.modules.pop("make_hospitals")
    assert time.process_time() - begun < 180
    assert f"Use {namespace['advice'].policy}." in page.read_text()


def test_fedpick_stays_light():
    code = "import fedpick, sys; print('fedpick.advice' in sys.modules, 'jax' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False", "False"]
