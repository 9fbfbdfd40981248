"""An experiment as a value, read from a TOML file; every mistake is reported with its line.

    title = "Fashion-MNIST, 2 shards per client"     # optional; default: the name of the file

    [data]                 # name (or package.module:function) and options of the data set (`fedpick list datasets`)
    name = "fmnist"        # `seed = 1` fixes the data; by default they follow the seed of the run
    [partition]            # name, num_clients, holdout, split and the options of that partition
    name = "2spc"
    num_clients = 100
    holdout = 0.2
    [task]                 # name (or package.module:function) and the options of that task
    name = "mlp"
    dropout = "fedcor"
    [local]                # fields of fedpick.sim.LocalTraining; lr is a number or a schedule
    lr = { initial = 0.005, milestones = [150, 300] }
    epochs = 3
    batch_size = 64
    [server]               # optional: fields of fedpick.sim.ServerStep
    lr = 1.0
    [availability]         # optional: name (or package.module:function) and the options of that process; default: ideal
    name = "ideal"         # `history = 100`: policies see 100 rounds of masks before round 0
                           # `clock = true`: read device logs at the time of [devices]' clock
    [faults]               # optional: fields of fedpick.sim.Faults (dropout, nan, deadline, ...)
    [devices]              # optional: name (`fedpick list devices`) and options of the devices: rounds take time
    name = "phones"
    [waiting]              # optional: fields of fedpick.sim.Waiting (overcommit, quorum, deadline, late, ...)
    overcommit = 1.3
    [attacks]              # optional: fields of fedpick.sim.Attacks: kind = "inflate-flip", share = 0.2, ...
    [simulator]            # optional: losses_on, shards, group, sketch, engine, ... of Simulator
    losses_on = "validation"
    [run]
    rounds = 500
    budget = 5             # cohort size; default: all available clients
    seeds = [1, 2, 3, 4, 5]  # or a number n: seeds 0..n-1
    evaluate_every = 1     # round t (from 0) is evaluated where t + 1 is a multiple of this
    losses_every = 10      # optional: the loss of every client likewise; default: never
    local_accuracy_every = 10  # optional: accuracy on the clients' local test data
    validation_every = 10  # optional: loss and accuracy on the clients' validation data
    targets = [0.69]       # test accuracies for the rounds-to-target table
    loss_targets = [0.7]   # optional: training losses likewise; they need losses_every
    guard = "mild"         # optional: against false reports: "off", "mild", "strict", or { most_places = 3.0 }
    groups = 10            # optional: groups of neighbouring clients; or "cluster", "availability", a list

    [[policies]]           # one row of the tables; further keys are hyper-parameters of the policy
    name = "fedcor"
    label = "FedCor"       # optional; must be unique, without commas
    warmup = 15
    local = { lr = 0.01 }  # optional: overrides of [local] and [server] for this policy only
    server = { lr = 0.3 }

A file may extend another one and list variants of itself:

    extends = "base.toml"  # relative to this file; "base.toml#NAME" extends one variant of it

    [variants.small]       # a partial spec, merged over the file; every variant is an experiment
    partition.num_clients = 10
    [variants.small.policies.FedCor]  # adjust the policy with this label; a new label with a name adds a policy
    warmup = 5
    [variants.two]
    policies = ["FedCor", { name = "uniform" }]  # a list anew: inherited policies by label, and further tables

Tables are merged key by key. A section that changes its `name` drops the options of the old name. "{variant}" in a
title is the name of the variant. A file with variants is not an experiment itself; extending it extends each variant.

A run's seed decides everything random in it. All policies of one seed face the same partition, initial model, local
mini-batches and availability, unless [data], [partition] or [availability] fix a `seed` of their own.

A run is identified by everything that decides its rows, in the resolved spec: not by the title, the labels, the targets
or the number of rounds. Asking for more rounds or seeds later therefore continues stored runs.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fedpick.core.imports import make_importable
from fedpick.experiments.inheritance import Resolved, experiment_names, place_of, resolve, split_variant
from fedpick.experiments.settings import MOST_SEEDS, RunSettings, run_of
from fedpick.experiments.validation import POLICY_KEYS, Place, SpecError, content_problems, nearest, run_problems

__all__ = [
    "Named",
    "PolicySpec",
    "Spec",
    "SpecError",
    "canonical_json",
    "digest_of",
    "load_spec",
    "load_specs",
    "parse_spec",
]


@dataclass(frozen=True, kw_only=True)
class Named:
    """Something chosen by name, with its options as given."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    """Fixed for all runs; None: the seed of the run."""

    def to_dict(self) -> dict[str, Any]:
        """As in the TOML file."""
        own = {} if self.seed is None else {"seed": self.seed}
        return {"name": self.name, **self.options, **own}


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """One policy of the comparison."""

    name: str
    label: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    local: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of [local]."""
    server: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of [server]."""

    def to_dict(self) -> dict[str, Any]:
        """As in the TOML file."""
        extra = {key: dict(value) for key, value in (("local", self.local), ("server", self.server)) if value}
        return {"name": self.name, "label": self.label, **self.parameters, **extra}


@dataclass(frozen=True, kw_only=True)
class Spec(RunSettings):
    """A whole experiment: a setting, the policies compared on it, and [run], whose keys are attributes of the spec.

    The sections hold the options as given, because these identify runs; `fedpick.experiments.settings` makes them
    typed objects.
    """

    title: str
    data: Named
    partition: Named
    task: Named
    availability: Named
    local: Mapping[str, Any]
    server: Mapping[str, Any]
    faults: Mapping[str, Any]
    simulator: Mapping[str, Any]
    policies: tuple[PolicySpec, ...]
    devices: Named | None = None
    waiting: Mapping[str, Any] = field(default_factory=dict)
    attacks: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As in the TOML file, with every default of the spec itself written out."""
        values = {item.name: getattr(self, item.name) for item in fields(RunSettings)}
        run = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        if not self.loss_targets:
            del run["loss_targets"]  # a younger key: specs without it keep their hash
        if self.guard == "mild":
            del run["guard"]  # likewise
        return {
            "title": self.title,
            "data": self.data.to_dict(),
            "partition": self.partition.to_dict(),
            "task": self.task.to_dict(),
            "local": dict(self.local),
            "server": dict(self.server),
            "availability": self.availability.to_dict(),
            "faults": dict(self.faults),
            **({"attacks": dict(self.attacks)} if self.attacks else {}),
            "simulator": dict(self.simulator),
            **self._time(),
            "run": {key: value for key, value in run.items() if value is not None},
            "policies": [policy.to_dict() for policy in self.policies],
        }

    def _time(self) -> dict[str, Any]:
        """The sections that are younger than the others: specs without them keep their hash."""
        devices = {} if self.devices is None else {"devices": self.devices.to_dict()}
        return {**devices, **({"waiting": dict(self.waiting)} if self.waiting else {})}

    @property
    def hash(self) -> str:
        """The identity of the experiment: SHA-256 of its canonical JSON, the title aside."""
        return digest_of(self.to_dict(), without="title")

    def settings_of(self, policy: PolicySpec, seed: int) -> dict[str, Any]:
        """Everything that decides the rows of one run, as stored in the column `runs.settings`."""
        shared = self.to_dict()
        # Younger keys: runs without them keep their identity.
        validation: dict[str, Any] = (
            {} if self.validation_every is None else {"validation_every": self.validation_every}
        )
        attacks = {"attacks": dict(self.attacks)} if self.attacks else {}
        guard = {} if self.guard == "mild" else {"guard": self.guard}
        groups = {} if self.groups is None else {"groups": shared["run"]["groups"]}
        return {
            **{key: shared[key] for key in ("data", "partition", "task", "availability", "faults", "simulator")},
            "local": {**self.local, **policy.local},
            "server": {**self.server, **policy.server},
            "budget": self.budget,
            "evaluate_every": self.evaluate_every,
            "losses_every": self.losses_every,
            "local_accuracy_every": self.local_accuracy_every,
            **validation,
            **self._time(),
            **attacks,
            **guard,
            **groups,
            "policy": {"name": policy.name, **policy.parameters},
            "seed": seed,
        }

    def run_key(self, policy: PolicySpec, seed: int) -> str:
        """The identity of one run: SHA-256 of its settings."""
        return digest_of(self.settings_of(policy, seed))

    def override(
        self,
        *,
        seeds: int | Sequence[int] | None = None,
        rounds: int | None = None,
        only: Iterable[str] | None = None,
        targets: Sequence[float] | None = None,
    ) -> Spec:
        """The spec with other seeds, rounds or targets, or fewer policies.

        A number of seeds takes the spec's own first and continues above the largest.
        """
        policies = self.policies if only is None else _only(self.policies, list(only))
        changes = {
            "seeds": None if seeds is None else list(_some_seeds(self.seeds, seeds)),
            "rounds": rounds,
            "targets": None if targets is None else [float(target) for target in targets],
        }
        run = {**self.to_dict()["run"], **{key: value for key, value in changes.items() if value is not None}}
        if problems := run_problems(run):
            raise SpecError([(Place("command line"), problem.message) for problem in problems])
        return replace(self, policies=policies, **_run_values(run))


def _run_values(run: Mapping[str, Any]) -> dict[str, Any]:
    settings = run_of(run)
    return {item.name: getattr(settings, item.name) for item in fields(settings)}


def canonical_json(value: Any) -> str:
    """One text for equal values: sorted keys, no spaces, whole floats as integers, so that 1 and 1.0 are the same.

    JSON has no word for numbers that are not finite: they become text.

    >>> canonical_json({"b": 1.0, "a": [float("inf"), float("nan")]})
    '{"a":["float:inf","float:nan"],"b":1}'
    """
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest_of(content: Mapping[str, Any], without: str | None = None) -> str:
    """The identity of a spec or of settings: SHA-256 of the canonical JSON, the key `without` aside."""
    kept = {key: value for key, value in content.items() if key != without}
    return hashlib.sha256(canonical_json(kept).encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return f"float:{value}"
        return int(value) if value.is_integer() else value
    return value


def _some_seeds(own: tuple[int, ...], wanted: int | Sequence[int]) -> tuple[int, ...]:
    if not isinstance(wanted, int):
        return tuple(wanted)
    if not 1 <= wanted <= MOST_SEEDS:
        raise SpecError([(Place("command line"), f"--seeds may ask for 1 to {MOST_SEEDS:,} seeds. Got {wanted:,}.")])
    seeds = list(own[:wanted])
    candidate = max(own, default=-1) + 1
    while len(seeds) < wanted:
        seeds.append(candidate)
        candidate += 1
    return tuple(seeds)


def _only(policies: tuple[PolicySpec, ...], wanted: list[str]) -> tuple[PolicySpec, ...]:
    known = {name for policy in policies for name in (policy.name, policy.label)}
    for name in wanted:
        if name not in known:
            message = f"--only: no policy of this spec is named {name!r}.{nearest(name, known)}"
            raise SpecError([(Place("command line"), f"{message} It has: {', '.join(sorted(known))}.")])
    return tuple(policy for policy in policies if policy.name in wanted or policy.label in wanted)


def load_spec(path: str | Path, variant: str | None = None) -> Spec:
    """Read and validate the one experiment of a TOML file, or one of its variants, also named `FILE.toml#VARIANT`."""
    specs = load_specs(path if variant is None else f"{path}#{variant}")
    if len(specs) > 1:
        message = f"The file holds {len(specs)} experiments. Choose one: {', '.join(experiment_names(path))}."
        raise SpecError([(Place(str(path)), message)])
    return specs[0]


def load_specs(path: str | Path) -> list[Spec]:
    """Read and validate every experiment of a TOML file: its variants, or itself; `FILE.toml#VARIANT` is one."""
    file, _ = split_variant(path)
    resolved = resolve(path)
    make_importable(file.parent)  # functions of the user stand beside the spec that names them
    return [_validated(each, f"{file.stem} {each.variant}".strip()) for each in resolved]


def parse_spec(content: Mapping[str, Any], *, source: str = "spec", title: str = "experiment") -> Spec:
    """Validate the content of a spec and make it a `Spec`; all problems are reported at once."""
    return _validated(Resolved(source=source, content=content), title)


def _validated(resolved: Resolved, title: str) -> Spec:
    source = resolved.source
    if problems := content_problems(resolved.content):
        placed = [(place_of(resolved.places, each.path) or Place(source), each.message) for each in problems]
        raise SpecError(sorted(placed, key=lambda item: (item[0].source != source, item[0].source, item[0].line or 0)))
    return _assemble(resolved.content, title)


def _named(table: Mapping[str, Any]) -> Named:
    options = {key: value for key, value in table.items() if key not in ("name", "seed")}
    return Named(name=table["name"], options=options, seed=table.get("seed"))


def _assemble(content: Mapping[str, Any], title: str) -> Spec:
    return Spec(
        title=content.get("title", title),
        data=_named(content["data"]),
        partition=_named(content["partition"]),
        task=_named(content["task"]),
        availability=_named(content.get("availability", {"name": "ideal"})),
        local=dict(content["local"]),
        server=dict(content.get("server", {})),
        faults=dict(content.get("faults", {})),
        attacks=dict(content.get("attacks", {})),
        simulator=dict(content.get("simulator", {})),
        devices=_named(content["devices"]) if "devices" in content else None,
        waiting=dict(content.get("waiting", {})),
        policies=tuple(
            PolicySpec(
                name=table["name"],
                label=table.get("label", table["name"]),
                parameters={key: value for key, value in table.items() if key not in POLICY_KEYS},
                local=dict(table.get("local", {})),
                server=dict(table.get("server", {})),
            )
            for table in content["policies"]
        ),
        **_run_values(content["run"]),
    )
