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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from trajstore.arguments import Count, checks_types
from trajstore.defaults import EXCHANGE_MEMORY
from trajstore.errors import InvalidArgument, needs_extra
from trajstore.exchange.export_layout import layout_file
from trajstore.exchange.export_run import DamagedChunks, write_run
from trajstore.exchange.layout_columns import check_number
from trajstore.exchange.layouts import Layout, as_exported, layout_of
from trajstore.exchange.selection import Selection, Steps, Tokens, select
from trajstore.formats.hdf5 import write_hdf5
from trajstore.formats.safetensors import write_safetensors
from trajstore.installation import __version__, imported
from trajstore.provenance import RunAttributes
from trajstore.schema import EXPORTED, STEP, Encoding, coordinate
from trajstore.store.metadata.block_plan import MOST_ROWS
from trajstore.store.metadata.metadata_form import CHANGING
from trajstore.store.metadata.zarr_json import OF_THE_STORE
from trajstore.store.reading.tiled_reader import TiledVariable, open_tiled
from trajstore.store.storage.remote_path import local_path
from trajstore.store.writing.create import (
    check_file_target,
    check_local_target,
    staged_file,
    staged_run,
)
from trajstore.threads import Progress
from trajstore.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    import torch
    import xarray as xr

    Run = str | os.PathLike[str] | xr.Dataset
else:  # importing xarray takes longer than a small export
    Run = str | os.PathLike[str] | Iterable
Format = Literal["safetensors", "hdf5", "zarr", "run"]
ENDINGS: dict[str, Format] = {
    ".safetensors": "safetensors", ".h5": "hdf5", ".hdf5": "hdf5", ".zarr": "zarr"
}  # fmt: skip
"""Formats that the names of files show."""

_OF_FORMATS = {"block_rows": ("zarr", "run"), "encoding": ("run",), "fill_damaged": ("run",)}
"""Formats of the options that not all formats have."""

Array = npt.NDArray[Any]

_CHUNK = 4 << 20
_OPTIONS: dict[str, Any] = {"zarr_format": 3, "consolidated": True, "write_empty_chunks": True}


def check_zarr_target(target: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """Check the path of a new Zarr group.

    Raises
    ------
    RunExists
        If the path exists and `overwrite` is not set, or if it is anything but an exported Zarr.
    """
    what = "an exported Zarr (format='run' replaces a run)"
    return check_local_target(local_path(target), overwrite=overwrite, mark=EXPORTED, what=what)


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

    budget, rows, tokens = parse_bytes(memory), selection.rows, selection.tokens
    variables = [selection.run.series[name] for name in selection.variables]
    empty = _empty(selection)
    total = sum(each.nbytes for each in empty.data_vars.values())
    chunks = {each.name: _chunks(each, empty[each.name].shape, block_rows, budget)
              for each in variables}  # fmt: skip
    with warnings.catch_warnings():
        # Some readers expect consolidated metadata; the others ignore it.
        warnings.filterwarnings("ignore", "Consolidated metadata", UserWarning)
        encoding = {name: _encoding(chunk) for name, (_, chunk) in chunks.items()}
        empty.to_zarr(path, mode="w-", compute=False, encoding=encoding, **_OPTIONS)
        done = 0
        for variable in variables:
            at_once, _ = chunks[variable.name]
            for start in range(0, len(rows), at_once):
                at = slice(start, min(start + at_once, len(rows)))
                values = variable.load(rows[at], tokens)
                part = xarray.Dataset({variable.name: (variable.dims, values)})
                part.to_zarr(path, mode="r+", region={STEP.name: at}, **_OPTIONS)
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
            f"{variable.name}, {format_bytes(row)} each; raise it (memory=…), or write chunks of "
            "fewer rows (block_rows=…)"
        )
    if "token" in variable.dims:
        rows = block_rows or max(1, min(variable.tile[0], MOST_ROWS, fitting))
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


def _empty(selection: Selection) -> xr.Dataset:
    """The Dataset, without the values of its variables."""
    import dask.array
    import xarray

    run, dropped = selection.run, {*OF_THE_STORE, *CHANGING}
    coordinates: dict[str, Any] = {
        STEP.name: (STEP.name, selection.steps, {"long_name": STEP.long_name})
    }
    for name, values in selection.coordinates.items():
        entry = coordinate(name)
        coordinates[name] = ("token", _plain(values), entry and entry.attributes)
    coordinates |= {name: (name, _plain(values)) for name, values in run.names.items()}
    variables: dict[str, Any] = {}
    for name in selection.variables:
        variable = run.series[name]
        shape = variable.shape_of(selection.rows, selection.tokens)
        values = dask.array.empty(shape, dtype=variable.native.stored, chunks=-1)
        variables[name] = (variable.dims, values, variable.attributes)
    return xarray.Dataset(
        variables,
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
    format: Format | None = None,
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
    runs: list[Run] = [given] if is_one else list(given)
    described = as_exported(layout_of(layout))
    options = {"block_rows": block_rows, "encoding": encoding, "fill_damaged": fill_damaged}
    format = _format_of(file, format, described, options)
    if format == "hdf5" and described.whole:
        described = layout_of("hdf5")
    checks: dict[str, Callable[..., Path]] = {"zarr": check_zarr_target, "run": check_local_target}
    check = checks.get(format, check_file_target)
    check(file, overwrite=overwrite)
    check_number(described, len(runs))
    damaged = DamagedChunks(runs[0]) if fill_damaged else None
    opened = [open_tiled(each) for each in runs] if damaged is None else [damaged.run]
    parts = [select(each, steps=steps, tokens=tokens, variables=variables) for each in opened]
    part, notes = parts[0], list[str]()
    if format == "zarr":
        with staged_run(file, overwrite=overwrite, check=check) as path:
            write_zarr(path, part, block_rows=block_rows, memory=memory, on_progress=on_progress)
    elif format == "run":
        if RunAttributes.of(part.run.attributes).keyframe_every:
            notes.append("the copy has no keyframes; to keep them, copy the folder of the run")
        with staged_run(file, overwrite=overwrite) as path:
            write_run(
                path, part, block_rows=block_rows, memory=memory, encoding=encoding,
                damaged=damaged, on_note=notes.append, on_progress=on_progress,
            )  # fmt: skip
        notes += [] if damaged is None else damaged.sentences(part)
    else:
        content = layout_file(described, parts)
        with staged_file(file, overwrite=overwrite) as path:
            if format == "hdf5":
                rounded = write_hdf5(
                    path, content.tensors, content.texts, on_progress,
                    attributes=content.attributes, chunk_rows=described.chunk_rows,
                    gzip=described.gzip, float16_as_bits=described.whole,
                    memory=parse_bytes(memory),
                )  # fmt: skip
            else:
                rounded = write_safetensors(path, content.tensors, content.texts, on_progress)
        part, narrower = content.part, f"layout {layout} holds a narrower type than the run"
        counts = ((key, count) for key, count in rounded.items() if count)
        notes += content.notes
        notes += (f"{count:,} values of {key} were rounded: {narrower}" for key, count in counts)
    path = Path(file)
    files = [path] if path.is_file() else path.rglob("*")
    return Exported(
        path=path,
        format=format,
        layout=layout,
        rows=len(part.rows),
        tokens=len(part.coordinates["token"]),
        variables=part.variables,
        bytes=sum(each.stat().st_size for each in files if each.is_file()),
        notes=tuple(dict.fromkeys(notes)),
    )


def _format_of(
    file: str | os.PathLike[str], format: Format | None, layout: Layout, options: dict[str, Any]
) -> Format:
    """The format of an export, which fits its layout, its options and the ending of the file."""
    implied: Format = layout.format
    if layout.name == "native":
        implied = format or (implied if options["encoding"] is None else "run")
    if format not in (None, implied):
        raise InvalidArgument(
            f"got format {format} with layout {layout.name}, which is for {implied} files; omit "
            "one of them"
        )
    fitting, ending = "zarr" if implied == "run" else implied, Path(file).suffix.lower()
    if ENDINGS.get(ending, fitting) != fitting:
        suffix = next(name for name in ENDINGS if ENDINGS[name] == fitting)
        raise InvalidArgument(
            f"got {file}, whose ending is that of {ENDINGS[ending]}, but layout {layout.name} "
            f"is written as {implied}; name it NAME{suffix}, or choose another layout or format"
        )
    for name, value in options.items():
        if value and implied not in _OF_FORMATS[name]:
            raise InvalidArgument(
                f"got {name}={value!r} with format {implied}, which has no such option; omit it, "
                f"or choose format {' or '.join(_OF_FORMATS[name])}"
            )
    return implied


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
