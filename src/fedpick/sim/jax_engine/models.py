"""The models of `fedpick.sim.tasks` in JAX. As in PyTorch, weights start uniform in +-1/sqrt(fan-in).

Not implemented: Power-of-Choice's random crops and flips on CIFAR-10 (every policy trains on the plain images).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedpick.core.errors import InvalidInput
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
from fedpick.sim.tasks import Convolutional, Task

Array = Any
Params = Any
Forward = Callable[[Params, Array, Array, bool], Array]

__all__ = ["classifier", "convolutional", "logistic", "perceptron", "quadratic"]


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

    `training_loss`: the cross-entropy from (params, x, y), where computing it without the logits is faster.
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


def perceptron(name: str, sizes: Sequence[int], *, dropped: frozenset[int] = frozenset(), rate: float = 0.0) -> Task:
    """Dense layers of these sizes, inputs first, with ReLU between; dropout in the hidden layers `dropped`."""
    last = len(sizes) - 2

    def forward(params: Params, x: Array, key: Array, train: bool) -> Array:
        x = x.reshape(len(x), -1)
        for i in range(last):
            x = dense(params[f"dense{i}"], x)
            if train and i in dropped:
                # Dropout and ReLU commute: both orders of the authors' codes give the same numbers.
                x = dropout(key, x, rate, layer=i)
            x = jax.nn.relu(x)
        return dense(params[f"dense{last}"], x)

    return classifier(name, _init_layers(sizes), forward, evaluation_batch=131072)


def logistic(inputs: int, num_classes: int, *, ridge: float = 0.0, start: str = "default") -> Task:
    """Multinomial logistic regression. `start`: "default" (PyTorch's), "zero" or "zero-bias"."""
    init = _init_layers([inputs, num_classes], zero=start == "zero", zero_bias=start == "zero-bias")

    def forward(params: Params, x: Array, key: Array, train: bool) -> Array:
        return dense(params["dense0"], x.reshape(len(x), -1))

    def training_loss(params: Params, x: Array, y: Array) -> Array:
        return dense_cross_entropy(params["dense0"], x.reshape(len(x), -1), y)

    return classifier("logistic", init, forward, ridge=ridge, evaluation_batch=262144, training_loss=training_loss)


def convolutional(settings: Convolutional, input_shape: Sequence[int], num_classes: int) -> Task:
    """The model that `Convolutional` describes, for images of shape (height, width, channels)."""
    name, filters, hidden = settings.name, settings.filters, settings.hidden
    kernel, padding, pooled = settings.kernel, settings.padding, settings.pooled
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


def quadratic(dimension: int, *, start_scale: float = 100.0) -> Task:
    """F_k(w) = w'H w / 2 - e.w + e'H^-1 e / 2 for an example x = (diagonal of H, e); w starts at start_scale * N(0, 1).

    A client has one such example, so a local step is a full-gradient step: LocalTraining(batch_size=None).
    """

    def init(key: Array) -> Params:
        return {"w": start_scale * jax.random.normal(key, (dimension,), jnp.float32)}

    def per_example_loss(params: Params, x: Array, y: Array, key: Array, train: bool) -> Array:
        diagonal, linear = x[:, 0], x[:, 1]
        # The same polynomial around its minimum: the printed form loses its digits there.
        gap = params["w"] - linear / diagonal
        return 0.5 * jnp.sum(diagonal * gap * gap, axis=-1)

    def correct(params: Params, x: Array, y: Array) -> Array:
        return jnp.zeros(len(x), bool)

    return Task(name="quadratic", init=init, per_example_loss=per_example_loss, correct=correct)
