"""The fast simulator: tasks, local training, server step, measuring, faults and the loop that drives a policy.

Importing this package does not import JAX; building a `Simulator` does.
"""

from __future__ import annotations

from fedpick.sim import tasks
from fedpick.sim.accounts import Counters, Timings
from fedpick.sim.faults import Faults
from fedpick.sim.jax_engine.training import LearningRate, LocalTraining
from fedpick.sim.loop import RoundRecord, simulate
from fedpick.sim.server import ServerStep
from fedpick.sim.simulator import Simulator
from fedpick.sim.tasks import Task

__all__ = [
    "Counters",
    "Faults",
    "LearningRate",
    "LocalTraining",
    "RoundRecord",
    "ServerStep",
    "Simulator",
    "Task",
    "Timings",
    "simulate",
    "tasks",
]
