"""Generated federations: FedProx's Synthetic(alpha, beta), LEAF's synthetic set and the quadratic.

All three come with their clients: `groups` holds the owner of every example, `client_features` the true local
parameters (an oracle's knowledge), and the partition `natural` keeps these clients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import FloatArray
from fedpick.core.errors import InvalidInput
from fedpick.core.rng import Purpose, stream
from fedpick.core.validation import choice, number, require, whole
from fedpick.data.types import Dataset

__all__ = ["LeafSynthetic", "Quadratic", "Synthetic", "quadratic_optimum"]

_BLOCK = 1024  # clients


def _check_shape(settings: Synthetic | LeafSynthetic) -> None:
    whole(settings, "num_clients", 1)
    whole(settings, "dimension", 1)
    whole(settings, "num_classes", 2)
    number(settings, "test_fraction", "[0, 1)")


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Synthetic(alpha, beta) of FedProx: beta moves the local inputs apart; alpha was meant to move the local models.

    Client k: u ~ N(0, alpha), W and b ~ N(u, 1); B ~ N(0, beta), v ~ N(B, 1), x ~ N(v, diag(j^-1.2)); y = argmax of
    W x + b. The one number u raises the scores of all classes alike, so alpha changes no label: the data of all alphas
    are equal, and the local models are independent draws even with alpha = 0. Only `client_features` depend on alpha.
    `models="mixed"` is our variant in which alpha does what its name promises.
    """

    alpha: float = 1.0
    beta: float = 1.0
    num_clients: int = 30
    dimension: int = 60
    num_classes: int = 10
    sizes: Literal["lognormal", "power-law"] = "lognormal"
    """"lognormal": int(lognormal(size_mean, size_spread)) + size_offset; "power-law": density proportional to
    n^-size_spread between size_offset and 200 times that."""
    size_mean: float = 4.0
    size_spread: float = 2.0
    size_offset: int = 50
    spread: Literal["std", "variance"] = "std"
    """"std" reads alpha and beta as standard deviations, as the public code does; "variance" as in the papers."""
    models: Literal["shifted", "mixed"] = "shifted"
    """"shifted": FedProx's, as above; "mixed", ours: W and b are one draw from N(0, 1) for all clients plus N(0, alpha)
    for each, entry by entry. With alpha = 0 all clients have one model."""
    test_fraction: float = 0.1
    """The last share of every client's examples makes up the central test set; 0: use a local test split."""
    features: bool = True
    """False leaves out the true models, (dimension + 1) * num_classes numbers per client."""
    seed: int = 0

    def __post_init__(self) -> None:
        _check_shape(self)
        for name in ("alpha", "beta"):
            number(self, name, "[0, inf)")
        choice(self, "spread", ("std", "variance"))
        choice(self, "models", ("shifted", "mixed"))
        choice(self, "sizes", ("lognormal", "power-law"))
        whole(self, "size_offset", 1)
        if self.sizes == "power-law":  # it is the exponent there
            number(self, "size_spread", "(1, inf)")

    def load(self) -> Dataset:
        """Draw the clients and their examples."""
        rng = stream(self.seed, 0, Purpose.DATA)
        counts = self._draw_sizes(rng)
        deviations = self.spread == "std"
        scale_u, scale_b = (self.alpha, self.beta) if deviations else (np.sqrt(self.alpha), np.sqrt(self.beta))
        model_shape = (self.dimension + 1, self.num_classes)
        common = rng.standard_normal(model_shape) if self.models == "mixed" else None

        def draw(number: int) -> tuple[FloatArray, FloatArray]:
            if common is None:
                centres = rng.normal(0.0, scale_u, size=(number, 1, 1))
                models = rng.normal(centres, 1.0, size=(number, *model_shape))
            else:
                models = rng.normal(common, scale_u, size=(number, *model_shape))
            return models, rng.normal(rng.normal(0.0, scale_b, size=(number, 1)), 1.0, size=(number, self.dimension))

        info = {
            "alpha": self.alpha,
            "beta": self.beta,
            "sizes": self.sizes,
            "spread": self.spread,
            "models": self.models,
            "seed": self.seed,
        }
        x, y, models = _examples(counts, draw, model_shape, 0.0, self.features, rng)
        return _federated("synthetic", x, y, counts, self.num_classes, self.test_fraction, models, info)

    def _draw_sizes(self, rng: np.random.Generator) -> NDArray[np.int64]:
        if self.sizes == "lognormal":
            drawn = rng.lognormal(self.size_mean, self.size_spread, size=self.num_clients)
            return drawn.astype(np.int64) + self.size_offset
        # Inverse of the distribution function of a density ~ n^-spread on [1, 200] offsets.
        tail = 1.0 - self.size_spread
        u = rng.random(self.num_clients)
        multiple = (1.0 - u * (1.0 - 200.0**tail)) ** (1.0 / tail)
        return np.asarray(np.floor(self.size_offset * multiple), dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class LeafSynthetic:
    """LEAF's synthetic set: local models are noisy mixtures of a few shared ones.

    Shared Q ~ N(0, 1) of shape (dimension + 1, classes, clusters); cluster c: mu ~ N(m, 1) with m ~ N(0, 1); client k
    of cluster c: u ~ N(mu_c, 0.1), w = Q u; B ~ N(0, 1), v ~ N(B, 1), x ~ N(v, diag(j^-1.2)); y = argmax of
    [1, x] w + N(0, 0.1). Sizes: min(int(lognormal(3, 2)) + 5, 1000). Clusters are drawn with `cluster_shares`.
    """

    num_clients: int = 100
    dimension: int = 60
    num_classes: int = 10
    num_clusters: int = 1
    cluster_shares: tuple[float, ...] | None = None
    test_fraction: float = 0.1
    features: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        _check_shape(self)
        count = whole(self, "num_clusters", 1)
        share = self._shares()
        valid = share.shape == (count,) and bool((share >= 0).all()) and abs(float(share.sum()) - 1) < 1e-9
        require(valid, self, "cluster_shares", f"{count} shares that sum to 1")

    def _shares(self) -> FloatArray:
        if self.cluster_shares is None:
            return np.full(self.num_clusters, 1 / self.num_clusters)
        return np.asarray(self.cluster_shares, float)

    def load(self) -> Dataset:
        """Draw the clients and their examples."""
        rng = stream(self.seed, 0, Purpose.DATA)
        model_shape, clusters = (self.dimension + 1, self.num_classes), self.num_clusters
        counts = np.minimum(rng.lognormal(3.0, 2.0, size=self.num_clients).astype(np.int64) + 5, 1000)
        shared = rng.standard_normal((*model_shape, clusters))
        cluster_means = rng.normal(rng.standard_normal((clusters, 1)), 1.0, size=(clusters, clusters))
        cluster = rng.choice(clusters, size=self.num_clients, p=self._shares())
        # (N, clusters), block by block
        mixtures = iter(np.array_split(rng.normal(cluster_means[cluster], 0.1), _blocks(self.num_clients)))

        def draw(number: int) -> tuple[FloatArray, FloatArray]:
            models = np.einsum("dcs,ns->ndc", shared, next(mixtures))
            return models, rng.normal(rng.standard_normal((number, 1)), 1.0, size=(number, self.dimension))

        info = {"num_clusters": clusters, "seed": self.seed}
        x, y, models = _examples(counts, draw, model_shape, 0.1, self.features, rng)
        return _federated("leaf-synthetic", x, y, counts, self.num_classes, self.test_fraction, models, info)


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
    """Examples around the clients' means, labelled by their linear models; and the flattened models with `keep_models`.

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


@dataclass(frozen=True, kw_only=True)
class Quadratic:
    """The quadratic of Power-of-Choice, appendix F: F_k(w) = 1/2 w'H_k w - e_k'w + 1/2 e_k'H_k^-1 e_k.

    Each client has exactly one "example": `train_x[k, 0]` is the diagonal of H_k = h_k I with h_k ~ U(curvature),
    `train_x[k, 1]` is e_k ~ U(linear); labels are 0 and unused. Local steps are full-gradient steps on F_k.
    `client_sizes` are draws from the power distribution a x^(a-1) on [0, 1], a = `exponent`: the paper's p_k once
    normalised. The paper leaves e_k open; U(0, 100) is what its public reproduction uses.
    """

    num_clients: int = 30
    dimension: int = 5
    curvature: tuple[float, float] = (1.0, 20.0)
    linear: tuple[float, float] = (0.0, 100.0)
    exponent: float = 3.0
    seed: int = 0

    def __post_init__(self) -> None:
        whole(self, "num_clients", 1)
        whole(self, "dimension", 1)
        for name in ("curvature", "linear"):
            value = getattr(self, name)
            require(len(value) == 2 and value[0] <= value[1], self, name, "two numbers, low <= high")
        require(self.curvature[0] > 0, self, "curvature", "two numbers, 0 < low <= high")
        number(self, "exponent", "(0, inf)")

    def load(self) -> Dataset:
        """Draw the clients."""
        rng = stream(self.seed, 0, Purpose.DATA)
        count = self.num_clients
        diagonal = np.repeat(rng.uniform(*self.curvature, size=(count, 1)), self.dimension, axis=1)
        vectors = rng.uniform(*self.linear, size=(count, self.dimension))
        examples = np.stack([diagonal, vectors], axis=1).astype(np.float32)
        return Dataset(
            name="quadratic",
            train_x=examples,
            train_y=np.zeros(count, np.float32),
            test_x=examples[:0],
            test_y=np.zeros(0, np.float32),
            num_classes=0,
            groups=np.arange(count, dtype=np.int32),
            client_sizes=rng.power(self.exponent, size=count),
            client_features=examples.reshape(count, -1),
            info={
                "curvature": self.curvature,
                "linear": self.linear,
                "exponent": self.exponent,
                "seed": self.seed,
            },
        )


def quadratic_optimum(dataset: Dataset) -> tuple[FloatArray, float]:
    """The w that minimises sum_k p_k F_k of a quadratic data set, and the value there."""
    if dataset.num_classes or dataset.client_sizes is None:
        raise InvalidInput(f"quadratic_optimum needs the data set 'quadratic'. Got {dataset.name!r}.")
    sizes = np.asarray(dataset.client_sizes, dtype=np.float64)
    p = sizes / sizes.sum()
    diagonal, vectors = dataset.train_x[:, 0].astype(np.float64), dataset.train_x[:, 1].astype(np.float64)
    w = (p @ vectors) / (p @ diagonal)
    local = 0.5 * (diagonal * (w - vectors / diagonal) ** 2).sum(axis=1)
    return w, float(p @ local)
