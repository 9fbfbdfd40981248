"""Good settings per data set, for comparing policies without writing a spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedpick.data.partition import OWN_CLIENTS
from fedpick.experiments.inheritance import merge
from fedpick.experiments.spec import Spec, parse_spec

__all__ = ["DEMO_POLICIES", "comparison", "demo"]

# The image sets follow FedCor's experiments (losses on a 20 % hold-out, as in the authors' code).
_FEDCOR_LOCAL = {"epochs": 3, "batch_size": 64, "weight_decay": 1e-4}
_IMAGES: dict[str, Any] = {
    "partition": {"name": "2spc", "num_clients": 100, "holdout": 0.2},
    "task": {"name": "mlp", "dropout": "fedcor"},
    "local": {"lr": {"initial": 0.005, "milestones": [150, 300]}, **_FEDCOR_LOCAL},
    "simulator": {"losses_on": "validation"},
    "run": {"rounds": 200, "budget": 5, "targets": [0.6]},
}
_NATURAL: dict[str, Any] = {
    "partition": {"name": "natural"},
    "task": {"name": "logistic"},
    "local": {"lr": 0.05, "steps": 20, "batch_size": 32},
    "run": {"rounds": 200, "budget": 6, "targets": [0.7]},
}
_PRESETS: dict[str, dict[str, Any]] = {
    "digits": {
        "partition": {"name": "2spc", "num_clients": 50, "holdout": 0.2},
        "task": {"name": "mlp"},
        "local": {"lr": 0.05, "epochs": 3, "batch_size": 8},
        "simulator": {"losses_on": "validation"},
        "run": {"rounds": 100, "budget": 5, "targets": [0.8]},
    },
    "fmnist": _IMAGES,
    "mnist": _IMAGES,
    "emnist-digits": _IMAGES,
    "cifar10": {
        "partition": {"name": "2spc", "num_clients": 100, "holdout": 0.2},
        "task": {"name": "cnn-fedcor"},
        "local": {"lr": 0.01, "epochs": 5, "batch_size": 50, "weight_decay": 3e-4},
        "simulator": {"losses_on": "validation"},
        "run": {"rounds": 500, "budget": 5, "targets": [0.5]},
    },
    "synthetic": _NATURAL,
    "leaf-synthetic": _NATURAL,
    "quadratic": {
        "partition": {"name": "natural"},
        "task": {"name": "quadratic"},
        "local": {"lr": 0.001, "steps": 2, "batch_size": 1},
        "run": {"rounds": 200, "budget": 3, "losses_every": 1},
    },
    "sentiment140": {
        "partition": {"name": "natural"},
        "task": {"name": "sent140-mlp"},
        "local": {"lr": 0.05, "steps": 50, "batch_size": 32},
        "run": {"rounds": 200, "budget": 8, "targets": [0.7]},
    },
}

DEMO_POLICIES = ("uniform", "pow-d", "afl", "fedcor", "fedgs", "herd")
_SEEDS = 3
"""One seed shows no difference, and two rarely do."""


def comparison(
    *,
    dataset: str,
    policies: Sequence[str],
    partition: str | None = None,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    title: str | None = None,
) -> Spec:
    """The preset of a data set with these policies, three seeds each; `changes` are keys to set, section by section.

    `changes["policies"]` has the hyper-parameters of a policy under its name.
    """
    content = merge(_PRESETS.get(dataset, _IMAGES), {"data": {"name": dataset}})
    if partition is not None:
        shared = {"num_clients": 100} if content["partition"]["name"] in OWN_CLIENTS else {}
        content = merge(content, {"partition": {**shared, "name": partition}})
        if partition in OWN_CLIENTS:
            content["partition"].pop("num_clients", None)
    content = merge(content, {"run": {"seeds": _SEEDS}, "policies": [{"name": name} for name in policies]})
    for key, other in (("steps", "epochs"), ("epochs", "steps")):  # one of the two
        if key in (changes or {}).get("local", {}):
            content["local"] = {name: value for name, value in content["local"].items() if name != other}
    content = merge(content, changes or {}, source="command line")
    dealt = content["partition"]["name"]
    return parse_spec(content, source="command line", title=title or f"{dataset}, {dealt}")


def demo(policies: Sequence[str] = DEMO_POLICIES, *, seeds: int = _SEEDS, rounds: int = 100) -> Spec:
    """Handwritten digits, two shards per client: small enough for two minutes on two cores."""
    changes = {"run": {"seeds": seeds, "rounds": rounds}}
    return comparison(dataset="digits", policies=policies, changes=changes, title="demo: digits, two shards per client")
