"""Files that people already have, as runs: safetensors in the notebooks' layouts, and HDF5.

A few rows at a time go from the file into the buffer of a writer; no tensor is ever in memory as
a whole. Nothing is invented: what a file does not tell is absent, and what was understood
differently from what is written there is said.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.bits import NATIVE_TYPES, NativeType
from trajstore.contents import Content, Held, read_masks
from trajstore.conversion import as_bfloat16, is_bfloat16
from trajstore.errors import FormatError, InvalidArgument, RunNotFound
from trajstore.export import LAYOUTS
from trajstore.hdf5 import Hdf5File
from trajstore.hdf5_contents import hdf5_content
from trajstore.layout import EXCHANGE_MEMORY
from trajstore.notebook_contents import safetensors_content
from trajstore.parts import Progress
from trajstore.safetensors import SafetensorsFile
from trajstore.schema import STEP, VARIABLES
from trajstore.staging import staged_run
from trajstore.version import __version__
from trajstore.writer import RunWriter

__all__ = ["IMPORT_LAYOUTS", "Imported", "import_file"]

Array = npt.NDArray[Any]

IMPORT_LAYOUTS = (*LAYOUTS, "hdf5")

_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_BATCH = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What was imported.

    Attributes
    ----------
    path : Path
    layout : str
        As which the file was read.
    rows, tokens : int
    first_step, last_step : int
    variables : dict of str to str
        Native type of each.
    notes : tuple of str
        What was corrected, left out or is not known.
    """

    path: Path
    layout: str
    rows: int
    tokens: int
    first_step: int
    last_step: int
    variables: dict[str, str]
    notes: tuple[str, ...]


def import_file(
    file: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    layout: str | None = None,
    masks: str | os.PathLike[str] | None = None,
    encoding: str | None = None,
    block_rows: int | None = None,
    memory: int | str = EXCHANGE_MEMORY,
    overwrite: bool = False,
    on_progress: Progress | None = None,
) -> Imported:
    """Make a run of a file.

    Parameters
    ----------
    file : path-like
        safetensors as `trajstore.export` or the notebooks 14.1a, 15.1a, 1.12a, 1.12f write it, or
        HDF5 with ``W``, ``grad_W``, ``momentum_W``, ``variance_W``, ``losses``.
    path : path-like
        Where the run will be; it appears there whole.
    layout : str, optional
        One of `IMPORT_LAYOUTS`; recognised by keys and types without it.
    masks : path-like, optional
        A safetensors file that tells the dead tokens, for a file that does not: ``untrained_mask``
        or ``trained_mask``, ``untrained_indices`` or ``trained_indices``.
    encoding : str, optional
        Of the run; the writer's default without it.
    block_rows : int, optional
        Rows of a block; planned from `memory` without it.
    memory : int or str, default 320 MiB
        For the buffer of the writer.
    overwrite : bool
        Replace a run that is there.
    on_progress : callable, optional
        Called with the bytes that are done, and those there are.

    Returns
    -------
    Imported

    Raises
    ------
    RunNotFound
        If there is no file.
    FormatError
        If it is neither format, not sound, of no known layout, or lacks what its layout requires.
    RunExists
        If something is at `path` and `overwrite` is not set.
    InvalidArgument
        If `layout` does not exist or fit the format, or `memory` does not hold a block.

    Notes
    -----
    float32 whose every value is one of bfloat16 is stored as bfloat16, unless the file is one of
    `trajstore.export`, which says what the type was.

    Examples
    --------
    >>> import_file("comprehensive_training_data.safetensors", "run.zarr")    # doctest: +SKIP
    """
    if layout is not None and layout not in IMPORT_LAYOUTS:
        raise InvalidArgument(
            f"there is no layout {layout!r}; choose from {', '.join(IMPORT_LAYOUTS)}"
        )
    with staged_run(path, overwrite=overwrite) as new, _open(file, layout) as found:
        content = _narrowed(found if masks is None else read_masks(found, masks))
        notes = list(content.notes)
        narrowed = [held.variable for held in content.held if held.wanted != held.native]
        if narrowed:
            notes.append(
                f"{', '.join(narrowed)}: float32 in the file, bfloat16 in the run, as every value "
                "is one"
            )
        imported = {
            "file": Path(file).name,
            "bytes": Path(file).stat().st_size,
            "layout": content.layout,
            "notes": notes,
            "trajstore_version": __version__,
        }
        earlier = content.attributes.get("imported")
        if earlier is not None:
            imported["earlier"] = earlier
        chosen = {} if encoding is None else {"encoding": encoding}
        with RunWriter.create(
            new,
            token=content.token,
            hidden=content.hidden,
            variables={held.variable: held.wanted.name for held in content.held},
            attributes=content.attributes | {"imported": imported},
            memory=memory,
            buffers=1,
            block_rows=block_rows,
            **content.coordinates,
            **chosen,  # type: ignore[arg-type]
        ) as run:
            _fill(run, content, on_progress)
    return Imported(
        path=Path(path),
        layout=content.layout,
        rows=len(content.steps),
        tokens=len(content.token),
        first_step=int(content.steps[0]),
        last_step=int(content.steps[-1]),
        variables={held.variable: held.wanted.name for held in content.held},
        notes=tuple(notes),
    )


@contextmanager
def _open(file: str | os.PathLike[str], layout: str | None) -> Iterator[Content]:
    path = Path(file)
    if not path.is_file():
        raise RunNotFound(f"there is no file at {file}")
    with path.open("rb") as opened:
        is_hdf5 = opened.read(len(_HDF5_SIGNATURE)) == _HDF5_SIGNATURE
    if layout is not None and is_hdf5 != (layout == "hdf5"):
        found = "an HDF5 file" if is_hdf5 else "no HDF5 file"
        raise FormatError(f"{file} is {found}, and layout {layout} was asked for")
    if is_hdf5:
        with Hdf5File(path) as hdf5:
            yield hdf5_content(hdf5)
    else:
        with SafetensorsFile(path) as safetensors:
            yield safetensors_content(safetensors, layout)


def _narrowed(content: Content) -> Content:
    """Content with bfloat16 wanted where every float32 value is one."""
    return replace(
        content,
        held=tuple(
            replace(held, wanted=NATIVE_TYPES["bfloat16"])
            if not content.exact and held.native.name == "float32" and _all_bfloat16(held)
            else held
            for held in content.held
        ),
    )


def _all_bfloat16(held: Held) -> bool:
    rows = max(1, _BATCH // max(held.row_bytes, 1))
    return all(
        is_bfloat16(held.read(start, min(start + rows, held.rows)))
        for start in range(0, held.rows, rows)
    )


def _fill(run: RunWriter, content: Content, on_progress: Progress | None) -> None:
    arrays = run.layout.arrays
    row = sum(array.row_bytes for name, array in arrays.items() if name != STEP.name)
    total = row * len(content.steps)
    held = {one.variable: one for one in content.held}
    batch = max(1, _BATCH // max(sum(one.row_bytes for one in content.held), 1))
    for at, places in run.stretches(content.steps, batch):
        for name, place in places.items():
            place[...] = _rows(held[name], content, at.start, at.stop)
        if on_progress is not None:
            on_progress(row * at.stop, total)


def _rows(held: Held, content: Content, start: int, stop: int) -> Array:
    """Bits of the wanted type for rows of the run."""
    shift = 1 if held.time == "before" else 0
    last = min(stop + shift, held.rows)
    bits = held.read(start + shift, last) if last > start + shift else None
    if bits is None:
        bits = np.empty((0, *held.row_shape), held.native.bits)
    if held.wanted != held.native:
        bits = as_bfloat16(bits)
    if len(bits) < stop - start:
        # What was before the next step is known; what came after the last one is not.
        end = np.full((1, *held.row_shape), _nan(held.wanted), held.wanted.bits)
        bits = np.concatenate([bits, end])
    has_blank = not content.exact and VARIABLES[held.variable].row0 == "nan"
    if has_blank and held.time == "after" and start == 0 and content.steps[0] == 0:
        bits[0] = _nan(held.wanted)
    return bits


def _nan(native: NativeType) -> int:
    """Bits of the quiet NaN without payload."""
    return {"bfloat16": 0x7FC0, "float16": 0x7E00, "float32": 0x7FC00000, "float64": 0x7FF8 << 48}[
        native.name
    ]
