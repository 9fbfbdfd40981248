"""What is asked of XLA for small models, and that nobody's own settings are changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="JAX is not installed: pip install 'fedpick[sim]'")

from fedpick.sim import devices

needs_cpu = pytest.mark.skipif(not devices.on_cpu(), reason="about programs for a CPU")


def run(script: str, **environment: str) -> str:
    """A fresh process: XLA reads its flags once."""
    clean = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | environment
    clean["PYTHONPATH"] = str(Path(__file__).parent)
    command = [sys.executable, "-c", script]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=clean).stdout.strip()


USE = "from fedpick.sim.devices import require_jax; require_jax().numpy.zeros(1)"
NEVER = "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=0"
FLAGS = "; import os; print(os.environ.get('XLA_FLAGS', ''))"


def test_flags_are_added_to_the_users_and_never_replace_them():
    assert run("import fedpick.sim" + FLAGS) == ""
    assert "small_while_loop_byte_threshold" in run(USE + FLAGS)
    mine = "--xla_cpu_enable_fast_math=false"
    assert run(USE + FLAGS, XLA_FLAGS=mine).startswith(f"{mine} --xla_backend_extra_options=")
    assert run(USE + FLAGS, XLA_FLAGS=NEVER) == NEVER


COMPILED = """
import numpy as np
from naive_loop import make_federation
from fedpick.sim import LocalTraining, Simulator

local = LocalTraining(lr=0.1, steps=3, batch_size=4)
simulator = Simulator(make_federation(), "logistic", local=local)
programs, rate = simulator.programs, np.float32(0.1)
cohort = programs.cohort(np.arange(4), np.full(4, 0.25))
words = np.zeros(2, np.uint32)
lowered = programs._cohort.lower(simulator.params, programs.rows.x, programs.rows.y, words, cohort, rate)
# The mark that XLA puts on a loop which it compiles into one kernel.
print("xla_cpu_small_call" in lowered.compile().as_text())
"""


@needs_cpu
def test_a_small_model_is_trained_in_one_kernel():
    assert run(COMPILED) == "True"
    assert run(COMPILED, XLA_FLAGS=NEVER) == "False"


@needs_cpu
def test_an_xla_without_the_options_trains_all_the_same(monkeypatch):
    monkeypatch.setattr(devices, "_ONE_KERNEL_OPTIONS", {"xla_cpu_no_such_option": True})
    devices.one_kernel_options.cache_clear()
    try:
        assert devices.one_kernel_options() == {}
    finally:
        monkeypatch.undo()
        devices.one_kernel_options.cache_clear()
