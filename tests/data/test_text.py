from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from fedpick import data
from fedpick.core.errors import DataError, InvalidInput
from fedpick.data.text import tokens

VECTORS = {"good": 1.0, "bad": -1.0, "day": 0.5, "!": 0.25, "café": 3.0}


def write(directory: Path, train: list[tuple[str, str, str]], test: list[tuple[str, str, str]]) -> Path:
    for name, rows in (
        ("training.1600000.processed.noemoticon.csv", train),
        ("testdata.manual.2009.06.14.csv", test),
    ):
        with (directory / name).open("w", encoding="latin-1", newline="") as out:
            writer = csv.writer(out, quoting=csv.QUOTE_ALL)
            for number, (polarity, user, text) in enumerate(rows):
                writer.writerow([polarity, str(number), "Mon Apr 06 2009", "NO_QUERY", user, text])
    lines = [" ".join([word, *[str(value)] * 50]) for word, value in VECTORS.items()]
    (directory / "glove.6B.50d.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return directory


@pytest.fixture
def files(tmp_path):
    train = [
        *[("4", "ann", "Good day, @bob! http://t.co/x")] * 3,
        *[("0", "bob", "BAD, bad day")] * 2,
        ("0", "cy", "good"),
        ("4", "bob", "caf\xe9 nothingknown"),
    ]
    return write(tmp_path, train, [("4", "x", "good"), ("2", "y", "neutral day"), ("0", "z", "bad !")])


def load(directory, **options):
    return data.load("sentiment140", directory=directory, dimension=50, **options)


def test_tweets_become_averages_of_their_words(files):
    tweets = load(files, num_users=None, min_tweets=2)
    assert tweets.train_x.shape == (6, 50)
    federation = data.partition(tweets, "natural")
    assert federation.sizes.tolist() == [3, 3]  # ann and bob; cy has too few
    ann = tweets.train_x[tweets.groups == 0]
    assert ann[:, 0] == pytest.approx([(1 + 0.5 + 0.25) / 3] * 3)  # the link, the @name and the comma have no vector
    bob = tweets.train_x[tweets.groups == 1]
    assert sorted(bob[:, 0].round(4).tolist()) == [-0.5, -0.5, 3.0]
    assert tweets.train_y[tweets.groups == 0].tolist() == [0, 0, 0]  # positive is 0, as in the paper
    assert tweets.test_y.tolist() == [0, 1]  # without the neutral one
    assert tweets.test_x[:, 0].tolist() == [1.0, -0.375]


def test_users_are_drawn_with_the_seed(tmp_path):
    train = [("4" if k % 2 else "0", f"user{k:02d}", "good") for k in range(20) for _ in range(2)]
    write(tmp_path, train, [("4", "x", "good")])
    first = load(tmp_path, num_users=5, min_tweets=2, seed=1)
    assert len(first) == 10 and np.unique(first.groups).tolist() == [0, 1, 2, 3, 4]
    draws = {load(tmp_path, num_users=5, min_tweets=2, seed=seed).train_y.tobytes() for seed in (1, 1, 2, 3, 4)}
    assert first.train_y.tobytes() in draws and 1 < len(draws) <= 4


def test_too_few_users_are_told(files):
    with pytest.raises(InvalidInput, match="has 0 users with at least 32 tweets where 314"):
        load(files)


def test_damaged_files_are_refused(files):
    path = files / "training.1600000.processed.noemoticon.csv"
    whole = path.read_text("latin-1")
    path.write_text(whole + '"4","1","cut sh', "latin-1")
    with pytest.raises(DataError, match="Line 8"):
        load(files, num_users=None, min_tweets=2)
    path.write_text(whole, "latin-1")
    glove = files / "glove.6B.50d.txt"
    glove.write_text(glove.read_text("utf-8").replace("bad -1.0", "bad"), "utf-8")
    with pytest.raises(DataError, match="49 numbers where 50"):
        load(files, num_users=None, min_tweets=2)


def test_words():
    assert tokens("I'm SO happy!!! @me www.x.org") == ["i", "'", "m", "so", "happy", "!", "!", "!"]
    with pytest.raises(InvalidInput, match="50, 100, 200 or 300"):
        data.load("sentiment140", dimension=128)
