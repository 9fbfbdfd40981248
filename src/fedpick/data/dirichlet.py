"""Dealers that draw label skew from Dirichlet distributions, in the ways the papers use.

- `DirichletQP` (FedCor, appendix C.2): each client draws its label distribution; the sizes are the solution of a
  quadratic programme, which uses up every class without a few huge clients.
- `DirichletLognormal` (FedGS, appendix C): the sizes are lognormal *and* the label distributions Dirichlet; both are
  adjusted until they are consistent.
- `DirichletClass` (Power-of-Choice, CA-Fed): each class is cut over the clients by one Dirichlet draw.
- `DirichletMixture` (HiCS-FL): groups of clients, each dealt as by `DirichletClass` with its own alpha.
- `Clustered` (CA-Fed, figure 5b): the classes are cut over clusters of clients; clients of a cluster are alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedpick.availability.markov import cluster_of_clients
from fedpick.core.arrays import FloatArray, IntArray
from fedpick.core.errors import InvalidInput
from fedpick.core.validation import assign, choice, number, require, whole
from fedpick.data.dealers import Owners, deal_counts, deal_evenly, ensure, fill_empty, require_examples

__all__ = [
    "Clustered",
    "DirichletClass",
    "DirichletLognormal",
    "DirichletMixture",
    "DirichletQP",
    "least_norm_sizes",
]


def _dense_labels(labels: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Labels renumbered without gaps, and how many examples each has: a prior of 0 has no Dirichlet."""
    _, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return inverse, counts


@dataclass(frozen=True, kw_only=True)
class DirichletQP:
    """Each client's labels from Dir(alpha p), p the overall label distribution; sizes of least norm (FedCor).

    Counts are rounded down and the leftovers are dealt to uniformly random clients, as in the authors' code.
    Deviations: a draw for which no sizes fit is repeated, at most `attempts` times. The paper asks for sizes above 0,
    but the programme only guarantees at least 0, so a client without data gets one example of another client.
    """

    alpha: float = 0.2
    attempts: int = 100

    def __post_init__(self) -> None:
        number(self, "alpha", "(0, inf)")
        whole(self, "attempts", 1)

    def deal(self, labels: NDArray[Any], num_clients: int, rng: np.random.Generator) -> Owners:
        """(n,) the client of every example."""
        require_examples(len(labels), num_clients)
        dense, class_counts = _dense_labels(labels)
        ensure(
            num_clients >= len(class_counts),
            f"dirichlet-qp needs at least as many clients as labels ({len(class_counts)}), otherwise no sizes can use "
            f"up every class. Got {num_clients} clients.",
        )
        prior = class_counts / class_counts.sum()
        for _ in range(self.attempts):
            fractions = rng.dirichlet(self.alpha * prior, size=num_clients).T  # (L, N)
            sizes = least_norm_sizes(fractions, class_counts.astype(np.float64))
            if sizes is not None:
                counts = _within(np.floor(fractions.T * sizes[:, None] + 1e-9).astype(np.int64), class_counts)
                return fill_empty(deal_counts(dense, counts, rng), num_clients, rng)
        raise InvalidInput(
            f"dirichlet-qp found no sizes that use up every class in {self.attempts} draws of {num_clients} label "
            f"distributions with alpha={self.alpha}: use more clients or a larger alpha."
        )


def _within(counts: NDArray[np.int64], class_counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rounding may ask for one example too many of a class: take it from the client that asks for most."""
    for label in np.flatnonzero(counts.sum(axis=0) > class_counts):
        excess = counts[:, label].sum() - class_counts[label]
        counts[np.argsort(-counts[:, label], kind="stable")[:excess], label] -= 1
    return counts


@dataclass(frozen=True, kw_only=True)
class DirichletLognormal:
    """Sizes lognormal(log(n/N) - sigma^2/2, sigma), labels Dir(alpha p), made consistent (FedGS).

    As in the authors' code, label distributions are replaced by new draws until their size-weighted mean is close to
    the overall one (squared distance at most 0.01 / L; a proposal is accepted if it comes closer). Scaling rows and
    columns in turn (iterative proportional fitting) removes the remaining distance, so sizes and class counts both
    hold exactly. Deviation: sizes are scaled, not shifted, to sum to n; every client gets at least one example.
    """

    alpha: float = 1.75
    sigma: float = 1.0
    proposals: int = 20_000

    def __post_init__(self) -> None:
        number(self, "alpha", "(0, inf)")
        number(self, "sigma", "[0, inf)")
        whole(self, "proposals", 0)

    def deal(self, labels: NDArray[Any], num_clients: int, rng: np.random.Generator) -> Owners:
        """(n,) the client of every example."""
        require_examples(len(labels), num_clients)
        dense, class_counts = _dense_labels(labels)
        prior = class_counts / class_counts.sum()
        mean_log = np.log(len(labels) / num_clients) - self.sigma**2 / 2
        sizes = whole_sizes(rng.lognormal(mean_log, self.sigma, size=num_clients), len(labels))
        fractions = _fitting_fractions(self.alpha * prior, prior, sizes, rng, self.proposals)
        wanted = _fit_margins(fractions * sizes[:, None], sizes, class_counts)
        return deal_counts(dense, _round_to_margins(wanted, sizes, class_counts, rng), rng)


def whole_sizes(shares: FloatArray, total: int) -> NDArray[np.int64]:
    """Whole numbers in proportion to `shares`, each at least 1, that sum to `total` (largest remainders)."""
    exact = 1 + shares / shares.sum() * (total - len(shares))
    sizes: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    missing = total - int(sizes.sum())
    sizes[np.argsort(sizes - exact, kind="stable")[:missing]] += 1
    return sizes


def _fitting_fractions(
    concentration: FloatArray,
    prior: FloatArray,
    sizes: NDArray[np.int64],
    rng: np.random.Generator,
    proposals: int,
) -> FloatArray:
    """(N, L) Dirichlet draws whose size-weighted mean is close to the prior."""
    num_clients, num_labels = len(sizes), len(prior)
    fractions = rng.dirichlet(concentration, size=num_clients)
    share = sizes / sizes.sum()
    gap = share @ fractions - prior
    block = 256
    for start in range(0, proposals, block):
        if gap @ gap <= 0.01 / num_labels:
            break
        # Large clients decide the mean, so they are proposed in proportion to their share.
        clients = rng.choice(num_clients, size=min(block, proposals - start), p=share)
        draws = rng.dirichlet(concentration, size=len(clients))
        for client, draw in zip(clients, draws, strict=True):
            candidate = gap + share[client] * (draw - fractions[client])
            if candidate @ candidate < gap @ gap:
                gap, fractions[client] = candidate, draw
    return fractions


def _fit_margins(wanted: FloatArray, sizes: NDArray[np.int64], class_counts: NDArray[np.int64]) -> FloatArray:
    """Scale rows and columns in turn until both sums hold; ends a hair below both, never above."""
    wanted = np.maximum(wanted, 1e-9)  # an entry that underflowed to 0 could never grow again
    for _ in range(500):
        wanted = wanted * (sizes / wanted.sum(axis=1))[:, None]
        ratio = class_counts / wanted.sum(axis=0)
        wanted = wanted * ratio
        if np.abs(ratio - 1).max() < 1e-6:
            break
    wanted *= np.minimum(1.0, sizes / wanted.sum(axis=1))[:, None]
    wanted *= np.minimum(1.0, class_counts / wanted.sum(axis=0))
    return wanted


def _round_to_margins(
    wanted: FloatArray, sizes: NDArray[np.int64], class_counts: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """Whole counts with exactly these sizes and class counts: cut down, then pair what is missing at random.

    A client's missing places are paired with missing examples of random classes: fewer than one per client and class.
    """
    counts = np.floor(wanted).astype(np.int64)
    rows = np.repeat(np.arange(len(sizes)), sizes - counts.sum(axis=1))
    columns = np.repeat(np.arange(len(class_counts)), class_counts - counts.sum(axis=0))
    np.add.at(counts, (rows, rng.permutation(columns)), 1)
    return counts


@dataclass(frozen=True, kw_only=True)
class DirichletClass:
    """Each class cut over the clients by one draw from Dir_N(alpha) (Power-of-Choice, CA-Fed; Hsu et al. 2019).

    `balance` follows the supplement of Power-of-Choice: a client that already holds n / N examples gets nothing of the
    remaining classes. The deal is repeated, at most `attempts` times, until every client has `min_examples`. The
    default of `min_examples` is 10 as in the supplement, or a tenth of the even share n / N where that is less.
    """

    alpha: float = 0.5
    balance: bool = True
    min_examples: int | None = None
    attempts: int = 100

    def __post_init__(self) -> None:
        number(self, "alpha", "(0, inf)")
        whole(self, "attempts", 1)
        whole(self, "min_examples", 0, optional=True)

    def deal(self, labels: NDArray[Any], num_clients: int, rng: np.random.Generator) -> Owners:
        """(n,) the client of every example."""
        min_examples = self.min_examples
        if min_examples is None:
            min_examples = min(10, max(1, len(labels) // (10 * num_clients)))
        require_examples(len(labels), num_clients, per_client=max(min_examples, 1))
        dense, class_counts = _dense_labels(labels)
        for _ in range(self.attempts):
            counts = _cut_classes(class_counts, num_clients, rng, self.alpha, self.balance)
            if counts.sum(axis=1).min() >= min_examples:
                return deal_counts(dense, counts, rng)
        raise InvalidInput(
            f"dirichlet-class did not give all {num_clients} clients {min_examples} example(s) in {self.attempts} "
            f"deals with alpha={self.alpha}: use fewer clients, a larger alpha, balance=True, or min_examples=0 to "
            "allow empty clients."
        )


def _cut_classes(
    class_counts: NDArray[np.int64], num_clients: int, rng: np.random.Generator, alpha: float, balance: bool
) -> NDArray[np.int64]:
    """(N, L) examples per client and class; every class is used up."""
    counts = np.zeros((num_clients, len(class_counts)), dtype=np.int64)
    held = np.zeros(num_clients, dtype=np.int64)
    for label, total in enumerate(class_counts):
        share = rng.dirichlet(np.full(num_clients, alpha))
        if balance:
            share = np.where(held * num_clients < class_counts.sum(), share, 0.0)
        if not share.sum() > 0:  # every open client drew an underflow
            share = (held * num_clients < class_counts.sum()).astype(np.float64)
        reached = np.cumsum(share)
        cuts = np.floor(reached / reached[-1] * total).astype(np.int64)  # exactly `total` from the last open client on
        counts[:, label] = np.diff(cuts, prepend=0)
        held += counts[:, label]
    return counts


@dataclass(frozen=True, kw_only=True)
class DirichletMixture:
    """Groups of clients with equal parts of every class, each cut over its clients by its own alpha (HiCS-FL).

    The first group of clients has the first alpha, and so on. A small alpha gives a client one or two labels, a large
    one all labels. A client without data gets one example of another client.
    """

    alphas: tuple[float, ...] = (0.001, 0.002, 0.005, 0.01, 0.5)

    def __post_init__(self) -> None:
        require(len(self.alphas) > 0, self, "alphas", "at least one number")
        alphas = tuple(number(self, "alphas", "(0, inf)", value=alpha) for alpha in self.alphas)
        assign(self, alphas=alphas)

    def deal(self, labels: NDArray[Any], num_clients: int, rng: np.random.Generator) -> Owners:
        """(n,) the client of every example."""
        require_examples(len(labels), num_clients)
        ensure(
            num_clients >= len(self.alphas),
            f"dirichlet-mixture needs at least one client per alpha ({len(self.alphas)}). Got {num_clients} clients.",
        )
        dense, class_counts = _dense_labels(labels)
        group_of_example = np.empty(len(labels), dtype=np.int32)
        for label in range(len(class_counts)):
            rows = np.flatnonzero(dense == label)
            group_of_example[rows] = rng.permutation(np.arange(len(rows)) % len(self.alphas))
        owner = np.empty(len(labels), dtype=np.int32)
        for group, members in enumerate(np.array_split(np.arange(num_clients, dtype=np.int32), len(self.alphas))):
            rows = np.flatnonzero(group_of_example == group)
            dealer = DirichletClass(alpha=self.alphas[group], min_examples=0)
            owner[rows] = members[dealer.deal(labels[rows], len(members), rng)]
        return fill_empty(owner, num_clients, rng)

    def groups(self, num_clients: int) -> IntArray:
        """(N,) the position of every client's alpha."""
        parts = np.array_split(np.arange(num_clients), len(self.alphas))
        return np.repeat(np.arange(len(parts)), [len(part) for part in parts])


@dataclass(frozen=True, kw_only=True)
class Clustered:
    """Clusters of clients: classes cut over them by Dir(alpha), dealt at random within each (CA-Fed, figure 5b).

    Examples are dealt to clusters as `dirichlet-class` deals them to clients, with the same `balance` and `attempts`;
    the clients of a cluster get equal parts of its examples, to within one. `assignment` says which clients form a
    cluster, as in the availability process `clustered`: give both the same number of clusters and assignment.
    """

    num_clusters: int = 10
    alpha: float = 0.5
    balance: bool = True
    assignment: Literal["blocks", "round-robin"] = "blocks"
    attempts: int = 100

    def __post_init__(self) -> None:
        whole(self, "num_clusters", 1)
        choice(self, "assignment", ("blocks", "round-robin"))
        number(self, "alpha", "(0, inf)")
        whole(self, "attempts", 1)

    def check_clients(self, num_clients: int) -> None:
        """Refuse more clusters than clients."""
        ensure(
            self.num_clusters <= num_clients,
            f"num_clusters must be between 1 and the number of clients, {num_clients}. Got {self.num_clusters}.",
        )

    def deal(self, labels: NDArray[Any], num_clients: int, rng: np.random.Generator) -> Owners:
        """(n,) the client of every example."""
        self.check_clients(num_clients)
        cluster = self.groups(num_clients)
        # Every client needs an example, so a cluster needs at least one per member.
        largest = int(np.bincount(cluster).max())
        require_examples(len(labels), self.num_clusters, per_client=largest)
        over_clusters = DirichletClass(
            alpha=self.alpha, balance=self.balance, min_examples=largest, attempts=self.attempts
        )
        try:
            cluster_of_example = over_clusters.deal(labels, self.num_clusters, rng)
        except InvalidInput as error:
            raise InvalidInput(
                f"The examples cannot be cut over {self.num_clusters} clusters of up to {largest} clients: use fewer "
                f"clusters or clients. (Examples are dealt to clusters as to clients: {error})"
            ) from error
        owner = np.empty(len(labels), dtype=np.int32)
        for index in range(self.num_clusters):
            rows = np.flatnonzero(cluster_of_example == index)
            members = np.flatnonzero(cluster == index).astype(np.int32)
            owner[rows] = members[deal_evenly(len(rows), len(members), rng)]
        return owner

    def groups(self, num_clients: int) -> IntArray:
        """(N,) the cluster of every client."""
        return cluster_of_clients(num_clients, self.num_clusters, self.assignment)


def least_norm_sizes(
    fractions: FloatArray, totals: FloatArray, *, tolerance: float = 1e-10, iterations: int = 200
) -> FloatArray | None:
    """The x of least norm with `fractions @ x == totals` and `x >= 0`, or None if no such x exists.

        min 1/2 |x|^2   subject to   Q x = d,  x >= 0           (FedCor, appendix C.2, equations 147 to 149)

    `fractions`, Q, is (L, N) and `totals`, d, is (L,). Q has a row per label (about ten) and a column per client (up to
    millions), so the problem is solved in its dual, which has one variable per label: maximise
    d'l - 1/2 |max(0, Q'l)|^2, a concave, piecewise quadratic function. Newton steps on it are exact active-set steps
    (clients with Q'l > 0 are active), cost O(N L^2) each and end after finitely many, usually fewer than ten, with
    x = max(0, Q'l) optimal to rounding. The residual is below `tolerance` times the sum of the totals.

    >>> import numpy as np
    >>> least_norm_sizes(np.array([[1.0, 0.5, 0.0], [0.0, 0.5, 1.0]]), np.array([6.0, 6.0])).round(6)
    array([4., 4., 4.])
    >>> least_norm_sizes(np.array([[1.0, 0.9], [0.0, 0.1]]), np.array([1.0, 9.0])) is None
    True
    """
    labels, clients = fractions.shape
    unit = totals.sum() / clients  # x is about 1 in this unit, whatever the number of examples
    wanted = totals / unit
    multipliers = np.ones(labels)  # columns of Q sum to 1: x = 1 everywhere, all clients active
    value, x, slope = _dual(fractions, wanted, multipliers)
    for _ in range(iterations + 1):
        if np.abs(slope).max() <= tolerance * clients:
            return np.asarray(x * unit)
        if value > 1e8 * clients**2:  # the dual runs away: the equations have no non-negative solution
            return None
        step = _newton_step(fractions, x > 0, slope)
        multipliers, value, x, slope = _line_search(fractions, wanted, multipliers, step, value, slope)
    return None


def _dual(fractions: FloatArray, wanted: FloatArray, multipliers: FloatArray) -> tuple[float, FloatArray, FloatArray]:
    x = np.maximum(multipliers @ fractions, 0.0)
    return float(wanted @ multipliers - 0.5 * (x @ x)), x, wanted - fractions @ x


def _newton_step(fractions: FloatArray, active: NDArray[np.bool_], slope: FloatArray) -> FloatArray:
    """The ascent direction of the current quadratic piece."""
    columns = fractions if active.all() else fractions[:, active]
    curvature = columns @ columns.T
    # Too few active clients make the curvature singular; the ridge is far below the tolerance.
    ridge = 1e-13 * max(float(np.trace(curvature)), 1.0)
    return np.asarray(np.linalg.solve(curvature + ridge * np.eye(len(slope)), slope), dtype=np.float64)


def _line_search(
    fractions: FloatArray,
    wanted: FloatArray,
    multipliers: FloatArray,
    step: FloatArray,
    value: float,
    slope: FloatArray,
) -> tuple[FloatArray, float, FloatArray, FloatArray]:
    gain = float(slope @ step)
    length = 1.0
    for _ in range(60):
        candidate = multipliers + length * step
        new_value, x, new_slope = _dual(fractions, wanted, candidate)
        # Near the optimum the gain drowns in rounding; a smaller residual is then the better sign of progress.
        if new_value >= value + 1e-4 * length * gain or np.abs(new_slope).max() < 0.5 * np.abs(slope).max():
            break
        length *= 0.5
    return candidate, new_value, x, new_slope
