"""Opening a run: the Dataset that `xr.open_zarr` returns, with checks."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any, Literal, cast

import dask.array as da
import numpy as np
import xarray as xr
import zarr
from dask.tokenize import tokenize
from xarray.backends import BackendArray
from xarray.core import indexing

from trajstore.arguments import checks_types
from trajstore.codec.block_codec import local_folder
from trajstore.store.metadata.block_plan import LARGEST_TASK
from trajstore.store.reading.array_reader import StoredArray, stored_array
from trajstore.store.reading.open_group import open_group
from trajstore.store.reading.xarray_engine import run_dataset
from trajstore.store.storage.remote_path import RunPath
from trajstore.threads import default_threads

_MATRIX = 3  # dimensions of the arrays that are read without zarr


@checks_types
def open_run(path: RunPath, *, chunks: Literal["blocks"] | None = "blocks") -> xr.Dataset:
    """Open a run lazily. It may still be recorded.

    `xr.open_dataset` with ``engine="trajstore"`` and `xr.open_zarr` return the same Dataset. The
    errors of this function state why a run cannot be opened.

    Parameters
    ----------
    path : path-like or str
        A local folder, an address such as ``s3://bucket/run.zarr``, with the extra ``s3``, or a
        zip file of the content of a run, ``run.zarr.zip``.
    chunks : 'blocks' or None
        With ``'blocks'``, the default, variables are dask arrays, for computations over many steps
        and tokens. A dask chunk is one block along ``step``, and one stored object along ``token``,
        or half of it; an object decodes to at most 30 MiB. With None, dask is not used, and each
        selection is read when its values are accessed. This reads the history of a single token
        several times faster.

    Returns
    -------
    Dataset
        Dimensions ``step``, ``token``, ``hidden``. The values are float32, which represents each
        native value exactly.

    Raises
    ------
    RunNotFound
        If `path` does not exist.
    FormatError
        If it is not a run, or has another format.
    MissingExtra
        If `path` is an address, and the extra that reads it is not installed.
    InvalidArgument
        If `chunks` has another value.

    Examples
    --------
    >>> ds = open_run("gatsby.zarr")
    >>> ds.W.dims, ds.W.shape, ds.W.attrs["native_dtype"]
    (('step', 'token', 'hidden'), (21, 128, 4), 'bfloat16')
    >>> ds.W.sel(step=20, token=ord("e")).values
    array([1.6015625, 1.6015625, 1.3984375, 1.6015625], dtype=float32)
    >>> history = open_run("gatsby.zarr", chunks=None).W.sel(token=ord("e"))  # without dask
    """
    group = open_group(path, zipped=True)
    # Coordinates are not dask arrays, as xarray could not group by or look up values in these.
    ds = run_dataset(group, path)
    ds.encoding["source"] = str(path)  # as xarray's own readers set it
    local = local_folder(group.store) is not None
    if chunks is None and not local:
        return ds
    data = {}
    token = tokenize(str(path), ds.attrs)  # once for all arrays
    for name, array in group.arrays():
        variable = ds.data_vars.get(name)
        if variable is None:
            continue
        stored = None
        if local and (variable.ndim == _MATRIX or "element" in variable.dims):
            stored = stored_array(path, name, array)
        if stored is not None and stored.shape != variable.shape:  # it grew a moment ago
            stored = None
        if chunks is None:
            reader = StoredReader(array, stored and replace(stored, threads=default_threads()))
            lazy: Any = indexing.LazilyIndexedArray(reader)
            data[name] = indexing.CopyOnWriteArray(lazy)
        else:
            data[name] = da.from_array(
                cast(Any, StoredReader(array, stored)),  # its keys may be those of xarray
                _dask_chunks(stored) if stored else _preferred_chunks(variable),
                name=f"{name}-{token}",
                meta=np.empty((0,) * variable.ndim, variable.dtype),
            )
    return ds.copy(data=data)


def _dask_chunks(stored: StoredArray) -> tuple[int, ...]:
    rows, tokens, *rest = stored.shard
    size = rows * tokens * math.prod(rest) * stored.chain.native.stored.itemsize
    if size > LARGEST_TASK and stored.form.grid[1] % 2 == 0:  # whole inner chunks
        tokens //= 2
    return rows, tokens, *rest


def _preferred_chunks(variable: xr.DataArray) -> tuple[int, ...]:
    chunks = variable.encoding["preferred_chunks"]
    return tuple(chunks[dim] for dim in variable.dims)


class StoredReader(BackendArray):
    """An array of a run, for xarray and dask.

    `stored` reads plain selections, and zarr reads all others. Without zarr's copy a scan takes a
    fifth less time, and without its event loop the history of a token takes half the time.

    Parameters
    ----------
    array : zarr.Array
    stored : StoredArray or None
        None if only zarr can read the array.
    """

    def __init__(self, array: zarr.Array[Any], stored: StoredArray | None) -> None:
        self._array = array
        self.stored = stored
        self.shape = array.shape
        self.dtype = array.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, indexing.ExplicitIndexer):
            return self._outer(key)
        read = self._points if isinstance(key, indexing.VectorizedIndexer) else self._outer
        support = indexing.IndexingSupport.VECTORIZED
        return indexing.explicit_indexing_adapter(key, self.shape, support, read)

    async def async_getitem(self, key: indexing.ExplicitIndexer) -> Any:
        """Read in a thread, for xarray's `load_async`."""
        return await asyncio.to_thread(self.__getitem__, key)

    def _outer(self, key: tuple[Any, ...]) -> Any:
        if self.stored is None or not all(map(_is_plain, key)):
            return self._array.oindex[key]
        slices = [item if isinstance(item, slice) else slice(item, item + 1) for item in key]
        values = self.stored.values(tuple(slices))
        return values[tuple(slice(None) if isinstance(item, slice) else 0 for item in key)]

    def _points(self, key: tuple[Any, ...]) -> Any:
        return self._array.vindex[key]


def _is_plain(item: Any) -> bool:
    if isinstance(item, slice):
        return item.step in (None, 1)
    return isinstance(item, int | np.integer) and bool(item >= 0)
