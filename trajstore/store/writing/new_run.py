"""Content of a new run before its first row: layout, metadata and checked coordinates."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.arguments import exact, exact_json
from trajstore.codec.block import new_identity
from trajstore.errors import InvalidArgument
from trajstore.schema import (
    COORDINATES,
    FORMAT,
    NAMES,
    POPULATION,
    STEP,
    TRAJECTORIES,
    along_token,
    coordinate,
    variable,
    variables_of,
)
from trajstore.store.metadata.array_metadata import (
    ArrayFacts,
    metadata_of,
    recorded_attributes,
    stored_values,
)
from trajstore.store.metadata.metadata_form import attribute_faults
from trajstore.store.metadata.object_keys import chunk_key
from trajstore.store.metadata.zarr_json import RunMetadata
from trajstore.store.storage.remote_path import Location
from trajstore.store.writing.compact_encoding import check_encoding, compact_rule, vector_rule
from trajstore.store.writing.resumed_run import ResumedRun
from trajstore.store.writing.shared_run import plan_shared
from trajstore.store.writing.token_share import TokenShare
from trajstore.strict_json import utc_now
from trajstore.version import __version__


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
    found, counts = np.unique(ids, return_counts=True)
    if len(found) != len(ids):
        first = int(np.argmax(counts > 1))
        more = f" and {n} other ids repeatedly" if (n := np.sum(counts > 1) - 1) else ""
        raise InvalidArgument(
            f"token: got the id {found[first]} {counts[first]} times{more}, expected each id once"
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
    found = {}
    for coordinate_name, needing in NAMES.items():
        held = [name for name in needing if name in variables]
        names = given.get(coordinate_name) or ()
        if held and not len(names) == len(set(names)) > 0:
            raise InvalidArgument(
                f"{coordinate_name}: got {len(names)} names of {coordinate_name}s, expected at "
                f"least one and all distinct, for {', '.join(held)}"
            )
        if held:
            found[coordinate_name] = exact(coordinate_name, names, "string")
    return found


def check_variables(names: Collection[str], attributes: Mapping[str, Any]) -> None:
    """Raise an error for unknown variables of a run, and without the recorded parameter.

    Raises
    ------
    InvalidArgument
        If a name is unknown, or ``W``, ``delta`` and ``cells`` are all missing.
    """
    held = variables_of(attributes)
    for name in names:
        variable(name, held)
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
    on_note: Callable[[str], None] | None,
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
    on_note : callable or None
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
    found: dict[str, dict[str, Any]] = {}
    for name, array in layout.arrays.items():
        native = None if name == STEP.name else array.native.name
        facts = ArrayFacts(
            name=name,
            shape=(array.shard[0], *array.row),
            attributes=recorded_attributes(name, native, auxiliary),
            form=array.form(layout.runs),
        )
        found[name] = metadata_of(facts)
    own, chunks = coordinate_objects(coordinates)
    metadata = RunMetadata(found | own, fixed)
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
