"""Modules of flax and equinox as tasks: the functions of the guide."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fedpick.core.types import Selection
from fedpick.sim import LocalTraining, Simulator
from tests.sim.naive_loop import make_federation
from tests.test_docs import FILE, ROOT


def of_the_guide(file):
    """The functions that a file of the guide defines."""
    page = (ROOT / "docs/guides/pytorch.md").read_text()
    (content,) = [found["content"] for found in FILE.finditer(page) if found["name"] == file]
    names: dict[str, object] = {}
    exec(compile(content, file, "exec"), names)
    return names


def check(task):
    local = LocalTraining(lr=0.2, epochs=2, batch_size=8)
    simulator = Simulator(make_federation(), task, local=local, seed=1)
    before = simulator.evaluate()
    for _ in range(8):
        outcome = simulator.train(Selection(clients=[0, 2, 3, 5]))
        assert outcome.completed.all()
    after = simulator.evaluate()
    assert after[0] < before[0] and after[1] > max(before[1], 0.6)
    assert all(np.asarray(leaf).dtype == np.float32 for leaf in simulator.engine.leaves(simulator.params, ()))


def test_flax():
    flax = pytest.importorskip("flax.linen", reason="flax is not installed: pip install flax")
    task = of_the_guide("flaxed.py")["flax_task"]
    check(task(flax.Sequential([flax.Dense(16), flax.relu, flax.Dense(3)]), (6,)))


def test_equinox():
    equinox = pytest.importorskip("equinox", reason="equinox is not installed: pip install equinox")
    task = of_the_guide("equinoxed.py")["equinox_task"]
    check(task(lambda key: equinox.nn.MLP(6, 3, 16, 1, activation=jax.nn.relu, key=key)))
