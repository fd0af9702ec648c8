"""Opening a run: the Dataset that plain `xr.open_zarr` gives, read faster."""

from __future__ import annotations

import os
from typing import Any, Literal

import dask.array as da
import xarray as xr

from trajstore.errors import InvalidArgument
from trajstore.schema import VARIABLES
from trajstore.store.array_reader import stored_array
from trajstore.store.lazy_array import lazy_array
from trajstore.store.open_group import open_group

__all__ = ["open_run"]

_LARGEST_TASK = 16 << 20
"""Bytes. Larger ones are no faster to read, and whoever works on them holds more of them."""


def open_run(
    path: str | os.PathLike[str], *, chunks: Literal["blocks"] | None = "blocks"
) -> xr.Dataset:
    """Open a run lazily, also while it is being recorded.

    Parameters
    ----------
    path : path-like or str
        A local folder, or an address that fsspec knows (``s3://…``, with the extra ``s3``).
    chunks : 'blocks' or None
        With ``'blocks'``, the default, variables are dask arrays, for whatever goes over many
        steps and tokens. A dask chunk is a block along ``step`` and, where a block is larger than
        16 MiB, a whole number of inner chunks along ``token``. With None there is no dask: each
        selection is read when its values are asked for, in several threads if it is large. Of a
        large run, a token's history comes several times faster so. A selection point by point
        reads all tokens that occur in it at all its steps, and a whole variable takes its whole
        memory.

    Returns
    -------
    Dataset
        Dimensions ``step``, ``token``, ``hidden``; float32 that holds each native value exactly.

    Raises
    ------
    RunNotFound, FormatError, MissingExtra
        See `trajstore.store.open_group.open_group`.
    InvalidArgument
        If `chunks` is anything else.

    Examples
    --------
    >>> ds = open_run("gatsby.zarr")
    >>> ds.W.dims, ds.W.shape, ds.W.attrs["native_dtype"]
    (('step', 'token', 'hidden'), (21, 128, 4), 'bfloat16')
    >>> ds.W.sel(step=20, token=ord("e")).values
    array([1.6015625, 1.6015625, 1.3984375, 1.6015625], dtype=float32)
    >>> history = open_run("gatsby.zarr", chunks=None).W.sel(token=ord("e"))  # without dask
    """
    if chunks not in ("blocks", None):
        raise InvalidArgument(f"chunks is {chunks!r}, expected 'blocks' or None")
    group = open_group(path)
    ds: xr.Dataset = xr.open_zarr(os.fspath(path), chunks=None)
    local = os.path.isdir(path)
    for name, array in group.arrays():
        if name not in VARIABLES or name not in ds:
            continue
        fast = stored_array(path, name, array) if local else None
        if fast is not None and fast.shape != ds[name].shape:  # it has just grown
            fast = None
        if chunks is None:
            if fast is not None:
                ds[name] = ds[name].copy(data=lazy_array(fast))
            continue
        sizes = _dask_chunks(array, ds[name].dims)
        if fast is None:
            ds[name] = ds[name].chunk(sizes)
        else:
            # With dask's default getter a selection reaches the array, and only what it needs is
            # read; with fancy=False it would read whole chunks.
            ds[name] = ds[name].copy(data=da.from_array(fast, tuple(sizes.values())))
    return ds


def _dask_chunks(array: Any, dims: tuple[Any, ...]) -> dict[Any, int]:
    sizes = list(array.shards or array.chunks)
    if len(dims) > 1 and dims[1] == "token":
        chunk = array.chunks[1]
        row_of_chunks = array.dtype.itemsize * chunk * sizes[0]
        for length in sizes[2:]:
            row_of_chunks *= length
        sizes[1] = min(sizes[1], chunk * max(1, _LARGEST_TASK // row_of_chunks))
    return dict(zip(dims, sizes, strict=True))
