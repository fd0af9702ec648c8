"""Metadata of a run, read strictly and compared with each other.

All metadata of a run exist twice. The root holds its attributes and a copy of every array's
metadata. The second copy is in the folders of the arrays: their own metadata files, and in `step`
the attributes of the root. A copy is whole if it has no fault. The root decides if both are whole
and differ, unless the digests of the commit prove the second copy.
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
from trajstore.integrity.metadata_faults import (
    NO_COPY,
    CheckedMetadata,
    Found,
    Problem,
    attributes_of,
    digests_of,
    faults_in,
    listed_arrays,
    parsed_copy,
)
from trajstore.schema import EXPORTED, STEP, TRAJECTORIES, VARIABLES, belongs, variables_of
from trajstore.store.metadata.metadata_form import (
    CHANGING,
    CONTENT,
    COPY,
    FINGERPRINT,
    REQUIRED,
    fingerprint_of,
    is_length,
    is_possible,
    other_format,
    root_of,
)
from trajstore.store.metadata.zarr_json import fixed_attributes, is_series, with_rows
from trajstore.store.reading.open_group import similar_runs
from trajstore.store.reading.run_info import object_sizes
from trajstore.store.storage.atomic import metadata_in
from trajstore.store.storage.remote_path import METADATA_KEY, Location, RunPath, location
from trajstore.strict_json import MISSING, JsonObject, changes, parse, utc_now

_MOST_MISSING = 1 << 16

_REQUIRED = [name for name in REQUIRED if name not in (CONTENT, FINGERPRINT)]
"""Attributes of the second copy: a repair can compute the digests again."""

_WITHOUT_FORM = ("timeline", "optimizer", "provenance")
"""Attributes of the format that may have any value."""


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
    if found.root is None and folders is None:
        raise RunNotFound(
            f"there is no run at {text}, or its root is broken: {found.problems[0].message}"
        )
    if folders is None:  # places without a listing
        folders = [name for name in listed_arrays(found.root) if name and "/" not in name]
    known = variables_of(attributes_of(found.root))
    for name in sorted(folders):
        listed = found.objects is None or f"{name}/{METADATA_KEY}" in found.objects
        if listed or belongs(name, known):
            found.own[name] = _read(found, name)
    _check_kind(found, text)
    _choose(found)
    if found.whole is not None:
        _compare(found)
        _check_extent(found)
    return found


def _check_kind(found: CheckedMetadata, text: str) -> None:
    """Refuse other groups, and runs of other formats. Other programs use the names step and W, too.

    An exported Zarr has arrays of a run in other codecs, and an attribute of the exporter. A result
    of an analysis has the run's coordinates and `step`, but no recorded parameter.

    Raises
    ------
    FormatError
    """
    attributes = attributes_of(found.root)
    if "trajstore_format" not in attributes:
        arrays = {**listed_arrays(found.root), **found.own}
        texts = [json.dumps(arrays[name]) for name in TRAJECTORIES if name in arrays]
        if EXPORTED in attributes or not any("trajstore." in text for text in texts):
            raise FormatError(_no_run(found, text))
    number = attributes.get("trajstore_format")
    copy = parsed_copy(found.own.get(STEP.name)) or {}
    agrees = copy.get("trajstore_format", number) == number  # otherwise it is damaged
    if agrees and (error := other_format(found.path, attributes)):
        raise error


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


def _choose(found: CheckedMetadata) -> None:
    """Choose the copy of the metadata that is whole, and report the faults of the other."""
    known = {name for name, own in found.own.items() if own is not None}
    faults: list[Found] = [] if found.root is None else faults_in(found.root, known)
    second = _second_copy(found)
    of_second = [(STEP.name, NO_COPY)] if second is None else faults_in(second, known, _REQUIRED)
    if found.root is not None and not faults:
        found.choose(found.root)
        if second is not None and not of_second:
            faults = _disproved(found, second)
    if second is not None and not of_second and (faults or found.root is None):
        found.choose(second)
    for name, fault in faults:
        found.report(name, fault, found.path / METADATA_KEY)
    if found.whole is None and not found.refused:
        for name, fault in of_second:
            if name in known:
                found.report(name, fault)
        found.problems = [replace(problem, remedy="none") for problem in found.problems]
        message = (
            "neither the root nor the second copy of the metadata, in the folders of the arrays, "
            "is whole, so no values were checked; restore the run from a backup"
        )
        found.report(None, message, remedy="none")


def _second_copy(found: CheckedMetadata) -> JsonObject | None:
    """Root made of the metadata in the arrays' folders; None without the attributes in `step`."""
    copy = parsed_copy(found.own.get(STEP.name))
    if copy is None:
        return None
    listed, before = listed_arrays(found.root), attributes_of(found.root)
    lost = bool(before) and (found.root or {}).get("consolidated_metadata") is None
    stored = copy
    if lost:  # zarr drops the consolidated metadata when a user sets an attribute: intended
        copy = fixed_attributes(before)
    else:
        copy = stored | _of_user(before, stored | (parsed_copy(listed.get(STEP.name)) or {}))
    held = variables_of(copy)
    arrays: dict[str, Any] = {
        name: found.own.get(name)
        for name in (*found.own, *listed)
        if belongs(name, held) or (name in listed and found.own.get(name) is not None)
    }
    step = arrays[STEP.name]
    arrays[STEP.name] = step | {"attributes": step["attributes"] | {COPY: json.dumps(copy)}}
    series = [name for name in arrays if belongs(name, held) and is_series(name)]
    rows = min((n for name in series if (n := _rows(arrays[name])) is not None), default=0)
    committed: Any = before.get("committed_rows")
    if is_length(committed) and (lost or _rows(listed.get(STEP.name)) == committed):
        rows = min(rows, committed)  # the others were never committed
    for name in series:
        if _rows(arrays[name]) is not None:
            arrays[name] = with_rows(name, arrays[name], rows)
    changing = {"status": "interrupted", "updated": utc_now()} | {
        key: before[key] for key in CHANGING if key in before and is_possible(key, before[key])
    }
    if CONTENT in changing and copy != stored:
        content = bytes.fromhex(changing[CONTENT])
        if changing.get(FINGERPRINT) == fingerprint_of(stored, content):  # else it stays wrong
            changing[FINGERPRINT] = fingerprint_of(copy, content)
    return root_of(copy | changing | {"committed_rows": rows}, arrays)


def _of_user(attributes: JsonObject, known: JsonObject) -> JsonObject:
    """Attributes that a user added to the root with zarr.

    None if another one is missing: it may be renamed, which is damage.
    """
    if not attributes.keys() >= {*known, *REQUIRED}:
        return {}
    return {
        key: value
        for key, value in fixed_attributes(attributes).items()
        if key not in known and key not in _WITHOUT_FORM and is_possible(key, MISSING)
    }


def _rows(metadata: Any) -> int | None:
    """Rows of an array, of metadata that may be damaged."""
    shape = metadata.get("shape") if isinstance(metadata, dict) else None
    return shape[0] if isinstance(shape, list) and shape and is_length(shape[0]) else None


def _disproved(found: CheckedMetadata, second: JsonObject) -> list[Found]:
    """Differences from the second copy, if the digests of the commit prove it, and not the root."""
    held, listed = variables_of(attributes_of(second)), listed_arrays(second)
    names = [name for name in {**found.arrays, **listed} if belongs(name, held)]
    differing = {name: changes(found.arrays.get(name), listed.get(name)) for name in names}
    text = "its copy in the root differs from its own metadata file in "
    faults: list[Found] = [
        (name, text + ", ".join(member or "all members" for member, *_ in members))
        for name, members in differing.items()
        if members
    ]
    is_candidate = faults and attributes_of(second)["committed_rows"] == found.rows
    if is_candidate and not _is_proved(found, found.whole) and _is_proved(found, second):
        return faults
    return []


def _is_proved(found: CheckedMetadata, root: JsonObject | None) -> bool:
    """True if a root without faults, and the stored blocks, have the digests of the commit."""
    try:
        digests = digests_of(found.path, root or {}, found.rows)
    except ObjectStoreError:
        raise
    except (FormatError, OSError):  # a block or a coordinate is damaged
        return False
    return all(found.attributes[key] == digest for key, digest in digests.items())


def _compare(found: CheckedMetadata) -> None:
    """Compare the arrays' own metadata files with those of the whole root."""
    held = variables_of(found.attributes)
    for name in [name for name in found.own if name not in found.arrays]:
        if found.own[name] is None:  # reported already
            continue
        if belongs(name, held):
            found.report(name, "the root does not list it", found.path / METADATA_KEY, "none")
        else:
            found.notes.append(f"{name} is an array that is not part of the run")
    for name, whole in found.arrays.items():
        own = found.own.get(name)
        if name not in found.own:
            found.report(name, "its folder is missing")
        elif own is not None:
            _compare_array(found, name, own, whole)
    rows = {_rows(found.own.get(name)) or 0 for name in found.arrays if is_series(name)}
    if found.attributes["status"] == "complete" and len(rows) == 1 and min(rows) > found.rows:
        message = (
            f"the root records a complete run of {found.rows} rows, but the metadata of all "
            f"arrays {rows.pop()} rows; an older root was restored"
        )
        found.report(None, message)


def _compare_array(found: CheckedMetadata, name: str, own: JsonObject, whole: JsonObject) -> None:
    rows = _rows(own)
    if is_series(name) and rows is not None and rows >= found.rows:
        own = with_rows(name, own, found.rows)
        if rows > found.rows:
            found.notes.append(
                f"{name} is {rows - found.rows} rows ahead of the root; a writer is in a commit, "
                "or died in one"
            )
    differing = [member for member, *_ in changes(own, whole)]
    if differing == [f"attributes.{COPY}"] and _is_replaced(found, own):
        found.notes.append(
            "the attributes of the root are being changed; a writer is in a resume, or died in one"
        )
    elif differing:
        message = f"its own metadata file differs from the root in {', '.join(differing)}"
        found.report(name, message)


def _is_replaced(found: CheckedMetadata, step: JsonObject) -> bool:
    """True if `step` only holds the attributes that the root had before a resume.

    A resume replaces the root before the metadata file of `step`. The fingerprint covers the
    attributes, so it shows that those of the root are the present ones.
    """
    attributes = found.attributes
    digest = fingerprint_of(attributes, bytes.fromhex(attributes[CONTENT]))
    recording = attributes["status"] == "recording"
    return recording and digest == attributes[FINGERPRINT] and parsed_copy(step) is not None


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
    if isinstance(root, Problem) or metadata.root is None:
        return False
    now, then = attributes_of(root), attributes_of(metadata.root)
    rows: Any = now.get("committed_rows")
    before: Any = then.get("committed_rows")
    if any(now.get(key) != then.get(key) for key in ("created", "status")):
        return True
    return is_length(rows) and is_length(before) and rows < before
