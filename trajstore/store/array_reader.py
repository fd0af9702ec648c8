"""Reading the arrays of a local run at decoding speed.

zarr's own pipeline reads every run. For a run on a local file system this is faster: it reads the
inner chunks that a selection needs straight from the shards, checks them, and decodes the rows and
tokens that are wanted into their place in the result, in as many threads as it is given.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import ShardingCodec

from trajstore.codec.chunk_decoder import Decoder
from trajstore.codec.codec_chain import Chain, chain_of
from trajstore.codec.crc32c_check import is_intact
from trajstore.errors import FormatError
from trajstore.store.object_keys import chunk_key
from trajstore.threads import submit

__all__ = ["StoredArray", "stored_array"]

_ENTRY = 16  # bytes of the index for one chunk: offset and length
_SHARES = 4  # of the work, for each thread: the last one to finish is not long alone
_LEAST_WORK = 8 << 20  # bytes to decompress: for fewer, threads wait for each other too long

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class _Pick:
    """What a selection takes of one chunk, along one axis.

    Attributes
    ----------
    window : slice
        Of the chunk: from the first position that is taken to the last.
    taken : ndarray of int or None
        Positions within the window; None for all of them, in order.
    place : slice or ndarray of int
        Where they go in the result.
    """

    window: slice
    taken: Array | None
    place: slice | Array


def _positions(place: slice | Array) -> Array:
    return np.arange(place.start, place.stop) if isinstance(place, slice) else place


@cache
def _readers(threads: int) -> ThreadPoolExecutor:
    """Threads that stay, and keep their scratch."""
    return ThreadPoolExecutor(threads, "trajstore-reader")


os.register_at_fork(after_in_child=_readers.cache_clear)  # a child has none of the threads


def _picks(positions: Array, part: int) -> dict[int, _Pick]:
    """What positions along an axis take of its chunks of that length, by the chunk's number."""
    first, stop = int(positions[0]), int(positions[0]) + len(positions)
    picks = {}
    if np.array_equal(positions, np.arange(first, stop)):
        for number in range(first // part, (stop - 1) // part + 1):
            at = number * part
            low, high = max(first, at), min(stop, at + part)
            picks[number] = _Pick(
                window=slice(low - at, high - at),
                taken=None,
                place=slice(low - first, high - first),
            )
        return picks
    numbers = positions // part
    order = np.argsort(numbers, kind="stable")
    found, starts = np.unique(numbers[order], return_index=True)
    for number, place in zip(found.tolist(), np.split(order, starts[1:]), strict=True):
        within = positions[place] - number * part
        low, high = int(within.min()), int(within.max()) + 1
        picks[number] = _Pick(window=slice(low, high), taken=within - low, place=place)
    return picks


@dataclass(frozen=True, kw_only=True)
class StoredArray:
    """One array of a run, with the shape it had when it was opened.

    Indexed with integers, slices and lists or arrays of integers, each along its own axis, it
    returns NumPy arrays; dask and xarray take it as an array.

    Attributes
    ----------
    path : Path
        Of the run.
    name : str
    shape, chunk, shard : tuple of int
        Of the array, of an inner chunk, of a shard.
    chain : Chain
    threads : int
        That read one selection. One is right where the caller has threads of its own, as dask has.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    shard: tuple[int, ...]
    chain: Chain
    threads: int = 1

    @cached_property
    def decoder(self) -> Decoder:
        """Of its chunks."""
        return Decoder(self.chain, self.chunk)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values."""
        return self.chain.native.stored

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def __getitem__(self, key: Any) -> npt.NDArray[Any]:
        """Values of a selection by integers, slices, lists and arrays, each along its own axis.

        Only chunks that hold a part of it are read.

        Raises
        ------
        IndexError
            If an index is out of range.
        FormatError
            If a shard is missing or broken; the message names array, block and bytes.
        """
        key = key if isinstance(key, tuple) else (key,)
        if len(key) > self.ndim:
            raise IndexError(f"{self.name} has {self.ndim} dimensions, got {len(key)} indices")
        key = (*key, *[slice(None)] * (self.ndim - len(key)))
        picked = [
            np.arange(length)[np.asarray(item, int) if isinstance(item, list) else item]
            for item, length in zip(key, self.shape, strict=True)
        ]
        values = self._read([np.atleast_1d(positions) for positions in picked], self.dtype)
        return values.reshape([length for positions in picked for length in positions.shape])

    def bits(self, key: tuple[slice, ...]) -> Array:
        """Bits of a selection by slices, in the type of the chain, without a detour over float32.

        Only `delta` knows a 16-bit type; the chains of `portable` hold what is stored.

        Raises
        ------
        FormatError
            If a shard is missing or broken.
        """
        slices = (*key, *[slice(None)] * (self.ndim - len(key)))
        picked = [np.arange(length)[item] for item, length in zip(slices, self.shape, strict=True)]
        return self._read(picked, self.chain.native.bits)

    @property
    def index_length(self) -> int:
        """Bytes of the index at the end of a shard."""
        return math.prod(self.shard) // math.prod(self.chunk) * _ENTRY + 4

    def index(self, file: int, block: int) -> npt.NDArray[np.uint64]:
        """Where the inner chunks of a shard lie, from its open file.

        Returns
        -------
        ndarray of uint64, (chunk, 2)
            Offset and length of each, in C order of the chunk grid.

        Raises
        ------
        FormatError
            If the index does not fit its checksum.
        """
        length = self.index_length
        size = os.fstat(file).st_size
        data = os.pread(file, length, max(size - length, 0))
        if size < length or not is_intact(data):
            raise FormatError(
                f"{self.name}, block {block}: the index, the last {length} bytes of {size}, is "
                "broken; the run is damaged"
            )
        return np.frombuffer(data[:-4], "<u8").reshape(-1, 2)

    def _read(self, picked: Sequence[Array], dtype: np.dtype[Any]) -> Array:
        out = np.empty([len(positions) for positions in picked], dtype)
        if out.size == 0:
            return out
        axes = [_picks(*axis) for axis in zip(picked, self.chunk, strict=True)]
        threads = self.threads if self.threads > 1 and self._takes_long(axes) else 1
        shares = self._shares(axes, threads)
        if threads == 1:
            for share in shares:
                self._read_share(*share, axes, out)
            return out
        pool = _readers(threads)
        reading = [submit(pool, self._read_share, *share, axes, out) for share in shares]
        try:
            for done in reading:
                done.result()
        finally:
            for done in reading:
                done.cancel()
        return out

    def _takes_long(self, axes: Sequence[Mapping[int, _Pick]]) -> bool:
        """Whether there is so much to decompress that threads are done earlier than one alone."""
        windows = [[pick.window for pick in axis.values()] for axis in axes]
        return self.decoder.work(windows) > _LEAST_WORK

    def _shares(
        self, axes: Sequence[Mapping[int, _Pick]], threads: int
    ) -> list[tuple[int, list[tuple[int, ...]]]]:
        """Blocks, and places in the grid of chunks of all blocks; enough shares for all threads."""
        rows = self.shard[0] // self.chunk[0]
        blocks: dict[int, list[tuple[int, ...]]] = {}
        for position in itertools.product(*axes):
            blocks.setdefault(position[0] // rows, []).append(position)
        pieces = math.ceil(_SHARES * threads / len(blocks)) if threads > 1 else 1
        shares = []
        for block, positions in blocks.items():
            size = math.ceil(len(positions) / pieces)
            shares += [(block, positions[at : at + size]) for at in range(0, len(positions), size)]
        return shares

    def _read_share(
        self,
        block: int,
        positions: Sequence[tuple[int, ...]],
        axes: Sequence[Mapping[int, _Pick]],
        out: Array,
    ) -> None:
        """Read some chunks of a block into their places."""
        path = os.path.join(self.path, chunk_key(self.name, block, self.ndim))
        try:
            file = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise FormatError(
                f"{self.name}, block {block}: the shard {path} is missing; the run is damaged"
            ) from None
        grid = [whole // part for whole, part in zip(self.shard, self.chunk, strict=True)]
        try:
            index = self.index(file, block)
            for position in positions:
                entry = position[0] % grid[0]
                for at, count in zip(position[1:], grid[1:], strict=True):
                    entry = entry * count + at
                offset, length = index[entry].tolist()
                picks = [axis[number] for axis, number in zip(axes, position, strict=True)]
                try:
                    data = os.pread(file, length, offset)
                    if len(data) != length:
                        raise ValueError("the file ends before it")
                    self._decode(data, picks, out)
                except (ValueError, RuntimeError, OverflowError) as error:
                    raise FormatError(
                        f"{self.name}, block {block}, bytes {offset} to {offset + length}: "
                        f"a broken chunk ({error}); the run is damaged"
                    ) from error
        finally:
            os.close(file)

    def _decode(self, data: bytes, picks: Sequence[_Pick], out: Array) -> None:
        window = tuple(pick.window for pick in picks)
        if all(pick.taken is None for pick in picks):
            place = tuple(pick.place for pick in picks)
            self.decoder.decode(data, window, out[place])
            return
        values = np.empty([item.stop - item.start for item in window], out.dtype)
        self.decoder.decode(data, window, values)
        for axis, pick in enumerate(picks):
            if pick.taken is not None:
                values = values.take(pick.taken, axis)
        out[np.ix_(*[_positions(pick.place) for pick in picks])] = values


def stored_array(
    path: str | os.PathLike[str], name: str, array: zarr.Array[Any]
) -> StoredArray | None:
    """Fast reader of an array.

    Parameters
    ----------
    path : path-like
        Of a local run.
    name : str
    array : zarr.Array
        As zarr opened it.

    Returns
    -------
    StoredArray or None
        None if the array is not stored as a `RunWriter` stores it; zarr can still read it.
    """
    codecs: tuple[Any, ...] = getattr(array.metadata, "codecs", ())
    if len(codecs) != 1 or not isinstance(codecs[0], ShardingCodec) or array.shards is None:
        return None
    (sharding,) = codecs
    keys = array.metadata.to_dict().get("chunk_key_encoding")
    index = [codec.to_dict()["name"] for codec in sharding.index_codecs]
    where = getattr(sharding.index_location, "value", sharding.index_location)
    found = chain_of(sharding.codecs, np.dtype(array.dtype), array.ndim)
    if (
        found is None
        or index != ["bytes", "crc32c"]
        or where != "end"
        or keys != {"name": "default", "configuration": {"separator": "."}}
    ):
        return None
    return StoredArray(
        path=Path(path).absolute(),
        name=name,
        shape=tuple(array.shape),
        chunk=tuple(array.chunks),
        shard=tuple(array.shards),
        chain=found,
    )
