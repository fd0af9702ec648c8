"""Metadata of a run, read strictly, and its two copies compared with each other.

The root holds its attributes and a copy of every array's metadata. The second copy is in the
folders of the arrays: their own metadata files, and in `step` the attributes of the root. A copy is
whole if it has no fault. If both are whole and differ, the digests of the commit prove the root;
otherwise the second copy counts.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from trajstore.errors import FormatError, ObjectStoreError, RunNotFound
from trajstore.integrity.metadata_faults import (
    NO_COPY,
    ArrayFault,
    CheckedMetadata,
    Problem,
    attributes_of,
    digests_of,
    faults_in,
    listed_arrays,
    parsed_copy,
)
from trajstore.schema import (
    EXPORTED,
    KEYFRAMES,
    STEP,
    TRAJECTORIES,
    VARIABLES,
    belongs,
    variables_of,
)
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
from trajstore.store.metadata.zarr_json import fixed_attributes, is_series, rows_of, with_rows
from trajstore.store.reading.open_group import similar_runs
from trajstore.store.reading.run_info import object_sizes
from trajstore.store.storage.atomic import metadata_in
from trajstore.store.storage.remote_path import METADATA_KEY, Location, RunPath, location
from trajstore.strict_json import MISSING, JsonObject, changes, parse, utc_now

_MOST_MISSING = 1 << 16

_REQUIRED = [name for name in REQUIRED if name not in (CONTENT, FINGERPRINT)]
"""Attributes of the second copy: a repair can compute the digests again."""


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
    metadata = CheckedMetadata(path=place)
    folders = _array_folders(metadata, text)
    metadata.root = _read(metadata, None)
    if metadata.root is None and folders is None:
        raise RunNotFound(
            f"there is no run at {text}, or its root is broken: {metadata.problems[0].message}"
        )
    if folders is None:  # places without a listing
        folders = [name for name in listed_arrays(metadata.root) if name and "/" not in name]
    known = variables_of(attributes_of(metadata.root))
    for name in sorted(folders):
        listed = metadata.objects is None or f"{name}/{METADATA_KEY}" in metadata.objects
        if listed or belongs(name, known):
            metadata.documents[name] = _read(metadata, name)
    _check_kind(metadata, text)
    _choose(metadata)
    if metadata.whole is not None:
        _compare(metadata)
        _check_extent(metadata)
    return metadata


def _check_kind(metadata: CheckedMetadata, text: str) -> None:
    """Refuse other groups, and runs of other formats. Other programs use the names step and W, too.

    An exported Zarr has arrays of a run in other codecs, and an attribute of the exporter. A result
    of an analysis has the run's coordinates and `step`, but no recorded parameter.

    Raises
    ------
    FormatError
    """
    attributes = attributes_of(metadata.root)
    number = attributes.get("trajstore_format", MISSING)
    if number is MISSING:
        arrays = {**listed_arrays(metadata.root), **metadata.documents}
        texts = [json.dumps(arrays[name]) for name in TRAJECTORIES if name in arrays]
        if EXPORTED in attributes or not any("trajstore." in text for text in texts):
            raise FormatError(_no_run(metadata, text))
    copy = parsed_copy(metadata.documents.get(STEP.name)) or {}
    agrees = copy.get("trajstore_format", number) == number  # otherwise it is damaged
    if agrees and (error := other_format(metadata.path, attributes)):
        raise error


def _no_run(metadata: CheckedMetadata, text: str) -> str:
    what = "is not a run" if metadata.root is None else "is a Zarr group, but not a run"
    groups = {name: attributes_of(group) for name, group in metadata.documents.items()}
    if inside := [name for name in groups if "trajstore_format" in groups[name]]:
        return f"{text} {what}, but contains runs: name one of {', '.join(inside[:9])}"
    return f"{text} {what}: it has no trajstore_format"


def _array_folders(metadata: CheckedMetadata, text: str) -> list[str] | None:
    """Folders with an array, or with the name of one; None for a web server. List all objects.

    Raises
    ------
    RunNotFound, FormatError
        If there is nothing, or no array and no metadata file.
    """
    path = metadata.path
    if isinstance(path, Path):
        if not path.exists():
            raise RunNotFound(f"there is no run at {text}{similar_runs(path)}")
        if not path.is_dir():
            raise FormatError(f"{text} is a file; a run is a folder: unpack a zip file first")
        objects = _files(path, metadata.notes)
    elif path.listed:
        objects = object_sizes(path)
        if not objects:
            raise RunNotFound(f"there is no run at {text}")
    else:
        metadata.notes.append(
            "a web server lists no files, so leftovers and checkpoints were not checked"
        )
        return None
    metadata.objects = objects
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


def _read(metadata: CheckedMetadata, array: str | None) -> JsonObject | None:
    document = read_metadata(metadata.path / (array or "") / METADATA_KEY, array)
    if isinstance(document, Problem):
        metadata.problems.append(document)
        metadata.refused |= document.remedy == "none"
        return None
    return document


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


def _choose(metadata: CheckedMetadata) -> None:
    """Choose the copy of the metadata that is right, and report the faults of the other.

    If both are whole and differ, the digests of the commit prove the root, else it is the copy in
    the folders.
    """
    root, second = metadata.root, _second_copy(metadata)
    faults = [] if root is None else faults_in(root, metadata.documents)
    of_second = (
        faults_in(second, metadata.documents, _REQUIRED) if second else [(STEP.name, NO_COPY)]
    )
    whole = None if faults else root
    if second is not None and not of_second:
        differing = _differences(whole, second) if whole else []
        if whole is None or (differing and not _is_proved(metadata, whole)):
            whole, faults = second, faults or differing
    if whole is not None:
        metadata.choose(whole)
    for name, fault in faults:
        metadata.report(name, fault, metadata.path / METADATA_KEY)
    if whole is None and not metadata.refused:
        for name, fault in of_second:
            if name is not None and metadata.documents.get(name) is not None:
                metadata.report(name, fault)
        metadata.problems = [replace(problem, remedy="none") for problem in metadata.problems]
        message = (
            "neither the root nor the second copy of the metadata, in the folders of the arrays, "
            "is whole, so no values were checked; restore the run from a backup"
        )
        metadata.report(None, message, remedy="none")


def _second_copy(metadata: CheckedMetadata) -> JsonObject | None:
    """Root made of the metadata in the arrays' folders; None without the attributes in `step`.

    The status, notes and digests are those of the root, and so are attributes that a user added
    with zarr. If others are missing there, they may be renamed, which is damage.
    """
    stored = parsed_copy(metadata.documents.get(STEP.name))
    if stored is None:
        return None
    before, listed = attributes_of(metadata.root), listed_arrays(metadata.root)
    known = stored | (parsed_copy(listed.get(STEP.name)) or {})
    copy = stored | {
        key: value
        for key, value in fixed_attributes(before).items()
        if key not in known and is_possible(key, MISSING) and before.keys() >= {*known, *REQUIRED}
    }
    variables = variables_of(copy)
    arrays: dict[str, Any] = {
        name: own
        for name in (*metadata.documents, *listed)
        if (own := metadata.documents.get(name)) is not None or belongs(name, variables)
        if name in listed or belongs(name, variables)
    }
    step = arrays[STEP.name]
    arrays[STEP.name] = step | {"attributes": step["attributes"] | {COPY: json.dumps(copy)}}
    series = [name for name in arrays if belongs(name, variables) and is_series(name)]
    lengths = [rows_of(arrays[name]) for name in series]
    committed = before.get("committed_rows")
    if is_length(committed) and (not listed or rows_of(listed.get(STEP.name)) == committed):
        lengths.append(committed)  # the others were never committed
    rows = min((length for length in lengths if length is not None), default=0)
    arrays |= {name: with_rows(name, arrays[name], rows) for name in series}
    changing = {"status": "interrupted", "updated": utc_now()} | {
        key: before[key] for key in CHANGING if key in before and is_possible(key, before[key])
    }
    if CONTENT in changing and copy != stored:
        content = bytes.fromhex(changing[CONTENT])
        if changing.get(FINGERPRINT) == fingerprint_of(stored, content):  # else it stays wrong
            changing[FINGERPRINT] = fingerprint_of(copy, content)
    return root_of(copy | changing | {"committed_rows": rows}, arrays)


def _differences(root: JsonObject, second: JsonObject) -> list[ArrayFault]:
    """Differences of a whole root from the second copy."""
    variables = variables_of(attributes_of(second))
    arrays, own = listed_arrays(root), listed_arrays(second)
    return [
        (name, f"its copy in the root differs from its own metadata file in {_named(members)}")
        for name in {**arrays, **own}
        if belongs(name, variables)
        if (members := changes(arrays.get(name), own.get(name)))
    ]


def _named(members: list[tuple[str, Any, Any]]) -> str:
    return ", ".join(member or "all members" for member, *_ in members)


def _is_proved(metadata: CheckedMetadata, root: JsonObject) -> bool:
    """True if a root without faults, and the stored blocks, have the digests of the commit.

    Also if the system refuses to read a block: then the root counts, and is not changed.
    """
    attributes = attributes_of(root)
    try:
        digests = digests_of(metadata.path, root, attributes["committed_rows"])
    except ObjectStoreError:
        raise
    except FormatError:  # a block is damaged
        return False
    except OSError:  # a later attempt may succeed
        metadata.refused = True
        return True
    return all(attributes[key] == digest for key, digest in digests.items())


def _compare(metadata: CheckedMetadata) -> None:
    """Compare the arrays' own metadata files with those of the whole root."""
    for name, document in metadata.documents.items():
        if name not in metadata.arrays and document is not None and name != KEYFRAMES:
            metadata.notes.append(f"{name} is an array that is not part of the run")
    for name, whole in metadata.arrays.items():
        document = metadata.documents.get(name)
        if name not in metadata.documents:
            metadata.report(name, "its folder is missing")
        elif document is not None:
            _compare_array(metadata, name, document, whole)
    rows = {
        rows_of(metadata.documents.get(name)) or 0 for name in metadata.arrays if is_series(name)
    }
    if metadata.attributes["status"] == "complete" and len(rows) == 1 and min(rows) > metadata.rows:
        message = (
            f"the root records a complete run of {metadata.rows} rows, but the metadata of all "
            f"arrays {rows.pop()} rows; an older root was restored"
        )
        metadata.report(None, message)


def _compare_array(
    metadata: CheckedMetadata, name: str, document: JsonObject, whole: JsonObject
) -> None:
    rows = rows_of(document)
    if is_series(name) and rows is not None and rows >= metadata.rows:
        document = with_rows(name, document, metadata.rows)
        if rows > metadata.rows:
            metadata.notes.append(
                f"{name} is {rows - metadata.rows} rows ahead of the root; a writer is in a "
                "commit, or died in one"
            )
    differing = changes(document, whole)
    is_recorded = metadata.attributes["status"] == "recording" and parsed_copy(document) is not None
    if is_recorded and [member for member, *_ in differing] == [f"attributes.{COPY}"]:
        metadata.notes.append(
            "the attributes of the root are being changed; a writer is in a resume, or died in one"
        )
    elif differing:
        metadata.report(name, f"its own metadata file differs from the root in {_named(differing)}")


def _check_extent(metadata: CheckedMetadata) -> None:
    """Refuse metadata with far more shards than files: a check would search for each.

    Places without a listing are not checked.

    Raises
    ------
    FormatError
        If they do.
    """
    if metadata.objects is None:
        return
    for name in filter(is_series, metadata.arrays):
        stored = metadata.stored(name)
        shards = -(-metadata.rows // stored.shard[0]) * stored.parts
        if shards > _MOST_MISSING + len(metadata.objects):
            raise FormatError(
                f"{metadata.path} announces {shards:,} shards of {name}, and there are "
                f"{len(metadata.objects):,} files; they are not those of this run"
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
