from __future__ import annotations

import pytest

from fedpick.core.errors import InvalidInput
from fedpick.data.dirichlet import DirichletClass
from fedpick.data.partition import Partition
from fedpick.data.synthetic import Quadratic, Synthetic
from fedpick.experiments.settings import RunSettings, build_settings, federation_of, federation_texts, run_of
from fedpick.experiments.spec import parse_spec
from fedpick.sim import LearningRate, LocalTraining, ServerStep
from fedpick.sim.settings import SimulatorSettings
from fedpick.sim.tasks import Mlp

CONTENT = {
    "data": {"name": "synthetic", "alpha": 0.5, "num_clients": 6},
    "partition": {"name": "dirichlet-class", "alpha": 0.3, "num_clients": 4, "split": [0.8, 0.1, 0.1], "seed": 9},
    "task": {"name": "mlp", "hidden": [8, 4]},
    "local": {"lr": {"initial": 0.1, "milestones": [3]}, "steps": 2},
    "simulator": {"losses_on": "validation"},
    "availability": {"name": "log-normal", "beta": 0.3, "history": 7},
    "run": {"rounds": 3, "budget": 2, "seeds": [5], "validation_every": 2},
    "policies": [{"name": "ca-fed", "minimum_loss": [1, 2], "server": {"momentum": 0.9}}],
}


def stored(**changes):
    spec = parse_spec({**CONTENT, **changes})
    return spec.settings_of(spec.policies[0], spec.seeds[0])


def test_stored_settings_become_typed_objects():
    parts = build_settings(stored())
    assert parts.data == Synthetic(alpha=0.5, num_clients=6, seed=5)
    assert parts.partition == Partition(
        name="dirichlet-class", dealer=DirichletClass(alpha=0.3), num_clients=4, split=(0.8, 0.1, 0.1), seed=9
    )
    assert parts.task == Mlp(hidden=(8, 4))
    assert parts.local == LocalTraining(lr=LearningRate(initial=0.1, milestones=(3,)), steps=2)
    assert (parts.server, parts.faults) == (ServerStep(momentum=0.9), None)
    assert parts.simulator == SimulatorSettings(losses_on="validation")
    assert (parts.history, parts.availability_seed, parts.seed) == (7, 5, 5)
    assert (parts.budget, parts.evaluate_every, parts.losses_every, parts.validation_every) == (2, 1, None, 2)
    assert type(parts.policy).__name__ == "CAFed"


def test_settings_of_runs_from_before_validation_was_stored_are_read():
    settings = stored()
    del settings["validation_every"]
    assert build_settings(settings).validation_every is None


def test_a_seed_is_part_of_the_federation_only_where_something_is_random():
    # The texts are hashed into the keys of stored federations.
    data, partition = federation_texts(stored())
    assert data == '{"alpha": 0.5, "name": "synthetic", "num_clients": 6, "seed": 5}'
    assert partition == (
        '{"alpha": 0.3, "name": "dirichlet-class", "num_clients": 4, "seed": 9, "split": [0.8, 0.1, 0.1]}'
    )
    assert federation_texts(stored(data={"name": "fmnist", "seed": 3}))[0] == '{"name": "fmnist"}'


def test_federations_are_dealt_once_per_process():
    settings = stored(data={"name": "quadratic"}, partition={"name": "natural"}, task={"name": "quadratic"})
    assert build_settings(settings).data == Quadratic(seed=5)
    assert federation_of(settings) is federation_of(settings)
    assert federation_of(settings) is not federation_of({**settings, "seed": 6})


def test_a_number_of_seeds_counts_from_0():
    assert run_of({"rounds": 2, "seeds": 3}).seeds == (0, 1, 2)
    assert run_of({"rounds": 2, "seeds": [4]}).seeds == (4,)
    assert run_of({"rounds": 2}) == RunSettings(rounds=2)
    with pytest.raises(InvalidInput, match="a number from 1 to 10,000 or a list of seeds"):
        run_of({"rounds": 2, "seeds": 0})


def test_the_sketch_of_updates_is_a_setting_of_the_simulator():
    counted = stored(simulator={"losses_on": "validation", "sketch": "count-sketch"})
    assert build_settings(counted).simulator.sketch == "count-sketch"
    assert build_settings(stored()).simulator.sketch == "head"
    assert "sketch" not in stored()["simulator"]  # a younger meaning: runs without it keep their identity
    older = build_settings(stored(simulator={"sketch": 64})).simulator
    assert (older.sketch, older.update_length) == ("head", 64)
