"""A stored run that a writer resumes, and the tokens of it that one of several processes writes.

Full blocks do not change. The rows of the last, unfinished block are loaded into memory, and
written again with the rows that follow.

If a matrix is sharded over processes, no single process holds all of it. Each process writes its
own tokens, in whole shards, into one run. The first process also writes all arrays without tokens
and all metadata files. The caller that creates a `TokenShare` provides the communication of the
processes. This module does not depend on torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy.typing as npt
import zarr

from trajstore.arguments import exact_json
from trajstore.errors import FormatError, InvalidArgument, RecordingError
from trajstore.schema import STEP, VARIABLES, variables_of
from trajstore.store.metadata.block_plan import ArrayLayout, Layout, within
from trajstore.store.metadata.metadata_form import (
    Fingerprint,
    ShardDigest,
    block_digest,
    coordinate_digests,
    run_identity,
)
from trajstore.store.metadata.zarr_json import RunMetadata
from trajstore.store.reading.array_reader import StoredArray, skipped_steps, stored_array
from trajstore.store.reading.open_group import check_own_metadata, open_group
from trajstore.store.reading.run_info import object_sizes
from trajstore.store.storage.atomic import refuse_links
from trajstore.store.storage.remote_path import (
    METADATA_KEY,
    REMOTE_REQUESTS,
    Location,
    RemotePath,
    RunPath,
    block_of,
    location,
)
from trajstore.threads import encoding_threads, in_parallel
from trajstore.units import parse_bytes
from trajstore.values.native_types import STEP_TYPE, as_bits, native_type


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
        tokens, shard = self.tokens(array.row[0]), array.shard[1]
        if tokens.start % shard and tokens.start < tokens.stop:
            length = math.ceil(array.row[0] / self.count)
            raise InvalidArgument(
                f"{array.variable.name}: its shards hold {shard} tokens, but each of {self.count} "
                f"processes has {length}, so a shard would contain tokens of two processes; resume "
                "with the number of processes that recorded the run, or with one, or record anew"
            )
        return replace(
            array,
            row=(tokens.stop - tokens.start, *array.row[1:]),
            first_part=tokens.start // shard,
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


@dataclass(frozen=True, kw_only=True)
class ResumedRun:
    """The first rows of a run, to which a writer adds more. A new run has none.

    Created by `resumed_run` or `trajstore.store.writing.new_run.new_run`.

    Attributes
    ----------
    path : Path or RemotePath
    rows : int
        Number of kept rows.
    layout : Layout
        Layout of all blocks, stored and new.
    metadata : RunMetadata
    arrays : dict of str to StoredArray
        Arrays of the layout, with all committed rows.
    fingerprint : Fingerprint
        Digests of the kept rows.
    share : TokenShare
        Tokens of this process.
    unfinished : tuple of ShardDigest
        Shards of the last block, reduced to its kept rows; empty if that block is full.
    """

    path: Location
    rows: int
    layout: Layout
    metadata: RunMetadata
    arrays: dict[str, StoredArray]
    fingerprint: Fingerprint
    share: TokenShare
    unfinished: tuple[ShardDigest, ...] = ()

    def last_step(self) -> int:
        """Step of the last kept row; −1 without rows.

        Raises
        ------
        FormatError
            If its shard is missing or broken.
        """
        if not self.rows:
            return -1
        return int(self.arrays[STEP.name].values((slice(self.rows - 1, self.rows),))[0])

    def load(self, block: Mapping[str, npt.NDArray[Any]]) -> int:
        """Load the rows of the unfinished block.

        Parameters
        ----------
        block : mapping of str to ndarray, (row, …)
            Native bits of every array. Receives the kept rows of the block.

        Returns
        -------
        int
            Bytes of the shards of the full blocks, if this process counts them.

        Raises
        ------
        FormatError
            If a shard that is read is missing or broken.
        """
        unfinished = self.rows % self.layout.block_rows
        for name, array in self.layout.arrays.items():
            if unfinished and name in block:
                key = [slice(self.rows - unfinished, self.rows)]
                if has_tokens(array):
                    key.append(self.share.tokens(array.row[0]))
                kept = self.arrays[name].values(tuple(key))
                block[name][:unfinished] = as_bits(kept, array.native, name)
        if not self.share.is_first:
            return 0
        sizes = object_sizes(self.path)
        return sum(
            sizes[stored.key(number, part)]
            for stored in self.arrays.values()
            for number in range(self.rows // self.layout.block_rows)
            for part in range(stored.parts)
        )

    def skips(self) -> int:
        """Number of skipped steps before the unfinished block, if rows are computed."""
        if not any(array.chain.rule for array in self.layout.arrays.values()):
            return 0
        return skipped_steps(self.arrays, self.rows - self.rows % self.layout.block_rows)


def check_run(path: RunPath) -> Location:
    """Check that rows can be added to a run, and return its place.

    Raises
    ------
    RunNotFound, FormatError
        If there is no run, or it is damaged.
    InvalidArgument, MissingExtra
        If it is at an address that cannot be written to.
    """
    if isinstance(place := location(path).absolute(), RemotePath) and not place.listed:
        raise InvalidArgument(
            f"cannot add to {path}: web servers are read-only; copy the run to a local folder"
        )
    open_group(place)
    refuse_links(place)
    check_own_metadata(place)
    return place


def resumed_run(
    path: Location,
    rows: int | None,
    *,
    memory: int | str,
    attributes: Mapping[str, Any] | None = None,
    threads: int | None = None,
    share: TokenShare = ALONE,
) -> ResumedRun:
    """Prepare to resume a run after its first `rows` rows. Nothing is written yet.

    Parameters
    ----------
    path : Path or RemotePath
        Path of a locked run.
    rows : int or None
        Number of rows to keep; None for all committed rows.
    memory : int or str
        Memory budget of the writer in bytes.
    attributes : mapping, optional
        Attributes of the root that replace present ones.
    threads : int, optional
        Number of encoding threads; default: chosen as `trajstore.store.metadata.block_plan.plan`.
    share : TokenShare, optional
        Tokens of this process.

    Raises
    ------
    FormatError
        If this version cannot add to the run, or its stored data differs from the last commit.
    InvalidArgument
        If the run has fewer rows, or `memory` is too small for its blocks.
    """
    exact_json("attributes", dict(attributes or {}))
    layout, arrays = _stored_layout(path, open_group(path), threads)
    root = json.loads((path / METADATA_KEY).read_bytes())
    committed = root["attributes"]["committed_rows"]
    if not root.get("consolidated_metadata"):
        raise FormatError(
            f"the root of {path} was changed by another program and lacks the number of complete "
            f"rows; restore it with: trajstore repair {shlex.quote(str(path))}"
        )
    keep = committed if rows is None else rows
    if not 0 <= keep <= committed:
        raise InvalidArgument(
            f"cannot resume {path} after {keep} rows, expected 0 to {committed}, its committed rows"
        )
    metadata = RunMetadata.stored(root, attributes)
    length = layout.block_rows
    fingerprints = block_fingerprints(path, RunMetadata.stored(root), arrays, length, committed)
    ends = {end: _unfinished(arrays, length, end) for end in {keep, committed}}
    digests = fingerprints[-1].ended(ends[committed]).attributes()
    if any(root["attributes"].get(name) != digest for name, digest in digests.items()):
        # New digests would hide the damage.
        raise FormatError(
            f"the stored data of {path} differs from what was committed, so no rows are added; "
            f"list the damage with: trajstore verify {shlex.quote(str(path))}"
        )
    fingerprint = fingerprints[keep // length].ended(ends[keep])
    fitting = within(share.of_layout(layout), parse_bytes(memory), threads=threads)
    layout = replace(layout, threads=fitting.threads)
    return ResumedRun(
        path=path,
        rows=keep,
        layout=layout,
        metadata=metadata,
        arrays=arrays,
        fingerprint=fingerprint.of_attributes(metadata.attributes),
        share=share,
        unfinished=ends[keep],
    )


def _stored_layout(
    path: Location, group: zarr.Group, threads: int | None
) -> tuple[Layout, dict[str, StoredArray]]:
    """Layout of the stored blocks, which new blocks follow."""
    stored: dict[str, StoredArray] = {}
    arrays: dict[str, ArrayLayout] = {}
    variables = variables_of(group.attrs)
    for name, array in sorted(group.arrays(), key=lambda item: item[0] != STEP.name):
        if name != STEP.name and name not in variables:
            continue
        if (reader := stored_array(path, name, array)) is None:
            raise FormatError(
                f"{name} of {path} has a layout of another version or program, so no rows can be "
                "added; record a new run"
            )
        # Per-step scalars are stored in the widened type; their rows have the native one.
        native = STEP_TYPE if name == STEP.name else native_type(str(array.attrs["native_dtype"]))
        stored[name] = reader
        arrays[name] = ArrayLayout(
            variable=STEP if name == STEP.name else VARIABLES[name],
            row=reader.shape[1:],
            chunk=reader.chunk,
            shard=reader.shard,
            chain=replace(reader.chain, native=native),
        )
    layout = Layout(
        block_rows=arrays[STEP.name].shard[0],
        threads=threads or encoding_threads(),
        arrays=arrays,
        runs=run_identity(group.attrs),
    )
    return layout, stored


def block_fingerprints(
    path: Location,
    metadata: RunMetadata,
    arrays: Mapping[str, StoredArray],
    block_rows: int,
    rows: int,
) -> list[Fingerprint]:
    """Digests of a run before its first block, and after each full block of its first `rows` rows.

    They are computed from the labels of the shards, which is fast.

    Raises
    ------
    FormatError
        If a shard is missing, or its end is broken.
    """
    digests = coordinate_digests(path, metadata.names())
    fingerprints = [metadata.fingerprint(digests, block_rows)]
    jobs = (partial(_shards, arrays, number, block_rows) for number in range(rows // block_rows))
    threads = REMOTE_REQUESTS if isinstance(path, RemotePath) else 1
    # The first missing block ends the loop, whatever length the metadata declares.
    for shards in in_parallel(jobs, threads):
        fingerprints.append(fingerprints[-1].added(block_rows, block_digest(shards)))
    return fingerprints


def fingerprint_at(
    path: Location, metadata: RunMetadata, arrays: Mapping[str, StoredArray], rows: int
) -> Fingerprint:
    """Digests of the first `rows` rows of a run, from the labels of its shards.

    Raises
    ------
    FormatError, OSError
        If a shard is missing or its end is broken, or a coordinate cannot be read.
    """
    block_rows = arrays[STEP.name].shard[0]
    full = block_fingerprints(path, metadata, arrays, block_rows, rows)[-1]
    return full.ended(_unfinished(arrays, block_rows, rows))


def _unfinished(
    arrays: Mapping[str, StoredArray], block_rows: int, rows: int
) -> tuple[ShardDigest, ...]:
    """Shards of the last block of the first `rows` rows; empty if it is full.

    If the stored block holds more rows, after a cut or the death of a writer, the kept ones are
    encoded again.
    """
    number, rest = divmod(rows, block_rows)
    return _shards(arrays, number, rest) if rest else ()


def _shards(arrays: Mapping[str, StoredArray], number: int, rows: int) -> tuple[ShardDigest, ...]:
    """Shards of a block, reduced to its first `rows` rows."""
    shards = []
    for name, stored in arrays.items():
        for part in range(stored.parts):
            with stored.opened(number, part) as shard:
                label = shard.tail.label
            whole = label.rows == rows
            digest = label.digest if whole else stored.digest_of_rows(number, part, rows)
            shards.append((name, part, rows, digest))
    return tuple(shards)


def remove_past_end(path: Location, layout: Layout, rows: int) -> None:
    """Remove the shards of blocks after the last row, which a cut left."""
    blocks = -(-rows // layout.block_rows)
    for name, array in layout.arrays.items():
        for shard in (path / name).iterdir():
            if (place := block_of(shard.name, len(array.shard))) is not None and place[0] >= blocks:
                shard.unlink()
