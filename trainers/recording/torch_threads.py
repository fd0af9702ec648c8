"""The number of threads that torch uses on the CPU: rounding depends on their shares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trajstore.errors import InvalidArgument

__all__ = ["check_threads", "torch_threads"]


def check_threads(number: int | None) -> None:
    """Insist on a possible number of threads.

    Raises
    ------
    InvalidArgument
        If it is less than 1.
    """
    if number is not None and number < 1:
        raise InvalidArgument(f"threads: got {number}, expected at least 1")


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Have torch use so many threads on the CPU, as when a run was recorded.

    Parameters
    ----------
    number : int, optional
        As many as now without it.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
