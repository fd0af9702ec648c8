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

    A run is written row by row, and read block by block: rows of all variables are held between the
    two, a block of the source or what fits into half of `memory`. Where that is less than a block,
    its chunks are decoded more than once, and memory stays flat.

    Parameters
    ----------
    path : Path
        Where nothing is yet.
    source : Source
    selection : Selection
    block_rows : int, optional
    encoding : str
    memory : int or str
        For all buffers.
    on_progress : callable, optional

    Raises
    ------
    InvalidArgument
        If `memory` does not hold a block, or W is not selected.
    """
    budget = parse_bytes(memory)
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
    block = max(series.tile[0] for series in source.series.values())
    held = min(_rows_held(block, budget // 2 // row), len(steps))
    with RunWriter.create(
        path,
        token=token,
        hidden=hidden[0] if hidden else 1,
        variables={name: tensor.dtype for name, tensor in tensors.items()},
        memory=max(budget - held * row, 1),
        block_rows=block_rows,
        encoding=encoding,
        attributes=kept,
        **coordinates,
    ) as run:
        total, done = row * len(steps), 0
        values = {
            name: np.empty((held, *tensor.shape[1:]), source.series[name].native.bits)
            for name, tensor in tensors.items()
        }
        for start in range(0, len(steps), held):
            stop = min(start + held, len(steps))
            _read(source, selection, selection.rows[start:stop], values)
            for at in range(start, stop):
                for name, place in run.next_row().items():
                    place[...] = values[name][at - start]
                run.commit_row(int(steps[at]))
            done += row * (stop - start)
            if on_progress is not None:
                on_progress(done, total)


def _rows_held(block: int, most: int) -> int:
    """Rows that are read at once: as few passes over each block as fit."""
    passes = max(1, -(-block // max(most, 1)))
    return -(-block // passes)


def _read(source: Source, selection: Selection, rows: Array, held: dict[str, Array]) -> None:
    """Fill the first of the rows that are held."""
    for name, bits in held.items():
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
