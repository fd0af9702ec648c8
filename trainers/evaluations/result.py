"""Results of an evaluation: the values of one step as a Dataset, and their Zarr store."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
import zarr

from trajstore.errors import InvalidArgument, RunExists
from trajstore.schema import COORDINATES, EVALUATION, STEP, VARIABLES
from trajstore.store.storage.remote_path import local_path
from trajstore.store.writing.create import move_into_place, staged_folder

_KINDS = "biufO"
"""Kinds of types that are stored: booleans, numbers and texts."""


def step_dataset(result: Any, step: int) -> xr.Dataset:
    """Return the values of one step as a Dataset along ``step``.

    Parameters
    ----------
    result : mapping
        By name: scalars, texts, arrays, tensors, pairs (dimensions, array), or DataArrays. Arrays
        without dimensions get the dimensions ``NAME_0``, ``NAME_1`` …
    step : int

    Raises
    ------
    InvalidArgument
        If the result is something else, or a name is one of a run.
    """
    if not isinstance(result, Mapping) or not result:
        raise InvalidArgument(
            f"step {step}: the function returned {type(result).__name__}, expected a dict of "
            "values by name"
        )
    reserved = [name for name in result if name in VARIABLES or name in COORDINATES]
    if reserved or STEP.name in result:
        raise InvalidArgument(
            f"step {step}: the function returned {reserved[0] if reserved else STEP.name}, which "
            "is a name of a run; return it under another name"
        )
    arrays = {}
    for name, value in result.items():
        if not isinstance(name, str):
            raise InvalidArgument(f"step {step}: got the name {name!r}, expected a string")
        try:
            arrays[name] = _array(name, value)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(
                f"step {step}: {name} is {type(value).__name__}, expected a number, a text, an "
                f"array, or (dimensions, array): {error}"
            ) from error
    try:
        ds = xr.Dataset(arrays)
    except ValueError as error:
        raise InvalidArgument(f"step {step}: the results do not fit together: {error}") from error
    ds = ds.drop_vars(STEP.name, errors="ignore").expand_dims({STEP.name: [step]})
    ds[STEP.name].attrs = {"long_name": STEP.long_name, "units": STEP.units}
    return ds


def check_like(ds: xr.Dataset, first: xr.Dataset) -> None:
    """Check that the result of a step has the form of the results before.

    Raises
    ------
    InvalidArgument
        If names, dimensions, lengths, types or coordinates differ.
    """
    step = ds[STEP.name].values[0]
    if ds.data_vars.keys() != first.data_vars.keys():
        raise InvalidArgument(
            f"step {step}: the function returned {', '.join(map(str, ds.data_vars))}, but "
            f"{', '.join(map(str, first.data_vars))} at the steps before; return the same names"
        )
    for name, values in ds.data_vars.items():
        for aspect, new, old in (
            ("dimensions", values.dims[1:], first[name].dims[1:]),
            ("shape", values.shape[1:], first[name].shape[1:]),
            ("type", _type(values), _type(first[name])),
        ):
            if new != old:
                raise InvalidArgument(
                    f"step {step}: {name} has {aspect} {new}, but {old} at the steps before; "
                    "return the same form at every step"
                )
    for name, values in ds.coords.items():
        if name != STEP.name and not (name in first.coords and values.equals(first[name])):
            raise InvalidArgument(
                f"step {step}: the coordinate {name} differs from that of the steps before"
            )


def _type(values: xr.DataArray) -> str:
    return "text" if values.dtype.kind in "OT" else values.dtype.name


def _array(name: str, value: Any) -> xr.DataArray:
    if isinstance(value, xr.DataArray):
        return value.copy(data=_values(value.values))
    if isinstance(value, tuple):
        dims, *rest = value
        values = _values(rest[0])
        return xr.DataArray(values, dims=dims, attrs=dict(*rest[1:]))
    values = _values(value)
    return xr.DataArray(values, dims=[f"{name}_{axis}" for axis in range(values.ndim)])


def _values(value: Any) -> Any:
    """Return a copy as an array. The function may change its tensors in the next step."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
    values = np.array(value)
    if values.dtype.kind in "UT":  # NumPy's fixed width drops NUL characters at the end of a text
        values = np.array(value, dtype=object)
    if values.dtype.kind == "O" and not all(isinstance(item, str) for item in values.flat):
        raise TypeError("it has values that are neither numbers nor texts")
    if values.dtype.kind not in _KINDS:
        raise TypeError(f"values of type {values.dtype} are not stored")
    return values


_CHUNK = 1 << 20
_MOST_ROWS = 1024
_WAITING_BYTES = 32 << 20


class ResultStore:
    """A Zarr store of results along ``step``. `open` locks it for this process.

    Its consolidated metadata say which rows are complete, to readers and to the next process. They
    are written last, so a kill leaves the rows before. (``append_dim`` of xarray removes them
    first.) Results wait in memory for some seconds, or until they have 32 MiB.

    Attributes
    ----------
    path : Path
    steps : ndarray of int64, (step,)
        Steps with results, including those that wait.
    waiting_seconds : float
        Seconds for which results wait at most.
    """

    def __init__(
        self, path: Path, about: Mapping[str, Any], scratch: Path, stored: xr.Dataset | None
    ) -> None:
        self.path = path
        self.waiting_seconds = 5.0
        self.steps: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._about, self._scratch = dict(about), scratch
        self._first: xr.Dataset | None = None
        if stored is not None:
            self.steps = stored[STEP.name].values
            self._first = stored.isel({STEP.name: slice(1)}).load()
        self._waiting: list[xr.Dataset] = []
        self._last = time.monotonic()

    @classmethod
    @contextmanager
    def open(
        cls, output: str | os.PathLike[str], about: Mapping[str, Any], *, overwrite: bool = False
    ) -> Iterator[Self]:
        """Open the results of the same function and run; the first results create the store.

        At the end of the ``with`` block, also after an error, all results are written.

        Parameters
        ----------
        output : path-like
        about : mapping
            JSON values: the run and the function.
        overwrite : bool
            Replace an existing store, when the first results are written.

        Raises
        ------
        RunExists
            If the path exists and is not the store of an evaluation.
        RunLocked
            If another process writes to it.
        InvalidArgument
            If it has the results of another function or run, or its complete rows are not known.
        """
        path = local_path(output).absolute()
        with staged_folder(path) as scratch:
            attributes = _attributes(path) if path.exists() else None
            stored = None if attributes is None or overwrite else _stored(path, attributes, about)
            store = cls(path, about, scratch, stored)
            try:
                yield store
            finally:
                store.flush()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the results, sorted."""
        return () if self._first is None else tuple(sorted(map(str, self._first.data_vars)))

    def add(self, result: xr.Dataset) -> None:
        """Append the result of a step.

        Raises
        ------
        InvalidArgument
            If it has another form than the results before.
        """
        if self._first is None:
            self._first = result
        else:
            check_like(result, self._first)
        self._waiting.append(result)
        self.steps = np.append(self.steps, result[STEP.name].values)
        waits = time.monotonic() - self._last >= self.waiting_seconds
        if waits or result.nbytes * len(self._waiting) >= _WAITING_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write all results that wait."""
        self._last = time.monotonic()
        if not self._waiting:
            return
        ds = xr.concat(
            self._waiting, STEP.name, data_vars="all", coords="minimal", compat="override",
            join="override",
        )  # fmt: skip
        complete = len(self.steps) - len(self._waiting)
        with warnings.catch_warnings():
            # "Consolidated metadata is currently not part in the Zarr format 3 specification"
            warnings.simplefilter("ignore", UserWarning)
            if complete:
                group: Any = zarr.open_group(self.path, mode="r+", use_consolidated=False)
                for name, array in group.arrays():
                    if STEP.name in ds[name].dims:
                        array.resize((len(self.steps), *array.shape[1:]))
                        array[complete:] = ds[name].values
                zarr.consolidate_metadata(self.path)
            else:
                new = self._scratch / "new"
                ds.attrs = {EVALUATION: self._about}
                encoding = {
                    name: {"chunks": _chunks(variable)}
                    for name, variable in ds.variables.items()
                    if STEP.name in variable.dims
                }
                ds.to_zarr(new, zarr_format=3, consolidated=True, encoding=encoding)
                move_into_place(new, self.path, old=self._scratch / "old", overwrite=True)
        self._waiting.clear()


def _attributes(path: Path) -> dict[str, Any]:
    """Return the attributes of a store.

    Raises
    ------
    RunExists
        If it is not the store of an evaluation.
    """
    try:
        attributes = zarr.open_group(path, mode="r", use_consolidated=False).attrs.asdict()
    except Exception:  # zarr raises many types for other files
        attributes = {}
    if EVALUATION not in attributes:
        raise RunExists(
            f"{path} is not the store of an evaluation and is not overwritten; choose another path"
        )
    return attributes


def _stored(path: Path, attributes: Mapping[str, Any], about: Mapping[str, Any]) -> xr.Dataset:
    """Return the complete results of a store.

    Raises
    ------
    InvalidArgument
        If they are of another run or function, or cannot be read.
    """
    stored = attributes[EVALUATION]
    fix = "; choose another output, or replace it with overwrite=True"
    for name, given in about.items():
        if stored.get(name) != given:
            raise InvalidArgument(
                f"{path} has results with {name} {stored.get(name)}, got {name} {given}" + fix
            )
    try:
        zarr.open_consolidated(path, mode="r+").attrs.pop("complete_rows", None)  # of 0.4.0
        ds: xr.Dataset = xr.open_zarr(path, chunks=None)
    except Exception as error:  # zarr and xarray raise many types for a damaged store
        raise InvalidArgument(
            f"{path} cannot be continued ({error}), as if an older version was killed" + fix
        ) from error
    return ds


def _chunks(variable: xr.Variable) -> tuple[int, ...]:
    """Chunks of a variable along step: many rows, as results are appended, and whole results."""
    row = math.prod(variable.shape[1:]) * max(variable.dtype.itemsize, 8)
    return (
        min(_MOST_ROWS, max(1, _CHUNK // max(row, 1))),
        *(max(n, 1) for n in variable.shape[1:]),
    )
