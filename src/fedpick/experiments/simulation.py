"""One run in progress: built from its settings alone, so that any process on any machine can take it up.

The runner knows a simulation by the three methods of `Simulation`; `build` makes the real one.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedpick.availability.process import Trace
from fedpick.core import state as states
from fedpick.core.errors import InvalidInput, MissingSignal
from fedpick.core.policy import Policy
from fedpick.core.session import Session
from fedpick.core.types import Clients, Outcome
from fedpick.experiments.input_files import referenced_files
from fedpick.experiments.records import RoundRecord, pack_checkpoint, unpack_checkpoint
from fedpick.experiments.settings import build_settings, federation_of, federation_texts

if TYPE_CHECKING:
    from fedpick.data.types import Federation
    from fedpick.sim import RoundRecord as SimulatedRound
    from fedpick.sim import Simulator

__all__ = [
    "FederatedRun",
    "LaterTrace",
    "Simulation",
    "build",
    "clients_and_trace",
    "refuse_early",
    "watch",
]


class Simulation(Protocol):
    """What the runner needs of a run."""

    federation: Mapping[str, Any]
    """The row of the table `federations`, its key included."""
    facts: Mapping[str, Any]
    """For the manifest: whatever describes how this was computed."""
    model_bytes: int
    policy: Policy[Any]

    def rounds(self, until: int = sys.maxsize) -> Iterator[RoundRecord]:
        """One record per round from here on; those after `until` rounds are not needed."""
        ...

    def checkpoint(self) -> bytes:
        """Everything needed to go on after the latest round."""
        ...

    def restore(self, content: bytes) -> None:
        """Go on from a checkpoint."""
        ...


def clients_and_trace(settings: Mapping[str, Any], federation: Federation) -> tuple[Clients, Any]:
    """The table policies see, with the true availability, and who is available when."""
    clients = federation.clients()
    parts = build_settings(settings)
    trace = parts.availability.start(clients, parts.availability_seed)
    return trace.oracle(clients), trace


class LaterTrace(Trace):
    """A trace from some round on: that one is round 0."""

    def __init__(self, trace: Trace, first: int) -> None:
        super().__init__(trace.num_clients, trace.seed)
        self.trace, self.first = trace, first

    def _mask(self, round: int) -> NDArray[np.bool_]:
        return self.trace.mask(self.first + round)

    def _truth(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return self.trace.availability, self.trace.correlation


def watch(session: Session, trace: Any, rounds: int) -> None:
    """Show the policy who was available in so many rounds of the past; it may choose nobody, and nobody is measured.

    Afterwards the session is in round 0 again, with what the policy learned.
    """
    nobody = np.empty(0, np.int64)
    for index in range(rounds):
        try:
            session.ask(available=trace.mask(index), budget=0)
        except MissingSignal as error:
            raise InvalidInput(
                f"[availability]: history shows masks alone, but {type(session.policy).__name__} wants to measure "
                "clients even in a round without a budget. Leave out history, or this policy."
            ) from error
        session.tell(Outcome(index=index, clients=nobody, completed=nobody.astype(bool)))
    session.restore(*states.split(session.state), round=0)


@dataclass
class FederatedRun:
    """The real thing: a session that decides and a simulator that trains; see `Simulation`."""

    session: Session
    simulator: Simulator
    trace: Any
    settings: Mapping[str, Any]
    federation: Mapping[str, Any]
    files: Mapping[str, str]
    """See `fedpick.experiments.input_files.referenced_files`."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """How this was computed."""
        return {"simulator": self.simulator.settings(), **({"files": self.files} if self.files else {})}

    @property
    def model_bytes(self) -> int:
        """Size of one model."""
        return self.simulator.model_bytes

    @property
    def policy(self) -> Policy[Any]:
        """What decides."""
        return self.session.policy

    def rounds(self, until: int = sys.maxsize) -> Iterator[RoundRecord]:
        """See `Simulation.rounds`."""
        from fedpick.sim import simulate

        history = self.settings["availability"].get("history", 0)
        if history and self.session.round == 0:  # a checkpoint has it in the policy's state
            watch(self.session, self.trace, history)
        for record in simulate(
            self.simulator,
            self.session,
            rounds=until,
            budget=self.settings["budget"],
            availability=LaterTrace(self.trace, history) if history else self.trace,
            # Which rounds are evaluated must not depend on how many were asked for this time.
            evaluate_last=False,
            evaluate_every=self.settings["evaluate_every"],
            losses_every=self.settings["losses_every"],
            # Specs from before simulate refused this ask for it where nobody has local test data: nothing is measured.
            local_accuracy_every=self.settings["local_accuracy_every"] if self._has_local_tests() else None,
        ):
            yield _record(record, len(self.session.clients), self._validation(record.index))

    def _has_local_tests(self) -> bool:
        first, last = self.simulator.federation.ranges("test")
        return bool((last > first).any())

    def _validation(self, index: int) -> dict[str, NDArray[Any]]:
        """Loss and accuracy on the clients' validation data after this round, where the spec asks for them."""
        every = self.settings.get("validation_every")
        if every is None or (index + 1) % every:
            return {}
        losses, accuracies = self.simulator.evaluate_clients("validation")
        return {"validation": np.array([self.simulator.weighted(losses), self.simulator.weighted(accuracies)])}

    def checkpoint(self) -> bytes:
        """See `Simulation.checkpoint`."""
        import jax

        arrays, plain = states.split(self.session.state)
        leaves = jax.tree.leaves((self.simulator.params, self.simulator.velocity))
        stored = {f"policy/{name}": value for name, value in arrays.items()}
        stored |= {f"model/{position}": np.asarray(leaf) for position, leaf in enumerate(leaves)}
        counters = self.simulator.counters.as_dict()
        return pack_checkpoint(stored, {"round": self.session.round, "policy": plain, "counters": counters})

    def restore(self, content: bytes) -> None:
        """See `Simulation.restore`."""
        import jax

        from fedpick.sim import Counters

        arrays, plain = unpack_checkpoint(content)
        policy = {name.removeprefix("policy/"): value for name, value in arrays.items() if name.startswith("policy/")}
        simulator, session = self.simulator, self.session
        like = (simulator.params, simulator.velocity)
        structure: Any = jax.tree.structure(like)
        leaves = [jax.device_put(arrays[f"model/{position}"]) for position in range(structure.num_leaves)]
        simulator.params, simulator.velocity = jax.tree.unflatten(structure, leaves)
        simulator.round = plain["round"]
        simulator.counters = Counters(**plain["counters"])
        session.restore(policy, plain["policy"], round=plain["round"])


def _record(record: SimulatedRound, num_clients: int, extra: Mapping[str, NDArray[Any]]) -> RoundRecord:
    selection, outcome = record.selection, record.outcome
    return RoundRecord(
        index=record.index,
        available=record.available,
        clients=selection.clients,
        given_weights=selection.weights,
        weights=record.weights,
        completed=outcome.completed,
        loss=outcome.loss,
        train_loss=outcome.train_loss,
        duration=outcome.duration,
        update_norm=outcome.update_norm,
        counters=record.counters.as_dict(),
        seconds=record.seconds.as_dict(),
        test_accuracy=record.test_accuracy,
        test_loss=record.test_loss,
        objective=record.objective,
        local_accuracy=record.local_accuracy,
        diagnostics=selection.diagnostics,
        evaluation={**extra} if record.losses is None else {**extra, "losses": record.losses},
    )


def build(settings: Mapping[str, Any]) -> FederatedRun:
    """The run that these settings (the column `runs.settings`) describe, at its start."""
    from fedpick.sim import Simulator

    parts = build_settings(settings)
    files = referenced_files(settings)
    federation = federation_of(settings)
    clients, trace = clients_and_trace(settings, federation)
    task = parts.task.build(federation.x.shape[1:], federation.num_classes)
    simulator = Simulator(
        federation,
        task,
        local=parts.local,
        server=parts.server,
        faults=parts.faults,
        seed=parts.seed,
        clients=clients,
        **asdict(parts.simulator),
    )
    if settings.get("validation_every") and not federation.validation_sizes.any():
        raise InvalidInput(
            "[run]: validation_every needs validation data: set holdout = 0.2 in [partition], or a split with a share "
            "for validation."
        )
    session = Session(parts.policy, clients, parts.seed, provides=simulator.provides)
    histogram = federation.label_histogram
    data_files = [f"{name} {digest}" for name, digest in files.items() if name.startswith("data.")]
    row = {
        "key": hashlib.sha256("\n".join([*federation_texts(settings), *data_files]).encode()).hexdigest(),
        "data": federation.name,
        "partition": federation.partition,
        "num_clients": federation.num_clients,
        "num_classes": federation.num_classes,
        "num_examples": clients.num_examples.astype("<f8").tobytes(),
        "label_histogram": None if histogram is None else histogram.astype("<i4").tobytes(),
    }
    return FederatedRun(session, simulator, trace, settings, row, files)


def refuse_early(all_settings: list[Mapping[str, Any]]) -> None:
    """Build what the first seed needs, and refuse now what would fail in some hour: signals, shapes, sizes."""
    if not all_settings:
        return
    first = build(all_settings[0])
    provided = first.simulator.provides
    for settings in all_settings:
        if settings["seed"] == all_settings[0]["seed"]:
            session = Session(
                build_settings(settings).policy, first.session.clients, settings["seed"], provides=provided
            )
            watch(session, first.trace, min(1, settings["availability"].get("history", 0)))
    budget, count = all_settings[0]["budget"], len(first.session.clients)
    if budget is not None and budget > count:
        raise InvalidInput(f"[run]: a budget of {budget} is more than the {count} clients there are.")
