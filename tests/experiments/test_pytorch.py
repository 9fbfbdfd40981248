"""PyTorch in experiments: modules by import path, fedpick's tasks with engine = "torch", resuming to the same bytes."""

from __future__ import annotations

import pytest

from fedpick.core.errors import InvalidInput
from fedpick.experiments.run import build
from fedpick.experiments.runner import run
from fedpick.experiments.spec import load_spec
from fedpick.experiments.store import Store

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'fedpick[torch]'")

MODULE = """
from torch import nn


def network(*, input_shape: tuple[int, ...], num_classes: int, hidden: int = 4):
    (inputs,) = input_shape
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Dropout(0.3), nn.ReLU(), nn.Linear(hidden, num_classes))


def number():
    return 5
"""
SPEC = """
[data]
name = "synthetic"
num_clients = 8
dimension = 5
[partition]
name = "natural"
[task]
{task}
[local]
lr = 0.1
steps = 2
batch_size = 8
[simulator]
{simulator}
[run]
rounds = 4
budget = 3
seeds = 2
[[policies]]
name = "pow-d"
"""
TASKS = {
    "a module": ('name = "torch_module_of_a_test:network"\nhidden = 6', ""),
    "a task of fedpick": ('name = "logistic"', 'engine = "torch"'),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the module, once: a process imports a module of one name only once."""
    folder = tmp_path_factory.mktemp("pytorch")
    (folder / "torch_module_of_a_test.py").write_text(MODULE)
    return folder


def write(folder, task, simulator):
    (folder / "spec.toml").write_text(SPEC.format(task=task, simulator=simulator))
    return load_spec(folder / "spec.toml")


def compute(spec, path, *rounds):
    """The last checkpoint of every run, after computing up to each of these numbers of rounds."""
    store = Store(str(path))
    for count in rounds:
        finished = run(spec.override(rounds=count), store)
        assert finished.complete, finished.failures
    runs = store.runs(finished.experiment.id)
    found = []
    for each in runs:
        with store.computing(each.id):
            found.append(store.resume(each.id))
    assert all(store.run(each.id).manifest["simulator"]["engine"] == "torch" for each in runs)
    store.close()
    return found


@pytest.mark.parametrize("kind", TASKS)
def test_a_resumed_experiment_ends_in_the_same_bytes(kind, folder, tmp_path):
    spec = write(folder, *TASKS[kind])
    whole, resumed = compute(spec, tmp_path / "1.sqlite", 4), compute(spec, tmp_path / "2.sqlite", 2, 4)
    assert whole == resumed and len({content for _, content in whole}) == 2


def test_mistakes_are_told_before_the_first_round(folder):
    spec = write(folder, TASKS["a module"][0], 'engine = "torch"')
    with pytest.raises(InvalidInput, match="brings its engine with it"):
        build(spec.settings_of(spec.policies[0], 0))
    spec = write(folder, 'name = "torch_module_of_a_test:number"', "")
    with pytest.raises(InvalidInput, match=r"must return a fedpick\.sim\.Task or a torch\.nn\.Module\. Got int"):
        build(spec.settings_of(spec.policies[0], 0))


def test_the_default_engine_is_no_part_of_the_identity(folder):
    plain, chosen = (write(folder, 'name = "logistic"', line) for line in ("", 'engine = "torch"'))
    assert "engine" not in plain.to_dict()["simulator"] and plain.hash != chosen.hash
