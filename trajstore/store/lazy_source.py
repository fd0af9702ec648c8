"""What a dask array reads: the array of a run on disk, if that is all it stands for.

Who measures blocks, and needs none of their values afterwards, can then do so past dask and zarr.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import dask.array as da
import zarr
from xarray.backends.zarr import ZarrArrayWrapper
from xarray.core import indexing

from trajstore.codec.block_codec import BlockCodec, local_folder
from trajstore.store.array_reader import StoredArray, stored_array

__all__ = ["stored_source"]

_AS_IT_IS = (
    indexing.ImplicitToExplicitIndexingAdapter,
    indexing.MemoryCachedArray,
    indexing.CopyOnWriteArray,
)
"""What xarray wraps arrays into that it has not decoded."""


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
        xarray wraps what it reads is its own affair: where it does so in another way, this is None
        as well.
    """
    read = f"original-{array.name}"  # dask's name of what `from_array` was given
    if set(array.dask.layers) != {array.name, read}:
        return None
    source = _unwrapped(array.dask[read])
    stored = source if isinstance(source, StoredArray) else None
    if isinstance(source, zarr.Array):
        stored = _of_run(source)
    return stored if stored is not None and stored.shape == array.shape else None


def _unwrapped(source: Any) -> Any:
    """What xarray reads where it is asked for all of an array; None if that is not to be seen."""
    while isinstance(source, _AS_IT_IS):
        source = source.array
    if isinstance(source, indexing.LazilyIndexedArray):
        if any(item != slice(None) for item in source.key.tuple):
            return None
        source = source.array
    if isinstance(source, ZarrArrayWrapper):
        return cast(Any, source).get_array()
    return getattr(source, "stored", None)


def _of_run(array: zarr.Array[Any]) -> StoredArray | None:
    """An array in blocks that plain zarr has opened; None if it is none, or not on this machine."""
    folder, name = local_folder(array.store), array.basename
    codecs: tuple[Any, ...] = getattr(array.metadata, "codecs", ())
    if folder is None or len(codecs) != 1 or not isinstance(codecs[0], BlockCodec):
        return None
    if codecs[0].array != name:  # a copy under another name, which the codec tells from others
        return None
    return stored_array((Path(folder) / array.path).parent, name, array, codecs[0].runs)
