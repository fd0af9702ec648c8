"""Metadata of a run, read strictly and compared with each other.

Each fact about an array is stored twice: in its own `zarr.json` and in the root's consolidated
metadata. `step` has a copy of the root's fixed attributes. So a flipped bit in a metadata file is
detected, and mostly also which copy is right. Of two sound metadata files of an array, the labels
of its blocks decide, then the other arrays and the schema.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from trajstore.errors import FormatError, ObjectStoreError, RunNotFound
from trajstore.integrity.checked_metadata import CheckedMetadata
from trajstore.integrity.problem import Problem
from trajstore.integrity.root_attribute_checks import (
    check_attributes,
    copied_attributes,
    fixed_attributes,
    is_replaced,
    parsed_copy,
)
from trajstore.schema import (
    EXPORTED,
    NAMES,
    STEP,
    TRAJECTORIES,
    VARIABLES,
    belongs,
    variables_of,
)
from trajstore.store.metadata.array_metadata import (
    ArrayFacts,
    array_faults,
    contradicting_lengths,
    facts_of,
    is_series,
    metadata_of,
    recorded_attributes,
    with_rows,
)
from trajstore.store.metadata.fingerprint import COPY
from trajstore.store.metadata.metadata_form import is_length, root_faults
from trajstore.store.metadata.object_keys import METADATA_KEY
from trajstore.store.reading.open_group import similar_runs
from trajstore.store.reading.run_info import object_sizes
from trajstore.store.storage.object_file import metadata_in
from trajstore.store.storage.remote_path import Location, RunPath, location
from trajstore.strict_json import JsonObject, changes, parse, same

_MOST_MISSING = 1 << 16


def check_metadata(path: RunPath) -> CheckedMetadata:
    """Read the metadata of a run and compare them.

    Parameters
    ----------
    path : path-like, str or RemotePath

    Raises
    ------
    RunNotFound
        If there is nothing at `path`.
    FormatError
        If it is not a run, or one of a newer format.
    InvalidArgument, MissingExtra, ObjectStoreError
        If it is an address that cannot be read.
    """
    text, place = str(path), location(path).absolute()
    found = CheckedMetadata(path=place)
    folders = _array_folders(found, text)
    found.root = _read(found, None)
    if found.root is not None:
        _check_root(found)
    elif folders is None:
        raise RunNotFound(
            f"there is no run at {text}, or its root is broken: {found.problems[0].message}"
        )
    if folders is None:  # places without a listing
        folders = [name for name in found.consolidated() or {} if name and "/" not in name]
    known = variables_of(found.attributes)
    for name in sorted(folders):
        listed = found.objects is None or f"{name}/{METADATA_KEY}" in found.objects
        if listed or belongs(name, known):
            found.own[name] = _read(found, name)
    copy = variables_of(copied_attributes(found.own.get(STEP.name)))
    found.variables = tuple(dict.fromkeys([*known, *copy]))
    _choose_metadata(found)
    _check_rows(found)
    _check_age(found)
    _check_lengths(found)
    _check_extent(found)
    check_attributes(found)
    if not _is_of_trajstore(found):
        raise FormatError(_no_run(found, text))
    return found


def _is_of_trajstore(found: CheckedMetadata) -> bool:
    """True if the metadata are those of a run; other programs use the names step and W, too.

    An exported Zarr has arrays of a run in other codecs, and an attribute of the exporter. A result
    of an analysis has the run's coordinates and `step`, but no recorded parameter.
    """
    if "trajstore_format" in found.attributes:
        return True
    if EXPORTED in found.attributes:
        return False
    arrays = {**(found.consolidated() or {}), **found.own}
    trajectories = [arrays[name] for name in TRAJECTORIES if name in arrays]
    if not trajectories:
        return False
    return found.copy is not None or any(
        "trajstore." in text for text in map(json.dumps, trajectories)
    )


def _no_run(found: CheckedMetadata, text: str) -> str:
    what = (
        "is a Zarr group, but not a run" if (found.path / METADATA_KEY).exists() else "is not a run"
    )
    key = f"/{STEP.name}/{METADATA_KEY}"  # of runs in the folder
    if isinstance(found.path, Path):
        inside = {place.parent.parent.name for place in found.path.glob(f"*{key}")}
    else:
        inside = {name.split("/")[0] for name in found.objects or () if name.endswith(key)}
    if inside:
        return f"{text} {what}, but contains runs: name one of {', '.join(sorted(inside)[:9])}"
    return f"{text} {what}: it has no trajstore_format"


def _array_folders(found: CheckedMetadata, text: str) -> list[str] | None:
    """Folders with an array, or with the name of one; None for a web server. List all objects.

    Raises
    ------
    RunNotFound, FormatError
        If there is nothing, or no array and no metadata file.
    """
    path = found.path
    if isinstance(path, Path):
        if not path.exists():
            raise RunNotFound(f"there is no run at {text}{similar_runs(path)}")
        if not path.is_dir():
            raise FormatError(f"{text} is a file; a run is a folder: unpack a zip file first")
        objects = _files(path, found.notes)
    elif path.listed:
        objects = object_sizes(path)
        if not objects:
            raise RunNotFound(f"there is no run at {text}")
    else:
        found.notes.append(
            "a web server lists no files, so leftovers and checkpoints were not checked"
        )
        return None
    found.objects = objects
    names = {key.partition("/")[0] for key in objects if "/" in key}
    if METADATA_KEY not in objects and not any(
        belongs(name, VARIABLES) or f"{name}/{METADATA_KEY}" in objects for name in names
    ):
        raise FormatError(
            f"{text} is not a run: it has no {METADATA_KEY}, and no array in it has one"
        )
    return sorted(names)


def _files(run: Path, notes: list[str]) -> dict[str, int]:
    """Bytes of each file in a run and in its folders. Keys of folders end with a slash."""
    sizes: dict[str, int] = {}

    def search(folder: str) -> None:
        with os.scandir(run / folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # it was renamed meanwhile
                    size = entry.stat(follow_symlinks=False).st_size
                    sizes[f"{folder}{entry.name}{'/' * entry.is_dir()}"] = size

    search("")
    for folder in sorted(key for key in sizes if key.endswith("/")):
        try:
            search(folder)
        except OSError as error:
            notes.append(f"{folder[:-1]} cannot be searched for leftovers: {error.strerror}")
    return sizes


def _read(found: CheckedMetadata, array: str | None) -> JsonObject | None:
    metadata = read_metadata(found.path / (array or "") / METADATA_KEY, array)
    if isinstance(metadata, Problem):
        found.problems.append(metadata)
        found.refused |= metadata.remedy == "none"
        return None
    return metadata


def read_metadata(path: Location, array: str | None) -> JsonObject | Problem:
    """Read a JSON object strictly, or return the problem.

    Parameters
    ----------
    path : Path or RemotePath
    array : str or None
        Array of the metadata file; None for the root.
    """
    remedy: Literal["rewrite", "none"] = "rewrite"
    try:
        value = parse(metadata_in(path).decode())
        if isinstance(value, dict):
            return value
        message = "it is not a JSON object"
    except FileNotFoundError:
        message = "it is missing"
    except ObjectStoreError:
        raise
    except OSError as error:
        # A later attempt may succeed: do not replace the metadata file.
        message, remedy = str(error.strerror or error), "none"
    except ValueError as error:
        message = f"it is not the JSON document of a run: {error}"
    message = f"{METADATA_KEY} cannot be read: {message}"
    return Problem(array=array, path=path, message=message, remedy=remedy)


def _check_root(found: CheckedMetadata) -> None:
    root = found.root or {}
    for fault in root_faults(root):
        found.report(None, str(fault))
    if found.consolidated() is None:
        found.report(
            None,
            "the root has lost its consolidated metadata, which give readers the number of "
            "committed rows; zarr drops them when it sets an attribute",
        )
    attributes = root.get("attributes")
    if isinstance(attributes, dict):
        found.attributes = attributes


def _choose_metadata(found: CheckedMetadata) -> None:
    """Check each array's two metadata files, report problems, and choose the better."""
    consolidated = found.consolidated()
    copies = consolidated or {}
    sound: dict[str, list[JsonObject]] = {}
    # Writers keep the order of the root, if it has one.
    for name in dict.fromkeys([*copies, *found.own]):
        own, copy = found.own.get(name), copies.get(name)
        if not belongs(name, found.variables) and isinstance(own, dict):
            found.notes.append(f"{name} is an array that is not part of the run")
            continue
        if copy is None and consolidated is not None and own is not None:
            found.report(name, "the root does not list it", found.path / METADATA_KEY)
        if name not in found.own:
            found.own[name] = None
            found.report(name, "its folder is missing")
        both = ((copy, found.path / METADATA_KEY), (own, found.path / name / METADATA_KEY))
        sound[name] = [
            metadata
            for metadata, path in both
            if metadata is not None and _is_sound(found, name, metadata, path)
        ]
    shapes = {name: both[0]["shape"] for name, both in sound.items() if both}
    for name in shapes:
        found.arrays[name] = _better(found, name, sound[name], shapes)


def _is_sound(found: CheckedMetadata, name: str, metadata: Any, path: Location) -> bool:
    """Report the faults of the metadata of an array; True without any."""
    if not belongs(name, found.variables):
        wrong = ["this version has no variable or coordinate of this name"]
    else:
        facts = facts_of(name, metadata)
        wrong = [str(fault) for fault in array_faults(facts, metadata)]
        if isinstance(facts, ArrayFacts) and facts.foreign is not None:
            recorded = metadata_of(replace(facts, foreign=None))
            members = [
                member
                for member in ("chunk_key_encoding", "codecs")
                if not same(facts.foreign.get(member, recorded[member]), recorded[member])
            ]
            wrong.append(
                "its storage differs from that of a recorder, so its values cannot be checked; "
                f"another program wrote it, or changed its {' and '.join(members)}"
            )
    for fault in wrong:
        found.report(name, fault, path)
    return not wrong


def _better(
    found: CheckedMetadata, name: str, sound: list[JsonObject], shapes: dict[str, list[int]]
) -> JsonObject:
    """The better of the sound metadata files of an array; report differences."""
    copy, own = sound[0], sound[-1]
    if is_series(name):
        rows, copied = own["shape"][0], copy["shape"][0]
        if rows > copied:
            found.notes.append(
                f"{name} is {rows - copied} rows ahead of the root; a writer is in a "
                "commit, or died in one"
            )
        elif rows < copied:
            found.report(name, f"has {rows} rows in its own metadata file, {copied} in the root's")
        own = with_rows(name, own, copied)
    differing = [member for member, *_ in changes(own, copy)]
    if differing == [f"attributes.{COPY}"] and is_replaced(found, copy, own):
        found.replaced = True
        found.notes.append(
            "the attributes of the root are being changed; a writer is in a resume, or died in one"
        )
        return copy
    if not differing:
        return copy
    chosen = min(copy, own, key=lambda metadata: _rank(found, name, metadata, shapes))
    found.report(
        name,
        f"its own metadata file and its copy in the root differ in {', '.join(differing)}",
        found.path / (name if chosen is copy else "") / METADATA_KEY,
    )
    return chosen


def _rank(
    found: CheckedMetadata, name: str, metadata: JsonObject, shapes: dict[str, list[int]]
) -> tuple[bool, int]:
    """Rank of a sound metadata file that differs from its copy; lower is better."""
    facts = facts_of(name, metadata)
    assert isinstance(facts, ArrayFacts)  # or it had a fault
    among = contradicting_lengths({**shapes, name: metadata["shape"]})
    odd = sum(other == name for other, *_ in among)
    attributes = facts.attributes
    named = attributes.get("coordinates", "").split()
    known = recorded_attributes(name, attributes.get("native_dtype"), named)
    odd += sum(attributes.get(key) != value for key, value in known.items())
    odd += not found.own.keys() >= set(named)
    if COPY in attributes:
        odd += not same(parsed_copy(attributes[COPY]), fixed_attributes(found.attributes))
    return not _fits_label(found, facts), odd


def _fits_label(found: CheckedMetadata, facts: ArrayFacts) -> bool:
    """True if the first block was written with the settings of these facts, or there is none."""
    if facts.form is None or not facts.shape[0]:
        return True
    stored = found.reader(facts)
    try:
        with stored.opened(0, 0):
            pass
    except ObjectStoreError:
        raise
    except (FormatError, OSError):
        return False
    return True


def _check_rows(found: CheckedMetadata) -> None:
    """Determine the committed rows, and report contradictions."""
    series = [name for name in found.arrays if is_series(name)]
    committed = found.attributes.get("committed_rows")
    copies = found.consolidated() or {}
    shown = {name: copies[name]["shape"][0] for name in series if _has_shape(copies.get(name))}
    votes = Counter([*shown.values(), *filter(is_length, [committed])])
    if votes:
        best = max(votes.values())
        found.rows = min(rows for rows, count in votes.items() if count == best)
    elif series:
        # Without a root: a writer writes the shards before any metadata file grows.
        found.rows = min(found.arrays[name]["shape"][0] for name in series)
    if is_length(committed) and committed != found.rows:
        found.report(None, f"committed_rows is {committed}, the arrays have {found.rows} rows")
    for name in series:
        rows = shown.get(name, min(found.arrays[name]["shape"][0], found.rows))
        if rows != found.rows:
            found.report(
                name, f"has {rows} rows, others have {found.rows}", found.path / METADATA_KEY
            )
        found.arrays[name] = with_rows(name, found.arrays[name], found.rows)


def _check_age(found: CheckedMetadata) -> None:
    """Report a root that is older than all arrays of a complete run."""
    own = {
        metadata["shape"][0]
        for metadata in (found.own.get(name) for name in found.arrays if is_series(name))
        if metadata is not None and _has_shape(metadata)
    }
    if found.attributes.get("status") == "complete" and len(own) == 1 and min(own) > found.rows:
        found.report(
            None,
            f"the root records a complete run of {found.rows} rows, but the metadata of all "
            f"arrays {own.pop()} rows; an older root was restored",
        )


def _has_shape(metadata: Any) -> bool:
    shape = metadata.get("shape") if isinstance(metadata, dict) else None
    return isinstance(shape, list) and bool(shape) and is_length(shape[0])


def _check_lengths(found: CheckedMetadata) -> None:
    """Check that required arrays exist, and that all lengths agree."""
    there = found.arrays.keys() | found.own.keys()
    needed = {STEP.name: "every run needs it", "token": "every run needs it"}
    for name, needing in NAMES.items():
        if not there.isdisjoint(needing):
            needed[name] = f"it holds the names of the {name}s"
    if there.isdisjoint(TRAJECTORIES):
        needed["W"] = "every run needs W, or delta, or cells"
    for name in sorted(needed.keys() - there):
        found.report(name, f"it is missing; {needed[name]}", remedy="none")
    shapes = {name: metadata["shape"] for name, metadata in found.arrays.items()}
    for name, dim, length, other in contradicting_lengths(shapes):
        found.report(name, f"has {length} along {dim}, others have {other}", remedy="none")
    block = found.attributes.get("block_rows")
    for name in filter(is_series, found.arrays):
        stored = found.stored(name)
        if block is not None and stored.shard[0] != block:
            found.report(name, f"has blocks of {stored.shard[0]} rows, block_rows is {block}")


def _check_extent(found: CheckedMetadata) -> None:
    """Refuse metadata with far more shards than files: a check would search for each.

    Places without a listing are not checked.

    Raises
    ------
    FormatError
        If they do.
    """
    if found.objects is None:
        return
    files = Counter(key.partition("/")[0] for key in found.objects)
    most = _MOST_MISSING + max(files.values(), default=0)
    for name in filter(is_series, found.arrays):
        stored = found.stored(name)
        shards = -(-found.rows // stored.shard[0]) * stored.parts
        if shards > most:
            raise FormatError(
                f"{found.path} announces {shards:,} shards of {name}, and there "
                f"are {files[name]:,} files of it; they are not those of this run"
            )


def is_outdated(metadata: CheckedMetadata) -> bool:
    """True if the stored root changed since the check: fewer rows, another status or run."""
    root = read_metadata(metadata.path / METADATA_KEY, None)
    if isinstance(root, Problem) or not isinstance(root.get("attributes"), dict):
        return False
    now, then = root["attributes"], metadata.attributes
    rows, before = now.get("committed_rows"), then.get("committed_rows")
    if any(now.get(key) != then.get(key) for key in ("created", "status")):
        return True
    return is_length(rows) and is_length(before) and rows < before
