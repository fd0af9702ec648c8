"""Runs of which one stored bit is flipped, checksums and all, as no checksum would show it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from damage import write_shard

from trajstore import RunWriter
from trajstore.store.reading.array_reader import stored_array
from trajstore.values.native_types import native_type


def change_attributes(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the attributes of a run."""
    metadata = json.loads((path / "zarr.json").read_text())
    change(metadata["attributes"])
    (path / "zarr.json").write_text(json.dumps(metadata))


def flip(path: Path, variable: str, where: tuple[int, ...], bit: int) -> None:
    """Flip a bit of a stored value, counted from the lowest bit of its native type.

    where : row, and positions along token and hidden. All shards of a block are one here.
    """
    group = zarr.open_group(path, mode="r")
    array = group[variable]
    stored = stored_array(path, variable, array)
    assert stored is not None
    assert stored.parts == 1
    if array.attrs["native_dtype"] == "bfloat16" and stored.chain.native.name == "float32":
        bit += 16  # as numbers of a step are held
    block, inside = divmod(where[0], stored.shard[0])
    place = (inside, *where[1:])
    start = block * stored.shard[0]
    stop = min(start + stored.shard[0], stored.shape[0])
    bits = stored.bits((slice(start, stop),))
    bits[place] ^= bits.dtype.type(1 << bit)
    corner = [at // part for at, part in zip(place, stored.chunk, strict=True)]
    number = int(np.ravel_multi_index(corner, stored.form.grid))
    with stored.opened(block, 0) as shard:
        tail = shard.tail
    data = (path / stored.key(block, 0)).read_bytes()
    chunks = [data[offset : offset + length] for offset, length in tail.index.tolist()]
    window = tuple(
        slice(at * part, (at + 1) * part) for at, part in zip(corner, stored.chunk, strict=True)
    )
    chunks[number] = stored.chain.encode(np.ascontiguousarray(bits[window]), stored.chunk)
    offsets = np.cumsum([0, *map(len, chunks)])[:-1].tolist()
    index = list(zip(offsets, map(len, chunks), strict=True))
    write_shard(path, variable, block, b"".join(chunks), index)


@contextmanager
def flipped(path: Path, variable: str, where: tuple[int, ...], bit: int) -> Iterator[None]:
    """A run of several tests with one bit flipped, which is put back also where a test fails."""
    flip(path, variable, where, bit)
    try:
        yield
    finally:
        flip(path, variable, where, bit)


def rewrite(path: Path, variable: str, where: tuple[int, ...]) -> None:
    """Flip the lowest bit of a stored value, and write its row and those after it again.

    Every checksum and digest fits then. All shards of a block are one here.
    """
    group = zarr.open_group(path, mode="r")
    first, steps = where[0], np.asarray(group["step"][...])
    rows = {}
    for name, array in group.arrays():
        if "step" in array.metadata.dimension_names[:1] and name != "step":
            stored = stored_array(path, name, array)
            assert stored is not None
            native = native_type(str(array.attrs["native_dtype"]))
            rows[name] = stored.native_bits(slice(first, len(steps)), native).copy()
    rows[variable][(0, *where[1:])] ^= rows[variable].dtype.type(1)
    with RunWriter.resume(path, rows=first) as writer:
        for number, step in enumerate(steps[first:].tolist()):
            for name, place in writer.next_row().items():
                place[...] = rows[name][number]
            writer.commit_row(step)
