"""The `zarr.json` documents of a run.

zarr-python itself writes them once, into memory; afterwards only the length of the step axis and
the attributes of the root change. The root carries the metadata of all arrays (Zarr's inline
consolidated metadata), hence their shapes: replacing this one object is the commit.

What the root says of the run and never changes is also an attribute of the array ``step``, as one
JSON text: from it a lost root is made again, and against it a damaged one is noticed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec
from zarr.storage import MemoryStore

from trajstore.layout import ArrayLayout, Layout
from trajstore.schema import COORDINATES, STEP, VARIABLES, Coordinate

__all__ = [
    "CHANGING",
    "COPY",
    "DOCUMENT",
    "Documents",
    "Status",
    "block_of",
    "chunk_key",
    "new_arrays",
    "utc_now",
]

Status = Literal["recording", "complete", "interrupted"]

DOCUMENT = "zarr.json"

CHANGING = ("status", "committed_rows", "updated")
"""Attributes of the root that every commit sets."""

COPY = "root_attributes"
"""Attribute of ``step`` that holds all the others."""

_CHUNK_KEYS: Any = {"name": "default", "separator": "."}


def chunk_key(name: str, block: int, ndim: int) -> str:
    """Key of the shard that holds a block of an array: ``W/c.3.0.0``."""
    return f"{name}/" + ".".join(["c", str(block), *["0"] * (ndim - 1)])


def block_of(leaf: str, ndim: int) -> int | None:
    """Number of the block whose shard has that file name; None if no shard is called so."""
    number = leaf.split(".")[1] if leaf.count(".") == ndim else ""
    if not number.isdecimal() or leaf != chunk_key("", int(number), ndim)[1:]:
        return None
    return int(number)


def utc_now() -> str:
    """ISO 8601 to the second, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Documents:
    """Metadata of one run, as text.

    Parameters
    ----------
    arrays : mapping of str to dict
        Document of each array, coordinates included, with any number of rows.
    attributes : mapping
        Attributes of the root but those that are `CHANGING`; JSON values.
    """

    def __init__(self, arrays: Mapping[str, dict[str, Any]], attributes: Mapping[str, Any]) -> None:
        self._arrays = dict(arrays)
        self._attributes = dict(attributes)
        step = self._arrays[STEP.name]
        copy = json.dumps(self._attributes, allow_nan=False)
        self._arrays[STEP.name] = step | {"attributes": step["attributes"] | {COPY: copy}}
        # Whatever else lies in the group is its owner's, and stays as it is.
        self._series = tuple(
            name for name in self._arrays if name == STEP.name or name in VARIABLES
        )

    @classmethod
    def stored(cls, root: Mapping[str, Any], attributes: Mapping[str, Any] | None = None) -> Self:
        """Of a run that is there.

        Parameters
        ----------
        root : mapping
            Its root document.
        attributes : mapping, optional
            Attributes that take the place of those it has.
        """
        fixed = {name: value for name, value in root["attributes"].items() if name not in CHANGING}
        return cls(root["consolidated_metadata"]["metadata"], fixed | dict(attributes or {}))

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of the root but those that are `CHANGING`."""
        return self._attributes

    def array(self, name: str, rows: int) -> bytes:
        """Document of an array that holds that many rows."""
        return _dump(self._with_rows(name, rows))

    def names(self) -> tuple[str, ...]:
        """All arrays, coordinates included."""
        return tuple(self._arrays)

    def series(self) -> tuple[str, ...]:
        """The arrays that grow with the rows."""
        return self._series

    def root(self, rows: int, status: Status) -> bytes:
        """Document of the root: attributes, and every array at that many rows."""
        changing = {"status": status, "committed_rows": rows, "updated": utc_now()}
        return _dump(
            {
                "zarr_format": 3,
                "node_type": "group",
                "attributes": self._attributes | changing,
                "consolidated_metadata": {
                    "kind": "inline",
                    "must_understand": False,
                    "metadata": {name: self._with_rows(name, rows) for name in self._arrays},
                },
            }
        )

    def _with_rows(self, name: str, rows: int) -> dict[str, Any]:
        document = self._arrays[name]
        if name not in self._series:
            return document
        return document | {"shape": [rows, *document["shape"][1:]]}


def new_arrays(
    layout: Layout, coordinates: Mapping[str, npt.ArrayLike]
) -> tuple[dict[str, dict[str, Any]], dict[str, bytes]]:
    """Arrays of a run that is to be made.

    Parameters
    ----------
    layout : Layout
    coordinates : mapping of str to array_like
        Values along ``token``, by name of the schema.

    Returns
    -------
    dict of str to dict
        The document of each array.
    dict of str to bytes
        The chunks of the coordinates, by key.
    """
    objects: dict[str, Any] = {}
    root = zarr.create_group(MemoryStore(objects))
    for name, array in layout.arrays.items():
        _create(root, name, array, [name for name in coordinates if name != "token"])
    for name, values in coordinates.items():
        _create_coordinate(root, COORDINATES[name], values)
    documents: dict[str, dict[str, Any]] = {}
    chunks: dict[str, bytes] = {}
    for key, buffer in objects.items():
        name, _, leaf = key.rpartition("/")
        if leaf != DOCUMENT:
            chunks[key] = buffer.to_bytes()
        elif name:
            documents[name] = json.loads(buffer.to_bytes())
    return documents, chunks


def _create(root: zarr.Group, name: str, array: ArrayLayout, auxiliary: list[str]) -> None:
    entry = array.variable
    attributes: dict[str, Any] = {"long_name": entry.long_name, "units": entry.units}
    if entry is not STEP:
        attributes["native_dtype"] = array.native.name
    if "token" in entry.dims and auxiliary:
        attributes["coordinates"] = " ".join(auxiliary)  # CF: xarray makes them coordinates
    root.create_array(
        name,
        shape=(array.shard[0], *array.row),
        dtype=array.native.stored,
        chunks=array.chunk,
        shards=array.shard,
        # A lost chunk must not read as a plausible number.
        fill_value=-1 if array.native.stored.kind == "i" else float("nan"),
        dimension_names=entry.dims,
        chunk_key_encoding=_CHUNK_KEYS,
        attributes=attributes,
        **array.chain.codecs(len(array.chunk)),
    )


def _create_coordinate(root: zarr.Group, entry: Coordinate, values: npt.ArrayLike) -> None:
    data = np.asarray(values, None if entry.dtype == "string" else entry.dtype)
    options: dict[str, Any] = {}
    if entry.dtype == "string":
        data = data.astype(np.dtypes.StringDType())
        options["compressors"] = [Crc32cCodec()]
    else:
        options["serializer"] = BytesCodec(endian="little")
        options["compressors"] = [
            BloscCodec(cname="zstd", clevel=1, shuffle="shuffle", typesize=data.dtype.itemsize),
            Crc32cCodec(),
        ]
    array = root.create_array(
        entry.name,
        shape=data.shape,
        dtype=data.dtype,
        chunks=data.shape,
        fill_value=entry.fill_value,
        dimension_names=entry.dims,
        chunk_key_encoding=_CHUNK_KEYS,
        attributes=entry.attributes,
        config={"write_empty_chunks": True},
        **options,
    )
    array[...] = data


def _dump(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=1, allow_nan=False).encode()
