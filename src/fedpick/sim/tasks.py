"""Tasks: a model and its loss, as three functions.

A task of your own is a `Task` with `init`, `per_example_loss` and `correct`; those of the papers are built by name:

>>> from fedpick.sim import tasks
>>> "mlp" in tasks.names()
True
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedpick.core.errors import InvalidInput, unknown_name
from fedpick.sim.devices import require_jax

__all__ = ["Task", "builder_of", "describe", "get", "names"]

Array = Any
Params = Any


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """A model and its loss. `x` is (B, ...) float32, normalised; `y` is (B,)."""

    name: str
    init: Callable[[Array], Params]
    """key -> params: any tree (dicts, lists, tuples) of float32 arrays."""
    per_example_loss: Callable[[Params, Array, Array, Array, bool], Array]
    """(params, x, y, key, train) -> (B,). `key` is a JAX random key, for dropout; `train` is False when measuring."""
    correct: Callable[[Params, Array, Array], Array]
    """(params, x, y) -> (B,) bool: whether each prediction is right."""
    outputs: Callable[[Params, Array], Array] | None = None
    """(params, x) -> (B, s) raw outputs, for policies that compare models by what they answer on noise."""
    evaluation_batch: int = 8192
    """Examples per block when measuring: bounds the memory, never changes the answer."""
    group: int | None = None
    """Clients trained in one batched program; None: decided by the number of parameters."""


_TASKS: dict[str, tuple[str, str]] = {
    "mlp": ("mlp", "784-64-30-10 perceptron of FedCor and Power-of-Choice; dropout=none, fedcor, power-of-choice"),
    "cnn-fedcor": ("cnn_fedcor", "three 3x3 convolutions (32, 64, 64) and a hidden layer of 64 (FedCor, CIFAR-10)"),
    "cnn-mcmahan-fmnist": ("cnn_mcmahan_fmnist", "5x5 convolutions of 32 and 64, dense 512 (FedGS, Fashion-MNIST)"),
    "cnn-mcmahan-cifar": ("cnn_mcmahan_cifar", "5x5 convolutions of 64 and 64, dense 384-192 (FedGS, CIFAR-10)"),
    "cnn-cafed": ("cnn_cafed", "two 5x5 convolutions and one dense layer (CA-Fed, CIFAR-10)"),
    "cnn-power-of-choice": ("cnn_power_of_choice", "convolutions of 6 and 16, dense 120-100-84-50 (CIFAR-10)"),
    "logistic": ("logistic", "multinomial logistic regression; ridge, zero or zero-bias start"),
    "sent140-mlp": ("sent140_mlp", "200-128-86-30-2 perceptron on averaged GloVe vectors (Power-of-Choice)"),
    "quadratic": (
        "quadratic",
        "Power-of-Choice's quadratic: w'Hw/2 - e.w + e'H^-1 e/2, one example (diagonal of H, e) per client",
    ),
}


_BUILT: dict[tuple[str, str], Task] = {}


def names() -> tuple[str, ...]:
    """The tasks there are."""
    return tuple(sorted(_TASKS))


def describe(name: str) -> str:
    """One line about a task."""
    if name not in _TASKS:
        raise unknown_name("task", name, _TASKS, "run `fedpick list tasks` to see them")
    return _TASKS[name][1]


def builder_of(name: str) -> Callable[..., Task]:
    """The function behind a name; its keyword arguments are the options of the task."""
    describe(name)
    require_jax()
    from fedpick.sim import models

    return getattr(models, _TASKS[name][0])  # type: ignore[no-any-return]


def get(name: str, **options: Any) -> Task:
    """Build a task by name. All take `input_shape` and `num_classes`; the rest is each task's own."""
    builder = builder_of(name)
    known = inspect.signature(builder).parameters
    if unknown := sorted(set(options) - set(known)):
        raise InvalidInput(f"The task {name!r} has the options {', '.join(known)}. Got {', '.join(unknown)}.")
    # The same task is the same object: programs compiled for it are then shared by all simulators of a process.
    key = (name, repr(sorted(options.items())))
    if key not in _BUILT:
        _BUILT[key] = builder(**options)
    return _BUILT[key]
