"""Rows of large compressed HDF5 chunks, decompressed as a stream: no chunk is held whole.

HDF5 itself decompresses a whole chunk for any row, and some chunks have gigabytes. Chunks without a
filter need no stream: HDF5 reads parts of them in place.
"""

from __future__ import annotations

import itertools
import math
import zlib
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

__all__ = ["LARGE_CHUNK", "ChunkStream", "filters", "is_streamed"]

Array = npt.NDArray[Any]

LARGE_CHUNK = 16 << 20
"""Largest chunk, in bytes, that HDF5 may decompress whole for a few rows."""

_DEFLATE = 1
_PIECE = 1 << 20


def filters(dataset: Any) -> tuple[int, ...]:
    """Numbers of the filters of a dataset's chunks; 1 is deflate (gzip)."""
    plist = dataset.id.get_create_plist()
    return tuple(int(plist.get_filter(at)[0]) for at in range(plist.get_nfilters()))


def is_streamed(dataset: Any) -> bool:
    """True if a `ChunkStream` reads the rows: for large chunks with gzip as the only filter."""
    if dataset.chunks is None or math.prod(dataset.chunks) * dataset.dtype.itemsize <= LARGE_CHUNK:
        return False
    # Versions of HDF5 differ in whether the offset of a chunk includes a user block.
    return filters(dataset) == (_DEFLATE,) and dataset.file.userblock_size == 0


class ChunkStream:
    """Rows of one dataset, in order. A read of earlier rows starts again.

    Parameters
    ----------
    file : binary file
        The same file, for direct reads of chunks.
    dataset : h5py.Dataset
        A dataset for which `is_streamed` is true.
    """

    def __init__(self, file: BinaryIO, dataset: Any) -> None:
        self._file = file
        self._dataset = dataset
        self._open: dict[tuple[int, ...], _Chunk] = {}

    def read(self, start: int, stop: int, outer: int | None = None) -> Array:
        """Read rows.

        Raises
        ------
        ValueError
            If a chunk is damaged.
        """
        shape, chunks = self._dataset.shape, self._dataset.chunks
        lead = () if outer is None else (outer,)
        axis = len(lead)
        rows = np.empty((stop - start, *shape[axis + 1 :]), self._dataset.dtype)
        first = start // chunks[axis] * chunks[axis]
        for at in range(first, stop, chunks[axis]):
            inner = [range(0, n, c) for n, c in zip(shape, chunks, strict=True)][axis + 1 :]
            for places in itertools.product(*inner):
                corner = (*(v // c * c for v, c in zip(lead, chunks, strict=False)), at, *places)
                low, high = max(start, at), min(stop, at + chunks[axis])
                held = self._rows(corner, lead, low - at, high - at)
                part = tuple(slice(p, min(p + n, s)) for p, n, s in zip(
                    places, held.shape[1:], shape[axis + 1 :], strict=True
                ))  # fmt: skip
                cut = tuple(slice(0, s.stop - s.start) for s in part)
                rows[(slice(low - start, high - start), *part)] = held[(slice(None), *cut)]
        return rows

    def _rows(self, corner: tuple[int, ...], lead: tuple[int, ...], low: int, high: int) -> Array:
        """Rows of a chunk, numbered within it."""
        chunks, dtype = self._dataset.chunks, self._dataset.dtype
        axis = len(lead)
        row = math.prod(chunks[axis + 1 :]) * dtype.itemsize
        skipped = [v - c for v, c in zip(lead, corner, strict=False)]
        offset = (skipped[0] * chunks[1] if lead else 0) * row
        chunk = self._chunk(corner, axis, offset + low * row)
        data = chunk.read(offset + low * row, (high - low) * row)
        return np.frombuffer(data, dtype).reshape(high - low, *chunks[axis + 1 :])

    def _chunk(self, corner: tuple[int, ...], axis: int, position: int) -> _Chunk:
        """The stream of a chunk, not yet past a position. Chunks of other rows are dropped."""
        held = self._open.get(corner)
        if held is None or held.at > position:
            self._open = {at: one for at, one in self._open.items() if at[axis] == corner[axis]}
            info = self._dataset.id.get_chunk_info_by_coord(corner)
            if info.byte_offset is None:
                raise ValueError(f"the chunk at {corner} is not stored")
            packed = not info.filter_mask & 1
            held = _Chunk(self._file, info.byte_offset, info.size, packed)
            self._open[corner] = held
        return held


class _Chunk:
    """Stream of the bytes of one chunk.

    Attributes
    ----------
    at : int
        Position of the next byte in the decompressed chunk.
    """

    def __init__(self, file: BinaryIO, offset: int, size: int, packed: bool) -> None:
        self.at = 0
        self._file = file
        self._next, self._end = offset, offset + size
        self._inflate = zlib.decompressobj() if packed else None
        self._rest = b""

    def read(self, position: int, size: int) -> bytearray:
        """Read bytes from a position, which must not be before `at`."""
        while self.at < position:
            self.at += len(self._some(min(position - self.at, _PIECE)))
        data = bytearray()
        while len(data) < size:
            data += self._some(min(size - len(data), _PIECE))
        self.at += size
        return data

    def _some(self, most: int) -> bytes:
        """The next bytes, at least one and at most `most`."""
        while True:
            if not self._rest:
                self._file.seek(self._next)
                self._rest = self._file.read(min(_PIECE, self._end - self._next))
                self._next += len(self._rest)
            if self._inflate is None:
                some, self._rest = self._rest[:most], self._rest[most:]
            else:
                some = self._inflate.decompress(self._rest, most)
                ended = not self._rest and not some
                self._rest = self._inflate.unconsumed_tail
                if not some and not ended and not self._inflate.eof:
                    continue
            if not some:
                raise ValueError("a compressed chunk ends too early")
            return some
