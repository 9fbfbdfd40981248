"""The specs that come with the project: every one is valid, and those of before resolve to the same experiments."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from fedpick.experiments import presets
from fedpick.experiments.inheritance import experiment_names
from fedpick.experiments.spec import load_spec, parse_spec
from fedpick.experiments.toml import toml_text

FOLDER = Path(__file__).parents[2] / "benchmarks/specs"
BASES = ("cafed.toml", "cafed-mnist.toml", "cafed-synthetic.toml")
FILES = sorted(file for file in FOLDER.glob("*.toml") if file.name not in BASES)
# Written when every experiment was a file of its own. Changed on purpose since: the guard is off in all of them,
# ca-fed-code has the rate of its own search (figures 1b and 5), and figure 1a has a row of adafed with server rate 1.
BEFORE = json.loads((Path(__file__).parent / "fixtures/specs_before_inheritance.json").read_text())
YOUNGER = re.compile(r"arena-|cafed-(rates|why)|herd-|hics-|time-|.*-(reduced|quarter)\.toml")


@pytest.mark.parametrize("old", BEFORE.values(), ids=BEFORE)
def test_a_spec_of_before_is_the_same_experiment(old):
    spec = load_spec(FOLDER / old["spec"])
    assert (spec.title, spec.hash) == (old["title"], old["hash"])
    keys = {spec.run_key(policy, seed) for policy in spec.policies for seed in spec.seeds}
    assert len(keys) == old["runs"]
    assert len({policy.label for policy in spec.policies}) == len(spec.policies)
    shown = tomllib.loads(toml_text(spec.to_dict()))
    assert parse_spec(shown).hash == spec.hash


def test_every_experiment_of_a_paper_is_one_of_before():
    files = [file for file in FILES if not YOUNGER.match(file.name)]
    names = {Path(name).name for file in files for name in experiment_names(file)}
    assert names == {old["spec"] for old in BEFORE.values()}


def test_younger_specs_are_valid():
    for file in FILES:
        if YOUNGER.match(file.name):
            for name in experiment_names(file):
                assert load_spec(name).policies


def test_more_rates_of_ca_fed_reuse_the_runs_of_figure_1():
    figure, rates = load_spec(FOLDER / "cafed-fig1.toml#mnist-tuned"), load_spec(FOLDER / "cafed-rates.toml")
    known = {figure.run_key(policy, 0) for policy in figure.policies}
    new = [policy.label for policy in rates.policies if rates.run_key(policy, 0) not in known]
    assert new == ["adafed server-lr=1"]


def test_the_demo_has_herd_and_its_page_names_every_policy():
    labels = [policy.label for policy in presets.demo().policies]
    assert "herd" in labels and "uniform" in labels
    page = (FOLDER.parents[1] / "docs/start/demo.md").read_text()
    assert not [label for label in labels if f"`{label}`" not in page]


@pytest.mark.parametrize("name", BASES)
def test_bases_say_that_they_are_no_experiments(name):
    assert "not an experiment" in (FOLDER / name).read_text().partition("\n[")[0]


def test_another_task_leaves_the_options_of_the_preset_behind():
    spec = presets.comparison(dataset="fmnist", policies=["uniform"], changes={"task": {"name": "logistic"}})
    assert spec.task.to_dict() == {"name": "logistic"}


def test_another_partition_keeps_what_all_partitions_share():
    spec = presets.comparison(dataset="fmnist", policies=["uniform"], partition="dirichlet-class")
    assert spec.partition.to_dict() == {"name": "dirichlet-class", "num_clients": 100, "holdout": 0.2}
