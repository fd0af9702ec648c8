"""A new run from the first rows of another one: with its blocks, or written again.

If only metadata files change, all blocks are hard links. If the type of a variable or the
optimizer's rule changes, the rows are exported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.codec.block import Runs, new_identity
from trajstore.codec.block_codec import BLOCK
from trajstore.codec.computed_rows import ComputedUnit, unit_of
from trajstore.errors import InvalidArgument, RunExists
from trajstore.exchange.exporting.export_run import write_run
from trajstore.exchange.selection import Selection
from trajstore.schema import STEP, coordinate
from trajstore.store.metadata.zarr_json import RunMetadata, notes_until
from trajstore.store.reading.open_run import open_group
from trajstore.store.reading.tiled_reader import TiledVariable, Where, open_tiled
from trajstore.store.storage.atomic import refuse_links
from trajstore.store.writing.create import link_run
from trajstore.store.writing.new_run import check_variables, compact_rule, vector_rule
from trajstore.store.writing.resumed_run import ResumedRun, resumed_run
from trajstore.strict_json import utc_now
from trajstore.values.native_types import native_type, widen

Array = npt.NDArray[Any]


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
    return [unit.rule for unit in units] == [rule for rule in rules if rule] and all(
        kept >= unit.chains.keys() for unit in units
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
