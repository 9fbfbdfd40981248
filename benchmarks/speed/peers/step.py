"""One compiled call per mini-batch, as most programs train: for the sequential loop and Flower's clients."""

from __future__ import annotations

from typing import Any

from fedpick.sim import tasks
from fedpick.sim.jax_engine.setup import require_jax

__all__ = ["Stepper", "nested"]


def nested(params: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """From "dense0.weight" to ["dense0"]["weight"]."""
    tree: dict[str, dict[str, Any]] = {}
    for name, value in params.items():
        layer, _, leaf = name.partition(".")
        tree.setdefault(layer, {})[leaf] = value
    return tree


class Stepper:
    """The compiled calls of a job: a step, a weighted sum, accuracy and loss, of data on the device."""

    def __init__(self, job: dict[str, Any]) -> None:
        jax = require_jax()
        jnp = jax.numpy
        task = tasks.get(job["task"], input_shape=tuple(job["shape"]), num_classes=10)
        key = jax.random.key(0)

        def shaped(x: Any) -> Any:
            return x.reshape(x.shape[0], *job["shape"])

        def loss(params: Any, x: Any, y: Any) -> Any:
            return jnp.mean(task.per_example_loss(params, shaped(x), y, key, True))

        def step(params: Any, x: Any, y: Any, rows: Any) -> Any:
            gradient = jax.grad(loss)(params, x[rows], y[rows])
            return jax.tree.map(lambda w, g: w - job["lr"] * g, params, gradient)

        self.step = jax.jit(step)
        self.add = jax.jit(lambda total, params, weight: jax.tree.map(lambda t, w: t + weight * w, total, params))
        self.accuracy = jax.jit(lambda params, x, y: jnp.mean(task.correct(params, shaped(x), y)))
        self.loss = jax.jit(loss)
