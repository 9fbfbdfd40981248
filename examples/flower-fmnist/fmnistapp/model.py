"""A two-layer network in plain NumPy, and the local data of one client."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedpick import data

HIDDEN = 64
Params = dict[str, NDArray[np.float32]]


@lru_cache(maxsize=1)
def federation(dataset: str, num_partitions: int) -> data.Federation:
    if dataset == "synthetic":  # made for so many clients, nothing to deal out
        made = data.load(dataset, num_clients=num_partitions)
        return data.partition(made, "natural", seed=0, split=(0.8, 0.0, 0.2))
    return data.partition(data.load(dataset), "2spc", num_clients=num_partitions, seed=0)


def local_examples(dataset: str, partition: int, num_partitions: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    dealt = federation(dataset, num_partitions)
    rows = dealt.rows(partition)
    return dealt.normalized(dealt.x[rows]).reshape(len(rows), -1), dealt.y[rows]


def test_examples(dataset: str, num_partitions: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    dealt = federation(dataset, num_partitions)
    return dealt.normalized(dealt.test_x).reshape(len(dealt.test_x), -1), dealt.test_y


def num_classes(dataset: str, num_partitions: int) -> int:
    dealt = federation(dataset, num_partitions)
    return int(max(dealt.y.max(), dealt.test_y.max())) + 1


def initial(num_features: int, num_classes: int, seed: int) -> Params:
    rng = np.random.default_rng(seed)

    def layer(rows: int, columns: int) -> NDArray[np.float32]:
        return rng.uniform(-1, 1, (rows, columns)).astype(np.float32) / np.sqrt(rows).astype(np.float32)

    return {
        "w1": layer(num_features, HIDDEN),
        "b1": np.zeros(HIDDEN, np.float32),
        "w2": layer(HIDDEN, num_classes),
        "b2": np.zeros(num_classes, np.float32),
    }


def logits(params: Params, x: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    hidden = np.maximum(x @ params["w1"] + params["b1"], 0)
    return hidden, hidden @ params["w2"] + params["b2"]


def probabilities(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    shifted = np.exp(scores - scores.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


def loss_and_accuracy(params: Params, x: NDArray[np.float32], y: NDArray[np.int32]) -> tuple[float, float]:
    _, scores = logits(params, x)
    chosen = probabilities(scores)[np.arange(len(y)), y]
    return float(-np.log(np.maximum(chosen, 1e-12)).mean()), float((scores.argmax(axis=1) == y).mean())


def train(
    params: Params,
    x: NDArray[np.float32],
    y: NDArray[np.int32],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    rng: np.random.Generator,
) -> tuple[Params, float]:
    params = {name: value.copy() for name, value in params.items()}
    losses = []
    for _ in range(steps):
        rows = rng.choice(len(y), size=min(batch_size, len(y)), replace=False)
        hidden, scores = logits(params, x[rows])
        error = probabilities(scores)
        losses.append(-np.log(np.maximum(error[np.arange(len(rows)), y[rows]], 1e-12)).mean())
        error[np.arange(len(rows)), y[rows]] -= 1
        error /= len(rows)
        back = (error @ params["w2"].T) * (hidden > 0)
        params["w2"] -= learning_rate * (hidden.T @ error)
        params["b2"] -= learning_rate * error.sum(axis=0)
        params["w1"] -= learning_rate * (x[rows].T @ back)
        params["b1"] -= learning_rate * back.sum(axis=0)
    return params, float(np.mean(losses))
