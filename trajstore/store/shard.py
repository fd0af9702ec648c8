"""Assembly of a shard: encoded inner chunks, then an index of where each of them lies.

Source: the `sharding_indexed` codec of the Zarr v3 specification, with the index at the end,
little-endian uint64 pairs (offset, length) in C order of the chunk grid, and its crc32c.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from trajstore.codec.crc32c_check import checksum
from trajstore.store.block_plan import ArrayLayout

__all__ = ["chunk_windows", "shard_parts"]


def chunk_windows(array: ArrayLayout) -> Iterator[tuple[slice, ...]]:
    """Where each inner chunk lies in a block, in C order of the chunk grid."""
    for position in itertools.product(*map(range, array.grid)):
        yield tuple(
            slice(at * length, (at + 1) * length)
            for at, length in zip(position, array.chunk, strict=True)
        )


def shard_parts(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Consecutive parts of a shard: the encoded chunks, each as soon as it is there, and the index.

    Every chunk is stored, also one that equals the fill value: an array of NaN keeps its payloads.
    """
    index: list[tuple[int, int]] = []
    offset = 0
    for chunk in chunks:
        index.append((offset, len(chunk)))
        offset += len(chunk)
        yield chunk
    packed = np.array(index, "<u8").tobytes()
    yield packed + checksum(packed)
