"""Session: runs one policy round by round. It keeps the state, guards the reports and checks the contract."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpick.core import checkpoint, registry, writing
from fedpick.core import state as states
from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.core.errors import (
    FedpickWarning,
    InvalidInput,
    InvalidSelection,
    MissingSignal,
    OutOfOrder,
    StateFileError,
)
from fedpick.core.guard import (
    ESTABLISHED,
    REPORT_LIMIT,
    Guard,
    GuardState,
    clean_answers,
    clean_outcome,
    credibility_changes,
    guard_of,
)
from fedpick.core.policy import Policy, Signal
from fedpick.core.rng import Purpose, stream
from fedpick.core.signal_watch import HINTS, SignalWatch
from fedpick.core.types import Clients, Measurement, Outcome, Probe, RoundContext, Selection, as_floats
from fedpick.core.validation import number, whole

__all__ = ["SESSION_FILE", "Session", "in_order_of", "policy_name", "with_notes"]

Measure = Callable[[Probe], ArrayLike]

SESSION_FILE = "session.npz"
"""The one file that `Session.save` writes into its directory, beside the lock."""
_FORMAT = "fedpick-session"
_GUARD = "guard/"
_SCHEMA = 2
_SAVED_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "policy": str,
    "parameters": dict,
    "seed": int,
    "round": int,
    "report_limit": (int, float),
    "state": dict,
}


class _Pending(NamedTuple):
    """A round that was asked and not told yet."""

    selection: Selection
    state: Any
    """The policy's state that `tell` commits."""
    guard: GuardState | None
    """The guard's."""
    available: BoolArray
    """(N,) the clients that can be reached, whether the guard offered them or not."""
    probed: BoolArray | None
    """(N,) the clients that told their loss in this round; None without such a probe."""
    judged: _Judged | None = None
    """What `judge` found."""


class _Judged(NamedTuple):
    """An outcome that the guard has seen."""

    accepted: Outcome
    """As the clients told it, with refused answers as not completed."""
    outcome: Outcome
    """As the policy sees it."""
    guard: GuardState | None
    notes: Mapping[str, Any]


class Session:
    """One policy that selects among one table of clients, round by round.

    `ask` may be repeated; only `tell` commits. Every round is asked and told, even if no client is available.

    Args:
        policy: the policy.
        clients: the table of clients.
        seed: the seed of all the policy's random choices.
        provides: the signals that the driver provides. A policy that needs more is refused. None: not checked. Either
            way the session warns (`FedpickWarning`) if a needed signal does not arrive for three rounds.
        report_limit: reports beyond this limit count as no answer.
        guard: what the session does about reports that may be false: "off", "mild", "strict" or a `Guard`.

    Attributes:
        round: the round that `ask` answers next, from 0.
        policy, seed, guard: as above.
        table: the clients as they were passed; `grow` replaces them.
        clients: the same with the sizes that the guard bounded, as the policy sees them.
        notes: what the latest `tell` returned. It is not saved.
        watch: warns of signals that do not arrive. fedpick's own drivers, which know better, set it to None.

    >>> import numpy as np
    >>> session = Session(registry.get("uniform"), Clients(num_examples=np.ones(5)), seed=1)
    >>> selection = session.ask(budget=2)
    >>> len(selection.clients)
    2
    >>> session.tell(Outcome(index=0, clients=selection.clients, completed=np.array([True, False])))
    {}
    >>> session.round
    1
    """

    def __init__(
        self,
        policy: Policy[Any],
        clients: Clients,
        seed: int = 0,
        *,
        provides: frozenset[Signal] | None = None,
        report_limit: float = REPORT_LIMIT,
        guard: Guard | str = "mild",
    ) -> None:
        if not isinstance(policy, Policy):
            raise InvalidInput(
                f"Session needs a policy object, such as fedpick.policies.get('uniform'). Got {policy!r}."
            )
        _refuse_missing_signals(policy, clients, provides)
        self.policy = policy
        self.guard = guard_of(guard)
        self.table = clients
        self._sizes_cut = 0
        self.clients = self._bounded(clients)
        self.seed = whole("Session", "seed", 0, most=2**64 - 1, value=seed)
        self.round = 0
        self.notes: Mapping[str, Any] = {}
        self._provides = provides
        self._report_limit = number("Session", "report_limit", "(0, inf]", value=report_limit)
        self._state = policy.init(self.clients, stream(self.seed, 0, Purpose.INIT))
        self._guard = self.guard.start(policy, self.clients)
        self.watch: SignalWatch | None = SignalWatch(policy, stated=provides is not None)
        self._pending: _Pending | None = None
        self._saved_in: Path | None = None

    def __repr__(self) -> str:
        return f"Session({self.policy!r}, {len(self.clients):,} clients, seed={self.seed}, round={self.round})"

    @property
    def state(self) -> Any:
        """The policy's state after the last `tell`, for analysis. It is never modified, only replaced."""
        return self._state

    @property
    def credibility(self) -> FloatArray:
        """(N,) how far the guard trusts each client's reports, from 1 to 0; 1 for all if it compares none."""
        if self._guard is None:
            return np.ones(len(self.clients))
        return self._guard.credibility.astype(np.float64)

    def ask(
        self,
        *,
        available: ArrayLike | None = None,
        budget: int | None = None,
        measure: Measure | None = None,
    ) -> Selection:
        """Return the clients that train in this round, and their weights.

        Args:
            available: (N,) mask of the clients that can be reached. None: all.
            budget: most clients to select. None: all that are available.
            measure: answers a probe with one value (or vector) per probed client; NaN for no answer.
        """
        mask = np.ones(len(self.clients), dtype=bool) if available is None else np.asarray(available)
        context = RoundContext(
            index=self.round,
            budget=int(np.count_nonzero(mask)) if budget is None else budget,
            available=mask,
            clients=self.clients,
        )
        guard, notes, there = self._guard, dict[str, Any](), context.available
        if not there.any():
            notes["nobody_available"] = True
        if self._sizes_cut:
            notes["sizes_cut"] = self._sizes_cut
        if guard is not None:
            random = stream(self.seed, self.round, Purpose.GUARD) if self.guard.newcomers else None
            offer = guard.offer(
                self.guard, context.available, context.budget, self.round == 0, random, self.clients.group
            )
            guard, notes = offer.state, {**notes, **offer.notes}
            if offer.available is not context.available:
                context = replace(context, available=offer.available)
        rejected = cut = 0
        probed: BoolArray | None = None
        # Building a random stream takes as long as a small decision: build it only for a policy that probes.
        if type(self.policy).probe is not Policy.probe:
            probes = self.policy.probe(self._state, context, stream(self.seed, self.round, Purpose.PROBE))
            measurements: list[Measurement] = []
            for probe in probes:
                answer, count = self._answer(probe, context, measure)
                rejected += count
                if guard is not None and self.guard.cut and probe.signal is Signal.LOSS and len(probe.clients):
                    trial = probe.trial is not None
                    values, guard, count = guard.answered(self.guard, probe.clients, answer.values, trial)
                    if values is not answer.values:
                        answer, cut = Measurement(clients=probe.clients, values=values), cut + count
                    if not trial:
                        probed = np.zeros(len(self.clients), dtype=bool) if probed is None else probed
                        probed[probe.clients] = True
                measurements.append(answer)
            context = replace(context, measurements=tuple(measurements))
            if self.watch is not None:
                self.watch.asked(probes, context.measurements)
        selection, state = self.policy.select(self._state, context, stream(self.seed, self.round, Purpose.SELECT))
        _check_selection(selection, context, self.policy)
        notes |= {name: count for name, count in (("rejected_reports", rejected), ("cut_reports", cut)) if count}
        if notes:
            selection = replace(selection, diagnostics={**selection.diagnostics, **notes})
        if self._sizes_cut and selection.weights is None:
            selection = replace(selection, weights=_by_size(self.clients, selection.clients))
        self._pending = _Pending(selection, state, guard, there, probed)
        return selection

    def _answer(self, probe: Probe, context: RoundContext, measure: Measure | None) -> tuple[Measurement, int]:
        asked = probe.clients if probe.trial is None else np.concatenate([probe.clients, probe.trial.clients])
        _check_indices(asked, context, f"{type(self.policy).__name__} probed")
        if len(probe.clients) == 0:
            return Measurement(clients=probe.clients, values=np.empty(0)), 0
        if measure is None:
            raise MissingSignal(
                f"{type(self.policy).__name__} asks clients for {probe.signal.value!r} before it chooses, but "
                "ask() got no `measure`.\n\nhint: pass measure=f with f(probe) -> one value per client in probe.clients"
            )
        values = as_floats(measure(probe), "What measure returns")
        if values.ndim not in (1, 2) or len(values) != len(probe.clients):
            raise InvalidInput(
                f"measure must return one value (or one vector) for each of the {len(probe.clients)} probed clients. "
                f"Got an array of shape {values.shape}."
            )
        if probe.signal is Signal.LOSS and values.ndim != 1:
            raise InvalidInput(
                f"A loss is one number per client: measure must return the shape ({len(probe.clients)},). "
                f"Got {values.shape}."
            )
        if values.size == 0:  # vectors without an entry: no client answered
            values = np.full(len(values), np.nan)
        values, rejected = clean_answers(values, self._report_limit)
        return Measurement(clients=probe.clients, values=values), rejected

    def judge(self, outcome: Outcome) -> Outcome:
        """Return the outcome with the answers that the strict guard doubts as not completed. Nothing is committed.

        A driver that calls this before it aggregates, and tells what it returns, leaves their updates out.
        """
        pending = self._asked()
        if outcome.index != self.round:
            raise InvalidInput(f"The outcome is of round {outcome.index}, but round {self.round} is being told.")
        if len(unknown := outcome.clients[outcome.stale & (outcome.clients >= len(self.clients))]):
            raise InvalidInput(f"There is no client {unknown[0]} among {len(self.clients)} clients.")
        told, guard, cut = in_order_of(pending.selection.clients, outcome), pending.guard, 0
        seen, rejected = clean_outcome(told, self._report_limit)
        if guard is not None:
            if self.guard.cut:
                seen, guard, cut = guard.observe(self.guard, seen, pending.probed)
            guard = guard.served(pending.available, pending.selection.clients)
        accepted = told if seen.completed is told.completed else replace(told, completed=seen.completed)
        counts = (("rejected_reports", rejected), ("cut_reports", cut))
        notes: dict[str, Any] = {name: count for name, count in counts if count}
        if self._guard is not None and guard is not None:
            notes |= credibility_changes(self._guard, guard)
        self._pending = pending._replace(judged=_Judged(accepted, seen, guard, notes))
        return accepted

    def tell(self, outcome: Outcome) -> Mapping[str, Any]:
        """Commit the round that was asked last. Return diagnostics, such as the number of rejected reports.

        `lost_credibility` lists the clients that the guard distrusts from this round on, `regained_credibility` those
        that it trusts again. The outcome has a row for each selected client, and one for each late answer that came in
        this round (`stale`).
        """
        judged = self._asked().judged
        if judged is None or judged.accepted is not outcome:
            self.judge(outcome)
        pending = self._asked()
        assert pending.judged is not None
        _, seen, guard, notes = pending.judged
        self._state = self.policy.observe(pending.state, seen)
        self._guard, self._pending, self.notes = guard, None, notes
        self.round += 1
        if self.watch is not None:
            self.watch.told(seen)
        return notes

    def _asked(self) -> _Pending:
        """The round that was asked last; raises if there is none."""
        if self._pending is None:
            raise OutOfOrder(
                f"tell() for round {self.round} came before ask(). Ask first; every round is asked and told."
            )
        return self._pending

    def grow(self, clients: Clients) -> None:
        """Replace the table by a larger one. The clients so far keep their rows and their state; newcomers follow."""
        if self._pending is not None:
            raise OutOfOrder("grow() came between ask() and tell(). The table grows between rounds only: tell first.")
        if len(clients) < len(self.clients):
            raise InvalidInput(
                f"The table can only grow: it has {len(self.clients)} clients, the new one {len(clients)}. "
                "Clients that left keep their row; mark them unavailable."
            )
        _refuse_missing_signals(self.policy, clients, self._provides)
        self.table = clients
        clients = self._bounded(clients)
        fresh = self.policy.init(clients, stream(self.seed, self.round, Purpose.INIT))
        self._state = states.carry_over(self._state, fresh)
        if self._guard is not None:
            newer = self.guard.start(self.policy, clients)
            assert newer is not None  # it depends on the policy alone
            self._guard = states.carry_over(self._guard, newer)
        self.clients = clients

    def _bounded(self, clients: Clients) -> Clients:
        """The table with the sizes that the guard lets count. The first cut is a warning: true sizes may be cut too."""
        bounded, cut = self.guard.sizes(clients)
        if cut and not self._sizes_cut:
            most, counted = clients.num_examples.max(), bounded.num_examples.max()
            warnings.warn(
                f"The guard bounds the sizes of {cut:,} of {len(clients):,} clients: up to {most:,.0f} examples count "
                f"as {counted:,.0f}. If these sizes are true, set guard='off', or a larger most_size.",
                FedpickWarning,
                stacklevel=3,  # the caller of Session or Session.grow
            )
        self._sizes_cut = cut
        return bounded

    def split(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Return what a checkpoint must hold, as (arrays, plain values): the policy's state and the guard's."""
        arrays, plain = states.split(self._state)
        if self._guard is not None:
            own, _ = states.split(self._guard)
            arrays |= {f"{_GUARD}{name}": value for name, value in own.items()}
        return arrays, plain

    def restore(self, arrays: Mapping[str, NDArray[Any]], plain: Mapping[str, Any], *, round: int) -> None:
        """Continue in this round with what `split` took apart. What was saved before there was a guard has none."""
        own = {name: value for name, value in arrays.items() if not name.startswith(_GUARD)}
        guard = _group(arrays, _GUARD)
        self._state = states.join(self._state, own, plain)
        self._guard = self.guard.start(self.policy, self.clients)
        if self._guard is not None and guard:
            unbounded = {name: None for name in ("places", "fair") if name not in guard}
            self._guard = states.join(self._guard, guard, unbounded)
        self._pending = None
        self.round = whole("Session.restore", "round", 0, value=round)

    def save(self, path: str | Path) -> None:
        """Write the committed state to `session.npz` in a directory. A crash leaves the previous state loadable.

        The process keeps a lock on the directory until this session is gone: another process that saves there gets a
        StateFileError. Loading needs no lock. Other files in the directory are left alone.
        """
        directory = Path(path)
        arrays, plain = self.split()
        table = {item.name: getattr(self.table, item.name) for item in fields(self.table)}
        members = {f"state/{name}": value for name, value in arrays.items()}
        members |= {f"clients/{name}": value for name, value in table.items() if value is not None}
        content = checkpoint.pack(
            members,
            {
                "format": _FORMAT,
                "schema": _SCHEMA,
                "policy": policy_name(self.policy),
                "parameters": registry.parameters(self.policy),
                "seed": self.seed,
                "round": self.round,
                "report_limit": self._report_limit,
                "guard": asdict(self.guard),
                "state": plain,
            },
        )
        directory.mkdir(parents=True, exist_ok=True)
        claim = writing.claim(directory, self)
        with claim.writing:
            if self._saved_in != directory.resolve():
                _refuse_foreign_file(directory / SESSION_FILE)
                _remove_partial_files(directory)
            writing.write_atomically(directory / SESSION_FILE, content, private=True)
        self._saved_in = directory.resolve()

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        policy: Policy[Any] | None = None,
        provides: frozenset[Signal] | None = None,
        guard: Guard | str | None = None,
    ) -> Session:
        """Continue a saved session. A policy that is not registered must be passed, as it was.

        Another `guard` than the saved one starts with what that one knew of the clients. None: the saved guard.
        """
        file = Path(path) / SESSION_FILE
        members, saved = _read(file)
        given = None if guard is None else guard_of(guard)
        if policy is not None:
            _refuse_another_policy(policy, saved, path)
        elif saved["policy"] not in registry.BUILT_IN and saved["policy"] not in registry.names():
            raise StateFileError(
                f"The session in {path} used the policy {saved['policy']!r}, which is not registered here. "
                "Install its package, or pass Session.load(path, policy=...)."
            )
        try:
            if policy is None:
                policy = registry.get(saved["policy"], **saved["parameters"])
            clients = Clients(**_group(members, "clients/"))
            before = Guard(**saved["guard"]) if "guard" in saved else guard_of("mild")
            session = cls(
                policy,
                clients,
                saved["seed"],
                provides=provides,
                report_limit=saved["report_limit"],
                guard=before if given is None else given,
            )
            arrays = _group(members, "state/")
            if session.guard != before:
                arrays = _under_another_guard(arrays, session, before)
            session.restore(arrays, saved["state"], round=saved["round"])
        except (InvalidInput, TypeError) as error:
            raise StateFileError(f"{file} cannot be used: {error}") from error
        session._saved_in = file.parent.resolve()
        return session


def _under_another_guard(
    arrays: Mapping[str, NDArray[Any]], session: Session, before: Guard
) -> dict[str, NDArray[Any]]:
    """Return a saved state for a new session whose guard differs from the one before.

    Only the counts that the new guard keeps are there, from zero if the old one did not keep them. No client of the
    table is a newcomer for a guard that is the first to ask.
    """
    fresh = {name: value for name, value in session.split()[0].items() if name.startswith(_GUARD)}
    kept = {name: value for name, value in arrays.items() if not name.startswith(_GUARD) or name in fresh}
    state = fresh | kept
    if (name := f"{_GUARD}status") in state and not before.newcomers:
        state[name] = np.full_like(state[name], ESTABLISHED)
    return state


def _group(members: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    return {name.removeprefix(prefix): value for name, value in members.items() if name.startswith(prefix)}


def _read(file: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Return the arrays and the plain values of a saved session, whose types are checked."""
    try:
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StateFileError(
            f"There is no saved session in {file.parent}: {file.name} is missing. Save one with Session.save."
        ) from error
    members, saved = checkpoint.unpack(content, str(file))
    if saved.get("format") != _FORMAT:
        raise StateFileError(f"{file} is not a fedpick session: its 'format' is not {_FORMAT!r}.")
    if saved.get("schema") != _SCHEMA:
        raise StateFileError(
            f"{file} has schema {saved.get('schema')!r}; this version of fedpick reads schema {_SCHEMA}. "
            "Use the fedpick version that wrote it."
        )
    for name, kinds in _SAVED_TYPES.items():
        if name not in saved:
            raise StateFileError(f"{file} is damaged: it lacks {name!r}.")
        if not isinstance(saved[name], kinds):
            raise StateFileError(f"{file} is damaged: its {name!r} is a {type(saved[name]).__name__}.")
    return members, saved


def _remove_partial_files(directory: Path) -> None:
    """Remove what a process that was killed while it saved left behind. The claim excludes living ones."""
    for file in directory.glob(f"{SESSION_FILE}.*.partial"):
        if file.suffixes[-2][1:].isdigit():
            file.unlink(missing_ok=True)


def _refuse_foreign_file(file: Path) -> None:
    """Raise if another file has the session's name. A damaged session looks like another file."""
    if file.exists():
        try:
            _read(file)
        except StateFileError as error:
            raise StateFileError(
                f"{file} exists and is not a fedpick session that can be read, so it is not overwritten. "
                "Save to another directory, or delete the file."
            ) from error


def policy_name(policy: Policy[Any]) -> str:
    """Return the registered name of a policy, or the name of its class."""
    return registry.name_of(policy) or type(policy).__qualname__


def _refuse_another_policy(policy: Policy[Any], saved: Mapping[str, Any], path: str | Path) -> None:
    """Raise if the saved state belongs to another policy or to other hyper-parameters."""
    if policy_name(policy) != saved["policy"]:
        raise StateFileError(
            f"The session in {path} is of the policy {saved['policy']!r}, but {policy_name(policy)!r} was passed. "
            "Pass the policy that was saved, or start a new session in another directory."
        )
    given = registry.parameters(policy)
    # A hyper-parameter that did not exist when the session was saved does not differ.
    differing = [
        f"{name} was {value!r}, now {given.get(name)!r}"
        for name, value in saved["parameters"].items()
        if checkpoint.to_json(given.get(name)) != checkpoint.to_json(value)
    ]
    if differing:
        raise StateFileError(
            f"The session in {path} was saved with other hyper-parameters: {'; '.join(differing)}. "
            "Pass the same ones, or start a new session in another directory."
        )


def _refuse_missing_signals(policy: Policy[Any], clients: Clients, provides: frozenset[Signal] | None) -> None:
    for signal in sorted(policy.needs):
        if signal.startswith("clients."):
            name = signal.partition(".")[2]
            if getattr(clients, name) is None:
                raise MissingSignal(
                    f"{type(policy).__name__} needs Clients.{name}, which is None.\n\n"
                    f"hint: pass fedpick.Clients(num_examples=..., {name}=...), or choose options that do not need it"
                )
        elif provides is not None and signal not in provides:
            raise MissingSignal(
                f"{type(policy).__name__} needs the signal {signal.value!r}, which this driver does not provide "
                f"(it provides: {', '.join(sorted(provides)) or 'no signals'}).\n\n"
                "hint: let the driver report it, or choose a policy or options that do not need it"
                + (f". {HINTS[signal]}" if signal in HINTS else "")
            )


def _check_indices(chosen: IntArray, context: RoundContext, what: str) -> None:
    if len(chosen) == 0:
        return
    if chosen.max() >= len(context.clients):
        raise InvalidSelection(f"{what} client {chosen.max()}, but there are {len(context.clients)} clients.")
    reachable = context.available[chosen]
    if not reachable.all():
        raise InvalidSelection(
            f"{what} client {chosen[~reachable][0]}, which is not available in round {context.index}."
        )


def _check_selection(selection: Selection, context: RoundContext, policy: Policy[Any]) -> None:
    name = type(policy).__name__
    if not isinstance(selection, Selection):
        raise InvalidSelection(f"{name}.select must return (Selection, state). Got {type(selection).__name__} first.")
    _check_indices(selection.clients, context, f"{name} selected")
    if len(selection.clients) > context.budget:
        raise InvalidSelection(f"{name} selected {len(selection.clients)} clients with a budget of {context.budget}.")


def _by_size(clients: Clients, chosen: IntArray) -> FloatArray:
    """(k,) weights proportional to the bounded sizes: a driver's own table may hold the sizes as clients told them."""
    sizes = clients.num_examples[chosen]
    total = sizes.sum()
    return sizes / total if total > 0 else np.zeros(len(chosen))


def with_notes(selection: Selection, notes: Mapping[str, Any]) -> Selection:
    """Return the selection with what `tell` returned among its diagnostics, for the record of a round.

    The counts of `ask` and `tell` add up. Lists of clients become arrays, which a store compresses.
    """
    if not notes:
        return selection
    found = dict(selection.diagnostics)
    for name, value in notes.items():
        found[name] = np.array(value, np.int32) if isinstance(value, list) else found.get(name, 0) + value
    return replace(selection, diagnostics=found)


def in_order_of(clients: IntArray, outcome: Outcome) -> Outcome:
    """Return the outcome with its rows in the order of the selection; stale rows follow."""
    stale = np.flatnonzero(outcome.stale)
    told = outcome.of_selected().clients
    if len(stale) == 0 and np.array_equal(clients, told):
        return outcome
    if not np.array_equal(np.sort(clients), np.sort(told)):
        raise InvalidInput(
            f"The outcome must have a row for each of the {len(clients)} selected clients and no others. It has "
            f"{len(told)} rows. A client that did not answer has completed=False."
        )
    rows = np.flatnonzero(~outcome.stale)[np.argsort(told)[np.searchsorted(np.sort(told), clients)]]
    return outcome.take(np.concatenate([rows, stale]))
