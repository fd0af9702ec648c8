"""Runs of which one stored bit is flipped, checksums and all, as no checksum would show it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import zarr

from trajstore.codec.crc32c_check import checksum
from trajstore.store.array_reader import stored_array
from trajstore.store.object_keys import chunk_key

__all__ = ["flip"]


def flip(path: Path, variable: str, where: tuple[int, ...], bit: int) -> None:
    """Flip a bit of a stored value, counted from the lowest bit of its native type.

    where : row, and positions along token and hidden.
    """
    array = zarr.open_group(path, mode="r")[variable]
    stored = stored_array(path, variable, array)
    assert stored is not None
    native = array.attrs["native_dtype"]
    if native == "bfloat16" and stored.chain.native.name == "float32":
        bit += 16  # as the portable encoding holds it
    block, inside = divmod(where[0], stored.shard[0])
    place = (inside, *where[1:])
    start = block * stored.shard[0]
    stop = min(start + stored.shard[0], stored.shape[0])
    bits = stored.bits((slice(start, stop),))
    bits[place] ^= bits.dtype.type(1 << bit)
    grid = [whole // part for whole, part in zip(stored.shard, stored.chunk, strict=True)]
    number = int(
        np.ravel_multi_index([p // c for p, c in zip(place, stored.chunk, strict=True)], grid)
    )
    file = path / chunk_key(variable, block, stored.ndim)
    data = file.read_bytes()
    count = int(np.prod(grid))
    index = np.frombuffer(data[-(16 * count + 4) : -4], "<u8").reshape(count, 2)
    chunks = [data[offset : offset + length] for offset, length in index.tolist()]
    corner = np.unravel_index(number, grid)
    window = tuple(
        slice(at * part, (at + 1) * part) for at, part in zip(corner, stored.chunk, strict=True)
    )
    chunks[number] = stored.chain.encode(np.ascontiguousarray(bits[window]), stored.chunk)
    offsets = np.cumsum([0, *map(len, chunks)])[:-1]
    packed = np.array([offsets, list(map(len, chunks))], "<u8").T.tobytes()
    file.write_bytes(b"".join(chunks) + packed + checksum(packed))
