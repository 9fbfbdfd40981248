"""The server step: what becomes of the model once the updates are in.

The weights are those of `fedpick.core.types.aggregation_weights`; here they are only applied:

    model <- model + lr * sum_i w_i update_i                                    (plain)
    v <- momentum v + (weight_decay model - sum_i w_i update_i); model <- model - lr v    (SGD on the pseudo-gradient)

and, with `radius`, the model is projected onto the ball around 0. Zero weight answered: no step at all, also none of
the momentum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedpick.core.validation import assign, number
from fedpick.sim.jax_engine.training import LearningRate

__all__ = ["ServerStep", "apply_step"]

Array = Any
Params = Any


@dataclass(frozen=True, kw_only=True)
class ServerStep:
    """How the server uses the weighted sum of updates. CA-Fed's authors use momentum=0.9, weight_decay=0.01."""

    lr: float | LearningRate = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    radius: float | None = None
    """Project the model onto the ball of this radius (Euclidean norm of all parameters) after the step."""

    def __post_init__(self) -> None:
        if not isinstance(self.lr, LearningRate):
            assign(self, lr=LearningRate(initial=self.lr))
        for name in ("momentum", "weight_decay"):
            number(self, name, "[0, inf)")
        if self.radius is not None:
            number(self, "radius", "(0, inf)")

    def lr_at(self, round: int) -> float:
        """The server's learning rate in one round."""
        assert isinstance(self.lr, LearningRate)
        return self.lr.at(round)


def apply_step(
    server: ServerStep, params: Params, velocity: Params, total: Params, any_weight: Array, lr: Array
) -> tuple[Params, Params]:
    """The new (params, velocity), for JAX; `total` is the weighted sum of updates. No weight: nothing changes."""
    import jax
    import jax.numpy as jnp

    if server.momentum or server.weight_decay:
        gradient = jax.tree.map(lambda s, w: server.weight_decay * w - s, total, params)
        moved = jax.tree.map(lambda v, g: server.momentum * v + g, velocity, gradient) if server.momentum else gradient
        stepped = jax.tree.map(lambda w, v: w - lr * v, params, moved)
    else:
        moved, stepped = velocity, jax.tree.map(lambda w, s: w + lr * s, params, total)
    if server.radius is not None:
        norm = jnp.sqrt(sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(stepped)))
        shrink = jnp.minimum(1.0, server.radius / jnp.maximum(norm, 1e-30))
        stepped = jax.tree.map(lambda w: w * shrink, stepped)

    def keep(new: Array, old: Array) -> Array:
        return jnp.where(any_weight, new, old)

    new_velocity = jax.tree.map(keep, moved, velocity) if server.momentum else velocity
    return jax.tree.map(keep, stepped, params), new_velocity
