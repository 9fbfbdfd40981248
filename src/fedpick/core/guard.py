"""The one place between clients' reports and a policy: it rejects unusable reports and doubts false ones.

Unusable: a report that is infinite, impossibly negative or larger than a limit becomes NaN, "no answer".

False: a finite number can still be a lie, from wrong labels to an attacker. The guard compares every report with the
latest reports of all clients, one number per client, so that a client does not gain votes by being chosen often. It
works on logarithms, because losses and norms spread by factors:

    limit = median + c * spread        spread = 1.4826 * median |value - median|, at least `_LEAST_SPREAD`

`limit_reference` is that rule in plain Python. Eight numbers per client are compared, and only values above the limit
are suspicious: a client that claims less than it could gains no place.

    row          value                                              suspicious if
    LOSS         log loss, probed or reported (or its RMS)          far above all others
    TRAIN_LOSS   log mean loss of the local training                far above all others
    LOSS_RMS     log root mean square of the losses                 far above all others
    NORM         log norm of the update                             far above all others
    EXCESS       log train loss - 2 log norm                        a large loss moved the model like a small one
    DISAGREEMENT log loss (or RMS) - log train loss, of one round   it told a probe more than its own training report
    JUMP         log loss - the client's log loss before            it rose unlike the others'
    LENGTH       log norm - the median of the round                 the update is far longer than those beside it

The first four are *levels*. Hard data have large losses honestly, so levels are judged with a wider limit than the
other comparisons. Only the strict guard judges those: where clients differ much, an honest loss may jump, and the guard
that is on by default must leave honest federations alone. The norm of an update is the server's own measurement. (A
loss falls about with the square of the gradient.) Norms fall while the model learns, so old ones would hide a long
update: hence LENGTH. To withhold the training loss, which most others tell, is suspicious as well.

An answer with a suspicious value is *in doubt*. Its losses count as the median at most, so that they cannot buy a
place. (Cut to the limit, a loss would still be the largest, and a policy that ranks losses would choose the client.) A
norm, which no client can claim, is cut to the limit.

Credibility: every client starts with 1. An answer in doubt leaves 40 % of the credibility. A completed round without
doubt takes back a tenth of what is missing. A client that was doubted is *on probation* until it has completed a round
without doubt: its losses count as the median at most, and the limits are those of the other clients, unless most of the
known ones are on probation. While it is not chosen its credibility grows by 1 % per round, so that probation ends after
30 rounds at the latest, and lasts four times as long if the client is doubted again.

The guard is *mild* by default: it does just this, by levels alone. The *strict* form also
- judges the other comparisons;
- refuses an answer in doubt: the policy sees no report of it, and it counts as not completed (see `Session.judge`);
- does not offer clients of a credibility below 1/2: a client returns after 22 rounds, on probation until it has
  completed a round without doubt;
- offers no more newcomers than their fair share, and no client or group that had five times its share of the places;
- cuts all losses at the median until enough clients are known.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import BoolArray, FloatArray, IntArray, read_only
from fedpick.core.errors import InvalidInput
from fedpick.core.policy import Policy
from fedpick.core.state import per_client
from fedpick.core.types import Clients, Outcome
from fedpick.core.validation import assign, flag, number

__all__ = [
    "REPORT_LIMIT",
    "Guard",
    "GuardState",
    "clean_answers",
    "clean_outcome",
    "credibility_changes",
    "guard_of",
    "limit_reference",
]

REPORT_LIMIT = 1e9
"""Default limit: no plausible loss, norm or duration comes near it."""


_MAY_BE_NEGATIVE = {
    "loss": True,  # log densities, quadratics without their constant
    "train_loss": True,
    "sketch": True,
    "duration": False,
    "update_norm": False,
    "loss_rms": False,
}
_TOLD = ("loss", "train_loss", "loss_rms", "update_norm", "sketch")
"""Reports that a policy does not see of an answer in doubt."""


def clean_answers(values: FloatArray, limit: float, negative: bool = True) -> tuple[FloatArray, int]:
    """Return the answers with unusable rows as NaN, and the number of rejected answers. NaN is not rejected."""
    lowest = -limit if negative else 0.0
    usable = np.asarray((values >= lowest) & (values <= limit) & np.isfinite(values), dtype=bool)
    if values.ndim == 2:
        # One unusable entry makes the whole vector unusable.
        rows = np.asarray(usable.all(axis=1))
        silent = np.isnan(values).all(axis=1)
        return np.where(rows[:, None], values, np.nan), int((~rows & ~silent).sum())
    return np.where(usable, values, np.nan), int((~usable & ~np.isnan(values)).sum())


def clean_outcome(outcome: Outcome, limit: float) -> tuple[Outcome, int]:
    """Return the outcome with unusable reports as NaN, and the number of rejected reports."""
    cleaned: dict[str, Any] = {}
    rejected = 0
    for name, negative in _MAY_BE_NEGATIVE.items():
        values = getattr(outcome, name)
        if values.size:
            cleaned[name], count = clean_answers(values, limit, negative)
            rejected += count
    return _with_reports(outcome, cleaned), rejected


def _with_reports(outcome: Outcome, reports: Mapping[str, NDArray[Any]]) -> Outcome:
    # Not `replace`, which would validate the shapes again.
    changed = copy(outcome)
    assign(changed, **{name: read_only(values) for name, values in reports.items()})
    return changed


# What is compared: rows of GuardState.latest.
LOSS, TRAIN_LOSS, NORM, EXCESS, DISAGREEMENT, JUMP, LOSS_RMS, LENGTH = range(8)
_LEVELS = {"loss": LOSS, "loss_rms": LOSS_RMS, "train_loss": TRAIN_LOSS, "update_norm": NORM}
_WIDE, _NARROW = 6.0, 5.0
"""c of the limit, for levels and for other comparisons."""
_LEAST_SPREAD = 0.3
_LEAST_KNOWN = 4
"""Clients that must be known before any is judged."""
_ENOUGH_KNOWN = 20
"""Clients, or half of all, that the strict guard must know before a large loss may win a place."""
_SAMPLE = 4096
"""About as many clients make the median; of more, every n-th one."""
_KEPT, _REGAINED, _RETURN = 0.4, 0.1, 1.01
"""What a doubtful answer leaves of the credibility, the share of the rest that a good one gives back, and the factor
per round for a client that waits: the second time it waits four times as long."""
_TRUSTED, _HEARD = 0.5, 0.54
"""The credibility below which the strict guard keeps a client out, and below which a client is on probation. One good
round leads from 0.5 to 0.55."""
_LEAST_SIZES = 5
_LEAST_SIZE_SPREAD = 0.4
_MOST_NEWCOMERS = 0.25
"""Of the places: fresh identities are cheap, so many of them must not take over."""
_SHOWN = 100


@dataclass(frozen=True, kw_only=True)
class Guard:
    """How a session treats reports that may be false; "off", "mild" (the default) and "strict" are such guards.

    Args:
        cut: cut losses of answers in doubt at the median and norms at the limit, and keep a credibility per client.
            Without it nothing is compared.
        exclude: do not offer clients whose credibility is below 1/2, unless the budget needs them.
        newcomers: clients that came after the first round and were never chosen get, together, at most their fair share
            of the places, and at most a quarter of them. (A fresh identity is cheap.)
        most_places: no client is offered that had more than this many times its fair share of the latest places, and
            none of a group (`Clients.group`) that together had more than this many times its own; None: no bound. For
            policies that listen to reports.
        most_size: a client's number of examples counts at most exp(most_size * spread) times the median, where the
            spread is that of the logarithms, at least 0.4; None: no bound.
    """

    cut: bool = True
    exclude: bool = False
    newcomers: bool = False
    most_places: float | None = None
    most_size: float | None = 6.0

    def __post_init__(self) -> None:
        for name in ("cut", "exclude", "newcomers"):
            flag(self, name)
        if self.most_places is not None:
            number(self, "most_places", "[1, inf)")
        if self.most_size is not None:
            number(self, "most_size", "(0, inf)")
        if self.exclude and not self.cut:
            raise InvalidInput("Guard(exclude=True) needs cut=True: credibility comes from comparing reports.")

    @property
    def masks(self) -> bool:
        """Whether the guard may keep clients from the policy, depending on earlier rounds."""
        return self.exclude or self.newcomers or self.most_places is not None

    def start(self, policy: Policy[Any], clients: Clients) -> GuardState | None:
        """Return the state before the first round; None if there is nothing to remember."""
        listens = any(not signal.startswith("clients.") for signal in policy.needs)
        if not ((self.cut and listens) or self.masks):
            return None
        count = len(clients)
        bounded = self.most_places is not None and listens
        return GuardState(
            credibility=np.ones(count, np.float32),
            latest=np.full((LENGTH + 1, count), np.nan, np.float32),
            status=np.full(count, _UNMET, np.int8),
            places=np.zeros(count, np.float32) if bounded else None,
            fair=np.zeros(count, np.float32) if bounded else None,
        )

    def sizes(self, clients: Clients) -> tuple[Clients, int]:
        """Return the table with bounded sizes, and how many were cut. An importance that follows from them follows."""
        sizes = clients.num_examples
        positive = sizes[sizes > 0]
        if self.most_size is None or len(positive) < _LEAST_SIZES:
            return clients, 0
        logs = np.log(positive)
        middle, spread = _middle(logs, _LEAST_SIZE_SPREAD)
        most = math.exp(min(middle + self.most_size * spread, 700.0))
        large = sizes > most * (1 + 1e-12)
        if not large.any():
            return clients, 0
        derived = np.array_equal(clients.importance, sizes / sizes.sum())
        bounded = np.where(large, most, sizes)
        importance = bounded / bounded.sum() if derived else clients.importance
        return replace(clients, num_examples=bounded, importance=importance), int(np.count_nonzero(large))


_GUARDS = {
    "off": Guard(cut=False, most_size=None),
    "mild": Guard(),
    "strict": Guard(exclude=True, newcomers=True, most_places=5.0, most_size=3.0),
}
_UNMET, _NEWCOMER, ESTABLISHED = 0, 1, 2


def guard_of(given: Guard | str | Mapping[str, Any]) -> Guard:
    """Return the guard of this name, the guard with these options, or the guard itself."""
    if isinstance(given, Guard):
        return given
    options = [item.name for item in fields(Guard)]
    if isinstance(given, Mapping) and set(given) <= set(options):
        return Guard(**given)
    if not (isinstance(given, str) and given in _GUARDS):
        raise InvalidInput(
            f"guard must be 'off', 'mild', 'strict', or a fedpick.Guard or table with {', '.join(options)}. "
            f"Got {given!r}."
        )
    return _GUARDS[given]


class Offer(NamedTuple):
    """Whom the policy may choose."""

    available: BoolArray
    notes: dict[str, Any]
    state: GuardState


@dataclass(frozen=True)
class GuardState:
    """What the guard knows of every client."""

    credibility: NDArray[np.float32] = per_client()
    """(N,) from 1, trusted, to 0."""
    latest: NDArray[np.float32] = per_client(axis=1)
    """(8, N) the latest values of the rows above; NaN: not known."""
    status: NDArray[np.int8] = per_client()
    """(N,) never available yet, a newcomer, or established: there in the first round, or chosen before."""
    places: NDArray[np.float32] | None = per_client()
    """(N,) places, fading by 1 % per round; None without `most_places`."""
    fair: NDArray[np.float32] | None = per_client()
    """(N,) the places that the clients would have had if all available ones were chosen equally often, likewise."""

    def __post_init__(self) -> None:
        if missing := LENGTH + 1 - len(self.latest):  # saved when fewer rows were compared
            unknown = np.full((missing, self.latest.shape[1]), np.nan, np.float32)
            assign(self, latest=np.concatenate([self.latest, unknown]))

    def offer(
        self,
        guard: Guard,
        available: BoolArray,
        wanted: int,
        first: bool,
        rng: np.random.Generator | None,
        group: IntArray | None = None,
    ) -> Offer:
        """Leave out clients of low credibility, newcomers beyond their share, clients and groups with too many places.

        `rng` rounds the share of newcomers; None: they are not bounded. `group` is that of the clients' table.
        """
        offered = available
        notes: dict[str, Any] = {}
        low = self.credibility < _TRUSTED
        if guard.exclude and low.any():
            offered = self._without(available, low, wanted)
        if guard.most_places is not None and self.places is not None and self.fair is not None:
            served = _too_many(self.places, self.fair, guard.most_places)
            if group is not None:
                places, fair = (np.bincount(group, weights=each) for each in (self.places, self.fair))
                served = served | _too_many(places, fair, guard.most_places)[group]
            offered = self._without(offered, served, wanted)
        status = self.status
        if rng is not None:
            met = available & (status == _UNMET)
            if met.any():
                status = np.where(met, np.int8(ESTABLISHED if first else _NEWCOMER), status)
            if (newcomer := status == _NEWCOMER).any():
                offered = _fair_share(offered, newcomer, wanted, rng)
        if hidden := int(np.count_nonzero(available)) - int(np.count_nonzero(offered)):
            notes["not_offered"] = hidden
        if low.any():
            notes["distrusted"] = np.flatnonzero(low)[:_SHOWN].tolist()
        return Offer(offered, notes, replace(self, status=status))

    def _without(self, available: BoolArray, bad: BoolArray, wanted: int) -> BoolArray:
        """The mask without the bad ones; with the most credible of them where too few are left."""
        good = available & ~bad
        missing = min(wanted, int(np.count_nonzero(available))) - int(np.count_nonzero(good))
        if missing > 0:
            rest = np.flatnonzero(available & bad)
            good = good.copy()
            good[rest[np.argsort(-self.credibility[rest], kind="stable")[:missing]]] = True
        return good

    def answered(
        self, guard: Guard, clients: IntArray, values: FloatArray, trial: bool
    ) -> tuple[FloatArray, GuardState, int]:
        """Take the losses that clients told a probe: -> (cut values, state, how many were cut).

        On the model of a trial cohort the losses are only cut: such a model is nobody's own.
        """
        logs = _logs(values)
        latest = self.latest.copy()
        jump = logs - latest[LOSS].take(clients)
        _put(latest[LOSS], clients, logs)
        usual = _usual(latest[LOSS], self.credibility)
        limit = usual.limit(_WIDE)
        doubtful = logs > limit
        state = self
        if not trial:
            _put(latest[JUMP], clients, jump)
            if guard.exclude:
                doubtful |= jump > _usual(latest[JUMP], self.credibility).limit(_NARROW)
            credibility = _judged(self.credibility, clients, doubtful, regain=None)
            state = replace(self, latest=latest, credibility=credibility)
        low = doubtful | self._unheard(guard, latest[LOSS], clients)
        cut_values, count = _cut(values, usual.most(low))
        if guard.exclude and doubtful.any():
            cut_values = np.where(doubtful, np.nan, cut_values)
        return cut_values, state, count

    def observe(self, guard: Guard, outcome: Outcome, probed: BoolArray | None) -> tuple[Outcome, GuardState, int]:
        """Take the reports of a round: -> (outcome as the policy sees it, state, how many values were cut)."""
        chosen = outcome.clients
        latest = self.latest.copy()
        told = np.where(np.isnan(outcome.loss), outcome.loss_rms, outcome.loss)
        logs = {
            LOSS: _logs(told),
            **{row: _logs(getattr(outcome, name)) for name, row in _LEVELS.items() if row != LOSS},
        }
        loss = np.fmax(logs[LOSS], logs[LOSS_RMS])
        if probed is not None:
            loss = np.where(probed[chosen], np.fmax(loss, latest[LOSS, chosen]), loss)
        logs[EXCESS] = logs[TRAIN_LOSS] - 2 * logs[NORM]
        logs[DISAGREEMENT] = loss - logs[TRAIN_LOSS]
        logs[JUMP] = logs[LOSS] - latest[LOSS, chosen]
        logs[LENGTH] = logs[NORM] - _usual(logs[NORM], self.credibility[chosen]).middle
        withheld = outcome.completed & np.isnan(logs[TRAIN_LOSS])
        doubtful = withheld & (guard.exclude and self._others_tell(TRAIN_LOSS))
        compared: dict[int, _Usual] = {}
        for row, values in logs.items():
            if _put(latest[row], chosen, values):
                compared[row] = usual = _usual(latest[row], self.credibility)
                if row in _LEVELS.values():
                    doubtful |= values > usual.limit(_WIDE)
                elif guard.exclude:
                    doubtful |= values > usual.limit(_NARROW)
        cut: dict[str, Any] = {}
        count = 0
        for name, row in _LEVELS.items():
            if row in compared:
                low = (row != NORM) & (doubtful | self._unheard(guard, latest[row], chosen))
                cut[name], more = _cut(getattr(outcome, name), compared[row].most(low))
                count += more
        if NORM in compared and outcome.sketch.size and (long := cut["update_norm"] < outcome.update_norm).any():
            cut["sketch"] = outcome.sketch.copy()
            cut["sketch"][long] *= (cut["update_norm"] / np.where(long, outcome.update_norm, 1.0))[long, None]
        credibility = _judged(self.credibility, chosen, doubtful, regain=outcome.completed)
        if guard.exclude and doubtful.any():
            for name in _TOLD:
                cut[name] = np.array(cut.get(name, getattr(outcome, name)))
                cut[name][doubtful] = np.nan
            cut["completed"] = outcome.completed & ~doubtful
        waiting = credibility < (_TRUSTED if guard.exclude else _HEARD)
        waiting[chosen] = False
        if waiting.any():
            credibility = np.where(waiting, credibility * np.float32(_RETURN), credibility)
        state = replace(self, latest=latest, credibility=credibility)
        if len(chosen) and (state.status[chosen] != ESTABLISHED).any():
            status = state.status.copy()
            status[chosen] = ESTABLISHED
            state = replace(state, status=status)
        return _with_reports(outcome, cut), state, count

    def _unheard(self, guard: Guard, row: NDArray[np.float32], clients: IntArray) -> BoolArray:
        """Whose losses win no place, in doubt or not: those of clients on probation.

        Under the strict guard also those of all clients until enough of them are known: the first known clients are
        those that a policy prefers, so liars may be most of them.
        """
        if guard.exclude and len(row) - np.count_nonzero(np.isnan(row)) < min(_ENOUGH_KNOWN, len(row) // 2):
            return np.full(len(clients), True)
        return np.asarray(self.credibility[clients] < _HEARD)

    def _others_tell(self, row: int) -> bool:
        """Whether most clients that sent an update before have told this number."""
        trained = np.count_nonzero(~np.isnan(self.latest[NORM]))
        told = np.count_nonzero(~np.isnan(self.latest[row]))
        return bool(trained >= _LEAST_KNOWN and 2 * told > trained)

    def served(self, available: BoolArray, chosen: IntArray) -> GuardState:
        """Count the places of a round, where they are bounded."""
        if self.places is None or self.fair is None:
            return self
        places, fair = self.places * np.float32(0.99), self.fair * np.float32(0.99)
        places[chosen] += 1
        there = int(np.count_nonzero(available))
        fair[available] += len(chosen) / max(there, 1)
        return replace(self, places=places, fair=fair)


def credibility_changes(before: GuardState, after: GuardState) -> dict[str, list[int]]:
    """Return the clients whose credibility fell below 1/2 between two states, and those whose rose above it again."""
    if before.credibility is after.credibility:
        return {}
    was, now = before.credibility < _TRUSTED, after.credibility < _TRUSTED
    changes = {"lost_credibility": now & ~was, "regained_credibility": was & ~now}
    return {name: np.flatnonzero(changed).tolist() for name, changed in changes.items() if changed.any()}


def limit_reference(values: Sequence[float], c: float, least_spread: float = _LEAST_SPREAD) -> float:
    """median + c * spread, in plain Python; infinite while too few values are known."""
    known = [value for value in values if not math.isnan(value)]
    if len(known) < _LEAST_KNOWN:
        return math.inf
    middle = statistics.median(known)
    return middle + c * max(1.4826 * statistics.median(abs(value - middle) for value in known), least_spread)


def _middle(values: NDArray[Any], least_spread: float = _LEAST_SPREAD) -> tuple[float, float]:
    """The median and the spread of finite values."""
    middle = _median(values)
    return middle, max(1.4826 * _median(np.abs(values - middle)), least_spread)


def _median(values: NDArray[Any]) -> float:
    """The median of finite values. `np.median` takes five times as long for a few values."""
    ordered = np.sort(values)
    return float(ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2


class _Usual(NamedTuple):
    """What a row of `latest` usually is."""

    middle: float
    spread: float

    def limit(self, c: float) -> float:
        """Above it a value is suspicious."""
        return self.middle + c * self.spread

    def most(self, low: BoolArray) -> float | FloatArray:
        """What a level counts at most: the limit, and the median for the clients marked in `low`."""
        limit = self.limit(_WIDE)
        return np.where(low, self.middle, limit) if low.any() else limit


def _usual(row: NDArray[np.float32], credibility: NDArray[np.float32]) -> _Usual:
    """The median and the spread of a row, from a sample of the clients if they are many.

    Clients on probation do not vote, unless they are most of the known ones.
    """
    step = max(1, len(row) // _SAMPLE)
    known = step * np.flatnonzero(~np.isnan(row[::step]))
    if step > 1 and len(known) < _SAMPLE // 4:  # few are known: take all of them
        known = np.flatnonzero(~np.isnan(row))
    voters = known[credibility[known] >= _HEARD]
    if 2 * len(voters) < len(known):
        voters = known
    values = row[voters].astype(np.float64)
    if len(values) == 0:
        return _Usual(math.inf, math.inf)
    middle, spread = _middle(values)
    return _Usual(middle, spread if len(values) >= _LEAST_KNOWN else math.inf)


def _put(row: NDArray[np.float32], clients: IntArray, values: NDArray[np.float32]) -> bool:
    """Write the known values into a row: -> whether there were any."""
    known = ~np.isnan(values)
    if known.all():
        row[clients] = values
        return len(values) > 0
    row[clients[known]] = values[known]
    return bool(known.any())


def _logs(values: FloatArray) -> NDArray[np.float32]:
    """The logarithms of positive values; NaN for the others, which are not compared."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs: NDArray[np.float32] = np.log(values).astype(np.float32)
    logs[~np.isfinite(logs)] = np.nan
    return logs


def _cut(values: FloatArray, limit: float | FloatArray) -> tuple[FloatArray, int]:
    """Cut the size of values at exp(limit), whatever their sign: -> (values, how many were cut)."""
    with np.errstate(over="ignore"):
        most = np.exp(limit)
    large = np.abs(values) > most  # False for NaN
    count = int(np.count_nonzero(large))
    return (np.clip(values, -most, most), count) if count else (values, 0)


def _judged(
    credibility: NDArray[np.float32], clients: IntArray, suspicious: BoolArray, regain: BoolArray | None
) -> NDArray[np.float32]:
    """Lower the credibility of suspicious clients; the others of those marked in `regain` get some back."""
    if regain is None and not suspicious.any():
        return credibility
    old = credibility[clients]
    better = old if regain is None else np.where(regain, old + np.float32(_REGAINED) * (1 - old), old)
    new = np.where(suspicious, old * np.float32(_KEPT), better)
    if np.array_equal(new, old):
        return credibility
    changed = credibility.copy()
    changed[clients] = new
    return changed


def _too_many(places: NDArray[Any], fair: NDArray[Any], most: float) -> BoolArray:
    """Whether places exceed `most` times the fair number by more than chance."""
    return np.asarray(places > most * fair + 3 * np.sqrt(fair) + 1)


def _fair_share(offered: BoolArray, newcomer: BoolArray, wanted: int, rng: np.random.Generator) -> BoolArray:
    """The mask with as many newcomers as their fair number of places, rounded at random, or as the budget needs.

    However many there are, they get a bounded share of the places.
    """
    fresh = np.flatnonzero(offered & newcomer)
    there = int(np.count_nonzero(offered))
    if len(fresh) == 0 or wanted >= there:
        return offered
    fair = wanted * min(len(fresh) / there, _MOST_NEWCOMERS)
    admitted = max(int(fair) + int(rng.random() < fair % 1), wanted - (there - len(fresh)))
    if admitted >= len(fresh):
        return offered
    mask = offered.copy()
    mask[rng.permutation(fresh)[admitted:]] = False
    return mask
