"""The `zarr.json` documents of a run.

zarr-python itself writes them once, into memory; afterwards only the length of the step axis and
the attributes of the root change. The root carries the metadata of all arrays (Zarr's inline
consolidated metadata), hence their shapes: replacing this one object is the commit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec
from zarr.storage import MemoryStore

from trajstore.layout import ArrayLayout, Layout
from trajstore.schema import COORDINATES, STEP, Coordinate

__all__ = ["DOCUMENT", "Documents", "chunk_key", "utc_now"]

DOCUMENT = "zarr.json"

_CHUNK_KEYS: Any = {"name": "default", "separator": "."}


def chunk_key(name: str, block: int, ndim: int) -> str:
    """Key of the shard that holds a block of an array: ``W/c.3.0.0``."""
    return f"{name}/" + ".".join(["c", str(block), *["0"] * (ndim - 1)])


def utc_now() -> str:
    """ISO 8601 to the second, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Documents:
    """Metadata of one run, as text.

    Parameters
    ----------
    layout : Layout
    coordinates : mapping of str to array_like
        Values along ``token``, by name of the schema.
    """

    def __init__(self, layout: Layout, coordinates: Mapping[str, npt.ArrayLike]) -> None:
        objects: dict[str, Any] = {}
        root = zarr.create_group(MemoryStore(objects))
        for name, array in layout.arrays.items():
            _create(root, name, array, [name for name in coordinates if name != "token"])
        for name, values in coordinates.items():
            _create_coordinate(root, COORDINATES[name], values)
        self._series = tuple(layout.arrays)
        self._arrays: dict[str, dict[str, Any]] = {}
        self.objects: dict[str, bytes] = {}
        """Chunks of the coordinates, by key."""
        for key, buffer in objects.items():
            name, _, leaf = key.rpartition("/")
            if leaf != DOCUMENT:
                self.objects[key] = buffer.to_bytes()
            elif name:
                self._arrays[name] = json.loads(buffer.to_bytes())

    def array(self, name: str, rows: int) -> bytes:
        """Document of an array that holds that many rows."""
        return _dump(self._with_rows(name, rows))

    def names(self) -> tuple[str, ...]:
        """All arrays, coordinates included."""
        return tuple(self._arrays)

    def series(self) -> tuple[str, ...]:
        """The arrays that grow with the rows."""
        return self._series

    def root(self, rows: int, attributes: Mapping[str, Any]) -> bytes:
        """Document of the root: attributes, and every array at that many rows."""
        return _dump(
            {
                "zarr_format": 3,
                "node_type": "group",
                "attributes": dict(attributes),
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
