"""The quadratic programme behind `dirichlet-qp`: the smallest non-negative x with Q x = d.

    min 1/2 |x|^2   subject to   Q x = d,  x >= 0           (FedCor, appendix C.2, equations 147 to 149)

Q has a row per label (about ten) and a column per client (up to millions), so the problem is solved in its dual, which
has one variable per label: maximise d'l - 1/2 |max(0, Q'l)|^2, a concave, piecewise quadratic function. Newton steps on
it are exact active-set steps (the clients with Q'l > 0 are the active ones), cost O(N L^2) each and end after finitely
many, usually fewer than ten, with x = max(0, Q'l) optimal to rounding.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedpick.core.arrays import FloatArray

__all__ = ["least_norm_sizes"]


def least_norm_sizes(
    fractions: FloatArray, totals: FloatArray, *, tolerance: float = 1e-10, iterations: int = 200
) -> FloatArray | None:
    """The x of least norm with `fractions @ x == totals` and `x >= 0`, or None if there is none.

    `fractions` is (L, N), `totals` is (L,). The residual of what is returned is below `tolerance` times the sum of
    the totals.

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
    """The ascent direction of the quadratic piece we stand on."""
    columns = fractions if active.all() else fractions[:, active]
    curvature = columns @ columns.T
    # Too few active clients make the curvature singular; the ridge is far below what the tolerance can see.
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
