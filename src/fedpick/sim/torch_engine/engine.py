"""The PyTorch engine: clients train side by side in threads that use one core each, tiny modules several as one.

A client's update is a function of the received model and (seed, round, client). Updates are added up in the order of
the cohort. The numbers therefore do not depend on the number of threads, nor on which of them is faster.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedpick.core.arrays import FloatArray
from fedpick.core.errors import InvalidInput
from fedpick.core.rng import Purpose
from fedpick.core.sketches import SketchFunction
from fedpick.sim import hashing
from fedpick.sim.engine import Float32Array, Trained, Work
from fedpick.sim.examples import Examples
from fedpick.sim.settings import LocalTraining, ServerStep
from fedpick.sim.sketches import sketcher_of
from fedpick.sim.torch_engine.checks import check_module, labels
from fedpick.sim.torch_engine.products import use_onednn
from fedpick.sim.torch_engine.setup import default_threads, in_threads, one_core
from fedpick.sim.torch_engine.task import TorchTask
from fedpick.sim.torch_engine.tracing import record_steps
from fedpick.sim.torch_engine.training import (
    MiniBatches,
    Model,
    Replica,
    Trainer,
    as_inputs,
    draw,
    penalty,
    seed_of,
    trained,
)

__all__ = ["TorchEngine"]

Tensor = Any
BLOCK = 2**20
"""Numbers in a block of examples when measuring."""
SMALL = 2**13
"""Parameters up to which clients are stacked: larger modules spend their time in products, not in starting them."""
PIECE = 2**23
"""Parameters times examples of a step that make another thread worth while for stacked clients."""
GROUP = 64
"""Clients stacked at most: bounds the memory."""


class _Answer(NamedTuple):
    """What one client sends back."""

    update: Tensor
    """(P,)"""
    buffers: tuple[Tensor, ...]
    loss: float
    norm: float
    """Of the update; not finite if anything in the answer is not."""


@dataclass
class _DoneRounds:
    """Rounds that were trained one after another."""

    trained: Sequence[Trained]
    params: Model
    velocity: Any

    def result(self, step: int) -> Trained:
        """Return one of the rounds."""
        return self.trained[step]


class TorchEngine:
    """Train and measure with PyTorch; see `fedpick.sim.engine.Engine`.

    Args:
        task: the module and its loss.
        examples: the clients' examples.
        local: what a client does.
        server: what the server does with the updates.
        seed: of the initial model, the sketch and the noise.
        shards: threads; None: one per core. The numbers do not depend on it.
        group: clients of a small module that train as one at most; 1: never. None: `GROUP` where the module allows it.
        sketch: what `Trained.sketches` holds, where a policy needs it; see `Simulator`.
    """

    rounds_at_once = 1

    def __init__(
        self,
        task: TorchTask,
        examples: Examples,
        local: LocalTraining,
        server: ServerStep,
        *,
        seed: int,
        shards: int | None = None,
        group: int | None = None,
        sketch: str | SketchFunction = "head",
    ) -> None:
        self.task, self.examples, self.local, self.server, self.seed = task, examples, local, server, seed
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.threads = (shards or default_threads()) if self.device == "cpu" else 1
        shape = examples.shape
        self.shape = (shape[2], shape[0], shape[1]) if len(shape) == 3 else shape
        module = task.build(seed_of(hashing.key_from(seed, int(Purpose.MODEL))), shape, examples.num_classes)
        found = check_module(task, module, examples, local, self.shape)
        self._module, self._changing = module, found.changing
        self.num_parameters = sum(weight.numel() for weight in trained(module))
        names = [name for name, weight in module.named_parameters() if weight.requires_grad]
        self._sketcher = sketcher_of(sketch, seed, names, [tuple(weight.shape) for weight in trained(module)])
        stack = found.stackable and (group is not None or self.num_parameters <= SMALL)
        self.group = (group or GROUP) if stack else 1
        self._replicas: list[Replica] = []
        with self._replica() as replica:
            self._initial = replica.state()
        self._trainer = Trainer(
            task, local, self._tensor(examples.x), labels(examples.y).to(self.device), self.shape, found.random
        )
        self.test_x, self.test_y = self._tensor(examples.test_x), labels(examples.test_y).to(self.device)
        if self.group == 1 and found.separate and self.device == "cpu" and local.batch_size is not None:
            self._trainer = self._trainer._replace(program=self._program(local.batch_size))
        tensors = [*self._initial.weights, *self._initial.buffers]
        self.model_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self._block = task.evaluation_batch or max(32, BLOCK // max(1, math.prod(shape)))

    def _program(self, batch: int) -> Any:
        """Training steps as one program; None if the module does not allow it."""
        index = torch.arange(batch) % len(self.examples.y)
        x, y = self._trainer.x.index_select(0, index), self._trainer.y.index_select(0, index)
        with self._replica() as replica:
            replica.load(self._initial, train=True)
            return record_steps(self._trainer.step, replica, x, y)

    def _tensor(self, rows: Float32Array) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nor is it written
            return torch.from_numpy(rows).to(self.device)

    @property
    def facts(self) -> Mapping[str, Any]:
        """What else decides the last bits."""
        traced = self._trainer.program is not None
        return {"engine": "torch", "stacked": self.group > 1, "traced": traced, "backend": self.device}

    @contextmanager
    def _replica(self) -> Iterator[Replica]:
        """A copy of the module for the thread that asks; at most one per thread is made."""
        try:
            replica = self._replicas.pop()
        except IndexError:
            replica = Replica(self._module, self._changing, self.device, images=len(self.shape) == 3)
            if self.group == 1 and self.device == "cpu":
                use_onednn(replica.module)
        try:
            yield replica
        finally:
            self._replicas.append(replica)

    # Models

    def init(self) -> tuple[Model, Any]:
        """Return the initial (params, velocity) of this seed."""
        return self._initial, self._zeros() if self.server.momentum else ()

    def _zeros(self) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(weight) for weight in self._initial.weights)

    def _shaped(self, rows: Tensor) -> list[Tensor]:
        """(..., P) all weights in one row as views in their shapes."""
        parts = torch.split(rows, [weight.numel() for weight in self._initial.weights], dim=-1)
        pairs = zip(parts, self._initial.weights, strict=True)
        return [part.unflatten(-1, weight.shape) if weight.ndim else part.squeeze(-1) for part, weight in pairs]

    def _sketch(self, answer: _Answer) -> NDArray[Any]:
        if self._sketcher is None:
            return self._head(answer.update)
        sketches = self._sketcher(answer.update.numpy()[None], np.isfinite([answer.norm]))
        return sketches.ravel()

    def _head(self, update: Tensor) -> Float32Array:
        """The update of the last layer's bias: the last one-dimensional parameter of the model.

        A model without one is described by the mean over the inputs of its last parameter.
        """
        changes = self._shaped(update)
        biases = [change for change in changes if change.ndim == 1]
        head = biases[-1] if biases else changes[-1].reshape(len(changes[-1]), -1).mean(dim=1)
        return np.asarray(head)

    def leaves(self, params: Model, velocity: Any) -> list[Any]:
        """Return the arrays of a model, in a fixed order."""
        return [*params.weights, *params.buffers, *velocity]

    def rebuild(self, leaves: Sequence[NDArray[Any]]) -> tuple[Model, Any]:
        """Return the (params, velocity) made of these arrays."""
        tensors = [torch.tensor(leaf) for leaf in leaves]
        weights, buffers = len(self._initial.weights), len(self._initial.buffers)
        model = Model(tuple(tensors[:weights]), tuple(tensors[weights : weights + buffers]))
        return model, tuple(tensors[weights + buffers :])

    # Training

    @one_core()
    def train(self, params: Model, velocity: Any, work: Work) -> Trained:
        """Train the clients of `work` and take the server step."""
        count = len(work.clients)
        losses, norms = np.full((2, count), np.nan, np.float32)
        weights = work.weights.astype(np.float32)
        sketches: list[Any] = []
        total = torch.zeros(self.num_parameters)
        buffers = [torch.zeros_like(buffer, dtype=torch.float64) for buffer in params.buffers]
        combine = work.combine or (self.server.combine if self.server.robust else None)
        received: list[tuple[float, Any]] = []
        for place, answer in enumerate(self._answers(params, work)):
            losses[place], norms[place] = answer.loss, answer.norm
            if work.sketch:
                sketches.append(self._sketch(answer))
            finite = math.isfinite(answer.norm)
            weight = float(weights[place]) if finite else 0.0
            if combine is not None:
                received.append((weight, answer.update.numpy()))
            elif finite:
                total.add_(answer.update, alpha=weight)
            if finite:
                for so_far, buffer in zip(buffers, answer.buffers, strict=True):
                    so_far += weight * buffer.to(torch.float64)
        shares = float(weights[np.isfinite(norms)].sum(dtype=np.float64))
        moves = shares > 0
        if combine is not None:
            rows = np.array([row for _, row in received], np.float32).reshape(len(received), self.num_parameters)
            combined = combine(rows, np.array([weight for weight, _ in received]))
            moves = combined is not None
            total = total if combined is None else torch.from_numpy(combined.astype(np.float32))
        described = np.stack(sketches) if sketches else np.empty((count, 0), np.float32)
        if moves:
            mean = params.buffers
            if shares > 0:
                mean = tuple(_as(value / shares, old) for value, old in zip(buffers, params.buffers, strict=True))
            stepped, moved = self._server_step(params.weights, velocity, self._shaped(total), work.server_lr)
            if all(bool(torch.isfinite(tensor).all()) for tensor in [*stepped, *mean]):
                params, velocity = Model(stepped, mean), moved
            else:
                losses, norms, described = (np.full_like(values, np.nan) for values in (losses, norms, described))
        return Trained(params, velocity, losses, norms, described)

    def _server_step(
        self, weights: Sequence[Tensor], velocity: Any, total: Sequence[Tensor], lr: float
    ) -> tuple[tuple[Tensor, ...], Any]:
        """The weights and the momentum after the step."""
        server, moved = self.server, velocity
        if server.momentum or server.weight_decay:
            gradient = [server.weight_decay * w - s for w, s in zip(weights, total, strict=True)]
            if server.momentum:
                gradient = [server.momentum * v + g for v, g in zip(velocity, gradient, strict=True)]
                moved = tuple(gradient)
            stepped = [w - lr * g for w, g in zip(weights, gradient, strict=True)]
        else:
            stepped = [w + lr * s for w, s in zip(weights, total, strict=True)]
        if server.radius is not None:
            norm = math.sqrt(sum(float((weight.double() ** 2).sum()) for weight in stepped))
            stepped = [weight * min(1.0, server.radius / max(norm, 1e-30)) for weight in stepped]
        return tuple(stepped), moved

    def _answers(self, params: Model, work: Work) -> Iterator[_Answer]:
        """The answers of the clients, in their order."""
        state, count = torch.get_rng_state(), len(work.clients)
        pieces = -(-count // GROUP)
        if self.group > 1:
            work_of_a_step = self.num_parameters * (self.local.batch_size or int(self.examples.sizes.mean())) * count
            pieces = min(count, max(min(self.threads, work_of_a_step // PIECE), -(-count // self.group)))

        def drawn() -> Iterator[MiniBatches]:
            # In the calling thread, many clients at once: these are short calls of NumPy, which hold Python's lock.
            for places in np.array_split(np.arange(count), pieces) if count else []:
                batches = draw(self.local, self.examples, work, places)
                yield from [batches] if self.group > 1 else batches.apart()

        train = partial(self._train_piece, params, work)
        alone = self.group > 1 and pieces == 1  # then another thread would only cost time
        try:
            for answers in map(train, drawn()) if alone else in_threads(train, drawn(), self.threads):
                yield from answers
            if not self._trainer.random and not torch.equal(state, torch.get_rng_state()):
                raise InvalidInput(
                    f"The module of the task {self.task.name!r} draws random numbers in some training steps only. Its "
                    "results would depend on the order of the clients. Draw in every step, and ignore the numbers "
                    "where you do not need them."
                )
        finally:
            torch.set_rng_state(state)

    def _train_piece(self, params: Model, work: Work, batches: MiniBatches) -> list[_Answer]:
        """Train the clients of these mini-batches: all of them as one, or the only one."""
        factors = work.multipliers[batches.places]
        with self._replica() as replica:
            if self.group > 1:
                stack, losses = self._trainer.stacked(replica, params, batches, work.lr)
            else:
                losses = self._trainer.one(replica, params, batches, work.lr)
                stack = [weight.detach()[None] for weight in replica.weights]
            updates = torch.empty(len(batches.places), self.num_parameters)
            for change, new, old in zip(self._shaped(updates), stack, params.weights, strict=True):
                torch.sub(new.cpu(), old, out=change)
            buffers = tuple(buffer.detach().cpu().clone() for buffer in replica.buffers)
        if (factors != 1).any():
            updates *= torch.tensor(factors[:, None], dtype=torch.float32)
        norms = torch.sqrt((updates * updates).sum(dim=1)).tolist()
        if not all(bool(torch.isfinite(buffer).all()) for buffer in buffers):
            norms = [math.nan] * len(norms)
        # A client without data has no loss.
        losses = [loss if steps else math.nan for loss, steps in zip(losses.tolist(), batches.steps, strict=True)]
        # From the order of the mini-batches back to that of the cohort.
        return [
            _Answer(updates[index], buffers, losses[index], norms[index])
            for index in np.argsort(batches.places).tolist()
        ]

    def start_rounds(
        self, params: Model, velocity: Any, works: Sequence[Work], evaluate: Sequence[bool]
    ) -> _DoneRounds:
        """Train consecutive rounds, one after another: they gain nothing from sharing a call."""
        done: list[Trained] = []
        for work, due in zip(works, evaluate, strict=True):
            trained = self.train(params, velocity, work)
            params, velocity = trained.params, trained.velocity
            values = self.evaluate(params) if due and len(self.test_y) > 0 else None
            done.append(trained._replace(evaluation=values))
        return _DoneRounds(done, params, velocity)

    # Measuring

    def measure(self, params: Model, rows: NDArray[np.int32] | None = None) -> tuple[Float32Array, Float32Array]:
        """Return the loss and the correctness (0 or 1) of these rows of the clients' examples; None: of all."""
        return self._values(params, self._trainer.x, self._trainer.y, rows)

    def evaluate(self, params: Model) -> tuple[float, float]:
        """Return (loss, accuracy) on the central test set."""
        loss, right = self._values(params, self.test_x, self.test_y)
        return float(loss.mean(dtype=np.float64)), float(np.count_nonzero(right) / len(right))

    def _values(
        self, params: Model, x: Tensor, y: Tensor, rows: NDArray[np.int32] | None = None
    ) -> tuple[Float32Array, Float32Array]:
        """Measure blocks of rows side by side; how they are cut does not depend on the number of threads."""
        count = len(y) if rows is None else len(rows)
        found = np.empty((2, count), np.float32)
        index = None if rows is None else torch.from_numpy(rows.astype(np.int64)).to(self.device)

        def block(first: int) -> None:
            part = slice(first, first + self._block)
            with self._replica() as replica, torch.no_grad():
                replica.load(params, train=False)
                inputs = x[part] if index is None else x.index_select(0, index[part])
                wanted = y[part] if index is None else y.index_select(0, index[part])
                outputs = replica.module(as_inputs(inputs, self.shape))
                losses = self.task.loss(outputs, wanted) + penalty(replica.weights, self.task.ridge)
                found[0, part] = losses.cpu().numpy()
                found[1, part] = self.task.correct(outputs, wanted).cpu().numpy()

        for _ in in_threads(block, range(0, count, self._block), self.threads):
            pass
        return found[0], found[1]

    @one_core()
    def updates(self, params: Model, work: Work, length: int | None) -> FloatArray:
        """(k, s): the update of each client, or its count sketch."""
        rows = [answer.update.numpy().astype(np.float64) for answer in self._answers(params, work)]
        if not rows:
            return np.empty((0, 1))
        if length is None:
            return np.stack(rows)
        signs, cells = hashing.sketch_cells(self._measure_key(), self.num_parameters, length)
        return np.stack([np.bincount(cells, row * signs, minlength=length) for row in rows])

    @one_core()
    def outputs(self, params: Model, work: Work, noise_examples: int) -> FloatArray:
        """(k, s): the mean output, on common noise, of each client's model after training."""
        noise = self._tensor(self.examples.noise(self._measure_key(), noise_examples))
        found = []
        for answer in self._answers(params, work):
            weights = tuple(
                old + change for old, change in zip(params.weights, self._shaped(answer.update), strict=True)
            )
            with self._replica() as replica, torch.no_grad():
                replica.load(Model(weights, answer.buffers), train=False)
                outputs = replica.module(as_inputs(noise, self.shape)).reshape(len(noise), -1)
            found.append(outputs.mean(dim=0).cpu().numpy().astype(np.float64))
        return np.stack(found) if found else np.empty((0, 1))

    def _measure_key(self) -> hashing.Key:
        return hashing.key_from(self.seed, int(Purpose.MEASURE))


def _as(value: Tensor, like: Tensor) -> Tensor:
    """A mean in the type of its buffer; whole numbers are rounded."""
    return value.to(like.dtype) if like.is_floating_point() else value.round().to(like.dtype)
