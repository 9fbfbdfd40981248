"""The policy's side of a federation's rounds: ask, weigh, tell, save, record and report.

An adapter sends the messages of its framework and passes the replies to the `Driver`:

1. `Members.wait_until_ready` says which clients are ready (`members`);
2. `choose` asks the policy for the cohort; its probes are answered through the adapter's `Questions`;
3. the adapter trains the cohort, and puts each reply into the model's form (`arrays.in_form_of`);
4. `reports` collects what the clients told, and leaves out the updates that the strict guard refuses; `weigh` computes
   the weights of the others; the framework's strategy, or `aggregate`, applies them;
5. `tell` commits the round.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedpick.adapter.arrays import (
    Arrays,
    all_finite,
    apply_updates,
    clipped,
    difference,
    head,
    number,
    scaled,
    sketches,
    update_norm,
)
from fedpick.adapter.audit import AuditLog, open_log
from fedpick.adapter.members import ROSTER_FILE, Node, Roster, Standing
from fedpick.adapter.report import RoundProgress
from fedpick.adapter.settings import PROVIDES, Settings
from fedpick.core import registry
from fedpick.core.errors import InvalidInput, StateFileError, TrainingFailed
from fedpick.core.guard import guard_of
from fedpick.core.policy import Policy, Signal
from fedpick.core.record import Counters, RoundRecord, Timings
from fedpick.core.rng import Purpose, stream
from fedpick.core.robust import clip_factors
from fedpick.core.sampling import sample_uniform
from fedpick.core.session import SESSION_FILE, Session, with_notes
from fedpick.core.types import Clients, Outcome, Probe, Selection
from fedpick.core.writing import claim

__all__ = ["Driven", "Driver", "Questions"]


_COMPARED = {Signal.LOSS, Signal.OUTCOME_LOSS, Signal.TRAIN_LOSS, Signal.LOSS_RMS, Signal.UPDATE_NORM, Signal.SKETCH}


class Questions(Protocol):
    """What an adapter asks clients before the policy chooses, with the current model of the round."""

    def losses(self, clients: NDArray[np.int64], model: Arrays, batch_size: int | None) -> NDArray[np.float64]:
        """(d,) the losses of a model on the clients' data; NaN for a client that did not answer in time."""
        ...

    def train(self, clients: NDArray[np.int64]) -> Sequence[Arrays | None]:
        """The models that these clients train from the current one, in its form; None for a missing or unusable one."""
        ...


class Driver:
    """One policy that chooses the cohorts of one federation.

    Args:
        policy: the policy.
        settings: of the adapter. With a `path`, the saved session and roster are resumed.
    """

    def __init__(self, policy: Policy[Any], settings: Settings) -> None:
        self.policy = policy
        self.settings = settings
        self.roster = Roster()
        self.session: Session | None = None
        self.history: list[Selection] = []
        """The selections of this process's rounds, without arrays in their diagnostics."""
        self.selection: Selection | None = None
        """Of the round that is asked and not told yet."""
        self.progress = RoundProgress(settings.progress, settings.log)
        self.labels_for = type(policy).__name__ if Signal.LABEL_HISTOGRAM in policy.needs else None
        self.enough = self.most = 0
        """How many answers end the running round, and how many of them count."""
        self._counters = Counters()
        self._available = np.zeros(0, dtype=bool)
        self._seconds = {"select": 0.0, "measure": 0.0}
        self._asked_at = 0.0
        self._took: dict[int, float] = {}  # client -> seconds until it answered the last exchange
        self._slow: set[int] = set()
        self._model_bytes = 0
        self._warned: set[str] = set()
        self._due: RoundRecord | None = None  # not recorded yet: its evaluation is still to come
        self._recording = False
        self._refused: list[str] = []  # whose updates the strict guard left out of this round
        self._probes: list[dict[str, Any]] = []  # what the policy asked in this round, and the answers
        if settings.path is not None:
            self._resume(settings.path)
        # The guard compares losses with the norms of updates, which are the server's own measurement.
        guard = guard_of(settings.guard) if self.session is None else self.session.guard
        self._compares = guard.exclude or (guard.cut and bool(policy.needs & _COMPARED))
        self._audit = None if settings.audit is None else open_log(settings.audit, settings.log)
        if self._audit is not None:
            self._audit.write(
                "open",
                policy=registry.name_of(policy) or type(policy).__name__,
                parameters=registry.parameters(policy),
                seed=settings.seed,
                guard=asdict(guard),
                next_round=self.round + 1,
            )

    def _resume(self, path: Path) -> None:
        """Load the saved session and roster. A roster without a session is loaded only to refuse a foreign file."""
        saved = (path / SESSION_FILE).exists()
        session = Session.load(path, policy=self.policy, provides=PROVIDES) if saved else None
        roster = Roster.load(path) if saved or (path / ROSTER_FILE).exists() else None
        if session is None or roster is None:
            return
        if session.seed != self.settings.seed:
            raise InvalidInput(
                f"The state in {path} was saved with seed={session.seed}. Got seed={self.settings.seed}: "
                "pass the same seed to resume, or another directory to start anew."
            )
        if len(roster.keys) < len(session.clients):
            raise StateFileError(
                f"The files in {path} do not belong together: {ROSTER_FILE} has {len(roster.keys)} clients, the "
                f"session {len(session.clients)}. Restore the right ones, or choose another directory to start anew."
            )
        if session.guard != (guard := guard_of(self.settings.guard)):
            self.settings.log.warning(
                "The state in %s was saved with %r; from round %d on it is %r.",
                *(path, session.guard, session.round + 1, guard),
            )
            session = Session.load(path, policy=self.policy, provides=PROVIDES, guard=guard)
        session.watch = None
        self.session, self.roster = session, roster

    @property
    def round(self) -> int:
        """The round that is asked next, from 0."""
        return 0 if self.session is None else self.session.round

    @property
    def clients(self) -> Clients:
        """The table with the sizes of the latest replies, bounded by the guard."""
        table = self.roster.clients()
        return table if self.session is None else self.session.guard.sizes(table)[0]

    def announce(self, first: str = "", further: str = "") -> None:
        """Log the policy, its settings and a resumed state: before the first round. The arguments precede the lines."""
        settings, log = self.settings, self.settings.log
        weights = "the policy" if settings.use_weights else "the strategy"
        if callable(settings.weights):
            weights = getattr(settings.weights, "__name__", "a function")
        log.info("%sPolicy: %s, %r", first, registry.name_of(self.policy) or type(self.policy).__name__, self.policy)
        budget = "none" if settings.budget is None else settings.budget
        log.info("%sbudget: %s, seed: %d, weights of: %s", further, budget, settings.seed, weights)
        if self.session is not None:
            resumed = (self.session.round, len(self.session.clients))
            log.info("%sresumed after round %d with %d clients", further, *resumed)

    def begin(self) -> None:
        """Start a round. One that was asked and never told was aborted: its updates did not enter the model."""
        if self.selection is not None:
            self.tell(self.selection, np.zeros(len(self.selection.clients), dtype=bool))
        self.flush()
        self.progress.start()

    @property
    def standings(self) -> list[Standing]:
        """Who takes part, who does not, and why: one row for every node that was seen."""
        rows = []
        credibility = None if self.session is None else self.session.credibility
        for node, row in self.roster.standings.items():
            index = self.roster.index_of_node.get(node)
            if index is not None and credibility is not None and index < len(credibility) and credibility[index] < 0.5:
                why = f"its reports are not credible ({credibility[index]:.2f})"
                row = replace(row, status="distrusted", why=why)
            elif index is not None and self.roster.rests_until[index] > self.round:
                why = f"much slower than most; rests until round {self.roster.rests_until[index] + 1}"
                row = replace(row, status="slow", why=why)
            rows.append(row)
        return sorted(rows, key=lambda row: (row.identity, row.node))

    def choose(self, ready: NDArray[np.bool_], model: Arrays, questions: Questions) -> Selection:
        """Let the policy choose among the ready clients."""
        settings, clients = self.settings, self.roster.clients()
        if self.session is None:
            self.session = Session(
                self.policy, clients, settings.seed, provides=PROVIDES, guard=guard_of(settings.guard)
            )
            self.session.watch = None  # see _warn_of_missing_reports
        elif not _same_table(self.session.table, clients):
            self.session.grow(clients)
        if settings.record is not None and not self._recording:
            settings.record.on_start(self.session)
            # A recorder that resumes knows what was sent before.
            self._counters = getattr(settings.record, "counters", self._counters)
            self._recording = True
        available = ready & self.roster.within_limits(self.round, settings.cooldown, settings.max_share)
        prompt = available & (np.array(self.roster.rests_until, dtype=np.int64) <= self.round)
        available = prompt if prompt.any() else available  # slow clients are better than none
        if ready.any() and not available.any():
            settings.log.warning(
                "cooldown and max_share exclude all %d ready clients: nobody trains in round %d.",
                *(np.count_nonzero(ready), self.round + 1),
            )
        self._model_bytes = sum(array.nbytes for array in model.values())
        self._seconds, started = {"measure": 0.0}, time.monotonic()
        limit = settings.cohort_limit(int(np.count_nonzero(available)))

        def measure(probe: Probe) -> NDArray[np.float64]:
            asked = time.monotonic()
            values = self._measure(probe, model, questions)
            self._seconds["measure"] += time.monotonic() - asked
            if self._audit is not None:
                self._probes.append(self._probe_line(probe, values))
            return values

        selection = self.session.ask(available=available, budget=settings.asked(limit), measure=measure)
        self._asked_at = time.monotonic()
        self._took, self._slow, self._refused = {}, set(), []
        self._seconds["select"] = self._asked_at - started - self._seconds["measure"]
        self.selection, self._available = selection, available
        self.most = len(selection.clients) if limit is None else min(limit, len(selection.clients))
        self.enough = math.ceil(settings.quorum * self.most - 1e-9)
        small = {name: value for name, value in selection.diagnostics.items() if not isinstance(value, np.ndarray)}
        self.history.append(replace(selection, diagnostics=small))
        if available.any() and not len(selection.clients):
            settings.log.warning("The policy chose none of %d ready clients.", np.count_nonzero(available))
        names = self.roster.names(np.flatnonzero(available)) if self.progress.wants_names else []
        if self._audit is not None:
            self._write_choice(self._audit, selection, available, settings.asked(limit))
        self.progress.chosen(self.round + 1, names, self.roster.names(selection.clients))
        return selection

    def _probe_line(self, probe: Probe, values: NDArray[np.float64]) -> dict[str, Any]:
        trial = None if probe.trial is None else self.roster.names(probe.trial.clients)
        answers: Any = values if values.ndim == 1 else {"sha256": _sha256(values)}
        clients = self.roster.names(probe.clients)
        return {"signal": probe.signal.value, "trial": trial, "clients": clients, "values": answers}

    def _write_choice(
        self, audit: AuditLog, selection: Selection, available: NDArray[np.bool_], budget: int | None
    ) -> None:
        """Write who came, and who was chosen and why, to the audit log."""
        if self.roster.news:
            audit.write("members", changes=[asdict(standing) for standing in self.roster.news])
        there = self.roster.names(np.flatnonzero(available))
        audit.write(
            "choice",
            round=self.round + 1,
            seed=self.settings.seed,
            budget=budget,
            available=there if len(there) <= _LISTED else {"count": len(there), "sha256": _sha256(available)},
            reports=self._probes,
            cohort=self.roster.names(selection.clients),
            weights=selection.weights,
            renormalize=selection.renormalize,
            diagnostics=self._with_names(self.history[-1].diagnostics),
        )
        self.roster.news, self._probes = [], []

    def _with_names(self, notes: Mapping[str, Any]) -> dict[str, Any]:
        """The notes of the guard and the policy with names for the guard's lists of clients."""
        return {name: self.roster.names(value) if name in _LISTS else value for name, value in notes.items()}

    def _measure(self, probe: Probe, model: Arrays, questions: Questions) -> NDArray[np.float64]:
        if probe.signal is Signal.UPDATE:
            updates = self._trial_updates(probe.clients, model, questions)
            return sketches(updates, "count-sketch", self.settings.seed, self.settings.log)
        arrays = model
        if probe.trial is not None:
            found = self._trial_updates(probe.trial.clients, model, questions)
            completed = np.array([update is not None for update in found], dtype=bool)
            weights = self.settings.aggregation_weights(probe.trial, completed, self.clients)
            usable = [update for update in found if update is not None]
            arrays = apply_updates(model, usable, weights[completed], self.settings.buffers)
        values = questions.losses(probe.clients, arrays, probe.batch_size)
        self._count(models_down=len(probe.clients), scalars_up=int(np.count_nonzero(~np.isnan(values))))
        return values

    def _trial_updates(
        self, clients: NDArray[np.int64], model: Arrays, questions: Questions
    ) -> list[dict[str, NDArray[Any]] | None]:
        """Updates that do not enter the model; None for a client that did not answer in time."""
        updates = [None if new is None else difference(new, model) for new in questions.train(clients)]
        usable = [update if update is not None and all_finite(update) else None for update in updates]
        self._count(models_down=len(clients), updates_up=sum(update is not None for update in usable))
        return usable

    def _count(self, **numbers: int) -> None:
        self._counters = self._counters.plus(self._model_bytes, **numbers)

    def reports(
        self, metrics: Sequence[Mapping[str, Any]], model: Arrays, trained: list[Any]
    ) -> dict[str, NDArray[np.float64]]:
        """Outcome field -> (k,) what the clients reported, and what the server computes of their updates.

        An update that the strict guard refuses, because the reports are in doubt, becomes None in `trained`.
        """
        reports = {
            name: np.array([number(found.get(key)) for found in metrics], dtype=np.float64)
            for name, key in self.settings.reports.items()
            if name != "eval_loss"
        }
        if Signal.UPDATE_NORM in self.policy.needs or self._compares:
            reports["update_norm"] = _norms(trained, model)
        if Signal.SKETCH in self.policy.needs:
            how = self.settings.sketch
            part = head(model, self.settings.buffers) if how == "head" else model
            updates = (None if new is None else difference(new, part) for new in trained)
            reports["sketch"] = sketches(updates, how, self.settings.seed, self.settings.log)
        self._refuse(trained, reports)
        return reports

    def _refuse(self, trained: list[Any], reports: Mapping[str, NDArray[Any]]) -> None:
        """Leave out the updates of answers in doubt. Nothing is committed: `tell` judges the same reports again."""
        if self.session is None or self.selection is None or not self.session.guard.exclude:
            return
        chosen = self.selection.clients
        completed = np.array([new is not None for new in trained], dtype=bool)
        outcome = Outcome(index=self.round, clients=chosen, completed=completed, **reports)
        for place in np.flatnonzero(completed & ~self.session.judge(outcome).completed).tolist():
            trained[place] = None
            name = self.roster.keys[int(chosen[place])]
            self._refused.append(name)
            self.settings.log.warning("The reports of %s are in doubt: its update does not enter the model.", name)

    def weigh(
        self, selection: Selection, model: Arrays, trained: list[Any], wrong: dict[int, str]
    ) -> tuple[NDArray[np.float64], dict[int, Arrays]]:
        """(k,) the weights, and position -> the model to aggregate in place of a reply's.

        A strategy takes the normalised mean of replies w_i. With weights a_i that sum to c instead of 1, it gets
        w + c (w_i - w): the mean is then w + sum of a_i (w_i - w). An update that overflows when it is scaled counts as
        failed, which may change the weights of the others: `trained` and `wrong` say so afterwards.
        """
        clients, changed = self.clients, self._clip(model, trained)
        while True:
            completed = np.array([new is not None for new in trained], dtype=bool)
            weights = self.settings.aggregation_weights(selection, completed, clients)
            total = float(weights.sum())
            if not self.settings.use_weights or not total > 0 or abs(total - 1.0) <= 1e-12:
                return weights, changed
            stretched = {
                place: scaled(new, model, total, self.settings.buffers)
                for place, new in enumerate(trained)
                if new is not None
            }
            overflowing = [place for place, arrays in stretched.items() if arrays is None]
            if not overflowing:
                return weights, {place: arrays for place, arrays in stretched.items() if arrays is not None}
            for place in overflowing:
                trained[place] = None
                wrong[place] = "its update, times the sum of the policy's weights, is not finite"

    def _clip(self, model: Arrays, trained: list[Any]) -> dict[int, Arrays]:
        """Shorten the longest updates, in `trained` and as position -> model."""
        if self.settings.clip_norms is None:
            return {}
        norms = _norms(trained, model)
        there = np.flatnonzero(~np.isnan(norms))
        factors = clip_factors(norms[there], self.settings.clip_norms)
        cut = {int(place): factor for place, factor in zip(there, factors.tolist(), strict=True) if factor < 1}
        changed = {place: clipped(trained[place], model, factor) for place, factor in cut.items()}
        for place, new in changed.items():
            trained[place] = new
        if cut and self.selection is not None:
            names = self.roster.names(self.selection.clients[list(cut)])
            self.settings.log.info("Clipped updates: %s.", ", ".join(names))
        return changed

    def aggregate(
        self, selection: Selection, model: Arrays, trained: list[Any]
    ) -> tuple[dict[str, NDArray[Any]] | None, NDArray[np.float64]]:
        """The new model, None if there is no step, and (k,) the weights: for adapters without a strategy."""
        self._clip(model, trained)
        completed = np.array([new is not None for new in trained], dtype=bool)
        weights = self.settings.aggregation_weights(selection, completed, self.clients)
        if not weights.sum() > 0:
            return None, weights
        updates = [difference(new, model) for new in trained if new is not None]
        new = apply_updates(model, updates, weights[completed], self.settings.buffers)
        if all_finite(new):
            return new, weights
        self.settings.log.warning(
            "The aggregated model of round %d is not finite: the round makes no step.", self.round + 1
        )
        return None, weights

    def evaluators(self, online: Iterable[Node], *, fraction: float, least: int) -> list[Node]:
        """A seeded sample of these nodes for an evaluation, without those that take no part."""
        members, everybody = self.roster.index_of_node, self.settings.eligible is None and not self.settings.exclude
        nodes = [n for n in online if n in members or (everybody and n not in self.roster.standings)]
        order = sorted(nodes, key=lambda node: (members.get(node, len(self.roster.keys)), node))
        size = min(max(int(len(order) * fraction), least), len(order))
        if fraction == 0.0 or size == 0:
            return []
        # The session's round, not the framework's, which starts anew after every restart.
        rng = stream(self.settings.seed, self.round, Purpose.MEASURE)
        return [order[place] for place in np.sort(sample_uniform(np.ones(len(order), dtype=bool), size, rng))]

    def note_pace(
        self,
        nodes: Sequence[Node],
        seconds: Mapping[Node, float],
        waited: float,
        deadline: float,
        failed: Collection[Node] = (),
    ) -> None:
        """Note after how many seconds nodes answered; those that are much slower than most are asked less.

        Args:
            nodes: that were asked.
            seconds: node -> when its answer came, by the server's clock; nodes that did not answer are missing.
            waited: how long the exchange took.
            deadline: how long it could have taken.
            failed: nodes whose answer is an error, which may come at once and tells nothing about the others.
        """
        asked = [node for node in nodes if node in self.roster.index_of_node]
        clients = self.roster.indices(asked)
        took = np.array([seconds.get(node, math.nan) for node in asked], dtype=np.float64)
        self._took = dict(zip(clients, took.tolist(), strict=True))
        errors = np.array([node in failed for node in asked], dtype=bool)
        self._slow = set(self.roster.note_pace(clients, took, errors, waited, deadline, self.round))
        for index in sorted(self._slow):
            self.settings.log.warning(
                "%s took %.1f s of at most %.1f s, much longer than most: it is not asked until round %d.",
                *(self.roster.keys[index], np.fmin(self._took[index], waited), deadline),
                self.roster.rests_until[index] + 1,
            )

    def warn_of(self, selection: Selection, wrong: Mapping[int, str]) -> None:
        """Name the clients whose replies are unusable: position in the cohort -> why."""
        for place, reason in wrong.items():
            name = self.roster.keys[int(selection.clients[place])]
            self.settings.log.warning("The reply of %s counts as failed: %s.", name, reason)

    def tell(
        self,
        selection: Selection,
        completed: NDArray[np.bool_],
        *,
        weights: NDArray[np.float64] | None = None,
        late: NDArray[np.bool_] | None = None,
        answered: int = 0,
        **reports: NDArray[Any],
    ) -> None:
        """Commit the round, save it and report it. With a record, the save waits for the round's evaluation.

        Args:
            selection: of `choose`.
            completed: (k,) whose update entered the model.
            weights: (k,) of `weigh`.
            late: (k,) who had not answered when the round ended.
            answered: how many updates came, usable or not.
            reports: of `reports`.
        """
        assert self.session is not None
        missed = np.zeros(len(completed), dtype=bool) if late is None else late
        reports["duration"] = self._durations(selection, missed, reports.get("duration"))
        # A client is cancelled when enough others have answered; otherwise the deadline has passed, and it is late.
        cancelled = missed & (answered >= self.enough)
        index, chosen = self.session.round, selection.clients
        reports |= {"late": missed & ~cancelled, "cancelled": cancelled}
        outcome = Outcome(index=index, clients=chosen, completed=completed, **reports)
        notes = self.session.tell(outcome)
        selection = with_notes(selection, notes)
        self.selection = None
        if self._audit is not None:  # before the state is saved, which must not be ahead of the log
            self._write_outcome(self._audit, outcome, weights, notes)
        self.roster.note_selected(selection.clients, outcome.index)
        self._warn_of_missing_reports(outcome)
        if self.settings.record is not None:
            self._count(models_down=len(completed), updates_up=answered)
            given = np.zeros(len(completed)) if weights is None else np.where(completed, weights, 0.0)
            self._due = RoundRecord(
                index=outcome.index,
                selection=selection,
                outcome=outcome,
                weights=given,
                available=self._available,
                counters=self._counters,
                seconds=Timings(train=time.monotonic() - self._asked_at, **self._seconds),
            )
        else:
            self._save()
        self.progress.finish(completed.tolist(), missed.tolist())

    def _write_outcome(
        self, audit: AuditLog, outcome: Outcome, weights: NDArray[np.float64] | None, notes: Mapping[str, Any]
    ) -> None:
        """Write who completed, with which reports and weights, and what the guard did, to the audit log."""
        reports: dict[str, Any] = {
            name: values
            for name in ("loss", "train_loss", "loss_rms", "duration", "update_norm")
            if not np.isnan(values := getattr(outcome, name)).all()
        }
        if outcome.sketch.size:
            reports["sketch"] = {"sha256": _sha256(outcome.sketch)}
        audit.write(
            "outcome",
            round=outcome.index + 1,
            cohort=self.roster.names(outcome.clients),
            completed=outcome.completed,
            late=outcome.late | outcome.cancelled,
            weights=weights,
            reports=reports,
            refused=self._refused,
            notes=self._with_names(notes),
        )
        audit.note()

    def _durations(
        self, selection: Selection, missed: NDArray[np.bool_], told: NDArray[np.float64] | None
    ) -> NDArray[np.float64]:
        """(k,) seconds: as the clients report them; as the server saw them if they report none, too few, or were slow.

        A client that trained longer than it says looks fast to a policy. A report below a tenth of the server's time
        does not count, unless most of the cohort report less than half of it: many clients on one machine wait for
        their turn, and the server's clock counts that too.
        """
        seen = np.array([self._took.get(int(index), math.nan) for index in selection.clients])
        slow = np.array([int(index) in self._slow for index in selection.clients], dtype=bool)
        if told is None:
            durations = seen
        else:
            share = np.divide(told, seen, out=np.full(len(seen), math.nan), where=seen > 0)
            known = share[~np.isnan(share)]
            if len(known) and np.median(known) >= 0.5:
                slow |= share < _LEAST_SHARE
            durations = np.where(np.isnan(told) | slow, seen, told)
        return np.where(missed, time.monotonic() - self._asked_at, durations)

    def _save(self) -> None:
        if self.settings.path is not None and self.session is not None:
            claim(self.settings.path, self)  # before the roster is written: another process may save here
            self.roster.save(self.settings.path)
            self.session.save(self.settings.path)

    def evaluated(self, *, loss: float, accuracy: float) -> None:
        """Add the server's evaluation of the new model to the round that was told last, and record it; NaN: unknown."""
        if self._due is not None:
            known = [value if math.isfinite(value) else None for value in (loss, accuracy)]
            self._due = replace(self._due, test_loss=known[0], test_accuracy=known[1])
        self.flush()

    def flush(self) -> None:
        """Record the round that was told last, and save it: the record must not be behind the saved state."""
        due, self._due = self._due, None
        if due is not None and self.settings.record is not None:
            self.settings.record.on_round(due)
            self._save()

    def end(self, error: BaseException | None = None) -> None:
        """Record the last round, and that the run is over."""
        self.flush()
        if self._recording and self.settings.record is not None:
            self.settings.record.on_end(error)
            self._recording = False

    def _warn_of_missing_reports(self, outcome: Outcome) -> None:
        """Warn once if a policy gets no report from which it learns: it still chooses, but not as its name promises."""
        for signal in (Signal.OUTCOME_LOSS, Signal.TRAIN_LOSS, Signal.LOSS_RMS, Signal.DURATION):
            name = signal.value.removeprefix("outcome.")
            reported = getattr(outcome, name)[outcome.completed]
            if signal in self.policy.needs and len(reported) and np.isnan(reported).all() and name not in self._warned:
                self._warned.add(name)
                self.settings.log.warning(
                    "%s learns from %r, but no train reply has a usable %r among its metrics. Have the clients report "
                    'it, or name the right key: %s(..., reports={"%s": ...}).',
                    *(type(self.policy).__name__, name, self.settings.reports.get(name), self.settings.caller, name),
                )


class Driven:
    """What strategies with a driver have in common: they show its clients and choices, and end a run alike."""

    _driver: Driver
    _trained = False  # whether a round of this run changed the model

    @contextmanager
    def _rounds(self, count: int) -> Iterator[None]:
        """Run this many rounds within: record the end, also by an error; raise if no round changed the model."""
        self._trained = False
        try:
            yield
            if count > 0 and not self._trained:
                raise TrainingFailed(
                    f"None of {count} rounds changed the model: no client completed one with a usable reply.\n\n"
                    "hint: the warnings above say why each reply failed; the logs of the clients hold their errors"
                )
        except BaseException as error:
            self._driver.end(error)
            raise
        self._driver.end()

    @property
    def session(self) -> Session | None:
        """The policy's session; None before the first round."""
        return self._driver.session

    @property
    def roster(self) -> Roster:
        """The clients, and what is known of them."""
        return self._driver.roster

    @property
    def standings(self) -> list[Standing]:
        """Who takes part, who does not, and why: one row for every node that was seen."""
        return self._driver.standings

    @property
    def history(self) -> list[Selection]:
        """The selections of this process's rounds, without arrays in their diagnostics."""
        return self._driver.history


def _norms(trained: Sequence[Arrays | None], model: Arrays) -> NDArray[np.float64]:
    """(k,) the lengths of the updates; NaN for a client without one."""
    return np.array([math.nan if new is None else update_norm(new, model) for new in trained], dtype=np.float64)


_LEAST_SHARE = 0.1
"""The smallest believable share of a client's own time in the time that the server measured."""
_LISTS = ("distrusted", "lost_credibility", "regained_credibility")
"""Notes of the guard that are lists of clients."""
_LISTED = 1000
"""An audit log names at most this many available clients per round; of more it holds a hash."""


def _sha256(array: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def _same_table(old: Clients, new: Clients) -> bool:
    known = ("num_examples", "label_histogram", "group")  # two that are None are equal
    return all(np.array_equal(getattr(old, name), getattr(new, name)) for name in known)
