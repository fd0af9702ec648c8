"""A stored array as xarray's own lazy arrays: each selection is read when its values are asked for.

Names of xarray that no public module has are used here and nowhere else. Its reference documents
most of them, for whoever writes a backend, but as names of `xarray.core.indexing`.
`CopyOnWriteArray` is internal: `xarray.open_dataset` puts it around the arrays of a backend, and
nothing public does the same.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from xarray.backends import BackendArray
from xarray.core.indexing import (
    CopyOnWriteArray,
    ExplicitIndexer,
    IndexingSupport,
    LazilyIndexedArray,
    VectorizedIndexer,
    explicit_indexing_adapter,
)

from trajstore.store.array_reader import StoredArray
from trajstore.threads import default_threads

__all__ = ["lazy_array"]


def lazy_array(stored: StoredArray) -> Any:
    """Data of a variable of xarray that is read selection by selection, in several threads.

    What is assigned to it is held in memory; the run stays as it is.
    """
    lazy: Any = LazilyIndexedArray(_Selections(stored))
    return CopyOnWriteArray(lazy)


class _Selections(BackendArray):
    """A stored array as xarray reads arrays without dask: what a selection needs, when needed."""

    def __init__(self, stored: StoredArray) -> None:
        self._stored = replace(stored, threads=default_threads())
        self.shape = stored.shape
        self.dtype = stored.dtype

    def __getitem__(self, key: ExplicitIndexer) -> Any:
        if not isinstance(key, VectorizedIndexer):
            return self._stored[key.tuple]
        return explicit_indexing_adapter(
            key, self.shape, IndexingSupport.OUTER, self._stored.__getitem__
        )

    async def async_getitem(self, key: ExplicitIndexer) -> Any:
        return await asyncio.to_thread(self.__getitem__, key)
