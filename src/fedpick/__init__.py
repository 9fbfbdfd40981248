"""fedpick: who should train next, and how much should each answer count?

The decision core of federated learning: client-selection policies behind one contract. This package
imports NumPy and SciPy only; the simulator, the reports and the Flower adapter live in submodules that are imported
on demand.
"""

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from fedpick.advice import advise

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
    "advise",
    "aggregation_weights",
    "cite",
    "policies",
]


def __getattr__(name: str) -> Any:
    if name == "advise":  # it imports the simulator, the store and the report
        from fedpick.advice import advise

        return advise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
