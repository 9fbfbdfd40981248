"""From the settings of one run, the column `runs.settings`, to typed objects.

The stored settings hold the options *as given*, because they identify the run. `build_settings` turns them into the
dataclasses that the library works with; every class validates its own values.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import lru_cache
from typing import Any, TypeVar, Union

from fedpick import availability
from fedpick.availability.process import AvailabilityProcess
from fedpick.availability.statistics import GROUPINGS
from fedpick.core import registry
from fedpick.core.errors import InvalidInput
from fedpick.core.guard import Guard, guard_of
from fedpick.core.policy import Policy
from fedpick.core.validation import choice, whole
from fedpick.data import loading
from fedpick.data.loading import DataSettings
from fedpick.data.partition import Partition
from fedpick.data.types import Federation
from fedpick.sim import Attacks, Devices, Faults, LocalTraining, ServerStep, Waiting, devices, tasks
from fedpick.sim.settings import SimulatorSettings
from fedpick.sim.tasks import TaskSettings

__all__ = [
    "MOST_SEEDS",
    "RunParts",
    "RunSettings",
    "alternatives",
    "availability_of",
    "build_settings",
    "data_of",
    "devices_of",
    "federation_of",
    "federation_texts",
    "partition_of",
    "policy_of",
    "run_of",
    "task_of",
    "type_hints",
    "typed",
]

MOST_SEEDS = 10_000
"""Per experiment: every seed is a run of each policy, so more of them is a slip of the pen."""
Table = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The section [run]: how long, how often, and what is measured when.

    Round t (from 0) is evaluated where t + 1 is a multiple of `evaluate_every`; the other `..._every` likewise, and
    None means never.
    """

    rounds: int
    budget: int | None = None
    """Cohort size; None: all available clients."""
    seeds: tuple[int, ...] = field(default=(0,), metadata={"toml": int | tuple[int, ...]})
    """In a file also a number n: seeds 0..n-1."""
    evaluate_every: int = 1
    losses_every: int | None = None
    """The loss of every client."""
    local_accuracy_every: int | None = None
    """The accuracy on the clients' local test data."""
    targets: tuple[float, ...] = ()
    """Test accuracies for the rounds-to-target table."""
    validation_every: int | None = None
    """Loss and accuracy on the clients' validation data."""
    loss_targets: tuple[float, ...] = ()
    """Training losses (of all clients, on losses_on) for the same table; they need losses_every."""
    guard: str | Mapping[str, Any] = field(default="mild", metadata={"toml": str | Guard})
    """What the session does about reports that may be false: "off", "mild", "strict", or options of `Guard`."""
    groups: str | int | tuple[int, ...] | None = None
    """The groups of clients (`Clients.group`), which `Guard.most_places` and `Attacks.group` know by number.

    "cluster": the clusters of the availability, or else of the partition; "availability": as in the report; a number:
    that many groups of neighbouring clients; a list: the group of every client. None: those of the partition, if any.
    """

    def __post_init__(self) -> None:
        guard_of(self.guard)
        if isinstance(self.groups, str):
            choice(self, "groups", GROUPINGS)
        elif isinstance(self.groups, int):
            whole(self, "groups", 1)
        for key in ("rounds", "evaluate_every"):
            whole(self, key, 1)
        for key in ("budget", "losses_every", "local_accuracy_every", "validation_every"):
            whole(self, key, 1, optional=True)
        if self.evaluate_every > self.rounds:
            raise InvalidInput(f"evaluate_every = {self.evaluate_every} evaluates none of the {self.rounds} rounds.")
        seeds = list(self.seeds)
        if len(seeds) > MOST_SEEDS:
            raise InvalidInput(f"'seeds' may hold up to {MOST_SEEDS:,} seeds. Got {len(seeds):,}.")
        if not seeds or min(seeds) < 0:
            raise InvalidInput(f"'seeds' must be whole numbers of at least 0, at least one. Got {seeds}.")
        if len(set(seeds)) < len(seeds):
            raise InvalidInput(f"'seeds' may hold every seed only once. Got {seeds}.")
        for target in self.targets:
            if not 0 < target <= 1:
                raise InvalidInput(f"'targets' are test accuracies in (0, 1], such as 0.69. Got {target}.")
        for target in self.loss_targets:
            if not math.isfinite(target):
                raise InvalidInput(f"'loss_targets' are finite numbers, such as 0.7. Got {target}.")
        if self.loss_targets and self.losses_every is None:
            raise InvalidInput(
                "loss_targets need the loss of every client: set losses_every, such as losses_every = 1."
            )


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """The typed settings of one run; seeds are those of the run unless a section fixes its own."""

    seed: int
    data: DataSettings
    partition: Partition
    task: TaskSettings
    availability: AvailabilityProcess
    availability_seed: int
    history: int
    """Rounds of availability masks that policies see before round 0."""
    policy: Policy[Any]
    local: LocalTraining
    server: ServerStep
    faults: Faults | None
    devices: Devices | None
    waiting: Waiting
    at_clock: bool
    """Read device logs at the time of the simulator's clock."""
    attacks: Attacks | None
    simulator: SimulatorSettings
    budget: int | None
    evaluate_every: int
    losses_every: int | None
    local_accuracy_every: int | None
    validation_every: int | None
    guard: Guard
    groups: str | int | tuple[int, ...] | None


def build_settings(settings: Table) -> RunParts:
    """The typed settings of one run, from its stored settings."""
    seed = settings["seed"]
    process = settings["availability"]
    return RunParts(
        seed=seed,
        data=data_of(settings["data"], seed),
        partition=partition_of(settings["partition"], seed),
        task=task_of(settings["task"]),
        availability=availability_of(process),
        availability_seed=process.get("seed", seed),
        history=process.get("history", 0),
        policy=policy_of(settings["policy"]),
        local=typed(LocalTraining, settings["local"]),
        server=typed(ServerStep, settings["server"]),
        faults=typed(Faults, settings["faults"]) if settings["faults"] else None,
        devices=devices_of(settings["devices"]) if "devices" in settings else None,
        waiting=typed(Waiting, settings.get("waiting", {})),
        at_clock=process.get("clock", False),
        attacks=typed(Attacks, settings["attacks"]) if settings.get("attacks") else None,
        simulator=typed(SimulatorSettings, settings["simulator"]),
        budget=settings["budget"],
        evaluate_every=settings["evaluate_every"],
        losses_every=settings["losses_every"],
        local_accuracy_every=settings["local_accuracy_every"],
        validation_every=settings.get("validation_every"),
        guard=guard_of(settings.get("guard", "mild")),
        groups=_listed(settings.get("groups")),
    )


def _options(table: Table, *own: str) -> dict[str, Any]:
    """The options of a named thing: TOML lists as tuples, without the name and the section's own keys."""
    skipped = {"name", *own}
    return {key: _listed(value) for key, value in table.items() if key not in skipped}


def _listed(value: Any) -> Any:
    """A TOML list as a tuple."""
    return tuple(value) if isinstance(value, list) else value


def data_of(table: Table, seed: int = 0) -> DataSettings:
    """The section [data]; `seed` is that of the run."""
    return loading.settings(table["name"], **_options(_seeded_data(table, seed)))


def _seeded_data(table: Table, seed: int) -> dict[str, Any]:
    """The section with its own seed or the run's; without one if the data are not random."""
    if loading.takes_seed(table["name"]):
        return {**table, "seed": table.get("seed", seed)}
    return {key: value for key, value in table.items() if key != "seed"}


def partition_of(table: Table, seed: int = 0) -> Partition:
    """The section [partition]; `seed` is that of the run."""
    return Partition.named(table["name"], **{"seed": seed, **_options(table)})


def task_of(table: Table) -> TaskSettings:
    """The section [task]."""
    return tasks.settings(table["name"], **_options(table))


def availability_of(table: Table) -> AvailabilityProcess:
    """The section [availability], without its seed, history and clock."""
    return availability.get(table["name"], **_options(table, "seed", "history", "clock"))


def devices_of(table: Table) -> Devices:
    """The section [devices]."""
    return devices.get(table["name"], **_options(table))


def policy_of(table: Table) -> Policy[Any]:
    """One of the [[policies]], without its label and its overrides of [local] and [server]."""
    return registry.get(table["name"], **_options(table, "label", "local", "server"))


def run_of(table: Table) -> RunSettings:
    """The section [run]."""
    seeds = table.get("seeds", (0,))
    if isinstance(seeds, int):
        if not 1 <= seeds <= MOST_SEEDS:
            raise InvalidInput(f"'seeds' must be a number from 1 to {MOST_SEEDS:,} or a list of seeds. Got {seeds}.")
        seeds = range(seeds)
    targets = {key: tuple(float(each) for each in table[key]) for key in ("targets", "loss_targets") if key in table}
    return RunSettings(**{**table, "seeds": tuple(seeds), "groups": _listed(table.get("groups")), **targets})


def typed(settings_class: type[T], table: Table) -> T:
    """A settings dataclass from a TOML table; nested tables become the dataclasses of their fields."""
    hints = type_hints(settings_class)
    values: dict[str, Any] = {}
    for key, value in table.items():
        nested = [part for part in alternatives(hints.get(key, Any)) if is_dataclass(part)]
        if nested and isinstance(value, Mapping):
            values[key] = typed(nested[0], value)  # type: ignore[arg-type]  # is_dataclass does not narrow to a class
        else:
            values[key] = _listed(value)
    return settings_class(**values)


def type_hints(target: Any) -> dict[str, Any]:
    """The annotations of a class or function; empty where one cannot be evaluated, as in code of users."""
    try:
        return typing.get_type_hints(target)
    except Exception:  # a name that only type checkers know: go without types, the values are still validated
        return {}


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the hint alone."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return tuple(part for alternative in typing.get_args(hint) for part in alternatives(alternative))
    return (hint,)


def federation_texts(settings: Table) -> tuple[str, str]:
    """The identity of a run's federation: [data] and [partition] as JSON, with their seeds."""
    seed, partition = settings["seed"], settings["partition"]
    seeded = {**partition, "seed": partition.get("seed", seed)}
    return json.dumps(_seeded_data(settings["data"], seed), sort_keys=True), json.dumps(seeded, sort_keys=True)


def federation_of(settings: Table) -> Federation:
    """The data of a run, dealt to its clients; the two latest federations of this process are kept."""
    return _federation(*federation_texts(settings))


@lru_cache(maxsize=2)
def _federation(data_text: str, partition_text: str) -> Federation:
    return partition_of(json.loads(partition_text)).deal(_dataset(data_text))


@lru_cache(maxsize=2)
def _dataset(text: str) -> Any:
    return data_of(json.loads(text)).load()
