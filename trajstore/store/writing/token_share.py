"""The tokens of a run that one of several processes writes.

Where a matrix is sharded over processes, no one of them holds all of it. Each writes the tokens
that it holds, whole shards of them, into the one run; what has no tokens is the first one's, which
alone writes documents (`shared_run`). How the processes talk is for whoever makes a `TokenShare`
to say: nothing here knows of torch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trajstore.errors import InvalidArgument, RecordingError
from trajstore.store.metadata.block_plan import ArrayLayout, Layout

__all__ = ["TokenShare", "has_tokens", "in_all_processes", "raise_failure", "sentence"]


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenShare:
    """Which of the tokens of a run a process writes, and how it speaks with the others.

    Process r of n has the tokens from r·L on, L of them or what is left, where L is the number of
    tokens over n, rounded up: as ``Shard(0)`` of torch distributes rows.

    Attributes
    ----------
    number, count : int
        Which of how many processes. The first, 0, commits.
    exchange : callable
        Gives every process what each of them says, in their order. All call it equally often, each
        from one thread at a time; it raises where one of them is no more, and does not wait for
        ever.
    close : callable
        Ends that, when nothing is exchanged any more. Called twice, it does no harm.
    """

    number: int
    count: int
    exchange: Callable[[Any], list[Any]]
    close: Callable[[], object] = lambda: None

    @property
    def is_first(self) -> bool:
        """Whether this process commits."""
        return self.number == 0

    def tokens(self, whole: int) -> slice:
        """Those of this process, of so many.

        >>> TokenShare(number=1, count=2, exchange=list).tokens(11)
        slice(6, 11, None)
        """
        length = math.ceil(whole / self.count)
        first = min(self.number * length, whole)
        return slice(first, min(first + length, whole))

    def of_layout(self, layout: Layout) -> Layout:
        """What of a run this process holds and writes.

        Raises
        ------
        InvalidArgument
            If a shard of the run has tokens of two processes.
        """
        return replace(
            layout,
            arrays={
                name: self._of_array(array)
                for name, array in layout.arrays.items()
                if self.is_first or has_tokens(array)
            },
        )

    def _of_array(self, array: ArrayLayout) -> ArrayLayout:
        if not has_tokens(array):
            return array
        own, shard = self.tokens(array.row[0]), array.shard[1]
        if own.start % shard and own.start < own.stop:
            length = math.ceil(array.row[0] / self.count)
            raise InvalidArgument(
                f"{array.variable.name}: its shards hold {shard} tokens, and each of "
                f"{self.count} processes {length}, so a shard would be of two of them; go on with "
                "as many processes as have recorded the run, or with one, or record anew"
            )
        return replace(
            array,
            row=(own.stop - own.start, *array.row[1:]),
            first_part=own.start // shard,
        )


@contextlib.contextmanager
def in_all_processes(share: TokenShare | None) -> Iterator[None]:
    """Do something in all processes that share in a run: where it fails in one, it fails in all.

    Parameters
    ----------
    share : TokenShare or None
        None where there is only one process.

    Raises
    ------
    RecordingError
        If it has failed in another one; the message says how.
    """
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:
        error = caught
    if share is not None:
        try:
            failures = share.exchange(None if error is None else sentence(error))
        except RecordingError:
            if error is not None:
                raise error from None  # the others may have ended because of it
            raise
        if error is None:
            raise_failure(failures)
    if error is not None:
        raise error


def raise_failure(failures: Sequence[str | None]) -> None:
    """Raise what has failed in one of the processes.

    Parameters
    ----------
    failures : sequence of str or None
        What each of them says, in their order.

    Raises
    ------
    RecordingError
        If one of them says something.
    """
    for number, failure in enumerate(failures):
        if failure is not None:
            raise RecordingError(f"the recording has failed in process {number}: {failure}")


def sentence(error: BaseException) -> str:
    """What an error is called, and says."""
    return f"{type(error).__name__}: {error}"


def has_tokens(array: ArrayLayout) -> bool:
    """Whether an array is divided over the processes."""
    return "token" in array.variable.dims
