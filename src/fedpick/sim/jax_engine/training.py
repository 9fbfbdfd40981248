"""Local training: what a chosen client does with the model before it sends an update.

Ragged clients are handled by drawing indices, never by cutting data: client k trains on all of its training rows, and
the last batch of an epoch is as short as it comes.

The optimiser starts fresh in every round (its momentum is not kept between rounds; CA-Fed's authors keep it, their
paper does not say so).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedpick.core.errors import InvalidInput
from fedpick.core.validation import assign, choice, number, whole
from fedpick.sim import hashing
from fedpick.sim.jax_engine.setup import on_cpu
from fedpick.sim.tasks import Task

__all__ = ["LearningRate", "LocalTraining", "batch_positions", "client_trainer"]

Array = Any
Params = Any
Sampling = Literal["epoch", "batch", "replacement"]

LARGE_MATRIX = 4096
"""Numbers that make it worth while to turn a matrix, unless the model is light."""
SMALL_BATCH = 16384
"""Numbers that one core fetches faster than it hands them over."""
HANDED_OVER = 2**19
"""Bytes from which on XLA hands over whatever is fetched from them."""
ONE_CORE = 1024
"""Positions that are drawn at once: XLA would split the work on more, and hand it over in every turn."""
MANY_POSITIONS = 128
"""Positions drawn at once that are worth a loop over the turns of the permutation."""
LITTLE_WORK = 16
"""Parameters per input of a light model: to fetch a mini-batch takes about as long as to learn from it."""


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """initial * factor^(milestones reached) * per_round^t / (1 + decay * t), for round t = 0, 1, ...

    >>> schedule = LearningRate(initial=0.1, milestones=(150, 300))
    >>> [schedule.at(t) for t in (0, 149, 150, 300)]
    [0.1, 0.1, 0.05, 0.025]
    """

    initial: float
    milestones: Sequence[int] = ()
    """0-based rounds from which on the rate is multiplied by `factor` once more."""
    factor: float = 0.5
    per_round: float = 1.0
    decay: float = 0.0

    def __post_init__(self) -> None:
        for name in ("initial", "factor", "per_round"):
            number(self, name, "(0, inf)")
        number(self, "decay", "[0, inf)")
        assign(self, milestones=tuple(int(milestone) for milestone in self.milestones))

    def at(self, round: int) -> float:
        """The rate in one round."""
        reached = sum(milestone <= round for milestone in self.milestones)
        return self.initial * self.factor**reached * self.per_round**round / (1.0 + self.decay * round)


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """Mini-batch SGD on a client. Give `steps` (batches) or `epochs`, not both."""

    lr: float | LearningRate
    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = 64
    """None: the whole training data of the client in every step (gradient descent)."""
    sampling: Sampling = "epoch"
    """"epoch": pass over a fresh permutation, then the next one; "batch": every batch draws min(batch_size, n)
    distinct examples anew; "replacement": every batch draws batch_size examples independently."""
    momentum: float = 0.0
    weight_decay: float = 0.0
    """Adds weight_decay * w to the gradient, as PyTorch's SGD does."""
    proximal: float = 0.0
    """FedProx's mu: adds mu * (w - received w) to the gradient."""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise InvalidInput(
                f"LocalTraining needs either steps or epochs. Got steps={self.steps}, epochs={self.epochs}."
            )
        for name in ("steps", "epochs", "batch_size"):
            whole(self, name, 1, optional=True)
        choice(self, "sampling", ("epoch", "batch", "replacement"))
        if not isinstance(self.lr, LearningRate):
            assign(self, lr=LearningRate(initial=self.lr))
        for name in ("momentum", "weight_decay", "proximal"):
            number(self, name, "[0, inf)")

    def lr_at(self, round: int) -> float:
        """The learning rate of one round."""
        assert isinstance(self.lr, LearningRate)
        return self.lr.at(round)

    def num_steps(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """(k,) steps that clients with so many training examples take; a client without data takes none."""
        if self.steps is not None:
            return np.where(sizes > 0, self.steps, 0)
        assert self.epochs is not None
        return self.epochs * self.batches_per_epoch(sizes)

    def batches_per_epoch(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """(k,) batches in one pass."""
        return (sizes > 0).astype(np.int64) if self.batch_size is None else -(-sizes // self.batch_size)


def batch_positions(
    local: LocalTraining, client_key: hashing.Key, step: Any, size: Any, batch: int, rolled: bool = False
) -> tuple[Array, Array]:
    """(batch,) positions among the client's training rows and (batch,) which of them count, for one step.

    `step` and `size` are uint32, on numpy or JAX; a `step` of shape (s, 1) gives (s, batch), all steps at once. `batch`
    is the width of the program: local.batch_size, or the largest client where that is None. `rolled`: see
    `hashing.permute`.
    """
    lane = step * np.uint32(0) + np.arange(batch, dtype=np.uint32)
    if local.batch_size is None:
        counts = lane < size
        return (lane * counts).astype(np.int32), counts
    if local.sampling == "replacement":
        return hashing.with_replacement(hashing.fold(client_key, step), lane, size), lane < np.uint32(batch)
    if local.sampling == "batch":
        return hashing.permute(hashing.fold(client_key, step), lane, size, rolled), lane < size
    per_epoch = (size + np.uint32(batch - 1)) // np.uint32(batch)
    epoch = step // per_epoch
    position = (step - epoch * per_epoch) * np.uint32(batch) + lane
    return hashing.permute(hashing.fold(client_key, epoch), position, size, rolled), position < size


def client_trainer(task: Task, local: LocalTraining, batch: int, group: int) -> Callable[..., tuple[Params, Array]]:
    """The function (params, x, y, start, size, client_key, num_steps, lr) -> (update, mean training loss), for JAX.

    `x` and `y` hold all clients' rows; this client's training rows are start..start+size-1. `group`: for how many
    clients it is mapped.
    """
    import jax
    import jax.numpy as jnp
    from jax import lax

    def train(
        params: Params, x: Array, y: Array, start: Array, size: Array, key: hashing.Key, num_steps: Array, lr: Array
    ) -> tuple[Params, Array]:
        light = sum(leaf.size for leaf in jax.tree.leaves(params)) <= LITTLE_WORK * x.shape[1]
        fast = on_cpu() and batch > 1 and (light or batch * x.shape[1] <= SMALL_BATCH)
        turned = partial(_turned, small_ones=light)

        def loss_of(params: Params, x: Array, y: Array, counts: Array, key: Array) -> Array:
            losses = task.per_example_loss(turned(params), x, y, key, True)
            return jnp.sum(jnp.where(counts, losses, 0.0)) / jnp.maximum(jnp.sum(counts), 1)

        safe_size = jnp.maximum(size, 1).astype(jnp.uint32)
        # With a fixed number of steps all batches are drawn before the loop: fewer, larger operations.
        drawn = None
        if local.steps is not None:
            drawn = _drawn(
                partial(batch_positions, local, key, size=safe_size, batch=batch), local.steps, group * batch
            )

        def step(
            index: Array, carry: tuple[Params, Params, Array, list[Any]]
        ) -> tuple[Params, Params, Array, list[Any]]:
            weights, velocity, total, spaces = carry
            step_index = jnp.asarray(index).astype(jnp.uint32)
            if drawn is None:
                positions, counts = batch_positions(local, key, step_index, safe_size, batch)
            else:
                positions, counts = drawn[0][index], drawn[1][index]
            rows = start + positions
            noise = hashing.fold(key, ~step_index)
            random_key = jax.random.wrap_key_data(jnp.stack([noise.high, noise.low]), impl="threefry2x32")
            mini_batch = [_fetch(space, values, rows) for space, values in zip(spaces, (x, y), strict=True)]
            loss, gradient = jax.value_and_grad(loss_of)(weights, *mini_batch, counts, random_key)
            weights, velocity = _sgd_step(local, received, weights, velocity, gradient, lr)
            spaces = [None if space is None else new for space, new in zip(spaces, mini_batch, strict=True)]
            return weights, velocity, total + loss, spaces

        received = turned(params)
        velocity = jax.tree.map(jnp.zeros_like, received) if local.momentum else ()
        steps = local.steps if local.steps is not None else num_steps
        spaces = [_space(values, batch) if fast else None for values in (x, y)]
        trained, _, total, _ = lax.fori_loop(0, steps, step, (received, velocity, jnp.float32(0.0), spaces))
        # With a fixed number of steps a client without data would still decay its weights: it sends nothing.
        has_data = size > 0
        update = jax.tree.map(lambda new, old: jnp.where(has_data, new - old, 0.0), turned(trained), params)
        return update, jnp.where(has_data, total / jnp.maximum(num_steps, 1), jnp.nan)

    return train


def _drawn(draw: Callable[..., tuple[Array, Array]], steps: int, width: int) -> tuple[Array, Array]:
    """What `draw` gives for all steps; `width` is the number of positions that one step draws for all clients."""
    import jax.numpy as jnp
    from jax import lax

    at_once = min(steps, max(1, ONE_CORE // width)) if on_cpu() else steps
    draw = partial(draw, rolled=on_cpu() and at_once * width >= MANY_POSITIONS)
    if at_once == steps:
        return draw(step=jnp.arange(steps, dtype=jnp.uint32)[:, None])
    parts = jnp.arange(-(-steps // at_once) * at_once, dtype=jnp.uint32).reshape(-1, at_once, 1)
    positions, counts = lax.map(lambda part: draw(step=part), parts)
    return positions.reshape(-1, positions.shape[-1])[:steps], counts.reshape(-1, counts.shape[-1])[:steps]


def _turned(tree: Params, small_ones: bool) -> Params:
    """Matrices the other way round, as they are kept in the loop; turned twice they are as the task made them.

    On a CPU the product that makes the gradient of a dense layer is then up to four times as fast.
    """
    import jax

    def turn(leaf: Array) -> Array:
        return leaf.T if leaf.ndim == 2 and (small_ones or leaf.size >= LARGE_MATRIX) else leaf

    return jax.tree.map(turn, tree)


def _space(values: Array, batch: int) -> Array | None:
    """Where a mini-batch of these is written; None: wherever XLA likes."""
    import jax.numpy as jnp

    if values.size * values.dtype.itemsize < HANDED_OVER:
        return None
    return jnp.zeros((batch, *values.shape[1:]), values.dtype)


def _fetch(space: Array | None, values: Array, rows: Array) -> Array:
    """values[rows]; with a space written over it, on one core.

    XLA judges a gather by all that it could read. So it hands even a small mini-batch over to all cores, which takes
    longer than to fetch it. It does not do that with what is written in place; half by half, because what is written
    in one piece counts as new.
    """
    import jax.numpy as jnp
    from jax import lax

    # Only a client without rows can be out of range; looking out for that would cost a pass over the batch.
    take = partial(jnp.take, values, axis=0, mode="clip")
    if space is None:
        return take(rows)
    half = len(rows) // 2
    for first, part in ((0, rows[:half]), (half, rows[half:])):
        space = lax.dynamic_update_slice_in_dim(space, take(part), first, 0)
    return space


def _sgd_step(
    local: LocalTraining, received: Params, weights: Params, velocity: Params, gradient: Params, lr: Array
) -> tuple[Params, Params]:
    import jax

    if local.weight_decay:
        gradient = jax.tree.map(lambda g, w: g + local.weight_decay * w, gradient, weights)
    if local.proximal:
        gradient = jax.tree.map(lambda g, w, r: g + local.proximal * (w - r), gradient, weights, received)
    if local.momentum:
        # PyTorch's form: v <- momentum v + g, w <- w - lr v.
        velocity = jax.tree.map(lambda v, g: local.momentum * v + g, velocity, gradient)
        gradient = velocity
    return jax.tree.map(lambda w, g: w - lr * g, weights, gradient), velocity
