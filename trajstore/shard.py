"""Assembly of a shard: encoded inner chunks, then an index of where each of them lies.

Source: the `sharding_indexed` codec of the Zarr v3 specification, with the index at the end,
little-endian uint64 pairs (offset, length) in C order of the chunk grid, and its crc32c.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.encoding import checksum, encode
from trajstore.layout import ArrayLayout

__all__ = ["shard_parts"]


def shard_parts(block: npt.NDArray[Any], array: ArrayLayout) -> Iterator[bytes]:
    """Encode one block of a variable as the consecutive parts of its shard.

    Every chunk is stored, also one that equals the fill value: an array of NaN keeps its payloads.

    Parameters
    ----------
    block : ndarray of native bits, (step, …)
        At most ``array.shard`` long in every dimension.
    array : ArrayLayout

    Yields
    ------
    bytes
        Inner chunks in C order, then the index.
    """
    grid = [math.ceil(whole / part) for whole, part in zip(array.shard, array.chunk, strict=True)]
    index = np.empty((math.prod(grid), 2), "<u8")
    offset = 0
    for number, position in enumerate(itertools.product(*map(range, grid))):
        window = tuple(
            slice(at * length, (at + 1) * length)
            for at, length in zip(position, array.chunk, strict=True)
        )
        part = encode(block[window], array.native, array.chunk)
        index[number] = offset, len(part)
        offset += len(part)
        yield part
    packed = index.tobytes()
    yield packed + checksum(packed)
