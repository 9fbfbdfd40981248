"""The experiments of Power-of-Choice can be run: as they are where the data are made up, else on small stand-ins."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from fedpick.experiments.inheritance import experiment_names
from fedpick.experiments.run import build
from fedpick.experiments.spec import load_spec, parse_spec

FOLDER = Path(__file__).parents[2] / "benchmarks/specs"

pytest.importorskip("jax")


def load(name):
    return load_spec(FOLDER / f"power-of-choice-{name}")


def play(spec, label, rounds):
    (policy,) = (entry for entry in spec.policies if entry.label == label)
    return list(build(spec.settings_of(policy, spec.seeds[0])).rounds(rounds))


def test_every_experiment_of_the_paper_has_its_spec():
    expected = {f"quadratic.toml#{variant}" for variant in ("toy", "30", "100")}
    expected |= {"synthetic.toml#1", "synthetic.toml#3", "cifar10.toml", "cifar10-reduced.toml", "sent140.toml"}
    expected |= {f"fmnist.toml#alpha{alpha}-c{share}" for alpha in ("0.3", "2") for share in ("0.03", "0.1")}
    settings = ("b128-tau30", "b64-tau100")
    expected |= {f"fmnist.toml#alpha{alpha}-{setting}" for alpha in ("0.3", "2") for setting in settings}
    expected |= {
        "fmnist.toml#intermittent-alpha2",
        "fmnist.toml#intermittent-alpha3",
        "emnist.toml#0.3",
        "emnist.toml#2",
    }
    found = {Path(name).name for file in FOLDER.glob("power-of-choice-*.toml") for name in experiment_names(file)}
    assert {name.removeprefix("power-of-choice-") for name in found} == expected


def test_the_quadratic_falls_and_counts_what_is_asked():
    spec = load("quadratic.toml#30")
    records = play(spec, "pow-d d=15", 100)
    objective = [record.objective for record in records if record.objective is not None]
    assert len(objective) == 2
    assert objective[1] < objective[0]
    assert records[-1].counters.scalars_up == 15 * 100
    (first,) = play(spec, "rand", 1)
    assert first.counters.scalars_up == 0


def test_the_toy_chooses_the_larger_loss():
    spec = load("quadratic.toml#toy")
    records = play(spec, "larger loss", 5)
    before = None
    for record in records:
        if before is not None:
            assert record.selection.clients.tolist() == [int(np.argmax(before))]
        before = record.losses


def small(name, data, num_clients, rounds=2):
    spec = load(name).to_dict()
    spec["data"] = data
    if num_clients is not None:
        spec["partition"]["num_clients"] = num_clients
    spec["local"] |= {"steps": 2, "batch_size": 8}
    spec["run"] |= {"rounds": rounds, "budget": 3, "seeds": 1, "evaluate_every": 1, "losses_every": 1}
    return parse_spec(spec)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("emnist.toml#2", "cpow-d d=30"),
        ("fmnist.toml#alpha2-c0.03", "afl"),
        ("fmnist.toml#intermittent-alpha3", "rpow-d d=50"),
    ],
)
def test_specs_on_pictures_run_on_small_digits(name, label):
    records = play(small(name, {"name": "digits"}, 12), label, 2)
    assert [len(record.selection.clients) for record in records] == [3, 3]
    assert np.isfinite(records[-1].test_accuracy)
    asked = records[-1].counters.scalars_up
    if label == "cpow-d d=30":  # every client is a candidate
        assert asked == 2 * 12
    elif label == "rpow-d d=50":  # one report with every update
        assert asked <= 2 * 3


def test_the_tweets_run_on_a_handful(tmp_path):
    words = ["good", "bad", "day", "rain"]
    rng = np.random.default_rng(0)
    rows = [
        (str(4 * int(rng.integers(2))), f"user{user}", " ".join(rng.choice(words, 3)))
        for user in range(6)
        for _ in range(12)
    ]
    for name, part in (
        ("training.1600000.processed.noemoticon.csv", rows),
        ("testdata.manual.2009.06.14.csv", rows[:10]),
    ):
        with (tmp_path / name).open("w", encoding="latin-1", newline="") as out:
            writer = csv.writer(out, quoting=csv.QUOTE_ALL)
            for number, (polarity, user, text) in enumerate(part):
                writer.writerow([polarity, str(number), "Mon Apr 06 2009", "NO_QUERY", user, text])
    vectors = [" ".join([word, *(f"{value:.3f}" for value in rng.normal(size=200))]) for word in words]
    (tmp_path / "glove.6B.200d.txt").write_text("\n".join(vectors) + "\n", encoding="utf-8")
    data = {"name": "sentiment140", "directory": str(tmp_path), "num_users": 6, "min_tweets": 5}
    records = play(small("sent140.toml", data, None), "pow-d d=16", 2)
    assert [len(record.selection.clients) for record in records] == [3, 3]
    assert records[-1].counters.scalars_up == 2 * 6
