"""A selection of a run as a new run, with blocks of another size, or in another encoding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trajstore.arguments import parse_bytes
from trajstore.exchange.exporting.damaged_chunks import DamagedChunks
from trajstore.exchange.selection import Selection
from trajstore.schema import STEP, Encoding
from trajstore.store.metadata.metadata_form import CHANGING
from trajstore.store.metadata.zarr_json import OF_THE_STORE, notes_of, notes_until
from trajstore.store.writing.writer import RunWriter
from trajstore.threads import Progress, in_parallel

Array = npt.NDArray[Any]


def write_run(
    path: Path,
    selection: Selection,
    *,
    block_rows: int | None,
    memory: int | str,
    encoding: Encoding | None = None,
    damaged: DamagedChunks | None = None,
    status: Literal["complete", "interrupted"] = "complete",
    on_note: Callable[[str], None] | None,
    on_progress: Progress | None = None,
) -> None:
    """Write a selection as a new run.

    Rows are decoded straight into the buffer of the writer, one block at a time. If the new blocks
    are smaller, a block of the old run is held in between. If `memory` does not hold a block of the
    old run, its chunks are decoded more than once, and memory stays constant.

    Parameters
    ----------
    path : Path
        A path that does not exist yet.
    selection : Selection
    block_rows : int, optional
    memory : int or str
        Memory for the buffer of the writer and the rows held in between.
    encoding : {'delta', 'compact'}, optional
        Default: the encoding of the run.
    damaged : DamagedChunks, optional
        The source of the run, if damaged values become NaN. The attribute ``notes`` lists them.
    status : {'complete', 'interrupted'}
    on_note : callable, optional
        As for `RunWriter.create`.
    on_progress : callable, optional

    Raises
    ------
    InvalidArgument
        If `memory` does not hold a block, or W is not selected.
    """
    run, populations = selection.run, selection.run.populations
    coordinates: dict[str, Any] = {
        name: values for name, values in selection.coordinates.items() if name not in populations
    } | {name: [str(one) for one in values] for name, values in run.names.items()}
    dropped = {*OF_THE_STORE, *CHANGING}
    hidden = [each.shape[-1] for each in run.series.values() if "hidden" in each.dims]
    with RunWriter.create(
        path,
        hidden=hidden[0] if hidden else 1,
        **run.row_lengths,
        variables={name: run.series[name].native.name for name in selection.variables},
        memory=memory,
        block_rows=block_rows,
        buffers=1,
        commit_every=None,
        fsync=False,  # the caller flushes the whole run before it gets its name
        encoding=encoding or run.attributes.get("encoding", "delta"),
        on_note=on_note,
        attributes={name: run.attributes[name] for name in run.attributes if name not in dropped},
        populations={name: selection.coordinates[name] for name in populations},
        **coordinates,
    ) as new:
        _copy(selection, new, parse_bytes(memory) - new.layout.memory, on_progress)
        filled = [] if damaged is None else damaged.notes(selection)
        last = int(selection.steps.max(initial=-1))
        kept = notes_until(notes_of(run.attributes), last)
        new.notes = [*kept, *filled]
        new.close(status)


def _copy(
    selection: Selection,
    new: RunWriter,
    spare: int,
    on_progress: Progress | None,
) -> None:
    """Copy the selected rows. `spare` bytes are left for rows held in between."""
    steps = selection.steps
    arrays = {name: array for name, array in new.layout.arrays.items() if name != STEP.name}
    row_bytes = sum(array.row_bytes for array in arrays.values())
    # If the new blocks are smaller, up to one old block of rows is held in between, as far as the
    # spare memory allows.
    block = max(variable.tile[0] for variable in selection.run.series.values())
    most = min(block, spare // row_bytes, len(steps))
    if most <= new.layout.block_rows:
        for at, places in new.segments(steps):
            _read(selection, selection.rows[at], places)
            if on_progress is not None:
                on_progress(row_bytes * at.stop, row_bytes * len(steps))
        return
    held = {name: np.empty((most, *array.row), array.native.bits) for name, array in arrays.items()}
    for start in range(0, len(steps), most):
        rows = slice(start, min(start + most, len(steps)))
        _read(selection, selection.rows[rows], held)
        for at, places in new.segments(steps[rows]):
            for name, place in places.items():
                place[...] = held[name][at]
        if on_progress is not None:
            on_progress(row_bytes * rows.stop, row_bytes * len(steps))


def _read(selection: Selection, rows: Array, places: dict[str, Array]) -> None:
    """Fill the places of rows: a tile of all matrices at a time, as some are computed together."""
    tiles: dict[Any, list[Callable[[], None]]] = {}
    for name, place in places.items():
        variable = selection.run.series[name]
        for where in variable.tiles(rows, selection.tokens):
            fill = partial(variable.fill, place, where, rows, selection.tokens, native=True)
            tiles.setdefault(tuple((part.start, part.stop) for part in where), []).append(fill)
    for _ in in_parallel(partial(_fill, together) for together in tiles.values()):
        pass


def _fill(tiles: list[Callable[[], None]]) -> None:
    for fill in tiles:
        fill()
