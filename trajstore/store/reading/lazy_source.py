"""What a dask array reads: the array of a run on disk, if that is all it stands for.

Who measures blocks, and needs none of their values afterwards, can then do so past dask and zarr.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import dask.array as da
import zarr
from dask.array.core import getter, getter_inline, getter_nofancy
from xarray.backends.zarr import ZarrArrayWrapper
from xarray.core import indexing

from trajstore.codec.block_codec import BlockCodec, local_folder
from trajstore.store.reading.array_reader import StoredArray, stored_array
from trajstore.store.reading.open_run import StoredReader

__all__ = ["stored_source"]

_AS_IT_IS = (
    indexing.ImplicitToExplicitIndexingAdapter,
    indexing.MemoryCachedArray,
    indexing.CopyOnWriteArray,
)
"""What xarray wraps arrays into that it has not decoded."""

_READ_AS_IT_IS = (getter, getter_inline, getter_nofancy)
"""What dask does with them, if it is not told otherwise."""


def stored_source(array: da.Array) -> StoredArray | None:
    """The array of a local run that a dask array reads chunk by chunk.

    Parameters
    ----------
    array : dask Array
        Such as `xr.open_zarr`, `open_run` or ``chunk`` make.

    Returns
    -------
    StoredArray or None
        None if anything else is done, such as a selection, or it is read from somewhere else. How
        xarray and dask wrap what they read is their own affair: where they do so in another way,
        this is None as well. What xarray has loaded meanwhile, and somebody has changed there, is
        not seen.
    """
    read = f"original-{array.name}"  # dask's name of what `from_array` was given
    if set(array.dask.layers) != {array.name, read}:
        return None
    task = getattr(array.dask.layers[array.name], "task", None)
    if getattr(task, "func", None) not in _READ_AS_IT_IS:
        return None
    stored = _unwrapped(array.dask[read])
    if stored is None or stored.shape != array.shape or stored.dtype != array.dtype:
        return None
    return stored


def _unwrapped(source: Any) -> StoredArray | None:
    """What xarray reads where it is asked for all of an array; None if that is not to be seen."""
    while isinstance(source, _AS_IT_IS):
        source = source.array
    if isinstance(source, indexing.LazilyIndexedArray):
        if not all(isinstance(item, slice) and item == slice(None) for item in source.key.tuple):
            return None
        source = source.array
    if isinstance(source, StoredReader):
        return source.stored
    if isinstance(source, ZarrArrayWrapper):
        return _of_run(cast(Any, source).get_array())
    return None


def _of_run(array: zarr.Array[Any]) -> StoredArray | None:
    """An array in blocks that plain zarr has opened; None if it is none, or not on this machine."""
    folder, name = local_folder(array.store), array.basename
    codec = next(iter(getattr(array.metadata, "codecs", ())), None)
    # A copy has another name than the codec knows, which refuses it.
    if folder is None or not isinstance(codec, BlockCodec) or codec.array != name:
        return None
    return stored_array((Path(folder) / array.path).parent, name, array)
