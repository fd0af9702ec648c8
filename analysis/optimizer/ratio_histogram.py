"""Quantiles of ratios near 1 from counts that add up: any part of the elements, in any order.

Exact quantiles would need all elements of a row at once. Counted is how far each ratio is from 1,
in 16 classes to each factor of two: fine where a type rounds finely, coarse where it is far off.
NumPy only, no dask.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.values.ulp_lattice import unsigned_view

__all__ = ["CLASSES", "classes", "quantiles"]

Array = npt.NDArray[Any]

# Of a float32, what is left of 19 bits of mantissa are its exponent and four bits more.
_SHIFT = 19
_BIAS = 127
_LEAST = (_BIAS - 24) << 4
_MOST = (_BIAS + 24) << 4
_SIDE = _MOST - _LEAST
_NAN = 2 * _SIDE + 3

CLASSES = _NAN + 1
"""Number of classes: ratios below 1 from −∞ on, 1 itself, those above up to ∞, and NaN last."""


def classes(ratios: Array) -> npt.NDArray[np.intp]:
    """Class of each ratio, in their order.

    Parameters
    ----------
    ratios : ndarray of float64

    Returns
    -------
    ndarray of int, same shape
        Distances from 1 of less than 2⁻²⁴ count as 0, those from 2²⁴ on as infinite.
    """
    distance = (ratios - 1).astype(np.float32)
    bits = unsigned_view(distance)
    place = ((bits & np.uint32(0x7FFFFFFF)) >> np.uint32(_SHIFT)).astype(np.intp)
    np.clip(place, _LEAST - 1, _MOST, out=place)
    place -= _LEAST - 1
    np.negative(place, out=place, where=(bits >> np.uint32(31)) != 0)
    place += _SIDE + 1
    place[np.isnan(distance)] = _NAN
    return place


def _middles() -> npt.NDArray[np.float64]:
    """Ratio that stands for each class but NaN."""
    edges = (np.arange(_LEAST, _MOST + 1, dtype=np.uint32) << np.uint32(_SHIFT)).view(np.float32)
    wide = edges.astype(np.float64)
    above = np.concatenate([(wide[:-1] + wide[1:]) / 2, [np.inf]])
    return 1 + np.concatenate([-above[::-1], [0], above])


_MIDDLES = _middles()


def quantiles(counts: Array, levels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Ratios below which these shares of the counted ones lie.

    Parameters
    ----------
    counts : ndarray of int, (…, class)
    levels : ndarray of float64, (quantile,)
        Between 0 and 1.

    Returns
    -------
    ndarray of float64, (…, quantile)
        The ratio of rank ⌊level · (n − 1)⌋ of n, to 1/32 of its distance from 1. NaN where a NaN
        was counted, or nothing.
    """
    below = counts[..., :_NAN].cumsum(-1)
    total = below[..., -1]
    result = np.full((*total.shape, levels.size), np.nan)
    for at in np.ndindex(total.shape):
        if total[at] and not counts[at][_NAN]:
            ranks = np.floor(levels * (total[at] - 1))
            result[at] = _MIDDLES[np.searchsorted(below[at], ranks, side="right")]
    return result
