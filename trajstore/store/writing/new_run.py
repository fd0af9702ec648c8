"""Content of a new run before its first row: layout, metadata and checked coordinates.

If several processes write it, the first one plans and creates it, and the others join. No shard
contains tokens of two processes.

The encoding ``compact`` needs the rule of the computed arrays; without one, differences are stored.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.arguments import exact, exact_json
from trajstore.codec.block import new_identity
from trajstore.codec.computed_rows import GRADIENT, VECTOR_RATES
from trajstore.codec.open_block import check_not_replaced
from trajstore.defaults import DEFAULT_MEMORY
from trajstore.errors import InvalidArgument, RunNotFound
from trajstore.installation import __version__
from trajstore.provenance import RunAttributes
from trajstore.schema import (
    COORDINATES,
    FORMAT,
    NAMES,
    POPULATION,
    STEP,
    TRAJECTORIES,
    VARIABLES,
    Variable,
    along_token,
    coordinate,
    entry_of,
    variable,
    variables_of,
)
from trajstore.store.metadata.block_plan import FEWEST_ROWS, Layout, plan, within
from trajstore.store.metadata.metadata_form import attribute_faults
from trajstore.store.metadata.zarr_json import (
    ArrayFacts,
    RunMetadata,
    metadata_of,
    recorded_attributes,
    stored_values,
)
from trajstore.store.reading.array_reader import present_root
from trajstore.store.storage.remote_path import Location, RunPath, chunk_key, location
from trajstore.store.writing.resumed_run import ResumedRun, TokenShare, has_tokens, in_all_processes
from trajstore.strict_json import utc_now
from trajstore.values.native_types import native_type
from trajstore.values.optimizer_rule import VECTORS, OptimizerRule, VectorRule


def plan_shared(
    share: TokenShare,
    variables: Mapping[str, str],
    *,
    memory: int = DEFAULT_MEMORY,
    block_rows: int | None = None,
    threads: int | None = None,
    **others: Any,
) -> Layout:
    """Plan a run that one or several processes write.

    Parameters
    ----------
    share : TokenShare
        Share of one process. The returned layout is that of the whole run, equal in all processes.
    variables : mapping of str to str
        Native type of each variable.
    memory : int, default 1 GiB
        Memory budget of the writer of one process, in bytes.
    block_rows, threads, **others
        See `trajstore.store.metadata.block_plan.plan`.

    Raises
    ------
    InvalidArgument
        See `trajstore.store.metadata.block_plan.plan`.
    """

    def planned(rows: int | None) -> Layout:
        # This plans a whole block. Each process holds its share of it.
        layout = plan(
            variables,
            memory=memory * share.count,
            block_rows=rows,
            threads=threads,
            **others,
        )
        return _in_shares(layout, share.count)

    # The first process has the most tokens, so its layout makes all plans equal.
    first = replace(share, number=0)
    layout = planned(block_rows)
    while (
        block_rows is None
        and layout.block_rows > FEWEST_ROWS
        and first.of_layout(layout).memory > memory
    ):
        layout = planned(layout.block_rows // 2)
    fitting = within(first.of_layout(layout), memory, threads=threads)
    return replace(layout, threads=fitting.threads)


def _in_shares(layout: Layout, count: int) -> Layout:
    """A layout in which no shard contains tokens of two processes.

    A process has a whole number of shards, and a shard a whole number of chunks. Their lengths are
    as near as possible to those of the given layout. The fit is best if the number of tokens of a
    process has many divisors.

    Parameters
    ----------
    layout : Layout
        Layout for one process.
    count : int
        Number of processes.
    """
    with_tokens = {name: array for name, array in layout.arrays.items() if has_tokens(array)}
    if count == 1 or not with_tokens:
        return layout
    tokens = next(iter(with_tokens.values())).row[0]
    length = math.ceil(tokens / count)
    divisors = [part for part in range(1, length + 1) if length % part == 0]
    chunks = {name: _nearest(divisors, array.chunk[1]) for name, array in with_tokens.items()}
    matrices = [name for name, array in with_tokens.items() if len(array.row) > 1]
    common = math.lcm(*(chunks[name] for name in matrices))
    whole = [part for part in divisors if part % common == 0]
    arrays = dict(layout.arrays)
    for name, array in with_tokens.items():
        shard = length  # for one number per token: all tokens of a process
        if name in matrices:
            shard = _nearest(whole, array.shard[1])
        arrays[name] = replace(
            array,
            chunk=(array.chunk[0], chunks[name], *array.chunk[2:]),
            shard=(array.shard[0], shard, *array.shard[2:]),
        )
    return replace(layout, arrays=arrays)


def _nearest(lengths: Sequence[int], wanted: int) -> int:
    return min(lengths, key=lambda length: abs(math.log(length / wanted)))


def announce_run(share: TokenShare, run: ResumedRun) -> None:
    """In the first process, after it created the run: wait until the others have joined.

    Raises
    ------
    RecordingError
        If one of them cannot join.
    """
    share.exchange({**vars(run), "share": None})  # processes cannot exchange a share
    with in_all_processes(share):
        pass


@contextlib.contextmanager
def joined_run(path: RunPath, share: TokenShare) -> Iterator[ResumedRun]:
    """In another process: join the run of the first one.

    If the ``with`` block fails, it fails in all processes.

    Raises
    ------
    RecordingError
        If the first process cannot create the run.
    InvalidArgument
        If this process does not see the run.
    """
    with in_all_processes(share):
        pass
    facts = share.exchange(None)[0]
    with in_all_processes(share):
        place = location(path).absolute()
        try:
            check_not_replaced(place, facts["layout"].runs, present_root(place), is_written=True)
        except RunNotFound as error:
            raise InvalidArgument(
                f"{place} is not the run that the first process created there; processes that "
                "record one run together need a shared folder or an object store"
            ) from error
        yield ResumedRun(**(facts | {"path": place, "share": share}))


logger = logging.getLogger(__name__)


def check_encoding(encoding: str, *, shared: bool) -> None:
    """Raise an error unless a new run can have the encoding.

    Parameters
    ----------
    encoding : str
    shared : bool
        True if several processes write the run.

    Raises
    ------
    InvalidArgument
        If several processes cannot write it.
    """
    if encoding == "compact" and shared:
        raise InvalidArgument(
            "encoding: got 'compact' for a run that several processes write; use 'delta', and "
            "export the run afterwards with encoding='compact'"
        )


def compact_rule(
    attributes: Mapping[str, Any] | None,
    variables: Mapping[str, str],
    on_note: Callable[[str], None],
) -> OptimizerRule | None:
    """Rule with which a run of the encoding ``compact`` computes W and the moments.

    None if it stores them as differences. A note then states the reason.

    Parameters
    ----------
    attributes : mapping, optional
        Attributes of the root. ``optimizer`` and ``recording`` are used.
    variables : mapping of str to str
        Native type of each variable.
    on_note : callable
        Called with the note.
    """
    try:
        return _rule(attributes or {}, variables)
    except InvalidArgument as error:
        on_note(_not_computed("W", variables, error))
        return None


def vector_rule(
    attributes: Mapping[str, Any] | None,
    variables: Mapping[str, str],
    on_note: Callable[[str], None],
) -> VectorRule | None:
    """Rule with which a run computes the vectors of all other parameters, as `compact_rule`.

    None, without a note, if the run does not hold them.
    """
    if VECTORS["W"] not in variables:
        return None
    try:
        rule = VectorRule.of(attributes or {})
        _check((*rule.state, VECTORS[GRADIENT]), VECTOR_RATES[:2], attributes or {}, variables)
    except InvalidArgument as error:
        on_note(_not_computed(VECTORS["W"], variables, error))
        return None
    return rule


def _not_computed(values: str, variables: Collection[str], error: InvalidArgument) -> str:
    """Sentence about values, such as W, and the state that the optimizer keeps of them."""
    like, entries = VARIABLES[values], {name: entry_of(name) for name in variables}
    names = sorted(
        name
        for name, entry in entries.items()
        if isinstance(entry, Variable) and (entry.dims, entry.state) == (like.dims, like.state)
    )
    return f"compact stores {', '.join(names) or 'all arrays'} as differences: {error}"


def once(on_note: Callable[[str], None] | None) -> Callable[[str], None]:
    """The function, or else the logger of this module, for each sentence once."""
    return cache(on_note or partial(logger.warning, "%s"))


def fallbacks(facts: Mapping[str, Any]) -> list[str]:
    """Sentences about what a run of the encoding ``compact`` stores in place of computing it.

    Parameters
    ----------
    facts : mapping
        Result of `trajstore.store.reading.run_info.information`.
    """
    if facts["encoding"] != "compact":
        return []
    arrays, notes = facts["arrays"], list[str]()
    types = {name: array["native_dtype"] for name, array in arrays.items()}
    for name, rule in (("W", compact_rule), (VECTORS["W"], vector_rule)):
        if arrays.get(name, {}).get("kind") != "computed":
            rule(facts, types, notes.append)
    if named := [name for name, array in arrays.items() if _share_stored(array) > 0.05]:
        shares = [f"{1 / arrays[name]['ratio']:.0%}" for name in named]
        known = "" if "hyperparameters" in arrays else "; the run does not hold hyperparameters"
        if facts["steps"]["last"] - facts["steps"]["first"] >= arrays[STEP.name]["shape"][0]:
            known = "; its steps are not consecutive"
        notes.append(
            f"not all rows of {', '.join(named)} could be computed from the rows before, so these "
            f"arrays take {', '.join(shares)} of their uncompressed bytes{known}"
        )
    return notes


_OVERHEAD = 4 << 10  # bytes of an object without its rows


def _share_stored(array: Mapping[str, Any]) -> float:
    """Bytes that a computed array takes besides the first row of each block, per byte of rows."""
    stored, native = array["bytes_on_disk"], array["bytes_native"]
    if array["kind"] != "computed" or not stored or not native:
        return 0.0
    rows, block = array["shape"][0], array["shard"][0]
    return float((stored - math.ceil(rows / block) * (native / rows + _OVERHEAD)) / native)


def _rule(attributes: Mapping[str, Any], variables: Mapping[str, str]) -> OptimizerRule:
    optimizer = RunAttributes.of(attributes).optimizer
    rule = OptimizerRule.of(optimizer.stored)
    if optimizer.hyperparameters.get("rounding", "nearest") != "nearest":
        raise InvalidArgument(f"the optimizer {optimizer.path!r} rounds at random")
    _check((*rule.state, GRADIENT), ("lr",), attributes, variables)
    return rule


def _check(
    arrays: Collection[str],
    rates: Collection[str],
    attributes: Mapping[str, Any],
    variables: Mapping[str, str],
) -> None:
    if missing := [name for name in (*arrays, *rates) if name not in variables]:
        raise InvalidArgument(f"the run does not hold {', '.join(missing)}")
    if wide := [name for name in arrays if native_type(variables[name]).itemsize > 4]:
        raise InvalidArgument(f"{', '.join(wide)} are float64")
    if (every := RunAttributes.of(attributes).every) != 1:
        raise InvalidArgument(f"the run is recorded every {every} steps")


def token_coordinates(
    token: npt.ArrayLike,
    populations: Mapping[str, npt.ArrayLike] | None = None,
    **others: npt.ArrayLike | None,
) -> dict[str, npt.NDArray[Any]]:
    """Coordinates along ``token`` of a new run, without those that are None.

    Without ``is_dead``, tokens whose ``token_count`` is 0 are dead.

    Parameters
    ----------
    token : array_like of int, (token,)
    populations : mapping of str to array_like of bool, (token,), optional
        Masks by the names of their coordinates, ``is_NAME``.
    **others : array_like, (token,), or None
        Values by their names in the schema.

    Raises
    ------
    InvalidArgument
        If the ids repeat, a value does not fit into the type of its coordinate, a coordinate has a
        different length, or the name of a population is invalid.
    """
    coordinates = {"token": exact("token", token, "int32")}
    ids = coordinates["token"]
    distinct, counts = np.unique(ids, return_counts=True)
    if len(distinct) != len(ids):
        first = int(np.argmax(counts > 1))
        more = f" and {n} other ids repeatedly" if (n := np.sum(counts > 1) - 1) else ""
        raise InvalidArgument(
            f"token: got the id {distinct[first]} {counts[first]} times{more}, expected each "
            "id once"
        )
    for name, mask in (populations or {}).items():
        if name in COORDINATES or coordinate(name) is None or np.asarray(mask).dtype != bool:
            raise InvalidArgument(
                f"populations: got {name!r} of {np.asarray(mask).dtype}, expected bool values "
                f"with a new name that begins with {POPULATION}"
            )
    given: dict[str, npt.ArrayLike | None] = {**others, **(populations or {})}
    for name, values in given.items():
        if values is None or (entry := coordinate(name)) is None:
            continue
        coordinates[name] = exact(name, values, entry.dtype)
        if len(coordinates[name]) != len(ids):
            raise InvalidArgument(
                f"{name}: got {len(coordinates[name])} values, expected {len(ids)}, one for each "
                "token"
            )
    if "is_dead" not in coordinates and "token_count" in coordinates:
        coordinates["is_dead"] = coordinates["token_count"] == 0
    return coordinates


def name_coordinates(
    variables: Collection[str], **given: Sequence[str] | None
) -> dict[str, npt.NDArray[Any]]:
    """Coordinates of names, such as those of the model's parameters, that a new run needs.

    Parameters
    ----------
    variables : collection of str
        Variables of the run.
    **given : sequence of str or None
        Names of each of `NAMES`.

    Raises
    ------
    InvalidArgument
        If they are missing, or two are equal.
    """
    coordinates = {}
    for coordinate_name, needing in NAMES.items():
        named = [name for name in needing if name in variables]
        names = given.get(coordinate_name) or ()
        if named and not len(names) == len(set(names)) > 0:
            raise InvalidArgument(
                f"{coordinate_name}: got {len(names)} names of {coordinate_name}s, expected at "
                f"least one and all distinct, for {', '.join(named)}"
            )
        if named:
            coordinates[coordinate_name] = exact(coordinate_name, names, "string")
    return coordinates


def check_variables(names: Collection[str], attributes: Mapping[str, Any]) -> None:
    """Raise an error for unknown variables of a run, and without the recorded parameter.

    Raises
    ------
    InvalidArgument
        If a name is unknown, or ``W``, ``delta`` and ``cells`` are all missing.
    """
    recorded = variables_of(attributes)
    for name in names:
        variable(name, recorded)
    if not any(name in names for name in TRAJECTORIES):
        raise InvalidArgument(
            f"got the variables {', '.join(names) or '—'}, expected at least one of W, delta and "
            "cells"
        )


def new_run(
    path: Location,
    coordinates: Mapping[str, npt.NDArray[Any]],
    variables: Mapping[str, str],
    *,
    config: Mapping[str, Any] | None,
    attributes: Mapping[str, Any] | None,
    encoding: str,
    share: TokenShare,
    on_note: Callable[[str], None],
    **sizes: Any,
) -> tuple[ResumedRun, dict[str, bytes]]:
    """Content of a run before its first row.

    Parameters
    ----------
    path : Path or RemotePath
    coordinates : mapping of str to ndarray
        Results of `token_coordinates` and `name_coordinates`.
    variables : mapping of str to str
        Native type of each variable.
    config : mapping or None
        Configuration of the run, JSON values only.
    attributes : mapping or None
        Other attributes of the root.
    encoding : str
        One of `ENCODINGS`.
    share : TokenShare
        Tokens of this process.
    on_note : callable
        See `compact_rule`.
    **sizes
        Other arguments of `plan_shared`.

    Returns
    -------
    ResumedRun
    dict of str to bytes
        The chunks of the coordinates, by key.

    Raises
    ------
    InvalidArgument
        If an argument is impossible.
    """
    check_variables(variables, attributes or {})
    check_encoding(encoding, shared=share.count > 1)
    if encoding == "compact":
        sizes["rule"] = compact_rule(attributes, variables, on_note)
        sizes["vectors"] = vector_rule(attributes, variables, on_note)
    named = {name: len(coordinates[name]) for name in NAMES if name in coordinates}
    sizes["lengths"] = {**(sizes.get("lengths") or {}), **named}
    layout = plan_shared(
        share,
        variables,
        tokens=np.size(coordinates["token"]),
        encoding=encoding,
        **sizes,
    )
    layout = replace(layout, runs=((0, new_identity()),))
    fixed = {
        "trajstore_format": FORMAT,
        "trajstore_version": __version__,
        "runs": [list(entry) for entry in layout.runs],
        "created": utc_now(),
        "encoding": encoding,
        "block_rows": layout.block_rows,
        "config": dict(config or {}),
        **(attributes or {}),
    }
    exact_json("attributes", fixed)
    for fault in attribute_faults(fixed):
        raise InvalidArgument(f"invalid attributes of a run: {fault}")
    auxiliary = [name for name in along_token(coordinates) if name != "token"]
    documents: dict[str, dict[str, Any]] = {}
    for name, array in layout.arrays.items():
        native = None if name == STEP.name else array.native.name
        facts = ArrayFacts(
            name=name,
            shape=(array.shard[0], *array.row),
            attributes=recorded_attributes(name, native, auxiliary),
            form=array.form(layout.runs),
        )
        documents[name] = metadata_of(facts)
    coordinate_documents, chunks = coordinate_objects(coordinates)
    metadata = RunMetadata(documents | coordinate_documents, fixed)
    digests = {key: hashlib.sha256(data).digest() for key, data in chunks.items()}
    run = ResumedRun(
        path=path,
        rows=0,
        layout=layout,
        metadata=metadata,
        arrays={},
        fingerprint=metadata.fingerprint(digests, layout.block_rows),
        share=share,
    )
    return run, chunks


def coordinate_objects(
    coordinates: Mapping[str, npt.NDArray[Any]],
) -> tuple[dict[str, dict[str, Any]], dict[str, bytes]]:
    """Metadata of coordinates by name, and their chunks by key.

    Parameters
    ----------
    coordinates : mapping of str to ndarray
        Values of `token_coordinates` and `name_coordinates`.
    """
    arrays: dict[str, dict[str, Any]] = {}
    chunks: dict[str, bytes] = {}
    for name, values in coordinates.items():
        facts = ArrayFacts(name=name, shape=values.shape, attributes=recorded_attributes(name))
        arrays[name] = metadata_of(facts)
        chunks[chunk_key(name, 0, 1)] = stored_values(arrays[name], values)
    return arrays, chunks
