"""PyTorch, the usual way: one client after another, one optimiser step per mini-batch, all data in memory."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


def build(initial: Arrays, shape: list[int]) -> Any:
    """The model of a job in PyTorch, with the given initial parameters."""
    import torch
    from torch import nn

    layers: list[Any] = []
    side = shape[0] if len(shape) == 3 else 0
    for name in sorted({key.partition(".")[0] for key in initial}, key=lambda key: (not key.startswith("conv"), key)):
        weight, bias = initial[f"{name}.weight"], initial[f"{name}.bias"]
        if name.startswith("conv"):
            channels = shape[-1] if name == "conv0" else initial["conv0.weight"].shape[1]
            layer: Any = nn.Conv2d(channels, weight.shape[1], 5, padding=2)
            weight = weight.reshape(5, 5, channels, -1).transpose(3, 2, 0, 1)
            layers += [layer, nn.MaxPool2d(2), nn.ReLU()]
            side //= 2
        else:
            if name == "dense0":
                layers.append(nn.Flatten())
            layer = nn.Linear(*weight.shape)
            weight = _channels_first(weight, initial, side).T if name == "dense0" else weight.T
            layers += [layer, nn.ReLU()]
        with torch.no_grad():
            layer.weight.copy_(torch.tensor(np.ascontiguousarray(weight)))
            layer.bias.copy_(torch.tensor(bias))
    return nn.Sequential(*layers[:-1])


def _channels_first(weight: np.ndarray, initial: Arrays, side: int) -> np.ndarray:
    """Reorder the first dense layer after convolutions: PyTorch has the channels first, the job last."""
    if "conv1.weight" not in initial:
        return weight
    channels = initial["conv1.weight"].shape[1]
    return weight.reshape(side, side, channels, -1).transpose(2, 0, 1, 3).reshape(weight.shape)


def params_of(model: Any, initial: Arrays) -> Arrays:
    """The parameters under the names and in the shapes of the job."""
    from torch import nn

    found: Arrays = {}
    convolutions = [layer for layer in model if isinstance(layer, nn.Conv2d)]
    for index, layer in enumerate(convolutions):
        weight = layer.weight.detach().numpy()
        found[f"conv{index}.weight"] = weight.transpose(2, 3, 1, 0).reshape(-1, weight.shape[0])
        found[f"conv{index}.bias"] = layer.bias.detach().numpy()
    for index, layer in enumerate(layer for layer in model if isinstance(layer, nn.Linear)):
        weight = layer.weight.detach().numpy().T
        if index == 0 and convolutions:
            channels = convolutions[-1].out_channels
            side = round((weight.shape[0] / channels) ** 0.5)
            weight = weight.reshape(channels, side, side, -1).transpose(1, 2, 0, 3).reshape(weight.shape)
        found[f"dense{index}.weight"], found[f"dense{index}.bias"] = weight, layer.bias.detach().numpy()
    return {name: np.array(found[name]) for name in initial}


def images(x: np.ndarray, shape: list[int]) -> Any:
    """Rows as a tensor, images with the channels first."""
    import torch

    if len(shape) == 3 and len(x):
        x = x.reshape(len(x), *shape).transpose(0, 3, 1, 2)
    return torch.tensor(np.ascontiguousarray(x))


def choose_threads(model: Any, x: Any, y: Any) -> None:
    """Use one thread or all, whichever is faster now: small models and a busy machine do not gain from more."""
    import torch

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        best = float("inf")
        for _ in range(4):
            start = time.perf_counter()
            for _ in range(10):
                torch.nn.functional.cross_entropy(model(x), y).backward()
            best = min(best, time.perf_counter() - start)
        return best

    most = torch.get_num_threads()
    torch.set_num_threads(min((1, most), key=seconds))
    model.zero_grad()


def main(folder: str) -> None:
    """Take turns until there are none left."""
    # Run as a file: this is the module beside it. mypy expects a package.
    from turns import Turns, Work  # type: ignore[import-not-found]

    turns = Turns()
    try:
        import torch
    except ImportError as error:
        turns.missing(error)
        return
    work = Work(folder)
    job, initial = work.job, work.initial()
    shape = job["shape"] if job["task"].startswith("cnn") else []
    model = build(initial, job["shape"])
    criterion = torch.nn.CrossEntropyLoss()
    x, test_x = images(work.array("x"), shape), images(work.array("test_x"), shape)
    y, test_y = (torch.tensor(work.array(name).astype(np.int64)) for name in ("y", "test_y"))
    x, test_x = (rows.reshape(len(rows), -1) if not shape else rows for rows in (x, test_x))
    weights, batches = work.array("weights"), torch.tensor(work.array("batches").astype(np.int64))
    choose_threads(model, x[batches[0, 0, 0]], y[batches[0, 0, 0]])

    def one_round(index: int) -> float | None:
        received = [parameter.detach().clone() for parameter in model.parameters()]
        total = [torch.zeros_like(value) for value in received]
        for place, weight in enumerate(weights[index]):
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), received, strict=True):
                    parameter.copy_(value)
            optimiser = torch.optim.SGD(model.parameters(), lr=job["lr"])
            for rows in batches[index, place]:
                optimiser.zero_grad()
                criterion(model(x[rows]), y[rows]).backward()
                optimiser.step()
            with torch.no_grad():
                for so_far, parameter in zip(total, model.parameters(), strict=True):
                    so_far += float(weight) * parameter
        accuracy = None
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), total, strict=True):
                parameter.copy_(value)
            if work.evaluated(index):
                accuracy = float((model(test_x).argmax(dim=1) == test_y).float().mean())
            if work.measured(index):
                float(criterion(model(x), y))
        return accuracy

    index, going = 0, turns.begin()
    while going:
        going = turns.done(one_round(index))
        index += 1
    work.finish("torch", params_of(model, initial))


if __name__ == "__main__":
    main(sys.argv[1])
