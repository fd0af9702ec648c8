"""Import of files of other programs, and its preview.

Rows are copied from the file into the buffer of a writer, a few at a time; no tensor is ever
completely in memory. Nothing is invented: missing information stays missing, and notes report every
difference between the file and the run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trajstore.arguments import Count, checks_types
from trajstore.defaults import EXCHANGE_MEMORY
from trajstore.errors import FormatError, InvalidArgument
from trajstore.exchange.guessed_layout import abridged, guess, recorded_layout, with_options
from trajstore.exchange.import_whole import read_whole, whole_layout
from trajstore.exchange.imported_run import (
    ImportedFile,
    ImportedRun,
    ImportedVariable,
    TableLine,
)
from trajstore.exchange.layouts import IMPORT_LAYOUTS, LAYOUTS, OTHERS, Layout, layout_of
from trajstore.exchange.load import load
from trajstore.exchange.token_tables import masks_of
from trajstore.formats.array_file import ArrayFile
from trajstore.formats.open_file import open_file
from trajstore.installation import __version__
from trajstore.schema import row_lengths
from trajstore.store.storage.remote_path import local_path
from trajstore.store.writing.create import check_local_target, staged_run
from trajstore.store.writing.writer import RunWriter
from trajstore.threads import Progress
from trajstore.units import parse_bytes
from trajstore.values.native_types import NATIVE_TYPES, STEP_TYPE

Array = npt.NDArray[Any]
_BATCH = 4 << 20
_TINY_ROW = 16 << 10
_MANY_ROWS = 1 << 12
_FEWEST_MEMORY = 64 << 20

OnLabels = Callable[[list[str]], object]
"""Called with the labels of the runs of a file."""


@contextmanager
def opened_file(
    path: str | os.PathLike[str],
    memory: int | str = EXCHANGE_MEMORY,
    on_labels: OnLabels | None = None,
    **options: Any,
) -> Iterator[ImportedFile]:
    """Open and interpret a file. It stays open until the block ends.

    Parameters
    ----------
    path : path-like
    memory : int or str
        Memory for rows, and for large compressed chunks of HDF5.
    on_labels : callable, optional
        Called with the labels of the runs as soon as they are known, before values are read.
    **options
        layout, map, bits, labels, first_row and masks of `import_file`.

    Raises
    ------
    RunNotFound
        If the file does not exist.
    FormatError
        If the file is damaged, or cannot be interpreted.
    MissingExtra
        If its format needs a library that is not installed.
    """
    with open_file(local_path(path), parse_bytes(memory)) as file:
        yield read_runs(file, parse_bytes(memory), on_labels, **options)


def read_runs(
    file: Any,
    memory: int = parse_bytes(EXCHANGE_MEMORY),
    on_labels: OnLabels | None = None,
    *,
    layout: str | None = None,
    masks: str | os.PathLike[str] | None = None,
    **options: Any,
) -> ImportedFile:
    """Interpret an open file as runs.

    Parameters
    ----------
    file : ArrayFile
    memory : int
        Bytes that one row must fit into.
    on_labels : callable, optional
        As for `opened_file`.
    layout, masks, **options
        As for `opened_file`.

    Raises
    ------
    FormatError
        If the file cannot be interpreted, or does not have the given layout.
    InvalidArgument
        If an option does not apply to it, or a row does not fit into the memory.
    """
    given = layout_of(layout, IMPORT_LAYOUTS) if layout is not None else None
    exact = given or whole_layout(file)
    if exact is not None:
        _check_layout(file, exact, is_given=given is not None)
    if exact is not None and exact.whole:
        used = [name for name, value in (options | {"masks": masks}).items() if value]
        used += ["first_row"] if options.get("first_row") == 0 else []
        if used:
            raise InvalidArgument(
                f"{file.path} has layout {exact.name}, which defines everything that an import "
                f"needs, so {', '.join(used)} would have no effect; omit it"
            )
        content = read_whole(file, exact)
    else:
        exact = exact or recorded_layout(file)
        complete = guess(file, with_options(file, exact, **options))
        labeled = () if masks is None else masks_of(masks)
        content = load(file, complete, masks=labeled, memory=memory)
        exact = exact or LAYOUTS.get(complete.name)
        absent = [each.key for each in exact.columns if each.key not in file.keys] if exact else []
        if given is not None:  # what the user says besides
            known = {*file.keys, *file.attributes, *file.unread, complete.steps}
            absent = [k for k in (*given.arrays, *given.ignore, *given.scalars) if k not in known]
        notes = [f"the file does not hold {', '.join(absent)}"] if absent else []
        runs = [replace(run, notes=(*run.notes, *notes)) for run in content.runs]
        content = replace(content, runs=tuple(runs))
    if on_labels is not None:
        on_labels([run.label for run in content.runs])
    if exact is not None and exact.whole:
        return content
    return replace(content, runs=tuple(_typed(run, complete.original) for run in content.runs))


def _check_layout(file: ArrayFile, layout: Layout, *, is_given: bool) -> None:
    if layout.whole and file.format != layout.format:
        raise FormatError(
            f"{file.path} has format {file.format}, but layout {layout.name} is for "
            f"{layout.format} files; omit layout={layout.name!r}"
        )
    missing = [key for key in layout.required if key not in file.keys]
    if missing:
        go_by_names = f"; omit layout={layout.name!r} to go by usual names"
        raise FormatError(
            f"{file.path}: layout {layout.name} requires {', '.join(missing)}, but the file holds "
            f"{abridged(file.keys)}{go_by_names if is_given else ''}"
        )


def _typed(run: ImportedRun, original: Mapping[str, str]) -> ImportedRun:
    """The run with the narrowest types that hold every value, and notes on them.

    Raises
    ------
    InvalidArgument
        If bfloat16 would mean values for some arrays of float16, and bits for others.
    """
    bfloat16 = NATIVE_TYPES["bfloat16"]
    made: list[ImportedVariable] = []
    names: dict[str, list[str]] = {"narrowed": [], "bits": [], "values": [], "warned": []}
    unnamed: dict[str, str] = {}
    halves = 0
    for variable in run.variables:
        known = [name for name in (*variable.keys, variable.variable, OTHERS) if name in original]
        wanted = original[known[0]] if known else None
        what = ""
        if variable.native.name == "float16" and wanted != "float16":
            halves += 1
            form = variable.half_form()
            what = "bits" if form == "bits" else "values"
            if wanted is None:
                what = "" if form == "bits" else "warned"
            elif known[0] == OTHERS and form != "either":
                unnamed.setdefault(form, variable.variable)
        elif variable.native.name == "float32" and variable.holds_bfloat16():
            what = "narrowed"
        if what:
            names[what].append(variable.key if what == "bits" else variable.variable)
        if what in ("narrowed", "values", "bits"):
            native = bfloat16 if what == "bits" else variable.native
            made.append(replace(variable, wanted=bfloat16, native=native))
        else:
            made.append(variable)
    if len(unnamed) == 2:
        valued, other = unnamed["values"], unnamed["bits"]
        raise InvalidArgument(
            f"bits='bfloat16' is ambiguous: every value of {valued} is a bfloat16, but not every "
            f"value of {other}, whose bits would be reinterpreted; name the variables, such as "
            f"bits={{{valued!r}: 'bfloat16'}}"
        )
    notes = [
        f"{key}: the bits of its float16 were read as bits of bfloat16" for key in names["bits"]
    ]
    if names["narrowed"]:
        notes.append(
            f"{', '.join(names['narrowed'])}: float32 in the file, bfloat16 in the run: every "
            "value is a bfloat16"
        )
    if names["values"]:
        notes.append(
            f"{', '.join(names['values'])}: float16 in the file, bfloat16 in the run: every value "
            "is a bfloat16; the file has lost values outside the range of float16"
        )
    if warned := names["warned"]:
        fix = "'bfloat16'" if len(warned) == halves else str(dict.fromkeys(warned, "bfloat16"))
        notes.append(
            f"{', '.join(warned)}: float16 in which every value is a bfloat16, so most likely "
            "converted from bfloat16: values below 6e-5 have lost precision and those below 3e-8 "
            f"are 0 in the file; bits={fix} stores it as bfloat16, which has another lattice"
        )
    return replace(run, variables=tuple(made), notes=(*run.notes, *notes))


@dataclass(frozen=True, kw_only=True)
class Imported:
    """Result of an import, or of its preview.

    Attributes
    ----------
    path : Path, optional
        Path of the run; None in a preview.
    label : str
        Name among the runs of the file; empty for the only one.
    layout : str
        Layout of the file, or its format if it has no known layout.
    rows, tokens, hidden : int
    dead : int, optional
        Number of dead tokens; None if unknown.
    first_step, last_step : int
    variables : dict of str to str
        Native type of each variable.
    notes : tuple of str
        Notes on corrections, omissions and missing information.
    table : tuple of TableLine
        What each array and number of the file becomes.
    toml : str
        The layout of the file, to be edited and passed as `layout`; empty for a whole run.
    others : tuple of Imported
        Further runs of a file that holds several.
    """

    path: Path | None
    label: str
    layout: str
    rows: int
    tokens: int
    hidden: int
    dead: int | None
    first_step: int
    last_step: int
    variables: dict[str, str]
    notes: tuple[str, ...]
    table: tuple[TableLine, ...] = ()
    toml: str = ""
    others: tuple[Imported, ...] = ()


@checks_types
def preview_import(
    file: str | os.PathLike[str],
    *,
    layout: str | None = None,
    map: Mapping[str, str | Iterable[str]] | None = None,
    bits: str | Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    first_row: Literal[0, 1] | None = None,
    masks: str | os.PathLike[str] | None = None,
    memory: int | str = EXCHANGE_MEMORY,
) -> Imported:
    """Preview the result of `import_file`. Nothing is written.

    Parameters
    ----------
    file, layout, map, bits, labels, first_row, masks, memory
        As for `import_file`.

    Raises
    ------
    RunNotFound, FormatError, InvalidArgument, MissingExtra
        As for `import_file`.

    Examples
    --------
    >>> from trajstore import export
    >>> file = export("gatsby.zarr", "gatsby.safetensors", layout="15.1a")
    >>> [(line.name, line.kind) for line in preview_import(file).table if line.name == "momentum"]
    [('momentum', 'exp_avg')]
    """
    options: dict[str, Any] = {"layout": layout, "map": map, "bits": bits, "labels": labels}
    options |= {"first_row": first_row, "masks": masks}
    with opened_file(file, memory, **options) as content:
        return _imported(content, [None] * len(content.runs))


@checks_types
def import_file(
    file: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    layout: str | None = None,
    map: Mapping[str, str | Iterable[str]] | None = None,
    bits: str | Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    first_row: Literal[0, 1] | None = None,
    masks: str | os.PathLike[str] | None = None,
    block_rows: Count | None = None,
    memory: int | str = EXCHANGE_MEMORY,
    overwrite: bool = False,
    on_progress: Progress | None = None,
) -> Imported:
    """Import a file as a run, or as several runs if it holds several.

    Parameters
    ----------
    file : path-like
        safetensors, HDF5, ``.npz``, ``.npy``, ``.pt`` of torch, or a folder of one such file per
        step. Arrays are known by usual names, which ``trajstore import`` lists, or by `map`.
    path : path-like
        Path of the new run, which appears complete. Several runs become ``NAME.0.zarr``,
        ``NAME.1.zarr`` or ``NAME.E.zarr``, ``NAME.W.zarr`` in the same folder.
    layout : str, optional
        native, hdf5 or a layout of the notebooks, which ``trajstore import`` lists. It defines the
        keys and the alignment. Default: that of the names in the file.
    map : mapping of str to str or iterable of str, optional
        Arrays by kind, such as ``{"W": "weights_0", "loss": "nll"}``. Arrays under ``ignore`` are
        omitted.
    bits : {'bfloat16', 'float16'} or mapping of str to them, optional
        Type of uint16 bits (default: bfloat16), and the original type of float16. Either one type
        for all arrays, or types by variable or name, such as ``{"W": "bfloat16"}``; ``*`` means
        all others.
    labels : mapping of str to str, optional
        Labels of the rows: ``{"steps": "cs"}`` or ``{"steps": "0:2001:50"}``.
    first_row : {0, 1}, optional
        Step of the first row of a file without labels. Each row is the state after its step.
    masks : path-like, optional
        File that labels the dead tokens, or counts tokens.
    block_rows : int, optional
        Rows of a block. Default: planned from `memory`.
    memory : int or str, default 320 MiB
        Memory for the buffer of the writer. Large compressed chunks of HDF5 may take as much again.
    overwrite : bool
        Replace an existing run.
    on_progress : callable, optional
        Called with the bytes that are done and the bytes in total.

    Returns
    -------
    Imported

    Raises
    ------
    RunNotFound
        If the file does not exist.
    FormatError
        If the format is unknown, the file is damaged, holds no W, or contradicts itself.
    MissingExtra
        If its format needs a library that is not installed.
    RunExists
        If `path` exists and `overwrite` is not set.
    InvalidArgument
        If an argument is unknown or does not fit the file, or `memory` does not hold a block.

    Notes
    -----
    float32 in which every value is a bfloat16 is stored as bfloat16, unless `trajstore.export`
    wrote the file, which then records the type.

    Examples
    --------
    >>> from trajstore import export
    >>> file = export("gatsby.zarr", "gatsby.safetensors")  # or one of the notebooks'
    >>> imported = import_file(file, "again.zarr")
    >>> imported.layout, imported.rows, imported.variables["W"]
    ('native', 21, 'bfloat16')
    """
    options: dict[str, Any] = {"layout": layout, "map": map, "bits": bits, "labels": labels}
    options |= {"first_row": first_row, "masks": masks}

    def check(labels: Iterable[str]) -> None:
        for label in labels:
            check_local_target(_target(local_path(path), label), overwrite=overwrite)

    with ExitStack() as stack:
        content = stack.enter_context(opened_file(file, memory, check, **options))
        targets = [_target(local_path(path), run.label) for run in content.runs]
        places = [
            stack.enter_context(staged_run(target, overwrite=overwrite)) for target in targets
        ]
        sizes = [len(run.steps) * run.row_bytes for run in content.runs]
        for number, (run, place) in enumerate(zip(content.runs, places, strict=True)):
            origin = _origin(file, masks, content, run)
            rows = block_rows or _block_rows(run, parse_bytes(memory))
            before = sum(sizes[:number])
            with _writer(place, run, origin, memory=memory, block_rows=rows) as writer:
                for done in _filled(writer, run):
                    if on_progress is not None:
                        on_progress(before + done, sum(sizes))
    return _imported(content, targets)


def _block_rows(run: ImportedRun, memory: int) -> int | None:
    """Rows of a block for very many tiny rows, which no reader waits for; None otherwise.

    Blocks planned as for a recording would be thousands, each with a few files and a commit.
    """
    row = run.row_bytes + STEP_TYPE.itemsize
    if row >= _TINY_ROW or len(run.steps) <= _MANY_ROWS or memory < _FEWEST_MEMORY:
        return None
    return 1 << (_BATCH // row).bit_length() - 1


def _target(path: Path, label: str) -> Path:
    """Path of one of several runs: NAME.0.zarr in the folder of NAME.zarr."""
    if not label:
        return path
    return path.with_name(f"{path.name.removesuffix('.zarr')}.{label}.zarr")


def _imported(content: ImportedFile, targets: Sequence[Path | None]) -> Imported:
    first, *others = (
        Imported(
            path=target,
            label=run.label,
            layout=content.layout,
            rows=len(run.steps),
            tokens=len(run.token),
            hidden=run.hidden,
            dead=_dead(run),
            first_step=int(run.steps[0]),
            last_step=int(run.steps[-1]),
            variables=_types(run),
            notes=tuple(_notes(run)),
            table=content.table,
            toml=content.toml,
        )
        for run, target in zip(content.runs, targets, strict=True)
    )
    return replace(first, others=tuple(others))


def _types(run: ImportedRun) -> dict[str, str]:
    return {variable.variable: variable.wanted.name for variable in run.variables}


def _dead(run: ImportedRun) -> int | None:
    is_dead = run.coordinates.get("is_dead")
    return None if is_dead is None else int(np.count_nonzero(is_dead))


def _origin(
    file: str | os.PathLike[str],
    masks: str | os.PathLike[str] | None,
    content: ImportedFile,
    run: ImportedRun,
) -> dict[str, Any]:
    """Value of the attribute `imported` of a run."""
    source = Path(file)
    sizes = [each.stat().st_size for each in source.rglob("*")] if source.is_dir() else []
    origin: dict[str, Any] = {
        "file": source.name,
        "bytes": sum(sizes) if source.is_dir() else source.stat().st_size,
        "layout": content.layout,
        "notes": list(_notes(run)),
        "trajstore_version": __version__,
    }
    if run.label:
        origin["run"] = run.label
    if masks is not None:
        origin["masks"] = Path(masks).name
    if run.attributes.get("imported"):
        origin["earlier"] = run.attributes["imported"]
    return origin


def _notes(run: ImportedRun) -> Iterator[str]:
    """Notes on differences between the file and the run, and on missing information."""
    yield from run.notes
    shifted = [
        variable.variable
        for variable in run.variables
        if variable.rows - variable.shift < len(run.steps)
    ]
    if shifted:
        yield (
            f"{', '.join(shifted)} are the values before the step of their row and were shifted by "
            f"one; the file does not hold those after step {run.steps[-1]}, which are NaN in the "
            "run"
        )


def _writer(place: Path, run: ImportedRun, origin: dict[str, Any], **options: Any) -> RunWriter:
    names: Mapping[str, Any] = run.names
    return RunWriter.create(
        place,
        token=run.token,
        hidden=run.hidden,
        variables=_types(run),
        **row_lengths({variable.variable: variable.row_shape for variable in run.variables}),
        **names,
        populations=run.populations,
        attributes=run.attributes | {"imported": origin},
        buffers=1,
        commit_every=None,
        fsync=False,  # the caller flushes the whole run before it gets its name
        **run.coordinates,
        **options,
    )


def _filled(writer: RunWriter, run: ImportedRun) -> Iterator[int]:
    """Copy all rows, a few at a time, and yield the bytes that are done."""
    variables = {variable.variable: variable for variable in run.variables}
    for at, places in writer.segments(run.steps, max(1, _BATCH // run.row_bytes)):
        for name, place in places.items():
            _copy(variables[name], at.start, at.stop, place)
        yield run.row_bytes * at.stop


def _copy(variable: ImportedVariable, start: int, stop: int, place: Array) -> None:
    """Write rows of the run from `start` up to `stop` to a place, as bits of the wanted type."""
    first, last = max(start + variable.shift, 0), min(stop + variable.shift, variable.rows)
    before, count = first - variable.shift - start, max(last - first, 0)
    if count:
        place[before : before + count] = variable.wanted_bits(variable.read(first, last))
    place[:before] = place[before + count :] = variable.wanted.nan_bits
    if variable.blank and start == 0:
        place[0] = variable.wanted.nan_bits
