"""The experiments of FedCor and FedGP are accepted, and the paper's setting plays on a stand-in for its data."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedpick.experiments.inheritance import experiment_names
from fedpick.experiments.run import build
from fedpick.experiments.spec import load_spec, parse_spec

FOLDER = Path(__file__).parents[2] / "benchmarks/specs"

pytest.importorskip("jax")


def test_every_table_and_figure_has_its_spec():
    parts = ("2SPC", "1SPC", "Dir")
    expected = {
        f"fedcor-{data}{kind}.toml#{part}"
        for data in ("fmnist", "cifar10")
        for part in parts
        for kind in ("", "-interval", "-beta")
    }
    expected |= {f"fedgp-{data}.toml#{part}" for data in ("fmnist", "cifar10") for part in parts}
    expected |= {f"fedcor-fmnist-cost.toml#{part}" for part in parts}
    expected |= {"fedcor-cifar10-short.toml", "fedcor-cifar10-reduced.toml", "fedcor-fmnist-embedding.toml"}
    files = [path for pattern in ("fedcor-*.toml", "fedgp-*.toml") for path in FOLDER.glob(pattern)]
    assert {Path(name).name for file in files for name in experiment_names(file)} == expected


def test_the_counters_hold_probes_and_trials():
    content = load_spec(FOLDER / "fedcor-fmnist.toml", "2SPC").to_dict()
    content |= {"data": {"name": "digits"}, "task": {"name": "logistic"}, "local": {"lr": 0.1, "epochs": 1}}
    content["partition"] |= {"num_clients": 20}
    quick = {"warmup": 2, "interval": 3, "warmup_iterations": 5, "iterations": 5}
    content["policies"] = [{"name": "uniform", "weighting": "equal"}, {"name": "fedcor", **quick}]
    spec = parse_spec(content)
    totals = {}
    for policy in spec.policies:
        records = list(build(spec.settings_of(policy, 0)).rounds(6))
        totals[policy.name] = records[-1].counters.as_dict()
    # Rounds 0, 1 and 2 measure 20 clients once, round 5 twice.
    assert totals["fedcor"]["scalars_up"] == 5 * 20
    assert totals["uniform"]["scalars_up"] == 0
    # Five of the twenty train anyway; the trial cohort has the model from the probe, its own goes to all clients.
    assert totals["fedcor"]["models_down"] == 6 * 5 + 3 * 15 + (15 + 20)
    assert totals["fedcor"]["updates_up"] == totals["uniform"]["updates_up"] + 5
