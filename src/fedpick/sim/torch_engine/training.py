"""Local training with PyTorch: a copy of the module for each thread, and SGD on one client's mini-batches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedpick.core.arrays import IntArray
from fedpick.sim import hashing
from fedpick.sim.batches import batch_positions
from fedpick.sim.settings import LocalTraining
from fedpick.sim.torch_engine.task import TorchTask

__all__ = ["Model", "Replica", "Trainer", "draw_rows", "seed_of"]

Tensor = Any
_GENERATOR = Lock()
"""Held while a module draws from PyTorch's generator, which all threads share."""


class Model(NamedTuple):
    """The state of a module, as the server keeps it."""

    weights: tuple[Tensor, ...]
    """The parameters that are trained, float32."""
    buffers: tuple[Tensor, ...]
    """What the module itself changes while it trains, such as the running statistics of batch normalisation."""


class Replica:
    """A copy of the module that one thread works with."""

    def __init__(self, module: Any, changing: Sequence[int], device: str, images: bool) -> None:
        self.module = copy.deepcopy(module).to(device)
        if images:
            self.module.to(memory_format=torch.channels_last)  # as the inputs are; convolutions are faster
        self.weights = trained(self.module)
        buffers = list(self.module.buffers())
        self.buffers = [buffers[index] for index in changing]

    def load(self, model: Model) -> None:
        """Take over a model."""
        with torch.no_grad():
            torch._foreach_copy_(self.weights, list(model.weights))
            for buffer, value in zip(self.buffers, model.buffers, strict=True):
                buffer.copy_(value)

    def state(self) -> Model:
        """A copy of the model, in the memory of the host."""
        return Model(
            tuple(weight.detach().cpu().clone(memory_format=torch.contiguous_format) for weight in self.weights),
            tuple(buffer.detach().cpu().clone() for buffer in self.buffers),
        )


def trained(module: Any) -> list[Tensor]:
    """The parameters that training changes, in a fixed order."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def seed_of(key: hashing.Key) -> int:
    """The seed of a PyTorch generator, from a key."""
    return (int(key.high[0]) << 32) | int(key.low[0])


def draw_rows(
    local: LocalTraining, key: hashing.Key, client: int, start: int, size: int, steps: int
) -> list[NDArray[np.int64]]:
    """The rows of every local step of a client, the same as the JAX engine draws."""
    if size == 0:
        return []
    batch = local.batch_size or size
    positions, counts = batch_positions(
        local,
        hashing.fold(key, client),
        np.arange(steps, dtype=np.uint32)[:, None],
        np.array([size], np.uint32),
        batch,
    )
    rows = start + np.broadcast_to(positions, (steps, batch)).astype(np.int64)
    if counts.all():
        return list(rows)
    return [each[counted] for each, counted in zip(rows, np.broadcast_to(counts, rows.shape), strict=True)]


class Trainer(NamedTuple):
    """Trains one client: mini-batch SGD from a received model."""

    task: TorchTask
    local: LocalTraining
    x: Tensor
    """(n, features) rows of all clients."""
    y: Tensor
    shape: tuple[int, ...]
    """Of one example, as the module gets it."""
    random: bool
    """Whether the module draws random numbers while it trains."""

    def inputs(self, rows: Tensor) -> Tensor:
        """Examples as the module gets them; images with the channels first, in the memory's order of the rows."""
        x = self.x.index_select(0, rows)
        return as_inputs(x, self.shape)

    def losses(self, replica: Replica, outputs: Tensor, y: Tensor) -> Tensor:
        """(B,) the loss of every example."""
        losses = self.task.loss(outputs, y)
        if self.task.ridge:
            losses = losses + 0.5 * self.task.ridge * sum((weight * weight).sum() for weight in replica.weights)
        return losses

    def run(self, replica: Replica, model: Model, rows: Sequence[IntArray], key: hashing.Key, lr: float) -> float:
        """Train the replica on these mini-batches, starting at the model; return the mean training loss."""
        local, weights = self.local, replica.weights
        replica.load(model)
        if not replica.module.training:
            replica.module.train()
        received = [weight.detach().clone() for weight in weights] if local.proximal else []
        velocity = [torch.zeros_like(weight) for weight in weights] if local.momentum else []
        total = torch.zeros((), device=self.x.device)
        for step, chosen in enumerate(rows):
            index = torch.from_numpy(chosen).to(self.x.device)
            x, y = self.inputs(index), self.y.index_select(0, index)
            loss = self.losses(replica, self._outputs(replica, x, key, step), y).mean()
            gradient = list(torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True))
            with torch.no_grad():
                total += loss
                if local.weight_decay:
                    torch._foreach_add_(gradient, weights, alpha=local.weight_decay)
                if local.proximal:
                    torch._foreach_add_(gradient, torch._foreach_sub(weights, received), alpha=local.proximal)
                if local.momentum:
                    torch._foreach_mul_(velocity, local.momentum)
                    torch._foreach_add_(velocity, gradient)
                    gradient = velocity
                torch._foreach_add_(weights, gradient, alpha=-lr)
        return float(total) / len(rows) if rows else float("nan")

    def _outputs(self, replica: Replica, x: Tensor, key: hashing.Key, step: int) -> Tensor:
        if not self.random:
            return replica.module(x)
        # One thread at a time, because the generator belongs to all of them. Gradients are computed side by side.
        with _GENERATOR:
            seed = seed_of(hashing.fold(key, ~np.array([step], np.uint32)))
            torch.default_generator.manual_seed(seed)
            if x.is_cuda:
                torch.cuda.manual_seed(seed)
            return replica.module(x)


def as_inputs(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Flat rows as the module gets them. Images stay in memory as they are, which PyTorch calls channels_last."""
    if len(shape) != 3:
        return x.view(len(x), *shape)
    channels, height, width = shape
    return x.view(len(x), height, width, channels).permute(0, 3, 1, 2)
