"""The papers' analyses that are not experiment specs: known cases, and every script on a tiny federation."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.figures import ca_fed, fedcor, fedgs, landing, power_of_choice
from fedpick.core.errors import InvalidInput
from fedpick.experiments.spec import Named
from fedpick.policies._gp import select_greedy
from fedpick.report import analysis
from tests.report.report_store import make_spec, make_store

pytest.importorskip("matplotlib")

TINY = """
[data]
name = "digits"

[partition]
name = "two-labels"
num_clients = 20
holdout = 0.2

[task]
name = "logistic"

[local]
lr = 0.1
steps = 3
batch_size = 10

[availability]
name = "log-normal"
beta = 0.5
redraw = true

[run]
rounds = 6
budget = 4
seeds = 2

[[policies]]
name = "uniform"
label = "UniformSample"

[[policies]]
name = "md"
label = "MDSample"

[[policies]]
name = "fedgs"
label = "FedGS alpha=1"
graph = "code"
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("specs") / "tiny.toml"
    path.write_text(TINY)
    return path


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


# Toys


def test_each_drawn_pick_is_the_best_of_all_candidates():
    means, spreads, picks, others, predictions, expected = fedcor.toy_picks()
    clients = np.arange(30)
    covariance = np.exp(-((clients[:, None] - clients[None, :]) ** 2) / 25)
    mean = np.zeros(30)
    for step, pick in enumerate(picks):
        left = np.setdiff1d(clients, picks[:step])
        spread = np.sqrt(np.maximum(np.diagonal(covariance), 0.0))
        np.testing.assert_allclose(spreads[step], [mean, spread], atol=1e-12)
        after = {k: (mean - covariance[k] / spread[k]).mean() for k in left}
        assert after[pick] == pytest.approx(min(after.values()))
        assert expected[step, 0] == pytest.approx(after[pick])
        assert expected[step, 0] < expected[step, 1] == pytest.approx(after[others[step]])
        assert means[step, 0, pick] == pytest.approx(predictions[step, 0])
        mean = mean - covariance[pick] / spread[pick]
        covariance = covariance - np.outer(covariance[pick], covariance[pick]) / covariance[pick, pick]
    np.testing.assert_allclose(means[-1, 0], mean, atol=1e-12)


def test_the_toy_choices_are_what_they_are_called():
    x, y, choices = fedcor.toy_choices(0)
    start = np.array([-0.5, 1.5, 0.0])
    before = fedcor.losses(start, x, y)
    independent, correlated, best = (choices[name] for name in ("independent", "correlated", "best"))
    assert set(independent[0]) == set(np.argsort(before)[-2:])
    assert len(set(correlated[0])) == 2
    assert best[2] <= min(independent[2], correlated[2])
    for chosen, model, loss in choices.values():
        np.testing.assert_allclose(model, fedcor.trained(start, x, y, chosen))
        assert loss == pytest.approx(fedcor.losses(model, x, y).mean())
        assert (fedcor.losses(model, x[chosen], y[chosen]) < before[chosen]).all()


def test_an_embedding_of_full_rank_reproduces_its_covariance():
    # What the picture of the picks rests on: the picks of a given covariance are those of its square root.
    clients = np.arange(8)
    covariance = np.exp(-((clients[:, None] - clients[None, :]) ** 2) / 4)
    values, vectors = np.linalg.eigh(covariance)
    picks, gains = select_greedy((vectors * np.sqrt(np.maximum(values, 0))).T, np.full(8, 1 / 8), np.ones(8), 1)
    assert gains[0] == pytest.approx((covariance.mean(axis=0)).max())
    assert picks[0] in (3, 4)


def test_the_toys_are_drawn(tmp_path, capsys):
    fedcor.main(["--folder", str(tmp_path), "toys", "--seeds", "1"])
    assert is_png(tmp_path / "fedcor-toy-choice.png")
    assert is_png(tmp_path / "fedcor-toy-picks.png")
    assert "picks: [14, 23, 5]" in capsys.readouterr().out


# Scripts that simulate


def test_normality_and_stationarity_on_a_tiny_federation(tiny, tmp_path, capsys):
    pytest.importorskip("jax")
    small = ["--cohorts", "8", "--rounds", "2"]
    folder = ["--folder", str(tmp_path)]
    fedcor.main([*folder, "normality", str(tiny), *small, "--components", "2"])
    printed = capsys.readouterr().out
    assert "8 cohorts of 4 after 2 rounds" in printed
    assert "Henze-Zirkler, 2 components" in printed
    fedcor.main([*folder, "stationarity", str(tiny), *small, "--every", "1"])
    lines = {line.split(" | ")[0].strip("| "): line.split("|") for line in capsys.readouterr().out.splitlines()}
    assert 0 < float(lines["covariance"][2]) <= 1
    # With eight cohorts the first 100 are all of them; losses change little in a round, so their moments are alike.
    assert lines["covariance, 100 cohorts"][2:] == lines["covariance"][2:]
    assert float(lines["second moments of the new losses"][2]) > 0.95
    assert is_png(tmp_path / "fedcor-normality.png")
    assert is_png(tmp_path / "fedcor-stationarity.png")


def test_the_mean_of_models_trained_alone_is_the_model_of_the_cohort(tiny):
    pytest.importorskip("jax")
    from benchmarks.theory.fedcor import sample_loss_changes
    from fedpick.experiments.run import build
    from fedpick.experiments.spec import load_spec

    spec = load_spec(tiny)
    run = build(spec.settings_of(spec.policies[0], 0))
    for _ in run.rounds(2):
        pass
    before, changes = fedcor.averaged_changes(run.simulator, cohorts=5, budget=4, rng=np.random.default_rng(1))
    slow = sample_loss_changes(run.simulator.measure, 20, cohorts=5, budget=4, rng=np.random.default_rng(1))
    np.testing.assert_allclose(before, run.simulator.client_losses())
    np.testing.assert_allclose(changes, slow, atol=1e-5)


def test_graphs_from_models_are_scored_against_the_oracle(tiny, tmp_path, capsys):
    pytest.importorskip("jax")
    fedgs.main(["--folder", str(tmp_path), "graphs", str(tiny), "--steps", "20", "--draw", "--data", "digits"])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[4].strip() for row in rows] == ["functional", "cosine", "all linked"] * 2
    for row in rows:
        precision, recall, f1 = (float(cell) for cell in row[6:9])
        assert f1 == pytest.approx(2 * precision * recall / (precision + recall), abs=2e-4)
    # On two labels per client, twenty steps tell who shares a label better than chance.
    assert float(rows[0][8]) > float(rows[2][8])
    assert is_png(tmp_path / "fedgs-graph.png")


def test_counts_curves_and_rasters(tiny, tmp_path, capsys, monkeypatch):
    pytest.importorskip("jax")
    fedgs.main(["--folder", str(tmp_path), "counts", str(tiny), "--rounds", "60"])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    spread = {row[3].strip(): float(row[7]) for row in rows}
    assert spread["FedGS alpha=1"] < spread["UniformSample"]
    assert is_png(tmp_path / "fedgs-counts.png")

    from fedpick.experiments.runner import run
    from fedpick.experiments.spec import load_spec
    from fedpick.experiments.store import Store

    store = tmp_path / "store.sqlite"
    run(load_spec(tiny), Store(store), processes=1)
    fedgs.main(["--folder", str(tmp_path), "curves", "--store", str(store), "--smooth", "2"])
    assert "| FedGS alpha=1 | 2 |" in capsys.readouterr().out
    assert is_png(tmp_path / "fedgs-curves.png")

    tiny.with_name("fedgs-table2-tiny.toml").write_text(TINY)
    monkeypatch.setattr(fedgs, "SPECS", tiny.parent)
    fedgs.main(["--folder", str(tmp_path), "availability", "--rounds", "9", "--modes", "tiny.toml"])
    assert is_png(tmp_path / "fedgs-availability.png")


def test_every_draw_of_md_counts(tiny):
    from fedpick.experiments.spec import load_spec

    spec = load_spec(tiny)
    clients, trace = fedgs.setting(spec, 0)
    counts = fedgs.selection_counts(spec, 0, 30)
    assert counts["MDSample"].sum() == 30 * 4
    reachable = sum(min(4, int(trace.mask(index).sum())) for index in range(30))
    assert counts["UniformSample"].sum() == counts["FedGS alpha=1"].sum() == reachable
    assert len(clients) == 20


# Several experiments


def clustered_spec(alpha, budget=4):
    process = Named(name="clustered", options={"num_clusters": 4})
    partition = Named(name="toy", options={"alpha": alpha})
    spec = make_spec(("uniform", "ca-fed"), rounds=3, budget=budget, title=f"figure 5: alpha {alpha}")
    return dataclasses.replace(spec, availability=process, partition=partition)


def test_ca_fed_draws_over_experiments_and_decisions_side_by_side(tmp_path, capsys):
    where = tmp_path / "s.sqlite"
    for spec in (clustered_spec(0.5, budget=3), clustered_spec(0.5), clustered_spec(1.5)):
        made = make_store(where, spec)
    # The first two have one title: the later counts.
    found = ca_fed.chosen(made, ["figure 5", "alpha 0.5"])
    assert [each.title for each in found] == ["figure 5: alpha 0.5", "figure 5: alpha 1.5"]
    assert [each.spec["run"]["budget"] for each in found] == [4, 4]
    results = analysis.load_results(made, made.experiment("figure 5: alpha 1.5"))
    mean = 100 * analysis.over_seeds(results.policies[1], analysis.final_accuracy).mean
    options = ["--store", str(where), "--folder", str(tmp_path)]
    ca_fed.main([*options, "over", "partition.alpha", "figure 5", "--labels", "ca-fed"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| partition.alpha | 0.5 | 1.5 |"
    assert lines[2].startswith("| ca-fed |") and f"| {mean:.2f} ±" in lines[2]
    assert (tmp_path / "cafed-over-partition-alpha.png").read_bytes().startswith(b"\x89PNG")
    ca_fed.main([*options, "over", "partition.alpha", "figure 5", "--window", "2", "--against", "uniform"])
    lines = {line.split("|")[1].strip(): line.split("|") for line in capsys.readouterr().out.splitlines()[2:-1]}
    last_two = partial(analysis.final_accuracy, window=2)
    difference = analysis.paired_difference(results.policies[1], results.policies[0], last_two)
    mean = 100 * analysis.over_seeds(results.policies[1], last_two).mean
    assert f" {mean:.2f} ±" in lines["ca-fed"][3] and f"({100 * difference.mean:+.2f} [" in lines["ca-fed"][3]
    assert "(" not in lines["uniform"][3]
    ca_fed.main([*options, "--name", "five", "decisions", "figure 5"])
    assert "| ca-fed: cluster 3 |" in capsys.readouterr().out
    assert (tmp_path / "five.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidInput, match="no decisions"):
        ca_fed.main([*options, "decisions", "figure 5", "--policy", "nobody"])
    made.close()


def test_the_landing_page_has_a_picture(tmp_path):
    make_store(tmp_path / "s.sqlite", make_spec(landing.POLICIES)).close()
    landing.main([str(tmp_path / "s.sqlite"), str(tmp_path / "landing.png"), "--title", "toy"])
    assert (tmp_path / "landing.png").read_bytes().startswith(b"\x89PNG")


def test_the_authors_schedule_weighs_early_rounds_more_than_all_rounds_do(tmp_path, capsys):
    store = make_store(tmp_path / "s.sqlite", make_spec(("uniform", "fedgs"), rounds=150))
    with store.engine.begin() as connection:  # accuracy t / 1000, t counted from 1: every average is known
        connection.exec_driver_sql("UPDATE rounds SET accuracy = (round + 1) / 1000.0")
    store.close()
    logged = ca_fed.logged_rounds(150)
    assert (len(logged), (logged <= 40).sum()) == (27, 16)
    ca_fed.main(["--store", str(tmp_path / "s.sqlite"), "schedule", "toy", "--against", "uniform"])
    cells = capsys.readouterr().out.splitlines()[-2].split("|")
    assert [float(cell.split("±")[0]) for cell in cells[2:5]] == [13.0, round(logged.mean() / 10, 2), 7.55]
    assert all("(+0.00 [+0.00, +0.00])" in cell for cell in cells[2:5])
    options = ["--store", str(tmp_path / "s.sqlite"), "--folder", str(tmp_path), "--name", "two"]
    chosen = ["--against", "uniform", "--rounds", "40", "100", "--labels", "fedgs"]
    ca_fed.main([*options, "schedule", "toy", *chosen])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| | round 40 | round 100 |"
    assert lines[4] == "| fedgs | 4.00 ± 0.00 (+0.00 [+0.00, +0.00]) | 10.00 ± 0.00 (+0.00 [+0.00, +0.00]) |"
    assert is_png(tmp_path / "two.png")


def test_ca_fed_draws_the_errors_of_estimates(tmp_path, capsys):
    ca_fed.main(["--folder", str(tmp_path), "estimation", "--seeds", "2"])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()[2:-1]]
    errors = [float(row[4].split("±")[0]) for row in rows]
    assert errors[-1] < errors[0] / 5  # 10,000 rounds against 10
    assert is_png(tmp_path / "cafed-figure-4a.png")


# Power-of-Choice


def test_the_skew_of_rand_is_one_and_pow_d_has_more_of_it_where_the_model_is(capsys):
    power_of_choice.main(["skew", "--clients", "10", "--candidates", "10", "--seeds", "1", "--per-axis", "1",
                          "--evaluated-per-axis", "2", "--samples", "200"])  # fmt: skip
    rows = {line[:16].strip(): line[16:].split() for line in capsys.readouterr().out.splitlines()[1:]}
    assert float(rows["rand"][2]) == pytest.approx(1, abs=0.1)
    assert float(rows["pow-d, d = 10"][-1]) > float(rows["rand"][-1])


def test_the_toy_prints_medians_and_quartiles(tmp_path, capsys):
    store = make_store(tmp_path / "s.sqlite", make_spec(("uniform", "fedgs"), rounds=20))
    with store.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE rounds SET objective = 100.0 / (round + 1)")
    store.close()
    power_of_choice.main(["toy", "--store", str(tmp_path / "s.sqlite")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| after round | 1 | 2 | 3 | 5 | 10 | 20 |"
    assert lines[2].startswith("| uniform | 100.0 (100.0 to 100.0) | 50.0 (50.0 to 50.0) |")


def test_excess_losses_and_profiles_are_those_of_the_store(tmp_path, capsys):
    quadratic = Named(name="quadratic", options={"num_clients": 8})
    spec = dataclasses.replace(make_spec(("uniform", "fedgs"), rounds=3), data=quadratic)
    store = make_store(tmp_path / "s.sqlite", spec, num_clients=8)
    with store.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE rounds SET objective = 1000.0 / (round + 1)")
    options = ["--store", str(tmp_path / "s.sqlite"), "--folder", str(tmp_path), "--against", "uniform"]
    power_of_choice.main(["quadratic", *options])
    assert "| uniform |" in capsys.readouterr().out
    assert is_png(tmp_path / "power-of-choice-quadratic.png")
    assert is_png(tmp_path / "power-of-choice-profile.png")
    store.close()
