"""What liars gained in a stored run, and whom the guard distrusted when. The liars follow from the run's settings.

Rounds are counted from 1, as in all tables. A store written before rounds recorded who lost credibility has only the
first hundred distrusted clients of every round: those who lost it in the round before, or earlier.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedpick.core.arrays import BoolArray, FloatArray
from fedpick.core.errors import InvalidInput
from fedpick.core.guard import guard_of
from fedpick.experiments.settings import typed
from fedpick.report.analysis import RunResults
from fedpick.sim import Attacks

__all__ = ["Doubt", "captured", "doubts_of", "false_alarms", "found", "found_by", "liars_of", "over_fair"]


@dataclass(frozen=True)
class Doubt:
    """A client that lost credibility."""

    client: int
    lost_in: int
    """The first round in which its credibility fell below 1/2."""
    regained_in: int | None
    """The first round after it in which the guard trusted the client again; None: never, or not known."""
    times: int
    """How often it lost credibility."""
    liar: bool


def liars_of(results: RunResults) -> BoolArray | None:
    """(N,) who lied in this run; None if nobody did."""
    settings = results.run.settings
    if not settings.get("attacks"):
        return None
    attacks = typed(Attacks, settings["attacks"])
    if attacks.group is None:
        return attacks.liars(settings["seed"], len(results.counts))
    lying = np.zeros(len(results.counts), dtype=bool)
    try:
        lying[results.run.manifest["simulator"]["attacks"]["clients"]] = True
    except (KeyError, IndexError, TypeError) as error:
        raise InvalidInput(
            f"The manifest of {results.run.label} does not name its liars. Run `fedpick verify` on the store."
        ) from error
    return lying


def captured(results: RunResults) -> float | None:
    """The liars' share of all places."""
    lying, total = liars_of(results), results.counts.sum()
    return None if lying is None or total == 0 else float(results.counts[lying].sum() / total)


def over_fair(results: RunResults) -> float | None:
    """The same over their share of the clients."""
    lying, share = liars_of(results), captured(results)
    return None if lying is None or share is None or not lying.any() else share / float(lying.mean())


def doubts_of(results: RunResults) -> list[Doubt]:
    """The clients that lost credibility, in the order in which they did."""
    lost: dict[int, list[int]] = {}
    for index in sorted(results.lost):
        for client in results.lost[index].tolist():
            lost.setdefault(client, []).append(index + 1)
    for index, notes in enumerate(results.rounds.get("diagnostics", ())):
        for client in notes.get("distrusted", ()):
            lost.setdefault(client, [index])
    regained: dict[int, int] = {}
    for index in sorted(results.regained):
        for client in results.regained[index].tolist():
            if client in lost and index + 1 > lost[client][0]:
                regained.setdefault(client, index + 1)
    lying = liars_of(results)
    liars = set() if lying is None else set(np.flatnonzero(lying).tolist())
    doubts = [
        Doubt(client, rounds[0], regained.get(client), len(rounds), client in liars) for client, rounds in lost.items()
    ]
    return sorted(doubts, key=lambda doubt: (doubt.lost_in, doubt.client))


def _first_rounds(results: RunResults, of_liars: bool) -> FloatArray | None:
    """The round in which each liar, or each honest client, lost credibility; infinite: never.

    None without a guard, without liars, or without such clients.
    """
    lying = liars_of(results)
    if lying is None or not guard_of(results.run.settings.get("guard", "mild")).cut or not (lying == of_liars).any():
        return None
    first = np.full(len(lying), np.inf)
    for doubt in doubts_of(results):
        if doubt.client < len(first):
            first[doubt.client] = doubt.lost_in
    wanted: FloatArray = first[lying == of_liars]
    return wanted


def _share(results: RunResults, of_liars: bool) -> float | None:
    first = _first_rounds(results, of_liars)
    return None if first is None else float(np.mean(np.isfinite(first)))


def found(results: RunResults) -> float | None:
    """The share of the liars that were ever distrusted."""
    return _share(results, of_liars=True)


def false_alarms(results: RunResults) -> float | None:
    """The share of the honest clients that were ever distrusted."""
    return _share(results, of_liars=False)


def found_by(results: RunResults) -> float | None:
    """The round by which half of the liars were distrusted; None: never."""
    first = _first_rounds(results, of_liars=True)
    if first is None:
        return None
    last_of_half = float(np.sort(first)[(len(first) - 1) // 2])
    return last_of_half if np.isfinite(last_of_half) else None
