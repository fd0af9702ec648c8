"""Export of a run, or part of it, to safetensors, HDF5, Zarr or a new run.

Everything is streamed: a tile of a variable is decoded, converted to the type of the file and
written to its place. Memory does not grow with the run. The result appears complete or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xarray as xr

from trajstore.arguments import EXCHANGE_MEMORY, Count, checks_types
from trajstore.errors import InvalidArgument, did_you_mean
from trajstore.exchange.exporting.damaged_chunks import DamagedChunks
from trajstore.exchange.exporting.export_layout import (
    layout_file,
    population,
    with_everything,
    without_step_0,
)
from trajstore.exchange.exporting.export_run import write_run
from trajstore.exchange.exporting.export_zarr import check_zarr_target, write_zarr
from trajstore.exchange.exporting.joined_runs import check_number
from trajstore.exchange.layouts import Layout, layout_of
from trajstore.exchange.selection import Steps, Tokens, select
from trajstore.formats.hdf5 import write_hdf5
from trajstore.formats.safetensors import write_safetensors
from trajstore.schema import Encoding
from trajstore.store.reading.tiled_reader import open_tiled
from trajstore.store.writing.create import (
    check_file_target,
    check_local_target,
    staged_file,
    staged_run,
)
from trajstore.threads import Progress

FORMATS = ("safetensors", "hdf5", "zarr", "run")

_STORES: dict[str, tuple[Callable[..., Path], Callable[..., None]]] = {
    "zarr": (check_zarr_target, write_zarr),
    "run": (check_local_target, write_run),
}
"""Check of the target and writer of each format that is a folder."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Result of an export.

    Attributes
    ----------
    path : Path
    format, layout : str
    rows, tokens : int
    variables : tuple of str
    bytes : int
        Size on disk.
    notes : tuple of str
        Notes for the reader of the file: values rounded, variables omitted, rows moved.
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
        """The path: functions that open files accept the result."""
        return str(self.path)


Run = str | os.PathLike[str] | xr.Dataset


@checks_types
def export(
    run: Run | Iterable[Run],
    file: str | os.PathLike[str],
    *,
    format: str | None = None,
    layout: str = "native",
    steps: Steps = None,
    tokens: Tokens = None,
    variables: str | Iterable[str] | None = None,
    block_rows: Count | None = None,
    encoding: Encoding | None = None,
    fill_damaged: bool = False,
    memory: int | str = EXCHANGE_MEMORY,
    overwrite: bool = False,
    on_progress: Progress | None = None,
) -> Exported:
    """Export a run, or part of it, for another program.

    Parameters
    ----------
    run : path-like, str or Dataset, or several of them
        A run, or a Dataset with its variables (a subset, for example). Several runs for layouts
        such as ``flannel-5``; for ``flannel-2`` those of both matrices, E first unless
        the names of the recorded parameters are common.
    file : path-like
        Target. The export is written to a temporary path next to it, then renamed.
    format : {'safetensors', 'hdf5', 'zarr', 'run'}, optional
        Default: the format of the layout; ``run`` with an encoding; otherwise safetensors.
        ``hdf5`` keeps 16-bit types as uint16 bits and needs the extra ``hdf5``. ``zarr`` is
        ordinary Zarr v3, which every reader opens without trajstore. ``run`` is a new run, with
        blocks of another size or in another encoding.
    layout : str, default 'native'
        ``native`` keeps names, native types and everything that an import needs; ``hdf5`` does so
        in HDF5, with common names. The others are the layouts of the notebooks' files, which
        ``trajstore import`` lists, or the path of a TOML file that describes a layout. Parts of a
        layout that the run does not hold are omitted, with a note.
    steps : str, int, slice or iterable of int, optional
        Step numbers. ``0:200:10`` selects the recorded steps from 0 to 199 whose distance from 0 is
        a multiple of 10. Default: all.
    tokens : str, path-like or iterable of int, optional
        ``all``, ``dead``, ``live``, vocabulary ids, or a text file of ids. Default: all.
    variables : str or iterable of str, optional
        Names, also as one string with commas. Default: all.
    block_rows : int, optional
        Rows of a chunk of ``zarr``, or of a block of ``run``. Default: planned.
    encoding : {'delta', 'compact'}, optional
        Encoding of a ``run``. Default: the encoding of the exported run.
    fill_damaged : bool
        Write NaN in place of the values of damaged inner chunks, and leave out damaged coordinates
        other than ``token``. For the format ``run``. The attribute ``notes`` of the
        copy, and the notes of the result, list what was filled.
    memory : int or str, default 320 MiB
        Memory for the rows that ``zarr`` and ``run`` hold. The other formats need a few tiles of
        16 MiB.
    overwrite : bool
        Replace an existing file; with ``zarr`` an exported Zarr, with ``run`` a run.
    on_progress : callable, optional
        Called with the bytes that are done and the bytes in total.

    Returns
    -------
    Exported

    Raises
    ------
    RunExists
        If `file` exists and `overwrite` is not set, or it is of another kind.
    InvalidArgument
        If the format, layout or encoding is unknown, or the selection cannot be parsed or is empty.
        If `fill_damaged` is set, and the format is not ``run``, or the run is a Dataset.
        If there are several runs, and the layout holds one, or they have other steps or tokens.
    VariableNotRecorded, StepNotFound
        If the run lacks a variable or step of the layout or the selection.
    MissingExtra
        If the format is ``hdf5`` and h5py is not installed.
    FormatError
        If the run is damaged, and `fill_damaged` is not set, or ``step`` or ``token`` is damaged.
    RunLocked
        If `fill_damaged` is set, and a process is writing to the run.
    OSError
        If the disk is full, for example. Nothing is left behind.

    Examples
    --------
    >>> export("gatsby.zarr", "dead.safetensors", tokens="dead").tokens
    118
    >>> export("gatsby.zarr", "few.zarr", format="zarr", steps="::10", variables="W").rows
    3
    >>> xr.open_zarr("few.zarr").W.sizes["step"]
    3
    """
    notes: Sequence[str] = ()
    described = layout_of(layout)
    format = _checked_format(format, described, block_rows, encoding, fill_damaged)
    if described.whole and format == "hdf5":
        described = layout_of("hdf5")
    check, write = _STORES.get(format, (check_file_target, None))
    check(file, overwrite=overwrite)
    given = [run] if isinstance(run, str | os.PathLike | xr.Dataset) else list(run)
    check_number(described, len(given))
    damaged = DamagedChunks(given[0]) if fill_damaged else None
    opened = [open_tiled(each) for each in given] if damaged is None else [damaged.run]
    runs = [select(each, steps=steps, tokens=tokens, variables=variables) for each in opened]
    if described.whole:
        described = with_everything(described, runs[0])
    elif described.begins_late:
        described, runs = without_step_0(described, runs)
    selection = runs[0]
    omitted: tuple[str, ...] = ()
    if write is not None:
        options: dict[str, Any] = {
            "block_rows": block_rows,
            "memory": memory,
            "on_progress": on_progress,
        }
        if format == "run":
            remarks: list[str] = []
            notes = remarks
            options |= {"encoding": encoding, "damaged": damaged, "on_note": remarks.append}
        with staged_run(file, overwrite=overwrite, check=check) as path:
            write(path, selection, **options)
        if damaged is not None:
            notes = (*notes, *damaged.sentences(selection))
    else:
        content = layout_file(described, runs)
        with staged_file(file, overwrite=overwrite) as path:
            if format == "safetensors":
                rounded = write_safetensors(path, content.tensors, content.texts, on_progress)
            else:
                rounded = write_hdf5(
                    path,
                    content.tensors,
                    content.texts,
                    on_progress,
                    attributes=content.attributes,
                    chunk_rows=described.chunk_rows,
                    gzip=described.gzip,
                    float16_as_bits=described.whole,
                )
        narrower = f"were rounded: layout {layout} holds a narrower type than the run"
        counts = (
            f"{count:,} values of {key} {narrower}" for key, count in rounded.items() if count
        )
        notes = (*notes, *content.notes, *counts)
        omitted = content.omitted
    written = population(described, selection, described.only or "all")
    return Exported(
        path=Path(file),
        format=format,
        layout=layout,
        rows=len(selection.rows) if described.columns else 0,
        tokens=len(written.coordinates["token"]),
        variables=tuple(name for name in selection.variables if name not in omitted),
        bytes=_size(Path(file)),
        notes=tuple(notes),
    )


def _checked_format(
    format: str | None,
    layout: Layout,
    block_rows: int | None,
    encoding: str | None,
    fill_damaged: bool,
) -> str:
    """Format of the export, after a check of the arguments."""
    if format is not None and format not in FORMATS:
        raise InvalidArgument(
            f"cannot export to {format!r}{did_you_mean(format, FORMATS)}; choose from "
            f"{', '.join(FORMATS)}"
        )
    own: str = layout.format
    if layout.name == "native":
        own = format or (own if encoding is None else "run")
    if format is not None and format != own:
        raise InvalidArgument(
            f"got format {format} with layout {layout.name}, which is for {own} files; omit one of "
            "them"
        )
    if own not in _STORES and block_rows is not None:
        raise InvalidArgument(
            f"got block_rows={block_rows} with format {own}, which has no blocks; use it with zarr "
            "or run only"
        )
    if encoding is not None and own != "run":
        raise InvalidArgument(
            f"got encoding={encoding} with format {own}, which has no encoding; use "
            "format run, or omit the encoding"
        )
    if fill_damaged and own != "run":
        raise InvalidArgument(
            f"got fill_damaged with format {own}; fill a copy first: --format run --fill-damaged"
        )
    return own


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
