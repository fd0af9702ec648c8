"""Reading the arrays of a local run at decoding speed.

zarr's own pipeline reads every run. For a run on a local file system this is faster: it reads the
inner chunks that a selection needs straight from the shards, checks them, and decodes the rows and
tokens that are wanted into their place in the result.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import ShardingCodec

from trajstore.bits import STEP_TYPE, native_type
from trajstore.encoding import Chain, chain_of, is_intact
from trajstore.errors import FormatError
from trajstore.layout import ArrayLayout, Layout, default_threads
from trajstore.metadata import chunk_key
from trajstore.schema import STEP, VARIABLES, variable

__all__ = ["StoredArray", "stored_array", "stored_layout"]

_ENTRY = 16  # bytes of the index for one chunk: offset and length


@dataclass(frozen=True, kw_only=True)
class StoredArray:
    """One array of a run, with the shape it had when it was opened.

    Indexed with integers and slices it returns NumPy arrays; dask and xarray take it as an array.

    Attributes
    ----------
    path : Path
        Of the run.
    name : str
    shape, chunk, shard : tuple of int
        Of the array, of an inner chunk, of a shard.
    chain : Chain
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    shard: tuple[int, ...]
    chain: Chain

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values."""
        return self.chain.native.stored

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def __getitem__(self, key: Any) -> npt.NDArray[Any]:
        """Values of a selection by integers, slices and lists, each along its own axis.

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
        if not all(positions.size for positions in picked):
            return np.empty([n for p in picked for n in p.shape], self.dtype)
        spans = [(int(positions.min()), int(positions.max()) + 1) for positions in picked]
        values = self._read(spans)
        # From the last axis on, so that an axis that an integer removes moves no other.
        for axis in reversed(range(self.ndim)):
            within = picked[axis] - spans[axis][0]
            if within.ndim == 0 or not np.array_equal(within, np.arange(values.shape[axis])):
                values = values.take(within, axis)
        return values

    def bits(self, key: tuple[slice, ...]) -> npt.NDArray[Any]:
        """Bits of a selection by slices, in the type of the chain, without a detour over float32.

        Only `delta` knows a 16-bit type; the chains of `portable` hold what is stored.

        Raises
        ------
        FormatError
            If a shard is missing or broken.
        """
        slices = (*key, *[slice(None)] * (self.ndim - len(key)))
        spans = [item.indices(length)[:2] for item, length in zip(slices, self.shape, strict=True)]
        return self._read(spans, self.chain.native.bits)

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

    def _read(
        self, spans: list[tuple[int, int]], dtype: np.dtype[Any] | None = None
    ) -> npt.NDArray[Any]:
        out = np.empty(
            [stop - start for start, stop in spans], self.dtype if dtype is None else dtype
        )
        if out.size == 0:
            return out
        rows = self.shard[0]
        first, last = spans[0][0] // rows, (spans[0][1] - 1) // rows
        for block in range(first, last + 1):
            path = self.path / chunk_key(self.name, block, self.ndim)
            try:
                file = path.open("rb", buffering=0)
            except FileNotFoundError:
                raise FormatError(
                    f"{self.name}, block {block}: the shard {path} is missing; the run is damaged"
                ) from None
            with file:
                self._read_shard(file.fileno(), block, spans, out)
        return out

    def _read_shard(
        self, file: int, block: int, spans: list[tuple[int, int]], out: npt.NDArray[Any]
    ) -> None:
        index = self.index(file, block)
        origin = (block * self.shard[0], *[0] * (self.ndim - 1))
        for number, corner in self._chunks(origin, spans):
            window, place = [], []
            for at, length, (start, stop) in zip(corner, self.chunk, spans, strict=True):
                low, high = max(start, at), min(stop, at + length)
                window.append(slice(low - at, high - at))
                place.append(slice(low - start, high - start))
            offset, length = (int(value) for value in index[number])
            try:
                data = os.pread(file, length, offset)
                if len(data) != length:
                    raise ValueError("the file ends before it")
                self.chain.decode(data, self.chunk, tuple(window), out[tuple(place)])
            except (ValueError, RuntimeError, OverflowError) as error:
                raise FormatError(
                    f"{self.name}, block {block}, bytes {offset} to {offset + length}: "
                    f"a broken chunk ({error}); the run is damaged"
                ) from error

    def _chunks(
        self, origin: tuple[int, ...], spans: list[tuple[int, int]]
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Number within the shard, and first element, of each chunk that a selection touches."""
        grid = [whole // part for whole, part in zip(self.shard, self.chunk, strict=True)]
        ranges = []
        for at, part, count, (start, stop) in zip(origin, self.chunk, grid, spans, strict=True):
            low = max(0, (start - at) // part)
            high = min(count, (stop - 1 - at) // part + 1)
            ranges.append(range(low, high))
        for position in itertools.product(*ranges):
            number = int(np.ravel_multi_index(position, grid))
            corner = tuple(
                at + step * part
                for at, step, part in zip(origin, position, self.chunk, strict=True)
            )
            yield number, corner


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


def stored_layout(
    path: str | os.PathLike[str], group: zarr.Group, threads: int | None = None
) -> Layout:
    """Layout of a run that is there, so that more rows can be written as the first ones were.

    Parameters
    ----------
    path : path-like
        Of a local run.
    group : zarr.Group
        As zarr opened it.
    threads : int, optional
        That encode; without it as `trajstore.layout.plan` chooses.

    Raises
    ------
    FormatError
        If an array is not stored as a `RunWriter` stores it.
    """
    arrays = {}
    for name, array in sorted(group.arrays(), key=lambda item: item[0] != STEP.name):
        if name != STEP.name and name not in VARIABLES:
            continue
        found = stored_array(path, name, array)
        if found is None:
            raise FormatError(
                f"{name} of {path} is not stored as this version stores it, so no rows can be "
                "added; make another run"
            )
        # What `portable` stores is the widened type, and what rows are made of is the native one.
        native = STEP_TYPE if name == STEP.name else native_type(str(array.attrs["native_dtype"]))
        arrays[name] = ArrayLayout(
            variable=STEP if name == STEP.name else variable(name),
            row=found.shape[1:],
            chunk=found.chunk,
            shard=found.shard,
            chain=replace(found.chain, native=native),
        )
    return Layout(
        block_rows=arrays[STEP.name].shard[0], threads=threads or default_threads(), arrays=arrays
    )
