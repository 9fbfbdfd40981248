"""What liars gained in a stored run, and whom the guard distrusted when. The liars follow from the run's settings."""

from __future__ import annotations

import numpy as np

from fedpick.core.arrays import BoolArray
from fedpick.core.errors import InvalidInput
from fedpick.core.guard import guard_of
from fedpick.experiments.settings import typed
from fedpick.report.analysis import RunResults
from fedpick.sim import Attacks

__all__ = ["captured", "false_alarms", "found", "found_by", "liars_of", "over_fair"]


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


def _first_rounds(results: RunResults) -> np.ndarray | None:
    """(N,) the first round in which the guard distrusted each client; NaN: never. None without a guard or liars."""
    if liars_of(results) is None or not guard_of(results.run.settings.get("guard", "mild")).cut:
        return None
    first = np.full(len(results.counts), np.nan)
    for index, notes in enumerate(results.rounds["diagnostics"]):
        for client in notes.get("distrusted", ()):
            if np.isnan(first[client]):
                first[client] = index
    return first


def _share(results: RunResults, of_liars: bool) -> float | None:
    first, lying = _first_rounds(results), liars_of(results)
    if first is None or lying is None or not (lying == of_liars).any():
        return None
    return float(np.mean(~np.isnan(first[lying == of_liars])))


def found(results: RunResults) -> float | None:
    """The share of the liars that were ever distrusted."""
    return _share(results, of_liars=True)


def false_alarms(results: RunResults) -> float | None:
    """The share of the honest clients that were ever distrusted."""
    return _share(results, of_liars=False)


def found_by(results: RunResults) -> float | None:
    """The round by which half of the liars were distrusted; None: never."""
    first, lying = _first_rounds(results), liars_of(results)
    if first is None or lying is None or not lying.any():
        return None
    middle = float(np.median(np.where(np.isnan(first), np.inf, first)[lying]))
    return middle if np.isfinite(middle) else None
