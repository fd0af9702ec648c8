"""What the documents of a run say, read strictly and held against each other.

Each fact about an array is written down twice: in its own `zarr.json` and in the root's
consolidated metadata; the fixed attributes of the root have their copy in `step`. So a flipped bit
in a document is seen, and mostly also which of the two is right.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from trajstore.documents import (
    Document,
    Problem,
    differences,
    entry_of,
    faults,
    is_canonical,
    is_length,
    is_moment,
    is_series,
    open_document,
    parse,
    read_document,
    same,
    with_rows,
)
from trajstore.encoding import ENCODINGS
from trajstore.errors import FormatError, InvalidArgument, RunNotFound
from trajstore.metadata import CHANGING, COPY, DOCUMENT, Status
from trajstore.schema import COORDINATES, FORMAT, STEP, VARIABLES, Coordinate
from trajstore.stored import StoredArray, stored_array

__all__ = ["REQUIRED", "STATUSES", "Inspection", "inspect"]

REQUIRED = (
    "trajstore_format",
    "trajstore_version",
    "status",
    "committed_rows",
    "created",
    "updated",
    "timeline",
    "encoding",
    "block_rows",
    "config",
)
"""Attributes that every root has."""

STATUSES: tuple[Status, ...] = get_args(Status)

_ROOT_KEYS = {"zarr_format", "node_type", "attributes", "consolidated_metadata"}


@dataclass(kw_only=True)
class Inspection:
    """The documents of a run.

    Attributes
    ----------
    path : Path
    root : dict or None
        Document of the root as it is on disk; None if it cannot be read.
    own : dict
        Document in each array's folder; None where it cannot be read.
    attributes : dict
        Of the root; empty if it cannot be read.
    copy : dict or None
        The root's fixed attributes as `step` has them.
    rows : int
        Committed rows.
    arrays : dict
        The better document of each array; the growing ones with so many rows.
    problems : list of Problem
    notes : list of str
        What is not damage, and still worth knowing.
    refused : bool
        Whether the system did not let a document be read, which may be sound.
    """

    path: Path
    root: Document | None = None
    own: dict[str, Document | None] = field(default_factory=dict)
    attributes: Document = field(default_factory=dict)
    copy: Document | None = None
    rows: int = 0
    arrays: dict[str, Document] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refused: bool = False

    def stored(self, name: str) -> StoredArray | None:
        """Fast reader of an array; None where only zarr can read it."""
        return stored_array(self.path, name, open_document(self.arrays[name]))

    def consolidated(self) -> dict[str, Any] | None:
        """Documents of the arrays in the root; None where they are lost."""
        block = (self.root or {}).get("consolidated_metadata")
        entries = block.get("metadata") if isinstance(block, dict) else None
        return entries if isinstance(entries, dict) else None

    def report(
        self,
        array: str | None,
        message: str,
        path: Path | None = None,
        remedy: Literal["rewrite", "none"] = "rewrite",
    ) -> None:
        """Add a problem of a document: by default that of the array, or of the root."""
        path = path or self.path / (array or "") / DOCUMENT
        self.problems.append(Problem(array=array, path=path, message=message, remedy=remedy))


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Read the documents of a run.

    Parameters
    ----------
    path : path-like
        A local run.

    Raises
    ------
    RunNotFound
        If there is nothing at `path`.
    FormatError
        If it is not a run, or one of a newer format.
    InvalidArgument
        If it is an address.
    """
    text = os.fspath(path)
    if "://" in text:
        raise InvalidArgument(f"cannot check {text}: copy the run to a local folder first")
    found = Inspection(path=Path(text).absolute())
    if not found.path.exists():
        raise RunNotFound(f"there is no run at {text}")
    if not found.path.is_dir():
        raise FormatError(f"{text} is a file; a run is a folder")
    folders = _array_folders(found.path)
    if not folders and not os.path.lexists(found.path / DOCUMENT):
        raise FormatError(f"{text} is not a run: it has no {DOCUMENT}, and no array in it has one")
    found.root = _read(found, None)
    for name in folders:
        found.own[name] = _read(found, name)
    if found.root is not None:
        _check_root(found)
    _choose_documents(found)
    _check_rows(found)
    _check_lengths(found)
    _check_attributes(found)
    if not found.arrays and found.root is not None and "trajstore_format" not in found.attributes:
        raise FormatError(f"{text} is a Zarr group, but no run: it has no trajstore_format")
    return found


def _array_folders(path: Path) -> list[str]:
    """Folders that hold an array, or have the name of one."""
    known = {STEP.name, *VARIABLES, *COORDINATES}
    with os.scandir(path) as entries:
        names = [entry.name for entry in entries if entry.is_dir()]
    return sorted(name for name in names if name in known or os.path.exists(path / name / DOCUMENT))


def _read(found: Inspection, array: str | None) -> Document | None:
    document = read_document(found.path / (array or "") / DOCUMENT, array)
    if isinstance(document, Problem):
        found.problems.append(document)
        found.refused |= document.remedy == "none"
        return None
    return document


def _check_root(found: Inspection) -> None:
    root = found.root or {}
    for key in sorted(_ROOT_KEYS - root.keys() - {"consolidated_metadata"}):
        found.report(None, f"the root's document has no {key}")
    for key in sorted(root.keys() - _ROOT_KEYS):
        found.report(None, f"the root's document has an unknown entry {key!r}")
    if root.get("zarr_format") != 3 or root.get("node_type") != "group":
        found.report(None, "the root's document is not that of a Zarr v3 group")
    if found.consolidated() is None:
        found.report(
            None,
            "the root has lost its consolidated metadata, by which readers know how many rows are "
            "committed; setting an attribute with zarr does that",
        )
    else:
        block = root["consolidated_metadata"]
        if block.keys() != {"kind", "must_understand", "metadata"} or (
            block["kind"] != "inline" or block["must_understand"] is not False
        ):
            found.report(None, "the root's consolidated metadata are not marked as such")
    attributes = root.get("attributes")
    if isinstance(attributes, dict):
        found.attributes = attributes


def _choose_documents(found: Inspection) -> None:
    """Compare each array's two documents, and take the better."""
    consolidated = found.consolidated()
    copies = consolidated or {}
    whole = [item for item in (*found.own.values(), *copies.values()) if isinstance(item, dict)]
    lengths = _lengths(whole)
    # Writers keep an order of their own: the root's, where it is there.
    for name in dict.fromkeys([*copies, *found.own]):
        own, copy = found.own.get(name), copies.get(name)
        if copy is None and consolidated is not None:
            if name not in COORDINATES and not is_series(name):
                found.notes.append(f"{name} is an array that is not part of the run")
                continue
            if own is not None:
                found.report(name, "the root's metadata do not have it", found.path / DOCUMENT)
        if name not in found.own:
            found.own[name] = None
            found.report(name, "its folder is missing")
        sound: list[Document] = []
        for document, path in (
            (copy, found.path / DOCUMENT),
            (own, found.path / name / DOCUMENT),
        ):
            if document is None:
                continue
            wrong = faults(name, document)
            for fault in wrong:
                found.report(name, fault, path)
            if not wrong:
                sound.append(document)
        if len(sound) == 2:
            found.arrays[name] = _better(found, name, sound[0], sound[1], lengths)
        elif sound:
            found.arrays[name] = sound[0]


def _better(
    found: Inspection, name: str, copy: Document, own: Document, lengths: dict[str, int]
) -> Document:
    """The better of an array's two documents; report where they differ."""
    if is_series(name):
        rows, copied = own["shape"][0], copy["shape"][0]
        if rows > copied:
            found.notes.append(
                f"{name} is {rows - copied} rows ahead of the root, as a writer leaves it that "
                "ends, or is, in the middle of a commit"
            )
        elif rows < copied:
            found.report(name, f"has {rows} rows in its own document, {copied} in the root's")
        own = with_rows(name, own, copied)
    differing = differences(own, copy)
    if not differing:
        return copy
    chosen = min(copy, own, key=lambda document: _rank(found, name, document, lengths))
    found.report(
        name,
        f"its own document and its copy in the root differ in {', '.join(differing)}",
        found.path / (name if chosen is copy else "") / DOCUMENT,
    )
    return chosen


def _rank(
    found: Inspection, name: str, document: Document, lengths: dict[str, int]
) -> tuple[int, int]:
    """What speaks against a document whose twin says something else; the less, the better."""
    entry = entry_of(name)
    assert entry is not None  # or it had a fault
    pairs = zip(entry.dims, document["shape"], strict=True)
    odd = sum(dim in lengths and length != lengths[dim] for dim, length in pairs)
    attributes = document["attributes"]
    if isinstance(entry, Coordinate):
        known, fill = entry.attributes, entry.fill_value
    else:
        known = {"long_name": entry.long_name, "units": entry.units}
        fill = -1 if name == STEP.name else "NaN"
    odd += sum(attributes.get(key) != value for key, value in known.items())
    odd += not same(document["fill_value"], fill)
    odd += not is_canonical(document)
    named = attributes.get("coordinates", "")
    odd += not (isinstance(named, str) and COORDINATES.keys() >= set(named.split()))
    if name == STEP.name and COPY in attributes:
        odd += not same(_parsed(attributes[COPY]), _fixed(found.attributes))
    unreadable = 0
    if is_series(name):
        stored = stored_array(found.path, name, open_document(document))
        odd += stored is None
        if stored is not None and document["shape"][0]:
            try:
                stored[:1]
            except Exception:  # whatever sizes that nobody wrote lead to
                unreadable = 1
    return unreadable, odd


def _lengths(documents: Iterable[Document]) -> dict[str, int]:
    """Length of token and hidden that most documents agree on."""
    seen: dict[str, Counter[int]] = {"token": Counter(), "hidden": Counter()}
    for document in documents:  # which may say anything
        dims, shape = document.get("dimension_names"), document.get("shape")
        if isinstance(dims, list) and isinstance(shape, list) and len(dims) == len(shape):
            for dim, length in zip(dims, shape, strict=True):
                if isinstance(dim, str) and dim in seen and is_length(length):
                    seen[dim][length] += 1
    return {dim: counts.most_common(1)[0][0] for dim, counts in seen.items() if counts}


def _check_rows(found: Inspection) -> None:
    """Settle how many rows are committed, and report who says otherwise."""
    series = [name for name in found.arrays if is_series(name)]
    committed = found.attributes.get("committed_rows")
    if not is_length(committed):
        if found.attributes:
            found.report(None, f"committed_rows is {committed!r}, expected a number of rows")
        committed = None
    copies = found.consolidated() or {}
    said = {name: copies[name]["shape"][0] for name in series if _has_shape(copies.get(name))}
    votes = Counter(said.values())
    if committed is not None:
        votes[committed] += 1
    if votes:
        best = max(votes.values())
        found.rows = min(rows for rows, count in votes.items() if count == best)
    elif series:
        # Without a root: the shards of a block are written before any document grows.
        found.rows = min(found.arrays[name]["shape"][0] for name in series)
    if committed is not None and committed != found.rows:
        found.report(None, f"committed_rows is {committed}, the arrays have {found.rows} rows")
    for name, rows in said.items():
        if rows != found.rows:
            found.report(
                name,
                f"has {rows} rows in the root's document, others have {found.rows}",
                found.path / DOCUMENT,
            )
    for name in series:
        own = found.own.get(name)
        if name not in said and _has_shape(own) and own["shape"][0] < found.rows:  # type: ignore[index]
            found.report(name, f"has {own['shape'][0]} rows of {found.rows}")  # type: ignore[index]
        found.arrays[name] = with_rows(name, found.arrays[name], found.rows)


def _has_shape(document: Any) -> bool:
    shape = document.get("shape") if isinstance(document, dict) else None
    return isinstance(shape, list) and bool(shape) and is_length(shape[0])


def _check_lengths(found: Inspection) -> None:
    """Check that the arrays agree with each other, and that those are there that must be."""
    for name in (STEP.name, "token"):
        if name not in found.arrays and name not in found.own:
            found.report(name, "it is missing, and every run has it", remedy="none")
    if not any(name in found.arrays or name in found.own for name in ("W", "delta")):
        found.report(
            "W", "it is missing, and every run holds W, or its changes as delta", remedy="none"
        )
    lengths = _lengths(found.arrays.values())
    for name, document in found.arrays.items():
        for dim, length in zip(document["dimension_names"], document["shape"], strict=True):
            if dim in lengths and length != lengths[dim]:
                message = f"has {length} along {dim}, others have {lengths[dim]}"
                found.report(name, message, remedy="none")
    block = found.attributes.get("block_rows")
    for name in filter(is_series, found.arrays):
        stored = found.stored(name)
        if stored is not None and block is not None and stored.shard[0] != block:
            found.report(name, f"has blocks of {stored.shard[0]} rows, block_rows is {block}")


def _parsed(text: Any) -> Document | None:
    """Attributes that a text holds; None if it holds none."""
    try:
        value = parse(text)
    except (TypeError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _fixed(attributes: Document) -> Document:
    return {key: value for key, value in attributes.items() if key not in CHANGING}


def _check_attributes(found: Inspection) -> None:
    step = found.arrays.get(STEP.name)
    text = None if step is None else step["attributes"].get(COPY)
    if text is not None:
        found.copy = _parsed(text)
        if found.copy is None:
            found.report(STEP.name, f"its attribute {COPY} is no JSON object")
    elif step is not None:
        found.notes.append(
            "there is no copy of the root's attributes in step, as older versions left it out; "
            "whether one has changed since cannot be told"
        )
    if found.root is None:
        return
    attributes = found.attributes
    if found.copy is not None:
        fixed = _fixed(attributes)
        for key in sorted(fixed.keys() | found.copy.keys()):
            if key not in fixed or key not in found.copy:
                where = "the root" if key not in fixed else f"its copy in {STEP.name}"
                found.report(None, f"the attribute {key} is missing in {where}")
            elif not same(fixed[key], found.copy[key]):
                found.report(
                    None,
                    f"the attribute {key} is not as in its copy in {STEP.name}: "
                    f"{', '.join(differences(fixed[key], found.copy[key], key))}",
                )
    for key in REQUIRED:
        if key not in attributes and not (found.copy and key in found.copy):
            found.report(None, f"the attribute {key} is missing")
    number = attributes.get("trajstore_format")
    copied = (found.copy or {}).get("trajstore_format", number)
    if type(number) is int and number > FORMAT and copied == number:
        raise FormatError(
            f"{found.path} is of store format {number}, this version checks up to {FORMAT}; "
            f"install trajstore {attributes.get('trajstore_version')} or newer"
        )
    if number is not None and (type(number) is not int or not 1 <= number <= FORMAT):
        found.report(None, f"trajstore_format is {number!r}, expected 1 to {FORMAT}")
    expected: dict[str, tuple[bool, str]] = {
        "status": (attributes.get("status") in STATUSES, f"one of {', '.join(STATUSES)}"),
        "created": (is_moment(attributes.get("created")), "a time, ISO 8601"),
        "updated": (is_moment(attributes.get("updated")), "a time, ISO 8601"),
        "timeline": (attributes.get("timeline") == "post-step", "post-step"),
        "encoding": (attributes.get("encoding") in ENCODINGS, f"one of {', '.join(ENCODINGS)}"),
        "config": (isinstance(attributes.get("config"), dict), "a JSON object"),
    }
    for key, (fits, what) in expected.items():
        if key in attributes and not fits:
            found.report(None, f"the attribute {key} is {attributes[key]!r}, expected {what}")
