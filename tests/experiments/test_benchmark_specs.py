"""Every spec that comes with the project can be read: names, options and values."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("jax")

from fedpick.experiments import presets
from fedpick.experiments.spec import load_spec

SPECS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.toml"))


@pytest.mark.parametrize("file", SPECS, ids=lambda file: file.stem)
def test_spec_is_good(file):
    spec = load_spec(file)
    assert spec.rounds >= 1
    assert len({policy.label for policy in spec.policies}) == len(spec.policies)


def test_another_task_leaves_the_options_of_the_preset_behind():
    spec = presets.comparison(dataset="fmnist", policies=["uniform"], changes={"task": {"name": "logistic"}})
    assert spec.task.to_dict() == {"name": "logistic"}


def test_another_partition_keeps_what_all_partitions_share():
    spec = presets.comparison(dataset="fmnist", policies=["uniform"], partition="dirichlet-class")
    assert spec.partition.to_dict() == {"name": "dirichlet-class", "num_clients": 100, "holdout": 0.2}
