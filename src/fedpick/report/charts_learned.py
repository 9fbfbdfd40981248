"""Charts of what a policy learned about its clients: correlations, ordered by cluster, and a map in two dimensions."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import FloatArray
from fedpick.experiments.store_read import FederationFacts
from fedpick.report.analysis import RunResults
from fedpick.report.charts_base import Chart, Material, numbers

__all__ = ["cluster_order", "embedding_chart", "flat_map", "matrix_chart"]

_MOST_ROWS = 200
_MOST_POINTS = 1500
_MOST_VIEWS = 6
_FEWEST_FOR_TSNE = 30


def _some(size: int, most: int) -> NDArray[np.int64]:
    """Evenly spaced clients, all of them where they fit."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).astype(np.int64))


def _latest(material: Material, run: RunResults, name: str) -> tuple[int | None, FloatArray] | None:
    """The last array of that name that the policy reported: (round from 1, array)."""
    rounds = [index for index in material.store.array_names(run.run.id).get(f"policy/{name}", []) if index < run.wanted]
    if not rounds:
        return None
    return rounds[-1] + 1, np.asarray(material.store.array(run.run.id, rounds[-1], f"policy/{name}"), np.float64)


def _embedding(material: Material, run: RunResults) -> tuple[int | None, FloatArray] | None:
    """(N, d): reported by the policy, or (too large to be reported every time) from its state at the end."""
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


def _correlation(material: Material, run: RunResults) -> tuple[int | None, FloatArray, NDArray[np.int64]] | None:
    """(round, matrix of some clients, those clients)."""
    found = _latest(material, run, "correlation")
    if found is not None and found[1].ndim == 2 and np.isfinite(found[1]).all():
        rows = _some(len(found[1]), _MOST_ROWS)
        return found[0], found[1][np.ix_(rows, rows)], rows
    embedded = _embedding(material, run)
    if embedded is None:
        return None
    rows = _some(len(embedded[1]), _MOST_ROWS)
    vectors = embedded[1][rows]
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = np.divide(vectors, length, out=np.zeros_like(vectors), where=length > 0)
    return embedded[0], vectors @ vectors.T, rows


def cluster_order(correlation: FloatArray) -> NDArray[np.int64]:
    """An order in which similar clients are neighbours: the leaves of an average-linkage tree."""
    if len(correlation) < 3:
        return np.arange(len(correlation))
    from scipy.cluster.hierarchy import leaves_list, linkage, optimal_leaf_ordering
    from scipy.spatial.distance import squareform

    distance = np.clip(1 - (correlation + correlation.T) / 2, 0, None)
    np.fill_diagonal(distance, 0)
    condensed = squareform(distance, checks=False)
    return np.asarray(leaves_list(optimal_leaf_ordering(linkage(condensed, "average"), condensed)), np.int64)


def _main_label(federation: FederationFacts | None, clients: NDArray[np.int64]) -> list[int] | None:
    """The label each client has most of."""
    if federation is None or federation.label_histogram is None:
        return None
    return [int(label) for label in federation.label_histogram[clients].argmax(axis=1)]


def _learners(material: Material) -> list[tuple[str, RunResults]]:
    """Runs that may have learned something, first seeds first."""
    pairs = [(policy.label, material.begun(policy)) for policy in material.results.policies]
    most = max((len(runs) for _, runs in pairs), default=0)
    return [(label, runs[turn]) for turn in range(most) for label, runs in pairs if turn < len(runs)]


def matrix_chart(material: Material) -> Chart | None:
    """Correlations between clients, clusters together."""
    views: list[dict[str, Any]] = []
    shown = total = 0
    for label, run in _learners(material):
        found = _correlation(material, run) if len(views) < _MOST_VIEWS else None
        if found is None:
            continue
        moment, matrix, rows = found
        order = cluster_order(matrix)
        federation = material.federations.get(run.run.id)
        shown, total = len(rows), federation.num_clients if federation else len(rows)
        views.append(
            {
                "policy": label,
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
    """Two dimensions that keep neighbours together: t-SNE, or PCA where there are few clients; the method's name."""
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
        from fedpick.core.errors import MissingDependency

        raise MissingDependency(
            "The map of clients needs scikit-learn. Install it with: pip install 'fedpick[report]'"
        ) from error
    # One thread: on a busy machine the threads of so small a problem spend their time waiting for each other.
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")
        method = "exact" if len(vectors) <= 200 else "barnes_hut"
        perplexity = min(30.0, (len(vectors) - 1) / 4)
        flat = TSNE(perplexity=perplexity, init="pca", random_state=0, method=method).fit_transform(vectors)
    return "t-SNE", np.asarray(flat, np.float64)


def embedding_chart(material: Material) -> Chart | None:
    """A map of the clients: near means similar to the policy."""
    views: list[dict[str, Any]] = []
    for label, run in _learners(material):
        found = _embedding(material, run) if len(views) < _MOST_VIEWS else None
        if found is None:
            continue
        moment, vectors = found
        rows = _some(len(vectors), _MOST_POINTS)
        method, flat = flat_map(vectors[rows])
        views.append(
            {
                "policy": label,
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
        caption=f"Clients that the policy takes for similar lie close together ({methods}). "
        "Colour: the label a client has most of; size: how often it was chosen.",
        kind="points",
        data={"views": views},
    )
