"""The arena: its settings load, and its verdicts are those of the paired intervals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import arena, pages
from benchmarks.arena import Score
from tests.report.report_store import make_spec, make_store


def scores(**policies):
    """Policy -> seed -> score, from a list of scores per policy."""
    return {
        label: {seed: Score(value, value, models=4.0) for seed, value in enumerate(values)}
        for label, values in policies.items()
    }


def by_round(of):
    return arena.standings(of, lambda score: score.by_round)


@pytest.mark.parametrize("name", arena.SETTINGS)
def test_every_setting_is_a_variant_of_a_spec(name):
    setting = arena.SETTINGS[name]
    spec = setting.load(name, ["uniform", "herd"], [0, 1])
    assert [policy.label for policy in spec.policies] == ["uniform", "herd"]
    assert (spec.rounds, spec.seeds, spec.title) == (setting.rounds, (0, 1), f"arena: {name}")
    assert (spec.losses_every is None) == (setting.score != "objective")


def test_a_difference_that_the_interval_does_not_exclude_is_a_tie():
    found = by_round(scores(fast=[0.9, 0.8, 0.7], close=[0.8, 0.9, 0.6], slow=[0.5, 0.4, 0.3]))
    assert [found[label].rank for label in ("fast", "close", "slow")] == [1, 2, 3]
    assert [found[label].verdict for label in ("fast", "close", "slow")] == ["tie", "tie", "loss"]
    assert [found[label].best for label in ("fast", "close", "slow")] == ["close", "fast", "fast"]
    assert found["slow"].interval == pytest.approx((-0.4, -0.4))
    assert by_round(scores(alone=[0.9, 0.8]))["alone"].verdict == "tie"


def test_every_policy_is_compared_with_herd():
    found = by_round(scores(uniform=[0.9, 0.8], herd=[0.7, 0.6], fedcor=[0.5, 0.6]))
    assert [found[label].against_ours for label in ("uniform", "herd", "fedcor")] == ["win", None, "tie"]
    assert by_round(scores(uniform=[0.9, 0.8]))["uniform"].against_ours is None
    assert arena._count(["win", "loss", None, "win"]) == "2 / 0 / 1"


def test_equal_policies_share_the_mean_of_their_places():
    found = by_round(scores(a=[0.9, 0.8], b=[0.9, 0.8], c=[0.9, 0.8], d=[0.7, 0.6]))
    assert [found[label].rank for label in "abcd"] == [2, 2, 2, 4]


def test_a_policy_without_a_score_loses():
    found = by_round(scores(uniform=[0.9, None], herd=[0.7, 0.6]))
    assert (found["uniform"].verdict, found["uniform"].against_ours) == ("loss", "loss")
    assert found["uniform"].rank == 2
    assert arena._cell("quadratic-30", found["uniform"]) == "diverged"


def test_settings_are_compared_over_the_seeds_that_all_policies_have():
    found = arena.arena_of({"fmnist-2spc": scores(uniform=[0.5, 0.6, 0.9], herd=[0.7, 0.8]), "fmnist-1spc": {}})
    assert found.seeds == {"fmnist-2spc": [0, 1]}
    assert found.by_round["fmnist-2spc"]["uniform"].mean == pytest.approx(0.55)


def test_the_leaderboard_lists_every_setting_and_policy(tmp_path):
    found = arena.arena_of({"fmnist-2spc": scores(uniform=[0.5, 0.6], herd=[0.7, 0.81])})
    text = "\n".join(arena.tables(found).values())
    assert [line[:24] for line in text.splitlines() if line.startswith("| `")][:2] == [
        "| `herd` | 1.0 | 1 | 1 /",
        "| `uniform` | 2.0 | 2 | ",
    ]
    assert "| fmnist-2spc | 2 | accuracy | 75.5 | `uniform` | 55 | +20.5 [+14.1, +26.9] | win |" in text
    assert "| `herd` | 75.5 + |" in text
    assert arena.draw(found, tmp_path / "ranks.png").stat().st_size > 5000


def test_a_setting_with_few_policies_is_shown_and_does_not_count_for_ranks():
    full, few = scores(uniform=[0.5, 0.6], herd=[0.7, 0.81]), scores(uniform=[-0.1, -0.1], herd=[-0.5, -0.6])
    found = arena.arena_of({"fmnist-2spc": full, "fmnist-cnn-yc": few})
    assert list(found.by_round) == list(found.by_models) == ["fmnist-2spc"]
    assert arena.mean_rank(found.by_round, "herd") == 1
    text = arena.tables(found)
    assert "| fmnist-cnn-yc | 2 | loss | 0.55 | `uniform` | 0.1 |" in text["best"]
    assert "| `herd` | 0.55 = |" in text["scores"]


def test_the_page_has_the_tables_of_the_scores():
    page = arena.SCORES.parents[1] / "arena.md"
    assert (
        pages.fill(page.read_text(), arena.tables(arena.arena_of(arena.read_scores(arena.SCORES)))) == page.read_text()
    )


def test_scores_are_written_and_read_without_loss(tmp_path):
    kept = {"fmnist-2spc": {"herd": {0: Score(0.123457, None, 5.0), 1: Score(-2.5, -3.0, 7.25)}, "uniform": {}}}
    arena.write_scores(tmp_path / "scores.json", kept)
    assert arena.read_scores(tmp_path / "scores.json") == kept
    assert arena.read_scores(tmp_path / "nothing.json") == {}


def test_by_models_every_policy_stops_at_what_uniform_sent(tmp_path):
    store = make_store(tmp_path / "a.sqlite", make_spec(("uniform", "fedcor"), seeds=2))
    results = arena.analysis.load_results(store, store.experiment())
    found = arena.judge("accuracy", results, {})
    assert found["uniform"][0].by_models == found["uniform"][0].by_round
    run = results.policies[1].runs[0]
    half = run.rounds["models_down"][-1] / 2
    without = replace(results, policies=results.policies[1:])
    less = arena.judge("accuracy", without, {"uniform": {0: Score(None, None, half / run.wanted)}})
    cut = arena._within(run, half)
    assert cut.rounds["models_down"][-1] <= half < run.rounds["models_down"][len(cut.rounds["round"])]
    assert less["fedcor"][0].by_models == np.mean(cut.rounds["accuracy"][-10:]) != less["fedcor"][0].by_round


def test_what_is_in_the_file_is_not_run_again(tmp_path, monkeypatch):
    runs = []

    def fake(spec, store, progress):
        runs.append((tuple(policy.label for policy in spec.policies), spec.seeds))
        raise InterruptedError

    monkeypatch.setattr(arena, "run", fake)
    file = tmp_path / "scores.json"
    arena.write_scores(file, {"synthetic-idl": scores(uniform=[1.0, 2.0], md=[1.0])})
    with pytest.raises(InterruptedError):
        arena.compute(["synthetic-idl"], ["uniform", "md"], [0, 1], str(tmp_path / "a.sqlite"), file)
    assert runs == [(("md",), (1,))]
    arena.compute(["synthetic-idl"], ["uniform"], [0, 1], str(tmp_path / "a.sqlite"), file)
    assert len(runs) == 1
