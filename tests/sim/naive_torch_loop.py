"""The usual way in PyTorch: one client after another, `torch.optim.SGD`, one optimiser step per mini-batch."""

from __future__ import annotations

import copy

import numpy as np
import torch

from fedpick.core.types import aggregation_weights
from tests.sim.naive_loop import client_batches


def inputs_of(federation, rows):
    """Normalised examples; images with the channels first."""
    x = torch.tensor(federation.normalized(federation.x[rows]))
    return x.permute(0, 3, 1, 2) if x.ndim == 4 else x


def train_client(simulator, module, client, round):
    """(trained copy of the module, mean training loss)."""
    local, federation = simulator.local, simulator.federation
    module = copy.deepcopy(module).train()
    received = [parameter.detach().clone() for parameter in module.parameters()]
    optimiser = torch.optim.SGD(
        module.parameters(), lr=local.lr_at(round), momentum=local.momentum, weight_decay=local.weight_decay
    )
    losses = []
    for rows in client_batches(simulator, client, round):
        y = torch.tensor(federation.y[rows])
        loss = simulator.task.loss(
            module(inputs_of(federation, rows)), y.long() if federation.num_classes else y
        ).mean()
        losses.append(float(loss.detach()))
        gap = sum(((new - old) ** 2).sum() for new, old in zip(module.parameters(), received, strict=True))
        ridge = sum((parameter**2).sum() for parameter in module.parameters())
        optimiser.zero_grad()
        (loss + 0.5 * local.proximal * gap + 0.5 * simulator.task.ridge * ridge).backward()
        optimiser.step()
    return module, float(np.mean(losses)) if losses else float("nan")


def train_round(simulator, module, selection, round):
    """The next global module: the average of the clients' modules, buffers included, with the given weights."""
    weights = aggregation_weights(selection, np.ones(len(selection.clients), bool), simulator.clients)
    trained = [train_client(simulator, module, int(client), round) for client in selection.clients]
    average, start = copy.deepcopy(module), dict(module.state_dict())
    state = {}
    for name, value in start.items():
        answers = [each.state_dict()[name].double() for each, _ in trained]
        if name in dict(module.named_parameters()):
            change = sum(w * (answer - value) for w, answer in zip(weights, answers, strict=True))
            state[name] = (value + simulator.server.lr_at(round) * change).to(value.dtype)
        else:
            mean = sum(w * answer for w, answer in zip(weights, answers, strict=True)) / weights.sum()
            state[name] = (mean if value.is_floating_point() else mean.round()).to(value.dtype)
    average.load_state_dict(state)
    return average, np.array([loss for _, loss in trained])
