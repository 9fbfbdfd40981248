"""Tasks: a model and its loss, as three functions.

A task of your own is a `Task` with `init`, `per_example_loss` and `correct`; where a name is wanted, it is
`package.module:function`, a function that returns one. Those of the papers are built by name:

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
from fedpick.core.imports import accepts, build_object, is_import_path, load_object
from fedpick.sim.jax_engine.setup import require_jax

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


_BUILT: dict[tuple[Callable[..., Task], str], Task] = {}
_FROM_THE_DATA = ("input_shape", "num_classes")


def names() -> tuple[str, ...]:
    """The tasks there are."""
    return tuple(sorted(_TASKS))


def describe(name: str) -> str:
    """One line about a task."""
    if is_import_path(name):
        return (inspect.getdoc(builder_of(name)) or "").partition("\n")[0]
    if name not in _TASKS:
        hint = "run `fedpick list tasks` to see them; your own is named 'package.module:function'"
        raise unknown_name("task", name, _TASKS, hint)
    return _TASKS[name][1]


def builder_of(name: str) -> Callable[..., Task]:
    """The function behind a name; its keyword arguments are the options of the task."""
    if is_import_path(name):
        return load_object("task", name)
    describe(name)
    require_jax()
    from fedpick.sim.jax_engine import models

    return getattr(models, _TASKS[name][0])  # type: ignore[no-any-return]


def get(name: str, **options: Any) -> Task:
    """Build a task by name. `input_shape` and `num_classes` come from the data, the rest is each task's own.

    `package.module:function` is your own: the function is called with the options, and with those two if it takes them.
    """
    builder = builder_of(name)
    if is_import_path(name):
        options = {key: value for key, value in options.items() if key not in _FROM_THE_DATA or accepts(builder, key)}
    if unknown := sorted(option for option in options if not accepts(builder, option)):
        known = ", ".join(inspect.signature(builder).parameters) or "none"
        raise InvalidInput(f"The task {name!r} has the options {known}. Got {', '.join(unknown)}.")
    # The same task is the same object: programs compiled for it are then shared by all simulators of a process.
    key = (builder, repr(sorted(options.items())))
    if key not in _BUILT:
        _BUILT[key] = build_object("task", name, builder, Task, options) if is_import_path(name) else builder(**options)
    return _BUILT[key]
