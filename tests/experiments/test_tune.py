from __future__ import annotations

import tomllib

import numpy as np
import pytest

from fedpick.core.errors import InvalidInput
from fedpick.experiments import tuning as tune
from fedpick.experiments.spec import Named, PolicySpec, Spec
from fedpick.experiments.store import Store
from tests.experiments.tiny import empty_round


def make_spec(**changes) -> Spec:
    values = {
        "title": "toy",
        "data": Named(name="toy"),
        "partition": Named(name="iid", options={"num_clients": 4}),
        "task": Named(name="toy"),
        "availability": Named(name="ideal"),
        "local": {"lr": {"initial": 0.5, "milestones": [10]}, "steps": 2},
        "server": {},
        "faults": {},
        "simulator": {},
        "rounds": 6,
        "budget": 2,
        "seeds": (0, 1),
        "evaluate_every": 1,
        "losses_every": 2,
        "local_accuracy_every": None,
        "targets": (0.5,),
        "loss_targets": (0.7,),
        "policies": (PolicySpec(name="uniform", label="a"), PolicySpec(name="md", label="b", local={"lr": 0.2})),
    }
    return Spec(**{**values, **changes})


def test_every_policy_gets_the_same_grid_and_a_schedule_keeps_its_shape():
    grid = tune.candidates([0.1, 0.01], [1.0, 0.3, 0.1])
    searched = tune.grid_spec(make_spec(), grid)
    assert len(searched.policies) == 2 * 6
    assert [policy.label for policy in searched.policies[:2]] == ["a local=0.1 server=1", "a local=0.1 server=0.3"]
    assert searched.policies[0].local == {"lr": {"initial": 0.1, "milestones": [10]}}
    assert searched.policies[6].local == {"lr": 0.1}
    assert {policy.server["lr"] for policy in searched.policies[6:]} == {1.0, 0.3, 0.1}
    assert (searched.rounds, searched.seeds, searched.validation_every) == (6, (0, 1), 1)
    assert tune.grid_spec(make_spec(rounds=200), grid).validation_every == 10
    only_server = tune.grid_spec(make_spec(), tune.candidates([], [0.3]))
    assert only_server.policies[1].local == {"lr": 0.2}


def test_a_rate_is_tried_by_one_option_only():
    with pytest.raises(InvalidInput, match=r"--try server\.lr and --server-lr set the same rate"):
        tune.candidates([], [0.3], {"server.lr": [0.1, 0.2]})


def test_tables_and_lists_can_be_tried():
    tried = [{"initial": 0.1}, {"initial": 0.2}]
    searched = tune.grid_spec(make_spec(), tune.candidates([], [], {"local.lr": tried}))
    assert [policy.local["lr"] for policy in searched.policies] == 2 * tried


def test_validation_data_are_held_out_where_the_spec_has_none():
    grid = tune.candidates([0.1], [])

    def options(**given):
        return tune.grid_spec(
            make_spec(partition=Named(name="iid", options=given)), grid, holdout=0.3
        ).partition.options

    assert options() == {"holdout": 0.3}
    assert options(holdout=0.1) == {"holdout": 0.1}
    assert options(split=[0.8, 0.05, 0.15]) == {"split": [0.8, 0.05, 0.15]}
    with pytest.raises(InvalidInput, match="no share for validation"):
        options(split=[0.8, 0.0, 0.2])


@pytest.mark.parametrize(("local", "server"), [([], []), ([0.0], []), ([0.1, 0.1], []), ([], [float("nan")])])
def test_a_grid_that_makes_no_sense_is_refused(local, server):
    with pytest.raises(InvalidInput):
        tune.candidates(local, server)


def searched_store(path, searched, value):
    """A finished search; `value(run, round)` is (loss, accuracy) on validation data."""
    store = Store(path)
    experiment = store.experiment(store.register(searched))
    for run in store.runs(experiment.id):
        store.take(run.id)
        for index in range(searched.rounds):
            record = empty_round(index, evaluation={"validation": np.array(value(run, index))})
            store.write_round(run.id, record, checkpoint=None)
    return store, experiment


def test_the_best_mean_of_the_last_evaluations_wins(tmp_path):
    spec, grid = make_spec(), tune.candidates([0.3, 0.1, 0.01], [])
    searched = tune.grid_spec(spec, grid)

    def value(run, index):
        rate = run.settings["local"]["lr"]
        rate = rate["initial"] if isinstance(rate, dict) else rate
        best = {"uniform": 0.1, "md": 0.01}[run.policy]
        late = index >= 4
        accuracy = (0.9 if rate == best else 0.5) if late else (0.1 if rate == best else 1.0)
        # The largest rate looks best but its loss left the finite numbers in one seed.
        loss = np.nan if rate == 0.3 and run.seed == 1 else 1.0 if rate == best else 0.1
        return loss, accuracy + 0.01 * run.seed if rate != 0.3 else 1.0

    store, experiment = searched_store(tmp_path / "a.sqlite", searched, value)
    choices = tune.choose(store, experiment, spec, grid, evaluations=2)
    assert [choice.best.local_lr for choice in choices] == [0.1, 0.01]
    assert [score for _, score in choices[0].scores] == pytest.approx([None, 0.905, 0.505])
    assert [choice.best.local_lr for choice in tune.choose(store, experiment, spec, grid, score="loss")] == [0.01, 0.1]
    text = tune.tuned_text(spec, choices, command="fedpick tune toy.toml", searched=searched, score="accuracy")
    assert "#   fedpick tune toy.toml\n" in text
    assert "# a: local=0.1, of\n#   local=0.3: not finite\n#   local=0.1: 0.9050\n#   local=0.01: 0.5050\n" in text
    assert "# b: local=0.01 (at the edge of the grid), of\n" in text
    assert "6 rounds,\n# seeds 0, 1;" in text
    written = tomllib.loads(text)
    assert written["policies"][0]["local"] == {"lr": {"initial": 0.1, "milestones": [10]}}
    assert written["policies"][1]["local"] == {"lr": 0.01}
    assert "holdout" not in written["partition"]
    assert written["run"]["targets"] == [0.5]


def test_a_search_in_which_nothing_stayed_finite_chooses_nothing(tmp_path):
    spec, grid = make_spec(), tune.candidates([3.0], [])
    store, experiment = searched_store(tmp_path / "a.sqlite", tune.grid_spec(spec, grid), lambda *_: (np.inf, 0.1))
    with pytest.raises(InvalidInput, match="kept a finite"):
        tune.choose(store, experiment, spec, grid)
