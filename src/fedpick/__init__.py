"""fedpick: who should train next, and how much should each answer count?

The decision core of federated learning: client-selection policies behind one contract. This package
imports NumPy and SciPy only; the simulator, the reports and the Flower adapter live in submodules that are imported
on demand. So are the names below: the command line must handle Ctrl-C before NumPy is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpick import policies
    from fedpick.advice import advise
    from fedpick.core.errors import FedpickError
    from fedpick.core.guard import Guard
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
    "Guard",
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

_MODULES = {
    "FedpickError": "core.errors",
    "Guard": "core.guard",
    "Policy": "core.policy",
    "Session": "core.session",
    "Signal": "core.policy",
    "advise": "advice",
    "cite": "core.registry",
}
"""The module of each name; the others are in `core.types`."""


def __getattr__(name: str) -> Any:
    """Import one of the public names."""
    if name == "policies":
        return import_module("fedpick.policies")
    if name not in __all__:
        raise AttributeError(f"module 'fedpick' has no attribute {name!r}")
    value = getattr(import_module(f"fedpick.{_MODULES.get(name, 'core.types')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
