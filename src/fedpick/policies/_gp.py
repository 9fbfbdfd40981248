"""The Gaussian process over clients that FedCor and FedGP learn, in low rank: nothing here is N x N.

Notation
    N clients, d = rank, m samples, n clients that answered; arrays have the clients last.
    X     (d, N)  embedding; x_k is the column of client k, 0 for a client never measured
    s     standard deviation of the noise, s^2 its variance
    Sigma = X'X + s^2 I, the covariance of the loss changes of all clients in one round
    p     (N,)    importance of the clients, sums to 1
    z     (n,)    one sample: loss changes of those who answered, minus the prior mean
    w     (m,)    weight of a sample, gamma to the power of its age
    A     (d, d)  s^2 I + X X' over the clients that answered; u = X z (d,); v = A^-1 u (d,)

Likelihood (FedCor equations 15 to 17). By the determinant lemma log det Sigma = (n - d) log s^2 + log det A, by the
Woodbury identity z' Sigma^-1 z = (z'z - u'v) / s^2, and X Sigma^-1 = A^-1 X. So with d(log p)/dX = X (aa' - Sigma^-1),
a = Sigma^-1 z = (z - X'v) / s^2 and X a = v, the gradient of sum_j w_j log p(z_j) is

    sum_j w_j v_j z_j' / s^2 - B X,    B = sum_j w_j (v_j v_j' / s^2 + A^-1):    O(N d^2 + m N d).

A missing answer is a row and a column of Sigma left out, which is the exact marginal. Samples that were answered by the
same clients share one A; where the samples have G different sets of answers there are G such matrices, and the cost
is O(G N d^2).

Selection (algorithm 1) is explained at `select_greedy`.

`select_greedy_reference` and `log_likelihood_reference` are the same in N x N matrices, as printed in the paper: the
definitions that the tests compare the low-rank forms with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import FloatArray, IntArray

__all__ = [
    "NOISE_RULES",
    "Fit",
    "correlation",
    "discounted_mean",
    "fit",
    "log_likelihood",
    "log_likelihood_reference",
    "prior_moments",
    "select_greedy",
    "select_greedy_reference",
]

NOISE_RULES = ("none", "observation", "prior")

# Clients per block: the working arrays stay in the processor's cache, and the products stay below the size at which the
# linear algebra library starts threads, which costs several times what it gains on a busy machine.
_BLOCK = 2048

# Without noise Sigma has rank d, and after d picks all clients left look alike. This share of the largest variance,
# added to the diagonal, ranks them; it is too small to change the first d picks.
_JITTER = 1e-10
_TINY = 1e-300


def prior_moments(
    embedding: FloatArray, importance: FloatArray, noise: float, rule: str, candidates: IntArray | None = None
) -> tuple[FloatArray, FloatArray]:
    """(a, b) of the candidates: a_k = sum_i p_i Sigma_ik over all clients i, and b_k = Sigma_kk.

    `rule` says where the noise is: "prior" means Sigma = X'X + s^2 I, the others Sigma = X'X.
    """
    weighted_sum = embedding @ importance
    columns = embedding if candidates is None else embedding[:, candidates]
    covariance = weighted_sum @ columns
    variance = np.einsum("ij,ij->j", columns, columns)
    if rule == "prior":
        covariance += noise**2 * (importance if candidates is None else importance[candidates])
        variance += noise**2
    return covariance, variance


def select_greedy(
    embedding: FloatArray,
    importance: FloatArray,
    confidence: FloatArray,
    count: int,
    *,
    noise: float = 0.0,
    rule: str = "none",
    candidates: IntArray | None = None,
) -> tuple[IntArray, FloatArray]:
    """Algorithm 1 in rank d: pick `count` candidates one by one, each the best given those before it.

    The prediction for client k is the lower confidence bound, alpha_k standard deviations below its mean. The pick is
    the client that lowers the expected global loss most, and Sigma is then conditioned on it. The prior mean cancels.
    The clients not picked yet are described by a_k = sum_i p_i Sigma_ik, b_k = Sigma_kk and a d x d matrix L (I at the
    start) with Sigma_ik = x_i' L x_k for i != k. One pick is

        k* = argmax alpha_k a_k sqrt(b_k) / (b_k + r),   q = b_k* + r,   g = L x_k* / sqrt(q),   h = X' g,
        a <- a - (a_k* / sqrt(q)) h,   b <- b - h^2,   L <- L - g g'.

    Rules for the noise: with "none", Sigma = X'X (a jitter ranks the clients left after d picks); with "prior",
    Sigma = X'X + s^2 I; in both r = 0 and a picked client leaves the sum in a. With "observation", Sigma = X'X and
    r = s^2: the prediction is a noisy observation of the client.

    Args:
        confidence: (N,) alpha_k, larger than 0.
        candidates: the clients that may be picked; None: all.

    Returns:
        The picks in order, and by how much each lowers the expected global loss.

    >>> embedding = np.array([[1.0, 0.9, 0.0], [0.0, 0.1, 0.5]])  # 0 and 1 are alike, 2 is unlike both
    >>> select_greedy(embedding, np.full(3, 1 / 3), np.ones(3), 2)[0]
    array([1, 2])
    """
    columns = embedding if candidates is None else embedding[:, candidates]
    count = min(count, columns.shape[1])
    if count <= 0:
        return np.empty(0, dtype=np.int64), np.empty(0)
    if rule != "observation" or noise == 0:
        # With at least the jitter in it, b stays far above the rounding errors of the updates.
        least = np.sqrt(_JITTER * np.einsum("ij,ij->j", columns, columns).max()) or 1.0
        rule, noise = "prior", max(noise, least) if rule == "prior" else least
    covariance, variance = prior_moments(embedding, importance, noise, rule, candidates)
    alpha = np.maximum(confidence if candidates is None else confidence[candidates], _TINY)
    extra = noise**2 if rule == "observation" else 0.0

    spread = np.eye(len(columns))  # L
    direction = np.zeros(len(columns))  # g
    step = 0.0
    picks = np.empty(count, dtype=np.int64)
    gains = np.empty(count)
    scratch = np.empty((2, min(_BLOCK, columns.shape[1])))
    for place in range(count):
        best = -np.inf
        for part in _blocks(columns.shape[1]):
            a, b = covariance[part], variance[part]
            change, score = scratch[:, : len(a)]
            if place:
                np.dot(direction, columns[:, part], out=change)
                np.multiply(change, step, out=score)
                a -= score
                np.multiply(change, change, out=change)
                b -= change
            if extra:
                np.maximum(b, _TINY, out=b)  # here it may fall to 0
            np.sqrt(b, out=score)
            if extra:
                np.divide(score, b + extra, out=score)
                np.multiply(a, score, out=score)
            else:
                np.divide(a, score, out=score)
            np.multiply(score, alpha[part], out=score)
            top = int(score.argmax())
            if score[top] > best or best == -np.inf:
                best, pick = float(score[top]), part.start + top
        scale = np.sqrt(variance[pick] + extra)
        direction = spread @ columns[:, pick] / scale
        step = covariance[pick] / scale
        spread -= np.outer(direction, direction)
        covariance[pick] = -np.inf  # never the best again
        picks[place], gains[place] = pick, best
    return (picks if candidates is None else candidates[picks]), gains


def select_greedy_reference(
    covariance: FloatArray,
    importance: FloatArray,
    confidence: FloatArray,
    count: int,
    *,
    candidates: IntArray,
    observation_noise: float = 0.0,
) -> tuple[IntArray, FloatArray]:
    """Algorithm 1 as printed, on the (N, N) covariance: (picks in order, fall of the expected global loss by each)."""
    covariance, mean = covariance.copy(), np.zeros(len(covariance))
    pool, picks, losses = candidates.tolist(), list[int](), [0.0]
    for _ in range(min(count, len(pool))):
        posterior = {}
        for k in pool:
            prediction = mean[k] - confidence[k] * np.sqrt(covariance[k, k])  # equation 9
            slope = covariance[:, k] / (covariance[k, k] + observation_noise)
            posterior[k] = mean + slope * (prediction - mean[k])  # the mean of equation 11
        best = min(pool, key=lambda k: float(importance @ posterior[k]))  # equation 10
        mean, column = posterior[best], covariance[:, best].copy()
        covariance -= np.outer(column, column) / (column[best] + observation_noise)  # the covariance of equation 11
        if not observation_noise:
            covariance[best, :] = covariance[:, best] = 0.0  # exactly, without rounding
        pool.remove(best)
        picks.append(best)
        losses.append(float(importance @ mean))
    return np.array(picks, dtype=np.int64), -np.diff(losses)


def _blocks(count: int) -> Iterator[slice]:
    for start in range(0, count, _BLOCK):
        yield slice(start, min(start + _BLOCK, count))


@dataclass(frozen=True)
class Fit:
    """An embedding learned from samples, and the log-likelihood of the samples before and after."""

    embedding: FloatArray
    before: float
    after: float


@dataclass(frozen=True)
class _Evidence:
    """The samples as residuals, and which clients answered in each."""

    columns: IntArray | None
    """The n clients with at least one answer; None: all."""
    residuals: FloatArray
    """(m, n) z, 0 where there is no answer."""
    weights: FloatArray
    """(m,) w."""
    group: IntArray
    """(m,) which set of answers a sample has."""
    masks: NDArray[np.bool_] | None
    """(G, n) the sets of answers; None: one set, in which all n answered."""
    answers: FloatArray
    """(G,) number of clients that answered."""
    squares: FloatArray
    """(m,) z'z."""
    noise: float


@dataclass(frozen=True)
class _Moments:
    """What the likelihood needs of X, summed over clients."""

    outer: FloatArray
    """(G, d, d) X X' over the clients that answered."""
    projections: FloatArray
    """(d, m) u."""


@dataclass(frozen=True)
class _Slopes:
    """What the gradient needs besides the client's own column."""

    toward: FloatArray
    """(d, m) w v / s^2."""
    back: FloatArray
    """(G, d, d) the matrix B of every set of answers."""


def discounted_mean(samples: FloatArray, weights: FloatArray) -> FloatArray:
    """(N,) weighted mean of every client's answers; 0 for a client without answers."""
    total = np.zeros(samples.shape[1])
    mass = np.zeros(samples.shape[1])
    for sample, weight in zip(samples, weights, strict=True):
        known = ~np.isnan(sample)
        total[known] += weight * sample[known]
        mass[known] += weight
    return np.divide(total, mass, out=np.zeros_like(total), where=mass > 0)


def correlation(embedding: FloatArray) -> FloatArray:
    """(N, N) Pearson correlations x_i'x_k / (|x_i| |x_k|); for figures of small federations."""
    length = np.sqrt(np.einsum("ij,ij->j", embedding, embedding))
    unit = np.divide(embedding, length, out=np.zeros_like(embedding), where=length > 0)
    matrix: FloatArray = unit.T @ unit
    np.fill_diagonal(matrix, 1.0)
    return matrix


def log_likelihood(
    embedding: FloatArray, samples: FloatArray, weights: FloatArray, *, noise: float, mean: FloatArray | None = None
) -> tuple[float, FloatArray]:
    """Equation 17 and its gradient: (sum_j w_j log p(z_j), (d, N)). Samples are (m, N) with NaN for no answer."""
    evidence = _evidence(samples, weights, noise, mean)
    x = embedding if evidence.columns is None else embedding[:, evidence.columns]
    moments = _no_moments(evidence, len(x))
    for part in _blocks(x.shape[1]):
        _accumulate(moments, x[:, part], evidence, part)
    value, slopes = _slopes(moments, evidence)
    gradient = np.zeros_like(embedding)
    found = np.empty_like(x)
    for part in _blocks(x.shape[1]):
        found[:, part] = _gradient(x[:, part], evidence, part, slopes)
    gradient[:, slice(None) if evidence.columns is None else evidence.columns] = found
    return value, gradient


def log_likelihood_reference(
    embedding: FloatArray, samples: FloatArray, weights: FloatArray, *, noise: float, mean: FloatArray
) -> tuple[float, FloatArray]:
    """Equation 17 and its gradient in N x N matrices. A missing answer is a row and a column left out."""
    value, gradient = 0.0, np.zeros_like(embedding)
    for sample, weight in zip(samples, weights, strict=True):
        known = ~np.isnan(sample)
        if not known.any():
            continue
        x, z = embedding[:, known], (sample - mean)[known]
        covariance = x.T @ x + noise**2 * np.eye(len(z))
        inverse = np.linalg.inv(covariance)
        log_determinant = np.linalg.slogdet(covariance)[1]
        value -= 0.5 * weight * (len(z) * np.log(2 * np.pi) + log_determinant + z @ inverse @ z)
        gradient[:, known] += weight * x @ (np.outer(inverse @ z, inverse @ z) - inverse)
    return float(value), gradient


def fit(
    embedding: FloatArray,
    samples: FloatArray,
    weights: FloatArray,
    *,
    noise: float,
    iterations: int,
    learning_rate: float,
    mean: FloatArray | None = None,
) -> Fit:
    """Maximise equation 17 from the given embedding with a fresh Adam (its usual constants), in O(N d) memory.

    Columns of clients without any answer stay as they are. Each iteration is one pass over the clients, which for every
    block computes the gradient, makes the step, and adds to the sums for the next iteration.
    """
    evidence = _evidence(samples, weights, noise, mean)
    rank, count = len(embedding), evidence.residuals.shape[1]
    parts = list(_blocks(count))
    # One array per block: contiguous memory makes the passes nearly twice as fast.
    if evidence.columns is None:
        blocks = [np.array(embedding[:, part], order="C") for part in parts]
    else:
        blocks = [np.array(embedding[:, evidence.columns[part]], order="C") for part in parts]
    first, second = ([np.zeros_like(x) for x in blocks] for _ in range(2))
    moments = _no_moments(evidence, rank)
    for x, part in zip(blocks, parts, strict=True):
        _accumulate(moments, x, evidence, part)
    before, slopes = _slopes(moments, evidence)
    after = before
    for iteration in range(1, iterations + 1):
        moments = _no_moments(evidence, rank)
        unbias = np.sqrt((1 - 0.999**iteration) / (1 - 0.999))
        rate = learning_rate * unbias * (1 - 0.9) / (1 - 0.9**iteration)
        damping = 1e-8 * unbias
        for x, momentum, scale, part in zip(blocks, first, second, parts, strict=True):
            _climb(x, momentum, scale, _gradient(x, evidence, part, slopes), rate, damping)
            _accumulate(moments, x, evidence, part)
        after, slopes = _slopes(moments, evidence)
    del first, second  # before the result takes its memory
    learned = embedding.copy()
    learned[:, slice(None) if evidence.columns is None else evidence.columns] = np.concatenate(blocks, axis=1)
    return Fit(learned, before, after)


def _climb(
    x: FloatArray, first: FloatArray, second: FloatArray, gradient: FloatArray, rate: float, damping: float
) -> None:
    """One step of Adam, in place, with as few passes over the arrays as possible.

    `first` and `second` are the running sums of the gradient and its square without their factors 1 - 0.9 and
    1 - 0.999. `rate` and `damping` contain those factors and the corrections for the start from zero. The gradient is
    overwritten.
    """
    first *= 0.9
    first += gradient
    np.multiply(gradient, gradient, out=gradient)
    second *= 0.999
    second += gradient
    np.sqrt(second, out=gradient)
    gradient += damping
    np.divide(first, gradient, out=gradient)
    gradient *= rate
    x += gradient


def _evidence(samples: FloatArray, weights: FloatArray, noise: float, mean: FloatArray | None) -> _Evidence:
    answered = ~np.isnan(samples)
    ever = answered.any(axis=0)
    columns = None if ever.all() else np.flatnonzero(ever)
    if columns is not None:
        answered = answered[:, columns]
    sets: dict[bytes, int] = {}
    group = np.array([sets.setdefault(np.packbits(row).tobytes(), len(sets)) for row in answered], dtype=np.int64)
    _, leaders = np.unique(group, return_index=True)
    residuals = np.empty(answered.shape)
    for row, (sample, known) in enumerate(zip(samples, answered, strict=True)):
        shifted = sample if mean is None else sample - mean
        residuals[row] = np.where(known, shifted if columns is None else shifted[columns], 0.0)
    return _Evidence(
        columns=columns,
        residuals=residuals,
        weights=np.asarray(weights, dtype=np.float64),
        group=group,
        masks=None if len(sets) == 1 else answered[leaders],
        answers=answered[leaders].sum(axis=1).astype(np.float64),
        squares=np.einsum("jk,jk->j", residuals, residuals),
        noise=noise,
    )


def _no_moments(evidence: _Evidence, rank: int) -> _Moments:
    return _Moments(np.zeros((len(evidence.answers), rank, rank)), np.zeros((rank, len(evidence.weights))))


def _accumulate(moments: _Moments, x: FloatArray, evidence: _Evidence, part: slice) -> None:
    """Add the contribution of a block of clients, in place."""
    moments.projections[...] += x @ evidence.residuals[:, part].T
    if evidence.masks is None:
        moments.outer[0] += x @ x.T
        return
    for outer, mask in zip(moments.outer, evidence.masks[:, part].astype(np.float64), strict=True):
        outer += (x * mask) @ x.T


def _slopes(moments: _Moments, evidence: _Evidence) -> tuple[float, _Slopes]:
    """The log-likelihood, and the small matrices of its gradient."""
    rank = len(moments.projections)
    # With almost no noise and few answers the sum is singular up to rounding: noise below this bound has no effect.
    least = _JITTER * float(np.trace(moments.outer, axis1=1, axis2=2).max(initial=0.0)) / rank
    variance = max(evidence.noise**2, least)
    factor = np.linalg.cholesky(moments.outer + variance * np.eye(rank))
    inverse_factor = np.linalg.inv(factor)
    inverse = inverse_factor.transpose(0, 2, 1) @ inverse_factor  # (G, d, d) A^-1
    if evidence.masks is None:
        coefficients = inverse[0] @ moments.projections  # (d, m) v
    else:
        coefficients = np.einsum("jab,bj->aj", inverse[evidence.group], moments.projections)
    weights = evidence.weights
    toward = coefficients * (weights / variance)
    mass = np.bincount(evidence.group, weights=weights, minlength=len(inverse))
    if evidence.masks is None:
        back = mass[0] * inverse + toward @ coefficients.T
    else:
        back = mass[:, None, None] * inverse
        np.add.at(back, evidence.group, np.einsum("aj,bj->jab", toward, coefficients))
    log_determinant = 2 * np.log(factor.diagonal(axis1=1, axis2=2)).sum(axis=1)
    log_determinant += (evidence.answers - rank) * np.log(variance) + evidence.answers * np.log(2 * np.pi)
    explained = np.einsum("aj,aj->j", moments.projections, coefficients)
    value = -0.5 * (mass @ log_determinant + weights @ (evidence.squares - explained) / variance)
    return float(value), _Slopes(toward, back)


def _gradient(x: FloatArray, evidence: _Evidence, part: slice, slopes: _Slopes) -> FloatArray:
    """(d, block) of a block of clients."""
    gradient: FloatArray = slopes.toward @ evidence.residuals[:, part]
    if evidence.masks is None:
        gradient -= slopes.back[0] @ x
        return gradient
    for back, mask in zip(slopes.back, evidence.masks[:, part].astype(np.float64), strict=True):
        gradient -= back @ (x * mask)
    return gradient
