"""Generated federations: FedProx's Synthetic(alpha, beta), LEAF's synthetic set and the quadratic.

All three come with their clients: `groups` says who owns what, `client_features` holds what an oracle knows (the true
local parameters), and the partition `natural` deals them out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import FloatArray
from fedpick.core.errors import InvalidInput
from fedpick.core.rng import Purpose, stream
from fedpick.data.dealing import require
from fedpick.data.types import Dataset

__all__ = ["leaf_synthetic", "quadratic", "quadratic_optimum", "synthetic"]

_BLOCK = 1024  # clients


def _require_shape(num_clients: int, dimension: int, num_classes: int, test_fraction: float) -> None:
    require(num_clients >= 1, f"num_clients must be at least 1. Got {num_clients}.")
    require(dimension >= 1, f"dimension must be at least 1. Got {dimension}.")
    require(num_classes >= 2, f"num_classes must be at least 2. Got {num_classes}.")
    require(0 <= test_fraction < 1, f"test_fraction must be at least 0 and less than 1. Got {test_fraction}.")


def synthetic(
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    num_clients: int = 30,
    dimension: int = 60,
    num_classes: int = 10,
    sizes: str = "lognormal",
    size_mean: float = 4.0,
    size_spread: float = 2.0,
    size_offset: int = 50,
    spread: str = "std",
    test_fraction: float = 0.1,
    features: bool = True,
    seed: int = 0,
) -> Dataset:
    """Synthetic(alpha, beta) of FedProx: alpha moves the local models apart, beta the local inputs.

    Client k: u ~ N(0, alpha), W and b ~ N(u, 1); B ~ N(0, beta), v ~ N(B, 1), x ~ N(v, diag(j^-1.2)); y = argmax of
    W x + b. `spread="std"` reads alpha and beta as standard deviations, as the public code does; `"variance"` as
    variances, as the papers write. `sizes="lognormal"`: int(lognormal(size_mean, size_spread)) + size_offset;
    `"power-law"`: density proportional to n^-size_spread between size_offset and 200 times that. The last
    `test_fraction` of every client's examples make up the central test set (0: none, use a local test split).
    `features=False` leaves out the true models, (dimension + 1) * num_classes numbers per client.
    """
    _require_shape(num_clients, dimension, num_classes, test_fraction)
    require(spread in ("std", "variance"), f"spread must be 'std' or 'variance'. Got {spread!r}.")
    require(alpha >= 0 and beta >= 0, f"alpha and beta must be at least 0. Got alpha={alpha}, beta={beta}.")
    rng = stream(seed, 0, Purpose.DATA)
    counts = _draw_sizes(sizes, num_clients, size_mean, size_spread, size_offset, rng)
    scale_u, scale_b = (alpha, beta) if spread == "std" else (np.sqrt(alpha), np.sqrt(beta))

    def draw(number: int) -> tuple[FloatArray, FloatArray]:
        centres = rng.normal(0.0, scale_u, size=(number, 1, 1))
        models = rng.normal(centres, 1.0, size=(number, dimension + 1, num_classes))
        return models, rng.normal(rng.normal(0.0, scale_b, size=(number, 1)), 1.0, size=(number, dimension))

    info = {"alpha": alpha, "beta": beta, "sizes": sizes, "spread": spread, "seed": seed}
    x, y, models = _examples(counts, draw, (dimension + 1, num_classes), 0.0, features, rng)
    return _federated("synthetic", x, y, counts, num_classes, test_fraction, models, info)


def leaf_synthetic(
    *,
    num_clients: int = 100,
    dimension: int = 60,
    num_classes: int = 10,
    num_clusters: int = 1,
    cluster_shares: tuple[float, ...] | None = None,
    test_fraction: float = 0.1,
    features: bool = True,
    seed: int = 0,
) -> Dataset:
    """LEAF's synthetic set: local models are noisy mixtures of a few shared ones.

    Shared Q ~ N(0, 1) of shape (dimension + 1, classes, clusters); cluster c: mu ~ N(m, 1) with m ~ N(0, 1); client k
    of cluster c: u ~ N(mu_c, 0.1), w = Q u; B ~ N(0, 1), v ~ N(B, 1), x ~ N(v, diag(j^-1.2)); y = argmax of
    [1, x] w + N(0, 0.1). Sizes: min(int(lognormal(3, 2)) + 5, 1000). Clusters are drawn with `cluster_shares`.
    """
    _require_shape(num_clients, dimension, num_classes, test_fraction)
    require(num_clusters >= 1, f"num_clusters must be at least 1. Got {num_clusters}.")
    share = np.full(num_clusters, 1 / num_clusters) if cluster_shares is None else np.asarray(cluster_shares, float)
    require(
        share.shape == (num_clusters,) and bool((share >= 0).all()) and abs(float(share.sum()) - 1) < 1e-9,
        f"cluster_shares must be {num_clusters} shares that sum to 1. Got {cluster_shares}.",
    )
    rng = stream(seed, 0, Purpose.DATA)
    counts = np.minimum(rng.lognormal(3.0, 2.0, size=num_clients).astype(np.int64) + 5, 1000)
    shared = rng.standard_normal((dimension + 1, num_classes, num_clusters))
    cluster_means = rng.normal(rng.standard_normal((num_clusters, 1)), 1.0, size=(num_clusters, num_clusters))
    cluster = rng.choice(num_clusters, size=num_clients, p=share)
    mixtures = iter(np.array_split(rng.normal(cluster_means[cluster], 0.1), _blocks(num_clients)))  # of (N, clusters)

    def draw(number: int) -> tuple[FloatArray, FloatArray]:
        models = np.einsum("dcs,ns->ndc", shared, next(mixtures))
        return models, rng.normal(rng.standard_normal((number, 1)), 1.0, size=(number, dimension))

    info = {"num_clusters": num_clusters, "seed": seed}
    x, y, models = _examples(counts, draw, (dimension + 1, num_classes), 0.1, features, rng)
    return _federated("leaf-synthetic", x, y, counts, num_classes, test_fraction, models, info)


def _draw_sizes(
    kind: str, num_clients: int, mean: float, spread: float, offset: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    require(offset >= 1, f"size_offset must be at least 1, so that nobody is left without data. Got {offset}.")
    if kind == "lognormal":
        return rng.lognormal(mean, spread, size=num_clients).astype(np.int64) + offset
    if kind == "power-law":
        require(spread > 1, f"A power law needs size_spread, its exponent, above 1. Got {spread}.")
        # Inverse of the distribution function of a density ~ n^-spread on [1, 200] offsets.
        tail = 1.0 - spread
        u = rng.random(num_clients)
        multiple = (1.0 - u * (1.0 - 200.0**tail)) ** (1.0 / tail)
        return np.asarray(np.floor(offset * multiple), dtype=np.int64)
    raise InvalidInput(f"sizes must be 'lognormal' or 'power-law'. Got {kind!r}.")


def _blocks(num_clients: int) -> range:
    """The first client of every block but the first: places to split an array of clients."""
    return range(_BLOCK, num_clients, _BLOCK)


def _examples(
    counts: NDArray[np.int64],
    draw: Callable[[int], tuple[FloatArray, FloatArray]],
    model_shape: tuple[int, int],
    noise: float,
    keep_models: bool,
    rng: np.random.Generator,
) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32] | None]:
    """Examples around the clients' means, labelled by their linear models; and the models, flat, if asked for.

    `draw(number)` gives the next clients' models (number, dimension + 1, classes), row 0 the bias, and their means.
    Clients are made in blocks, so that memory stays near the size of the result.
    """
    dimension = model_shape[0] - 1
    x = np.empty((int(counts.sum()), dimension), dtype=np.float32)
    y = np.empty(len(x), dtype=np.int32)
    kept = np.empty((len(counts), *model_shape), dtype=np.float32) if keep_models else None
    deviation = np.arange(1, dimension + 1) ** -0.6  # the root of j^-1.2
    ends = np.cumsum(counts)
    for first in range(0, len(counts), _BLOCK):
        models, means = draw(min(_BLOCK, len(counts) - first))
        if kept is not None:
            kept[first : first + _BLOCK] = models
        for client, (model, mean) in enumerate(zip(models, means, strict=True), start=first):
            rows = slice(ends[client] - counts[client], ends[client])
            inputs = mean + rng.standard_normal((counts[client], dimension)) * deviation
            scores = inputs @ model[1:] + model[0]
            if noise:
                scores += rng.normal(0.0, noise, size=scores.shape)
            x[rows], y[rows] = inputs, scores.argmax(axis=1)
    return x, y, None if kept is None else kept.reshape(len(counts), -1)


def _federated(
    name: str,
    x: NDArray[np.float32],
    y: NDArray[np.int32],
    counts: NDArray[np.int64],
    num_classes: int,
    test_fraction: float,
    features: NDArray[np.float32] | None,
    info: dict[str, Any],
) -> Dataset:
    """The last `test_fraction` of each client's examples go to the test set."""
    owner = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    if test_fraction:
        place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        test = place >= np.repeat(np.maximum(np.floor((1 - test_fraction) * counts + 1e-6), 1), counts)
        x, y, owner, test_x, test_y = x[~test], y[~test], owner[~test], x[test], y[test]
    else:
        test_x, test_y = x[:0], y[:0]
    return Dataset(
        name=name,
        train_x=x,
        train_y=y,
        test_x=test_x,
        test_y=test_y,
        num_classes=num_classes,
        groups=owner,
        client_features=features,
        info=info,
    )


def quadratic(
    *,
    num_clients: int = 30,
    dimension: int = 5,
    curvature: tuple[float, float] = (1.0, 20.0),
    linear: tuple[float, float] = (0.0, 100.0),
    exponent: float = 3.0,
    seed: int = 0,
) -> Dataset:
    """The quadratic of Power-of-Choice, appendix F: F_k(w) = 1/2 w'H_k w - e_k'w + 1/2 e_k'H_k^-1 e_k.

    Each client has exactly one "example": `train_x[k, 0]` is the diagonal of H_k = h_k I with h_k ~ U(curvature),
    `train_x[k, 1]` is e_k ~ U(linear); labels are 0 and unused. Local steps are full-gradient steps on F_k.
    `client_sizes` are draws from the power distribution a x^(a-1) on [0, 1], a = `exponent`: the paper's p_k once
    normalised. The paper leaves e_k open; U(0, 100) is what its public reproduction uses.
    """
    _require_shape(num_clients, dimension, 2, 0.0)
    require(0 < curvature[0] <= curvature[1], f"curvature must be 0 < low <= high. Got {curvature}.")
    require(linear[0] <= linear[1], f"linear must be low <= high. Got {linear}.")
    require(exponent > 0, f"exponent must be above 0. Got {exponent}.")
    rng = stream(seed, 0, Purpose.DATA)
    diagonal = np.repeat(rng.uniform(*curvature, size=(num_clients, 1)), dimension, axis=1)
    vectors = rng.uniform(*linear, size=(num_clients, dimension))
    examples = np.stack([diagonal, vectors], axis=1).astype(np.float32)
    return Dataset(
        name="quadratic",
        train_x=examples,
        train_y=np.zeros(num_clients, np.float32),
        test_x=examples[:0],
        test_y=np.zeros(0, np.float32),
        num_classes=0,
        groups=np.arange(num_clients, dtype=np.int32),
        client_sizes=rng.power(exponent, size=num_clients),
        client_features=examples.reshape(num_clients, -1),
        info={"curvature": curvature, "linear": linear, "exponent": exponent, "seed": seed},
    )


def quadratic_optimum(dataset: Dataset) -> tuple[FloatArray, float]:
    """The w that minimises sum_k p_k F_k of a quadratic data set, and the value there."""
    require(
        dataset.num_classes == 0 and dataset.client_sizes is not None,
        f"quadratic_optimum needs the data set 'quadratic'. Got {dataset.name!r}.",
    )
    sizes = np.asarray(dataset.client_sizes, dtype=np.float64)
    p = sizes / sizes.sum()
    diagonal, vectors = dataset.train_x[:, 0].astype(np.float64), dataset.train_x[:, 1].astype(np.float64)
    w = (p @ vectors) / (p @ diagonal)
    local = 0.5 * (diagonal * (w - vectors / diagonal) ** 2).sum(axis=1)
    return w, float(p @ local)
