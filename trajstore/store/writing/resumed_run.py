"""A run that is there, as a writer goes on with it: what is kept of it, and how it is stored.

Blocks that are full stay as they are. The rows of the last, unfinished one come back into memory,
to be written again with those that follow.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy.typing as npt
import zarr

from trajstore.byte_sizes import parse_bytes
from trajstore.errors import FormatError, InvalidArgument
from trajstore.schema import STEP, VARIABLES, variable
from trajstore.store.metadata.block_plan import ArrayLayout, Layout, within
from trajstore.store.metadata.fingerprint import Fingerprint, block_digest, coordinate_digests
from trajstore.store.metadata.object_keys import DOCUMENT, block_of
from trajstore.store.metadata.repairs import without_later_repairs
from trajstore.store.metadata.zarr_json import RunMetadata
from trajstore.store.reading.array_reader import StoredArray, stored_array
from trajstore.store.reading.checked_documents import check_own_documents
from trajstore.store.reading.open_group import open_group, run_identity
from trajstore.store.reading.run_info import object_sizes
from trajstore.store.storage.atomic import refuse_links
from trajstore.store.storage.remote_path import (
    REMOTE_REQUESTS,
    Location,
    RemotePath,
    RunPath,
    location,
)
from trajstore.store.writing.token_share import TokenShare, has_tokens
from trajstore.threads import default_threads, in_parallel
from trajstore.values.native_types import STEP_TYPE, as_bits, native_type

__all__ = ["ResumedRun", "check_run", "remove_past_end", "resumed_run", "stored_fingerprints"]


@dataclass(frozen=True, kw_only=True)
class ResumedRun:
    """The first rows of a run, to which more are to be added. Made by `resumed_run`.

    Attributes
    ----------
    path : Path or RemotePath
    rows : int
        That are kept.
    layout : Layout
        Of their blocks, and of those to come.
    metadata : RunMetadata
    arrays : dict of str to StoredArray
        Of the layout, with all rows that are committed.
    fingerprint : Fingerprint
        Digests of the full blocks that are kept.
    share : TokenShare or None
        Of the tokens that are read, where several processes go on with the run.
    """

    path: Location
    rows: int
    layout: Layout
    metadata: RunMetadata
    arrays: dict[str, StoredArray]
    fingerprint: Fingerprint
    share: TokenShare | None = None

    def last_step(self) -> int:
        """Step of the last row that is kept; −1 without any.

        Raises
        ------
        FormatError
            If its shard is missing or broken.
        """
        if not self.rows:
            return -1
        return int(self.arrays[STEP.name].values((slice(self.rows - 1, self.rows),))[0])

    def digest_of_unfinished(self) -> bytes:
        """Digest that the last block has with the rows that are kept of it.

        Raises
        ------
        FormatError
            If a shard is missing or broken.
        """
        return _stored_digest(self.arrays.values(), *divmod(self.rows, self.layout.block_rows))

    def load(self, block: Mapping[str, npt.NDArray[Any]]) -> int:
        """Read the rows of the unfinished block into their places, and look for the full blocks.

        Parameters
        ----------
        block : mapping of str to ndarray, (row, …)
            Native bits of every array; receives the rows that are kept of the block.

        Returns
        -------
        int
            Bytes of the shards of the full blocks.

        Raises
        ------
        FormatError
            If a shard is missing, or one that is read is broken.
        """
        size = 0
        sizes = object_sizes(self.path)
        unfinished = self.rows % self.layout.block_rows
        for name, array in self.layout.arrays.items():
            if unfinished and name in block:
                key = (slice(self.rows - unfinished, self.rows), *self._tokens(array))
                kept = self.arrays[name].values(key)
                block[name][:unfinished] = as_bits(kept, array.native, name)
            if self.share is None or self.share.is_first:
                size += self._size_of_full_blocks(name, sizes)
        return size

    def _tokens(self, array: ArrayLayout) -> tuple[slice, ...]:
        """Of an array, those that this process holds."""
        if self.share is None or not has_tokens(array):
            return ()
        return (self.share.tokens(array.row[0]),)

    def _size_of_full_blocks(self, name: str, sizes: Mapping[str, int]) -> int:
        size = 0
        stored = self.arrays[name]
        for number in range(self.rows // self.layout.block_rows):
            for part in range(stored.parts):
                key = stored.key(number, part)
                if key not in sizes:
                    raise FormatError(
                        f"{name}, block {number}: the shard {self.path / key} is missing; bring "
                        "the run back to what is whole with: trajstore repair "
                        f"{shlex.quote(str(self.path))}"
                    )
                size += sizes[key]
        return size


def check_run(path: RunPath) -> Location:
    """Where a run is that rows can be added to.

    Raises
    ------
    RunNotFound, FormatError
        If it is not.
    InvalidArgument, MissingExtra
        If it is an address that cannot be written to.
    """
    place = location(path).absolute()
    if isinstance(place, RemotePath) and not place.listed:
        raise InvalidArgument(f"cannot add to {path}: a web server is only read from")
    open_group(place)
    refuse_links(place)
    check_own_documents(place)
    return place


def resumed_run(
    path: Location,
    rows: int | None,
    *,
    attributes: Mapping[str, Any] | None,
    memory: int | str,
    threads: int | None,
    share: TokenShare | None = None,
) -> ResumedRun:
    """What a run is for a writer that goes on after so many rows. Nothing is changed yet.

    Parameters
    ----------
    path : Path or RemotePath
        Of a run that is locked.
    rows : int or None
        Keep so many; all that are committed for None.
    attributes : mapping or None
        Attributes of the root that take the place of those it has.
    memory : int or str
        Bytes that the writer may take.
    threads : int or None
        That encode; for None as `trajstore.store.metadata.block_plan.plan` chooses.
    share : TokenShare, optional
        Of the tokens, where several processes go on with it.

    Raises
    ------
    FormatError
        If it is none that this version can add to.
    InvalidArgument
        If `rows` are not there, or `memory` does not hold its blocks.
    """
    layout, arrays = _stored_layout(path, open_group(path), threads)
    root = json.loads((path / DOCUMENT).read_bytes())
    committed = root["attributes"]["committed_rows"]
    if not root.get("consolidated_metadata"):
        raise FormatError(
            f"the root of {path} has been changed by another program and says no longer "
            f"which rows are whole; bring that back with: trajstore repair {shlex.quote(str(path))}"
        )
    keep = committed if rows is None else rows
    if not 0 <= keep <= committed:
        raise InvalidArgument(
            f"{path} has {committed} committed rows, so it cannot go on after {keep}"
        )
    lasting = {**root["attributes"], **(attributes or {})}
    metadata = RunMetadata.stored({**root, "attributes": without_later_repairs(lasting, keep)})
    found = stored_fingerprints(path, RunMetadata.stored(root), arrays, layout, committed)
    _check_content(path, root, found[-1])
    own = layout if share is None else share.of_layout(layout)
    layout = replace(layout, threads=within(own, parse_bytes(memory), threads=threads).threads)
    return ResumedRun(
        path=path,
        rows=keep,
        layout=layout,
        metadata=metadata,
        arrays=arrays,
        fingerprint=found[keep // layout.block_rows].of_attributes(metadata.attributes),
        share=share,
    )


def _check_content(path: Location, root: Mapping[str, Any], found: Fingerprint) -> None:
    """Refuse to go on with what was not committed: the new digests would make it look sound.

    Raises
    ------
    FormatError
        If the digests of the root are not those of what is stored.
    """
    digests = found.attributes()
    if any(root["attributes"].get(name) != digest for name, digest in digests.items()):
        raise FormatError(
            f"what is stored of {path} is not what was committed, so no rows are added to it; see "
            f"what is wrong with: trajstore verify {shlex.quote(str(path))}"
        )


def _stored_layout(
    path: Location, group: zarr.Group, threads: int | None
) -> tuple[Layout, dict[str, StoredArray]]:
    """Layout of the blocks that are there, so that more rows are written as the first ones were."""
    stored: dict[str, StoredArray] = {}
    arrays: dict[str, ArrayLayout] = {}
    for name, array in sorted(group.arrays(), key=lambda item: item[0] != STEP.name):
        if name != STEP.name and name not in VARIABLES:
            continue
        found = stored_array(path, name, array)
        if found is None:
            raise FormatError(
                f"{name} of {path} is not stored as this version stores it, so no rows can be "
                "added; make another run"
            )
        # What is stored of a number a step is the widened type, and its rows are of the native one.
        native = STEP_TYPE if name == STEP.name else native_type(str(array.attrs["native_dtype"]))
        stored[name] = found
        arrays[name] = ArrayLayout(
            variable=STEP if name == STEP.name else variable(name),
            row=found.shape[1:],
            chunk=found.chunk,
            shard=found.shard,
            chain=replace(found.chain, native=native),
        )
    layout = Layout(
        block_rows=arrays[STEP.name].shard[0],
        threads=threads or default_threads(),
        arrays=arrays,
        runs=run_identity(group.attrs),
    )
    return layout, stored


def stored_fingerprints(
    path: Location,
    metadata: RunMetadata,
    arrays: Mapping[str, StoredArray],
    layout: Layout,
    rows: int,
) -> list[Fingerprint]:
    """Digests of a run before its first block, and after each until so many rows.

    By the labels of its shards, which is quick; the rows of a last block that holds more of them,
    as a writer leaves it that dies or is cut, are encoded again.

    Raises
    ------
    FormatError
        If a shard is missing, or what is read of it broken.
    """
    length = layout.block_rows
    digests = coordinate_digests(path, metadata.names())
    found = [metadata.fingerprint(digests, length)]
    jobs = (
        partial(_stored_digest, arrays.values(), number, min(rows - start, length))
        for number, start in enumerate(range(0, rows, length))
    )
    threads = REMOTE_REQUESTS if isinstance(path, RemotePath) else 1
    # The first block that nobody stored ends it, however many are claimed.
    for number, digest in enumerate(in_parallel(jobs, threads)):
        found.append(found[-1].added(min(rows - number * length, length), digest))
    return found


def _stored_digest(arrays: Iterable[StoredArray], number: int, rows: int) -> bytes:
    shards = []
    for stored in arrays:
        for part in range(stored.parts):
            with stored.opened(number, part) as file:
                label = stored.tail(file, number, part).label
            whole = label.rows == rows
            digest = label.digest if whole else stored.digest_of_rows(number, part, rows)
            shards.append((stored.name, part, rows, digest))
    return block_digest(shards)


def remove_past_end(path: Location, layout: Layout, rows: int) -> None:
    """Remove the shards of blocks that a run was cut before and has not grown to again."""
    blocks = -(-rows // layout.block_rows)
    for name, array in layout.arrays.items():
        for shard in (path / name).iterdir():
            place = block_of(shard.name, len(array.shard))
            if place is not None and place[0] >= blocks:
                shard.unlink()
