"""The fast simulator: tasks, local training, server step, measuring, faults and the loop that drives a policy.

Importing this package does not import JAX; building a `Simulator` does.
"""

from __future__ import annotations

from fedpick.core.record import Counters, RoundRecord, Timings
from fedpick.sim import tasks
from fedpick.sim.faults import Faults
from fedpick.sim.loop import simulate
from fedpick.sim.settings import LearningRate, LocalTraining, ServerStep
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
