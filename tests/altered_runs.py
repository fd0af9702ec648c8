"""Runs of which one stored bit is flipped, checksums and all, as no checksum would show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from damage import METADATA_KEY, edit

from trajstore import RunWriter
from trajstore.store.reading.array_reader import stored_array
from trajstore.values.native_types import narrow, native_type, widen


def change_attributes(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the attributes of a run."""
    edit(path / METADATA_KEY, lambda metadata: change(metadata["attributes"]))


def flip(path: Path, variable: str, where: tuple[int, ...], bit: int) -> None:
    """Flip a bit of a stored value, counted from the lowest bit of its native type.

    where : row, and positions along token and hidden.
    """
    array = zarr.open_array(path / variable, mode="r+")
    native = native_type(str(array.attrs["native_dtype"]))
    bits = narrow(np.asarray(array[where]), native)
    array[where] = widen(bits ^ bits.dtype.type(1 << bit), native)


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
