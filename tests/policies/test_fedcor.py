"""FedCor and FedGP as policies: what they measure when, what they learn, whom they pick."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedpick
from fedpick import Clients, Outcome, Session, Signal, testing
from fedpick.core import registry
from fedpick.core.errors import FedpickWarning, InvalidInput, MissingSignal
from fedpick.policies import _gp
from tests.policies import QUICK_CHECKS


class World:
    """Clients in three groups; training a cohort lowers the loss of the groups that are in it, and of no other."""

    def __init__(self, seed=0, per_group=4):
        self.group = np.repeat(np.arange(3), per_group)
        self.count = len(self.group)
        self.loss = np.full(self.count, 10.0)
        self.rng = np.random.default_rng(seed)
        self.probes = []

    def after(self, cohort):
        if len(cohort) == 0:
            return self.loss
        helped = np.isin(self.group, self.group[cohort])
        return self.loss - 0.3 * helped + 0.002 * self.rng.normal(size=self.count)

    def measure(self, probe):
        self.probes.append(probe)
        model = self.loss if probe.trial is None else self.after(probe.trial.clients)
        return model[probe.clients]

    def play(self, session, rounds, budget=3, fails=lambda index: False, available=lambda index: None):
        history = []
        for _ in range(rounds):
            index = session.round
            self.probes = []
            selection = session.ask(budget=budget, measure=self.measure, available=available(index))
            completed = np.full(len(selection.clients), not fails(index))
            self.loss = self.after(selection.clients[completed])
            history.append((selection, tuple(self.probes)))
            session.tell(Outcome(index=index, clients=selection.clients, completed=completed))
        return history


def start(world, name="fedcor", seed=1, **options):
    return Session(fedpick.policies.get(name, **options), Clients(num_examples=np.ones(world.count)), seed=seed)


QUICK = {"dimension": 4, "warmup_iterations": 20, "iterations": 10}


def test_variants_are_presets():
    paper = fedpick.policies.get("fedcor")
    assert (paper.variant, paper.warmup, paper.theta, paper.warmup_history, paper.history) == ("paper", 15, 0.9, 10, 1)
    assert (paper.dimension, paper.interval, paper.beta, paper.trials, paper.noise) == (15, 10, 0.95, 1, 0.01)
    code = fedpick.policies.get("fedcor", variant="code-2023", theta=0.99)
    assert (code.theta, code.prior_mean, code.selection_noise, code.warmup_training) == (
        0.99,
        "samples",
        "prior",
        "end",
    )
    assert fedpick.policies.get("fedgp").warmup_history == 1
    assert fedpick.policies.get("fedgp").history == 1


def test_replace_keeps_the_other_options():
    code = fedpick.policies.get("fedcor", variant="code-2023", warmup=4)
    assert registry.parameters(replace(code, beta=0.5)) == {**registry.parameters(code), "beta": 0.5}
    assert replace(code, beta=0.5) == fedpick.policies.get("fedcor", variant="code-2023", warmup=4, beta=0.5)


CODE_2023 = {
    "dimension": 15,
    "warmup": 20,
    "interval": 10,
    "beta": 0.95,
    "history": 100,
    "theta": 0.95,
    "trials": 1,
    "noise": 0.01,
    "variant": "code-2023",
    "rule": "posterior",
    "updates": "trial",
    "initial_scale": 1.0,
    "learning_rate": 0.01,
    "iterations": 100,
    "warmup_iterations": 1000,
    "warmup_training": "end",
    "warmup_history": 100,
    "history_unit": "rounds",
    "sample_from": 0,
    "prior_mean": "samples",
    "selection_noise": "prior",
    "schedule": "after-multiples",
    "anneal_warmup": False,
}
"""What a session file of fedcor with variant="code-2023", warmup=20 holds."""
PAPER = CODE_2023 | {
    "variant": "paper",
    "warmup": 15,
    "history": 1,
    "theta": 0.9,
    "warmup_iterations": 150,
    "warmup_training": "each",
    "warmup_history": 10,
    "history_unit": "updates",
    "prior_mean": "zero",
    "selection_noise": "none",
    "schedule": "elapsed",
}
CODE_2022 = PAPER | {
    "variant": "code-2022",
    "warmup": 16,
    "theta": 0.8,
    "schedule": "after-multiples",
    "sample_from": 10,
    "selection_noise": "observation",
    "anneal_warmup": True,
}


@pytest.mark.parametrize(
    ("name", "settings", "stored"),
    [
        ("fedcor", {}, PAPER),
        ("fedcor", {"variant": "paper"}, PAPER),
        ("fedcor", {"variant": "code-2022"}, CODE_2022),
        ("fedcor", {"variant": "code-2023", "warmup": 20}, CODE_2023),
        ("fedgp", {}, PAPER | {"warmup_history": 1}),
        ("fedgp", {"variant": "code-2022"}, CODE_2022),
        ("fedgp", {"variant": "code-2023", "warmup": 20}, CODE_2023),
    ],
)
def test_settings_and_stored_parameters_build_the_same_policy(name, settings, stored):
    policy = fedpick.policies.get(name, **settings)
    assert registry.parameters(policy) == stored
    assert fedpick.policies.get(name, **stored) == policy


class Fits:
    """What every call of the Gaussian's fit was asked for."""

    def __init__(self, monkeypatch):
        self.calls = []
        real = _gp.fit

        def spy(start, samples, weights, **options):
            self.calls.append({"start": start.copy(), "samples": samples.copy(), "weights": weights, **options})
            return real(start, samples, weights, **{**options, "iterations": 2})

        monkeypatch.setattr(_gp, "fit", spy)

    def of(self, key):
        return [call[key] for call in self.calls]


def test_the_paper_learns_in_every_round_of_the_warm_up_from_discounted_samples(monkeypatch):
    fits, world = Fits(monkeypatch), World()
    options = {"warmup": 4, "interval": 3, "theta": 0.5, "history": 1, "iterations": 7, "warmup_iterations": 11}
    world.play(start(world, dimension=4, learning_rate=0.02, **options), 11)
    # Rounds 1 to 4 end a round of the warm-up; 7 and 10 are updates, each with one earlier sample.
    assert fits.of("iterations") == [11, 11, 11, 11, 7, 7]
    assert fits.of("learning_rate") == [0.02] * 6
    assert fits.of("mean") == [None] * 6
    ages = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 3], [0, 3]]
    for weights, age in zip(fits.of("weights"), ages, strict=True):
        np.testing.assert_allclose(weights, 0.5 ** np.array(age))


def test_the_code_of_2023_learns_once_after_the_warm_up_around_the_mean_of_the_samples(monkeypatch):
    fits, world = Fits(monkeypatch), World()
    options = {"warmup": 4, "sample_from": 0, "interval": 3, "theta": 0.5, "warmup_iterations": 11}
    world.play(start(world, variant="code-2023", dimension=4, **options), 6)
    assert fits.of("iterations")[:1] == [11]
    (first, *_) = fits.calls
    np.testing.assert_allclose(first["weights"], 0.5 ** np.arange(4.0))
    mean = (first["weights"][:, None] * first["samples"]).sum(axis=0) / first["weights"].sum()
    np.testing.assert_allclose(first["mean"], mean)
    rounds_with_a_fit = len(fits.calls)
    each = World()
    world.play(start(each, variant="code-2023", dimension=4, warmup_training="each", **options), 6)
    assert len(fits.calls) - rounds_with_a_fit == rounds_with_a_fit + 3


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_embeddings_start_with_the_length_asked_for(monkeypatch, scale):
    fits, world = Fits(monkeypatch), World(per_group=100)
    world.play(start(world, dimension=20, warmup=2, initial_scale=scale), 2)
    lengths = np.linalg.norm(fits.of("start")[0], axis=0)
    assert np.sqrt(np.mean(lengths**2)) == pytest.approx(scale, rel=0.1)


@pytest.mark.parametrize(
    "options",
    [
        {"variant": "code"},
        {"variant": ["code-2023"]},
        {"theta": None},
        {"dimension": 0},
        {"beta": 0.0},
        {"theta": 1.5},
        {"noise": 0.0},
        {"noise": 1e308},
        {"iterations": 2**31},
        {"warmup": 1.5},
        {"rule": "best"},
        {"history_unit": "days"},
        {"interval": True},
    ],
)
def test_unusable_options_are_refused(options):
    with pytest.raises(InvalidInput, match=next(iter(options))):
        fedpick.policies.get("fedcor", **options)


def test_trials_are_needed_only_where_they_are_used():
    assert fedpick.policies.get("fedcor").needs == {Signal.LOSS, Signal.TRIAL}
    assert fedpick.policies.get("fedcor", updates="round").needs == {Signal.LOSS}
    with pytest.raises(MissingSignal, match="trial"):
        Session(fedpick.policies.get("fedgp"), Clients(num_examples=np.ones(3)), provides=frozenset({Signal.LOSS}))


def test_probes_follow_the_schedule():
    world = World()
    session = start(world, warmup=4, interval=3, trials=2, **QUICK)
    plan = []
    for selection, probes in world.play(session, 14):
        assert np.allclose(selection.weights, 1 / 3)
        plan.append([probe.trial is not None for probe in probes])
        for probe in probes:
            np.testing.assert_array_equal(probe.clients, np.arange(world.count))
            if probe.trial is not None:
                assert len(probe.trial.clients) == 3
                assert np.allclose(probe.trial.weights, 1 / 3)
    losses, nothing, update = [False], [], [False, True, True]
    assert plan == [*[losses] * 5, *[nothing] * 2, update, *[nothing] * 2, update, *[nothing] * 2, update]


@pytest.mark.parametrize(
    ("schedule", "rounds"), [("elapsed", [14, 24]), ("multiples", [10, 20]), ("after-multiples", [11, 21])]
)
def test_the_rounds_of_updates(schedule, rounds):
    world = World()
    session = start(world, warmup=4, interval=10, schedule=schedule, **QUICK)
    found = [i for i, (_, probes) in enumerate(world.play(session, 26)) if any(p.trial is not None for p in probes)]
    assert found == rounds


def test_warm_up_samples_are_the_changes_of_real_rounds():
    world = World()
    session = start(world, warmup=3, **QUICK)
    losses = [world.loss]
    for _ in range(4):
        world.play(session, 1)
        losses.append(world.loss)
    expected = np.diff(losses[:4], axis=0)[::-1]
    np.testing.assert_allclose(session.state.samples[:3], expected)
    np.testing.assert_array_equal(session.state.sample_rounds[:4], [3, 2, 1, -1])


def test_a_round_that_nobody_completed_gives_no_sample():
    world = World()
    session = start(world, warmup=6, **QUICK)
    world.play(session, 6, fails=lambda index: index in (1, 2))
    # Round 1 and 2 changed nothing, so rounds 2 and 3 start with the model of the round before.
    np.testing.assert_array_equal(session.state.sample_rounds[:4], [5, 4, 1, -1])


def test_when_everybody_fails_for_ever_cohorts_stay_random():
    world = World()
    session = start(world, warmup=2, interval=2, updates="round", **QUICK)
    history = world.play(session, 8, fails=lambda index: True)
    assert not session.state.trained
    assert all(selection.diagnostics["phase"] == "warm-up" for selection, _ in history)


def test_a_trial_that_changed_nothing_is_no_sample():
    world = World()
    session = start(world, warmup=0, **QUICK)
    world.after = lambda cohort: world.loss  # every trial cohort failed
    with pytest.warns(FedpickWarning, match="trial"):
        world.play(session, 3)
    assert session.state.sample_rounds[0] == -1


def test_answers_missing_on_either_side_are_left_out():
    world = World()
    session = start(world, warmup=3, **QUICK)
    without = [np.arange(world.count) != k for k in range(3)]
    world.play(session, 2, available=lambda index: without[index])
    np.testing.assert_array_equal(np.isnan(session.state.samples[0]), np.isin(np.arange(world.count), [0, 1]))
    assert not session.state.embedding[:, :2].any()
    assert session.state.embedding[:, 2:].any(axis=0).all()


def test_without_trials_the_change_of_a_real_round_is_the_sample():
    world = World()
    session = start(world, warmup=3, interval=4, updates="round", **QUICK)
    history = world.play(session, 13)
    probed = [index for index, (_, probes) in enumerate(history) if probes]
    assert probed == [0, 1, 2, 3, 6, 7, 10, 11]
    assert all(probe.trial is None for _, probes in history for probe in probes)
    np.testing.assert_array_equal(session.state.sample_rounds[:3], [11, 7, 3])


def test_history_by_updates_and_by_rounds():
    policy = fedpick.policies.get("fedcor", trials=2)
    rounds = np.array([35, 35, 25, 25, 15, 14, -1])
    assert policy._usable(rounds, 1) == 4
    assert policy._usable(rounds, 0) == 2
    assert policy._usable(rounds, 10) == 6
    policy = replace(policy, history_unit="rounds")
    assert policy._usable(rounds, 20) == 4
    assert policy._usable(rounds, 21) == 5


def test_the_newest_samples_are_kept():
    world = World()
    session = start(world, warmup=5, warmup_history=1, history=0, interval=1, **QUICK)
    world.play(session, 9)
    np.testing.assert_array_equal(session.state.sample_rounds, [8, 7])


def test_picks_are_those_of_the_greedy_algorithm_on_the_learned_embedding():
    world = World()
    session = start(world, warmup=5, **QUICK)
    world.play(session, 5)
    mask = np.arange(world.count) % 4 != 0
    (selection, _) = world.play(session, 1, available=lambda index: mask)[0]
    chosen, gains = _gp.select_greedy(
        session.state.embedding,
        np.full(world.count, 1 / world.count),
        np.ones(world.count),
        3,
        candidates=np.flatnonzero(mask),
    )
    np.testing.assert_array_equal(selection.clients, chosen)
    assert selection.diagnostics["expected_loss_change"] == pytest.approx(-gains.sum())
    np.testing.assert_array_equal(session.state.picked, np.isin(np.arange(world.count), chosen))


@pytest.mark.parametrize(("variant", "least"), [("paper", 0.5), ("code-2022", 0.5), ("code-2023", 0.9)])
def test_cohorts_cover_the_groups(variant, least):
    """Three groups, three places: the best cohort has one client of each; 29 % of the random ones do."""
    complete = []
    for seed in range(3):
        world = World(seed)
        session = start(world, variant=variant, dimension=3, interval=5, seed=seed)
        history = world.play(session, 40)
        complete += [len(set(world.group[selection.clients])) == 3 for selection, _ in history[17:]]
    assert np.mean(complete) > least


def test_annealing_counts_picks_and_an_update_resets_it():
    world = World()
    session = start(world, warmup=2, interval=4, **QUICK)
    world.play(session, 5)
    assert session.state.picked.sum() == 9  # rounds 2, 3 and 4
    world.play(session, 2)  # round 6 has the update
    assert session.state.picked.sum() == 3


def test_the_first_code_anneals_before_it_samples():
    world = World()
    session = start(world, variant="code-2022", warmup=4, sample_from=2, interval=4, **QUICK)
    history = world.play(session, 4)
    assert [len(probes) for _, probes in history] == [0, 0, 1, 1]
    assert session.state.picked.sum() == 6


def test_an_update_reports_its_likelihood_and_pictures():
    world = World()
    session = start(world, warmup=2, interval=3, **QUICK)
    history = world.play(session, 6)
    update = history[5][0].diagnostics
    assert update["log_likelihood_after"] > update["log_likelihood_before"]
    assert update["embedding"].shape == (4, world.count)
    assert update["correlation"].shape == (world.count, world.count)
    assert update["gp_samples"] == 2
    assert "embedding" not in history[4][0].diagnostics


def test_newcomers_are_unknown_until_they_answer():
    world = World()
    session = start(world, warmup=3, interval=2, **QUICK)
    world.play(session, 4)
    old = session.state
    world.group = np.append(world.group, [0, 1])
    world.count += 2
    world.loss = np.append(world.loss, [9.0, 9.0])
    session.grow(Clients(num_examples=np.ones(world.count)))
    np.testing.assert_array_equal(session.state.embedding[:, :12], old.embedding)
    assert not session.state.embedding[:, 12:].any()
    assert np.isnan(session.state.samples[:, 12:]).all()
    world.play(session, 2)
    assert session.state.embedding[:, 12:].any(axis=0).all()


def test_proxy_and_independent_rules():
    for rule in ("independent", "proxy"):
        world = World()
        session = start(world, warmup=3, rule=rule, selection_noise="prior", interval=50, **QUICK)
        world.play(session, 4)
        x = session.state.embedding
        covariance = x.T @ x + 1e-4 * np.eye(world.count)
        alpha = 0.95**session.state.picked
        scores = covariance.sum(axis=0) / world.count
        if rule == "independent":
            scores = alpha * scores / np.sqrt(covariance.diagonal())
        (selection, _) = world.play(session, 1)[0]
        assert set(selection.clients) == set(np.argsort(-scores)[:3])
        expected = -np.sort(scores)[-3:].sum()
        assert selection.diagnostics["expected_loss_change"] == pytest.approx(expected)


def test_a_budget_for_everybody_takes_everybody_at_once():
    world = World()
    session = start(world, warmup=1, **QUICK)
    history = world.play(session, 3, budget=50)
    np.testing.assert_array_equal(np.sort(history[2][0].clients), np.arange(world.count))


@pytest.mark.parametrize(("variant", "updates"), [("code-2022", "round"), ("code-2023", "trial")])
def test_other_configurations_keep_the_contract_too(variant, updates):
    policy = fedpick.policies.get(
        "fedcor", variant=variant, updates=updates, warmup=4, sample_from=1, interval=3, **QUICK
    )
    for check in QUICK_CHECKS:
        check(policy)


@pytest.mark.slow
def test_updates_and_picks_at_a_million_clients():
    """The check of the kit ends before the warm-up of the defaults does."""
    policy = fedpick.policies.get("fedcor", warmup=1, interval=1, warmup_iterations=2, iterations=2)
    testing.one_million_clients(policy)


def test_the_page_runs():
    page = (Path(__file__).parents[2] / "docs/policies/fedcor.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(block, {})
