"""Softmax regression with NumPy. Four clients have two of four labels each."""

import numpy as np

LABELS = 4
CENTRES = 2.0 * np.eye(LABELS)


def examples(partition):
    rng = np.random.default_rng(partition)
    y = rng.choice([partition % LABELS, (partition + 1) % LABELS], size=40)
    return CENTRES[y] + rng.normal(size=(40, LABELS)), y


def shares(model, x):
    scores = np.exp(x @ model["weight"].T + model["bias"])
    return scores / scores.sum(axis=1, keepdims=True)


def loss(model, x, y):
    return float(-np.log(shares(model, x)[np.arange(len(y)), y]).mean())


def train(model, x, y):
    for _ in range(5):
        error = shares(model, x) - np.eye(LABELS)[y]
        weight, bias = error.T @ x / len(y), error.mean(axis=0)
        model = {"weight": model["weight"] - 0.5 * weight, "bias": model["bias"] - 0.5 * bias}
    return model
