"""Label skew drawn from Dirichlet distributions, in the three ways the papers use.

- `dirichlet_qp` (FedCor, appendix C.2): each client draws its label distribution; the sizes are the solution of a
  quadratic programme, so that the classes come out right without a few huge clients.
- `dirichlet_lognormal` (FedGS, appendix C): the sizes are lognormal *and* the label distributions Dirichlet, made to
  fit each other.
- `dirichlet_class` (Power-of-Choice, CA-Fed): each class is cut over the clients by one Dirichlet draw.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import FloatArray
from fedpick.core.errors import InvalidInput
from fedpick.data.dealing import Owners, deal_counts, fill_empty, require, require_examples
from fedpick.data.least_norm import least_norm_sizes

__all__ = ["dirichlet_class", "dirichlet_lognormal", "dirichlet_qp"]


def _require_alpha(alpha: float) -> None:
    require(
        bool(np.isfinite(alpha)) and alpha > 0,
        f"alpha, the concentration of the Dirichlet distribution, must be a finite number above 0. Got {alpha}.",
    )


def _dense_labels(labels: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Labels renumbered without gaps, and how many examples each has: a prior of 0 has no Dirichlet."""
    _, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return inverse, counts


def dirichlet_qp(
    labels: NDArray[Any],
    num_clients: int,
    rng: np.random.Generator,
    *,
    alpha: float = 0.2,
    attempts: int = 100,
) -> Owners:
    """Each client's labels from Dir(alpha p), p the overall label distribution; sizes of least norm (FedCor).

    Counts are cut to whole numbers and the leftovers dealt to uniformly random clients, as in the authors' code.
    Deviations: draws for which no sizes fit are drawn anew, at most `attempts` times; the paper asks for sizes above 0
    where the programme can only promise at least 0, so a client left without data gets one example of another.
    """
    _require_alpha(alpha)
    require(attempts >= 1, f"attempts must be at least 1. Got {attempts}.")
    require_examples(len(labels), num_clients)
    dense, class_counts = _dense_labels(labels)
    require(
        num_clients >= len(class_counts),
        f"dirichlet-qp needs at least as many clients as labels ({len(class_counts)}), otherwise no sizes can use up "
        f"every class. Got {num_clients} clients.",
    )
    prior = class_counts / class_counts.sum()
    for _ in range(attempts):
        fractions = rng.dirichlet(alpha * prior, size=num_clients).T  # (L, N)
        sizes = least_norm_sizes(fractions, class_counts.astype(np.float64))
        if sizes is not None:
            counts = _within(np.floor(fractions.T * sizes[:, None] + 1e-9).astype(np.int64), class_counts)
            return fill_empty(deal_counts(dense, counts, rng), num_clients, rng)
    raise InvalidInput(
        f"dirichlet-qp found no sizes that use up every class in {attempts} draws of {num_clients} label distributions "
        f"with alpha={alpha}: use more clients or a larger alpha."
    )


def _within(counts: NDArray[np.int64], class_counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rounding may ask for one example too many of a class: take it from the client that asks for most."""
    for label in np.flatnonzero(counts.sum(axis=0) > class_counts):
        excess = counts[:, label].sum() - class_counts[label]
        counts[np.argsort(-counts[:, label], kind="stable")[:excess], label] -= 1
    return counts


def dirichlet_lognormal(
    labels: NDArray[Any],
    num_clients: int,
    rng: np.random.Generator,
    *,
    alpha: float = 1.75,
    sigma: float = 1.0,
    proposals: int = 20_000,
) -> Owners:
    """Sizes lognormal(log(n/N) - sigma^2/2, sigma), labels Dir(alpha p), without conflict (FedGS).

    As in the authors' code, label distributions are replaced by new draws until their size-weighted mean is close to
    the overall one (squared distance at most 0.01 / L; a proposal counts if it comes closer). What distance remains is
    removed by scaling rows and columns in turn (iterative proportional fitting), so that sizes and class counts both
    hold exactly. Deviation: sizes are scaled, not shifted, to sum to n; everybody gets at least one example.
    """
    _require_alpha(alpha)
    require(bool(np.isfinite(sigma)) and sigma >= 0, f"sigma must be a finite number of at least 0. Got {sigma}.")
    require_examples(len(labels), num_clients)
    dense, class_counts = _dense_labels(labels)
    prior = class_counts / class_counts.sum()
    mean_log = np.log(len(labels) / num_clients) - sigma**2 / 2
    sizes = whole_sizes(rng.lognormal(mean_log, sigma, size=num_clients), len(labels))
    fractions = _fitting_fractions(alpha * prior, prior, sizes, rng, proposals)
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


def dirichlet_class(
    labels: NDArray[Any],
    num_clients: int,
    rng: np.random.Generator,
    *,
    alpha: float = 0.5,
    balance: bool = True,
    min_examples: int | None = None,
    attempts: int = 100,
) -> Owners:
    """Each class cut over the clients by one draw from Dir_N(alpha) (Power-of-Choice, CA-Fed; Hsu et al. 2019).

    `balance` is what the authors' supplement of Power-of-Choice does: a client that already holds n / N examples gets
    nothing of the classes that follow. The deal is repeated, at most `attempts` times, until everybody has
    `min_examples`: by default 10 as in the supplement, or a tenth of the even share n / N where that is less.
    """
    _require_alpha(alpha)
    require(attempts >= 1, f"attempts must be at least 1. Got {attempts}.")
    if min_examples is None:
        min_examples = min(10, max(1, len(labels) // (10 * num_clients)))
    require(min_examples >= 0, f"min_examples must be at least 0. Got {min_examples}.")
    require_examples(len(labels), num_clients, per_client=max(min_examples, 1))
    dense, class_counts = _dense_labels(labels)
    for _ in range(attempts):
        counts = _cut_classes(class_counts, num_clients, rng, alpha, balance)
        if counts.sum(axis=1).min() >= min_examples:
            return deal_counts(dense, counts, rng)
    raise InvalidInput(
        f"dirichlet-class did not give all {num_clients} clients {min_examples} example(s) in {attempts} deals with "
        f"alpha={alpha}: use fewer clients, a larger alpha, balance=True, or min_examples=0 to allow empty clients."
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
