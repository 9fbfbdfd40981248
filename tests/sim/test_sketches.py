"""What the simulator reports of updates, `Outcome.sketch`: the head, a count sketch, or a user's function."""

from __future__ import annotations

import numpy as np
import pytest

import fedpick
from fedpick.adapter.arrays import sketches
from fedpick.core.errors import InvalidInput
from fedpick.core.policy import Signal
from fedpick.core.types import Probe, Selection
from fedpick.sim import Faults, LocalTraining, ServerStep, Simulator, Waiting, devices, simulate
from tests.sim.naive_loop import make_federation

LOCAL = LocalTraining(lr=0.1, steps=3, batch_size=8)
COHORT = Selection(clients=[3, 1, 0, 5])
SKETCH = frozenset({Signal.SKETCH})


@pytest.fixture(params=["jax", "torch"])
def engine(request):
    if request.param == "torch":
        pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'fedpick[torch]'")
    return request.param


def build(engine, **options):
    return Simulator(make_federation(), "mlp", local=LOCAL, engine=engine, **{"seed": 5, **options})


def updates_of(engine, **options):
    """The whole updates of the cohort, one in each row."""
    return build(engine, **options).measure(Probe(clients=COHORT.clients, signal=Signal.UPDATE))


def model_of(simulator):
    return [np.asarray(leaf) for leaf in simulator.engine.leaves(simulator.params, simulator.velocity)]


@pytest.mark.parametrize(("shards", "group"), [(None, None), (1, 1), (1, 3), (2, 1)])
def test_a_count_sketch_is_that_of_the_adapters(engine, shards, group):
    simulator = build(engine, sketch="count-sketch", shards=shards, group=group)
    outcome = simulator.train(COHORT, report=SKETCH)
    expected = sketches([{"all": row} for row in updates_of(engine)], "count-sketch", seed=5)
    assert expected.shape == (4, 512)
    np.testing.assert_allclose(outcome.sketch, expected, rtol=1e-3, atol=1e-5)
    assert simulator.counters.scalars_up == 0  # the server makes the sketches


def test_the_choice_of_a_sketch_changes_neither_training_nor_the_default(engine):
    default, head, counted = build(engine), build(engine, sketch="head"), build(engine, sketch="count-sketch")
    outcomes = [simulator.train(COHORT, report=SKETCH) for simulator in (default, head, counted)]
    assert outcomes[0].sketch.shape == (4, 3)
    np.testing.assert_array_equal(outcomes[0].sketch, outcomes[1].sketch)
    for one, other in zip(model_of(default), model_of(counted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    assert default.settings() == head.settings() and default.settings()["sketch"] is None  # as in older runs
    assert counted.settings()["sketch"] == "count-sketch"
    assert counted.train(COHORT).sketch.shape == (4, 0)  # nobody asked


def test_a_function_of_the_user_gets_arrays_by_name(engine):
    seen = []

    def largest(update):
        seen.append({name: array.shape for name, array in update.items()})
        return [np.abs(array).max() for array in update.values()]

    outcome = build(engine, sketch=largest).train(COHORT, report=SKETCH)
    assert outcome.sketch.shape == (4, len(seen[0])) and np.isfinite(outcome.sketch).all()
    np.testing.assert_allclose(outcome.sketch.max(axis=1), np.abs(updates_of(engine)).max(axis=1), rtol=1e-4)
    assert all(shapes == seen[0] for shapes in seen)
    assert seen[0][{"jax": "dense0.bias", "torch": "1.bias"}[engine]] == (64,)


def test_a_function_cannot_change_the_update(engine):
    def spoils(update):
        for array in update.values():
            array *= 0.0
        return [1.0]

    with pytest.raises(ValueError, match="read-only"):
        build(engine, sketch=spoils)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda update: 3.0, r"sketch must return a vector\. Got an array of shape \(\)"),
        (lambda update: np.zeros((2, 2)), r"sketch must return a vector\. Got an array of shape \(2, 2\)"),
        (lambda update: np.zeros(1 + any(array.any() for array in update.values())), "of one length, 1 for an update"),
    ],
)
def test_a_function_that_gives_no_vector_of_one_length_is_refused(engine, function, expected):
    with pytest.raises(InvalidInput, match=expected):
        build(engine, sketch=function).train(COHORT, report=SKETCH)


@pytest.mark.parametrize("sketch", ["bias", None, 0, True, ["head"]])
def test_other_sketches_are_refused(sketch):
    with pytest.raises(InvalidInput, match="'sketch' parameter of SimulatorSettings must be 'head', 'count-sketch' or"):
        build("jax", sketch=sketch)


def test_a_client_that_sends_nan_has_no_count_sketch(engine):
    outcome = build(engine, sketch="count-sketch", faults=Faults(nan=1.0)).train(COHORT, report=SKETCH)
    assert outcome.sketch.shape == (4, 512) and np.isnan(outcome.sketch).all()


@pytest.mark.parametrize(
    "options",
    [
        {"server": ServerStep(aggregation="median")},
        {"devices": devices.get("phones"), "waiting": Waiting(quorum=0.5, late="stale")},
    ],
    ids=["robust", "late"],
)
def test_sketches_with_robust_rules_and_late_answers(engine, options):
    simulator = build(engine, sketch="count-sketch", **options)
    session = fedpick.Session(fedpick.policies.get("herd"), simulator.clients, seed=5, provides=simulator.provides)
    list(simulate(simulator, session, rounds=4, budget=4))
    assert session.state.sketches.shape[1] == 512 and len(session.state.known) > 3


def test_a_whole_number_is_the_length_of_answers_as_in_older_specs():
    probe = Probe(clients=[1, 2], signal=Signal.UPDATE)
    older, newer = build("jax", sketch=64), build("jax", update_length=64)
    np.testing.assert_array_equal(older.measure(probe), newer.measure(probe))
    assert newer.measure(probe).shape == (2, 64)
    assert older.train(COHORT, report=SKETCH).sketch.shape == (4, 3)
