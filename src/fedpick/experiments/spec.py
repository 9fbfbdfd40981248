"""An experiment as a value: what to run, read from TOML, refused with its line where it makes no sense.

    title = "Fashion-MNIST, 2 shards per client"     # optional; the file name otherwise

    [data]                 # name (or package.module:function) and options of the data set (`fedpick list datasets`)
    name = "fmnist"        # `seed = 1` fixes it; otherwise every run's seed makes its own
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
    [availability]         # optional: name and the options of that process; everybody otherwise
    name = "ideal"         # `history = 100`: policies see so many rounds of masks before the first one
    [faults]               # optional: fields of fedpick.sim.Faults (dropout, nan, deadline, ...)
    [simulator]            # optional: losses_on, shards, group, sketch, noise_examples of fedpick.sim.Simulator
    losses_on = "validation"
    [run]
    rounds = 500
    budget = 5             # cohort size; left out: everybody available
    seeds = [1, 2, 3, 4, 5]  # or a number n: seeds 0..n-1
    evaluate_every = 1     # round t (from 0) is evaluated where t + 1 is a multiple of this
    losses_every = 10      # optional: everybody's loss likewise (never, if left out)
    local_accuracy_every = 10  # optional: accuracy on the clients' own test data likewise (never, if left out)
    validation_every = 10  # optional: loss and accuracy on the clients' validation data likewise (never, if left out)
    targets = [0.69]       # test accuracies for the rounds-to-target table
    loss_targets = [0.7]   # optional: training losses (of everybody, on losses_on) likewise; needs losses_every

    [[policies]]           # one per line in the tables; keys beside these four are its hyper-parameters
    name = "fedcor"
    label = "FedCor"       # optional; must be unique, without commas
    warmup = 15
    local = { lr = 0.01 }  # optional: overrides of [local] and [server] for this policy only
    server = { lr = 0.3 }

One seed makes everything random in a run. All policies of one seed face the same partition, initial model, local
mini-batches and availability, unless [data], [partition] or [availability] fix a `seed` of their own.

What identifies one run is everything that decides its rows: not the title, the labels, the targets, nor how many
rounds are wanted. Asking for more rounds or seeds later therefore continues what is there.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedpick.core.errors import InvalidInput
from fedpick.core.imports import make_importable
from fedpick.experiments.checks import POLICY_KEYS, content_problems, run_problems, section_problems
from fedpick.experiments.options import Registries, nearest
from fedpick.experiments.toml_lines import key_lines, line_of

__all__ = ["Named", "PolicySpec", "Spec", "SpecError", "canonical_json", "load_spec", "parse_spec"]


class SpecError(InvalidInput):
    """A spec that cannot be run; `problems` holds (line or None, sentence) for everything that was found."""

    def __init__(self, source: str, problems: Sequence[tuple[int | None, str]]) -> None:
        self.problems = tuple(problems)
        super().__init__(
            "\n".join(f"{source}:{line}: {text}" if line else f"{source}: {text}" for line, text in problems)
        )


@dataclass(frozen=True, kw_only=True)
class Named:
    """A thing chosen by name, with its options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    """Fixed for all runs; None: the run's own seed."""

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
class Spec:
    """A whole experiment: a setting, the policies compared on it, and how long."""

    title: str
    data: Named
    partition: Named
    task: Named
    availability: Named
    local: Mapping[str, Any]
    server: Mapping[str, Any]
    faults: Mapping[str, Any]
    simulator: Mapping[str, Any]
    rounds: int
    budget: int | None
    seeds: tuple[int, ...]
    evaluate_every: int
    losses_every: int | None
    local_accuracy_every: int | None
    targets: tuple[float, ...]
    policies: tuple[PolicySpec, ...]
    validation_every: int | None = None
    loss_targets: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As in the TOML file, with every default of the spec itself written out."""
        run = {
            "rounds": self.rounds,
            "budget": self.budget,
            "seeds": list(self.seeds),
            "evaluate_every": self.evaluate_every,
            "losses_every": self.losses_every,
            "local_accuracy_every": self.local_accuracy_every,
            "targets": list(self.targets),
            # Younger keys are there only where they are used: older specs keep their hash.
            "validation_every": self.validation_every,
            "loss_targets": list(self.loss_targets) or None,
        }
        return {
            "title": self.title,
            "data": self.data.to_dict(),
            "partition": self.partition.to_dict(),
            "task": self.task.to_dict(),
            "local": dict(self.local),
            "server": dict(self.server),
            "availability": self.availability.to_dict(),
            "faults": dict(self.faults),
            "simulator": dict(self.simulator),
            "run": {key: value for key, value in run.items() if value is not None},
            "policies": [policy.to_dict() for policy in self.policies],
        }

    @property
    def hash(self) -> str:
        """The identity of the experiment: SHA-256 of its canonical JSON, the title aside."""
        content = self.to_dict()
        del content["title"]
        return hashlib.sha256(canonical_json(content).encode()).hexdigest()

    def settings_of(self, policy: PolicySpec, seed: int) -> dict[str, Any]:
        """Everything that decides the rows of one run."""
        shared = self.to_dict()
        # Only where it is asked for: runs from before there was such a key keep theirs.
        validation = {} if self.validation_every is None else {"validation_every": self.validation_every}
        return {
            **{key: shared[key] for key in ("data", "partition", "task", "availability", "faults", "simulator")},
            "local": {**self.local, **policy.local},
            "server": {**self.server, **policy.server},
            "budget": self.budget,
            "evaluate_every": self.evaluate_every,
            "losses_every": self.losses_every,
            "local_accuracy_every": self.local_accuracy_every,
            **validation,
            "policy": {"name": policy.name, **policy.parameters},
            "seed": seed,
        }

    def run_key(self, policy: PolicySpec, seed: int) -> str:
        """The identity of one run: SHA-256 of its settings."""
        return hashlib.sha256(canonical_json(self.settings_of(policy, seed)).encode()).hexdigest()

    def override(
        self,
        *,
        seeds: int | Sequence[int] | None = None,
        rounds: int | None = None,
        only: Iterable[str] | None = None,
        targets: Sequence[float] | None = None,
    ) -> Spec:
        """The spec with other seeds (a number: so many of its own, going on upwards), rounds, or fewer policies."""
        spec = self
        if seeds is not None:
            spec = replace(spec, seeds=_some_seeds(self.seeds, seeds))
        if rounds is not None:
            spec = replace(spec, rounds=rounds)
        if targets is not None:
            spec = replace(spec, targets=tuple(float(target) for target in targets))
        if only is not None:
            spec = replace(spec, policies=_only(self.policies, list(only)))
        problems = run_problems(spec.to_dict()["run"])
        if problems:
            raise SpecError("command line", [(None, problem.message) for problem in problems])
        return spec


def canonical_json(value: Any) -> str:
    """One text for equal values: sorted keys, no spaces, whole floats as integers, so that 1 and 1.0 are the same.

    JSON has no word for numbers that are not finite: they become text.

    >>> canonical_json({"b": 1.0, "a": [float("inf"), float("nan")]})
    '{"a":["float:inf","float:nan"],"b":1}'
    """
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


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
            raise SpecError(
                "command line",
                [(None, f"--only: no policy of this spec is named {name!r}.{nearest(name, known)} "
                        f"It has: {', '.join(sorted(known))}.")],
            )  # fmt: skip
    return tuple(policy for policy in policies if policy.name in wanted or policy.label in wanted)


def load_spec(path: str | Path, registries: Registries | None = None) -> Spec:
    """Read and check a TOML file."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(str(path), [(None, f"the spec cannot be read: {error.strerror or error}.")]) from error
    except UnicodeDecodeError as error:
        raise SpecError(str(path), [(None, f"the spec is not UTF-8 text: {error}.")]) from error
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = text.count("\n", 0, getattr(error, "pos", 0)) + 1 if hasattr(error, "pos") else _line_in(str(error))
        raise SpecError(str(path), [(line, f"not valid TOML: {error}.")]) from error
    make_importable(file.parent)  # data and tasks of one's own lie beside the spec that names them
    return parse_spec(content, source=str(path), title=file.stem, text=text, registries=registries)


def _line_in(message: str) -> int | None:
    """tomllib says "(at line 3, column 5)"."""
    _, found, rest = message.partition("at line ")
    digits = rest.partition(",")[0]
    return int(digits) if found and digits.isdigit() else None


def parse_spec(
    content: Mapping[str, Any],
    *,
    source: str = "spec",
    title: str = "experiment",
    text: str = "",
    registries: Registries | None = None,
) -> Spec:
    """Check the content of a spec and make it a `Spec`; everything that is wrong is reported at once."""
    known = registries or Registries.installed()
    problems = section_problems(content)
    if not problems:
        problems = content_problems(content, known)
    if problems:
        lines = key_lines(text)
        placed = [(line_of(lines, problem.path), problem.message) for problem in problems]
        raise SpecError(source, sorted(placed, key=lambda item: item[0] or 0))
    return _assemble(content, title)


def _named(table: Mapping[str, Any]) -> Named:
    options = {key: value for key, value in table.items() if key not in ("name", "seed")}
    return Named(name=table["name"], options=options, seed=table.get("seed"))


def _assemble(content: Mapping[str, Any], title: str) -> Spec:
    run = content["run"]
    seeds = run.get("seeds", [0])
    own = {option.name for option in POLICY_KEYS}
    return Spec(
        title=content.get("title", title),
        data=_named(content["data"]),
        partition=_named(content["partition"]),
        task=_named(content["task"]),
        availability=_named(content.get("availability", {"name": "ideal"})),
        local=dict(content["local"]),
        server=dict(content.get("server", {})),
        faults=dict(content.get("faults", {})),
        simulator=dict(content.get("simulator", {})),
        rounds=run["rounds"],
        budget=run.get("budget"),
        seeds=tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds),
        evaluate_every=run.get("evaluate_every", 1),
        losses_every=run.get("losses_every"),
        local_accuracy_every=run.get("local_accuracy_every"),
        targets=tuple(float(target) for target in run.get("targets", [])),
        validation_every=run.get("validation_every"),
        loss_targets=tuple(float(target) for target in run.get("loss_targets", [])),
        policies=tuple(
            PolicySpec(
                name=table["name"],
                label=table.get("label", table["name"]),
                parameters={key: value for key, value in table.items() if key not in own},
                local=dict(table.get("local", {})),
                server=dict(table.get("server", {})),
            )
            for table in content["policies"]
        ),
    )
