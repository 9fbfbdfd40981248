"""The pieces the models are made of: layers with PyTorch's default initialisation, convolutions fit for a CPU, losses.

Images are (batch, height, width, channels). A convolution's weight is (kernel * kernel * channels, filters), with the
rows in the order (row, column, channel).
"""

from __future__ import annotations

import math
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedpick.sim import hashing
from fedpick.sim.jax_engine.setup import on_cpu

__all__ = [
    "convolution",
    "cross_entropy",
    "dense",
    "dense_cross_entropy",
    "dropout",
    "init_dense",
    "is_largest",
    "max_pool",
]

Array = Any

FEW_EXAMPLES, MOST_PARTS = 8, 8
"""Examples of a mini-batch that a convolution on a CPU processes at a time, and the most such parts: each lengthens the
program."""
FEW_CLASSES = 16
"""Up to this many classes the loss is written out class by class; the program grows with every class."""


def init_dense(key: Array, inputs: int, outputs: int, zero: bool = False, zero_bias: bool = False) -> dict[str, Array]:
    """PyTorch's default: weight and bias uniform in +-1/sqrt(inputs)."""
    bound = 1.0 / math.sqrt(inputs)
    weight_key, bias_key = jax.random.split(key)
    weight = jax.random.uniform(weight_key, (inputs, outputs), jnp.float32, -bound, bound)
    bias = jax.random.uniform(bias_key, (outputs,), jnp.float32, -bound, bound)
    return {
        "weight": jnp.zeros_like(weight) if zero else weight,
        "bias": jnp.zeros_like(bias) if zero or zero_bias else bias,
    }


def dense(layer: dict[str, Array], x: Array) -> Array:
    """x W + b."""
    return x @ layer["weight"] + layer["bias"]


def dropout(key: Array, x: Array, rate: float, layer: int = 0) -> Array:
    """Zero every value with probability `rate` and scale the rest up; `layer` tells masks of one key apart.

    The mask comes from the counter-based hash: threefry would cost more than the small models that use it.
    """
    words = jax.random.key_data(key).ravel()
    positions = lax.iota(jnp.uint32, x.size).reshape(x.shape)
    layer_key = hashing.fold(hashing.Key(words[0], words[1]), jnp.uint32(layer))
    bits = hashing.uniform_bits(layer_key, positions)
    keep = bits >= np.uint32(min(round(rate * 2**32), 2**32 - 1))
    return jnp.where(keep, x / (1.0 - rate), 0.0)


def convolution(layer: dict[str, Array], x: Array, kernel: int, padding: int = 0) -> Array:
    """A kernel x kernel convolution with stride 1."""
    weight = layer["weight"].reshape(kernel, kernel, x.shape[-1], -1)
    convolve = _convolve_on_cpu if on_cpu() else _convolve
    return convolve(weight, x, padding) + layer["bias"]


def _convolve(weight: Array, x: Array, padding: int) -> Array:
    sides = [(padding, padding), (padding, padding)]
    return lax.conv_general_dilated(x, weight, (1, 1), sides, dimension_numbers=("NHWC", "HWIO", "NHWC"))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _convolve_on_cpu(weight: Array, x: Array, padding: int) -> Array:
    """Convolve, with both gradients written as plain convolutions of rearranged arrays.

    Inside a loop XLA's CPU compiler has a fast path for this order of dimensions only; JAX's own gradients use other
    orders, which are a hundred times slower. Under vmap the clients are convolved one by one, for the same reason.
    """
    return _one_after_another(weight, x, padding)


def _parts(count: int) -> list[slice]:
    """Cut a mini-batch: XLA writes out all patches that it multiplies, and those of few examples fit into the cache."""
    size = -(-count // min(MOST_PARTS, max(1, count // FEW_EXAMPLES)))
    return [slice(first, first + size) for first in range(0, count, size)]


def _few_at_a_time(weight: Array, x: Array, padding: int) -> Array:
    return jnp.concatenate([_one_after_another(weight, x[part], padding) for part in _parts(len(x))])


def _one_after_another(weight: Array, x: Array, padding: int) -> Array:
    # Not typed by JAX.
    each = jax.custom_batching.sequential_vmap(partial(_convolve, padding=padding))  # type: ignore[no-untyped-call]
    return each(weight, x)


def _convolve_forward(weight: Array, x: Array, padding: int) -> tuple[Array, tuple[Array, Array]]:
    return _few_at_a_time(weight, x, padding), (weight, x)


def _convolve_backward(padding: int, saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    weight, x = saved
    turned = jnp.transpose(weight[::-1, ::-1], (0, 1, 3, 2))
    by_x = _few_at_a_time(turned, gradient, weight.shape[0] - 1 - padding)
    # Channels take the place of the examples, and the examples are summed over.
    by_weight = reduce(
        jnp.add,
        [
            _one_after_another(
                jnp.transpose(gradient[part], (1, 2, 0, 3)), jnp.transpose(x[part], (3, 1, 2, 0)), padding
            )
            for part in _parts(len(x))
        ],
    )
    return jnp.transpose(by_weight, (1, 2, 0, 3)), by_x


_convolve_on_cpu.defvjp(_convolve_forward, _convolve_backward)


def max_pool(x: Array) -> Array:
    """The maximum of every 2 x 2 block; an odd last row or column is left out, as in PyTorch."""
    batch, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2, :]
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


def cross_entropy(logits: Array, labels: Array, train: bool = True) -> Array:
    """(B,) minus the log-probability of the right label."""
    if not train and logits.shape[-1] <= FEW_CLASSES:
        return _class_by_class(logits, labels)
    labels = labels[:, None].astype(jnp.int32)
    if train:
        # A comparison, because the gradient of a gather is a scatter, which is slow in a loop on a CPU.
        right = labels == lax.iota(jnp.int32, logits.shape[-1])
        picked = jnp.where(right, logits, 0.0).sum(axis=-1)
    else:
        picked = jnp.take_along_axis(logits, labels, axis=-1, mode="clip")[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def is_largest(logits: Array, labels: Array) -> Array:
    """(B,) whether the right label is the first with the largest logit."""
    if logits.shape[-1] > FEW_CLASSES:
        return jnp.argmax(logits, axis=-1) == labels
    largest, place = logits[:, 0], jnp.zeros(len(logits), jnp.int32)
    for index in range(1, logits.shape[-1]):
        larger = logits[:, index] > largest
        largest, place = jnp.where(larger, logits[:, index], largest), jnp.where(larger, index, place)
    return place == labels


def dense_cross_entropy(layer: dict[str, Array], x: Array, labels: Array) -> Array:
    """Return cross_entropy(dense(layer, x), labels), for training a model with this single layer.

    The classes are the rows here. On a CPU this makes the product, that of its gradient and the sums over the classes
    up to twice as fast.
    """
    logits = lax.dot_general(layer["weight"], x, (((0,), (1,)), ((), ()))) + layer["bias"][:, None]
    return _classes_first(logits, labels.astype(jnp.int32))


@jax.custom_vjp
def _classes_first(logits: Array, labels: Array) -> Array:
    return _loss_and_parts(logits, labels)[0]


def _loss_and_parts(logits: Array, labels: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    right = lax.broadcasted_iota(jnp.int32, logits.shape, 0) == labels
    total = jax.nn.logsumexp(logits, axis=0)
    return total - jnp.where(right, logits, 0.0).sum(axis=0), (logits, total, right)


def _slope(parts: tuple[Array, Array, Array], upstream: Array) -> tuple[Array, None]:
    logits, total, right = parts
    return (jnp.exp(logits - total) - right) * upstream, None


_classes_first.defvjp(_loss_and_parts, _slope)


def _class_by_class(logits: Array, labels: Array) -> Array:
    """Cross-entropy with the classes written out: XLA compiles it to one pass on all cores, not one per reduction."""
    columns = [logits[:, index] for index in range(logits.shape[-1])]
    largest = reduce(jnp.maximum, columns)
    total = sum(jnp.exp(column - largest) for column in columns)
    picked = sum(jnp.where(labels == index, column, 0.0) for index, column in enumerate(columns))
    return largest + jnp.log(total) - picked
