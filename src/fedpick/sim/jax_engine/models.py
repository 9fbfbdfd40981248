"""The models of the papers. Where authors used PyTorch, so is the initialisation: uniform in +-1/sqrt(fan-in).

Not carried over: Power-of-Choice's random crops and flips on CIFAR-10 (every policy trains on the plain images).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedpick.core.errors import InvalidInput
from fedpick.core.validation import choice, number
from fedpick.sim.jax_engine.layers import (
    convolution,
    cross_entropy,
    dense,
    dense_cross_entropy,
    dropout,
    init_dense,
    is_largest,
    max_pool,
)
from fedpick.sim.tasks import Task

Array = Any
Params = Any
Forward = Callable[[Params, Array, Array, bool], Array]

__all__ = [
    "classifier",
    "cnn_cafed",
    "cnn_fedcor",
    "cnn_mcmahan_cifar",
    "cnn_mcmahan_fmnist",
    "cnn_power_of_choice",
    "logistic",
    "mlp",
    "quadratic",
    "sent140_mlp",
]


def classifier(
    name: str,
    init: Callable[[Array], Params],
    forward: Forward,
    *,
    ridge: float = 0.0,
    evaluation_batch: int = 8192,
    training_loss: Callable[[Params, Array, Array], Array] | None = None,
) -> Task:
    """A task from a function (params, x, key, train) -> logits, with the cross-entropy and an optional ridge term.

    `training_loss`: the cross-entropy from (params, x, y), where it can be had faster than by way of the logits.
    """

    def per_example_loss(params: Params, x: Array, y: Array, key: Array, train: bool) -> Array:
        if train and training_loss is not None:
            loss = training_loss(params, x, y)
        else:
            loss = cross_entropy(forward(params, x, key, train), y, train)
        if ridge:
            loss = loss + 0.5 * ridge * sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(params))
        return loss

    def outputs(params: Params, x: Array) -> Array:
        return forward(params, x, jax.random.key(0), False)

    def correct(params: Params, x: Array, y: Array) -> Array:
        return is_largest(outputs(params, x), y)

    return Task(
        name=name,
        init=init,
        per_example_loss=per_example_loss,
        correct=correct,
        outputs=outputs,
        evaluation_batch=evaluation_batch,
    )


def _init_layers(sizes: Sequence[int], **options: bool) -> Callable[[Array], Params]:
    def init(key: Array) -> Params:
        keys = jax.random.split(key, len(sizes) - 1)
        return {f"dense{i}": init_dense(keys[i], sizes[i], sizes[i + 1], **options) for i in range(len(sizes) - 1)}

    return init


def mlp(
    *,
    input_shape: Sequence[int] = (28, 28, 1),
    num_classes: int = 10,
    hidden: Sequence[int] = (64, 30),
    dropout: str = "none",
    rate: float = 0.5,
) -> Task:
    """A perceptron with ReLU. `dropout` says where: "none"; "fedcor" before the ReLU of every hidden layer;
    "power-of-choice" after the second hidden layer only (their code; their text says the first).
    """
    places = {"none": (), "fedcor": range(len(hidden)), "power-of-choice": (1,)}
    choice("mlp", "dropout", places, value=dropout)
    number("mlp", "rate", "[0, 1)", value=rate)
    return _perceptron("mlp", math.prod(input_shape), hidden, num_classes, frozenset(places[dropout]), rate)


def _perceptron(
    name: str, inputs: int, hidden: Sequence[int], outputs: int, dropped: frozenset[int], rate: float
) -> Task:
    def forward(params: Params, x: Array, key: Array, train: bool) -> Array:
        x = x.reshape(len(x), -1)
        for i in range(len(hidden)):
            x = dense(params[f"dense{i}"], x)
            if train and i in dropped:
                # Dropout and ReLU commute: both orders of the authors' codes give the same numbers.
                x = dropout(key, x, rate, layer=i)
            x = jax.nn.relu(x)
        return dense(params[f"dense{len(hidden)}"], x)

    return classifier(name, _init_layers([inputs, *hidden, outputs]), forward, evaluation_batch=131072)


def sent140_mlp(*, input_shape: Sequence[int] = (200,), num_classes: int = 2) -> Task:
    """Three hidden layers (128, 86, 30) on an averaged 200-dimensional GloVe vector."""
    return _perceptron("sent140-mlp", math.prod(input_shape), (128, 86, 30), num_classes, frozenset(), 0.0)


def logistic(
    *, input_shape: Sequence[int] = (60,), num_classes: int = 10, ridge: float = 0.0, start: str = "default"
) -> Task:
    """Multinomial logistic regression. `start`: "default" (PyTorch's), "zero" or "zero-bias"."""
    choice("logistic", "start", ("default", "zero", "zero-bias"), value=start)
    number("logistic", "ridge", "[0, inf)", value=ridge)
    init = _init_layers([math.prod(input_shape), num_classes], zero=start == "zero", zero_bias=start == "zero-bias")

    def forward(params: Params, x: Array, key: Array, train: bool) -> Array:
        return dense(params["dense0"], x.reshape(len(x), -1))

    def training_loss(params: Params, x: Array, y: Array) -> Array:
        return dense_cross_entropy(params["dense0"], x.reshape(len(x), -1), y)

    return classifier("logistic", init, forward, ridge=ridge, evaluation_batch=262144, training_loss=training_loss)


def _convolutional(
    name: str,
    input_shape: Sequence[int],
    num_classes: int,
    *,
    filters: Sequence[int],
    kernel: int,
    padding: int,
    pooled: Sequence[bool],
    hidden: Sequence[int],
) -> Task:
    """Convolutions (each with ReLU, some with 2x2 max-pooling), then dense layers with ReLU between."""
    if len(input_shape) != 3:
        raise InvalidInput(
            f"{name} works on images of shape (height, width, channels). Got {tuple(input_shape)}; "
            "choose the task mlp or logistic for flat data."
        )
    height, width, channels = input_shape
    for pool in pooled:
        height, width = height + 2 * padding - kernel + 1, width + 2 * padding - kernel + 1
        height, width = (height // 2, width // 2) if pool else (height, width)
    if min(height, width) < 1:
        raise InvalidInput(f"{name} needs larger images than {tuple(input_shape)}.")
    fan_ins = [kernel * kernel * size for size in (channels, *filters[:-1])]
    sizes = [height * width * filters[-1], *hidden, num_classes]

    def init(key: Array) -> Params:
        convolution_key, dense_key = jax.random.split(key)
        keys = jax.random.split(convolution_key, len(filters))
        layers = {f"conv{i}": init_dense(keys[i], fan_ins[i], filters[i]) for i in range(len(filters))}
        return {**layers, **_init_layers(sizes)(dense_key)}

    def forward(params: Params, x: Array, key: Array, train: bool) -> Array:
        x = x.reshape(len(x), *input_shape)
        for i, pool in enumerate(pooled):
            x = convolution(params[f"conv{i}"], x, kernel, padding)
            # ReLU after the pooling: the same numbers as before it, on a quarter of the values.
            x = jax.nn.relu(max_pool(x) if pool else x)
        x = x.reshape(len(x), -1)
        for i in range(len(hidden)):
            x = jax.nn.relu(dense(params[f"dense{i}"], x))
        return dense(params[f"dense{len(hidden)}"], x)

    return classifier(name, init, forward, evaluation_batch=256)


def cnn_fedcor(*, input_shape: Sequence[int] = (32, 32, 3), num_classes: int = 10) -> Task:
    """FedCor's CIFAR-10 model: 3x3 convolutions of 32, 64 (pooled) and 64 (not pooled), no padding, dense 64."""
    pooled = (True, True, False)
    return _convolutional(
        "cnn-fedcor", input_shape, num_classes, filters=(32, 64, 64), kernel=3, padding=0, pooled=pooled, hidden=(64,)
    )


def cnn_mcmahan_fmnist(*, input_shape: Sequence[int] = (28, 28, 1), num_classes: int = 10) -> Task:
    """McMahan's MNIST model as FedGS uses it: 5x5 convolutions of 32 and 64, padded and pooled, dense 512."""
    pooled = (True, True)
    return _convolutional(
        "cnn-mcmahan-fmnist",
        input_shape,
        num_classes,
        filters=(32, 64),
        kernel=5,
        padding=2,
        pooled=pooled,
        hidden=(512,),
    )


def cnn_mcmahan_cifar(*, input_shape: Sequence[int] = (32, 32, 3), num_classes: int = 10) -> Task:
    """FedGS's CIFAR-10 model: two 5x5 convolutions of 64, pooled, not padded, dense 384 and 192."""
    pooled = (True, True)
    return _convolutional(
        "cnn-mcmahan-cifar",
        input_shape,
        num_classes,
        filters=(64, 64),
        kernel=5,
        padding=0,
        pooled=pooled,
        hidden=(384, 192),
    )


def cnn_cafed(
    *, input_shape: Sequence[int] = (32, 32, 3), num_classes: int = 10, filters: Sequence[int] = (32, 64)
) -> Task:
    """Two convolutions and one dense layer. The paper gives neither widths nor kernel: 5x5 and `filters` are ours."""
    pooled = (True,) * len(filters)
    return _convolutional(
        "cnn-cafed", input_shape, num_classes, filters=filters, kernel=5, padding=0, pooled=pooled, hidden=()
    )


def cnn_power_of_choice(*, input_shape: Sequence[int] = (32, 32, 3), num_classes: int = 10) -> Task:
    """Power-of-Choice's CIFAR-10 model: 5x5 convolutions of 6 and 16, pooled, dense 120-100-84-50."""
    pooled = (True, True)
    hidden = (120, 100, 84, 50)
    return _convolutional(
        "cnn-power-of-choice",
        input_shape,
        num_classes,
        filters=(6, 16),
        kernel=5,
        padding=0,
        pooled=pooled,
        hidden=hidden,
    )


def quadratic(*, input_shape: Sequence[int] = (2, 5), num_classes: int = 0, start_scale: float = 100.0) -> Task:
    """F_k(w) = w'H w / 2 - e.w + e'H^-1 e / 2 for an example x = (diagonal of H, e); w starts at start_scale * N(0, 1).

    A client has one such example, so that a local step is a full-gradient step: LocalTraining(batch_size=None).
    """
    if len(input_shape) != 2 or input_shape[0] != 2:
        raise InvalidInput(f"The quadratic needs examples of shape (2, dimension). Got {tuple(input_shape)}.")

    def init(key: Array) -> Params:
        return {"w": start_scale * jax.random.normal(key, (input_shape[1],), jnp.float32)}

    def per_example_loss(params: Params, x: Array, y: Array, key: Array, train: bool) -> Array:
        diagonal, linear = x[:, 0], x[:, 1]
        # The same polynomial around its minimum: the printed form loses its digits there.
        gap = params["w"] - linear / diagonal
        return 0.5 * jnp.sum(diagonal * gap * gap, axis=-1)

    def correct(params: Params, x: Array, y: Array) -> Array:
        return jnp.zeros(len(x), bool)

    return Task(name="quadratic", init=init, per_example_loss=per_example_loss, correct=correct)
