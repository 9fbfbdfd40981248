"""What a module must be for federated training, checked on a few examples before the first round."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import torch

from fedpick.core.errors import FedpickError, InvalidInput
from fedpick.sim.examples import Examples
from fedpick.sim.settings import LocalTraining
from fedpick.sim.torch_engine.setup import seeded
from fedpick.sim.torch_engine.task import TorchTask, cross_entropy
from fedpick.sim.torch_engine.training import Replica, as_inputs, stacked_outputs, trained

__all__ = ["Findings", "check_module"]

Tensor = Any
ROWS = 4


class Findings(NamedTuple):
    """What a training step on a few examples shows of a module."""

    changing: tuple[int, ...]
    """Which of its buffers training changes."""
    random: bool
    """Whether it draws random numbers while it trains."""
    separate: bool
    """Whether no example affects another."""
    stackable: bool
    """Whether clients can be trained as one, with one more dimension; see `Trainer.stacked`."""


def check_module(
    task: TorchTask, module: Any, examples: Examples, local: LocalTraining, shape: tuple[int, ...]
) -> Findings:
    """Train a copy of the module for one step; raise what would go wrong in some round."""
    _check_weights(task, module)
    scratch = copy.deepcopy(module)
    x = as_inputs(torch.tensor(examples.x[:ROWS]), shape)
    y = labels(examples.y[:ROWS])
    before = [buffer.clone() for buffer in scratch.buffers()]
    with seeded(0):
        state = torch.get_rng_state()
        outputs = _call(task, "The module", scratch.train(), x)
        random = not torch.equal(state, torch.get_rng_state())
        _check_outputs(task, outputs, len(x), examples.num_classes)
        losses = _call(task, "The loss", task.loss, outputs, y)
        _check_answers(task, "loss", losses, len(x), "number", "reduction='none' keeps PyTorch's losses apart")
        _check_answers(
            task, "correct", _call(task, "correct", task.correct, outputs, y), len(x), "truth value",
            "compare the predictions with y",
        )  # fmt: skip
        if not losses.requires_grad:
            raise InvalidInput(
                f"The loss of the task {task.name!r} has no gradient. Compute it from the module's outputs with "
                "PyTorch's functions, without detach() and no_grad()."
            )
        changing = _changing_buffers(task, scratch, before)
        _check_single_examples(task, scratch, examples, local, x)
        _call(task, "The module", scratch.eval(), x)
        replica = Replica(module, (), "cpu", images=x.ndim == 4)
        replica.module.train()
        with torch.no_grad():
            separate = not changing and not random and _separate(task, replica, x, y)
            stackable = separate and _stackable(task, replica, x, y)
    return Findings(changing, random, separate, stackable)


def labels(y: Any) -> Tensor:
    """Labels as PyTorch's losses want them."""
    return torch.tensor(y.astype(np.int64) if np.issubdtype(y.dtype, np.integer) else y)


def _call(task: TorchTask, what: str, function: Any, *arguments: Tensor) -> Tensor:
    try:
        return function(*arguments)
    except FedpickError:
        raise
    except Exception as error:  # user code may raise anything
        shapes = " and ".join(str(tuple(argument.shape)) for argument in arguments)
        raise InvalidInput(
            f"{what} of the task {task.name!r} failed on {len(arguments[0])} examples, arrays of shape {shapes}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _check_weights(task: TorchTask, module: Any) -> None:
    if not trained(module):
        raise InvalidInput(f"The module of the task {task.name!r} has no parameters to train.")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise InvalidInput(
                f"The parameter {name!r} of the task {task.name!r} has no shape yet. Give the layer its input size: "
                "lazy layers cannot be sent to clients."
            )
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise InvalidInput(
                f"Models train in float32. The parameter {name!r} of the task {task.name!r} is "
                f"{str(parameter.dtype).removeprefix('torch.')}. Call .float() on the module."
            )
        if not bool(torch.isfinite(parameter).all()):
            raise InvalidInput(f"The parameter {name!r} of the task {task.name!r} is not finite at the start.")


def _check_outputs(task: TorchTask, outputs: Any, count: int, num_classes: int) -> None:
    if not isinstance(outputs, torch.Tensor):
        raise InvalidInput(
            f"The module of the task {task.name!r} must return one tensor of outputs. Got {type(outputs).__name__}."
        )
    classify = task.loss is cross_entropy
    wanted = f"({count}, {num_classes})" if classify else f"({count}, ...)"
    fits = outputs.ndim >= 1 and len(outputs) == count
    if classify:
        fits = fits and outputs.ndim == 2 and outputs.shape[1] >= num_classes
    if not fits or not outputs.is_floating_point():
        dtype = str(outputs.dtype).removeprefix("torch.")
        raise InvalidInput(
            f"The module of the task {task.name!r} must return outputs of shape {wanted} for {count} examples"
            f"{f' of {num_classes} classes' if classify else ''}. Got {dtype} of shape {tuple(outputs.shape)}."
        )


def _check_answers(task: TorchTask, name: str, values: Any, count: int, kind: str, advice: str) -> None:
    shape = tuple(values.shape) if isinstance(values, torch.Tensor) else None
    typed = shape is not None and (values.is_floating_point() if kind == "number" else values.dtype == torch.bool)
    if shape != (count,) or not typed:
        got = type(values).__name__ if shape is None else f"{str(values.dtype).removeprefix('torch.')} of shape {shape}"
        raise InvalidInput(
            f"The {name} of the task {task.name!r} must give one {kind} per example, {count} for {count} of them. Got "
            f"{got}; {advice}."
        )


def _changing_buffers(task: TorchTask, module: Any, before: list[Tensor]) -> tuple[int, ...]:
    """Which buffers a training step changed. Raise for one that has no average."""
    changing = []
    for index, ((name, buffer), old) in enumerate(zip(module.named_buffers(), before, strict=True)):
        if buffer.shape == old.shape and torch.equal(buffer, old):
            continue
        counter = name.rpartition(".")[2] == "num_batches_tracked"
        if buffer.shape != old.shape or not (buffer.dtype == torch.float32 or counter):
            raise InvalidInput(
                f"Training changes the buffer {name!r} of the task {task.name!r}, and the buffers of clients are "
                f"averaged. This one, {str(buffer.dtype).removeprefix('torch.')} of shape {tuple(buffer.shape)}, has "
                "no average: it must be float32 and keep its shape. Make it a plain attribute, or leave it unchanged "
                "while training."
            )
        changing.append(index)
    return tuple(changing)


def _separate(task: TorchTask, replica: Replica, x: Tensor, y: Tensor) -> bool:
    """Whether examples have the same losses in any company."""
    if len(x) < ROWS:
        return False
    halves = zip(x.chunk(2), y.chunk(2), strict=True)
    apart = torch.cat([task.loss(replica.module(inputs), wanted) for inputs, wanted in halves])
    return bool(torch.allclose(task.loss(replica.module(x), y), apart, rtol=1e-4, atol=1e-6))


def _stackable(task: TorchTask, replica: Replica, x: Tensor, y: Tensor) -> bool:
    """Whether vmap can run the module with weights of several clients.

    Modules with convolutions are left out: stacked, they are slower than one after another.
    """
    if any(isinstance(layer, torch.nn.modules.conv._ConvNd) for layer in replica.module.modules()):
        return False
    try:
        weights = [torch.stack([weight, weight]) for weight in replica.weights]
        outputs = stacked_outputs(replica, weights, x.unflatten(0, (2, len(x) // 2))).flatten(0, 1)
    except Exception:  # vmap refuses many operations, in many ways
        return False
    return bool(torch.allclose(task.loss(replica.module(x), y), task.loss(outputs, y), rtol=1e-4, atol=1e-6))


def _check_single_examples(task: TorchTask, module: Any, examples: Examples, local: LocalTraining, x: Tensor) -> None:
    """Raise if a client gets a mini-batch of one example and the module cannot train on it (batch normalisation)."""
    sizes, batch = examples.sizes, local.batch_size
    if batch is None:
        single = sizes == 1
    elif local.sampling == "replacement":
        single = (sizes > 0) & (batch == 1)
    elif local.sampling == "batch":
        single = np.minimum(sizes, batch) == 1
    else:
        single = (sizes > 0) & ((sizes % batch == 1) | (batch == 1))
    if not single.any():
        return
    try:
        module(x[:1])
    except Exception as error:  # user code may raise anything
        client = int(np.argmax(single))
        raise InvalidInput(
            f"The module of the task {task.name!r} cannot train on one example ({type(error).__name__}: {error}). "
            f"Client {client} has {sizes[client]} examples, and with batch_size={batch} and sampling="
            f"{local.sampling!r} a mini-batch of one. Choose another batch_size, or a layer that accepts one example, "
            "such as GroupNorm."
        ) from error
