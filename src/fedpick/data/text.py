"""Sentiment140 with GloVe vectors: tweets, their authors, and whether they are positive or negative.

The setting of Power-of-Choice, appendix F: 314 random users with at least 32 tweets, each a client; a tweet is the
average of the 200-dimensional GloVe vectors of its words.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedpick.core.errors import DataError, InvalidInput
from fedpick.core.rng import Purpose, stream
from fedpick.core.validation import require, whole
from fedpick.data.sources import Collection, File, find_files
from fedpick.data.types import Dataset

__all__ = ["GLOVE", "SENTIMENT140", "Sentiment140", "glove_collection", "tokens"]

_TRAIN = "training.1600000.processed.noemoticon.csv"
_TEST = "testdata.manual.2009.06.14.csv"
# Neither publisher states an MD5 of the single files: the readers check every line instead.
SENTIMENT140 = Collection(
    name="sentiment140",
    files=(File(name=_TRAIN), File(name=_TEST)),
    archives=("https://cs.stanford.edu/people/alecmgo/trainingandtestdata.zip",),
)
_NOISE = re.compile(r"https?://\S+|www\.\S+|@\w+")
_WORD = re.compile(r"[^\W_]+|[!?.,:;()'\"-]")


def glove_collection(dimension: int) -> Collection:
    """The GloVe 6B file with vectors of this length."""
    return Collection(
        name="glove",
        files=(File(name=f"glove.6B.{dimension}d.txt"),),
        archives=("https://nlp.stanford.edu/data/glove.6B.zip",),
    )


GLOVE = glove_collection(200)


@dataclass(frozen=True, kw_only=True)
class Sentiment140:
    """Sentiment140: tweets by user, positive (0) or negative (1), as averaged GloVe vectors.

    `num_users` users with at least `min_tweets` tweets are drawn; None takes all of them. The central test set is the
    hand-labelled one without its neutral tweets. Words without a vector are left out; a tweet without any is zero.
    """

    directory: str | Path | None = None
    num_users: int | None = 314
    min_tweets: int = 32
    dimension: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        whole(self, "min_tweets", 1)
        whole(self, "num_users", 1, optional=True)
        require(self.dimension in (50, 100, 200, 300), self, "dimension", "50, 100, 200 or 300, as GloVe 6B has")

    def load(self) -> Dataset:
        """Find and read the files, draw the users, average the vectors of every tweet."""
        glove = glove_collection(self.dimension)
        tweets = find_files(SENTIMENT140, directory=self.directory)
        vectors = find_files(glove, directory=self.directory)[glove.files[0].name]
        chosen = _choose_users(tweets[_TRAIN], self.num_users, self.min_tweets, self.seed)
        train = [(label, words, chosen[user]) for label, user, words in _read_tweets(tweets[_TRAIN], chosen)]
        test = [(label, words) for label, _, words in _read_tweets(tweets[_TEST], None)]
        vocabulary = {word for _, words, _ in train for word in words} | {word for _, words in test for word in words}
        table = _read_vectors(vectors, vocabulary, self.dimension)
        return Dataset(
            name="sentiment140",
            train_x=_average([words for _, words, _ in train], table, self.dimension),
            train_y=np.array([label for label, _, _ in train], np.int32),
            test_x=_average([words for _, words in test], table, self.dimension),
            test_y=np.array([label for label, _ in test], np.int32),
            num_classes=2,
            groups=np.array([user for _, _, user in train], np.int32),
            info={
                "num_users": len(chosen),
                "min_tweets": self.min_tweets,
                "words_with_vector": len(table),
                "seed": self.seed,
            },
        )


def _rows(path: Path) -> Iterator[list[str]]:
    with path.open(encoding="latin-1", newline="") as lines:
        for number, row in enumerate(csv.reader(lines), start=1):
            if len(row) != 6 or row[0] not in ("0", "2", "4"):
                raise DataError(
                    f"Line {number} of {path} is not a row of Sentiment140 (polarity 0, 2 or 4, id, date, query, user, "
                    f"text). The file is damaged or another one: fetch it again."
                )
            yield row


def _choose_users(path: Path, num_users: int | None, min_tweets: int, seed: int) -> dict[str, int]:
    """The drawn users, numbered in alphabetical order."""
    counts: dict[str, int] = {}
    for row in _rows(path):
        if row[0] != "2":
            counts[row[4]] = counts.get(row[4], 0) + 1
    users = sorted(user for user, count in counts.items() if count >= min_tweets)
    if len(users) < (num_users or 1):
        raise InvalidInput(
            f"{path.name} has {len(users)} users with at least {min_tweets} tweets where {num_users or 1} are needed: "
            "lower num_users or min_tweets."
        )
    if num_users is not None:
        drawn = stream(seed, 0, Purpose.DATA).choice(len(users), size=num_users, replace=False)
        users = [users[i] for i in np.sort(drawn)]
    return {user: i for i, user in enumerate(users)}


def _read_tweets(path: Path, users: dict[str, int] | None) -> Iterator[tuple[int, str, list[str]]]:
    for row in _rows(path):
        if row[0] != "2" and (users is None or row[4] in users):
            yield int(row[0] == "0"), row[4], tokens(row[5])


def tokens(text: str) -> list[str]:
    """The words of a tweet as GloVe spells them: lower case, without links and @names."""
    return _WORD.findall(_NOISE.sub(" ", text.lower()))


def _read_vectors(path: Path, vocabulary: set[str], dimension: int) -> dict[str, NDArray[np.float32]]:
    """The vectors of the words in the vocabulary; the whole file is far larger."""
    table = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            word, _, numbers = line.partition(" ")
            if number == 1 or word in vocabulary:
                vector = np.array(numbers.split(), dtype=np.float32)
                if len(vector) != dimension:
                    raise DataError(
                        f"Line {number} of {path} has {len(vector)} numbers where {dimension} were expected. "
                        "The file is damaged or another one: fetch it again."
                    )
                if word in vocabulary:
                    table[word] = vector
    if not table:
        raise DataError(f"{path} has no vector for any word of the tweets: it is not the GloVe file it should be.")
    return table


def _average(texts: Iterable[list[str]], table: dict[str, NDArray[np.float32]], dimension: int) -> NDArray[np.float32]:
    texts = list(texts)
    means = np.zeros((len(texts), dimension), dtype=np.float32)
    for row, words in enumerate(texts):
        known = [table[word] for word in words if word in table]
        if known:
            means[row] = np.mean(known, axis=0)
    return means
