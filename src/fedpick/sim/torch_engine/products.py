"""Dense layers by oneDNN, which PyTorch takes for convolutions anyway.

PyTorch computes matrix products with MKL, which does not use the widest vectors of AMD processors. oneDNN does, and
takes about half the time for large products there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

__all__ = ["product", "use_onednn"]

Tensor = Any
LARGE = 2**21
"""Multiplications in a product that make up for the costlier start of oneDNN."""


def use_onednn(module: Any) -> None:
    """Let oneDNN compute the large dense layers of a module on a CPU."""
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        for layer in module.modules():
            if type(layer) is nn.Linear:
                layer.forward = partial(_linear, layer)


def _linear(layer: Any, x: Tensor) -> Tensor:
    weight, bias = layer.weight, layer.bias
    if x.ndim > 1 and len(weight) * x.numel() >= LARGE and x.dtype == weight.dtype == torch.float32:
        return _Linear.apply(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])
    return nn.functional.linear(x, weight, bias)


class _Linear(torch.autograd.Function):  # type: ignore[misc]  # mypy does not read PyTorch
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            product(gradient, weight.t()) if for_x else None,
            product(gradient.t().contiguous(), x.t()) if for_weight else None,
            gradient.sum(dim=0) if for_bias else None,
        )


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x times the transpose of the weight, plus the bias."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
