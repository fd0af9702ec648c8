"""Runs whose arrays zarr shards itself, seen as blocks: all of format 1, and all of ``portable``.

Their shards are laid out as `trajstore.codec.block_form` says, and that reads them several times
faster than `sharding_indexed` and the codecs within. So the documents are changed on their way to
zarr, and nothing on disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

import zarr
from zarr.abc.store import ByteRequest, Store
from zarr.storage import WrapperStore

from trajstore.codec.block_codec import BlockCodec, local_folder
from trajstore.errors import FormatError
from trajstore.schema import STEP, VARIABLES
from trajstore.store.metadata.object_keys import DOCUMENT
from trajstore.store.metadata.schema_check import check_array
from trajstore.store.reading.array_reader import block_form
from trajstore.store.reading.open_group import run_identity

__all__ = ["as_blocks"]

Changes = Mapping[str, Mapping[str, Any]]


def as_blocks(group: zarr.Group) -> zarr.Group:
    """The group of a run, whose arrays are all read by the codec ``trajstore.block``.

    Parameters
    ----------
    group : zarr.Group
        As `trajstore.store.reading.open_group.open_group` returns it.

    Raises
    ------
    FormatError
        If the root does not say which run it is of, or an array is not described as it was
        recorded (`trajstore.store.metadata.schema_check.check_array`).
    """
    runs = run_identity(group.attrs)
    changes: dict[str, dict[str, Any]] = {}
    for name, array in group.arrays():
        check_array(name, array, runs)
        if array.shards is None or (name != STEP.name and name not in VARIABLES):
            continue
        form = block_form(name, array, runs)
        if form is None and runs is not None:
            raise FormatError(
                f"{name} is not stored as a recorder stores it, so nothing says whose blocks it "
                "holds; xr.open_zarr may still read it"
            )
        if form is None:  # zarr can still read it
            continue
        codec = BlockCodec(array=name, chunk_shape=form.chunk, chain=form.chain, runs=form.runs)
        changes[name] = {
            "codecs": [codec.to_dict()],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(form.shape)}},
        }
    if not changes:
        return group
    return zarr.open_group(
        _ChangedStore(group.store, group.path, changes), path=group.path, mode="r", zarr_format=3
    )


class _ChangedStore(WrapperStore[Store]):
    """A store whose documents of some arrays of a group are changed when they are read."""

    def __init__(self, store: Store, group: str, changes: Changes) -> None:
        super().__init__(store)
        self._group = group
        self._changes = changes

    @property
    def local_root(self) -> Any:
        """Folder of a local store, from which the codec reads files itself; else None."""
        return local_folder(self._store)

    def _with_store(self, store: Store) -> Self:
        return type(self)(store, self._group, self._changes)

    async def get(self, key: str, prototype: Any, byte_range: ByteRequest | None = None) -> Any:
        """As the store's, but for the documents."""
        found = await self._store.get(key, prototype, byte_range)
        if found is None or not key.endswith(DOCUMENT):
            return found
        array = key.removeprefix(self._group).removesuffix(DOCUMENT).strip("/")
        if array and array not in self._changes:
            return found
        document = json.loads(found.to_bytes())
        if array:
            document |= self._changes[array]
        else:
            # Of a root that another program has changed there may be none.
            listed = (document.get("consolidated_metadata") or {}).get("metadata", {})
            for name, change in self._changes.items():
                if name in listed:
                    listed[name] |= change
        return prototype.buffer.from_bytes(json.dumps(document).encode())
