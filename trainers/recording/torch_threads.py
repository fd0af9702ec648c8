"""The number of threads that torch uses on the CPU, on which rounding depends."""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SIZE = 512  # rows of the matrix that is multiplied
_WORTH = 1.2  # ratio of times that is worth a note


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Set the number of threads of torch on the CPU, as in a recorded run.

    Parameters
    ----------
    number : int, optional
        Default: no change.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def slower_threads() -> str | None:
    """Return a note if torch multiplies matrices faster with one thread than with its own number.

    That is so where other programs use the processors. Both are timed on a float32 product.
    """
    if (several := torch.get_num_threads()) == 1:
        return None
    matrix = torch.ones(_SIZE, _SIZE, device="cpu")
    own = _seconds(matrix)
    with torch_threads(1):
        one = _seconds(matrix)
    if own <= _WORTH * one:
        return None
    return (
        f"one thread computes {own / one:.1f} times as fast as {several} threads now, so other "
        "programs use the processors; threads=1 would be faster, and changes the bits"
    )


def _seconds(matrix: torch.Tensor) -> float:
    return statistics.median(timeit.repeat(lambda: matrix @ matrix, number=1))
