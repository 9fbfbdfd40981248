"""Training steps as one program: a step is recorded once, and TorchScript repeats it for all steps of a client.

Such a program costs Python one call per client and holds Python's lock only while it starts. Threads that train clients
side by side then do not wait for each other. Convolutions stay outside: TorchScript cannot record their gradient, and
their steps are long enough for Python not to matter.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fedpick.sim.torch_engine.products import product
from fedpick.sim.torch_engine.training import Replica, descend, penalty

__all__ = ["record_steps"]

Tensor = Any
Step = Callable[..., Sequence[Tensor]]
_UNFIT = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}
"""Operations whose results decide what Python does next, or that draw random numbers."""


class _Unfit(Exception):
    """The step is not a fixed sequence of operations."""


class _Recorder(TorchDispatchMode):  # type: ignore[misc]  # mypy does not read PyTorch
    """Keeps every operation that runs while it is active, with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.made: set[int] = set()
        """Ids of the tensors that operations made; `calls` keeps these alive."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else PyTorch imports its compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _UNFIT & set(func.tags):
            raise _Unfit
        if func._schema.is_mutable:
            given = [*args, *kwargs.values()]
            for value, argument in zip(given, func._schema.arguments, strict=False):
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and any(id(tensor) not in self.made for tensor in tree_leaves(value)):
                    raise _Unfit
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        self.made.update(id(tensor) for tensor in tree_leaves(out) if isinstance(tensor, torch.Tensor))
        return out


def record_steps(step: Step, replica: Replica, x: Tensor, y: Tensor) -> Any:
    """Return a function that takes steps with mini-batches of the size of x, all of them in one program.

    `step` computes (losses, gradients) from (replica, x, y, shares). The result is None if it cannot be recorded:
    another call would run other operations, or the program gives other numbers on other examples and weights.
    """
    shares = torch.full((len(x),), 1.0 / len(x))
    inputs = (replica.weights, x, y, shares)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated, and nothing else runs without a compiler
            with _Recorder() as recorder:
                results = step(replica, x, y, shares)
            program = torch.jit.trace(_replay(recorder, inputs, results), inputs, check_trace=False, strict=False)
            return _repeated(program) if _agrees(program, step, replica, x, y, shares) else None
    except Exception:  # a module is the user's: whatever it does that cannot be recorded
        return None


def _repeated(step: Any) -> Any:
    """The recorded step on one mini-batch after the other, and the sum of their losses."""

    def train(
        weights: list[torch.Tensor],
        x: torch.Tensor,
        y: torch.Tensor,
        rows: torch.Tensor,
        shares: torch.Tensor,
        ridge: float,
        received: list[torch.Tensor],
        velocity: list[torch.Tensor],
        lr: float,
        momentum: float,
        proximal: float,
        decay: float,
    ) -> torch.Tensor:
        total = torch.zeros(())
        for batch, share in zip(rows, shares):  # noqa: B905  # TorchScript knows no `strict`
            losses, gradient = step(weights, x.index_select(0, batch), y.index_select(0, batch), share)
            total += (losses * share).sum() + penalty(weights, ridge)
            descend(weights, gradient, received, velocity, lr, momentum, proximal, decay)
        return total

    return torch.jit.script(train)


def _replay(recorder: _Recorder, inputs: Sequence[Any], results: Sequence[Any]) -> Step:
    """A function that runs the recorded operations on other inputs. Other tensors are constants."""

    def replay(*values: Any) -> Any:
        known = dict(zip(map(id, tree_leaves(inputs)), tree_leaves(values), strict=True))

        def now(value: Any) -> Any:
            return known.get(id(value), value)

        def learn(old: Any, new: Any) -> None:
            if isinstance(old, torch.Tensor):
                known[id(old)] = new

        for func, args, kwargs, out in recorder.calls:
            if func.name() == "mkldnn::_linear_pointwise":  # TorchScript compiles it, but cannot record it
                func, args = torch.jit.script(product), args[:3]
            tree_map(learn, out, func(*tree_map(now, args), **tree_map(now, kwargs)))
        return tree_map(now, tuple(results))

    return replay


def _agrees(program: Step, step: Step, replica: Replica, x: Tensor, y: Tensor, shares: Tensor) -> bool:
    """Whether the program follows the step to other examples, labels, weights and shares."""
    x, y, shares = x.flip(0) * 0.5 + 0.1, y.flip(0), shares * torch.linspace(0.5, 1.5, len(shares))
    before = [weight.detach().clone() for weight in replica.weights]
    with torch.no_grad():
        torch._foreach_mul_(replica.weights, 0.9)
    try:
        wanted = step(replica, x, y, shares)
        with torch.no_grad():
            found = program(replica.weights, x, y, shares)
    finally:
        with torch.no_grad():
            torch._foreach_copy_(replica.weights, before)
    pairs = zip(tree_leaves(found), tree_leaves(wanted), strict=True)
    return all(torch.allclose(mine, theirs, rtol=1e-3, atol=1e-5, equal_nan=True) for mine, theirs in pairs)
