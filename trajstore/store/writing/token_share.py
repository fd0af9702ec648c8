"""The tokens of a run that one of several processes writes.

If a matrix is sharded over processes, no single process holds all of it. Each process writes its
own tokens, in whole shards, into one run. The first process also writes all arrays without tokens
and all metadata files (`shared_run`). The caller that creates a `TokenShare` provides the
communication of the processes. This module does not depend on torch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trajstore.errors import InvalidArgument, RecordingError
from trajstore.store.metadata.block_plan import ArrayLayout, Layout


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenShare:
    """The tokens of a run that one process writes, and its communication with the others.

    Let L be the number of tokens divided by n, rounded up. Process r of n has at most L tokens,
    beginning with token r·L. The sharding ``Shard(0)`` of torch distributes rows in this way.

    Attributes
    ----------
    number, count : int
        Number of this process, and count of all. Process 0 commits.
    exchange : callable
        Sends a value to all processes, and returns the values of all, in order. All processes call
        it equally often, each from one thread at a time. It raises an error if a process has ended,
        or after a time limit.
    close : callable
        Ends the communication. A second call has no effect.
    """

    number: int
    count: int
    exchange: Callable[[Any], list[Any]]
    close: Callable[[], object] = lambda: None

    @property
    def is_first(self) -> bool:
        """True if this process commits."""
        return self.number == 0

    def tokens(self, whole: int) -> slice:
        """Tokens of this process, out of `whole` tokens.

        >>> TokenShare(number=1, count=2, exchange=list).tokens(11)
        slice(6, 11, None)
        """
        length = math.ceil(whole / self.count)
        first = min(self.number * length, whole)
        return slice(first, min(first + length, whole))

    def of_layout(self, layout: Layout) -> Layout:
        """Part of a run's layout that this process holds and writes.

        Raises
        ------
        InvalidArgument
            If a shard of the run contains tokens of two processes.
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
                f"{array.variable.name}: its shards hold {shard} tokens, but each of {self.count} "
                f"processes has {length}, so a shard would contain tokens of two processes; resume "
                "with the number of processes that recorded the run, or with one, or record anew"
            )
        return replace(
            array,
            row=(own.stop - own.start, *array.row[1:]),
            first_part=own.start // shard,
        )


ALONE = TokenShare(number=0, count=1, exchange=lambda value: [value])
"""All tokens of a run that one process writes."""


@contextlib.contextmanager
def in_all_processes(share: TokenShare | None) -> Iterator[None]:
    """Run a ``with`` block in all processes of a run. If it fails in one, it fails in all.

    Parameters
    ----------
    share : TokenShare or None
        None if there is only one process.

    Raises
    ------
    RecordingError
        If the block failed in another process. The message contains its error.
    """
    exchange = (share or ALONE).exchange
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(RecordingError):  # `error` may be why the others have ended
            exchange(sentence(error))
        raise
    raise_failure(exchange(None))


def raise_failure(failures: Sequence[str | None]) -> None:
    """Raise an error if a process has failed.

    Parameters
    ----------
    failures : sequence of str or None
        Error message of each process, or None, in order.

    Raises
    ------
    RecordingError
        If there is a message.
    """
    for number, failure in enumerate(failures):
        if failure is not None:
            raise RecordingError(f"the recording failed in process {number}: {failure}")


def sentence(error: BaseException) -> str:
    """Type and message of an error."""
    return f"{type(error).__name__}: {error}"


def has_tokens(array: ArrayLayout) -> bool:
    """True if an array is divided over the processes."""
    return "token" in array.variable.dims
