from dataclasses import replace

import numpy as np
import pytest

from fedpick import Session, policies
from fedpick.core.errors import InvalidInput
from fedpick.core.policy import Signal
from fedpick.core.types import Probe, Selection
from fedpick.sim import Attacks, LocalTraining, ServerStep, Simulator, simulate
from fedpick.sim.sybils import grown_table
from tests.sim.naive_loop import assert_trees_close, make_federation, to_numpy

LOCAL = LocalTraining(lr=0.1, steps=3, batch_size=8)
EVERYBODY = Selection(clients=np.arange(6), weights=np.full(6, 1 / 6))
REPORTS = frozenset({Signal.OUTCOME_LOSS, Signal.LOSS_RMS})
REPORTED = ("loss", "train_loss", "loss_rms")


def simulator_with(attacks=None, **options):
    return Simulator(make_federation(), "logistic", local=LOCAL, attacks=attacks, seed=11, **options)


def test_liars_are_a_function_of_the_seed_and_the_share():
    attacks = Attacks(kind="inflate", share=0.3)
    lying = attacks.liars(4, 50)
    assert lying.sum() == 15
    np.testing.assert_array_equal(lying, attacks.liars(4, 50))
    assert (lying != attacks.liars(5, 50)).any()
    np.testing.assert_array_equal(lying, replace(attacks, seed=4).liars(99, 50))
    np.testing.assert_array_equal(np.flatnonzero(replace(attacks, clients=(3, 7)).liars(0, 9)), [3, 7])


def test_liars_may_all_come_from_one_group():
    group = np.arange(50) % 5
    attacks = Attacks(kind="inflate", share=0.5, group=3)
    lying = attacks.liars(4, 50, group)
    assert lying.sum() == 5 and (group[lying] == 3).all()
    assert replace(attacks, share=1.0).liars(4, 50, group).sum() == 10
    with pytest.raises(InvalidInput, match="needs groups"):
        attacks.liars(4, 50)
    with pytest.raises(InvalidInput, match="no client is in group 9"):
        replace(attacks, group=9).liars(4, 50, group)
    clients = replace(make_federation().clients(), group=np.array([0, 1, 1, 0, 1, 0]))
    simulator = simulator_with(Attacks(kind="flip", share=1.0, group=1), clients=clients)
    assert simulator.settings()["attacks"]["clients"] == np.flatnonzero(simulator.lying).tolist() == [1, 2, 4]
    assert "group" not in simulator_with(Attacks(kind="flip")).settings()["attacks"]  # older runs can be resumed


@pytest.mark.parametrize(("kind", "factor"), [("inflate", 100.0), ("deflate", 0.01), ("alternate", 100.0)])
def test_false_losses_reach_probes_and_reports_and_change_no_model(kind, factor):
    honest, lied_to = simulator_with(), simulator_with(Attacks(kind=kind, clients=(1, 4)))
    expected = np.where(np.isin(np.arange(6), [1, 4]), factor, 1.0)
    probe = Probe(clients=np.arange(6))
    np.testing.assert_allclose(lied_to.measure(probe), honest.measure(probe) * expected)
    true, told = honest.train(EVERYBODY, report=REPORTS), lied_to.train(EVERYBODY, report=REPORTS)
    for name in REPORTED:
        np.testing.assert_allclose(getattr(told, name), getattr(true, name) * expected)
    np.testing.assert_array_equal(told.update_norm, true.update_norm)
    assert_trees_close(lied_to.params, to_numpy(honest.params), rtol=0, atol=0)
    if kind == "alternate":
        np.testing.assert_array_equal(lied_to.measure(probe), honest.measure(probe))


def test_colluders_say_the_same():
    told = simulator_with(Attacks(kind="collude", clients=(0, 2, 3))).measure(Probe(clients=np.arange(6)))
    true = simulator_with().measure(Probe(clients=np.arange(6)))
    np.testing.assert_allclose(told[[0, 2, 3]], 100 * true[[0, 2, 3]].max())


@pytest.mark.parametrize(("kind", "factor"), [("flip", -1.0), ("scale", 10.0), ("flip-scale", -10.0)])
def test_false_updates_enter_the_model_with_their_factor(kind, factor):
    honest, lied_to = simulator_with(), simulator_with(Attacks(kind=kind, clients=(2,)))
    updates = honest.measure(Probe(clients=np.arange(6), signal=Signal.UPDATE))
    before = np.concatenate([leaf.ravel() for leaf in honest.engine.leaves(honest.params, ())])
    outcome = lied_to.train(EVERYBODY)
    after = np.concatenate([np.asarray(leaf).ravel() for leaf in lied_to.engine.leaves(lied_to.params, ())])
    updates[2] *= factor
    np.testing.assert_allclose(after - before, updates.mean(axis=0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(outcome.update_norm, np.linalg.norm(updates, axis=1), rtol=1e-5)


def test_liars_that_drop_never_answer():
    outcome = simulator_with(Attacks(kind="inflate-drop", clients=(0, 5))).train(EVERYBODY)
    np.testing.assert_array_equal(outcome.completed, [False, True, True, True, True, False])


def test_prepared_rounds_are_those_of_liars_too():
    attacks = Attacks(kind="flip", share=0.4)
    one, other = simulator_with(attacks), simulator_with(attacks)
    other.prepare([EVERYBODY, EVERYBODY], [False, False])
    for _ in range(2):
        one.train(EVERYBODY)
        other.train(EVERYBODY)
    assert other.num_prepared == 0
    assert_trees_close(one.params, to_numpy(other.params), rtol=0, atol=0)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "krum", "multi-krum", "geometric-median"])
def test_the_server_step_takes_the_robust_rule(rule, shards):
    server = ServerStep(aggregation=rule, attackers=0.2)
    honest = simulator_with(server=server, shards=shards, group=1)
    updates = honest.measure(Probe(clients=np.arange(6), signal=Signal.UPDATE))
    before = np.concatenate([leaf.ravel() for leaf in honest.engine.leaves(honest.params, ())])
    outcome = honest.train(EVERYBODY, report=frozenset({Signal.SKETCH}))
    after = np.concatenate([np.asarray(leaf).ravel() for leaf in honest.engine.leaves(honest.params, ())])
    np.testing.assert_allclose(after - before, server.combine(updates, EVERYBODY.weights), rtol=1e-3, atol=1e-6)
    plain = simulator_with(shards=shards, group=1).train(EVERYBODY, report=frozenset({Signal.SKETCH}))
    for name in ("train_loss", "update_norm", "sketch"):
        np.testing.assert_array_equal(getattr(outcome, name), getattr(plain, name))


def test_mean_with_generous_clipping_is_the_plain_step_and_settings_name_only_what_is_used():
    plain, clipped = simulator_with(), simulator_with(server=ServerStep(clip_norms=1e6))
    plain.train(EVERYBODY)
    clipped.train(EVERYBODY)
    assert_trees_close(plain.params, to_numpy(clipped.params), rtol=1e-5, atol=1e-7)
    assert "aggregation" not in plain.settings()["server"]
    assert clipped.settings()["server"]["clip_norms"] == 1e6
    assert "attacks" not in plain.settings()


def test_updates_that_are_not_finite_leave_the_robust_step_alone():
    simulator = simulator_with(Attacks(kind="scale", clients=(1,), scale=1e38), server=ServerStep(aggregation="median"))
    outcome = simulator.train(EVERYBODY)
    np.testing.assert_array_equal(outcome.completed, [True, False, True, True, True, True])


def test_answers_that_the_judge_refuses_leave_the_model_alone():
    judged, plain = simulator_with(), simulator_with()
    outcome = judged.train(EVERYBODY, judge=lambda told: replace(told, completed=told.clients != 2))
    others = np.flatnonzero(np.arange(6) != 2)
    plain.train(Selection(clients=others, weights=np.full(5, 1 / 5)))
    assert not outcome.completed[2]
    assert np.isfinite(outcome.train_loss[2])
    assert_trees_close(judged.params, to_numpy(plain.params), rtol=1e-5, atol=1e-7)


def sybil_run(rounds, saved=None):
    """Run to this round, from a saved one if it is given: -> (choices, what a checkpoint holds)."""
    simulator = simulator_with(Attacks(kind="inflate-sybils", clients=(1, 4)))
    session = Session(policies.get("rpow-d"), simulator.clients, seed=3, guard="strict")
    if saved is not None:
        (arrays, plain), (own, own_plain) = saved
        simulator.restore(arrays, plain)
        session.grow(grown_table(simulator, simulator.round))
        session.restore(own, own_plain, round=simulator.round)
    chosen = [record.selection.clients for record in simulate(simulator, session, rounds=rounds, budget=3)]
    assert len(session.clients) == 6 + 2 * rounds
    assert (np.concatenate(chosen) < 6).all()
    return chosen, (simulator.state(), session.split())


def test_sybils_come_under_fresh_rows_and_resume():
    whole, (_, (arrays, _)) = sybil_run(7)
    _, saved = sybil_run(4)
    rest, _ = sybil_run(7, saved)
    np.testing.assert_array_equal(np.stack(whole[4:]), np.stack(rest))
    tried = np.flatnonzero(arrays["report"])  # the rows that rpow-d has tried
    lied = sum(int(np.isin(chosen, [1, 4]).sum()) for chosen in whole[1:])
    assert np.count_nonzero(tried >= 6) == lied > 0  # every place of a liar went to a row of its own
    assert not np.isin([1, 4], tried).any() or np.isin(whole[0], [1, 4]).any()


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": "bribe"},
        {"kind": "inflate-deflate"},
        {"kind": "flip", "share": 1.5},
        {"kind": "flip", "clients": (0.5,)},
        {"kind": "flip", "clients": (1,), "group": 0},
        {"kind": "flip", "group": -1},
    ],
)
def test_impossible_attacks_are_refused(bad):
    with pytest.raises(InvalidInput):
        Attacks(**bad)
    with pytest.raises(InvalidInput, match="no client 60"):
        Attacks(kind="flip", clients=(60,)).liars(0, 50)
