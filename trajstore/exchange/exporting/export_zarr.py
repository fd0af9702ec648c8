"""A selection of a run as ordinary Zarr: a Dataset that every reader of Zarr v3 opens.

xarray writes it, only with codecs of the Zarr v3 specification and Blosc. The result is not a run:
it has no block labels and no digests, and can be neither verified nor resumed.
"""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path
from typing import Any

import dask.array
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.arguments import format_bytes, parse_bytes
from trajstore.errors import InvalidArgument, RunExists
from trajstore.exchange.selection import Selection
from trajstore.schema import EXPORTED, STEP, coordinate
from trajstore.store.metadata.metadata_form import CHANGING
from trajstore.store.metadata.zarr_json import OF_THE_STORE
from trajstore.store.reading.tiled_reader import TiledVariable
from trajstore.store.storage.remote_path import local_path
from trajstore.strict_json import parse
from trajstore.threads import Progress
from trajstore.version import __version__

Array = npt.NDArray[Any]

_MOST_ROWS = 256
_CHUNK = 4 << 20
_OPTIONS: dict[str, Any] = {"zarr_format": 3, "consolidated": True, "write_empty_chunks": True}


def check_zarr_target(target: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """Check the path of a new Zarr group.

    Raises
    ------
    RunExists
        If the path exists and `overwrite` is not set, or if it is anything but an exported Zarr.
    """
    path = local_path(target).absolute()
    if not path.exists() and not path.is_symlink():
        return path
    if not overwrite:
        raise RunExists(
            f"{path} already exists; choose another path, or replace it with overwrite=True"
        )
    try:
        ours = EXPORTED in parse((path / "zarr.json").read_text())["attributes"]
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    if path.is_symlink() or not ours:
        raise RunExists(
            f"{path} is not an exported Zarr, so it is not overwritten; choose another path, or "
            "use --format run to rechunk a run in place"
        )
    return path


def write_zarr(
    path: Path,
    selection: Selection,
    *,
    block_rows: int | None,
    memory: int | str,
    on_progress: Progress | None = None,
) -> None:
    """Write a selection as a Zarr group, a few blocks of one variable at a time.

    Values have the type of the store: float32, which holds each native value exactly.

    Parameters
    ----------
    path : Path
        A path that does not exist yet.
    selection : Selection
    block_rows : int, optional
        Rows of a chunk. Default: the rows of a block of the run, at most 256.
    memory : int or str
        Memory for the rows that are held until they are written.
    on_progress : callable, optional

    Raises
    ------
    InvalidArgument
        If `memory` does not hold one row, or `block_rows` rows.
    """
    budget, run = parse_bytes(memory), selection.run
    shapes, held, chunks = {}, {}, {}
    for name in selection.variables:
        variable = run.series[name]
        shapes[name] = variable.shape_of(selection.rows, selection.tokens)
        held[name], chunks[name] = _chunks(variable, shapes[name], block_rows, budget)
    with warnings.catch_warnings():
        # Some readers expect consolidated metadata; the others ignore it.
        warnings.filterwarnings("ignore", "Consolidated metadata", UserWarning)
        _empty(selection, shapes).to_zarr(
            path,
            mode="w-",
            compute=False,
            encoding={name: _encoding(chunk) for name, chunk in chunks.items()},
            **_OPTIONS,
        )
        total = sum(
            math.prod(shapes[name]) * run.series[name].native.stored.itemsize for name in shapes
        )
        done = 0
        for name in selection.variables:
            variable = run.series[name]
            for start in range(0, len(selection.rows), held[name]):
                rows = slice(start, min(start + held[name], len(selection.rows)))
                values = variable.load(selection.rows[rows], selection.tokens)
                part = xr.Dataset({name: (variable.dims, values)})
                part.to_zarr(path, mode="r+", region={STEP.name: rows}, **_OPTIONS)
                done += values.nbytes
                if on_progress is not None:
                    on_progress(done, total)


def _chunks(
    variable: TiledVariable, shape: tuple[int, ...], block_rows: int | None, memory: int
) -> tuple[int, tuple[int, ...]]:
    """Rows to hold at once (whole chunks), and the shape of a chunk."""
    row = max(1, math.prod(shape[1:])) * variable.native.stored.itemsize
    fitting = memory // row
    if fitting < (block_rows or 1):
        raise InvalidArgument(
            f"the memory budget of {format_bytes(memory)} does not hold {block_rows or 1} rows of "
            f"{variable.name}, {format_bytes(row)} each; raise it (--memory), or write chunks of "
            "fewer rows (--block-rows)"
        )
    if "token" in variable.dims:
        rows = block_rows or max(1, min(variable.tile[0], _MOST_ROWS, fitting))
        count = max(1, _CHUNK * shape[1] // (rows * row))
        chunk = (rows, min(count, shape[1]), *shape[2:])
    else:
        rows = block_rows or max(1, min(_CHUNK // row, fitting, shape[0]))
        chunk = (rows, *shape[1:])
    # If chunks are smaller than the blocks that are read, several chunks are written at once.
    return rows * max(1, min(variable.tile[0], fitting) // rows), chunk


def _encoding(chunk: tuple[int, ...]) -> dict[str, Any]:
    from zarr.codecs import BloscCodec, TransposeCodec

    # Values of neighboring steps are similar, so the steps of one element are stored contiguously.
    order = (*range(1, len(chunk)), 0)
    return {
        "chunks": chunk,
        "filters": [TransposeCodec(order=order)] if len(chunk) > 1 else [],
        "compressors": [BloscCodec(cname="zstd", clevel=1, shuffle="bitshuffle")],
        "_FillValue": None,  # readers keep every NaN as it is
    }


def _empty(selection: Selection, shapes: dict[str, tuple[int, ...]]) -> xr.Dataset:
    """The Dataset, without the values of its variables."""
    run, dropped = selection.run, {*OF_THE_STORE, *CHANGING}
    coordinates: dict[str, Any] = {
        STEP.name: (STEP.name, selection.steps, {"long_name": STEP.long_name})
    }
    for name, values in selection.coordinates.items():
        entry = coordinate(name)
        attributes = {} if entry is None else dict(entry.attributes)
        coordinates[name] = ("token", _plain(values), attributes)
    coordinates |= {name: (name, _plain(values)) for name, values in run.names.items()}
    return xr.Dataset(
        {
            name: (
                run.series[name].dims,
                dask.array.empty(shape, dtype=run.series[name].native.stored, chunks=-1),
                run.series[name].attributes,
            )
            for name, shape in shapes.items()
        },
        coords=coordinates,
        attrs={name: value for name, value in run.attributes.items() if name not in dropped}
        | {EXPORTED: __version__},
    )


def _plain(values: Array) -> Array:
    """The same values; strings get the string type of Zarr."""
    if values.dtype.kind in "TUO":
        return values.astype(object).astype(np.dtypes.StringDType())
    return values
