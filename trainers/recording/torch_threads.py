"""The number of threads that torch uses on the CPU, on which rounding depends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trajstore.errors import InvalidArgument

__all__ = ["check_threads", "torch_threads"]


def check_threads(number: int | None) -> None:
    """Check a number of threads.

    Raises
    ------
    InvalidArgument
        If it is less than 1.
    """
    if number is not None and number < 1:
        raise InvalidArgument(f"threads: got {number}, expected at least 1")


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
