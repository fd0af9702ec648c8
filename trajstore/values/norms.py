"""Summaries per token and row, and the effect of rounding on an optimizer's averages.

A recorder stores the summaries with the matrices (`grad_token_norm`, `W_step_norm`, `W_ulp_l1`).
If they were not stored, `analysis` computes the same values from the matrices. For an accelerator,
`device_summaries` of the recording implements the same definitions in torch. Both agree in every
bit. Therefore only operations with a unique IEEE 754 result are used: differences, squares,
quotients and roots in float64, and sums in the order of `hidden_sum`. The result is rounded once to
float32 (not for a float64 history, for which a recorder still keeps float32). A NaN norm is the
quiet NaN without sign and payload, because processors differ in both.

An optimizer keeps its averages in a native type, and each step rounds them. A 16-bit type has few
enough values to apply one step to each, and to count the values that do not change. The arithmetic
is that of `torch.optim`, whose kernels compute 16-bit types in float32 and round the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trajstore.errors import InvalidArgument
from trajstore.values.native_types import (
    binade,
    cast,
    lattice_type,
    native_type,
    unsigned_view,
    widen,
)

Array = npt.NDArray[Any]

_SUMMED_AT_ONCE = 8_192  # values that NumPy sums pairwise as one block


def result_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Type of a summary of values of the given type."""
    return np.dtype("float64") if np.dtype(dtype) == np.float64 else np.dtype("float32")


def hidden_sum(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Sum over the last axis in a fixed order, independent of the array: NumPy's pairwise sum.

    Up to 7 values are added in sequence. Up to 128 values are added in eight partial sums, each
    over every eighth value. These are combined as ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), and
    then the remaining values are added in sequence. Longer vectors are split after
    n // 2 // 8 · 8 values, and the sums of both parts are added.

    Parameters
    ----------
    values : ndarray of float64, (…, hidden)

    Returns
    -------
    ndarray of float64, (…)
    """
    # NumPy uses this order for contiguous vectors; NumPy 2.0 only up to _SUMMED_AT_ONCE values.
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
    # NaN and an overflow of a square to infinity are valid results.
    with np.errstate(invalid="ignore", over="ignore"):
        wide = np.ascontiguousarray(vectors, np.float64)
        if tuple(orders) == (2,):
            # In place, unless the array belongs to the caller.
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
    with np.errstate(over="ignore"):  # values beyond float32 become inf
        return values.astype(result_dtype(dtype))


def _rounding_slack(hidden: int) -> float:
    """Maximum relative difference of a vector's length between two orders of summation.

    Each of the n squares and n - 1 sums has a relative error of at most half an epsilon, and
    nothing cancels. The root halves the error. Two orders may differ in opposite directions.
    """
    return float((hidden + 8) * np.finfo(np.float64).eps / 2)


def _rounded_lengths(wide: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """`vector_norm` of order 2 rounded to float32, in half the time.

    A scalar product uses another order of summation. Nearly all sums round to the same float32 in
    any order; the others are computed with `hidden_sum`.
    """
    slack = _rounding_slack(wide.shape[-1])
    with np.errstate(invalid="ignore", over="ignore"):
        lengths = np.sqrt(np.vecdot(wide, wide))
        rounded = np.asarray(lengths * (1 - slack), np.float32)
        unsure = rounded != np.asarray(lengths * (1 + slack), np.float32)
    if unsure.any():  # includes every NaN
        rounded[unsure] = _rounded(vector_norm(wide[unsure]), np.float32)
    return rounded


def token_norm(vectors: Array, order: float = 2) -> Array:
    """Norm of each token's vector. For `grad` with order 2 this is ``grad_token_norm``.

    Parameters
    ----------
    vectors : ndarray of stored values, (…, token, hidden)
    order : {1, 2, inf}

    Returns
    -------
    ndarray of float32, (…, token)
    """
    if order == 2 and result_dtype(vectors.dtype) == np.float32:
        with np.errstate(invalid="ignore"):  # signaling NaN
            wide = vectors.astype(np.float64, order="C")
        return _rounded_lengths(wide)
    return _rounded(vector_norm(vectors, order), vectors.dtype)


def step_norm(earlier: Array, later: Array) -> Array:
    """Length of each token's displacement between two rows: ``W_step_norm``.

    Parameters
    ----------
    earlier, later : ndarray of stored values, (…, token, hidden)

    Returns
    -------
    ndarray of float32, (…, token)
        ‖later − earlier‖₂. NaN where a value is NaN, or an infinity is unchanged.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        change = np.subtract(later, earlier, dtype=np.float64)
    if result_dtype(later.dtype) == np.float32:
        return _rounded_lengths(change)
    return _rounded(vector_norm(change), later.dtype)


def ulp_hops(earlier: Array, later: Array, native: str) -> npt.NDArray[np.float64]:
    """Signed displacement of each element in lattice spacings: ΔW/ulp(W_earlier).

    Parameters
    ----------
    earlier, later : ndarray of stored values, same shape
    native : str
        Type that defines the spacing.

    Returns
    -------
    ndarray of float64, same shape
        Exact for 16-bit types. 0 if no bit changed, also for NaN and infinities; NaN if a NaN or
        an infinity changed; ±inf if a finite value became infinite.
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
    """Displacement of each token in lattice spacings, summed over its elements: ``W_ulp_l1``.

    Parameters
    ----------
    earlier, later : ndarray of stored values, (…, token, hidden)
    native : str
        Type that defines the spacing, such as ``bfloat16``.

    Returns
    -------
    ndarray of float32, (…, token)
        Σ|ΔW/ulp(W_earlier)|; 0 exactly where the token did not move.
    """
    return _rounded(vector_norm(ulp_hops(earlier, later, native), 1), later.dtype)


_TOGETHER = 1 << 16
"""Values per batch, so that they stay in the processor's cache."""


@dataclass(frozen=True, kw_only=True)
class MovingAverage:
    """A moving average a ← β·a + (1 − β)·x that each step rounds.

    Attributes
    ----------
    native : {'bfloat16', 'float16', 'float32'}
        Type of the stored average.
    beta : float
        Decay rate β.
    form : {'lerp', 'product', 'once'}
        Rounded results: ``lerp``, the sum a + (1 − β)(x − a), as `torch.Tensor.lerp_`;
        ``product``, β·a, then its sum with (1 − β)·x, as ``mul_`` and ``addcmul_``; ``once``, only
        the sum of these two, as a fused kernel.
    """

    native: str
    beta: float
    form: Literal["lerp", "product", "once"]

    def after(self, average: Array, target: Array) -> Array:
        """Average after one step toward a target.

        Parameters
        ----------
        average : ndarray of float32
            Values of the native type, in stored form.
        target : ndarray of float32, same shape
            New value x.
        """
        beta, weight = np.float32(self.beta), np.float32(1 - self.beta)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            if self.form == "lerp":
                stepped = average + weight * (target - average)
                if weight >= 0.5:  # torch starts from the target here
                    stepped = target - (target - average) * (1 - weight)
                return cast(stepped, self.native)
            kept = beta * average
            if self.form == "product":
                kept = cast(kept, self.native)
            return cast(kept + weight * target, self.native)


def every_normal_value(native: str) -> Iterator[Array]:
    """All positive, normal, finite values of a type, in batches, in stored form.

    For float32, with 2^31 values, only those from 1 to 2: multiplying by a power of two changes
    only the exponent, so the result for one power of two holds for all.

    Raises
    ------
    InvalidArgument
        For float64, which has too many values.

    Examples
    --------
    >>> sum(values.size for values in every_normal_value("bfloat16"))
    32512
    """
    kind = native_type(native)
    if native == "float64":
        raise InvalidArgument(
            "got float64, expected bfloat16, float16 or float32: float64 has too many values"
        )
    first, last = 1 << kind.mantissa_bits, kind.infinity_bits
    if native == "float32":
        first = kind.bias << kind.mantissa_bits
        last = first + (1 << kind.mantissa_bits)
    for start in range(first, last, _TOGETHER):
        yield widen(np.arange(start, min(start + _TOGETHER, last), dtype=kind.bits), kind)


@functools.lru_cache(maxsize=256)
def share_left(average: MovingAverage, times: float) -> float:
    """Fraction of a type's values that a step toward a multiple of themselves does not change.

    Parameters
    ----------
    average : MovingAverage
    times : float
        The multiple. 0 is a gradient of zero, the strongest decrease of an average of squares. 2 is
        an equally strong increase; values whose double is infinite do not count.

    Returns
    -------
    float
        From 0, every value changes, to 1, none does.

    Raises
    ------
    InvalidArgument
        For float64.

    Examples
    --------
    >>> state = MovingAverage(native="bfloat16", beta=0.999, form="product")
    >>> share_left(state, 0)
    1.0
    """
    values = every_normal_value(average.native)
    if average.native == "float32" and 1 - average.beta > 4 * native_type("float32").epsilon:
        # A change of four spacings survives rounding; testing 2^23 values would be slow.
        return 0.0
    same = total = 0
    for some in values:
        with np.errstate(over="ignore"):
            target = some * np.float32(times)
        there = cast(target, average.native)
        counted = np.isfinite(there)
        same += int(np.count_nonzero((average.after(some, target) == some) & counted))
        total += int(np.count_nonzero(counted))
    return same / total
