"""Runs as files for other programs: safetensors, HDF5, or Zarr with other chunks.

Everything is streamed: a tile of a variable is decoded, put into the type of the file and written
to its place, so that memory does not grow with the run. The result appears whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import xarray as xr

from trajstore.errors import InvalidArgument, VariableNotRecorded
from trajstore.hdf5 import write_hdf5
from trajstore.layout import EXCHANGE_MEMORY
from trajstore.layouts import NOTEBOOKS, notebook_tensors
from trajstore.parts import Progress, Tensor, constant, series_tensor
from trajstore.rechunking import write_zarr
from trajstore.safetensors import write_safetensors
from trajstore.schema import COORDINATES, STEP
from trajstore.selection import Selection, Steps, Tokens, select
from trajstore.source import Source, open_source
from trajstore.staging import staged_file, staged_run

__all__ = ["FORMATS", "LAYOUTS", "Exported", "export"]

FORMATS = ("safetensors", "hdf5", "zarr")
LAYOUTS = ("native", *NOTEBOOKS)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written.

    Attributes
    ----------
    path : Path
    format, layout : str
    rows, tokens : int
    variables : tuple of str
    bytes : int
        On disk.
    notes : tuple of str
        What whoever reads the file should know: what was rounded, left out or moved.
    """

    path: Path
    format: str
    layout: str
    rows: int
    tokens: int
    variables: tuple[str, ...]
    bytes: int
    notes: tuple[str, ...]

    def __fspath__(self) -> str:
        """The path, so that whatever opens files takes the result."""
        return str(self.path)


def export(
    run: str | os.PathLike[str] | xr.Dataset,
    file: str | os.PathLike[str],
    *,
    format: str = "safetensors",
    layout: str = "native",
    steps: Steps = None,
    tokens: Tokens = None,
    variables: str | Iterable[str] | None = None,
    block_rows: int | None = None,
    encoding: str = "portable",
    memory: int | str = EXCHANGE_MEMORY,
    overwrite: bool = False,
    on_progress: Progress | None = None,
) -> Exported:
    """Write a run, or part of it, for another program.

    Parameters
    ----------
    run : path-like, str or Dataset
        A run, or a Dataset with its variables (a subset, say).
    file : path-like
        Made beside its place, then moved there.
    format : {'safetensors', 'hdf5', 'zarr'}
        ``hdf5`` keeps 16-bit types as uint16 bits and needs the extra ``hdf5``; ``zarr`` is a run
        again, with other chunks and another encoding.
    layout : {'native', '14.1a', '15.1a', '1.12a', '1.12f'}
        Of a safetensors file. ``native`` keeps names and native types and all that an import
        needs; the others are those of the notebooks' files.
    steps, tokens, variables : optional
        What to export; see `trajstore.selection.select`. All without them.
    block_rows : int, optional
        Rows of a block of ``zarr``; planned without it.
    encoding : str, default 'portable'
        Of ``zarr``.
    memory : int or str, default 320 MiB
        For the buffer of ``zarr``. The other formats need a few tiles of 16 MiB.
    overwrite : bool
        Replace a file, or a run, that is there.
    on_progress : callable, optional
        Called with the bytes that are done, and those there are.

    Returns
    -------
    Exported

    Raises
    ------
    RunExists
        If there is something at `file` and `overwrite` is not set.
    InvalidArgument
        For an unknown format or layout, or a selection that cannot be read or is empty.
    VariableNotRecorded, StepNotFound
        If the run lacks what the layout or the selection names.
    MissingExtra
        If ``hdf5`` is wanted and h5py is not installed.
    OSError
        If the disk is full, for example; nothing is left behind.

    Examples
    --------
    >>> export("gatsby.zarr", "gatsby.safetensors", layout="15.1a")       # doctest: +SKIP
    >>> export("gatsby.zarr", "few.h5", format="hdf5", steps="::10")      # doctest: +SKIP
    """
    if format not in FORMATS:
        raise InvalidArgument(f"cannot export to {format!r}; choose from {', '.join(FORMATS)}")
    if layout not in LAYOUTS:
        raise InvalidArgument(f"there is no layout {layout!r}; choose from {', '.join(LAYOUTS)}")
    if layout != "native" and format != "safetensors":
        raise InvalidArgument(f"layout {layout} is one of safetensors files, got format {format}")
    if format != "zarr" and block_rows is not None:
        raise InvalidArgument(f"only zarr has blocks; leave block_rows out for {format}")
    source = open_source(run)
    selection = select(source, steps=steps, tokens=tokens, variables=variables)
    notes: list[str] = []
    rounded: Mapping[str, int] = {}
    if format == "zarr":
        with staged_run(file, overwrite=overwrite) as path:
            write_zarr(
                path,
                source,
                selection,
                block_rows=block_rows,
                encoding=encoding,
                memory=memory,
                on_progress=on_progress,
            )
    elif format == "hdf5":
        with staged_file(file, overwrite=overwrite) as path:
            write_hdf5(path, source, selection, on_progress)
    else:
        if layout == "native":
            tensors, metadata = _native(source, selection)
        else:
            tensors, metadata, notes = notebook_tensors(NOTEBOOKS[layout], source, selection)
        with staged_file(file, overwrite=overwrite) as path:
            rounded = write_safetensors(path, tensors, metadata, on_progress)
    notes += [
        f"{count} values of {key} were rounded, as layout {layout} holds a smaller type than the "
        "run"
        for key, count in rounded.items()
        if count
    ]
    return Exported(
        path=Path(file),
        format=format,
        layout=layout,
        rows=len(selection.rows),
        tokens=len(selection.along_token(source.coordinates["token"])),
        variables=selection.variables,
        bytes=_size(Path(file)),
        notes=tuple(notes),
    )


def _native(source: Source, selection: Selection) -> tuple[list[Tensor], dict[str, str]]:
    """Every variable under its own name in its own type, and the attributes as metadata."""
    if not selection.variables:
        raise VariableNotRecorded("the run holds no variable to export")
    tensors = [constant(STEP.name, "int64", source.steps[selection.rows])]
    tensors += [series_tensor(name, source.series[name], selection) for name in selection.variables]
    metadata = {
        "format": "trajstore",
        "attributes": json.dumps(source.attributes),
        "variables": json.dumps(
            {name: source.series[name].attributes for name in selection.variables}
        ),
    }
    for name, values in source.coordinates.items():
        selected = selection.along_token(values)
        if COORDINATES[name].dtype == "string":
            metadata[name] = json.dumps([str(text) for text in selected])
        else:
            tensors.append(constant(name, COORDINATES[name].dtype, selected))
    return tensors, metadata


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
