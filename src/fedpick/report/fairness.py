"""Fairness in outcome: how good the final model of a run is for each of its clients.

Selection tells who works; this tells who benefits. The accuracy of every client is measured once, on the final model
(`Store.client_accuracies`). Everything here is derived from it, from the table of clients and from the stored masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fedpick.core.arrays import FloatArray, IntArray
from fedpick.experiments.store import FederationFacts, Store
from fedpick.report.analysis import Results, RunResults

__all__ = ["PARTS", "Fairness", "fairness_of", "groups_of_clients", "jain_index", "tenths"]

PARTS = {
    "test": "its own test data",
    "validation": "its own validation data",
    "train": "its own training data",
    "own": "its own data, as recorded",
}
"""What the accuracy of a client was measured on."""
_MOST_LABELS = 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Fairness:
    """How good the final model of one run is for its clients."""

    part: str
    """One of PARTS."""
    rounds: int
    """Rounds done when it was measured."""
    accuracies: FloatArray
    """(N,) NaN for a client without such data."""
    groups: Mapping[str, Mapping[str, float]]
    """Grouping ("size", "availability", "label") -> group -> mean accuracy; groupings with one group are left out."""

    @property
    def known(self) -> FloatArray:
        """The accuracies of the clients that have one."""
        return self.accuracies[np.isfinite(self.accuracies)]

    @property
    def mean(self) -> float:
        """Over the clients, all alike."""
        return float(self.known.mean())

    @property
    def worst_tenth(self) -> float:
        """Mean of the tenth of the clients with the lowest accuracy, rounded up to whole clients."""
        return float(np.sort(self.known)[: -(-len(self.known) // 10)].mean())

    @property
    def jain(self) -> float | None:
        """Jain's index of the accuracies: 1 if all are equal, 1/N if one client has all of it."""
        return jain_index(self.known)


def jain_index(values: FloatArray | IntArray) -> float | None:
    """(sum of values)^2 / (N * sum of squares); None if all are 0.

    >>> jain_index(np.array([1.0, 1.0, 0.0, 0.0]))
    0.5
    """
    squares = len(values) * float((np.asarray(values, np.float64) ** 2).sum())
    return float(values.sum()) ** 2 / squares if squares > 0 else None


def tenths(values: FloatArray) -> FloatArray:
    """(10,) mean of each tenth of the values, the lowest first; NaN for a tenth without any."""
    ranked = np.sort(values)
    edges = np.arange(11) * len(ranked) // 10
    return np.array([ranked[low:high].mean() if high > low else np.nan for low, high in pairwise(edges)])


def fairness_of(
    store: Store, results: Results, availability: Mapping[int, FloatArray] | None = None
) -> dict[int, Fairness]:
    """The fairness of every run whose final model was measured, by run id.

    `availability`: run id -> (N,) the share of the rounds in which each client was available; None: read it.
    """
    federations: dict[int, FederationFacts] = {}
    found = {}
    for run in (run for policy in results.policies for run in policy.runs):
        number, rounds = run.run.federation_id, len(run.rounds["round"])
        measured = store.client_accuracies(run.run.id, rounds) if number is not None and rounds else None
        if number is None or measured is None or not np.isfinite(measured.values).any():
            continue
        if number not in federations:
            federations[number] = store.federation(number)
        facts = federations[number]
        accuracies = np.full(facts.num_clients, np.nan)
        accuracies[: len(measured.values)] = measured.values[: facts.num_clients]
        known = _availability(store, run, facts.num_clients) if availability is None else availability[run.run.id]
        groupings = groups_of_clients(facts, known)
        found[run.run.id] = Fairness(
            part=measured.part,
            rounds=measured.rounds,
            accuracies=accuracies,
            groups={by: _means(accuracies, names, member) for by, (names, member) in groupings.items()},
        )
    return found


def _availability(store: Store, run: RunResults, num_clients: int) -> FloatArray:
    """(N,) share of the rounds in which each client was available."""
    present, rounds = np.zeros(num_clients), 0
    for choices in store.choices(run.run.id, limit=run.wanted):
        present += choices.available.sum(axis=0)
        rounds += len(choices.available)
    return present / max(rounds, 1)


def groups_of_clients(facts: FederationFacts, availability: FloatArray) -> dict[str, tuple[list[str], IntArray]]:
    """Grouping -> (names of the groups, (N,) the group of each client); without groupings in which all are alike."""
    found: dict[str, tuple[list[str], IntArray]] = {}
    for by, values, names in (
        ("size", facts.num_examples, ["fewest examples", "middle third", "most examples"]),
        ("availability", availability, ["less often available", "more often available"]),
    ):
        if len(values) >= len(names) and values.max() > values.min():
            rank = np.empty(len(values), np.int64)
            rank[np.argsort(values, kind="stable")] = np.arange(len(values))
            found[by] = (names, rank * len(names) // len(values))
    if facts.label_histogram is not None and 1 < facts.num_classes <= _MOST_LABELS:
        labels = [f"label {label}" for label in range(facts.num_classes)]
        found["label"] = (labels, facts.label_histogram.argmax(axis=1).astype(np.int64))
    return found


def _means(values: FloatArray, names: list[str], member: IntArray) -> dict[str, float]:
    known = np.isfinite(values)
    count = np.bincount(member[known], minlength=len(names))
    total = np.bincount(member[known], weights=values[known], minlength=len(names))
    return {name: float(total[place] / count[place]) for place, name in enumerate(names) if count[place]}
