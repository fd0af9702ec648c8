"""Opening a run: the Dataset that plain `xr.open_zarr` gives, with checks."""

from __future__ import annotations

import math
import os
from typing import Any, Literal

import dask.array as da
import xarray as xr
import zarr

from trajstore.errors import InvalidArgument
from trajstore.store.array_reader import StoredArray, stored_array
from trajstore.store.block_plan import LARGEST_TASK
from trajstore.store.block_view import as_blocks
from trajstore.store.open_group import open_group, run_identity
from trajstore.store.xarray_engine import run_store

__all__ = ["open_run"]

_MATRIX = 3  # dimensions of what is worth reading without a detour


def open_run(
    path: str | os.PathLike[str], *, chunks: Literal["blocks"] | None = "blocks"
) -> xr.Dataset:
    """Open a run lazily, also while it is being recorded.

    `xr.open_dataset` does the same with ``engine="trajstore"``, and `xr.open_zarr` for runs of the
    present format in the encoding ``delta``. This says what is wrong where a run cannot be opened,
    and reads any run by the same fast codec.

    Parameters
    ----------
    path : path-like or str
        A local folder, or an address that fsspec knows (``s3://…``, with the extra ``s3``).
    chunks : 'blocks' or None
        With ``'blocks'``, the default, variables are dask arrays, for whatever goes over many
        steps and tokens. A dask chunk is a block along ``step``, and along ``token`` what is
        stored as one object, which decodes to 30 MiB at most, or half of that. With None there is
        no dask: each selection is read when its values are asked for. A single token's history
        comes several times faster so.

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
    group = as_blocks(open_group(path))
    # Coordinates stay without dask, which can neither group by them nor look things up in them.
    ds = xr.open_dataset(run_store(group), chunks=None)
    if chunks is None:
        return _from(ds, path)
    runs = run_identity(group.attrs)
    arrays = dict(group.arrays())
    lazy: dict[Any, xr.Variable] = {}
    for name, variable in ds.data_vars.items():
        array = arrays[str(name)]
        stored = None
        if variable.ndim == _MATRIX and os.path.isdir(path):
            stored = stored_array(path, str(name), array, runs)
        if stored is not None and stored.shape == variable.shape:  # it may just have grown
            data = da.from_array(_Blocks(stored, array), _dask_chunks(stored))
            lazy[name] = variable.variable.copy(data=data)
        else:
            lazy[name] = variable.variable.chunk(variable.encoding["preferred_chunks"])
    # All at once: each alone has the whole Dataset aligned anew.
    return _from(ds.assign(lazy), path)


def _from(ds: xr.Dataset, path: str | os.PathLike[str]) -> xr.Dataset:
    """Say where it is from, in the place where xarray's readers do."""
    ds.encoding["source"] = os.fspath(path)
    return ds


def _dask_chunks(stored: StoredArray) -> tuple[int, ...]:
    rows, tokens, *rest = stored.shard
    size = rows * tokens * math.prod(rest) * stored.chain.native.stored.itemsize
    if size > LARGEST_TASK and stored.form.grid[1] % 2 == 0:  # whole inner chunks
        tokens //= 2
    return rows, tokens, *rest


class _Blocks:
    """An array of a local run as dask reads it: whole blocks without a copy by way of zarr.

    That is a fifth of the time of a scan. Every other selection is zarr's.
    """

    def __init__(self, stored: StoredArray, array: zarr.Array[Any]) -> None:
        self._stored = stored
        self._array = array
        self.shape = stored.shape
        self.ndim = stored.ndim
        self.dtype = stored.chain.native.stored

    def __dask_tokenize__(self) -> Any:
        form = self._stored.form  # of which dask would make a pickle otherwise
        return str(self._stored.path), self.shape, form.settings, form.runs

    def __getitem__(self, key: tuple[Any, ...]) -> Any:
        if all(isinstance(item, slice) and item.step in (None, 1) for item in key):
            return self._stored.values(key)
        return self._array.oindex[key]
