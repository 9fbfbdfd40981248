"""Local training with PyTorch: a copy of the module for each thread, one client at a time or several stacked."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import groupby
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedpick.core.arrays import BoolArray, IntArray
from fedpick.sim import hashing
from fedpick.sim.batches import batch_positions
from fedpick.sim.engine import Work
from fedpick.sim.examples import Examples
from fedpick.sim.settings import LocalTraining
from fedpick.sim.torch_engine.task import TorchTask

__all__ = [
    "MiniBatches",
    "Model",
    "Replica",
    "Trainer",
    "as_inputs",
    "descend",
    "draw",
    "penalty",
    "seed_of",
    "stacked_outputs",
    "trained",
]

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
        self.names = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        self.weights = trained(self.module)
        buffers = list(self.module.buffers())
        self.buffers = [buffers[index] for index in changing]
        self._loaded: Model | None = None

    def load(self, model: Model, train: bool) -> None:
        """Take over a model, for training or for measuring."""
        if self.module.training != train:
            self.module.train(train)
        if model is not self._loaded:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, list(model.weights))
                for buffer, value in zip(self.buffers, model.buffers, strict=True):
                    buffer.copy_(value)
        self._loaded = None if train else model

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


class MiniBatches(NamedTuple):
    """The mini-batches of some clients, those with more steps first: the first of all, then the second of all, ..."""

    places: IntArray
    """(c,) positions of the clients in the cohort."""
    keys: hashing.Key
    """(c,) of the clients in this round."""
    steps: IntArray
    """(c,) their local steps, descending."""
    active: IntArray
    """(s,) how many clients take each step: the first ones."""
    rows: NDArray[np.int64]
    """(sum of steps, B) rows of the examples."""
    counts: BoolArray
    """(sum of steps, B) which of them count."""

    def apart(self) -> Iterator[MiniBatches]:
        """The mini-batches of every client alone, in the order of the cohort."""
        first = np.cumsum(self.active) - self.active
        for client in np.argsort(self.places):
            only = slice(client, client + 1)
            (steps,) = self.steps[only]
            lines = first[:steps] + client
            keys = hashing.Key(self.keys.high[only], self.keys.low[only])
            ones = np.ones(steps, np.int64)
            yield MiniBatches(self.places[only], keys, self.steps[only], ones, self.rows[lines], self.counts[lines])

    def shares(self) -> NDArray[np.float32]:
        """(sum of steps, B) how much every example counts in the mean loss of its mini-batch."""
        counted = np.maximum(np.count_nonzero(self.counts, axis=1, keepdims=True), 1)
        return np.asarray(self.counts / counted, np.float32)


def draw(local: LocalTraining, examples: Examples, work: Work, places: IntArray) -> MiniBatches:
    """Draw the mini-batches of these clients of a cohort: the same rows as the JAX engine draws."""
    steps = local.num_steps(examples.sizes[work.clients[places]])
    order = np.argsort(-steps, kind="stable")
    places, steps = places[order], steps[order]
    clients = work.clients[places]
    key = hashing.fold(work.key, clients.astype(np.uint32))
    active = np.count_nonzero(steps[None, :] > np.arange(steps.max(initial=0))[:, None], axis=1)
    # One line per mini-batch: its step, and its client.
    step = np.repeat(np.arange(len(active), dtype=np.uint32), active)
    who = np.arange(len(step)) - np.repeat(np.cumsum(active) - active, active)
    positions, counts = batch_positions(
        local,
        hashing.Key(key.high[who][:, None], key.low[who][:, None]),
        step[:, None],
        examples.sizes[clients][who].astype(np.uint32)[:, None],
        local.batch_size or int(examples.sizes[clients].max(initial=1)),
    )
    rows = examples.starts[clients][who].astype(np.int64)[:, None] + positions
    return MiniBatches(places, key, steps, active, rows, np.broadcast_to(counts, rows.shape))


class Trainer(NamedTuple):
    """Mini-batch SGD from a received model."""

    task: TorchTask
    local: LocalTraining
    x: Tensor
    """(n, features) rows of all clients."""
    y: Tensor
    shape: tuple[int, ...]
    """Of one example, as the module gets it."""
    random: bool
    """Whether the module draws random numbers while it trains."""
    program: Any = None
    """Several steps on whole mini-batches as one program; None: the module cannot be recorded. See `tracing`."""

    def step(self, replica: Replica, rows: Tensor, y: Tensor, shares: Tensor, *random: Any) -> tuple[Tensor, ...]:
        """The losses of a mini-batch, and the gradient of their sum weighted by `shares`."""
        losses = self.task.loss(self._outputs(replica, as_inputs(rows, self.shape), *random), y).float()
        gradient = torch.autograd.grad(losses, replica.weights, shares, allow_unused=True, materialize_grads=True)
        return losses.detach(), list(gradient)

    def one(self, replica: Replica, model: Model, batches: MiniBatches, lr: float) -> Tensor:
        """Train the replica as the only client of these mini-batches; return the (1,) mean training loss."""
        replica.load(model, train=True)
        weights, ridge, device = replica.weights, self.task.ridge, self.x.device
        solver = Solver.of(self.local, ridge, weights, lr)
        total = torch.zeros((), device=device)
        shares = batches.shares()
        counts, width = shares > 0, shares.shape[1]
        # Up to half of the program's batch may be examples that do not count: without it a step takes longer.
        whole = (self.program is not None) & (2 * np.count_nonzero(counts, axis=1) >= width)
        every, share_of = (torch.from_numpy(values).to(device) for values in (batches.rows, shares))
        for recorded, steps in groupby(range(len(whole)), whole.tolist().__getitem__):
            if recorded:
                first, *rest = steps
                part = slice(first, first + len(rest) + 1)
                with torch.no_grad():
                    total += self.program(weights, self.x, self.y, every[part], share_of[part], ridge, *solver)
                continue
            for step in steps:
                chosen = torch.from_numpy(counts[step]).to(device)
                index, share = every[step][chosen], share_of[step][chosen]
                x, y = self.x.index_select(0, index), self.y.index_select(0, index)
                losses, gradient = self.step(replica, x, y, share, batches.keys, step)
                with torch.no_grad():
                    total += (losses * share).sum() + penalty(weights, ridge)
                    descend(weights, gradient, *solver)
        return (total / max(len(batches.rows), 1)).reshape(1)

    def _outputs(self, replica: Replica, x: Tensor, key: hashing.Key | None = None, step: int = 0) -> Tensor:
        if not self.random or key is None:
            return replica.module(x)
        # One thread at a time, because the generator belongs to all of them. Gradients are computed side by side.
        with _GENERATOR:
            seed = seed_of(hashing.fold(key, ~np.array([step], np.uint32)))
            torch.default_generator.manual_seed(seed)
            if x.is_cuda:
                torch.cuda.manual_seed(seed)
            return replica.module(x)

    def stacked(self, replica: Replica, model: Model, batches: MiniBatches, lr: float) -> tuple[list[Tensor], Tensor]:
        """Train several clients as one: (c, ...) of every weight after training, and their (c,) mean training losses.

        All weights get one more dimension, the clients'. The clients do not share any sum, so that each of them gets
        the same numbers in any company.
        """
        replica.load(model, train=True)
        every, width = len(batches.places), batches.rows.shape[1]
        stack = [_stack(weight.detach(), every).requires_grad_() for weight in replica.weights]
        solver = Solver.of(self.local, self.task.ridge, stack, lr)
        total = torch.zeros(every, device=self.x.device)
        index = torch.from_numpy(batches.rows.reshape(-1)).to(self.x.device)
        shares = torch.from_numpy(batches.shares()).to(self.x.device).view(-1)
        first = 0
        for active in batches.active.tolist():
            part = slice(first, first + active * width)
            first += active * width
            x = as_inputs(self.x.index_select(0, index[part]), self.shape).unflatten(0, (active, width))
            weights = stack if active == every else [weight[:active].detach().requires_grad_() for weight in stack]
            outputs = stacked_outputs(replica, weights, x).flatten(0, 1)
            losses = self.task.loss(outputs, self.y.index_select(0, index[part])).float()
            gradient = torch.autograd.grad(losses, weights, shares[part], allow_unused=True, materialize_grads=True)
            with torch.no_grad():
                total[:active] += (losses * shares[part]).view(active, width).sum(dim=1)
                if self.task.ridge:
                    total[:active] += torch.vmap(penalty, (0, None))(weights, self.task.ridge)
                descend(weights, list(gradient), *solver.first(active))
        steps = torch.from_numpy(np.maximum(batches.steps, 1)).to(self.x.device)
        return [weight.detach() for weight in stack], total / steps


class Solver(NamedTuple):
    """The state and the settings of SGD, with PyTorch's form of momentum and decay: arguments of `descend`."""

    received: list[Tensor]
    """The received weights; empty without a proximal term."""
    velocity: list[Tensor]
    """Empty without momentum."""
    lr: float
    momentum: float
    proximal: float
    decay: float

    @classmethod
    def of(cls, local: LocalTraining, ridge: float, weights: Sequence[Tensor], lr: float) -> Solver:
        """The state before the first step."""
        received = [weight.detach().clone() for weight in weights] if local.proximal else []
        velocity = [torch.zeros_like(weight) for weight in weights] if local.momentum else []
        return cls(received, velocity, lr, local.momentum, local.proximal, local.weight_decay + ridge)

    def first(self, active: int) -> Solver:
        """The part of the first `active` of stacked clients."""
        received, velocity = ([each[:active] for each in kept] for kept in (self.received, self.velocity))
        return self._replace(received=received, velocity=velocity)


def descend(
    weights: list[torch.Tensor],
    gradient: list[torch.Tensor],
    received: list[torch.Tensor],
    velocity: list[torch.Tensor],
    lr: float,
    momentum: float,
    proximal: float,
    decay: float,
) -> None:
    """Take one step, in place. TorchScript compiles this function, too."""
    if decay != 0.0:
        gradient = torch._foreach_add(gradient, weights, alpha=decay)
    if proximal != 0.0:
        gradient = torch._foreach_add(gradient, torch._foreach_sub(weights, received), alpha=proximal)
    if momentum != 0.0:
        torch._foreach_mul_(velocity, momentum)
        torch._foreach_add_(velocity, gradient)
        gradient = velocity
    torch._foreach_add_(weights, gradient, alpha=-lr)


def penalty(weights: list[torch.Tensor], ridge: float) -> torch.Tensor:
    """The ridge term of the loss. TorchScript compiles this function, too."""
    total = torch.zeros((), device=weights[0].device)
    if ridge != 0.0:
        for weight in weights:
            total = total + 0.5 * ridge * (weight * weight).sum()
    return total


def _stack(weight: Tensor, count: int) -> Tensor:
    """(count, ...) copies of a weight. Matrices are kept transposed, as the gradient of a batched product comes."""
    if weight.ndim != 2:
        return weight.expand(count, *weight.shape).clone()
    return weight.t().expand(count, *weight.t().shape).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def stacked_outputs(replica: Replica, weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """(c, B, ...) outputs of c clients with their own weights, (c, ...), and their own examples, (c, B, ...)."""

    def outputs(weights: Sequence[Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(replica.module, dict(zip(replica.names, weights, strict=True)), (x,))

    # Random numbers are refused elsewhere, with a sentence.
    return torch.func.vmap(outputs, randomness="different")(list(weights), x)


def as_inputs(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Flat rows as the module gets them. Images stay in memory as they are, which PyTorch calls channels_last."""
    if len(shape) != 3:
        return x.view(len(x), *shape)
    channels, height, width = shape
    return x.view(len(x), height, width, channels).permute(0, 3, 1, 2)
