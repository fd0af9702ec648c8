"""The commit of a run that several processes write: by the first of them, when all have written.

Each process writes the shards of its own tokens, in a thread of its own, block after block. Behind
each block they meet: all say which rows they have written, and the digests of their shards. If all
have, the first one commits, and tells the others. So a reader never sees a row of which a shard is
missing, and where one process fails, all do, in the same block.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from trajstore.errors import RecordingError
from trajstore.store.metadata.fingerprint import block_digest
from trajstore.store.metadata.zarr_json import Status
from trajstore.store.writing.commit import Committer
from trajstore.store.writing.token_share import TokenShare, raise_failure, sentence

__all__ = ["ShardDigest", "SharedCommits", "Written"]

ShardDigest = tuple[str, int, int, bytes]
"""Array, part, rows and digest of a shard."""

Written = tuple[int, Sequence[ShardDigest]]
"""Rows of a block, and its shards that were written."""


@dataclass(frozen=True, kw_only=True)
class _Said:
    """What a process says of a block: what is to be visible with it, or why it could not."""

    change: tuple[int, Status] | None = None
    written: Written | None = None
    failure: str | None = None


class SharedCommits:
    """Commits of all processes, seen from one of them.

    Parameters
    ----------
    share : TokenShare
    committer : Committer or None
        Of the first process; the others have none.

    Attributes
    ----------
    rows : int
        Rows that readers see.
    """

    def __init__(self, share: TokenShare, committer: Committer | None) -> None:
        self.rows = 0
        self._share = share
        self._committer = committer

    def commit(self, change: tuple[int, Status], written: Written | None) -> None:
        """Make rows visible, when all processes have written their tokens of them.

        Parameters
        ----------
        change : (int, str)
            Rows and status.
        written : (int, sequence of ShardDigest) or None
            Rows of the block that they end with, and the shards of this process, if it is new.

        Raises
        ------
        RecordingError
            If another process has failed, or is at another row; nothing is committed then.
        """
        said = self._share.exchange(_Said(change=change, written=written))
        raise_failure([one.failure for one in said])
        _check_alike(said)
        failure: BaseException | None = None
        if self._committer is not None:
            try:
                self._committer.commit(change, _whole_block(said))
            except BaseException as error:
                failure = error
        try:
            outcomes = self._share.exchange(None if failure is None else sentence(failure))
        except RecordingError:
            if failure is not None:
                raise failure from None
            raise
        if failure is not None:
            raise failure
        raise_failure(outcomes)
        self.rows = change[0]

    def fail(self, error: BaseException) -> None:
        """Tell the others, who wait for this block, that it cannot be written."""
        with suppress(RecordingError):  # they have ended, and the error is on its way
            self._share.exchange(_Said(failure=sentence(error)))


def _check_alike(said: Sequence[_Said]) -> None:
    if len({(one.change, one.written is None) for one in said}) > 1:
        places = ", ".join(
            f"process {number} with {one.change[0]} rows, {one.change[1]}"
            for number, one in enumerate(said)
            if one.change is not None
        )
        raise RecordingError(
            f"the processes that record a run have not come to the same row: {places}; what was "
            "committed before is whole"
        )


def _whole_block(said: Sequence[_Said]) -> tuple[int, bytes] | None:
    """Rows and digest of the block that all have written; None if there is none."""
    written = [one.written for one in said if one.written is not None]
    if not written:
        return None
    return written[0][0], block_digest(shard for _, shards in written for shard in shards)
