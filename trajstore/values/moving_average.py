"""Effect of rounding on a moving average, computed for every value of a type.

An optimizer keeps its averages in a native type, and each step rounds them. A 16-bit type has few
enough values to apply one step to each, and to count the values that do not change. The arithmetic
is that of `torch.optim`, whose kernels compute 16-bit types in float32 and round the result.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trajstore.errors import InvalidArgument
from trajstore.values.native_types import native_type, widen
from trajstore.values.rounding import cast

Array = npt.NDArray[Any]

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
