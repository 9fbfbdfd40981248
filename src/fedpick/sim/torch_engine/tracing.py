"""A training step as one program: its operations are recorded once and run by TorchScript.

Such a program costs Python one call per step and holds Python's lock only while it starts. Threads that train clients
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
from fedpick.sim.torch_engine.training import Replica

__all__ = ["record_step"]

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


def record_step(step: Step, replica: Replica, x: Tensor, y: Tensor) -> Step | None:
    """Return (weights..., x, y, shares) -> (losses, gradients...) as one program, for batches of the size of x.

    `step` computes the same from (replica, x, y, shares). The result is None if it cannot be recorded: another call
    would run other operations, or the program gives other numbers on other examples and weights.
    """
    shares = torch.full((len(x),), 1.0 / len(x))
    inputs = [*replica.weights, x, y, shares]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated, and nothing else runs without a compiler
            with _Recorder() as recorder:
                results = step(replica, x, y, shares)
            program = torch.jit.trace(_replay(recorder, inputs, results), tuple(inputs), check_trace=False)
        return program if _agrees(program, step, replica, x, y, shares) else None
    except Exception:  # a module is the user's: whatever it does that cannot be recorded
        return None


def _replay(recorder: _Recorder, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> Step:
    """A function that runs the recorded operations on other inputs. Other tensors are constants."""

    def replay(*values: Tensor) -> tuple[Tensor, ...]:
        known = dict(zip(map(id, inputs), values, strict=True))

        def now(value: Any) -> Any:
            return known.get(id(value), value)

        def learn(old: Any, new: Any) -> None:
            if isinstance(old, torch.Tensor):
                known[id(old)] = new

        for func, args, kwargs, out in recorder.calls:
            if func.name() == "mkldnn::_linear_pointwise":  # TorchScript compiles it, but cannot record it
                func, args = torch.jit.script(product), args[:3]
            tree_map(learn, out, func(*tree_map(now, args), **tree_map(now, kwargs)))
        return tuple(known[id(result)] for result in results)

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
            found = program(*replica.weights, x, y, shares)
    finally:
        with torch.no_grad():
            torch._foreach_copy_(replica.weights, before)
    pairs = zip(found, wanted, strict=True)
    return all(torch.allclose(mine, theirs, rtol=1e-3, atol=1e-5, equal_nan=True) for mine, theirs in pairs)
