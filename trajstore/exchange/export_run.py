"""New runs from the rows of another one.

`write_run` writes a selection again, in blocks of another size or in another encoding.
`DamagedChunks` replaces damaged values by NaN; all other values stay, bit for bit. `branch_run`
takes the first rows, for a fork. If only metadata files change, their blocks are hard links.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from trajstore.codec.block import Runs, new_identity
from trajstore.codec.block_codec import BLOCK
from trajstore.codec.computed_rows import ComputedUnit, unit_of
from trajstore.errors import FormatError, InvalidArgument, RunExists, RunLocked
from trajstore.exchange.selection import Selection
from trajstore.installation import imported
from trajstore.schema import STEP, Encoding, coordinate
from trajstore.store.metadata.metadata_form import CHANGING
from trajstore.store.metadata.zarr_json import OF_THE_STORE, RunMetadata, notes_of, notes_until
from trajstore.store.reading.open_group import open_group
from trajstore.store.reading.tiled_reader import TiledVariable, Where, open_tiled
from trajstore.store.storage.atomic import refuse_links
from trajstore.store.storage.lock import is_written_to
from trajstore.store.storage.remote_path import RunPath
from trajstore.store.writing.create import link_run
from trajstore.store.writing.new_run import check_variables, compact_rule, vector_rule
from trajstore.store.writing.resumed_run import ResumedRun, resumed_run
from trajstore.store.writing.writer import RunWriter
from trajstore.strict_json import utc_now
from trajstore.threads import Progress, in_parallel
from trajstore.units import parse_bytes
from trajstore.values.native_types import native_type, widen

if TYPE_CHECKING:
    import xarray as xr  # takes long

Array = npt.NDArray[Any]


class DamagedChunks:
    """A damaged run, opened for a copy with NaN in place of damaged values.

    Parameters
    ----------
    run : path-like, str or RemotePath
        A run that no process is writing to.

    Attributes
    ----------
    run : TiledRun
        Its native bits are those of NaN in inner chunks that cannot be decoded.
    left_out : list of str
        A sentence for each damaged coordinate, which `run` lacks.

    Raises
    ------
    RunNotFound, FormatError
        If there is no run, or `step` or `token` is damaged.
    RunLocked
        If a process is writing to the run.
    InvalidArgument
        If it is a Dataset, or another program changed the layout of an array.
    """

    def __init__(self, run: RunPath | xr.Dataset) -> None:
        if isinstance(run, imported("xarray", "Dataset")):
            raise InvalidArgument(
                "got a Dataset, whose damaged chunks cannot be found; give the path of the run"
            )
        if is_written_to(run):
            raise RunLocked(f"another process is writing to {run}; wait for it, or end it")
        self.left_out: list[str] = []
        self._path = run
        self._lost: list[tuple[TiledVariable, Where]] = []
        opened = open_tiled(run, on_lost=self._leave_out)
        foreign = [name for name, each in opened.series.items() if not each.chunk]
        if foreign:
            raise InvalidArgument(
                f"{', '.join(foreign)} of {run} has a layout of another program, so damaged chunks "
                "cannot be filled; export without fill_damaged=True"
            )
        series = {
            name: replace(each, bits=partial(self._bits, each))
            for name, each in opened.series.items()
        }
        self.run = replace(opened, series=series)

    def _leave_out(self, name: str, error: FormatError) -> None:
        if name == STEP.name:
            raise FormatError(
                f"{error}; steps are integers, which have no NaN, so drop these rows: trajstore "
                f"repair {shlex.quote(str(self._path))}"
            ) from error
        if name == "token":
            raise error
        self.left_out.append(f"the coordinate {name} is damaged, and left out")

    def _bits(self, variable: TiledVariable, where: Where) -> Array:
        """Native bits of a part of a variable."""
        try:
            return variable.bits(where)
        except FormatError:  # of at least one chunk
            pass
        whole = (*where, *(slice(0, length) for length in variable.shape[len(where) :]))
        bits = np.empty([part.stop - part.start for part in whole], variable.native.bits)
        for window in itertools.product(*map(_pieces, whole, variable.chunk)):
            at = tuple(
                slice(part.start - all_of.start, part.stop - all_of.start)
                for part, all_of in zip(window, whole, strict=True)
            )
            try:
                bits[at] = variable.bits(window)
            except FormatError:
                bits[at] = variable.native.nan_bits
                self._lost.append((variable, window))
        return bits

    def notes(self, selection: Selection) -> list[dict[str, Any]]:
        """Entries for the attribute ``notes``: the NaN in a selection that has been read.

        Returns
        -------
        list of dict
            One for each variable and range of rows.
        """
        lost: dict[str, Array] = {}
        for variable, window in self._lost:
            tokens = selection.tokens if "token" in variable.dims else None
            if tokens is None or _within(tokens, window[1]).size:
                rows = lost.get(variable.name, np.empty(0, int))
                lost[variable.name] = np.union1d(rows, _within(selection.rows, window[0]))
        steps = self.run.steps[selection.rows]
        return [
            {
                "note": f"{name} holds NaN in place of damaged values of the exported run",
                "first_step": int(steps[part[0]]),
                "last_step": int(steps[part[-1]]),
                "count": len(part),
            }
            for name, rows in sorted(lost.items())
            for part in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
            if part.size
        ]

    def sentences(self, selection: Selection) -> list[str]:
        """What the copy of a selection lacks."""
        return self.left_out + [
            f"{note['note']} (steps {note['first_step']} to {note['last_step']})"
            for note in self.notes(selection)
        ]


def _pieces(part: slice, length: int) -> list[slice]:
    """Pieces of a range of an axis that lie in one chunk each."""
    edges = range(part.start // length * length, part.stop, length)
    return [slice(max(at, part.start), min(at + length, part.stop)) for at in edges]


def _within(selected: Array, part: slice) -> Array:
    """Indices of the selected positions that are in a range."""
    return np.flatnonzero((selected >= part.start) & (selected < part.stop))


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
    } | {name: [str(value) for value in values] for name, values in run.names.items()}
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
    between = {
        name: np.empty((most, *array.row), array.native.bits) for name, array in arrays.items()
    }
    for start in range(0, len(steps), most):
        rows = slice(start, min(start + most, len(steps)))
        _read(selection, selection.rows[rows], between)
        for at, places in new.segments(steps[rows]):
            for name, place in places.items():
                place[...] = between[name][at]
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


def holds_exactly(native: str, wider: str) -> bool:
    """True if the second type holds every value of the first one exactly, as runs store them.

    >>> holds_exactly("bfloat16", "float32"), holds_exactly("float32", "bfloat16")
    (True, False)
    """
    return wider in (native, native_type(native).stored.name)


def branch_run(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    rows: int,
    *,
    types: Mapping[str, str],
    attributes: Mapping[str, Any],
    memory: int | str,
    on_note: Callable[[str], None] | None = None,
) -> None:
    """Create a run from the first rows of another one. Its status is ``interrupted``.

    It has the block size, the coordinates and the encoding of the source. If the variables keep
    their types, and the optimizer its rule, all blocks are hard links, or copies if the file system
    does not support links. Otherwise all rows are written again. Nothing is flushed here;
    `staged_run` flushes the run before it renames it.

    Parameters
    ----------
    source : path-like
        A local run, which does not change.
    target : path-like
        Must not exist. Its parent folder must exist.
    rows : int
        Number of committed rows to keep.
    types : mapping of str to str
        Native type of each variable to keep.
    attributes : mapping
        Attributes of the root that replace those of the source, such as ``config``.
    memory : int or str
        Memory budget in bytes for all buffers together.
    on_note : callable, optional
        Called with the reason if ``compact`` cannot compute W and the moments (default: log it).

    Raises
    ------
    RunNotFound, FormatError
        If there is no run at `source`, or this version cannot add to it.
    InvalidArgument
        If the source has fewer rows or lacks a variable, a type does not hold its values, or
        `memory` is too small.
    RunExists
        If `target` exists.

    Examples
    --------
    >>> from trajstore import open_run
    >>> branch_run("gatsby.zarr", "branch.zarr", 10, types={"W": "float32"}, attributes={},
    ...     memory="64MiB")
    >>> ds = open_run("branch.zarr")
    >>> ds.W.shape, ds.W.attrs["native_dtype"], bool((ds.W == open_run("gatsby.zarr").W[:10]).all())
    ((10, 128, 4), 'float32', True)
    """
    path = Path(target).absolute()
    whole = Path(source).absolute()
    open_group(whole)
    refuse_links(whole)
    stored = resumed_run(whole, rows, attributes=None, memory=memory, threads=None)
    _check_types(stored, types)
    if path.exists():
        raise RunExists(f"{path} already exists; choose another path")
    changed = {"created": utc_now(), **attributes}
    if _keeps_blocks(stored, types, changed):
        _link(stored, path, types, changed)
        return
    run = open_tiled(whole)
    series = {name: _of_type(run.series[name], types[name]) for name in run.series if name in types}
    computed = _units(stored)
    write_run(
        path,
        Selection(
            run=replace(run, attributes=run.attributes | changed, series=series),
            rows=np.arange(rows),
            tokens=None,
            variables=tuple(series),
        ),
        block_rows=stored.layout.block_rows,
        memory=memory,
        status="interrupted",
        on_note=on_note if computed else lambda note: None,
    )


def _check_types(stored: ResumedRun, types: Mapping[str, str]) -> None:
    check_variables(types, stored.metadata.attributes)
    for name, wanted in types.items():
        if name not in stored.layout.arrays:
            raise InvalidArgument(
                f"{stored.path} does not hold {name}, expected one of "
                f"{', '.join(key for key in stored.layout.arrays if key != STEP.name)}"
            )
        native = stored.layout.arrays[name].native.name
        if not holds_exactly(native, wanted):
            raise InvalidArgument(
                f"{name} is {native} in {stored.path}, and {wanted} does not hold all its values; "
                "choose a type that does, as values are never rounded"
            )


def _keeps_blocks(stored: ResumedRun, types: Mapping[str, str], changed: dict[str, Any]) -> bool:
    """True if the blocks of the variables are those that a new run would have."""
    if any(stored.layout.arrays[name].native.name != types[name] for name in types):
        return False
    units = _units(stored)
    wanted = stored.metadata.attributes | changed
    rules = []
    if wanted["encoding"] == "compact":
        rules = [make(wanted, types, lambda note: None) for make in (compact_rule, vector_rule)]
    kept = {STEP.name, *types}
    # With hyperparameters, the last block is encoded again if it is cut.
    used = {"hyperparameters"} & stored.layout.arrays.keys()
    return [unit.rule for unit in units] == [rule for rule in rules if rule] and all(
        kept >= unit.chains.keys() | used for unit in units
    )


def _units(stored: ResumedRun) -> list[ComputedUnit]:
    """Arrays that are computed together: the matrices, then the vectors."""
    rules = dict.fromkeys(array.chain.rule for array in stored.layout.arrays.values())
    return [unit_of(rule) for rule in rules if rule]


def _link(
    stored: ResumedRun, path: Path, types: Mapping[str, str], changed: dict[str, Any]
) -> None:
    source = stored.metadata
    blocks = -(-stored.rows // stored.layout.block_rows)
    # Linked blocks keep their identity. A source that was cut may have entries beyond.
    runs = (
        *((min(number, blocks), run) for number, run in stored.layout.runs),
        (blocks, new_identity()),
    )
    arrays = {
        name: _with_runs(json.loads(source.array(name, stored.rows)), runs)
        for name in source.names()
        if name == STEP.name or name in types or coordinate(name)
    }
    identity = {"runs": [list(entry) for entry in runs]}
    metadata = RunMetadata(arrays, source.attributes | changed | identity)
    metadata.notes = notes_until(source.notes, stored.last_step())
    assert isinstance(stored.path, Path)
    keys = [
        f"{name}/{file.name}"
        for name in filter(coordinate, arrays)
        for file in (stored.path / name).glob("c*")
    ]
    for name in metadata.series():
        array = stored.arrays[name]
        keys += [array.key(block, part) for block in range(blocks) for part in range(array.parts)]
    link_run(stored, path, keys, metadata, status="interrupted")


def _of_type(variable: TiledVariable, wider: str) -> TiledVariable:
    """The variable in a type that holds its values."""
    native, wanted = variable.native, native_type(wider)
    if native == wanted:
        return variable

    def bits(where: Where) -> Array:
        return widen(variable.bits(where), native).view(wanted.bits)

    return replace(variable, native=wanted, bits=bits)


def _with_runs(metadata: dict[str, Any], runs: Runs) -> dict[str, Any]:
    """Metadata file of an array, for a run of that identity."""
    codecs = [
        codec | {"configuration": codec["configuration"] | {"runs": [list(e) for e in runs]}}
        if codec["name"] == BLOCK
        else codec
        for codec in metadata["codecs"]
    ]
    return metadata | {"codecs": codecs}
