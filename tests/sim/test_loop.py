"""The loop, resuming, and equal bytes."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import fedpick.policies  # noqa: F401  (fills the registry)
from fedpick import availability
from fedpick.core import checkpoint, registry
from fedpick.core.errors import InvalidInput, OutOfOrder, StateFileError
from fedpick.core.policy import Signal
from fedpick.core.session import Session
from fedpick.core.types import Probe, Selection
from fedpick.sim import Faults, LocalTraining, ServerStep, Simulator, simulate, tasks
from tests.sim.naive_loop import client_batches, make_federation, to_numpy

ROOT = Path(__file__).parents[2]
LOCAL = LocalTraining(lr=0.1, steps=3, batch_size=8)
OPTIONS = {"server": ServerStep(lr=0.5, momentum=0.5), "faults": Faults(dropout=0.2, nan=0.1), "seed": 5}


class EveryThirdRoundNobody:
    def mask(self, round):
        return np.arange(6) < (0 if round % 3 == 2 else 4)


def start(policy="pow-d", **options):
    simulator = Simulator(make_federation(), "logistic", local=LOCAL, **{**OPTIONS, **options})
    return simulator, Session(registry.get(policy), simulator.clients, seed=1, provides=simulator.provides)


def digest(simulator, records):
    content = hashlib.sha256()
    for leaf in jax.tree.leaves((simulator.params, simulator.velocity)):
        content.update(np.asarray(leaf).tobytes())
    for record in records:
        for array in (record.selection.clients, record.weights, record.outcome.train_loss, record.losses):
            content.update(b"-" if array is None else np.asarray(array).tobytes())
        content.update(repr((record.test_loss, record.test_accuracy, record.counters)).encode())
    return content.hexdigest()


def test_records_tell_what_happened():
    simulator, session = start(faults=None)
    seen = []
    records = list(
        simulate(
            simulator,
            session,
            rounds=7,
            budget=2,
            availability=EveryThirdRoundNobody(),
            evaluate_every=2,
            losses_every=3,
            on_round=seen.append,
        )
    )
    assert seen == records
    assert [record.index for record in records] == list(range(7))
    assert [record.skipped for record in records] == [False, False, True, False, False, True, False]
    assert [record.num_available for record in records] == [4, 4, 0, 4, 4, 0, 4]
    assert [record.test_accuracy is not None for record in records] == [False, True, False, True, False, True, True]
    assert [record.losses is not None for record in records] == [False, False, True, False, False, True, True]
    for record in records:
        assert len(record.selection.clients) == (0 if record.skipped else 2)
        assert record.weights.sum() == pytest.approx(0.0 if record.skipped else 1.0)
        assert (record.selection.clients < 4).all()
    assert records[-1].objective == pytest.approx(simulator.weighted(simulator.client_losses()))
    # pow-d asks its four candidates in five of the seven rounds, and the two chosen ones have the model by then.
    assert records[-1].counters.models_down == 5 * 4
    assert records[-1].counters.updates_up == 5 * 2
    assert records[0].seconds.train > 0
    assert records[0].seconds.measure > 0
    assert session.round == simulator.round == 7


def test_the_model_learns():
    simulator, session = start("uniform", faults=None, server=None)
    before, _ = simulator.evaluate()
    *_, last = simulate(simulator, session, rounds=60, budget=4, evaluate_every=60)
    assert last.test_loss < 0.6 * before
    assert last.test_accuracy > 0.8


def test_a_resumed_run_ends_in_the_same_bytes(tmp_path):
    whole, session = start()
    expected = list(simulate(whole, session, rounds=8, budget=2, losses_every=1))
    first, session = start()
    records = list(simulate(first, session, rounds=4, budget=2, losses_every=1))
    first.save(tmp_path / "model.npz")
    session.save(tmp_path / "policy")
    second, _ = start()
    second.load(tmp_path / "model.npz")
    resumed = Session.load(tmp_path / "policy")
    records += list(simulate(second, resumed, rounds=8, budget=2, losses_every=1))
    assert digest(second, records) == digest(whole, expected)


def test_checkpoints_that_do_not_fit_are_refused(tmp_path):
    simulator, _ = start()
    file = tmp_path / "model.npz"
    with pytest.raises(StateFileError, match="no saved simulator"):
        simulator.load(file)
    simulator.save(file)
    other = Simulator(make_federation(shape=(5,)), "logistic", local=LOCAL, seed=5)
    with pytest.raises(StateFileError, match="not of this simulator's shape"):
        other.load(file)
    with pytest.raises(InvalidInput, match="seed"):
        start(seed=6)[0].load(file)
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(StateFileError, match=r"damaged|truncated"):
        simulator.load(file)
    file.write_bytes(checkpoint.pack({"a": np.zeros(3)}, {}))
    with pytest.raises(StateFileError, match="not a saved simulator"):
        simulator.load(file)


def test_a_clients_update_does_not_depend_on_who_else_was_selected():
    for group in (1, 4):
        alone, together = (start(faults=None, group=group)[0] for _ in range(2))
        assert [b.tolist() for b in client_batches(alone, 3, 2)] == [b.tolist() for b in client_batches(together, 3, 2)]
        single = alone.measure(Probe(clients=[3], signal=Signal.UPDATE))
        several = together.measure(Probe(clients=[5, 1, 3, 0], signal=Signal.UPDATE))
        np.testing.assert_allclose(several[2], single[0], rtol=1e-5, atol=1e-7)
        if group == 1:
            np.testing.assert_array_equal(several[2], single[0])
        one, many = alone.train(Selection(clients=[3])), together.train(Selection(clients=[5, 1, 3, 0]))
        for name in ("train_loss", "update_norm"):
            assert getattr(many, name)[2] == pytest.approx(getattr(one, name)[0], rel=1e-5)


def test_batches_differ_between_rounds_clients_and_seeds():
    simulator = start(faults=None)[0]
    other = start(faults=None, seed=6)[0]
    batches = [
        next(client_batches(s, c, t)).tolist() for s, c, t in [(simulator, 3, 0), (simulator, 3, 1), (other, 3, 0)]
    ]
    assert len({tuple(batch) for batch in batches}) == 3


SCRIPT = """
from tests.sim.test_loop import digest, start
from fedpick.sim import simulate
simulator, session = start(shards=2, group=1)
print(digest(simulator, list(simulate(simulator, session, rounds=6, budget=4, losses_every=2))))
"""


def test_two_processes_side_by_side_give_the_same_bytes():
    runs = [
        subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)
    ]
    simulator, session = start(shards=2, group=1)
    here = digest(simulator, list(simulate(simulator, session, rounds=6, budget=4, losses_every=2)))
    outputs = [run.communicate(timeout=300)[0].strip() for run in runs]
    assert outputs == [here, here]


def test_a_changing_cohort_does_not_recompile():
    simulator = start(faults=None, shards=1, group=3)[0]

    def compiled():
        groups = {simulator.engine._group_of(count) for count in (1, 3)}
        return [simulator.engine._training[group, False].round._cache_size() for group in groups]

    simulator.train(Selection(clients=[0]))
    simulator.train(Selection(clients=[2, 3, 4]))
    before = compiled()
    assert min(before) > 0
    for cohort in ([0, 1], [2, 3, 4, 5], [1], list(range(6))):
        simulator.train(Selection(clients=cohort))
    assert compiled() == before


def test_how_work_is_cut_depends_on_the_setting_and_the_cohort_alone():
    epochs = LocalTraining(lr=0.1, epochs=1, batch_size=8)
    equal, unequal = (Simulator(make_federation(), "logistic", local=local).engine for local in (LOCAL, epochs))
    assert equal._group_of(equal.group) == equal.group
    if jax.default_backend() == "cpu":
        # Clients that take unequally many steps would wait for each other in a batch.
        assert equal.group > 1
        assert unequal.group == equal.shards == unequal.shards == 1
        # A batch that is not full would cost as much as a full one.
        assert [equal._group_of(count) for count in (1, equal.group - 1)] == [1, 1]
        heavy = tasks.get("mlp", input_shape=(6,), num_classes=3, hidden=(80, 80))
        assert Simulator(make_federation(), heavy, local=LOCAL).engine.shards == min(os.cpu_count(), 8)
    several = Simulator(make_federation(), "logistic", local=LOCAL, shards=2, group=3).engine
    assert [len(piece) for piece in several._split(np.arange(3))] == [3]
    assert [len(piece) for piece in several._split(np.arange(6))] == [3, 3]


def test_mismatches_are_refused():
    simulator, session = start()
    with pytest.raises(OutOfOrder, match="round 0"):
        simulator.train(Selection(clients=[0]), 3)
    simulator.train(Selection(clients=[0]))
    with pytest.raises(OutOfOrder, match="Save and load both"):
        next(simulate(simulator, session, rounds=3))


@pytest.mark.parametrize("name", ["evaluate_every", "losses_every", "local_accuracy_every"])
def test_an_interval_of_no_rounds_is_refused_at_the_call(name):
    with pytest.raises(InvalidInput, match=f"{name} must be None or at least 1. Got 0"):
        simulate(*start(), rounds=3, **{name: 0})


def test_local_accuracy_needs_local_test_data():
    with pytest.raises(InvalidInput, match=r"local_accuracy_every needs local test data.*split="):
        simulate(*start(), rounds=3, local_accuracy_every=1)
    federation = make_federation(local_test=0.3)
    simulator = Simulator(federation, "logistic", local=LOCAL)
    session = Session(registry.get("uniform"), simulator.clients, seed=1)
    (record,) = simulate(simulator, session, rounds=1, budget=2, local_accuracy_every=1)
    assert 0 <= record.local_accuracy <= 1


def test_a_process_that_was_not_started_is_refused_with_what_to_do():
    simulator, session = start()
    process = availability.get("homogeneous")
    with pytest.raises(
        InvalidInput, match=r"Homogeneous is a process.*availability=process\.start\(simulator\.clients"
    ):
        simulate(simulator, session, rounds=3, availability=process)
    with pytest.raises(InvalidInput, match=r"have a method mask\(round\).*Got ndarray"):
        simulate(simulator, session, rounds=3, availability=np.ones(6, bool))
    trace = process.start(simulator.clients, seed=2)
    (record,) = simulate(simulator, session, rounds=1, budget=2, availability=trace)
    assert record.available.tolist() == trace.mask(0).tolist()


def test_without_a_test_set_accuracy_is_nan_and_training_goes_on():
    simulator = Simulator(make_federation(num_test=0), "logistic", local=LOCAL)
    session = Session(registry.get("uniform"), simulator.clients, seed=1)
    before = simulator.client_losses()
    *_, last = simulate(simulator, session, rounds=5, budget=4, losses_every=5)
    assert np.isnan([last.test_loss, last.test_accuracy]).all()
    assert last.objective < simulator.weighted(before)


def test_settings_are_plain_and_complete():
    import json

    settings = json.loads(json.dumps(start()[0].settings()))
    assert settings["local"]["steps"] == 3
    assert settings["shards"] == 1
    assert to_numpy(start()[0].params)["dense0"]["weight"].shape == (6, 3)


def test_importing_the_package_does_not_import_jax():
    script = "import sys, fedpick.sim; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
