"""What the documents of a run say, read strictly and held against each other.

Each fact about an array is written down twice: in its own `zarr.json` and in the root's
consolidated metadata; the fixed attributes of the root have their copy in `step`. So a flipped bit
in a document is seen, and mostly also which of the two is right.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

import zarr
from zarr.core.buffer.cpu import Buffer
from zarr.storage import MemoryStore

from trajstore.bits import NATIVE_TYPES, STEP_TYPE
from trajstore.encoding import ENCODINGS
from trajstore.errors import FormatError, InvalidArgument, RunNotFound
from trajstore.metadata import CHANGING, COPY, DOCUMENT, Status
from trajstore.schema import COORDINATES, FORMAT, STEP, VARIABLES
from trajstore.stored import StoredArray, stored_array

__all__ = [
    "REQUIRED",
    "STATUSES",
    "Inspection",
    "Problem",
    "block_rows",
    "inspect",
    "is_moment",
    "is_series",
    "open_document",
    "same",
    "with_rows",
]

Document = dict[str, Any]

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

_ARRAY_KEYS = {
    "zarr_format",
    "node_type",
    "shape",
    "data_type",
    "chunk_grid",
    "chunk_key_encoding",
    "fill_value",
    "codecs",
    "attributes",
    "dimension_names",
}
_ROOT_KEYS = {"zarr_format", "node_type", "attributes", "consolidated_metadata"}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that is wrong with a run.

    Attributes
    ----------
    array : str or None
        None for what concerns the run as a whole.
    block : int or None
        Of the array, where it lies in one.
    first_byte, stop_byte : int or None
        What is broken in the file, from the first byte up to, not including, the last.
    path : Path
        The file.
    message : str
        One sentence.
    remedy : {'rewrite', 'cut', 'remove', 'none'}
        What a repair can do: write the document anew from what else is known, drop the rows from
        this block on, remove the file, or nothing.
    """

    array: str | None
    path: Path
    message: str
    remedy: Literal["rewrite", "cut", "remove", "none"] = "none"
    block: int | None = None
    first_byte: int | None = None
    stop_byte: int | None = None

    def __str__(self) -> str:
        where = [] if self.array is None else [self.array]
        if self.block is not None:
            where.append(f"block {self.block}")
        if self.first_byte is not None:
            where.append(f"bytes {self.first_byte} to {self.stop_byte}")
        return f"{', '.join(where) or self.path.name}: {self.message}"


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
    folders = _array_folders(found.path)
    if not folders and not (found.path / DOCUMENT).exists():
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


def open_document(
    document: Document, objects: Mapping[str, bytes] | None = None
) -> zarr.Array[Any]:
    """Array that a document describes, over the objects that are given, by key.

    Raises
    ------
    FormatError
        If zarr does not understand it.
    """
    contents = {DOCUMENT: json.dumps(document).encode(), **(objects or {})}
    store = MemoryStore({key: Buffer.from_bytes(data) for key, data in contents.items()})
    try:
        return zarr.open_array(store, mode="r", zarr_format=3)
    except Exception as error:  # whatever zarr raises for a document that nobody wrote
        raise FormatError(f"zarr cannot open it: {error}") from error


def is_series(name: str) -> bool:
    """Whether an array grows with the rows."""
    return name == STEP.name or name in VARIABLES


def block_rows(document: Document) -> int:
    """Rows that an array stores together: those of a shard, or of a chunk without shards."""
    return int(document["chunk_grid"]["configuration"]["chunk_shape"][0])


def with_rows(name: str, document: Document, rows: int) -> Document:
    """The document with another number of rows, if it has any."""
    if not is_series(name):
        return document
    return document | {"shape": [rows, *document["shape"][1:]]}


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same; 1, 1.0 and true are three values."""
    return bool(json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True))


def is_moment(text: Any) -> bool:
    """Whether it is a time as a writer writes it: ISO 8601 to the second, with its offset."""
    try:
        return bool(datetime.fromisoformat(text).isoformat(timespec="seconds") == text)
    except (TypeError, ValueError):
        return False


def _array_folders(path: Path) -> list[str]:
    """Folders that hold an array, or have the name of one."""
    known = {STEP.name, *VARIABLES, *COORDINATES}
    with os.scandir(path) as entries:
        names = [entry.name for entry in entries if entry.is_dir()]
    return sorted(name for name in names if name in known or (path / name / DOCUMENT).exists())


def _read(found: Inspection, array: str | None) -> Document | None:
    path = found.path / (array or "") / DOCUMENT
    first: int | None = None
    size = 0
    try:
        data = path.read_bytes()
        size = len(data)
        value = json.loads(data.decode(), object_pairs_hook=_distinct, parse_constant=_no_constant)
        if isinstance(value, dict):
            return value
        message = "it is no JSON object"
    except FileNotFoundError:
        message = "it is missing"
    except UnicodeDecodeError as error:
        first, message = error.start, f"it is no JSON: {error.reason} at byte {error.start}"
    except json.JSONDecodeError as error:
        first, message = error.pos, f"it is no JSON: {error}"
    except (ValueError, RecursionError) as error:
        message = f"it is no JSON: {error}"
    found.problems.append(
        Problem(
            array=array,
            path=path,
            first_byte=first,
            stop_byte=None if first is None else size,
            message=f"{DOCUMENT} cannot be read: {message}",
            remedy="rewrite",
        )
    )
    return None


def _distinct(pairs: list[tuple[str, Any]]) -> Document:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name occurs twice in it")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


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
        candidates: list[tuple[tuple[Any, ...], Document, list[str], Path]] = []
        for document, path in (
            (copy, found.path / DOCUMENT),
            (own, found.path / name / DOCUMENT),
        ):
            if document is None:
                continue
            faults = _faults(name, document)
            rank = _rank(found, name, document, faults, lengths) if copy != own else ()
            candidates.append(((len(faults), *rank), document, faults, path))
        for _, _, faults, path in candidates:
            for fault in faults:
                found.report(name, fault, path)
        sound = [item for item in candidates if not item[2]]
        if not candidates:
            continue
        _, document, _, path = min(sound or candidates, key=lambda item: item[0])
        if sound:
            found.arrays[name] = document
        if len(sound) == 2:
            _compare(found, name, sound[1][1], sound[0][1], wrong=_other(path, sound))


def _other(path: Path, candidates: Iterable[tuple[Any, Document, Any, Path]]) -> Path:
    return next(item[3] for item in candidates if item[3] != path)


def _compare(found: Inspection, name: str, own: Document, copy: Document, wrong: Path) -> None:
    """Report where the two documents of an array differ; a length that is ahead is a note."""
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
    differing = _differences(own, copy)
    if differing:
        found.report(
            name,
            f"its own document and its copy in the root differ in {', '.join(differing)}",
            wrong,
        )


def _differences(one: Any, other: Any, at: str = "") -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        return [
            line
            for key in sorted(one.keys() | other.keys())
            for line in (
                _differences(one[key], other[key], f"{at}.{key}" if at else key)
                if key in one and key in other
                else [f"{at}.{key}" if at else key]
            )
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            line
            for number, pair in enumerate(zip(one, other, strict=True))
            for line in _differences(*pair, f"{at}.{number}")
        ]
    return [] if same(one, other) else [at]


def _faults(name: str, document: Any) -> list[str]:
    """What is wrong with a document of an array by itself."""
    if not isinstance(document, dict):
        return ["its document is no JSON object"]
    faults = [f"its document has no {key}" for key in sorted(_ARRAY_KEYS - document.keys())]
    unknown = document.keys() - _ARRAY_KEYS - {"storage_transformers"}
    faults += [f"its document has an unknown entry {key!r}" for key in sorted(unknown)]
    if faults:
        return faults
    entry: Any = STEP if name == STEP.name else VARIABLES.get(name) or COORDINATES.get(name)
    if entry is None:
        return ["it is no variable or coordinate that this version knows"]
    if document["dimension_names"] != list(entry.dims):
        faults.append(f"its dimensions are not {', '.join(entry.dims)}")
    shape, attributes = document["shape"], document["attributes"]
    if (
        not isinstance(shape, list)
        or len(shape) != len(entry.dims)
        or not all(type(length) is int and length >= 0 for length in shape)
    ):
        faults.append(f"its shape {shape!r} is none of {len(entry.dims)} lengths")
    if not isinstance(attributes, dict):
        return [*faults, "its attributes are no JSON object"]
    if name in VARIABLES:
        native = attributes.get("native_dtype")
        known = NATIVE_TYPES.get(native) if isinstance(native, str) else None
        if known is None:
            faults.append(f"its native_dtype {native!r} is none of {', '.join(NATIVE_TYPES)}")
        expected = None if known is None else known.stored.name
    else:
        expected = STEP_TYPE.name if name == STEP.name else entry.dtype
    if expected is not None and document["data_type"] != expected:
        faults.append(f"it is of type {document['data_type']!r}, expected {expected}")
    if not faults:
        try:
            opened = open_document(document)
        except FormatError as error:
            return [str(error)]
        if name in VARIABLES:
            stored = stored_array(".", name, opened)
            if stored and stored.chain.kind == "delta" and stored.chain.native.name != native:
                faults.append(f"it is encoded as {stored.chain.native.name}, declared as {native}")
    return faults


def _rank(
    found: Inspection, name: str, document: Document, faults: list[str], lengths: Document
) -> tuple[Any, ...]:
    """What speaks against a document whose twin says something else; the less, the better."""
    if faults:
        return ()
    entry: Any = STEP if name == STEP.name else VARIABLES.get(name) or COORDINATES[name]
    pairs = zip(entry.dims, document["shape"], strict=True)
    odd = sum(dim in lengths and length != lengths[dim] for dim, length in pairs)
    attributes = document["attributes"]
    if name in COORDINATES:
        known = COORDINATES[name].attributes
    else:
        known = {"long_name": entry.long_name, "units": entry.units}
    odd += sum(attributes.get(key) != value for key, value in known.items())
    if name == STEP.name and COPY in attributes:
        odd += not same(_parsed(attributes[COPY]), _fixed(found.attributes))
    unreadable = 0
    if is_series(name):
        stored = stored_array(found.path, name, open_document(document))
        odd += stored is None
        if stored is not None and document["shape"][0]:
            try:
                stored[:1]
            except FormatError:
                unreadable = 1
    return unreadable, odd


def _lengths(documents: Iterable[Document]) -> dict[str, int]:
    """Length of token and hidden that most documents agree on."""
    seen: dict[str, Counter[int]] = {"token": Counter(), "hidden": Counter()}
    for document in documents:
        dims, shape = document.get("dimension_names"), document.get("shape")
        if isinstance(dims, list) and isinstance(shape, list) and len(dims) == len(shape):
            for dim, length in zip(dims, shape, strict=True):
                if isinstance(dim, str) and dim in seen and type(length) is int:
                    seen[dim][length] += 1
    return {dim: counts.most_common(1)[0][0] for dim, counts in seen.items() if counts}


def _check_rows(found: Inspection) -> None:
    """Settle how many rows are committed, and report who says otherwise."""
    series = [name for name in found.arrays if is_series(name)]
    committed = found.attributes.get("committed_rows")
    if type(committed) is not int or committed < 0:
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
    return isinstance(shape, list) and bool(shape) and type(shape[0]) is int


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
        value = json.loads(text, object_pairs_hook=_distinct)
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
                    f"{', '.join(_differences(fixed[key], found.copy[key], key))}",
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
