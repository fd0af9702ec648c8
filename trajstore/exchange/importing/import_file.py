"""Files that people already have, as runs.

A few rows at a time go from the file into the buffer of a writer; no tensor is ever in memory as
a whole. Nothing is invented: what a file does not tell is absent, and what was understood
differently from what is written there is said.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.byte_sizes import EXCHANGE_MEMORY, parse_bytes
from trajstore.exchange.guessing.detect_arrays import Detection
from trajstore.exchange.importing.import_options import import_options
from trajstore.exchange.importing.imported_file import ImportedFile, ImportedRun, ImportedVariable
from trajstore.exchange.importing.read_runs import opened_file
from trajstore.schema import room_for_examples
from trajstore.store.storage.remote_path import local_path
from trajstore.store.writing.create import check_local_target, staged_run
from trajstore.store.writing.writer import RunWriter
from trajstore.threads import Progress
from trajstore.values.native_types import STEP_TYPE
from trajstore.version import __version__

__all__ = ["Imported", "Preview", "import_file", "preview_import"]

Array = npt.NDArray[Any]

_BATCH = 4 << 20
_TINY_ROW = 16 << 10
_MANY_ROWS = 1 << 12
_FEWEST_MEMORY = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What was imported.

    Attributes
    ----------
    path : Path
    layout : str
        As which the file was read, or its format where it is of no layout.
    rows, tokens : int
    first_step, last_step : int
    variables : dict of str to str
        Native type of each.
    notes : tuple of str
        What was corrected, left out or is not known.
    table : tuple of Detection
        What each array and number of the file was taken for.
    others : tuple of Imported
        The further runs of a file that holds several.
    """

    path: Path
    layout: str
    rows: int
    tokens: int
    first_step: int
    last_step: int
    variables: dict[str, str]
    notes: tuple[str, ...]
    table: tuple[Detection, ...] = ()
    others: tuple[Imported, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Preview:
    """What an import of a file would make.

    Attributes
    ----------
    layout : str
    runs : dict of str to dict
        ``rows``, ``tokens``, ``hidden``, ``first_step``, ``last_step``, ``dead`` (a number, or None
        where it is not known), ``variables`` and ``notes`` of each run, by its label, which is
        empty for a single one.
    table : tuple of Detection
    """

    layout: str
    runs: dict[str, dict[str, Any]]
    table: tuple[Detection, ...]


def preview_import(
    file: str | os.PathLike[str], *, memory: int | str = EXCHANGE_MEMORY, **options: Any
) -> Preview:
    """What `import_file` would make of a file; nothing is written.

    Parameters
    ----------
    file : path-like
    memory : int or str
    **options
        As `import_file` takes it: layout, map, bits, labels, first_row, masks, schedule.

    Raises
    ------
    RunNotFound, FormatError, InvalidArgument, MissingExtra
        As `import_file`.

    Examples
    --------
    >>> from trajstore import export
    >>> file = export("gatsby.zarr", "gatsby.safetensors", layout="15.1a")
    >>> [(line.name, line.kind) for line in preview_import(file).table if line.name == "momentum"]
    [('momentum', 'exp_avg')]
    """
    with opened_file(file, import_options(**options), memory) as held:
        return Preview(
            layout=held.layout,
            runs={
                run.label: {
                    "rows": len(run.steps),
                    "tokens": len(run.token),
                    "hidden": run.hidden,
                    "first_step": int(run.steps[0]),
                    "last_step": int(run.steps[-1]),
                    "dead": _dead(run),
                    "variables": _types(run),
                    "notes": list(_notes(run)),
                }
                for run in held.runs
            },
            table=held.table,
        )


def import_file(
    file: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    layout: str | None = None,
    map: Mapping[str, str | Iterable[str]] | None = None,
    bits: str | Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    first_row: int | None = None,
    masks: str | os.PathLike[str] | None = None,
    schedule: str | None = None,
    block_rows: int | None = None,
    memory: int | str = EXCHANGE_MEMORY,
    overwrite: bool = False,
    on_progress: Progress | None = None,
) -> Imported:
    """Make a run of a file, or several of one that holds several.

    Parameters
    ----------
    file : path-like
        safetensors, HDF5, ``.npz``, ``.npy``, ``.pt`` of torch, or a folder of one such file per
        step. Its arrays are recognised by names in use, types and shapes; an array of (step, token,
        hidden) alone is enough.
    path : path-like
        Where the run will be; it appears there whole. Several are ``NAME.0.zarr``, ``NAME.1.zarr``
        or ``NAME.E.zarr``, ``NAME.W.zarr`` beside it.
    layout : str, optional
        native, hdf5 or one of the notebooks', as ``trajstore import`` lists them, whose keys and
        alignment it then has; recognised without it.
    map : mapping of str to str or iterable of str, optional
        Arrays by their kinds, such as ``{"W": "weights_0", "loss": "nll"}``; those of ``ignore``
        are left out.
    bits : {'bfloat16', 'float16'} or mapping of str to them, optional
        What uint16 are bits of (bfloat16 without it), and what float16 was before: of all arrays,
        or by variable or name, such as ``{"W": "bfloat16"}``; ``*`` stands for all others.
    labels : mapping of str to str, optional
        ``{"steps": "cs"}`` or ``{"steps": "0:2001:50"}``: labels of the rows.
    first_row : {0, 1}, optional
        Step of the first row of a file that labels none; each row is the state after its step.
    masks : path-like, optional
        A file that tells the dead tokens, or counts.
    schedule : str, optional
        ``constant`` or ``linear:N``: makes ``lr`` of the file's learning rate, and fills in what it
        leaves out of the optimizer's rule; the attribute ``imported`` says that they are given.
    block_rows : int, optional
        Rows of a block; planned from `memory` without it.
    memory : int or str, default 320 MiB
        For the buffer of the writer, and as much again for compressed chunks of HDF5 that can only
        be read whole.
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
        If it is of no known format, not sound, holds no W, or contradicts itself.
    MissingExtra
        If its format needs a library that is not installed.
    RunExists
        If something is at `path` and `overwrite` is not set.
    InvalidArgument
        If an argument does not exist or fit the file, or `memory` does not hold a block.

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
    options = import_options(
        layout=layout,
        map=map,
        bits=bits,
        labels=labels,
        first_row=first_row,
        masks=masks,
        schedule=schedule,
    )

    def check(labels: Iterable[str]) -> None:
        for label in labels:
            check_local_target(_target(local_path(path), label), overwrite=overwrite)

    with ExitStack() as stack:
        held = stack.enter_context(opened_file(file, options, memory, check))
        targets = [_target(local_path(path), run.label) for run in held.runs]
        places = [
            stack.enter_context(staged_run(target, overwrite=overwrite)) for target in targets
        ]
        sizes = [len(run.steps) * run.row_bytes for run in held.runs]
        for number, (run, place) in enumerate(zip(held.runs, places, strict=True)):
            origin = _origin(file, masks, held, run)
            rows = block_rows or _block_rows(run, parse_bytes(memory))
            report = _reported(on_progress, sum(sizes[:number]), sum(sizes))
            _write(place, run, origin, report, {"memory": memory, "block_rows": rows})
    done = [_imported(target, held, run) for target, run in zip(targets, held.runs, strict=True)]
    return replace(done[0], others=tuple(done[1:]))


def _block_rows(run: ImportedRun, memory: int) -> int | None:
    """Rows of a block where there are very many tiny ones: what is there need not be seen early.

    Blocks as a recording plans them would be thousands, each of a few files and a commit.
    """
    row = run.row_bytes + STEP_TYPE.itemsize
    if row >= _TINY_ROW or len(run.steps) <= _MANY_ROWS or memory < _FEWEST_MEMORY:
        return None
    return 1 << (_BATCH // row).bit_length() - 1


def _target(path: Path, label: str) -> Path:
    """Path of one run: NAME.0.zarr beside NAME.zarr."""
    if not label:
        return path
    return path.with_name(f"{path.name.removesuffix('.zarr')}.{label}.zarr")


def _imported(target: Path, held: ImportedFile, run: ImportedRun) -> Imported:
    return Imported(
        path=target,
        layout=held.layout,
        rows=len(run.steps),
        tokens=len(run.token),
        first_step=int(run.steps[0]),
        last_step=int(run.steps[-1]),
        variables=_types(run),
        notes=tuple(_notes(run)),
        table=held.table,
    )


def _types(run: ImportedRun) -> dict[str, str]:
    return {held.variable: held.wanted.name for held in run.variables}


def _dead(run: ImportedRun) -> int | None:
    is_dead = run.coordinates.get("is_dead")
    return None if is_dead is None else int(np.count_nonzero(is_dead))


def _origin(
    file: str | os.PathLike[str],
    masks: str | os.PathLike[str] | None,
    held: ImportedFile,
    run: ImportedRun,
) -> dict[str, Any]:
    """What the attribute `imported` of a run says."""
    source = Path(file)
    sizes = [each.stat().st_size for each in source.rglob("*")] if source.is_dir() else []
    origin: dict[str, Any] = {
        "file": source.name,
        "bytes": sum(sizes) if source.is_dir() else source.stat().st_size,
        "layout": held.layout,
        "notes": list(_notes(run)),
        "trajstore_version": __version__,
    }
    if run.label:
        origin["run"] = run.label
    if masks is not None:
        origin["masks"] = Path(masks).name
    earlier = dict(run.attributes.get("imported", {}))
    if "given" in earlier and "file" not in earlier:
        origin["given"] = earlier.pop("given")
    if earlier:
        origin["earlier"] = earlier
    return origin


def _notes(run: ImportedRun) -> Iterator[str]:
    """What was understood differently from what is written in the file, and what is not known."""
    yield from run.notes
    shifted = [held.variable for held in run.variables if held.time == "before"]
    if shifted:
        yield (
            f"{', '.join(shifted)} are those before the step of their row and were shifted by one; "
            f"after step {run.steps[-1]} they are not in the file, and NaN in the run"
        )


def _reported(on_progress: Progress | None, before: int, total: int) -> Callable[[int], None]:
    """What is called with the bytes of one run that are done, where others come before it."""
    if on_progress is None:
        return lambda done: None
    return lambda done: on_progress(before + done, total)


def _write(
    place: Path,
    run: ImportedRun,
    origin: dict[str, Any],
    report: Callable[[int], None],
    options: dict[str, Any],
) -> None:
    with RunWriter.create(
        place,
        token=run.token,
        hidden=run.hidden,
        variables=_types(run),
        **room_for_examples({held.variable: held.row_shape for held in run.variables}),
        parameter=run.parameters,
        populations=run.populations,
        attributes=run.attributes | {"imported": origin},
        buffers=1,
        commit_every=None,
        fsync=False,  # the whole of it is flushed before it gets its name
        **run.coordinates,
        **options,
    ) as writer:
        _fill(writer, run, report)


def _fill(run: RunWriter, imported: ImportedRun, report: Callable[[int], None]) -> None:
    variables = {held.variable: held for held in imported.variables}
    for at, places in run.stretches(imported.steps, max(1, _BATCH // imported.row_bytes)):
        for name, place in places.items():
            place[...] = _rows(variables[name], at.start, at.stop)
        report(imported.row_bytes * at.stop)


def _rows(held: ImportedVariable, start: int, stop: int) -> Array:
    """Bits of the wanted type for rows of the run."""
    shift = 1 if held.time == "before" else -1 if held.missing else 0
    first, last = max(start + shift, 0), min(stop + shift, held.rows)
    bits = np.empty((0, *held.row_shape), held.native.bits)
    if last > first:
        bits = held.read(first, last)
    bits = held.wanted_bits(bits)
    nan = np.full((1, *held.row_shape), held.wanted.nan_bits, held.wanted.bits)
    if held.missing and start == 0:
        bits = np.concatenate([nan, bits])
    if len(bits) < stop - start:
        # What was before the next step is known; what came after the last one is not.
        bits = np.concatenate([bits, nan])
    if held.blank and start == 0:
        bits = bits if bits.flags.writeable else bits.copy()
        bits[0] = held.wanted.nan_bits
    return bits
