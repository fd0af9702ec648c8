"""A selection of a run as a run again, with other chunks and another encoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trajstore.conversion import convert
from trajstore.layout import parse_bytes
from trajstore.parts import Progress, in_parallel, series_tensor
from trajstore.schema import STEP
from trajstore.selection import Selection
from trajstore.source import Source
from trajstore.writer import RunWriter

__all__ = ["KEPT_ATTRIBUTES", "write_zarr"]

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

    A run is written row by row, and read block by block: a few rows of all variables are held
    between the two, as many as `memory` allows besides the buffers of the writer. Where that is
    less than a block of the source, its chunks are decoded more than once, and memory stays flat.

    Parameters
    ----------
    path : Path
        Where nothing is yet.
    source : Source
    selection : Selection
    block_rows : int, optional
    encoding : str
    memory : int or str
        For the buffers of the writer, and as much again for the rows.
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
    with RunWriter.create(
        path,
        token=token,
        hidden=hidden[0] if hidden else 1,
        variables={name: tensor.dtype for name, tensor in tensors.items()},
        memory=budget,
        block_rows=block_rows,
        encoding=encoding,
        attributes=kept,
        **coordinates,
    ) as run:
        row = sum(array.row_bytes for name, array in run.layout.arrays.items() if name != STEP.name)
        held = max(1, min(budget // row, max(series.tile[0] for series in source.series.values())))
        total, done = row * len(steps), 0
        for start in range(0, len(steps), held):
            stop = min(start + held, len(steps))
            values = _read(source, selection, start, stop)
            for at in range(start, stop):
                for name, place in run.next_row().items():
                    place[...] = values[name][at - start]
                run.commit_row(int(steps[at]))
            done += row * (stop - start)
            if on_progress is not None:
                on_progress(done, total)


def _read(source: Source, selection: Selection, start: int, stop: int) -> dict[str, Any]:
    rows = selection.rows[start:stop]
    values = {}
    for name in selection.variables:
        series = source.series[name]
        tokens = selection.tokens if "token" in series.dims else None
        shape = [len(rows), *series.shape[1:]]
        if tokens is not None:
            shape[1] = len(tokens)
        held = np.empty(shape, series.native.bits)

        def jobs(series: Any = series, tokens: Any = tokens, held: Any = held) -> Any:
            for tile in series.tiles(rows, tokens):

                def job(tile: Any = tile) -> None:
                    held[tile.where] = convert(tile.read(), series.native, series.native)[0]

                yield job

        for _ in in_parallel(jobs()):
            pass
        values[name] = held
    return values
