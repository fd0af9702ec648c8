"""Reading for exporters, in tiles that fit into memory and are fast to decode.

A tile is decoded at once. It covers the rows of one block, and as many tokens as fit into a few
MiB. So memory does not grow with the sizes of runs and blocks. A variable may come from stored
arrays, from zarr or from a Dataset, and exporters wrap the function that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError, InvalidArgument, VariableNotRecorded
from trajstore.installation import imported
from trajstore.schema import (
    COORDINATES,
    NAMES,
    STEP,
    VARIABLES,
    along_token,
    row_lengths,
    variables_of,
)
from trajstore.store.reading.array_reader import stored_array
from trajstore.store.reading.open_group import open_group, whole
from trajstore.store.storage.remote_path import RunPath, location
from trajstore.threads import in_parallel
from trajstore.values.native_types import NativeType, convert, native_type

if TYPE_CHECKING:
    import xarray as xr  # takes long

Array = npt.NDArray[Any]
Where = tuple[slice, ...]

_TILE = 16 << 20


@dataclass(frozen=True, kw_only=True)
class TiledVariable:
    """A variable of a run.

    Attributes
    ----------
    name : str
    dims : tuple of str
    shape : tuple of int
    native : NativeType
    attributes : dict
    tile : tuple of int
        Numbers of rows, and of tokens if the variable has them, that are read together.
    chunk : tuple of int
        Shape of an inner chunk; empty if another library reads the values.
    get, bits : callable
        Return stored values or native bits for a tuple of slices.
    """

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    native: NativeType
    attributes: dict[str, Any]
    tile: tuple[int, ...]
    chunk: tuple[int, ...]
    get: Callable[[Where], Array]
    bits: Callable[[Where], Array]

    def shape_of(self, rows: Array, tokens: Array | None) -> tuple[int, ...]:
        """Shape of a selection; see `tiles`."""
        picked = self._picked(rows, tokens)
        return (*map(len, picked), *self.shape[len(picked) :])

    def tiles(self, rows: Array, tokens: Array | None) -> Iterator[Where]:
        """Parts of a selection that are fast to read at once, rows first.

        Parameters
        ----------
        rows : ndarray of int
            Positions along ``step``, not decreasing. A position may repeat.
        tokens : ndarray of int, optional
            Positions along ``token``, not decreasing (default: all). Without effect if the variable
            has no tokens.

        Yields
        ------
        tuple of slice
            Range of the selected rows, and of the selected tokens if the variable has them.
        """
        picked = self._picked(rows, tokens)
        yield from product(*map(_spans, picked, self.tile))

    def read(
        self, where: Where, rows: Array, tokens: Array | None, *, native: bool = False
    ) -> Array:
        """Read a part of a selection.

        Parameters
        ----------
        where : tuple of slice
            One of `tiles`.
        rows, tokens
            The selection, as for `tiles`.
        native : bool
            Read native bits instead of stored values.
        """
        picked = [each[at] for each, at in zip(self._picked(rows, tokens), where, strict=True)]
        ranges = tuple(slice(int(each[0]), int(each[-1]) + 1) for each in picked)
        values = (self.bits if native else self.get)(ranges)
        for axis, each in enumerate(picked):
            if (np.diff(each) != 1).any():
                values = np.take(values, each - each[0], axis=axis)
        return values

    def fill(
        self,
        place: Array,
        where: Where,
        rows: Array,
        tokens: Array | None,
        *,
        native: bool = False,
    ) -> None:
        """Read a part of a selection into its place in an array of the selection; see `read`."""
        place[where] = self.read(where, rows, tokens, native=native)

    def load(self, rows: Array, tokens: Array | None, *, native: bool = False) -> Array:
        """Read a selection with several threads; see `tiles` and `read`."""
        whole = self.native.bits if native else self.native.stored
        values = np.empty(self.shape_of(rows, tokens), whole)
        for _ in in_parallel(
            partial(self.fill, values, where, rows, tokens, native=native)
            for where in self.tiles(rows, tokens)
        ):
            pass
        return values

    def _picked(self, rows: Array, tokens: Array | None) -> list[Array]:
        if len(self.tile) == 1:
            return [rows]
        return [rows, np.arange(self.shape[1]) if tokens is None else tokens]


@dataclass(frozen=True, kw_only=True)
class TiledRun:
    """A run opened for reading, at one commit.

    Attributes
    ----------
    attributes : dict
        Attributes of the root.
    steps : ndarray of int64, (step,)
    coordinates : dict of str to ndarray, (token,)
        Coordinates along ``token``, always including ``token``.
    series : dict of str to TiledVariable
    names : dict of str to ndarray of str
        Coordinates of names, such as ``parameter``, if there are variables along them.
    """

    attributes: dict[str, Any]
    steps: Array
    coordinates: dict[str, Array]
    series: dict[str, TiledVariable]
    names: dict[str, Array]

    @property
    def populations(self) -> dict[str, Array]:
        """Coordinates that are not in the schema."""
        return {name: mask for name, mask in self.coordinates.items() if name not in COORDINATES}

    @property
    def row_lengths(self) -> dict[str, Any]:
        """Lengths of ``example`` and ``position``, as arguments of `RunWriter.create`."""
        return row_lengths({name: each.shape[1:] for name, each in self.series.items()})


def open_tiled(
    run: RunPath | xr.Dataset, *, on_lost: Callable[[str, FormatError], None] | None = None
) -> TiledRun:
    """Open a run or Dataset for an export.

    Parameters
    ----------
    run : path-like, str or Dataset
        A run, or a Dataset with variables and coordinates of a run.
    on_lost : callable, optional
        Called with the name of a coordinate of a run that cannot be read, and the error. If it
        returns, the coordinate is left out. By default the error is raised.

    Raises
    ------
    RunNotFound, FormatError
        If there is no run at the path.
    InvalidArgument
        If a Dataset lacks a coordinate, or a variable has other dimensions.
    VariableNotRecorded
        If there is no variable of a run.
    """
    given: Any = run
    is_dataset = isinstance(given, imported("xarray", "Dataset"))
    source = _of_dataset(given) if is_dataset else _of_path(given, on_lost)
    if not source.series:
        raise VariableNotRecorded(
            f"there is nothing to export, expected at least one of {', '.join(VARIABLES)}"
        )
    return source


def _of_path(path: RunPath, on_lost: Callable[[str, FormatError], None] | None = None) -> TiledRun:
    group = open_group(path)
    # Of an object store zarr reads parts of objects; to find damage, they are read as a whole.
    whole_objects = isinstance(location(path), Path) or on_lost is not None
    arrays: dict[str, Any] = dict(group.arrays())
    series = {}
    for name in (name for name in variables_of(group.attrs) if name in arrays):
        array = arrays[name]
        fast = stored_array(path, name, array) if whole_objects else None
        native = array.attrs.get("native_dtype", str(array.dtype))
        inner = array.chunks if fast is None else fast.chunk
        series[name] = _series(
            name,
            array.shape,
            dict(array.attrs),
            np.dtype(array.dtype),
            (array.shards or array.chunks)[:1] + inner[1:2],
            array.__getitem__ if fast is None else fast.values,
            fast.bits if fast is not None and fast.chain.native.name == native else None,
            () if fast is None else fast.chunk,
        )
    coordinates = {}
    for name in (STEP.name, *along_token(arrays)):
        try:
            coordinates[name] = whole(path, group, name)
        except FormatError as error:
            if on_lost is None:
                raise
            on_lost(name, error)
    return TiledRun(
        attributes=dict(group.attrs),
        steps=coordinates.pop(STEP.name),
        coordinates=coordinates,
        series=series,
        names={name: whole(path, group, name) for name in NAMES if name in arrays},
    )


def _of_dataset(ds: xr.Dataset) -> TiledRun:
    for name in (STEP.name, "token"):
        if name not in ds.coords or ds[name].dims != (name,):
            raise InvalidArgument(
                f"the Dataset has no coordinate {name} along a dimension {name}; "
                f"select with a list, such as ds.sel({name}=[0]), to keep it"
            )
    series = {}
    for name in (name for name in variables_of(ds.attrs) if name in ds):
        da, dims = ds[name], VARIABLES[name].dims
        if set(da.dims) != set(dims):
            raise InvalidArgument(
                f"{name}: got dimensions ({', '.join(map(str, da.dims))}), "
                f"expected ({', '.join(dims)})"
            )
        da = da.transpose(*dims)
        chunks = da.variable.chunksizes  # coordinates may have other chunks
        tile = tuple(max(chunks.get(dim, (da.sizes[dim],)), default=1) for dim in dims[:2])

        def get(where: Where, da: xr.DataArray = da) -> Array:
            return da[where].values

        series[name] = _series(name, da.shape, dict(da.attrs), da.dtype, tile, get)
    return TiledRun(
        attributes=dict(ds.attrs),
        steps=ds[STEP.name].values,
        coordinates={
            name: ds[name].values
            for name in along_token(map(str, ds.coords))
            if ds[name].dims == ("token",) and (name in COORDINATES or ds[name].dtype == bool)
        },
        series=series,
        names={name: ds[name].values for name in NAMES if name in ds.coords},
    )


def _series(
    name: str,
    shape: tuple[int, ...],
    attributes: dict[str, Any],
    dtype: np.dtype[Any],
    tile: tuple[int, ...],
    get: Callable[[Where], Array],
    bits: Callable[[Where], Array] | None = None,
    chunk: tuple[int, ...] = (),
) -> TiledVariable:
    dims = VARIABLES[name].dims
    native = native_type(attributes.get("native_dtype", dtype.name))
    if "token" in dims:
        strip = int(np.prod(shape[2:], dtype=np.int64)) * tile[0] * tile[1] * dtype.itemsize
        # Whole chunks, so that no chunk is decoded twice.
        tile = (tile[0], tile[1] * max(1, _TILE // max(strip, 1)))
    else:
        row = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        tile = (max(1, min(tile[0], _TILE // max(row, 1))),)
    return TiledVariable(
        name=name,
        dims=dims,
        shape=tuple(shape),
        native=native,
        attributes=attributes,
        tile=tile,
        chunk=chunk,
        get=get,
        bits=bits or (lambda where: convert(get(where), native, native)[0]),
    )


def _spans(picked: Array, length: int) -> Iterator[slice]:
    """Split picked positions by consecutive ranges of an axis."""
    length = max(length, 1)
    start = 0
    while start < len(picked):
        edge = (int(picked[start]) // length + 1) * length
        stop = int(np.searchsorted(picked, edge))
        yield slice(start, stop)
        start = stop


def positions(values: Array, wanted: Array) -> Array:
    """Positions of `wanted` in `values`; −1 for missing ones."""
    if not len(values):
        return np.full(len(wanted), -1)
    order = np.argsort(values, kind="stable")
    nearest = np.minimum(np.searchsorted(values, wanted, sorter=order), len(values) - 1)
    at = order[nearest]
    return np.where(values[at] == wanted, at, -1)
