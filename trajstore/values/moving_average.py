"""What rounding leaves of a moving average: every value of a type, tried.

An optimizer keeps its averages in a native type, and each step rounds them. Whether one can still
fall, or grow, is no matter of estimates: a 16-bit type has few enough values to step each of them
once and see which come back as they were. The arithmetic is that of `torch.optim`, whose kernels
compute 16-bit types in float32 and round what they store.
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
from trajstore.values.rounding import round_to

__all__ = ["MovingAverage", "every_normal_value", "share_left"]

Array = npt.NDArray[Any]

_TOGETHER = 1 << 16
"""Values that are tried at once, so that they stay in the processor's cache."""


@dataclass(frozen=True, kw_only=True)
class MovingAverage:
    """An average that each step carries on as a ← β·a + (1 − β)·x, and rounds.

    Attributes
    ----------
    native : {'bfloat16', 'float16', 'float32'}
        Type that it is kept in.
    beta : float
    form : {'lerp', 'product', 'once'}
        Which results are rounded: ``lerp``, the sum a + (1 − β)(x − a), as `torch.Tensor.lerp_`
        does; ``product``, β·a and then its sum with (1 − β)·x, as ``mul_`` and ``addcmul_`` do;
        ``once``, only the sum of these two, as a fused kernel does.
    """

    native: str
    beta: float
    form: Literal["lerp", "product", "once"]

    def after(self, average: Array, target: Array) -> Array:
        """Average after a step toward a target.

        Parameters
        ----------
        average : ndarray of float32
            Values of the native type, in stored form.
        target : ndarray of float32, same shape
            What is averaged.
        """
        beta, weight = np.float32(self.beta), np.float32(1 - self.beta)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            if self.form == "lerp":
                stepped = average + weight * (target - average)
                if weight >= 0.5:  # where torch begins at the other end
                    stepped = target - (target - average) * (1 - weight)
                return round_to(stepped, self.native)
            kept = beta * average
            if self.form == "product":
                kept = round_to(kept, self.native)
            return round_to(kept + weight * target, self.native)


def every_normal_value(native: str) -> Iterator[Array]:
    """All positive, normal, finite values of a type, some at a time, in stored form.

    Of float32, which has 2^31, all between 1 and 2: multiplying by a power of two changes the
    exponent and nothing else, so what holds of one power of two holds of each.

    Raises
    ------
    InvalidArgument
        For float64, of which even these are too many.

    Examples
    --------
    >>> sum(values.size for values in every_normal_value("bfloat16"))
    32512
    """
    kind = native_type(native)
    if native == "float64":
        raise InvalidArgument(
            "float64 has too many values to try each; expected bfloat16, float16 or float32"
        )
    first, last = 1 << kind.mantissa_bits, kind.infinity_bits
    if native == "float32":
        first = kind.bias << kind.mantissa_bits
        last = first + (1 << kind.mantissa_bits)
    for start in range(first, last, _TOGETHER):
        yield widen(np.arange(start, min(start + _TOGETHER, last), dtype=kind.bits), kind)


@functools.lru_cache(maxsize=256)
def share_left(average: MovingAverage, times: float) -> float:
    """Share of a type's values that a step toward a multiple of themselves leaves as they are.

    Parameters
    ----------
    average : MovingAverage
    times : float
        0 is the strongest pull down that squares can have, a gradient of zero. 2 is as strong a
        pull up; values whose double is infinite do not count.

    Returns
    -------
    float
        From 0, each moves, to 1, none does.

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
        # A change of four spacings: no rounding undoes that, and 2^23 values take their time.
        return 0.0
    left = tried = 0
    for some in values:
        with np.errstate(over="ignore"):
            target = some * np.float32(times)
        there = round_to(target, average.native)
        counted = np.isfinite(there)
        left += int(np.count_nonzero((average.after(some, target) == some) & counted))
        tried += int(np.count_nonzero(counted))
    return left / tried
