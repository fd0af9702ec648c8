"""What checks and repairs share: a problem, the checked metadata of a run, and faults of a root."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trajstore.schema import STEP, TRAJECTORIES, belongs, variables_of
from trajstore.store.metadata.metadata_form import (
    COPY,
    REQUIRED,
    attribute_faults,
    root_faults,
)
from trajstore.store.metadata.zarr_json import (
    ArrayFacts,
    RunMetadata,
    checked_arrays,
    facts_of,
    fixed_attributes,
    is_series,
)
from trajstore.store.reading.array_reader import StoredArray
from trajstore.store.storage.remote_path import METADATA_KEY, Location
from trajstore.store.writing.resumed_run import fingerprint_at
from trajstore.strict_json import MISSING, JsonObject, changes, parse


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A problem of a run.

    Attributes
    ----------
    array : str or None
        None if it concerns the whole run.
    block : int or None
        Block of the array, if it concerns one.
    first_byte, stop_byte : int or None
        Range of the broken bytes in the file; the last is excluded.
    path : Path or RemotePath
        The file.
    message : str
        One sentence.
    remedy : {'rewrite', 'cut', 'remove', 'none'}
        Action of a repair: rewrite the metadata file from the second copy, cut the rows from this
        block on, remove the file, or nothing.
    """

    array: str | None
    path: Location
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
class CheckedMetadata:
    """Metadata of a run, and its problems.

    Attributes
    ----------
    path : Path or RemotePath
    objects : dict of str to int or None
        Bytes of each object by its key; None for a web server, which lists none.
    root : dict or None
        Stored metadata of the root; None if it cannot be read.
    documents : dict
        Metadata in each array's folder; None if it cannot be read.
    whole : dict or None
        Root with all metadata of the run: the stored one, or the second copy of it in the folders
        of the arrays. None if neither is whole.
    rows : int
        Committed rows.
    arrays : dict
        Metadata of each array of the run, with the committed rows.
    problems : list of Problem
    notes : list of str
        Remarks that are no damage.
    refused : bool
        True if the system refused to read a metadata file, which may be sound.
    """

    path: Location
    objects: dict[str, int] | None = None
    root: JsonObject | None = None
    documents: dict[str, JsonObject | None] = field(default_factory=dict)
    whole: JsonObject | None = None
    rows: int = 0
    arrays: dict[str, JsonObject] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refused: bool = False

    @property
    def attributes(self) -> JsonObject:
        """Attributes of the whole root; empty without one."""
        return attributes_of(self.whole)

    def choose(self, root: JsonObject) -> None:
        """Use a root without faults."""
        self.whole = root
        self.rows = self.attributes["committed_rows"]
        variables = variables_of(self.attributes)
        self.arrays = {
            name: array for name, array in listed_arrays(root).items() if belongs(name, variables)
        }

    def stored(self, name: str) -> StoredArray:
        """Reader of an array that grows with the rows."""
        return array_reader(self.path, name, self.arrays[name])

    def report(
        self,
        array: str | None,
        message: str,
        path: Location | None = None,
        remedy: Literal["rewrite", "none"] = "rewrite",
    ) -> None:
        """Add a problem of a metadata file: by default of the array, otherwise of the root."""
        path = path or self.path / (array or "") / METADATA_KEY
        self.problems.append(Problem(array=array, path=path, message=message, remedy=remedy))


def attributes_of(root: JsonObject | None) -> JsonObject:
    """Attributes of a root, which may be damaged; empty if they cannot be read."""
    attributes = (root or {}).get("attributes")
    return attributes if isinstance(attributes, dict) else {}


def listed_arrays(root: JsonObject | None) -> dict[str, Any]:
    """Metadata of the arrays in a root, which may be damaged; empty if they are lost."""
    block = (root or {}).get("consolidated_metadata")
    arrays = block.get("metadata") if isinstance(block, dict) else None
    return arrays if isinstance(arrays, dict) else {}


def array_reader(path: Location, name: str, metadata: JsonObject) -> StoredArray:
    """Reader of an array that grows with the rows, of metadata without faults."""
    facts = facts_of(name, metadata)
    assert isinstance(facts, ArrayFacts)
    assert facts.form is not None
    return StoredArray(path=path, name=name, shape=facts.shape, form=facts.form)


def series_in(path: Location, root: JsonObject) -> dict[str, StoredArray]:
    """Readers of the arrays that grow with the rows, `step` first."""
    variables = variables_of(attributes_of(root))
    names = [name for name in listed_arrays(root) if belongs(name, variables) and is_series(name)]
    names.sort(key=lambda name: name != STEP.name)
    return {name: array_reader(path, name, listed_arrays(root)[name]) for name in names}


ArrayFault = tuple[str | None, str]
"""Array, or None for the root; and a sentence."""

NO_COPY = f"its attribute {COPY} is missing, or is not a JSON object"
LOST = (
    "the root has lost its consolidated metadata, which give readers the number of committed rows; "
    "zarr drops them when it sets an attribute"
)
FOREIGN = "another program stored it in its own way, so its values cannot be checked"


def faults_in(
    root: JsonObject,
    documents: Mapping[str, JsonObject | None],
    required: Collection[str] = REQUIRED,
) -> list[ArrayFault]:
    """Faults of a root with the metadata of all its arrays; empty if it is whole.

    Parameters
    ----------
    root : dict
    documents : mapping
        Metadata in each array's folder, which can be those of another program.
    required : collection of str, optional
        Attributes that the root must have.
    """
    faults: list[ArrayFault] = [(None, str(fault)) for fault in root_faults(root)]
    if not faults and root.get("consolidated_metadata") is None:
        faults = [(None, LOST), *_attribute_faults(root, documents, required)]
    faults = faults or [*_attribute_faults(root, listed_arrays(root), required)]
    return faults or [*_array_faults(root, documents)]


def _attribute_faults(
    root: JsonObject, arrays: Mapping[str, Any], required: Collection[str]
) -> Iterator[ArrayFault]:
    attributes, copy = attributes_of(root), parsed_copy(arrays.get(STEP.name))
    if copy is None:
        yield STEP.name, NO_COPY
    for key, _, other in () if copy is None else changes(fixed_attributes(attributes), copy):
        how = "is missing in" if other is MISSING else "differs from"
        yield None, f"the attribute {key} {how} its copy in {STEP.name}"
    for fault in attribute_faults(attributes, required):
        yield None, str(fault)


def _array_faults(
    root: JsonObject, documents: Mapping[str, JsonObject | None]
) -> Iterator[ArrayFault]:
    attributes, arrays = attributes_of(root), listed_arrays(root)
    variables = variables_of(attributes)
    for name, metadata in arrays.items():
        is_known = documents.get(name) is not None and isinstance(metadata, dict)
        if not (belongs(name, variables) or is_known):
            yield name, "this version has no variable or coordinate of this name"
    checked, faults = checked_arrays(attributes, arrays)
    yield from ((name, str(fault)) for name, fault in faults)
    yield from ((name, FOREIGN) for name, facts in checked.items() if facts.foreign is not None)
    if arrays.keys().isdisjoint(TRAJECTORIES):
        yield "W", "it is missing; every run needs W, or delta, or cells"


def digests_of(path: Location, root: JsonObject, rows: int) -> dict[str, str]:
    """Digests of the first rows of a run, from a root without faults and the stored blocks.

    Raises
    ------
    FormatError, OSError
        If the label of a block, or a coordinate, cannot be read.
    """
    metadata = RunMetadata(listed_arrays(root), fixed_attributes(attributes_of(root)))
    return fingerprint_at(path, metadata, series_in(path, root), rows).attributes()


def parsed_copy(step: Any) -> JsonObject | None:
    """The fixed attributes of the root from their copy in `step`; None if it is damaged."""
    attributes = step.get("attributes") if isinstance(step, dict) else None
    try:
        value: Any = parse(attributes[COPY]) if isinstance(attributes, dict) else None
    except (KeyError, TypeError, ValueError):
        return None
    return value if isinstance(value, dict) else None
