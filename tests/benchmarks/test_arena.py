"""The arena: its settings load, and its verdicts are those of the paired intervals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import arena
from tests.report.report_store import make_spec, make_store


@pytest.mark.parametrize("name", arena.SETTINGS)
def test_every_setting_is_a_variant_of_a_spec(name):
    setting = arena.SETTINGS[name]
    spec = setting.load(name, ["uniform", "herd"], [0, 1])
    assert [policy.label for policy in spec.policies] == ["uniform", "herd"]
    assert (spec.rounds, spec.seeds, spec.title) == (setting.rounds, (0, 1), f"arena: {name}")
    assert (spec.losses_every is None) == (setting.score != "objective")


def test_a_difference_that_the_interval_does_not_exclude_is_a_tie(tmp_path):
    """The store's curves rise more slowly for every further policy: 8, 11 and 14 rounds to 63 %."""
    store = make_store(tmp_path / "a.sqlite", make_spec(("uniform", "fedcor", "ca-fed"), seeds=4))
    results = arena.analysis.load_results(store, store.experiment())
    found = arena.standings("accuracy", results)
    assert [found[label].rank for label in ("uniform", "fedcor", "ca-fed")] == [1, 2, 3]
    assert [found[label].verdict for label in ("uniform", "fedcor", "ca-fed")] == ["win", "loss", "loss"]
    assert np.isclose(found["uniform"].models, 4.0)
    assert (found["uniform"].best, found["ca-fed"].best) == ("fedcor", "uniform")
    lowest, highest = found["uniform"].interval or (np.nan, np.nan)
    assert 0 < lowest < found["uniform"].difference < highest
    twice = make_store(tmp_path / "b.sqlite", make_spec(("uniform",), seeds=4))
    alone = arena.standings("accuracy", arena.analysis.load_results(twice, twice.experiment()))
    assert alone["uniform"].verdict == "tie"


def test_the_leaderboard_lists_every_setting_and_policy(tmp_path):
    make_store(tmp_path / "a.sqlite", make_spec(("uniform", "herd"), seeds=2, title="arena: fmnist-2spc"))
    found = arena.load(str(tmp_path / "a.sqlite"))
    text = arena.leaderboard(found)
    assert "Settings: fmnist-2spc. Seeds: 0, 1." in text
    assert [line[:24] for line in text.splitlines() if line.startswith("| `")][:2] == [
        "| `uniform` | 1.0 | 1 | ",
        "| `herd` | 2.0 | 2 | 0 /",
    ]
    assert "| fmnist-2spc | accuracy | " in text and "| `uniform` | " in text
    picture = arena.draw(found, tmp_path / "ranks.png")
    assert picture.stat().st_size > 5000


def test_every_policy_is_compared_with_herd(tmp_path):
    """The first policy of the store rises faster."""
    store = make_store(tmp_path / "a.sqlite", make_spec(("uniform", "herd"), seeds=4))
    results = arena.analysis.load_results(store, store.experiment())
    found = arena.standings("accuracy", results)
    assert (found["uniform"].against_ours, found["herd"].against_ours) == ("win", None)
    without = replace(results, policies=tuple(each for each in results.policies if each.label != "herd"))
    assert arena.standings("accuracy", without)["uniform"].against_ours is None
    assert arena._count(["win", "loss", None, "win"]) == "2 / 0 / 1"


def test_a_policy_without_a_score_loses(tmp_path):
    """No run has measured the objective of all clients, so no score is known."""
    store = make_store(tmp_path / "a.sqlite", make_spec(("uniform", "herd"), seeds=2))
    results = arena.analysis.load_results(store, store.experiment())
    nowhere = tuple(
        replace(run, rounds=run.rounds | {"objective": np.full_like(run.rounds["accuracy"], np.nan)})
        for run in results.policies[0].runs
    )
    first = replace(results.policies[0], runs=nowhere)
    found = arena.standings("objective", replace(results, policies=(first, *results.policies[1:])))
    assert (found["uniform"].verdict, found["uniform"].against_ours) == ("loss", "loss")
    assert arena._cell("quadratic-30", found["uniform"]) == "diverged"


def test_the_table_has_the_most_seeds_that_are_finished(tmp_path):
    two, four = (make_spec(("uniform", "herd"), seeds=count, title="arena: fmnist-2spc") for count in (2, 4))
    make_store(tmp_path / "a.sqlite", two).register(four)
    assert arena.load(str(tmp_path / "a.sqlite")).seeds == (0, 1)


def test_by_models_every_policy_stops_at_what_uniform_sent(tmp_path):
    store = make_store(tmp_path / "a.sqlite", make_spec(("uniform", "fedcor"), seeds=2))
    results = arena.analysis.load_results(store, store.experiment())
    sent = arena.models_of_uniform(results)
    assert sent == results.policies[0].runs[0].rounds["models_down"][-1]
    run = results.policies[0].runs[0]
    half = arena._within(run, sent / 2)
    assert half.rounds["models_down"][-1] <= sent / 2 < run.rounds["models_down"][len(half.rounds["round"])]
