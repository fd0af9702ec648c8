"""A selection of a run as a run again, with other chunks and another encoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.layout import parse_bytes
from trajstore.parts import Progress, in_parallel, series_tensor
from trajstore.selection import Selection
from trajstore.source import Series, Source, Tile
from trajstore.writer import RunWriter

__all__ = ["KEPT_ATTRIBUTES", "write_zarr"]

Array = npt.NDArray[Any]

KEPT_ATTRIBUTES = ("config", "optimizer", "provenance", "imported", "created")
"""Attributes of the root that say where the values come from, and stay true of a copy."""


def write_zarr(
    path: Path,
    source: Source,
    selection: Selection,
    *,
    block_rows: int | None,
    encoding: str,
    memory: int | str,
    on_progress: Progress | None = None,
) -> None:
    """Write a selection as a new run.

    What is read goes straight into the buffer of the writer, a block of it at a time; where the new
    blocks are smaller, a block of the source is held between. Where `memory` does not hold a block
    of the source, its chunks are decoded more than once, and memory stays flat.

    Parameters
    ----------
    path : Path
        Where nothing is yet.
    source : Source
    selection : Selection
    block_rows : int, optional
    encoding : str
    memory : int or str
        For the buffer of the writer, and what is held between.
    on_progress : callable, optional

    Raises
    ------
    InvalidArgument
        If `memory` does not hold a block, or W is not selected.
    """
    token = selection.along_token(source.coordinates["token"])
    coordinates: dict[str, Any] = {
        name: selection.along_token(values)
        for name, values in source.coordinates.items()
        if name != "token"
    }
    hidden = [
        series.shape[series.dims.index("hidden")]
        for series in source.series.values()
        if "hidden" in series.dims
    ]
    tensors = {
        name: series_tensor(name, source.series[name], selection) for name in selection.variables
    }
    kept: dict[str, Any] = {
        name: source.attributes[name] for name in KEPT_ATTRIBUTES if name in source.attributes
    }
    steps = source.steps[selection.rows]
    row = sum(tensor.nbytes for tensor in tensors.values()) // len(steps)
    with RunWriter.create(
        path,
        token=token,
        hidden=hidden[0] if hidden else 1,
        variables={name: tensor.dtype for name, tensor in tensors.items()},
        memory=memory,
        block_rows=block_rows,
        encoding=encoding,
        buffers=1,
        attributes=kept,
        **coordinates,
    ) as run:
        # Where the new blocks are smaller, rows of a whole old block are held between the two, as
        # many as what is left of the memory holds.
        block = max(series.tile[0] for series in source.series.values())
        held = min(block, (parse_bytes(memory) - run.layout.memory) // row, len(steps))
        values = {
            name: np.empty((held, *tensor.shape[1:]), source.series[name].native.bits)
            for name, tensor in tensors.items()
            if held > run.layout.block_rows
        }
        total = row * len(steps)
        if not values:
            for at, places in run.stretches(steps):
                _read(source, selection, selection.rows[at], places)
                if on_progress is not None:
                    on_progress(row * at.stop, total)
            return
        for start in range(0, len(steps), held):
            here = slice(start, start + held)
            _read(source, selection, selection.rows[here], values)
            for at, places in run.stretches(steps[here]):
                for name, place in places.items():
                    place[...] = values[name][at]
            if on_progress is not None:
                on_progress(min(row * here.stop, total), total)


def _read(source: Source, selection: Selection, rows: Array, places: dict[str, Array]) -> None:
    """Fill the places of rows."""
    for name, bits in places.items():
        series = source.series[name]
        tokens = selection.tokens if "token" in series.dims else None

        def jobs(
            series: Series = series, tokens: Array | None = tokens, bits: Array = bits
        ) -> Iterator[Callable[[], None]]:
            for tile in series.tiles(rows, tokens, native=True):

                def job(tile: Tile = tile) -> None:
                    bits[tile.where] = tile.read()

                yield job

        for _ in in_parallel(jobs()):
            pass
