"""A new run with the first rows of another one, hard-linked where they do not change.

Objects of a store are replaced and never modified, so two runs may share a file. Resuming, cutting
or repairing one of them does not change the other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from trajstore.byte_sizes import parse_bytes
from trajstore.codec.block_codec import BLOCK
from trajstore.codec.block_form import Runs
from trajstore.codec.block_label import new_identity
from trajstore.codec.computed_rows import ComputedUnit, unit_of
from trajstore.errors import InvalidArgument
from trajstore.schema import STEP, coordinate, row_lengths
from trajstore.store.metadata.block_plan import Layout, plan
from trajstore.store.metadata.fingerprint import Fingerprint
from trajstore.store.metadata.object_keys import DOCUMENT
from trajstore.store.metadata.repairs import without_later_repairs
from trajstore.store.metadata.zarr_json import CHANGING, RunMetadata
from trajstore.store.reading.array_reader import StoredArray
from trajstore.store.reading.open_group import open_group
from trajstore.store.storage.atomic import link_or_copy, refuse_links
from trajstore.store.writing.block_writer import BlockWriter
from trajstore.store.writing.commit import Committer
from trajstore.store.writing.create import create_folder
from trajstore.store.writing.new_run import check_variables, series_metadata
from trajstore.store.writing.replay_encoding import replay_rule, vector_rule
from trajstore.store.writing.resumed_run import ResumedRun, resumed_run, stored_fingerprints
from trajstore.store.writing.writer import RunWriter
from trajstore.strict_json import utc_now
from trajstore.threads import default_threads
from trajstore.values.native_types import NativeType, native_type, widen

__all__ = ["branch_run", "holds_exactly"]

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

    It has the block size, the coordinates and the encoding of the source. Full blocks of variables
    that keep their type are hard links, or copies if the file system does not support links.
    Variables with a wider type are encoded again, block by block, and so is the last block if it is
    not full. Computed arrays are encoded again, together, if the optimizer's rule or a type
    changes. Nothing is flushed here; `staged_run` flushes the run before it renames it.

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
        Called with the reason if ``replay`` cannot compute W and the moments (default: log it).

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
    branch = _Branch.planned(stored, path, types, attributes, memory=memory, on_note=on_note)
    create_folder(path, branch.metadata, {}, {}, overwrite=False, fsync=False)
    branch.write_blocks()
    branch.write_rest(memory)


def _check_types(stored: ResumedRun, types: Mapping[str, str]) -> None:
    check_variables(types)
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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Branch:
    """A new run from the first rows of another one, during its creation.

    Attributes
    ----------
    stored : ResumedRun
        The source, with the kept rows.
    path : Path
    metadata : RunMetadata
    kept : tuple of str
        Arrays along ``step`` whose full blocks are linked.
    changed : Layout
        Layout of the arrays that are encoded again.
    """

    stored: ResumedRun
    path: Path
    metadata: RunMetadata
    kept: tuple[str, ...]
    changed: Layout

    @classmethod
    def planned(
        cls,
        stored: ResumedRun,
        path: Path,
        types: Mapping[str, str],
        attributes: Mapping[str, Any],
        *,
        memory: int | str,
        on_note: Callable[[str], None] | None,
    ) -> _Branch:
        root = json.loads((stored.path / DOCUMENT).read_bytes())
        stored_metadata = root["consolidated_metadata"]["metadata"]
        coordinates = [name for name in stored_metadata if coordinate(name)]
        fixed = {key: value for key, value in root["attributes"].items() if key not in CHANGING}
        fixed |= {"created": utc_now(), **attributes}
        rule, vectors = None, None
        if fixed["encoding"] == "replay":
            noted = on_note if _units(stored.layout) else lambda note: None
            rule = replay_rule(fixed, types, noted)
            vectors = vector_rule(fixed, types, noted)
        lengths = {name: stored_metadata[name]["shape"][0] for name in coordinates}
        layout = plan(
            types,
            tokens=lengths["token"],
            hidden=_hidden(stored),
            **_room(stored),
            parameters=lengths.get("parameter", 1),
            memory=parse_bytes(memory),
            block_rows=stored.layout.block_rows,
            encoding=fixed["encoding"],
            rule=rule,
            vectors=vectors,
        )
        anew = _changed_arrays(stored.layout, layout)
        runs = _runs_of_branch(stored)
        changed_arrays = {name: array for name, array in layout.arrays.items() if name in anew}
        changed = replace(layout, arrays=changed_arrays, runs=runs)
        kept = tuple(name for name in layout.arrays if name not in anew)
        arrays = {name: _with_runs(stored_metadata[name], runs) for name in (*kept, *coordinates)}
        arrays |= series_metadata(changed, coordinates)
        fixed["runs"] = [list(entry) for entry in runs]
        return cls(
            stored=stored,
            path=path,
            metadata=RunMetadata(
                {name: arrays[name] for name in stored_metadata if name in arrays},
                without_later_repairs(fixed, stored.rows),
            ),
            kept=kept,
            changed=changed,
        )

    def write_blocks(self) -> None:
        """Link or encode the full blocks, and commit them."""
        source = self.stored.path
        assert isinstance(source, Path)  # only local runs can be sources
        blocks = self.stored.rows // self.stored.layout.block_rows
        for name in self.metadata.names():
            if coordinate(name):
                for file in (source / name).glob("c*"):
                    link_or_copy(file, self.path / name / file.name)
        for name in self.kept:
            stored = self.stored.arrays[name]
            for number in range(blocks):
                for part in range(stored.parts):
                    key = stored.key(number, part)
                    link_or_copy(source / key, self.path / key)
        for together in self._groups():
            one = replace(self.changed, arrays={n: self.changed.arrays[n] for n in together})
            writer = BlockWriter(self.path, one, fsync=False)
            needed = {name: array.native for name, array in one.arrays.items()}
            for unit in _units(one):
                needed[unit.gradient] = unit.chains[unit.gradient].native
            try:
                for number in range(blocks):
                    rows = self._rows_of(number)
                    bits = {name: self._bits(name, rows, each) for name, each in needed.items()}
                    writer.encode(number, bits)
                    writer.write(number, rows.stop - rows.start)
            finally:
                writer.close()
        whole = blocks * self.stored.layout.block_rows
        committer = Committer(self.path, self.metadata, self._fingerprint(whole), fsync=False)
        committer.commit((whole, "interrupted"))

    def _groups(self) -> list[list[str]]:
        """Names of the changed arrays, grouped by joint encoding."""
        computed = {name for unit in _units(self.changed) for name in unit.chains}
        together = [name for name in self.changed.arrays if name in computed]
        alone = [[name] for name in self.changed.arrays if name not in together]
        return [together, *alone] if together else alone

    def write_rest(self, memory: int | str) -> None:
        """Write the rows of the last block, if it is not full."""
        first = self.stored.rows - self.stored.rows % self.stored.layout.block_rows
        if first == self.stored.rows:
            return
        rows = slice(first, self.stored.rows)
        steps = self.stored.arrays[STEP.name].values((rows,))
        writer = RunWriter.resume(self.path, memory=memory, commit_every=None, fsync=False)
        try:
            for at, places in writer.stretches(steps):
                for name, place in places.items():
                    taken = slice(first + at.start, first + at.stop)
                    place[...] = self._bits(name, taken, writer.layout.arrays[name].native)
        finally:
            writer.close("interrupted")

    def _fingerprint(self, rows: int) -> Fingerprint:
        runs = self.changed.runs
        arrays: dict[str, StoredArray] = {}
        for name in self.kept:
            stored = self.stored.arrays[name]
            arrays[name] = replace(stored, path=self.path, form=replace(stored.form, runs=runs))
        for name, array in self.changed.arrays.items():
            shape = (self.stored.rows, *array.row)
            form = array.form(runs)
            arrays[name] = StoredArray(path=self.path, name=name, shape=shape, form=form)
        return stored_fingerprints(self.path, self.metadata, arrays, self.changed, rows)[-1]

    def _rows_of(self, block: int) -> slice:
        length = self.stored.layout.block_rows
        return slice(block * length, (block + 1) * length)

    def _bits(self, name: str, rows: slice, wanted: NativeType) -> Array:
        """Bits of some rows, in the wanted type."""
        native = self.stored.layout.arrays[name].native
        array = replace(self.stored.arrays[name], threads=default_threads())
        bits = array.native_bits(rows, native)
        return bits if native == wanted else widen(bits, native).view(wanted.bits)


def _units(layout: Layout) -> list[ComputedUnit]:
    """The computed units of a layout."""
    rules = dict.fromkeys(array.chain.rule for array in layout.arrays.values())
    return [unit_of(rule) for rule in rules if rule]


def _changed_arrays(stored: Layout, wanted: Layout) -> set[str]:
    """Names of the arrays that are encoded again."""
    anew = {
        name for name, array in wanted.arrays.items() if array.native != stored.arrays[name].native
    }
    before, units = _units(stored), _units(wanted)
    kept = [
        unit
        for unit in units
        if any((unit.rule, {*unit.chains}) == (each.rule, {*each.chains}) for each in before)
        and anew.isdisjoint(unit.chains)
    ]
    same = {name for unit in kept for name in unit.rule.state}
    for each in before:
        anew |= (wanted.arrays.keys() & set(each.rule.state)) - same
    for unit in units:
        if unit not in kept:
            anew |= {*unit.rule.state, *unit.rates}
            if wanted.arrays[unit.gradient] != stored.arrays[unit.gradient]:
                anew.add(unit.gradient)
    return anew


def _hidden(stored: ResumedRun) -> int:
    arrays = stored.layout.arrays.values()
    return next((array.row[-1] for array in arrays if "hidden" in array.variable.dims), 1)


def _room(stored: ResumedRun) -> dict[str, Any]:
    arrays = stored.layout.arrays.items()
    return row_lengths({name: array.row for name, array in arrays if name != STEP.name})


def _runs_of_branch(stored: ResumedRun) -> Runs:
    """Identities of the blocks of the new run. Linked blocks keep their identity."""
    blocks = stored.rows // stored.layout.block_rows
    # A run that was cut before its own first block, or got a wider type, has entries beyond.
    before = ((min(number, blocks), run) for number, run in stored.layout.runs)
    return (*before, (blocks, new_identity()))


def _with_runs(document: dict[str, Any], runs: Runs) -> dict[str, Any]:
    """Document of an array, for a run of that identity."""
    codecs = [
        codec | {"configuration": codec["configuration"] | {"runs": [list(e) for e in runs]}}
        if codec["name"] == BLOCK
        else codec
        for codec in document["codecs"]
    ]
    return document | {"codecs": codecs}
