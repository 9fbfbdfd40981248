"""The converted template in the guide runs, with clients that know nothing of fedpick."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from flwr.app import Array, Context, RecordDict

from tests.flower.fake_grid import federation, unaware

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "flower.md"


def stand_in() -> ModuleType:
    """What the template uses of PyTorch."""
    torch = ModuleType("torch")
    torch.Tensor, torch.from_numpy = np.ndarray, np.asarray
    torch.save = lambda model, path: np.savez(Path(path).with_suffix(".npz"), **model)
    torch.load = lambda path: dict(np.load(Path(path).with_suffix(".npz")))
    return torch


@pytest.fixture(params=["PyTorch", "a stand-in"])
def torch(request, monkeypatch, tmp_path):
    """PyTorch, or a stand-in where it is not installed; and the app's own module."""
    monkeypatch.chdir(tmp_path)
    task = ModuleType("myapp.task")
    if request.param == "PyTorch":
        torch = pytest.importorskip("torch")
        task.Net = lambda: torch.nn.ParameterDict({"w": torch.zeros(3)})
    else:
        torch = stand_in()
        task.Net = type("Net", (), {"state_dict": lambda self: {"w": Array(np.zeros(3))}})
    for name, module in {"torch": torch, "myapp": ModuleType("myapp"), "myapp.task": task}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return torch


@pytest.mark.parametrize("policy", [None, "pow-d", "herd", "fedcor"])
def test_the_converted_template_trains_unchanged_clients(torch, policy):
    """At most 6 changed lines on the server and none on the client; without them (None) it is Flower's own app."""
    (block,) = re.findall(r"```diff\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    lines = block.splitlines()
    assert 0 < sum(line.startswith(("+", "-")) for line in lines) <= 6
    code = "\n".join(line[1:] for line in lines if not line.startswith("+" if policy is None else "-"))
    assert ("fedpick" in code) == (policy is not None)
    namespace: dict = {}
    exec(code.replace('"pow-d"', repr(policy)), namespace)
    grid = unaware(federation(20))
    options = {"fraction-evaluate": 0.0, "lr": 0.1, "num-server-rounds": 3}
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=options)
    namespace["app"](grid, context)
    assert sum(node.trained for node in grid.nodes.values()) >= 3 * 2
    assert np.any(np.asarray(torch.load("final_model.pt")["w"]))
    if policy == "pow-d":  # it prefers large losses, that is, large targets
        assert min(node.partition for node in grid.nodes.values() if node.trained) > 0
        assert "evaluate" in grid.kinds()
