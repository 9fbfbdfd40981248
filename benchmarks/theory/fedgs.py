"""The quantities of FedGS's tables and figures: how even selection counts are, how diverse cohorts, how good a graph.

All functions work on plain arrays, for the selections of any policy. Only `draw_graph` needs Matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpick.core.arrays import FloatArray
from fedpick.core.errors import InvalidInput, MissingDependency
from fedpick.policies._graph import GraphRule, scaled, similarities

__all__ = [
    "EdgeScores",
    "best_edge_scores",
    "bias_factor",
    "count_histogram",
    "count_variance",
    "draw_graph",
    "edge_scores",
    "graph_layout",
    "graph_similarities",
    "mean_cohort_distance",
]

PAPER_THRESHOLDS = (0.0, 0.01, 0.05, 0.1, 0.5)
"""The values of epsilon among which table 3 takes the best."""


def count_variance(counts: ArrayLike) -> float:
    """Variance of the selection counts over the clients (eq. 6, with N - 1 in the denominator).

    >>> count_variance([1, 2, 3])
    1.0
    """
    values = np.asarray(counts, dtype=np.float64)
    return float(values.var(ddof=1)) if len(values) > 1 else 0.0


def count_histogram(counts: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(k, number of clients that were selected k times), every k from the smallest to the largest (figure 4).

    >>> count_histogram([3, 1, 3])
    (array([1, 2, 3]), array([1, 0, 2]))
    """
    values = np.asarray(counts, dtype=np.int64)
    if len(values) == 0:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    low = int(values.min())
    amounts = np.bincount(values - low)
    return np.arange(low, low + len(amounts)), amounts.astype(np.int64)


def mean_cohort_distance(distance: ArrayLike, cohort: ArrayLike) -> float:
    """The mean distance over the pairs of a cohort, 0 where there is no pair.

    The paper's g(S) (eq. 13) is this times m(m-1) / (N(N-1)), the same for every cohort of the same size m.
    """
    chosen = np.asarray(cohort, dtype=np.int64)
    if len(chosen) < 2:
        return 0.0
    within = np.asarray(distance, dtype=np.float64)[np.ix_(chosen, chosen)]
    return float((within.sum() - np.trace(within)) / (len(chosen) * (len(chosen) - 1)))


def bias_factor(num_examples: ArrayLike, budget: int) -> FloatArray:
    """gamma_k of eq. 22: how much more or less than its share of the data a client moves the model, on average.

    It holds for weights by data size and cohorts of `budget` clients that are all equally likely; 1 is unbiased. The
    derivation replaces the mean of a quotient by the quotient of means, so it is an approximation.

    >>> bias_factor([10, 10, 10], 2)
    array([1., 1., 1.])
    """
    sizes = np.asarray(num_examples, dtype=np.float64)
    count = len(sizes)
    if not 1 <= budget <= count:
        raise InvalidInput(f"budget must be between 1 and the number of clients, {count}. Got {budget}.")
    if count == 1:
        return np.ones(1)
    mean = sizes.mean()
    factor: FloatArray = 1 / (1 + (count - budget) / (budget * (count - 1)) * (sizes - mean) / mean)
    return factor


@dataclass(frozen=True)
class EdgeScores:
    """How well the edges of a graph predict those of the oracle's."""

    precision: float
    recall: float
    f1: float


def edge_scores(predicted: ArrayLike, oracle: ArrayLike) -> EdgeScores:
    """Precision, recall and F1 of the edges above the diagonal; 0 where a quotient has no denominator (table 3)."""
    built, true = np.asarray(predicted, dtype=bool), np.asarray(oracle, dtype=bool)
    if built.shape != true.shape or built.ndim != 2 or built.shape[0] != built.shape[1]:
        raise InvalidInput(f"Two square matrices of the same size are needed. Got {built.shape} and {true.shape}.")
    above = np.triu_indices(len(built), 1)
    built, true = built[above], true[above]
    hits = int((built & true).sum())
    precision = hits / built.sum() if built.any() else 0.0
    recall = hits / true.sum() if true.any() else 0.0
    both = precision + recall
    return EdgeScores(float(precision), float(recall), float(2 * precision * recall / both) if both else 0.0)


def graph_similarities(features: ArrayLike, *, cosine: bool = False, variant: str = "paper") -> FloatArray:
    """(N, N) similarities in [0, 1] as the graph uses them; an edge is where they reach epsilon.

    Args:
        features: (N, F) shares of labels or other features; updates or outputs with `cosine`.
        cosine: max(cosine, 0), for what models reveal (eqs. 11, 12).
        variant: "paper" or "code".
    """
    rule = GraphRule(variant=variant, cosine=cosine)
    rows = np.asarray(features, dtype=np.float64)
    return scaled(similarities(rows, rule), np.ones(len(rows), dtype=np.int64), rule)


def best_edge_scores(
    similarity: ArrayLike, oracle: ArrayLike, thresholds: Sequence[float] = PAPER_THRESHOLDS
) -> tuple[float, EdgeScores]:
    """(threshold, scores) with the highest F1: how table 3 compares similarities that live on different scales."""
    values = np.asarray(similarity, dtype=np.float64)
    scores = [(float(threshold), edge_scores(values >= threshold, oracle)) for threshold in thresholds]
    return max(scores, key=lambda item: item[1].f1)


def graph_layout(edges: ArrayLike, steps: int = 300) -> FloatArray:
    """(N, 2) positions for a drawing: linked clients attract, all clients repel each other.

    Forces as Fruchterman and Reingold (1991) have them, from a circle, without random numbers; O(N^2) per step.
    """
    linked = np.asarray(edges, dtype=bool)
    count = len(linked)
    angle = 2 * np.pi * np.arange(count) / max(count, 1)
    positions = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    ideal = np.sqrt(4.0 / max(count, 1))
    for step in range(steps):
        gaps = positions[:, None, :] - positions[None, :, :]  # (N, N, 2)
        length = np.maximum(np.sqrt((gaps**2).sum(axis=2)), 1e-3 * ideal)
        force = ideal**2 / length - np.where(linked, length**2 / ideal, 0.0)
        np.fill_diagonal(force, 0.0)
        move = (gaps * (force / length)[:, :, None]).sum(axis=1)
        reach = np.maximum(np.sqrt((move**2).sum(axis=1, keepdims=True)), 1e-12)
        positions = positions + move / reach * np.minimum(reach, 0.2 * (1 - step / steps))
    return positions - positions.mean(axis=0) if count else positions


def draw_graph(path: str | Path, edges: ArrayLike, shares: ArrayLike) -> None:
    """Draw a graph as figure 3 does: every client a pie of its labels, edges between similar clients.

    Args:
        path: of the image; its suffix decides the format.
        edges: (N, N) mask.
        shares: (N, L) share of each label.
    """
    figure_class, colour_map = _matplotlib()
    linked = np.asarray(edges, dtype=bool)
    positions = graph_layout(linked)
    parts = np.asarray(shares, dtype=np.float64)
    span = max(float(np.ptp(positions, axis=0).max()), 1e-9)
    figure = figure_class(figsize=(6, 6))
    axes = figure.add_subplot()
    for first, second in zip(*np.nonzero(np.triu(linked, 1)), strict=True):
        axes.plot(*positions[[first, second]].T, color="0.8", linewidth=0.5, zorder=0)
    colours = colour_map(np.arange(parts.shape[1]) % 20)
    for number, (position, part) in enumerate(zip(positions, parts, strict=True)):
        present = part > 0
        if present.any():
            centre, radius = (float(position[0]), float(position[1])), 0.03 * span
            axes.pie(part[present], colors=list(colours[present]), center=centre, radius=radius, frame=True)
        axes.annotate(str(number), position, ha="center", va="center", fontsize=6)
    low, high = positions.min(axis=0) - 0.08 * span, positions.max(axis=0) + 0.08 * span
    axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal")
    axes.axis("off")
    figure.savefig(path, bbox_inches="tight", dpi=130)


def _matplotlib() -> tuple[Any, Any]:
    """(Figure, the map of colours); not pyplot, whose global state belongs to the caller."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingDependency(
            "The picture of a graph needs Matplotlib. Install it with: pip install 'fedpick[report]'"
        ) from error
    return Figure, colormaps["tab20"]
