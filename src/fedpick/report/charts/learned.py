"""Charts of what a policy learned and reports: correlations, a map of the clients, CA-Fed's errors, diagnostics."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedpick.core.arrays import FloatArray, IntArray
from fedpick.core.errors import MissingDependency
from fedpick.experiments.store import FederationFacts
from fedpick.report.analysis import RunResults
from fedpick.report.charts.chart import Chart, Measure, PerRound, line_chart, numbers
from fedpick.report.material import Material, RunHistory

__all__ = ["charts", "cluster_order", "flat_map"]

_MOST_ROWS = 200
_MOST_POINTS = 1500
_MOST_VIEWS = 6
_FEWEST_FOR_TSNE = 30

_Found = tuple[int | None, FloatArray]
"""An array that a policy reported, and in which round, from 1; None: in its final state."""


def charts(material: Material) -> list[Chart | None]:
    """The section "appendix": inside the policies."""
    embedded: dict[int, _Found] = {}
    for _, run in material.by_turns():
        if len(embedded) < _MOST_VIEWS and (found := _embedding(material, run)) is not None:
            embedded[run.run.id] = found
    return [_matrix(material, embedded), _map(material, embedded), _bounds(material), _diagnostics(material)]


# Correlations and the map


def _some(size: int, most: int) -> IntArray:
    """Evenly spaced clients; all of them if there are at most `most`."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).astype(np.int64))


def _latest(material: Material, run: RunResults, name: str) -> _Found | None:
    """The last array of that name that the policy reported."""
    rounds = [index for index in material.store.array_names(run.run.id).get(f"policy/{name}", []) if index < run.wanted]
    if not rounds:
        return None
    return rounds[-1] + 1, np.asarray(material.store.array(run.run.id, rounds[-1], f"policy/{name}"), np.float64)


def _embedding(material: Material, run: RunResults) -> _Found | None:
    """(round, (N, d)): as reported by the policy; if it was too large to report, from the final state."""
    federation = material.federations.get(run.run.id)
    found = _latest(material, run, "embedding")
    if found is None:
        state = material.store.policy_state(run.run.id).get("embedding")
        found = None if state is None else (None, np.asarray(state, np.float64))
    if found is None or federation is None or found[1].ndim != 2:
        return None
    moment, array = found
    if array.shape[1] == federation.num_clients:
        array = array.T
    usable = array.shape[0] == federation.num_clients and np.isfinite(array).all() and array.any()
    return (moment, array) if usable else None


def _correlation(
    material: Material, run: RunResults, embedded: _Found | None
) -> tuple[int | None, FloatArray, IntArray] | None:
    """The round, the matrix of some clients, and those clients."""
    found = _latest(material, run, "correlation")
    if found is not None and found[1].ndim == 2 and np.isfinite(found[1]).all():
        rows = _some(len(found[1]), _MOST_ROWS)
        return found[0], found[1][np.ix_(rows, rows)], rows
    if embedded is None:
        return None
    rows = _some(len(embedded[1]), _MOST_ROWS)
    vectors = embedded[1][rows]
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = np.divide(vectors, length, out=np.zeros_like(vectors), where=length > 0)
    return embedded[0], vectors @ vectors.T, rows


def cluster_order(correlation: FloatArray) -> IntArray:
    """An order in which similar clients are neighbours: the leaves of an average-linkage tree."""
    if len(correlation) < 3:
        return np.arange(len(correlation))
    from scipy.cluster.hierarchy import leaves_list, linkage, optimal_leaf_ordering
    from scipy.spatial.distance import squareform

    distance = np.clip(1 - (correlation + correlation.T) / 2, 0, None)
    np.fill_diagonal(distance, 0)
    condensed = squareform(distance, checks=False)
    return np.asarray(leaves_list(optimal_leaf_ordering(linkage(condensed, "average"), condensed)), np.int64)


def _main_label(federation: FederationFacts | None, clients: IntArray) -> list[int] | None:
    """The label each client has most of."""
    if federation is None or federation.label_histogram is None:
        return None
    return [int(label) for label in federation.label_histogram[clients].argmax(axis=1)]


def _matrix(material: Material, embedded: Mapping[int, _Found]) -> Chart | None:
    """Correlations between clients, clusters together."""
    views: list[dict[str, Any]] = []
    shown = total = 0
    for policy, run in material.by_turns():
        found = _correlation(material, run, embedded.get(run.run.id)) if len(views) < _MOST_VIEWS else None
        if found is None:
            continue
        moment, matrix, rows = found
        order = cluster_order(matrix)
        federation = material.federations.get(run.run.id)
        shown, total = len(rows), federation.num_clients if federation else len(rows)
        views.append(
            {
                "policy": policy.label,
                "seed": run.run.seed,
                "round": moment,
                "clients": rows[order].tolist(),
                "labels": _main_label(federation, rows[order]),
                "matrix": numbers(matrix[np.ix_(order, order)], 3),
            }
        )
    if not views:
        return None
    part = "" if shown == total else f" {shown} of {total:,} clients, evenly spaced."
    return Chart(
        key="correlation",
        title="Correlation between clients",
        caption="As the policy learned it. Clients are ordered so that similar ones are neighbours: "
        f"blocks on the diagonal are clusters.{part}",
        kind="matrix",
        data={"views": views},
    )


def flat_map(vectors: FloatArray) -> tuple[str, FloatArray]:
    """(method, (N, 2)): t-SNE, which keeps neighbours together, or PCA for fewer than 30 clients."""
    centred = vectors - vectors.mean(axis=0)
    if vectors.shape[1] <= 2 or len(vectors) < _FEWEST_FOR_TSNE or not centred.any():
        left, scale, _ = np.linalg.svd(centred, full_matrices=False)
        flat = np.zeros((len(vectors), 2))
        kept = min(2, len(scale))
        flat[:, :kept] = left[:, :kept] * scale[:kept]
        return "PCA", flat
    try:
        from sklearn.manifold import TSNE
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise MissingDependency(
            "The map of clients needs scikit-learn. Install it with: pip install 'fedpick[report]'"
        ) from error
    # One thread: for so small a problem, several threads mostly wait for each other on a busy machine.
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")
        method = "exact" if len(vectors) <= 200 else "barnes_hut"
        perplexity = min(30.0, (len(vectors) - 1) / 4)
        flat = TSNE(perplexity=perplexity, init="pca", random_state=0, method=method).fit_transform(vectors)
    return "t-SNE", np.asarray(flat, np.float64)


def _map(material: Material, embedded: Mapping[int, _Found]) -> Chart | None:
    """A map of the clients: the policy considers neighbours similar."""
    views: list[dict[str, Any]] = []
    for policy, run in material.by_turns():
        if run.run.id not in embedded:
            continue
        moment, vectors = embedded[run.run.id]
        rows = _some(len(vectors), _MOST_POINTS)
        method, flat = flat_map(vectors[rows])
        views.append(
            {
                "policy": policy.label,
                "seed": run.run.seed,
                "round": moment,
                "method": method,
                "clients": rows.tolist(),
                "x": numbers(flat[:, 0], 4),
                "y": numbers(flat[:, 1], 4),
                "labels": _main_label(material.federations.get(run.run.id), rows),
                "chosen": run.counts[rows].tolist(),
            }
        )
    if not views:
        return None
    methods = " and ".join(sorted({view["method"] for view in views}))
    return Chart(
        key="embedding",
        title="Map of the clients",
        caption=f"Clients that the policy considers similar lie close together ({methods}). "
        "Colour: the label a client has most of; size: how often it was chosen.",
        kind="points",
        data={"views": views},
    )


# Diagnostics


def _numeric_diagnostics(material: Material) -> list[str]:
    """Names of the plain numbers that policies reported, in order of appearance."""
    return list(dict.fromkeys(name for run in material.all_begun() for name in _reported(material, run)))


def _reported(material: Material, run: RunResults) -> Mapping[str, FloatArray]:
    return material.histories[run.run.id].diagnostics


def _diagnostic(name: str) -> PerRound:
    def value(run: RunResults, history: RunHistory) -> FloatArray:
        found = history.diagnostics.get(name)
        return np.full(len(run.rounds["round"]), np.nan) if found is None else found

    return value


def _diagnostics(material: Material) -> Chart | None:
    measures = [Measure(name, name.replace("_", " "), _diagnostic(name)) for name in _numeric_diagnostics(material)]
    caption = "Every number that a policy reports about its own decisions, for the policies that report it."
    return line_chart(material, measures, key="diagnostics", title="What policies report", caption=caption, menu=True)


def _bounds(material: Material) -> Chart | None:
    """CA-Fed's two error terms and the number of clients it excludes."""
    names = ("epsilon_opt", "epsilon_bias", "excluded")
    if not set(names) <= set(_numeric_diagnostics(material)):
        return None
    measures = [Measure(name, name, _diagnostic(name)) for name in names]
    caption = (
        "ε_opt falls and ε_bias rises when clients are left out; CA-Fed minimises their sum. "
        "Below: how many clients it leaves out."
    )
    return line_chart(material, measures, key="bounds", title="CA-Fed's balance", caption=caption, kind="bounds")
