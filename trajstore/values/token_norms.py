"""Small summaries per token and row: the one definition of each.

A recorder stores them beside the matrices (`grad_token_norm`, `W_step_norm`, `W_ulp_l1`), and
`analysis` computes the same from the matrices when they were not stored. The recorder has to do so
on an accelerator, so `device_norms` implements the same definition in torch;
both agree to the last bit. Therefore nothing is used but operations that IEEE 754 rounds in one way
only: differences, squares, quotients and roots in float64, sums in the order of `hidden_sum`, and
one rounding to float32 at the end (none for a float64 history, of which a recorder keeps float32
all the same). A norm that is NaN is the quiet NaN without sign and payload, about which processors
do not agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.values.ulp_lattice import binade, lattice_type, unsigned_view

__all__ = [
    "hidden_sum",
    "result_dtype",
    "step_norm",
    "token_norm",
    "ulp_hops",
    "ulp_l1",
    "vector_norm",
    "vector_norms",
]

Array = npt.NDArray[Any]

_SUMMED_AT_ONCE = 8_192  # values, by NumPy


def result_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Type of a summary of values of that type."""
    return np.dtype("float64") if np.dtype(dtype) == np.float64 else np.dtype("float32")


def hidden_sum(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Sum over the last axis, in one order whatever surrounds a vector: NumPy's pairwise one.

    Up to 7 values are added one after the other. Up to 128, eight sums take every eighth value
    each; they are added as ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), and then, one after the
    other, the values that are left over. More are cut after n // 2 // 8 · 8 values, and the sums of
    both parts added.

    Parameters
    ----------
    values : ndarray of float64, (…, hidden)

    Returns
    -------
    ndarray of float64, (…)
    """
    # NumPy takes that order along vectors that lie in one piece each; NumPy 2.0 only of so many.
    length = values.shape[-1]
    with np.errstate(invalid="ignore", over="ignore"):
        if length > _SUMMED_AT_ONCE:
            half = length // 2 // 8 * 8
            return np.asarray(hidden_sum(values[..., :half]) + hidden_sum(values[..., half:]))
        return np.asarray(np.ascontiguousarray(values).sum(-1))


def _with_plain_nan(norms: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    norms = np.asarray(norms)
    norms[np.isnan(norms)] = np.nan
    return norms


def vector_norms(vectors: Array, orders: Sequence[float]) -> list[npt.NDArray[np.float64]]:
    """Several norms over the last axis, in float64.

    Parameters
    ----------
    vectors : ndarray, (…, hidden)
    orders : sequence of {1, 2, inf}

    Returns
    -------
    list of ndarray of float64, (…)
    """
    # A NaN is an answer, not a mishap; so is the infinity of a square that no float64 holds.
    with np.errstate(invalid="ignore", over="ignore"):
        wide = np.ascontiguousarray(vectors, np.float64)
        if tuple(orders) == (2,):
            # In place, unless these are the caller's own numbers.
            squares = np.square(wide, out=None if np.may_share_memory(wide, vectors) else wide)
            return [_with_plain_nan(np.sqrt(hidden_sum(squares)))]
        wide = np.abs(wide)
        norms: dict[float, Callable[[], Any]] = {
            1: lambda: hidden_sum(wide),
            2: lambda: np.sqrt(hidden_sum(np.square(wide))),
            np.inf: lambda: wide.max(-1),
        }
        return [_with_plain_nan(norms[order]()) for order in orders]


def vector_norm(vectors: Array, order: float = 2) -> npt.NDArray[np.float64]:
    """Norm over the last axis, in float64.

    Parameters
    ----------
    vectors : ndarray, (…, hidden)
    order : {1, 2, inf}

    Returns
    -------
    ndarray of float64, (…)
    """
    return vector_norms(vectors, (order,))[0]


def _rounded(values: npt.NDArray[np.float64], dtype: npt.DTypeLike) -> Array:
    with np.errstate(over="ignore"):  # what lies beyond float32 is inf, as it should be
        return values.astype(result_dtype(dtype))


def _rounding_slack(hidden: int) -> float:
    """By how much the length of a vector depends on the order of adding up, relative to it.

    Of n squares and their n - 1 sums each is off by half an epsilon at most, relative to a total in
    which nothing cancels; the root halves that. Two orders may be off, in either direction.
    """
    return float((hidden + 8) * np.finfo(np.float64).eps / 2)


def _rounded_lengths(wide: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """What `vector_norm` of order 2 rounds to in float32, in half the time.

    A scalar product adds in an order of its own. Each order comes so close to the sum of the
    squares that nearly always all of them round alike; where they might not, `hidden_sum` decides.
    """
    slack = _rounding_slack(wide.shape[-1])
    with np.errstate(invalid="ignore", over="ignore"):
        lengths = np.sqrt(np.vecdot(wide, wide))
        rounded = np.asarray(lengths * (1 - slack), np.float32)
        unsure = rounded != np.asarray(lengths * (1 + slack), np.float32)
    if unsure.any():  # such as each NaN
        rounded[unsure] = _rounded(vector_norm(wide[unsure]), np.float32)
    return rounded


def token_norm(vectors: Array, order: float = 2) -> Array:
    """Norm of each token's vector; of `grad` with order 2 this is ``grad_token_norm``.

    Parameters
    ----------
    vectors : ndarray of stored values, (…, token, hidden)
    order : {1, 2, inf}

    Returns
    -------
    ndarray of float32, (…, token)
    """
    if order == 2 and result_dtype(vectors.dtype) == np.float32:
        with np.errstate(invalid="ignore"):  # of a signalling NaN
            wide = vectors.astype(np.float64, order="C")
        return _rounded_lengths(wide)
    return _rounded(vector_norm(vectors, order), vectors.dtype)


def step_norm(earlier: Array, later: Array) -> Array:
    """Length of each token's way between two rows: ``W_step_norm``.

    Parameters
    ----------
    earlier, later : ndarray of stored values, (…, token, hidden)

    Returns
    -------
    ndarray of float32, (…, token)
        ‖later − earlier‖₂. NaN where a value is NaN, or an infinity stays.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        change = np.subtract(later, earlier, dtype=np.float64)
    if result_dtype(later.dtype) == np.float32:
        return _rounded_lengths(change)
    return _rounded(vector_norm(change), later.dtype)


def ulp_hops(earlier: Array, later: Array, native: str) -> npt.NDArray[np.float64]:
    """How many lattice spacings each element moved, with its sign: ΔW/ulp(W_earlier).

    Parameters
    ----------
    earlier, later : ndarray of stored values, same shape
    native : str
        Type whose spacing counts.

    Returns
    -------
    ndarray of float64, same shape
        Exact for 16-bit types. 0 where no bit changed, also for NaN and infinities; NaN where a
        NaN or an infinity changed, ±inf where a finite value became infinite.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        hops = np.subtract(later, earlier, dtype=np.float64)
        power = binade(np.ascontiguousarray(earlier), native)
        power *= power.dtype.type(lattice_type(native).epsilon)  # inf stays inf, unlike `spacing`
        hops /= power  # a power of two divides exactly
    lost = np.isnan(hops)
    if lost.any():
        before, after = (unsigned_view(np.ascontiguousarray(x)) for x in (earlier, later))
        hops[lost & (before == after)] = 0
    return hops


def ulp_l1(earlier: Array, later: Array, native: str) -> Array:
    """Lattice spacings that each token moved, summed over its elements: ``W_ulp_l1``.

    Parameters
    ----------
    earlier, later : ndarray of stored values, (…, token, hidden)
    native : str
        Type whose spacing counts, such as ``bfloat16``.

    Returns
    -------
    ndarray of float32, (…, token)
        Σ|ΔW/ulp(W_earlier)|; 0 exactly where the token did not move.
    """
    return _rounded(vector_norm(ulp_hops(earlier, later, native), 1), later.dtype)
