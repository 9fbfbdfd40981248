"""The papers' analyses that are no experiment specs: numbers on known cases, and every script on a tiny federation."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from fedpick.policies._gp import select_greedy

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]

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


def script(name: str):
    path = ROOT / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name.replace("-", "_"), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("specs") / "tiny.toml"
    path.write_text(TINY)
    return path


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


# Toys


def test_each_drawn_pick_is_the_best_of_all_candidates():
    means, spreads, picks, others, predictions, expected = script("fedcor-toys").toy_picks()
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
    toys = script("fedcor-toys")
    x, y, choices = toys.toy_choices(0)
    start = np.array([-0.5, 1.5, 0.0])
    before = toys.losses(start, x, y)
    independent, correlated, best = (choices[name] for name in ("independent", "correlated", "best"))
    assert set(independent[0]) == set(np.argsort(before)[-2:])
    assert len(set(correlated[0])) == 2
    assert best[2] <= min(independent[2], correlated[2])
    for chosen, model, loss in choices.values():
        np.testing.assert_allclose(model, toys.trained(start, x, y, chosen))
        assert loss == pytest.approx(toys.losses(model, x, y).mean())
        assert (toys.losses(model, x[chosen], y[chosen]) < before[chosen]).all()


def test_an_embedding_of_full_rank_reproduces_its_covariance():
    # What the picture of the picks rests on: the picks of a given covariance are those of its square root.
    clients = np.arange(8)
    covariance = np.exp(-((clients[:, None] - clients[None, :]) ** 2) / 4)
    values, vectors = np.linalg.eigh(covariance)
    picks, gains = select_greedy((vectors * np.sqrt(np.maximum(values, 0))).T, np.full(8, 1 / 8), np.ones(8), 1)
    assert gains[0] == pytest.approx((covariance.mean(axis=0)).max())
    assert picks[0] in (3, 4)


def test_the_toys_are_drawn(tmp_path, capsys):
    script("fedcor-toys").main(["--folder", str(tmp_path), "--seeds", "1"])
    assert is_png(tmp_path / "fedcor-toy-choice.png")
    assert is_png(tmp_path / "fedcor-toy-picks.png")
    assert "picks: [14, 23, 5]" in capsys.readouterr().out


# Scripts that simulate


def test_normality_and_stationarity_on_a_tiny_federation(tiny, tmp_path, capsys):
    pytest.importorskip("jax")
    small = ["--cohorts", "8", "--rounds", "2"]
    script("fedcor-normality").main([str(tiny), *small, "--components", "2", "--figure", str(tmp_path / "n.png")])
    printed = capsys.readouterr().out
    assert "8 cohorts of 4 after 2 rounds" in printed
    assert "Henze-Zirkler, 2 components" in printed
    script("fedcor-stationarity").main([str(tiny), *small, "--every", "1", "--figure", str(tmp_path / "s.png")])
    lines = {line.split(" | ")[0].strip("| "): line for line in capsys.readouterr().out.splitlines()}
    similarity = float(lines["to the next"].split("|")[2])
    assert 0 < similarity <= 1
    assert is_png(tmp_path / "n.png")
    assert is_png(tmp_path / "s.png")


def test_graphs_from_models_are_scored_against_the_oracle(tiny, tmp_path, capsys):
    pytest.importorskip("jax")
    picture = tmp_path / "graph.png"
    script("fedgs-graphs").main([str(tiny), "--steps", "20", "--draw", str(picture), "--data", "digits"])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[4].strip() for row in rows] == ["functional", "cosine", "everybody linked"] * 2
    for row in rows:
        precision, recall, f1 = (float(cell) for cell in row[6:9])
        assert f1 == pytest.approx(2 * precision * recall / (precision + recall), abs=2e-4)
    # On two labels per client, twenty steps tell who shares a label better than chance.
    assert float(rows[0][8]) > float(rows[2][8])
    assert is_png(picture)


def test_counts_curves_and_rasters(tiny, tmp_path, capsys, monkeypatch):
    pytest.importorskip("jax")
    figures = script("fedgs-figures")
    figures.main(["--folder", str(tmp_path), "counts", str(tiny), "--rounds", "60"])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    spread = {row[3].strip(): float(row[7]) for row in rows}
    assert spread["FedGS alpha=1"] < spread["UniformSample"]
    assert is_png(tmp_path / "fedgs-counts.png")

    from fedpick.experiments.runner import run
    from fedpick.experiments.spec import load_spec
    from fedpick.experiments.store import Store

    store = tmp_path / "store.sqlite"
    run(load_spec(tiny), Store(store), processes=1)
    figures.main(["--folder", str(tmp_path), "curves", "--store", str(store), "--smooth", "2"])
    assert "| FedGS alpha=1 | 2 |" in capsys.readouterr().out
    assert is_png(tmp_path / "fedgs-curves.png")

    tiny.with_name("fedgs-table2-tiny.toml").write_text(TINY)
    monkeypatch.setattr(figures, "SPECS", tiny.parent)
    figures.main(["--folder", str(tmp_path), "availability", "--rounds", "9", "--modes", "tiny.toml"])
    assert is_png(tmp_path / "fedgs-availability.png")


def test_every_draw_of_md_counts(tiny):
    figures = script("fedgs-figures")
    from fedpick.experiments.spec import load_spec

    spec = load_spec(tiny)
    clients, trace = figures.setting(spec, 0)
    counts = figures.selection_counts(spec, 0, 30)
    assert counts["MDSample"].sum() == 30 * 4
    reachable = sum(min(4, int(trace.mask(index).sum())) for index in range(30))
    assert counts["UniformSample"].sum() == counts["FedGS alpha=1"].sum() == reachable
    assert len(clients) == 20
