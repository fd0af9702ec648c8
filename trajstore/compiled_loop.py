"""Loops over numbers that numba compiles, where it is installed and there is enough to go through.

NumPy goes over the numbers once for each operation, and asks for the interpreter's lock after each;
threads then wait for one another. A compiled loop goes over them once, without the lock. It is the
extra `fast`: without it the same numbers come out, later. Loading numba takes tenths of a second,
compiling a loop seconds, once on a machine; so a process has it done when it has gone through so
many numbers without as take that long.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from typing import Any

__all__ = ["CompiledLoop"]

_ENOUGH = 1 << 26
"""Numbers: NumPy adds up so many differences in about the time that loading numba takes."""


class CompiledLoop:
    """A loop, which is compiled when that is worth its time.

    Parameters
    ----------
    module : str
        That imports numba and holds the loop.
    name : str
        Of a function, which `numba.njit` can compile. It gets no lock of the interpreter.
    """

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name
        self._loop: Callable[..., None] | None = None
        self._left = _ENOUGH
        self._loading = Lock()

    def for_numbers(self, count: int) -> Callable[..., None] | None:
        """The compiled loop; None without numba, and as long as too little was gone through.

        Parameters
        ----------
        count : int
            Numbers that are to be gone through now.
        """
        if self._loop is None:
            self._left -= count  # threads may take the same away: it is a rough measure
            # One thread loads it; the others go on as before, and so do all if it cannot be.
            if self._left <= 0 and self._loading.acquire(blocking=False):
                self._loop = self._load()
        return self._loop

    def _load(self) -> Callable[..., None] | None:
        if find_spec("numba") is None:
            return None
        try:
            numba = import_module("numba")
        except ImportError as error:  # such as numba's about a NumPy that it does not know
            warnings.warn(
                f"numba is installed and cannot be used, so reading takes longer: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        if numba.config.DISABLE_JIT:
            return None
        function = getattr(import_module(self._module), self._name)
        try:
            compiled: Callable[..., None] = numba.njit(nogil=True, cache=True)(function)
        except RuntimeError:  # there is no folder to keep it in: it is compiled by each process
            compiled = numba.njit(nogil=True)(function)
        return compiled
