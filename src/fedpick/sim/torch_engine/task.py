"""A PyTorch module as a task. Importing this file does not import PyTorch; building an engine does."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fedpick.core.errors import FedpickError, InvalidInput
from fedpick.core.imports import accepts
from fedpick.core.validation import number, whole
from fedpick.sim.engine import EngineMaker
from fedpick.sim.torch_engine.setup import require_torch, seeded

__all__ = ["TorchTask", "torch_task"]

Tensor = Any
Module = Any


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """(B,) minus the log-probability of the right label."""
    functional = require_torch().nn.functional
    # On a CPU PyTorch takes three to seven times as long for fewer classes than a vector register holds, 16.
    if outputs.ndim == 2 and outputs.shape[1] < 16:
        outputs = functional.pad(outputs, (0, 16 - outputs.shape[1]), value=-math.inf)
    return functional.cross_entropy(outputs, y, reduction="none")


def is_largest(outputs: Tensor, y: Tensor) -> Tensor:
    """(B,) whether the right label has the largest output."""
    return outputs.argmax(dim=1) == y


@dataclass(frozen=True, kw_only=True, eq=False)
class TorchTask:
    """A PyTorch module, its loss and how to tell right predictions.

    Modules get float32 inputs, normalised. Images, (height, width, channels) in a federation, arrive as PyTorch has
    them: (B, channels, height, width). Labels are int64; `y` that are numbers are float32.
    """

    name: str
    module: Module | Callable[..., Module]
    """A function or class that makes the module: it is called under the seed of the run, with `input_shape` and
    `num_classes` of the data if it has these arguments. Or a module: every seed then starts at its weights."""
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    """(outputs, y) -> (B,): one loss per example."""
    correct: Callable[[Tensor, Tensor], Tensor] = is_largest
    """(outputs, y) -> (B,) bool: whether each prediction is right."""
    ridge: float = 0.0
    """Adds ridge / 2 * |w|^2 of all trained parameters to the loss."""
    outputs: bool = True
    """Whether policies may compare models by their outputs on noise."""
    evaluation_batch: int | None = None
    """Examples per block when measuring; None: by the size of an example."""

    def __post_init__(self) -> None:
        number(self, "ridge", "[0, inf)")
        whole(self, "evaluation_batch", 1, optional=True)

    def build(self, seed: int, input_shape: tuple[int, ...], num_classes: int) -> Module:
        """Make the module with the initial weights of a seed."""
        torch = require_torch()
        if isinstance(self.module, torch.nn.Module):
            return copy.deepcopy(self.module)
        data = {"input_shape": input_shape, "num_classes": num_classes}
        try:
            given = {key: value for key, value in data.items() if accepts(self.module, key)}
            with seeded(seed):
                made = self.module(**given)
        except FedpickError:
            raise
        except Exception as error:  # user code may raise anything
            raise InvalidInput(
                f"Building the module of the task {self.name!r} failed: {type(error).__name__}: {error}."
            ) from error
        if not isinstance(made, torch.nn.Module):
            raise InvalidInput(
                f"The task {self.name!r} must be a torch.nn.Module or a function that returns one. It returns "
                f"{type(made).__name__}. A task in JAX is a fedpick.sim.Task."
            )
        return made

    @property
    def engine(self) -> EngineMaker:
        """Makes the engine that trains this task."""
        require_torch()
        from fedpick.sim.torch_engine.engine import TorchEngine

        return partial(TorchEngine, self)


def torch_task(module: Module | Callable[..., Module], name: str | None = None) -> TorchTask:
    """The task of a module, or of a function that makes one: a classifier with the cross-entropy."""
    return TorchTask(name=name or str(getattr(module, "__name__", type(module).__name__)), module=module)
