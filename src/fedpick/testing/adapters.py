"""The conformance kit for adapters: `check_adapter` runs small federations through one and compares with a plain loop.

The author of an adapter writes one function, `run(case)`. It starts the framework with `case.clients`, in memory or for
real, trains `case.rounds` rounds with the policy of the case, and returns what happened. The reference beside it is a
loop of twenty lines around `Session`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedpick.core import registry
from fedpick.core.arrays import BoolArray, FloatArray
from fedpick.core.errors import AdapterCheckFailed
from fedpick.core.policy import Policy
from fedpick.core.session import SESSION_FILE, Session
from fedpick.core.types import Clients, Outcome, Probe, Selection, aggregation_weights

__all__ = ["ADAPTER_CHECKS", "AdapterCase", "AdapterRun", "SmallClient", "check_adapter"]

Model = Mapping[str, FloatArray]


@dataclass(kw_only=True)
class SmallClient:
    """A client whose training moves the model half of the way to its own target, with the squared distance as loss."""

    name: str
    """Its identity: the adapter's table is in the order of the names."""
    target: float
    num_examples: int = 10
    fault: str = ""
    """What it does in place of training: "raises", or sends "nan" or a wrong "shape"; "" trains."""
    first_fault: str = ""
    """The same, for the first training only."""
    trained: int = 0

    def loss(self, model: Model) -> float:
        """The loss of a model on the client's data: what the client's evaluation reports."""
        return float(np.mean([np.mean((array - self.target) ** 2) for array in model.values()]))

    def train(self, model: Model) -> tuple[dict[str, FloatArray], dict[str, float]]:
        """The trained model, and the metrics to report: "num-examples" and "train_loss". May raise."""
        self.trained += 1
        fault = self.first_fault if self.trained == 1 and self.first_fault else self.fault
        if fault == "raises":
            raise RuntimeError(f"{self.name} cannot train")
        new = {name: array + 0.5 * (self.target - array) for name, array in model.items()}
        if fault == "nan":
            new = {name: array * np.nan for name, array in new.items()}
        if fault == "shape":
            new = {name: array[..., :-1] for name, array in new.items()}
        return new, {"num-examples": self.num_examples, "train_loss": self.loss(model)}


@dataclass(frozen=True, kw_only=True)
class AdapterCase:
    """A small federation to run."""

    policy: Policy[Any]
    clients: tuple[SmallClient, ...]
    rounds: int = 6
    budget: int | None = 3
    seed: int = 5
    model: Model = field(default_factory=lambda: {"a": np.zeros((2, 3)), "b": np.ones(3)})
    """The initial model."""
    state: Path | None = None
    """Where the adapter saves the policy's state, and resumes from it; None: nowhere."""


@dataclass(frozen=True, kw_only=True)
class AdapterRun:
    """What happened, round by round, with clients by name; and the final model."""

    cohorts: Sequence[Sequence[str]]
    completed: Sequence[Sequence[str]]
    model: Model


def _case(policy: str, **changes: Any) -> AdapterCase:
    """A case with fresh clients; `faults` and `first_faults` by position, `sizes` of all."""
    faults, first = changes.pop("faults", {}), changes.pop("first_faults", {})
    sizes, options = changes.pop("sizes", [10] * 8), changes.pop("options", {})
    clients = tuple(
        SmallClient(
            name=f"client-{k}",
            target=k + 1.0,
            num_examples=size,
            fault=faults.get(k, ""),
            first_fault=first.get(k, ""),
        )
        for k, size in enumerate(sizes)
    )
    return AdapterCase(policy=registry.get(policy, **options), clients=clients, **changes)


def reference(case: AdapterCase) -> AdapterRun:
    """The same federation in a plain loop."""
    clients, model = case.clients, {name: np.array(array) for name, array in case.model.items()}
    session = Session(case.policy, Clients(num_examples=np.array([float(c.num_examples) for c in clients])), case.seed)
    if case.state is not None and (case.state / SESSION_FILE).exists():
        session = Session.load(case.state, policy=case.policy)
    cohorts, completions = [], []

    def train(chosen: Selection) -> tuple[BoolArray, dict[str, FloatArray], FloatArray]:
        """(mask of the completed, the new model, train losses)"""
        done, deltas, losses = np.zeros(len(chosen.clients), dtype=bool), {}, np.full(len(chosen.clients), np.nan)
        for place, index in enumerate(chosen.clients):
            try:
                new, metrics = clients[index].train(model)
            except RuntimeError:
                continue
            losses[place] = metrics["train_loss"]
            done[place] = all(new[k].shape == model[k].shape and np.isfinite(new[k]).all() for k in model)
            deltas[place] = {name: new[name] - model[name] for name in model} if done[place] else {}
        weights = aggregation_weights(chosen, done, session.clients)
        steps = {
            k: sum((weights[p] * deltas[p][k] for p in np.flatnonzero(done).tolist()), 0.0 * model[k]) for k in model
        }
        return done, {name: model[name] + steps[name] for name in model}, losses

    def measure(probe: Probe) -> list[float]:
        probed = model if probe.trial is None else train(probe.trial)[1]
        return [clients[index].loss(probed) for index in probe.clients]

    for _ in range(case.rounds):
        selection = session.ask(budget=case.budget, measure=measure)
        done, model, losses = train(selection)
        session.tell(Outcome(index=session.round, clients=selection.clients, completed=done, train_loss=losses))
        cohorts.append([clients[k].name for k in selection.clients])
        completions.append([clients[k].name for k in selection.clients[done]])
    if case.state is not None:
        session.save(case.state)
    return AdapterRun(cohorts=cohorts, completed=completions, model=model)


Run = Callable[[AdapterCase], AdapterRun]


def _compare(got: AdapterRun, expected: AdapterRun, what: str) -> None:
    if len(got.cohorts) != len(expected.cohorts):
        raise AdapterCheckFailed(f"{what}: {len(got.cohorts)} rounds were run instead of {len(expected.cohorts)}.")
    for name in ("cohorts", "completed"):
        for index, (found, wanted) in enumerate(zip(getattr(got, name), getattr(expected, name), strict=True)):
            if sorted(found) != sorted(wanted):
                words = "the cohort" if name == "cohorts" else "the clients that completed"
                raise AdapterCheckFailed(f"{what}: in round {index + 1} {words} were {found} instead of {wanted}.")
    for name, wanted in expected.model.items():
        if not np.allclose(got.model[name], wanted, rtol=1e-6, atol=1e-9):
            raise AdapterCheckFailed(f"{what}: the model's {name!r} is {got.model[name]} instead of {wanted}.")


def _checked(run: Run, policy: str, what: str, **changes: Any) -> None:
    # Clients count their trainings: each of the two runs gets its own.
    _compare(run(_case(policy, **changes)), reference(_case(policy, **changes)), f"{what} with {policy}")


def same_decisions(run: Run) -> None:
    """The adapter decides as a plain loop: cohorts by probes, by reports and by trials."""
    short = {"warmup": 2, "interval": 2, "dimension": 3}
    for policy, options in {"uniform": {}, "pow-d": {"num_candidates": 5}, "rpow-d": {}, "fedcor": short}.items():
        _checked(run, policy, "the rounds", options=options)


def exact_weights(run: Run) -> None:
    """Weights are those of the policy, by the clients' sizes or with a sum other than 1."""
    _checked(run, "uniform", "weights by size", budget=None, sizes=[10, 20, 5, 40, 15], rounds=3)
    _checked(run, "unbiased", "weights that do not sum to 1", budget=4)


def failures_are_told(run: Run) -> None:
    """Clients that raise, or send what does not fit the model, did not complete; the others do."""
    faults = {1: "raises", 3: "nan", 5: "shape"}
    for policy in ("uniform", "unbiased"):
        _checked(run, policy, "failing clients", faults=faults, budget=6)


def a_round_without_answers_makes_no_step(run: Run) -> None:
    """If nobody completes, the model stays, and the run goes on."""
    _checked(run, "uniform", "a round without answers", first_faults=dict.fromkeys(range(8), "raises"), budget=None)


def resumes(run: Run) -> None:
    """Two runs with a saved state are one long run."""
    with tempfile.TemporaryDirectory() as folder:
        case = replace(_case("rpow-d", rounds=4), state=Path(folder) / "state")
        first = run(case)
        second = run(replace(case, model=first.model))
    whole = reference(_case("rpow-d", rounds=8))
    both = AdapterRun(
        cohorts=[*first.cohorts, *second.cohorts], completed=[*first.completed, *second.completed], model=second.model
    )
    _compare(both, whole, "a resumed run")


ADAPTER_CHECKS: Mapping[str, Callable[[Run], None]] = {
    check.__name__: check
    for check in (same_decisions, exact_weights, failures_are_told, a_round_without_answers_makes_no_step, resumes)
}


def check_adapter(run: Run) -> None:
    """Run every check on an adapter. Raise `AdapterCheckFailed` with one sentence per failed check.

    Args:
        run: runs a case through the adapter. It must make the clients' names their identities, use their `loss` for
            a policy's probes, and send what `train` raises as the framework sends a client's exception.

    >>> check_adapter(reference)
    """
    failures = []
    for name, check in ADAPTER_CHECKS.items():
        try:
            check(run)
        except AdapterCheckFailed as failed:
            failures.append(f"{name}: {failed}")
        except Exception as error:  # an adapter under test may raise anything; its author needs the name of the check
            failures.append(f"{name} ended in {type(error).__name__}: {error}.")
    if failures:
        raise AdapterCheckFailed("\n".join(failures))
