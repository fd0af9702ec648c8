"""Loops over numbers that numba compiles, where it is installed and there is enough to go through.

NumPy goes over the numbers once for each operation, and asks for the interpreter's lock after each;
threads then wait for one another. A compiled loop goes over them once, without the lock. It is the
extra `fast`: without it the same numbers come out, later. A process loads numba in about half a
second, and compiles a loop in as long, once on a machine; so neither is done for small runs.

Loops get their arrays as memory, 1-D: only of such does numba know that values lie side by side.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

__all__ = ["CompiledLoop", "memory_of", "rows_in_one_piece", "values_side_by_side"]

Array = npt.NDArray[Any]
Types = tuple[tuple[np.dtype[Any], bool], ...]
"""Of arrays: numba compiles a loop anew for others, and for arrays that may not be written."""

_ENOUGH = 1 << 26
"""Numbers that NumPy goes through before, in less time than loading numba takes. A scan of ten
times as many then takes about as long as without it, and each further one three fifths of that."""


class CompiledLoop:
    """A loop, which is compiled when that is worth its time.

    Parameters
    ----------
    module : str
        That holds the loop.
    name : str
        Of a function that `numba.njit` can compile, and that raises nothing.
    """

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name
        self._gone_through = 0
        self._compiled: Callable[..., None] | None = None
        self._ready: set[Types] = set()
        self._cannot_be = False
        self._preparing = Lock()

    def is_worth(self, count: int) -> bool:
        """Whether it is time to try `run`.

        Parameters
        ----------
        count : int
            Numbers that are to be gone through now.
        """
        self._gone_through += count  # threads may lose some of it: it is a rough measure
        return self._gone_through >= _ENOUGH and not self._cannot_be

    def run(self, *arguments: Any) -> bool:
        """Run the loop.

        The first thread that asks for it with arrays of such types has it compiled, or loaded from
        where numba keeps it. Meanwhile there is none for others: neither for other threads, nor for
        a child that is forked now, for which it would never be ready.

        Returns
        -------
        bool
            Whether it was run. If not, nothing was done.
        """
        arrays = [item for item in arguments if isinstance(item, np.ndarray)]
        types = tuple((array.dtype, array.flags.writeable) for array in arrays)
        if types in self._ready and self._compiled is not None:
            self._compiled(*arguments)
            return True
        if not self._preparing.acquire(blocking=False):
            return False
        try:
            return self._prepare(types, arguments)
        except Exception as error:  # of numba: the loop itself raises nothing
            self._cannot_be = True
            warnings.warn(
                f"numba cannot be used, so reading takes longer ({error!r}). If what it keeps of "
                "compiled loops is damaged, delete it: *.nbi and *.nbc beside the module "
                f"{self._module}, or in NUMBA_CACHE_DIR. NUMBA_DISABLE_JIT=1 does without numba.",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
        finally:
            self._preparing.release()

    def _prepare(self, types: Types, arguments: tuple[Any, ...]) -> bool:
        """Run the loop for the first time with arrays of these types, if there is numba."""
        if self._compiled is None:
            self._compiled = self._load()
        if self._compiled is None:
            self._cannot_be = True
            return False
        self._compiled(*arguments)
        self._ready.add(types)
        return True

    def _load(self) -> Callable[..., None] | None:
        """The function, to be compiled when it is called; None without numba.

        A division by 0 gives what it gives in NumPy, and raises nothing.
        """
        if find_spec("numba") is None:
            return None
        numba = import_module("numba")
        if numba.config.DISABLE_JIT:
            return None
        function = getattr(import_module(self._module), self._name)
        try:
            compiled: Callable[..., None] = numba.njit(cache=True, nogil=True, error_model="numpy")(
                function
            )
        except RuntimeError:  # there is no folder to keep it in: it is compiled by each process
            compiled = numba.njit(nogil=True, error_model="numpy")(function)
        return compiled


def memory_of(array: Array) -> Array:
    """From the first to the last value of an array, 1-D, with what lies between.

    Parameters
    ----------
    array : ndarray
        Not empty, and of which `values_side_by_side` finds any.
    """
    if array.flags.c_contiguous:
        return array.reshape(-1)
    ways = zip(array.shape, array.strides, strict=True)
    reach = sum((length - 1) * stride for length, stride in ways)
    return as_strided(array, (reach // array.itemsize + 1,), (array.itemsize,))


def values_side_by_side(*arrays: Array) -> tuple[int, int]:
    """How arrays of one shape can be gone through, row by row of what lies in one piece in each.

    Parameters
    ----------
    *arrays : ndarray, (step, …)

    Returns
    -------
    axis : int
        The rows are those of the axes up to this one.
    width : int
        Values of a row; 0 if there are none, or memory that a loop cannot go through.
    """
    shape = arrays[0].shape
    axis, width = len(shape) - 1, 1
    if min(shape) == 0 or not all(map(_is_plain, arrays)):
        return axis, 0
    while axis > 0 and (
        shape[axis] == 1 or all(array.strides[axis] == width * array.itemsize for array in arrays)
    ):
        width *= shape[axis]
        axis -= 1
    return axis, width


def rows_in_one_piece(*arrays: Array) -> bool:
    """Whether each step of each array, all of one shape, lies in one piece."""
    axis, width = values_side_by_side(*arrays)
    return axis == 0 and width > 0


def _is_plain(array: Array) -> bool:
    """Whether its values lie one or more places of their own size apart, as the processor has them.

    numba takes other orders of bytes for the same type.
    """
    apart = all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    return apart and array.dtype.isnative and array.flags.aligned
