"""Opening a run: the Dataset that plain `xr.open_zarr` gives, with chunks that suit whole scans."""

from __future__ import annotations

import os
from typing import Any

import dask.array as da
import xarray as xr

from trajstore.group import open_group
from trajstore.schema import VARIABLES
from trajstore.stored import stored_array

__all__ = ["open_run"]

_LARGEST_TASK = 64 << 20


def open_run(path: str | os.PathLike[str]) -> xr.Dataset:
    """Open a run lazily, also while it is being recorded.

    Parameters
    ----------
    path : path-like or str
        A local folder, or an address that fsspec knows (``s3://…``, with the extra ``s3``).

    Returns
    -------
    Dataset
        Dimensions ``step``, ``token``, ``hidden``; float32 that holds each native value exactly.
        A dask chunk is a block along ``step`` and, where a block is larger than 64 MiB, a whole
        number of inner chunks along ``token``.

    Raises
    ------
    RunNotFound, FormatError
        See `trajstore.group.open_group`.

    Examples
    --------
    >>> ds = open_run("gatsby.zarr")              # doctest: +SKIP
    >>> ds.W.sel(step=100).mean("token")          # doctest: +SKIP
    """
    group = open_group(path)
    ds: xr.Dataset = xr.open_zarr(os.fspath(path), chunks=None)
    local = os.path.isdir(path)
    for name, array in group.arrays():
        if name not in VARIABLES or name not in ds:
            continue
        chunks = _dask_chunks(array, ds[name].dims)
        fast = stored_array(path, name, array) if local else None
        if fast is None or fast.shape != ds[name].shape:
            ds[name] = ds[name].chunk(chunks)
        else:
            # With dask's default getter a selection reaches the array, and only what it needs is
            # read; with fancy=False it would read whole chunks.
            data = da.from_array(fast, tuple(chunks.values()))
            ds[name] = ds[name].copy(data=data)
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
