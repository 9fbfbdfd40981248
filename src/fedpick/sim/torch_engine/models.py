"""The models of `fedpick.sim.tasks` in PyTorch: the same functions as in `jax_engine.models`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from fedpick.core.errors import InvalidInput
from fedpick.sim.tasks import Convolutional
from fedpick.sim.torch_engine.task import TorchTask

__all__ = ["convolutional", "logistic", "perceptron", "quadratic"]

Tensor = Any
Module = Any


def perceptron(
    name: str, sizes: Sequence[int], *, dropped: frozenset[int] = frozenset(), rate: float = 0.0
) -> TorchTask:
    """Dense layers of these sizes, inputs first, with ReLU between; dropout in the hidden layers `dropped`."""

    def make() -> Module:
        layers: list[Module] = [nn.Flatten()]
        for index, (inputs, outputs) in enumerate(pairwise(sizes)):
            layers.append(nn.Linear(inputs, outputs))
            if index in dropped:
                layers.append(nn.Dropout(rate))
            layers.append(nn.ReLU())
        return nn.Sequential(*layers[:-1])

    return TorchTask(name=name, module=make)


def logistic(inputs: int, num_classes: int, *, ridge: float = 0.0, start: str = "default") -> TorchTask:
    """Multinomial logistic regression. `start`: "default" (PyTorch's), "zero" or "zero-bias"."""

    def make() -> Module:
        layer = nn.Linear(inputs, num_classes)
        with torch.no_grad():
            if start != "default":
                layer.bias.zero_()
            if start == "zero":
                layer.weight.zero_()
        return nn.Sequential(nn.Flatten(), layer)

    return TorchTask(name="logistic", module=make, ridge=ridge)


def convolutional(settings: Convolutional, input_shape: Sequence[int], num_classes: int) -> TorchTask:
    """The model that `Convolutional` describes, for images of shape (height, width, channels)."""
    height, width, channels = input_shape
    kernel, padding = settings.kernel, settings.padding
    for pool in settings.pooled:
        height, width = height + 2 * padding - kernel + 1, width + 2 * padding - kernel + 1
        height, width = (height // 2, width // 2) if pool else (height, width)
    if min(height, width) < 1:
        raise InvalidInput(f"{settings.name} needs larger images than {tuple(input_shape)}.")

    def make() -> Module:
        layers: list[Module] = []
        sizes = (channels, *settings.filters)
        for index, pool in enumerate(settings.pooled):
            layers.append(nn.Conv2d(sizes[index], sizes[index + 1], kernel, padding=padding))
            # ReLU after the pooling: the same numbers as before it, on a quarter of the values.
            layers += [nn.MaxPool2d(2), nn.ReLU()] if pool else [nn.ReLU()]
        layers.append(nn.Flatten())
        inputs = height * width * settings.filters[-1]
        for outputs in settings.hidden:
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
            inputs = outputs
        return nn.Sequential(*layers, nn.Linear(inputs, num_classes))

    return TorchTask(name=settings.name, module=make, evaluation_batch=256)


def quadratic(dimension: int, *, start_scale: float = 100.0) -> TorchTask:
    """F_k(w) = w'H w / 2 - e.w + e'H^-1 e / 2 for an example x = (diagonal of H, e); w starts at start_scale * N(0, 1).

    The module returns the loss of every example.
    """
    return TorchTask(
        name="quadratic",
        module=partial(_Quadratic, dimension, start_scale),
        loss=lambda outputs, y: outputs,
        correct=lambda outputs, y: torch.zeros(len(outputs), dtype=torch.bool, device=outputs.device),
        outputs=False,
    )


class _Quadratic(nn.Module):  # type: ignore[misc]  # mypy does not read PyTorch
    def __init__(self, dimension: int, start_scale: float) -> None:
        super().__init__()
        self.w = nn.Parameter(start_scale * torch.randn(dimension))

    def forward(self, x: Tensor) -> Tensor:
        """(B,) losses, around the minimum: the printed form loses its digits there."""
        diagonal, linear = x[:, 0], x[:, 1]
        gap = self.w - linear / diagonal
        return 0.5 * (diagonal * gap * gap).sum(dim=-1)
