"""The runner with the real simulator: tiny data, real training."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from tests.experiments.store_content import content

pytest.importorskip("jax")

from fedpick.core.errors import InvalidInput, MissingSignal
from fedpick.experiments import presets
from fedpick.experiments.executors import StopFlag
from fedpick.experiments.progress import Progress
from fedpick.experiments.run import build, refuse_early
from fedpick.experiments.runner import run
from fedpick.experiments.spec import SpecError, parse_spec
from fedpick.experiments.store import Store
from fedpick.report import analysis, lies, tables


def small_spec(policies=("uniform", "pow-d"), **changes):
    run_section = {"rounds": 6, "budget": 3, "seeds": 1, "targets": [0.2], "losses_every": 3, **changes.pop("run", {})}
    sections = {
        "partition": {"num_clients": 12},
        "task": {"name": "logistic"},
        "local": {"epochs": 1},
        "run": run_section,
        **changes,
    }
    return presets.comparison(dataset="digits", policies=list(policies), changes=sections)


class StopAfter(Progress):
    def __init__(self, flag, updates):
        self.flag, self.left = flag, updates

    def update(self, run_id, done, accuracy):
        self.left -= 1
        if self.left == 0:
            self.flag.set()


@pytest.mark.parametrize("more", [{}, {"attacks": {"kind": "inflate-sybils"}, "run": {"guard": "strict"}}])
def test_stopped_and_resumed_equals_uninterrupted(tmp_path, more):
    changes = {
        "availability": {"name": "log-normal", "beta": 0.3},
        "server": {"momentum": 0.5},
        "faults": {"dropout": 0.2, "nan": 0.1},
        **more,
    }
    spec = small_spec(("uniform", "afl"), **changes)
    whole, cut = Store(tmp_path / "whole.sqlite"), Store(tmp_path / "cut.sqlite")
    assert run(spec, whole, processes=1).complete
    for updates in (2, 3):
        flag = StopFlag()
        assert run(spec, cut, processes=1, stop=flag, progress=StopAfter(flag, updates)).stopped
    assert run(spec, cut, processes=1).complete
    assert content(cut) == content(whole)
    accuracy = [run.accuracy for run in whole.runs(1)]
    assert all(0 < value <= 1 for value in accuracy)


def test_every_record_is_there(tmp_path):
    store = Store(tmp_path / "a.sqlite")
    report = run(small_spec(), store, processes=1)
    for each in store.runs(report.experiment.id):
        columns = store.rounds(each.id)
        assert np.isfinite(columns["accuracy"]).all()
        assert np.isfinite(columns["objective"]).tolist() == [False, False, True] * 2
        assert store.array(each.id, 2, "evaluation/losses").shape == (12,)
        assert columns["models_down"][-1] >= 18
        assert columns["bytes_up"][-1] >= 18 * each.model_bytes
        assert each.manifest["simulator"]["task"] == "logistic"
        assert store.federation(each.federation_id).label_histogram.sum() == 1438  # 80 % of the digits
    drawn = tables.tables_of(analysis.load_results(store, report.experiment))
    assert [line[0] for line in drawn[0].lines] == ["uniform", "pow-d"]


@pytest.mark.parametrize(
    ("groups", "changes", "expected"),
    [
        (4, {}, np.arange(12) // 3),
        ([0, 5] * 6, {}, [0, 5] * 6),
        ("cluster", {"availability": {"name": "clustered", "num_clusters": 2}}, np.arange(12) // 6),
        (None, {"partition": {"name": "clustered", "num_clients": 12, "num_clusters": 3}}, np.arange(12) // 4),
        ("cluster", {"partition": {"name": "clustered", "num_clients": 12, "num_clusters": 3}}, np.arange(12) // 4),
        (
            "availability",
            {"availability": {"name": "markov", "availability": [0.9] * 4 + [0.2] * 8}},
            [2] * 4 + [0] * 8,
        ),
    ],
)
def test_groups_of_clients_are_in_the_table(groups, changes, expected):
    spec = small_spec(run={} if groups is None else {"groups": groups}, **changes)
    built = build(spec.settings_of(spec.policies[0], 0))
    np.testing.assert_array_equal(built.session.clients.group, expected)
    np.testing.assert_array_equal(built.simulator.clients.group, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": {"groups": "cluster"}}, "needs clusters"),
        ({"run": {"groups": [0, 1]}}, "Clients.group must have the shape"),
        ({"attacks": {"kind": "flip", "group": 1}}, "needs groups of clients"),
    ],
)
def test_groups_that_do_not_exist_are_refused_before_the_first_round(changes, message):
    spec = small_spec(**changes)
    with pytest.raises(InvalidInput, match=message):
        refuse_early([spec.settings_of(spec.policies[0], 0)])


def test_the_places_of_an_attacking_group_are_bounded_and_reported(tmp_path):
    """Six liars of one group take turns: none of them has too many places, only the group has."""
    captured = {}
    for groups in (12, 2):  # every client alone; two groups of six
        attacks = {"kind": "inflate", "clients": list(range(6))} if groups == 12 else {"kind": "inflate", "group": 0}
        options = {"guard": {"cut": False, "most_places": 1.0}, "groups": groups, "rounds": 30, "losses_every": 30}
        spec = small_spec(["rpow-d"], attacks={"share": 1.0, **attacks}, run=options)
        store = Store(tmp_path / f"{groups}.sqlite")
        (policy,) = analysis.load_results(store, run(spec, store, processes=1).experiment).policies
        results = policy.runs[0]
        np.testing.assert_array_equal(np.flatnonzero(lies.liars_of(results)), np.arange(6))
        captured[groups] = lies.captured(results)
    assert captured[2] < captured[12] - 0.05


@pytest.mark.parametrize("kind", ["inflate", "inflate-sybils"])
def test_a_run_stores_who_lost_credibility_in_which_round(tmp_path, kind):
    attacks = {"kind": kind, "clients": [1, 2, 3], "factor": 1e4}
    store = Store(tmp_path / "s.sqlite")
    spec = small_spec(["adapow-d"], attacks=attacks, run={"guard": "strict", "losses_every": 6})
    (policy,) = analysis.load_results(store, run(spec, store, processes=1).experiment).policies
    doubts = lies.doubts_of(policy.runs[0])
    assert {doubt.client for doubt in doubts if doubt.liar} == {1, 2, 3}
    assert lies.found(policy.runs[0]) == 1.0
    assert min(doubt.lost_in for doubt in doubts) == 1


def test_one_seed_gives_all_policies_the_same_start():
    spec = small_spec(("uniform", "pow-d"), run={"seeds": 2})
    first, second = (build(spec.settings_of(policy, 0)) for policy in spec.policies)
    other = build(spec.settings_of(spec.policies[0], 1))
    assert first.federation == second.federation
    assert first.federation["key"] != other.federation["key"]

    def flat(simulation):
        import jax

        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(simulation.simulator.params)])

    assert np.array_equal(flat(first), flat(second))
    assert not np.array_equal(flat(first), flat(other))


def test_a_section_may_fix_its_own_seed():
    spec = small_spec(partition={"num_clients": 12, "seed": 2020}, data={"name": "digits", "seed": 1})
    first, other = (build(spec.settings_of(spec.policies[0], seed)) for seed in (0, 1))
    assert first.federation["key"] == other.federation["key"]


def test_the_settings_survive_json():
    spec = small_spec()
    settings = spec.settings_of(spec.policies[1], 0)
    assert build(json.loads(json.dumps(settings))).federation == build(settings).federation


def test_what_cannot_work_is_refused_before_the_first_round():
    spec = small_spec(("uniform",), run={"budget": 13})
    with pytest.raises(InvalidInput, match="budget of 13 is more than the 12 clients"):
        refuse_early([spec.settings_of(spec.policies[0], 0)])
    content = spec.to_dict()
    content["availability"] = {"name": "log-normal"}
    content["policies"] = [{"name": "ca-fed", "estimates": "oracle"}]
    content["run"]["budget"] = 3
    oracle = parse_spec(content)
    try:
        refuse_early([oracle.settings_of(oracle.policies[0], 0)])
    except MissingSignal as error:
        assert "Clients." in str(error)
    content["task"] = {"name": "mlp", "dropot": "fedcor"}
    with pytest.raises(SpecError, match="Did you mean 'dropout'"):
        parse_spec(content)


@pytest.mark.parametrize("dataset", ["digits", "synthetic", "leaf-synthetic", "quadratic"])
def test_presets_can_be_built(dataset):
    spec = presets.comparison(dataset=dataset, policies=["uniform", "pow-d"])
    refuse_early([spec.settings_of(policy, 0) for policy in spec.policies])


@pytest.mark.parametrize("dataset", ["fmnist", "mnist", "cifar10", "emnist-digits", "sentiment140"])
def test_presets_are_good_specs(dataset):
    assert presets.comparison(dataset=dataset, policies=["uniform"], partition="iid").rounds > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_ray_gives_the_same_rows(tmp_path):
    pytest.importorskip("ray")
    spec = small_spec(run={"seeds": 2})
    here, there = Store(tmp_path / "here.sqlite"), Store(tmp_path / "there.sqlite")
    assert run(spec, here, processes=1).complete
    report = run(spec, there, executor="ray", processes=2)
    assert report.complete, report.failures
    assert content(there) == content(here)


def history_spec(policies, history):
    return small_spec(policies, availability={"name": "markov", "availability": 0.6, "history": history})


def test_a_history_shows_the_masks_before_the_first_round_and_resumes_exactly(tmp_path):
    from fedpick import availability

    spec = history_spec(("ca-fed", "uniform"), 40)
    whole, cut = Store(tmp_path / "whole.sqlite"), Store(tmp_path / "cut.sqlite")
    assert run(spec, whole, processes=1).complete
    for updates in (1, 4, 3):
        flag = StopFlag()
        run(spec, cut, processes=1, stop=flag, progress=StopAfter(flag, updates))
    assert run(spec, cut, processes=1).complete
    assert content(cut) == content(whole)
    member = whole.runs(1)[0]
    clients = build(member.settings).session.clients
    trace = availability.get("markov", availability=0.6).start(clients, 0)
    for record in whole.records(member.id):
        assert np.array_equal(record.available, trace.mask(40 + record.index))
    # 40 rounds of the past and 6 of the run were counted; nothing was sent for the former.
    state = whole.policy_state(member.id)
    masks = np.array([trace.mask(index) for index in range(46)])
    assert np.array_equal(state["rounds_available"], masks.sum(axis=0))
    assert whole.rounds(member.id)["scalars_up"][0] == trace.mask(40).sum()


def test_an_estimator_starts_with_what_the_history_showed():
    spec = history_spec(("unbiased",), 30)
    simulation = build(spec.settings_of(spec.policies[0], 0))
    first = next(iter(simulation.rounds(1)))
    assert first.index == 0
    masks = np.array([simulation.trace.mask(index) for index in range(31)])
    estimate = (1 + masks.sum(axis=0)) / (2 + 31)  # the prior is one round of each kind
    factor = masks[30].sum() / 3  # three of those who are there
    expected = (simulation.session.clients.importance / estimate)[first.selection.clients] * factor
    assert first.selection.weights == pytest.approx(expected)


def test_a_policy_that_measures_even_without_a_budget_is_refused_with_a_history():
    spec = history_spec(("fedcor",), 5)
    settings = spec.settings_of(spec.policies[0], 0)
    with pytest.raises(InvalidInput, match="history shows masks alone"):
        next(iter(build(settings).rounds(1)))
    with pytest.raises(InvalidInput, match="history shows masks alone"):
        refuse_early([settings])


def test_validation_is_measured_on_the_hold_out():
    spec = small_spec(("uniform",), run={"rounds": 4, "validation_every": 2})
    simulation = build(spec.settings_of(spec.policies[0], 0))
    records = [record.evaluation for record in simulation.rounds(4)]
    assert ["validation" in evaluation for evaluation in records] == [False, True, False, True]
    loss, accuracy = records[3]["validation"]
    simulator = simulation.simulator
    losses, accuracies = simulator.evaluate_clients("validation")
    importance = simulator.clients.importance
    assert (loss, accuracy) == pytest.approx((importance @ losses, importance @ accuracies))
    bare = small_spec(("uniform",), partition={"num_clients": 12, "holdout": 0.0}, simulator={"losses_on": "train"},
                      run={"validation_every": 2})  # fmt: skip
    with pytest.raises(InvalidInput, match="needs validation data"):
        refuse_early([bare.settings_of(bare.policies[0], 0)])


def test_infinite_and_unknown_numbers_run_resume_and_are_shown(tmp_path):
    from fedpick.report import write_report

    content = small_spec(("uniform",), run={"rounds": 2}).to_dict()
    content["faults"] = {"deadline": float("inf"), "dropout": 0.1}
    content["policies"] = [
        {"name": "ca-fed", "kappa2": float("inf")},
        {"name": "ca-fed", "label": "fitted", "minimum_loss": [1.0, float("nan")]},
    ]
    store = Store(tmp_path / "a.sqlite")
    assert run(parse_spec(content), store, processes=1).complete
    content["run"]["rounds"] = 3
    report = run(parse_spec(content), store, processes=1)
    assert report.complete, report.failures
    first = store.runs(report.experiment.id)[0]
    assert first.parameters["kappa2"] == float("inf")
    assert first.rounds_done == 3
    pytest.importorskip("plotly")
    assert "kappa2 = inf" in write_report(store, tmp_path / "r.html").read_text()


LOG = "client,time,state\n" + "".join(f"{device},{3600 * (device + 1)},2\n" for device in range(12))
OTHER_LOG = LOG.replace("3600,2", "7200,2", 1)


def trace_spec(file, **run_section):
    section = {"name": "trace", "path": str(file), "round_seconds": 3600}
    return small_spec(("uniform",), availability=section, run={"rounds": 2, **run_section})


def test_a_changed_file_of_device_logs_is_not_mixed_in(tmp_path):
    from fedpick.experiments.run import compute
    from fedpick.report.groups import find_groups, groups_of

    log = tmp_path / "log.csv"
    log.write_text(LOG)
    store = Store(tmp_path / "a.sqlite")
    report = run(trace_spec(log), store, processes=1)
    assert report.complete
    first = store.runs(report.experiment.id)[0]
    assert first.manifest["files"] == {"availability.path": hashlib.sha256(LOG.encode()).hexdigest()}
    moved = tmp_path / "moved.csv"
    log.rename(moved)
    moved.rename(log)
    assert run(trace_spec(log, rounds=3), store, processes=1).complete
    assert groups_of(store, first, "availability").names
    log.write_text(OTHER_LOG)
    for changes in ({"rounds": 4}, {"rounds": 3}, {"rounds": 3, "seeds": 2}):
        with pytest.raises(InvalidInput, match=r"log\.csv is not the one this run was begun with.*--restart"):
            run(trace_spec(log, **changes), store, processes=1)
    assert len(store.experiments()) == 2  # nothing was put down for them
    with pytest.raises(InvalidInput, match="is not the one this run was begun with"):
        compute(store, first.id, 4)
    with pytest.raises(InvalidInput, match="is not the one this run was begun with"):
        groups_of(store, first, "availability")
    assert find_groups(store, first) is None
    assert run(trace_spec(log), store, processes=1, restart=True).complete
    assert store.run(first.id).manifest["files"] == {
        "availability.path": hashlib.sha256(OTHER_LOG.encode()).hexdigest()
    }


def test_runs_from_before_files_were_noted_go_on(tmp_path):
    log = tmp_path / "log.csv"
    log.write_text(LOG)
    store = Store(tmp_path / "a.sqlite")
    first = store.runs(run(trace_spec(log), store, processes=1).experiment.id)[0]
    older = {key: value for key, value in first.manifest.items() if key != "files"}
    store.update_run(first.id, manifest=json.dumps(older))
    assert run(trace_spec(log, rounds=3), store, processes=1).complete


def test_files_are_known_by_the_type_of_their_option(tmp_path):
    from fedpick.experiments.input_files import referenced_files

    writers = tmp_path / "mnist"
    writers.write_bytes(b"anything")
    settings = {
        "data": {"name": "mnist", "writers": str(writers), "directory": str(tmp_path)},
        "task": {"name": "mlp"},
        "availability": {"name": "ideal"},
    }
    assert referenced_files(settings) == {"data.writers": hashlib.sha256(b"anything").hexdigest()}
    assert referenced_files({**settings, "data": {"name": "mnist", "writers": str(tmp_path / "absent")}}) == {}


def test_outputs_are_refused_early_where_the_task_has_none():
    outputs = {"name": "fedgs", "similarity": "outputs"}
    content = presets.comparison(dataset="quadratic", policies=["uniform"]).to_dict()
    spec = parse_spec({**content, "policies": [*content["policies"], outputs]})
    with pytest.raises(MissingSignal, match="outputs"):
        refuse_early([spec.settings_of(policy, 0) for policy in spec.policies])
    content = small_spec(("uniform",)).to_dict()
    spec = parse_spec({**content, "policies": [*content["policies"], outputs]})
    refuse_early([spec.settings_of(policy, 0) for policy in spec.policies])


def test_a_spec_says_how_updates_are_described():
    spec = small_spec(("herd",), simulator={"sketch": "count-sketch"})
    built = build(spec.settings_of(spec.policies[0], 0))
    list(built.rounds(6))
    assert built.facts["simulator"]["sketch"] == "count-sketch"
    assert built.session.state.sketches.shape[1] == 512
