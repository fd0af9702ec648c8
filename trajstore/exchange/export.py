"""Export of a run, or part of it: one function per format, and one for torch tensors.

Everything is streamed: a tile of a variable is decoded, converted to the type of the file and
written to its place. Memory does not grow with the run. The result appears complete or not at all.

xarray writes an ordinary Zarr, with codecs of the Zarr v3 specification and Blosc only, so every
reader opens it. It is not a run: without block labels and digests, it can be neither verified nor
resumed.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trajstore.arguments import Count, checks_types
from trajstore.errors import InvalidArgument, RunExists, did_you_mean, needs_extra
from trajstore.exchange.export_layout import (
    ExportedFile,
    layout_file,
    population,
    with_everything,
    without_step_0,
)
from trajstore.exchange.export_run import DamagedChunks, write_run
from trajstore.exchange.layout_columns import check_number
from trajstore.exchange.layouts import Layout, layout_of
from trajstore.exchange.selection import Selection, Steps, Tokens, select
from trajstore.formats.hdf5 import write_hdf5
from trajstore.formats.safetensors import write_safetensors
from trajstore.installation import __version__, imported
from trajstore.provenance import RunAttributes
from trajstore.schema import EXPORTED, STEP, Encoding, coordinate
from trajstore.store.metadata.metadata_form import CHANGING
from trajstore.store.metadata.zarr_json import OF_THE_STORE
from trajstore.store.reading.tiled_reader import TiledRun, TiledVariable, open_tiled
from trajstore.store.storage.remote_path import local_path
from trajstore.store.writing.create import (
    check_file_target,
    check_local_target,
    staged_file,
    staged_run,
)
from trajstore.strict_json import parse
from trajstore.threads import Progress
from trajstore.units import EXCHANGE_MEMORY, format_bytes, parse_bytes

if TYPE_CHECKING:
    import torch
    import xarray as xr

    Run = str | os.PathLike[str] | xr.Dataset
else:  # importing xarray takes longer than a small export
    Run = str | os.PathLike[str] | Iterable
FORMATS = ("safetensors", "hdf5", "zarr", "run")
ENDINGS = {".safetensors": "safetensors", ".h5": "hdf5", ".hdf5": "hdf5", ".zarr": "zarr"}
"""Formats that the names of files show."""

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
    import xarray

    budget, run = parse_bytes(memory), selection.run
    shapes, at_once, chunks = {}, {}, {}
    for name in selection.variables:
        variable = run.series[name]
        shapes[name] = variable.shape_of(selection.rows, selection.tokens)
        at_once[name], chunks[name] = _chunks(variable, shapes[name], block_rows, budget)
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
            for start in range(0, len(selection.rows), at_once[name]):
                rows = slice(start, min(start + at_once[name], len(selection.rows)))
                values = variable.load(selection.rows[rows], selection.tokens)
                part = xarray.Dataset({name: (variable.dims, values)})
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
    import dask.array
    import xarray

    run, dropped = selection.run, {*OF_THE_STORE, *CHANGING}
    coordinates: dict[str, Any] = {
        STEP.name: (STEP.name, selection.steps, {"long_name": STEP.long_name})
    }
    for name, values in selection.coordinates.items():
        entry = coordinate(name)
        attributes = {} if entry is None else dict(entry.attributes)
        coordinates[name] = ("token", _plain(values), attributes)
    coordinates |= {name: (name, _plain(values)) for name, values in run.names.items()}
    return xarray.Dataset(
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
        Memory for the rows that ``zarr``, ``run`` and compressed HDF5 hold. The other files need a
        few tiles of 16 MiB.
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
        If `file` has the ending of another format.
        If `fill_damaged` is set, and the format is not ``run``, or the run is a Dataset.
        If there are several runs, and the layout holds one, or they have other steps or tokens.
        If `memory` does not hold the rows of a block or a chunk.
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
    >>> import xarray as xr
    >>> xr.open_zarr("few.zarr").W.sizes["step"]
    3
    """
    given: Any = run
    is_one = isinstance(given, (str, os.PathLike, imported("xarray", "Dataset")))
    described = layout_of(layout)
    format = _format_of(format, described, encoding)
    ending = Path(file).suffix.lower()
    if ENDINGS.get(ending, format) not in (format, format.replace("run", "zarr")):
        fitting = next(name for name in ENDINGS if ENDINGS[name] == format.replace("run", "zarr"))
        raise InvalidArgument(
            f"got {file}, whose ending is that of {ENDINGS[ending]}, but layout {described.name} "
            f"is written as {format}; name it NAME{fitting}, or choose another layout or format"
        )
    request = _Request(
        runs=[given] if is_one else list(given),
        file=file,
        layout=layout,
        described=described,
        select=partial(select, steps=steps, tokens=tokens, variables=variables),
        overwrite=overwrite,
        on_progress=on_progress,
    )
    if format == "run":
        return _export_run(request, block_rows, memory, encoding, fill_damaged=fill_damaged)
    if format == "zarr":
        _refuse_options(format, encoding=encoding, fill_damaged=fill_damaged)
        return _export_zarr(request, block_rows, memory)
    _refuse_options(format, block_rows=block_rows, encoding=encoding, fill_damaged=fill_damaged)
    return _export_hdf5(request, memory) if format == "hdf5" else _export_safetensors(request)


def _format_of(format: str | None, layout: Layout, encoding: str | None) -> str:
    """The format of the export: that of the call, or the one that the layout implies."""
    if format is not None and format not in FORMATS:
        raise InvalidArgument(
            f"cannot export to {format!r}{did_you_mean(format, FORMATS)}; choose from "
            f"{', '.join(FORMATS)}"
        )
    implied: str = layout.format
    if layout.name == "native":
        implied = format or (implied if encoding is None else "run")
    if format is not None and format != implied:
        raise InvalidArgument(
            f"got format {format} with layout {layout.name}, which is for {implied} files; omit "
            "one of them"
        )
    return implied


def _refuse_options(
    format: str,
    *,
    block_rows: int | None = None,
    encoding: str | None = None,
    fill_damaged: bool = False,
) -> None:
    """Refuse the options that a format does not have."""
    if block_rows is not None:
        raise InvalidArgument(
            f"got block_rows={block_rows} with format {format}, which has no blocks; use it with "
            "zarr or run only"
        )
    if encoding is not None:
        raise InvalidArgument(
            f"got encoding={encoding} with format {format}, which has no encoding; use format "
            "run, or omit the encoding"
        )
    if fill_damaged:
        raise InvalidArgument(
            f"got fill_damaged with format {format}; fill a copy first: --format run --fill-damaged"
        )


@dataclass(frozen=True, kw_only=True)
class _Request:
    """The arguments of an export that every format has.

    Attributes
    ----------
    runs : list of path-like, str or Dataset
    file : path-like
    layout : str
        Name of the layout, or path of its description.
    described : Layout
    select : callable
        Selects the steps, tokens and variables of an opened run.
    overwrite : bool
    on_progress : callable, optional
    """

    runs: list[Run]
    file: str | os.PathLike[str]
    layout: str
    described: Layout
    select: Callable[[TiledRun], Selection]
    overwrite: bool
    on_progress: Progress | None

    def exported(
        self,
        format: str,
        part: Selection,
        *,
        has_rows: bool = True,
        omitted: Collection[str] = (),
        notes: Iterable[str] = (),
    ) -> Exported:
        """The result, once the file is in its place."""
        path = Path(self.file)
        return Exported(
            path=path,
            format=format,
            layout=self.layout,
            rows=len(part.rows) if has_rows else 0,
            tokens=len(part.coordinates["token"]),
            variables=tuple(name for name in part.variables if name not in omitted),
            bytes=_size(path),
            notes=tuple(notes),
        )


def _export_run(
    request: _Request,
    block_rows: int | None,
    memory: int | str,
    encoding: Encoding | None,
    *,
    fill_damaged: bool,
) -> Exported:
    check_local_target(request.file, overwrite=request.overwrite)
    check_number(request.described, len(request.runs))
    damaged = DamagedChunks(request.runs[0]) if fill_damaged else None
    part = request.select(open_tiled(request.runs[0]) if damaged is None else damaged.run)
    notes: list[str] = []
    if RunAttributes.of(part.run.attributes).keyframe_every:
        notes.append("the copy has no keyframes; to keep them, copy the folder of the run")
    with staged_run(request.file, overwrite=request.overwrite) as path:
        write_run(
            path,
            part,
            block_rows=block_rows,
            memory=memory,
            encoding=encoding,
            damaged=damaged,
            on_note=notes.append,
            on_progress=request.on_progress,
        )
    if damaged is not None:
        notes += damaged.sentences(part)
    return request.exported("run", part, notes=list(dict.fromkeys(notes)))


def _export_zarr(request: _Request, block_rows: int | None, memory: int | str) -> Exported:
    check_zarr_target(request.file, overwrite=request.overwrite)
    check_number(request.described, len(request.runs))
    part = request.select(open_tiled(request.runs[0]))
    with staged_run(request.file, overwrite=request.overwrite, check=check_zarr_target) as path:
        write_zarr(
            path, part, block_rows=block_rows, memory=memory, on_progress=request.on_progress
        )
    return request.exported("zarr", part)


def _export_safetensors(request: _Request) -> Exported:
    def write(path: Path, content: ExportedFile) -> dict[str, int]:
        return write_safetensors(path, content.tensors, content.texts, request.on_progress)

    return _export_layout(request, request.described, write)


def _export_hdf5(request: _Request, memory: int | str) -> Exported:
    layout = layout_of("hdf5") if request.described.whole else request.described

    def write(path: Path, content: ExportedFile) -> dict[str, int]:
        return write_hdf5(
            path,
            content.tensors,
            content.texts,
            request.on_progress,
            attributes=content.attributes,
            chunk_rows=layout.chunk_rows,
            gzip=layout.gzip,
            float16_as_bits=layout.whole,
            memory=parse_bytes(memory),
        )

    return _export_layout(request, layout, write)


def _export_layout(
    request: _Request,
    layout: Layout,
    write: Callable[[Path, ExportedFile], dict[str, int]],
) -> Exported:
    """Write a file in a layout. `write` returns the numbers of rounded values, by key."""
    check_file_target(request.file, overwrite=request.overwrite)
    check_number(layout, len(request.runs))
    opened = [open_tiled(run) for run in request.runs]
    parts = [request.select(run) for run in opened]
    if layout.whole:
        layout = with_everything(layout, parts[0])
    elif layout.begins_late:
        layout, parts = without_step_0(layout, parts)
    content = layout_file(layout, parts)
    with staged_file(request.file, overwrite=request.overwrite) as path:
        rounded = write(path, content)
    narrower = f"were rounded: layout {request.layout} holds a narrower type than the run"
    counts = (f"{count:,} values of {key} {narrower}" for key, count in rounded.items() if count)
    return request.exported(
        layout.format,
        population(layout, parts[0], layout.only or "all"),
        has_rows=bool(layout.columns),
        omitted=content.omitted,
        notes=(*content.notes, *counts),
    )


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def to_torch(
    run: str | os.PathLike[str] | xr.Dataset,
    *,
    steps: Steps = None,
    tokens: Tokens = None,
    variables: str | Iterable[str] | None = None,
) -> dict[str, torch.Tensor]:
    """Read a selection as tensors in native types: bfloat16 becomes ``torch.bfloat16``.

    Each tensor has its own memory, which is filled once, tile by tile. It shares nothing with the
    run, a Dataset or another tensor, so writing to it changes nothing else. Only the selection is
    decoded and held.

    Parameters
    ----------
    run : path-like, str or Dataset
    steps : str, int, slice or iterable of int, optional
        Step numbers. ``0:200:10`` selects the recorded steps from 0 to 199 whose distance from 0 is
        a multiple of 10. Default: all.
    tokens : str, path-like or iterable of int, optional
        ``all``, ``dead``, ``live``, vocabulary ids, or a text file of ids. Default: all.
    variables : str or iterable of str, optional
        Names, also as one string with commas. Default: all.

    Returns
    -------
    dict of str to torch.Tensor
        Tensors on the CPU: ``step`` (int64), ``token`` (int64), and each variable.

    Raises
    ------
    MissingExtra
        If torch is not installed.
    RunNotFound, FormatError, InvalidArgument, StepNotFound, VariableNotRecorded
        If the run or the selection does not exist.

    Examples
    --------
    >>> W = to_torch("gatsby.zarr", steps="::10", tokens="dead")["W"]
    >>> W.dtype, W.shape
    (torch.bfloat16, torch.Size([3, 118, 4]))
    """
    with needs_extra("to_torch", "torch"):
        import torch
    selection = select(open_tiled(run), steps=steps, tokens=tokens, variables=variables)
    tensors = {
        "step": torch.tensor(selection.steps, dtype=torch.int64),
        "token": torch.tensor(selection.coordinates["token"], dtype=torch.int64),
    }
    for name in selection.variables:
        variable = selection.run.series[name]
        bits = variable.load(selection.rows, selection.tokens, native=True)
        # torch has few unsigned types; the signed type of the same width holds the same bits.
        signed = torch.from_numpy(bits.view(f"i{bits.itemsize}"))
        tensors[name] = signed.view(getattr(torch, variable.native.name))
    return tensors
