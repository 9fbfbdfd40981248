"""The fast simulator: tasks, local training, server step, measuring, faults and the loop that drives a policy.

Importing this package imports neither JAX nor PyTorch; building a `Simulator` imports the one that its task needs.
"""

from __future__ import annotations

from fedpick.core.record import Counters, RoundRecord, Timings
from fedpick.sim import devices, tasks
from fedpick.sim.attacks import Attacks
from fedpick.sim.clock import Waiting
from fedpick.sim.devices import Devices
from fedpick.sim.faults import Faults
from fedpick.sim.loop import simulate
from fedpick.sim.settings import LearningRate, LocalTraining, ServerStep
from fedpick.sim.simulator import Simulator
from fedpick.sim.tasks import Task, TorchTask

__all__ = [
    "Attacks",
    "Counters",
    "Devices",
    "Faults",
    "LearningRate",
    "LocalTraining",
    "RoundRecord",
    "ServerStep",
    "Simulator",
    "Task",
    "Timings",
    "TorchTask",
    "Waiting",
    "devices",
    "simulate",
    "tasks",
]
