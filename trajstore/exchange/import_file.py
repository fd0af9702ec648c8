"""Files that people already have, as runs: safetensors in the notebooks' layouts, and HDF5.

A few rows at a time go from the file into the buffer of a writer; no tensor is ever in memory as
a whole. Nothing is invented: what a file does not tell is absent, and what was understood
differently from what is written there is said.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.byte_sizes import EXCHANGE_MEMORY
from trajstore.errors import InvalidArgument
from trajstore.exchange.dead_tokens import with_masks
from trajstore.exchange.file_recognition import IMPORT_LAYOUTS, open_file, understood
from trajstore.exchange.imported_file import ImportedFile, ImportedVariable
from trajstore.schema import STEP, VARIABLES
from trajstore.store.create import staged_run
from trajstore.store.writer import RunWriter
from trajstore.threads import Progress
from trajstore.values.native_types import NATIVE_TYPES
from trajstore.values.rounding import as_bfloat16, is_bfloat16
from trajstore.version import __version__

__all__ = ["Imported", "import_file"]

Array = npt.NDArray[Any]

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
        native, 14.1a, 15.1a, 1.12a, 1.12f or hdf5; recognised by keys and types without it.
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
    >>> from trajstore import export
    >>> file = export("gatsby.zarr", "gatsby.safetensors")  # or one of the notebooks'
    >>> imported = import_file(file, "again.zarr")
    >>> imported.layout, imported.rows, imported.variables["W"]
    ('native', 21, 'bfloat16')
    """
    if layout is not None and layout not in IMPORT_LAYOUTS:
        raise InvalidArgument(
            f"there is no layout {layout!r}; choose from {', '.join(IMPORT_LAYOUTS)}"
        )
    with staged_run(path, overwrite=overwrite) as new, open_file(file, layout) as opened:
        imported = understood(opened, layout)
        if masks is not None:
            imported = with_masks(imported, masks)
        imported = _narrowed(imported)
        notes = tuple(_notes(imported, masks))
        origin = {
            "file": Path(file).name,
            "bytes": Path(file).stat().st_size,
            "layout": imported.layout,
            "notes": list(notes),
            "trajstore_version": __version__,
        }
        earlier = imported.attributes.get("imported")
        if earlier is not None:
            origin["earlier"] = earlier
        types = {held.variable: held.wanted.name for held in imported.variables}
        chosen = {} if encoding is None else {"encoding": encoding}
        with RunWriter.create(
            new,
            token=imported.token,
            hidden=imported.hidden,
            variables=types,
            attributes=imported.attributes | {"imported": origin},
            memory=memory,
            buffers=1,
            commit_every=None,
            block_rows=block_rows,
            **imported.coordinates,
            **chosen,  # type: ignore[arg-type]
        ) as run:
            _fill(run, imported, on_progress)
    return Imported(
        path=Path(path),
        layout=imported.layout,
        rows=len(imported.steps),
        tokens=len(imported.token),
        first_step=int(imported.steps[0]),
        last_step=int(imported.steps[-1]),
        variables=types,
        notes=notes,
    )


def _narrowed(imported: ImportedFile) -> ImportedFile:
    """The file with bfloat16 wanted where every float32 value is one."""
    if imported.exact:
        return imported
    return replace(
        imported,
        variables=tuple(
            replace(held, wanted=NATIVE_TYPES["bfloat16"])
            if held.native.name == "float32" and _all_bfloat16(held)
            else held
            for held in imported.variables
        ),
    )


def _all_bfloat16(held: ImportedVariable) -> bool:
    rows = max(1, _BATCH // max(held.row_bytes, 1))
    return all(
        is_bfloat16(held.read(start, min(start + rows, held.rows)))
        for start in range(0, held.rows, rows)
    )


def _notes(imported: ImportedFile, masks: str | os.PathLike[str] | None) -> Iterator[str]:
    """What was understood differently from what is written in the file, and what is not known."""
    yield from imported.notes
    # What a run does not tell is not missed in its own layout.
    if "is_dead" not in imported.coordinates and imported.layout != "native":
        yield "the file does not tell which tokens are dead"
    shifted = [held.variable for held in imported.variables if held.time == "before"]
    if shifted:
        yield (
            f"{', '.join(shifted)} are those before the step of their row and were shifted by one; "
            f"after step {imported.steps[-1]} they are not in the file, and NaN in the run"
        )
    if masks is not None:
        yield f"which tokens are dead is from {os.path.basename(masks)}"
    narrowed = [held.variable for held in imported.variables if held.wanted != held.native]
    if narrowed:
        yield (
            f"{', '.join(narrowed)}: float32 in the file, bfloat16 in the run, as every value is "
            "one"
        )


def _fill(run: RunWriter, imported: ImportedFile, on_progress: Progress | None) -> None:
    arrays = run.layout.arrays
    row = sum(array.row_bytes for name, array in arrays.items() if name != STEP.name)
    total = row * len(imported.steps)
    variables = {held.variable: held for held in imported.variables}
    batch = max(1, _BATCH // max(sum(held.row_bytes for held in imported.variables), 1))
    for at, places in run.stretches(imported.steps, batch):
        for name, place in places.items():
            place[...] = _rows(variables[name], imported, at.start, at.stop)
        if on_progress is not None:
            on_progress(row * at.stop, total)


def _rows(held: ImportedVariable, imported: ImportedFile, start: int, stop: int) -> Array:
    """Bits of the wanted type for rows of the run."""
    shift = 1 if held.time == "before" else 0
    last = min(stop + shift, held.rows)
    bits = np.empty((0, *held.row_shape), held.native.bits)
    if last > start + shift:
        bits = held.read(start + shift, last)
    if held.wanted != held.native:
        bits = as_bfloat16(bits)
    if len(bits) < stop - start:
        # What was before the next step is known; what came after the last one is not.
        end = np.full((1, *held.row_shape), held.wanted.nan_bits, held.wanted.bits)
        bits = np.concatenate([bits, end])
    has_blank = not imported.exact and VARIABLES[held.variable].row0 == "nan"
    if has_blank and held.time == "after" and start == 0 and imported.steps[0] == 0:
        bits[0] = held.wanted.nan_bits
    return bits
