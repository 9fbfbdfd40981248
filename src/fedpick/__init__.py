"""fedpick: who should train next, and how much should each answer count?

The decision core of federated learning: client-selection policies behind one contract. This package
imports NumPy and SciPy only; the simulator, the reports and the Flower adapter live in submodules that are imported
on demand.
"""

from fedpick import policies
from fedpick.core.errors import FedpickError
from fedpick.core.policy import Policy, Signal
from fedpick.core.registry import cite
from fedpick.core.session import Session
from fedpick.core.types import (
    Clients,
    Measurement,
    Outcome,
    Probe,
    RoundContext,
    Selection,
    aggregation_weights,
)

__version__ = "0.1.0"

__all__ = [
    "Clients",
    "FedpickError",
    "Measurement",
    "Outcome",
    "Policy",
    "Probe",
    "RoundContext",
    "Selection",
    "Session",
    "Signal",
    "__version__",
    "aggregation_weights",
    "cite",
    "policies",
]
